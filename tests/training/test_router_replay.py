"""Runs with routing replay: what the update's experts are called with, on one process and several, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.config import load_config, rollout_engine
from mmrl.errors import ConfigError, MismatchError
from mmrl.evaluation.settings import eval_settings
from mmrl.policy.routing import TurnExperts
from mmrl.rollout.group_generator import sampling_settings
from mmrl.rollout.vllm_engine import check_sampling
from mmrl.training.samples import SampleBuilder
from mmrl.training.sequences import RolloutTargets
from mmrl.training.trainer import Trainer
from mmrl.types import Rollout, RolloutGroup, Sample, StopReason, Turn
from tests.kits.engine_kit import (
    album_data,
    cli,
    config_file,
    merge,
    picture,
    read_jsonl,
    small_run,
    tiny_folder,
)

MOE = "qwen3_vl_moe"
TWICE = {"epochs": 2, "importance_sampling_level": "sequence", "dynamic_sampling": False}


def replay(mode: str, **algorithm: Any) -> dict[str, Any]:
    return {"algorithm": {**TWICE, "router_replay": {"mode": mode}, **algorithm}}


def tree(folder: Path, name: str, *changes: dict[str, Any]) -> dict[str, Any]:
    """Two steps of three prompts with pictures, two passes of one micro-batch each; a rate that moves many tokens elsewhere."""
    data = album_data(folder / "data", [[picture((56, 56), i)] * (i % 2 + 1) for i in range(4)])
    whole = small_run(
        folder / "runs",
        data,
        name=name,
        model={"path": tiny_folder(MOE)},
        train={"token_budget": 4000},
        algorithm=dict(TWICE),  # changes are written into it
    )
    for change in changes:
        merge(whole, change)
    return whole


def make(folder: Path, name: str, *changes: dict[str, Any], resume: bool = False) -> Trainer:
    config = load_config(config_file(folder / f"{name}.yaml", tree(folder, name, *changes)))
    return Trainer(config, resume=resume)


def rows(trainer: Trainer) -> list[dict[str, Any]]:
    clock = ("time/", "speed/", "memory/")
    found = read_jsonl(trainer.folder.path / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in found]


def same(a: Trainer, b: Trainer) -> bool:
    theirs = dict(b.policy.model.named_parameters())
    return all(torch.equal(p, theirs[n]) for n, p in a.policy.model.named_parameters())


@contextmanager
def called(trainer: Trainer) -> Iterator[list[list[Any]]]:
    """The (T, k) experts that each layer computes with, forward by forward, of those with gradients."""
    forwards: list[list[Any]] = []
    modules = [m for n, m in trainer.policy.model.named_modules() if n.endswith("mlp.experts")]

    def see(module: Any, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            if module is modules[0]:
                forwards.append([])
            forwards[-1].append(args[1].tolist())

    hooks = [m.register_forward_pre_hook(see) for m in modules]
    yield forwards
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("mode", ["disabled", "R2", "R3"])
def test_the_second_pass_has_the_experts_of_the_first(mode: str, tmp_path: Path) -> None:
    """Without replay it has others."""
    trainer = make(tmp_path, "run", replay(mode))
    with called(trainer) as forwards:
        trainer.fit()
    assert len(forwards) == 4, "two steps of two passes of one micro-batch"
    equal = [first == second for first, second in zip(forwards[::2], forwards[1::2], strict=True)]
    if mode == "R2":
        assert equal == [True, True]
    elif mode == "disabled":
        assert equal == [False, False]
    else:  # nothing has read the last token of an answer: 9 of each step's may go elsewhere
        for first, second in zip(forwards[::2], forwards[1::2], strict=True):
            for a, b in zip(first, second, strict=True):
                apart = (np.sort(a, -1) != np.sort(b, -1)).any(-1)
                assert apart.sum() <= 9 and not apart[:20].any()
    for row in rows(trainer):
        if mode == "disabled":
            assert not any(key.startswith("train/router/") for key in row)
        else:
            assert 0 < row["train/router/changed_layers"] <= row["train/router/changed"] <= 0.5
            assert math.isfinite(row["train/loss"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_other_ways_to_train_are_the_same_run(mode: str, tmp_path: Path) -> None:
    """Sharded weights, activations computed again and a pipelined schedule replay what one process does; a run that stopped and was
    resumed goes on as it would have."""
    plain = make(tmp_path, "plain", replay(mode))
    plain.fit()
    pipelined = {"schedule": {"kind": "pipelined", "order": "key"}}
    ways = {
        "fsdp2": [{"engine": {"train": "fsdp2"}}],
        "again": [{"model": {"gradient_checkpointing": True}}],
        "both": [{"engine": {"train": "fsdp2"}, "model": {"gradient_checkpointing": True}}],
        "pipelined": [pipelined],
    }
    for name, changes in ways.items():
        other = make(tmp_path, name, replay(mode), *changes)
        other.fit()
        for mine, theirs in zip(rows(plain), rows(other), strict=True):
            for key in ("loss", "grad_norm", "router/changed", "router/changed_layers"):
                found = theirs[f"train/{key}"]
                assert found == pytest.approx(mine[f"train/{key}"], rel=1e-4, abs=1e-7), (name, key)
    make(tmp_path, "stopped", replay(mode), {"train": {"steps": 1}}).fit()
    resumed = make(tmp_path, "stopped", replay(mode), resume=True)
    resumed.fit()
    assert same(plain, resumed) and rows(plain)[1] == rows(resumed)[-1]


@pytest.mark.slow
def test_micro_batches_and_minibatches_replay_the_whole_step(tmp_path: Path) -> None:
    """Groups that are split behind copies of their prompt, in three optimizer steps, in rows of their own, with a critic."""
    for name, changes in {
        "split": [replay("R2", epochs=1, minibatches=3), {"train": {"token_budget": 30}}],
        "padded": [replay("R2"), {"train": {"forward": "padded"}}],
        "critic": [
            replay("R3", advantage="gae", importance_sampling_level="token"),
            {"train": {"token_budget": 30}},
        ],
    }.items():
        trainer = make(tmp_path, name, *changes)
        trainer.fit()
        assert all(0 < row["train/router/changed"] < 1 for row in rows(trainer)), name


@pytest.mark.slow
def test_a_generator_process_sends_the_experts_of_stale_rollouts(tmp_path: Path) -> None:
    """Async: the weights have moved on, and the update still computes with the rollouts' experts, in its one optimizer step."""
    apart = {
        "engine": {"generator": {"kind": "process"}},
        "schedule": {"kind": "async", "staleness": 2},
        "train": {"steps": 4},
    }
    trainer = make(tmp_path, "apart", replay("R3", epochs=1), apart)
    trainer.fit()
    found = rows(trainer)
    assert max(row["train/staleness"] for row in found) > 0
    for row in found:
        stale = row["train/staleness"] > 0
        assert (row["train/router/changed"] > 0) == stale, found


