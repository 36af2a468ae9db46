"""The supervised warm start: the loss falls to a learnt answer, steps are what they say, nonsense stops it."""
from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import load_config
from mmrl.errors import NonFiniteError
from mmrl.policy.pack import PackItem, pack
from mmrl.policy.policy import Policy
from mmrl.sft import gold_ids, run_sft
from tasks.scenes import make_scenes
from tests.engine_kit import album_data, cli, config_file, fresh_policy, picture, sample_with, small_run, weights_of


def settings(tmp_path: Path, **sections: Any) -> Any:
    data = album_data(tmp_path / "data", [[picture((56, 56), i)] * (i % 3) for i in range(6)])
    return load_config(config_file(tmp_path / "c.yaml", small_run(tmp_path / "runs", data, **sections)))


def test_loss_falls_and_the_answer_is_learnt(tmp_path: Path) -> None:
    c = settings(tmp_path, train={"steps": 25, "prompts_per_step": 4, "token_budget": 60}, optim={"lr": 0.01})
    p, seen = fresh_policy(path=c.model.path), []
    last = run_sft(p, c, lambda step, metrics: seen.append((step, metrics)))
    assert [s for s, _ in seen] == list(range(1, 26)) and last == seen[-1][1]
    losses = [m["loss"] for _, m in seen]
    assert losses[0] > 3 and losses[-1] < 0.3 and all(m["grad_norm"] > 0 for _, m in seen)
    from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
    from tests.album_task import Album

    prompt = p.encoder(sample_with([picture((56, 56), 2)]), Album())
    ((answer,),) = PrefillOnceEngine(p).generate([Request(prompt, 1, greedy=True)], SamplingSettings(max_new_tokens=8))
    assert answer.text == "abc" and answer.stop.value == "eos"


def test_first_loss_is_the_mean_over_all_answer_tokens_whatever_the_budget(tmp_path: Path) -> None:
    from mmrl.data import PromptStream, load_sources

    losses = []
    for budget in (1, 10**6):
        c = settings(tmp_path, train={"steps": 1, "prompts_per_step": 4, "token_budget": budget})
        losses.append(run_sft(fresh_policy(path=c.model.path), c)["loss"])
    p: Policy = fresh_policy(path=c.model.path)
    stream = PromptStream(load_sources(c.data.train), c.seed)
    items = [PackItem(p.encoder(s, t), (gold_ids(p, s, t),)) for s, t in (stream.draw() for _ in range(4))]
    assert all(i.completions[0][-1] == p.eos_ids[0] for i in items)
    assert losses == pytest.approx([-float(p.logp(pack(items)).logp_N.mean().detach())] * 2, rel=1e-5)


def test_stops_when_the_loss_is_not_finite(tmp_path: Path) -> None:
    c = settings(tmp_path, train={"steps": 3})
    p = fresh_policy(path=c.model.path)
    with torch.no_grad():
        p.base.model.language_model.norm.weight[0] = math.nan
    before = {n: q.detach().clone() for n, q in p.model.named_parameters()}
    with pytest.raises(NonFiniteError, match=r"step 1: the gradient norm is nan; lower optim\.lr"):
        run_sft(p, c)
    assert all(torch.equal(q.nan_to_num(), before[n].nan_to_num()) for n, q in p.model.named_parameters()), (
        "not one step"
    )


def test_frozen_parts_stay(tmp_path: Path) -> None:
    c = settings(tmp_path, train={"steps": 2}, model={"freeze": ["vision", "projector"]})
    p = fresh_policy(path=c.model.path, freeze=c.model.freeze)
    before = {n: q.detach().clone() for n, q in p.model.named_parameters()}
    run_sft(p, c)
    changed = {n for n, q in p.model.named_parameters() if not torch.equal(q, before[n])}
    assert changed and not any("visual" in n for n in changed)


@pytest.mark.slow
def test_command_line_writes_a_model_that_can_be_trained_further(tmp_path: Path) -> None:
    scenes = make_scenes(tmp_path / "scenes", 8, seed=0)
    tree = small_run(tmp_path / "runs", scenes, data={"train": [{"task": "grounding", "path": scenes}]})
    config = config_file(tmp_path / "c.yaml", tree)
    out, _ = cli("sft", config, "--out", str(tmp_path / "model"))
    assert str(tmp_path / "model") in out
    trained, initial = dict(weights_of(tmp_path / "model")), dict(weights_of(Path(tree["model"]["path"])))
    assert trained.keys() == initial.keys() and not all(torch.equal(trained[n], initial[n]) for n in trained)
    fresh_policy(path=str(tmp_path / "model"))