@pytest.mark.slow
def test_the_command_line_trains_a_mixture_with_replay(tmp_path: Path) -> None:
    file = config_file(tmp_path / "run.yaml", tree(tmp_path, "run"))
    cli("train", file, "algorithm.router_replay.mode=R3", "train.steps=1")
    (row,) = read_jsonl(tmp_path / "runs" / "run" / "metrics.jsonl")
    assert 0 < row["train/router/changed"] < 1


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.router_replay.mode=R2"], "epochs 1 and minibatches 1: the only step"),
        (["algorithm.router_replay.mode=R3", "engine.rollout=vllm"], "mmrl's own engine"),
        (
            [
                "algorithm.router_replay.mode=R3",
                "schedule.kind=async",
                "schedule.staleness=1",
                "engine.generator.kind=process",
                "schedule.partial_rollouts=true",
            ],
            "rollouts of one version each",
        ),
        (["algorithm.router_replay.mode=R1"], "disabled"),
    ],
)
def test_what_replay_does_not_go_with_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, overrides)
    assert load_config(None, ["algorithm.router_replay.mode=R2", "algorithm.minibatches=2"])


def test_vllm_is_never_asked_for_experts() -> None:
    with pytest.raises(ConfigError, match="found R3, for which vLLM"):
        check_sampling(sampling_settings(load_config(None, ["algorithm.router_replay.mode=R3"])))


def test_an_evaluation_notes_no_experts() -> None:
    """Nobody would use them, and a run with R3 may be evaluated by vLLM."""
    config = load_config(None, ["algorithm.router_replay.mode=R3"])
    assert sampling_settings(config).routed_experts
    check_sampling(eval_settings(config).sampling)


def test_an_automatic_rollout_engine_is_the_one_that_notes_experts() -> None:
    config = load_config(None, ["algorithm.router_replay.mode=R3"])
    choice = rollout_engine(config, "cuda", "qwen2_5_vl")
    assert choice.name == "own" and "R3" in choice.why


def test_an_automatic_rollout_engine_of_a_mixture_is_mmrls_own() -> None:
    """Where one family has both kinds, the text model decides."""
    found = {}
    for arch in ("internvl", "internvl:qwen3_moe", "qwen3_vl_moe"):
        config = load_config(None, [f"model.path={tiny_folder(arch)}"])
        found[arch] = "mixture's experts" in rollout_engine(config, "cuda").why
    assert found == {"internvl": False, "internvl:qwen3_moe": True, "qwen3_vl_moe": True}


@pytest.mark.parametrize("arch", ["qwen3_vl", "internvl", "internvl:qwen3"])
def test_dense_models_are_refused_before_weights_are_read(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.AutoModelForImageTextToText.from_pretrained",
        lambda *a, **k: pytest.fail("read weights"),
    )
    dense = {"model": {"path": tiny_folder(arch)}}
    told = f"of family {arch.partition(':')[0]}, in which all tokens"
    with pytest.raises(ConfigError, match=told) as error:
        make(tmp_path, "dense", replay("R3"), dense)
    assert all(name in str(error.value) for name in (MOE, "glm4v_moe", "kimi_k25", "qwen3_5_moe"))


def test_what_no_rollout_wrote_has_the_prompts_experts_alone() -> None:
    """A demonstration and a past success; a rollout without experts is an error, not a run without replay."""
    sample = Sample("s", "album", "albums", "?", None)
    prompt = np.zeros((4, 2, 2), np.uint8)
    experts = TurnExperts(prompt, np.ones((1, 2, 2), np.uint8))
    turn = Turn((7, 8), "x", (0.0, 0.0), StopReason.EOS)
    told, own = Rollout((turn,)), Rollout((replace(turn, experts=experts),))
    group = RolloutGroup(sample, (replace(told, offline=True), own, replace(told, replayed=True)))
    policy = SimpleNamespace(token_mask=lambda turn: np.ones(len(turn.token_ids), bool))
    config = load_config(None, ["algorithm.router_replay.mode=R3"])
    builder = SampleBuilder(
        config,
        policy,
        prompt_of=lambda group: SimpleNamespace(),
        longest=9,
        asynchronous=False,  # type: ignore[arg-type, return-value]
    )
    targets = [RolloutTargets.of_outcome(0.0, 1)] * 3
    found = [s.turns[0].experts for s in builder.of(group, targets)]
    assert found[1] is experts and found[0].prompt_PLk is found[2].prompt_PLk is prompt
    assert [len(e.written_NLk) for e in found] == [0, 1, 0]
    with pytest.raises(MismatchError, match="R3 needs the experts of each rollout"):
        list(builder.of(replace(group, rollouts=(told,) * 3), targets))
