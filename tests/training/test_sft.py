"""The supervised warm start: the loss falls to a learnt answer, steps are what they say, nonsense stops it."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.cli.display import Display
from mmrl.cli.run import sft_command
from mmrl.config import RunConfig, load_config
from mmrl.data.sources import PromptStream, load_sources
from mmrl.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from mmrl.policy.manifest import has_manifest, problems
from mmrl.policy.pack import PackItem, pack
from mmrl.policy.policy import Policy
from mmrl.tasks.scenes import make_scenes
from mmrl.training.gold_answers import gold_ids
from mmrl.training.sft import run_sft
from tests.kits.clip_kit import VIDEO, broken_clip, cached_policy, make_clip
from tests.kits.engine_kit import (
    REPO,
    album_data,
    cli_here,
    config_file,
    fresh_policy,
    picture,
    sample_with,
    small_run,
    weights_of,
)


def settings(tmp_path: Path, **sections: Any) -> Any:
    data = album_data(tmp_path / "data", [[picture((56, 56), i)] * (i % 3) for i in range(6)])
    return load_config(
        config_file(tmp_path / "c.yaml", small_run(tmp_path / "runs", data, **sections))
    )


@pytest.mark.slow
def test_loss_falls_and_the_answer_is_learnt(tmp_path: Path) -> None:
    c = settings(
        tmp_path, train={"steps": 25, "prompts_per_step": 4, "token_budget": 60}, optim={"lr": 0.01}
    )
    p, seen = fresh_policy(path=c.model.path), []
    last = run_sft(p, c, lambda step, metrics: seen.append((step, metrics)))
    assert [s for s, _ in seen] == list(range(1, 26)) and last == seen[-1][1]
    losses = [m["loss"] for _, m in seen]
    assert losses[0] > 3 and losses[-1] < 0.3 and all(m["grad_norm"] > 0 for _, m in seen)
    from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
    from tests.kits.album_task import Album

    prompt = p.encoder(sample_with([picture((56, 56), 2)]), Album())
    ((answer,),) = PrefillOnceEngine(p).generate(
        [Request(prompt, 1, greedy=True)], SamplingSettings(max_new_tokens=8)
    )
    assert answer.text == "abc" and answer.stop.value == "eos"


def test_first_loss_is_the_mean_over_all_answer_tokens_whatever_the_budget(tmp_path: Path) -> None:
    losses = []
    for budget in (1, 10**6):
        c = settings(tmp_path, train={"steps": 1, "prompts_per_step": 4, "token_budget": budget})
        losses.append(run_sft(fresh_policy(path=c.model.path), c)["loss"])
    p: Policy = fresh_policy(path=c.model.path)
    stream = PromptStream(load_sources(c.data.train), c.seed)
    items = [
        PackItem(p.encoder(s, t), (gold_ids(p, s, t),))
        for s, t in (stream.draw() for _ in range(4))
    ]
    assert all(i.completions[0][-1] == p.eos_ids[0] for i in items)
    assert losses == pytest.approx(
        [-float(p.logp(pack(items)).logp_N.mean().detach())] * 2, rel=1e-5
    )


def test_stops_when_the_loss_is_not_finite(tmp_path: Path) -> None:
    c = settings(tmp_path, train={"steps": 3})
    p = fresh_policy(path=c.model.path)
    with torch.no_grad():
        p.base.model.language_model.norm.weight[0] = math.nan
    before = {n: q.detach().clone() for n, q in p.model.named_parameters()}
    with pytest.raises(NonFiniteError, match=r"step 1: the gradient norm is nan; lower optim\.lr"):
        run_sft(p, c)
    assert all(
        torch.equal(q.nan_to_num(), before[n].nan_to_num()) for n, q in p.model.named_parameters()
    ), "not one step"


def test_frozen_parts_stay(tmp_path: Path) -> None:
    c = settings(tmp_path, train={"steps": 2}, model={"freeze": ["vision", "projector"]})
    p = fresh_policy(path=c.model.path, freeze=c.model.freeze)
    before = {n: q.detach().clone() for n, q in p.model.named_parameters()}
    run_sft(p, c)
    changed = {n for n, q in p.model.named_parameters() if not torch.equal(q, before[n])}
    assert changed and not any("visual" in n for n in changed)


def with_missing(tmp_path: Path, missing: int, rows: int = 6, **train: Any) -> Any:
    """A run over `rows` prompts, the last `missing` of which have a picture that is not there."""
    pictures = [
        [picture((56, 56), i)] if i < rows - missing else [str(tmp_path / f"gone-{i}.png")]
        for i in range(rows)
    ]
    tree = small_run(
        tmp_path / "runs",
        album_data(tmp_path / "data", pictures),
        train={"steps": 1, "prompts_per_step": rows, **train},
        data={"on_error": "record"},
    )
    return load_config(config_file(tmp_path / "c.yaml", tree))


def test_a_picture_that_cannot_be_read_is_left_out_of_the_loss_and_recorded(tmp_path: Path) -> None:
    c = with_missing(tmp_path, 1)
    metrics = run_sft(fresh_policy(path=c.model.path), c)
    p = fresh_policy(path=c.model.path)
    good = [
        (s, src.task)
        for src in load_sources(c.data.train)
        for s in src.samples
        if "gone" not in s.images[0]
    ]
    items = [PackItem(p.encoder(s, t), (gold_ids(p, s, t),)) for s, t in good]
    assert len(items) == 5 and metrics["tokens"] == sum(len(i.completions[0]) for i in items)
    assert metrics["loss"] == pytest.approx(
        -float(p.logp(pack(items)).logp_N.mean().detach()), rel=1e-5
    )
    assert metrics["failed"] == 1
    (failure,) = metrics["failures"]
    assert (failure["step"], failure["id"]) == (1, "album-5") and "gone-5.png" in failure["reason"]


def test_failures_of_all_steps_are_kept(tmp_path: Path) -> None:
    c = with_missing(tmp_path, 1, steps=3)
    counts: list[int] = []
    last = run_sft(fresh_policy(path=c.model.path), c, lambda step, m: counts.append(m["failed"]))
    assert counts == [1, 1, 1] and [f["step"] for f in last["failures"]] == [1, 2, 3]


@pytest.mark.parametrize(("missing", "rows"), [(2, 6), (1, 1)])
def test_too_many_that_cannot_be_read_stop_the_warm_start(
    tmp_path: Path, missing: int, rows: int
) -> None:
    c = with_missing(tmp_path, missing, rows)
    p = fresh_policy(path=c.model.path)
    before = {n: q.detach().clone() for n, q in p.model.named_parameters()}
    told = rf"step 1: .*found {missing} of {rows} that cannot \(limit 20%\); fix or remove.*first: .*album-.*gone"
    with pytest.raises(DataError, match=told):
        run_sft(p, c)
    assert all(torch.equal(q, before[n]) for n, q in p.model.named_parameters()), "not one step"


@pytest.mark.slow
def test_media_workers_change_nothing_but_who_decodes(tmp_path: Path) -> None:
    options = {"options": ["left", "right"], "width": 84, "height": 56, "duration": 2.0}
    clips = [*(make_clip(tmp_path, f"clip{n}") for n in range(6)), broken_clip(tmp_path)]
    rows = [
        {
            "id": f"r{n}",
            "question": "Which?",
            "answer": "AB"[n % 2],
            "video": clip,
            "params": options,
        }
        for n, clip in enumerate(clips)
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8"
    )
    found = []
    for workers in (0, 2):
        cache = tmp_path / f"cache{workers}"
        c = RunConfig.model_validate(
            small_run(
                tmp_path / "runs",
                "",
                train={"steps": 4, "prompts_per_step": 5},
                data={
                    "train": [{"task": "choice", "path": str(tmp_path / "rows.jsonl")}],
                    "workers": workers,
                    "on_error": "record",
                    "cache": {"dir": str(cache)},
                    "video": VIDEO.model_dump(),
                },
            )
        )
        p, seen = cached_policy(cache, ()), list[Any]()
        run_sft(
            p,
            c,
            lambda step, m, seen=seen: seen.append({k: v for k, v in m.items() if k != "seconds"}),
        )
        assert (p.encoder.visuals.stats.built == 0) == bool(workers), (
            "with workers this process decodes nothing"
        )
        found.append((seen, {n: q.detach() for n, q in p.model.named_parameters()}))
    (alone, mine), (together, other) = found
    assert alone == together and alone[-1]["failures"] and mine.keys() == other.keys()
    assert all(torch.equal(mine[n], other[n]) for n in mine)


@pytest.mark.slow
def test_command_line_writes_a_model_that_can_be_trained_further(tmp_path: Path) -> None:
    scenes = make_scenes(tmp_path / "scenes", 8, seed=0)
    tree = small_run(
        tmp_path / "runs", scenes, data={"train": [{"task": "grounding", "path": scenes}]}
    )
    config = config_file(tmp_path / "c.yaml", tree)
    out = cli_here("sft", config, "--out", str(tmp_path / "model"))
    assert str(tmp_path / "model") in out
    trained, initial = (
        dict(weights_of(tmp_path / "model")),
        dict(weights_of(Path(tree["model"]["path"]))),
    )
    assert trained.keys() == initial.keys() and not all(
        torch.equal(trained[n], initial[n]) for n in trained
    )
    fresh_policy(path=str(tmp_path / "model"))
    # made once more in the same folder, and then damaged: a flipped bit
    assert has_manifest(tmp_path / "model") and not problems(tmp_path / "model")
    cli_here("sft", config, "train.steps=1", "--overwrite", "--out", str(tmp_path / "model"))
    assert not problems(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    found = bytearray(weights.read_bytes())
    found[-1] ^= 1
    weights.write_bytes(found)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        fresh_policy(path=str(tmp_path / "model"))


@pytest.mark.slow
def test_nothing_that_is_there_is_written_over_unasked(tmp_path: Path) -> None:
    model = tmp_path / "base"
    shutil.copytree(REPO / "assets" / "tiny_vlm", model)
    thesis = tmp_path / "mine" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    data = album_data(tmp_path / "data", [[picture((56, 56), i)] for i in range(4)])
    sections = {"train": {"steps": 1, "prompts_per_step": 2}, "model": {"path": str(model)}}
    recipe = Path(
        config_file(tmp_path / "c.yaml", small_run(tmp_path / "runs", data, name="one", **sections))
    )
    before = {file: file.read_bytes() for file in sorted(model.iterdir())}
    for out, overwrite, words in (
        (model, False, "another folder than that of the model that is trained"),
        (model, True, "another folder than that of the model that is trained"),
        (thesis.parent, False, r"a new or empty folder, found files in .*--overwrite"),
        (thesis.parent, True, r"found no config\.json in .*; it holds something else"),
    ):
        with pytest.raises(ConfigError, match=words):
            sft_command(recipe, [], out, overwrite=overwrite, quiet=True)
    assert before == {file: file.read_bytes() for file in sorted(model.iterdir())}
    assert thesis.read_text() == "years of work"
    sft_command(recipe, [], quiet=True)  # to dir/NAME_sft/model
    made = tmp_path / "runs" / "one_sft" / "model"
    (made / "old-00001.safetensors").write_bytes(b"a shard of the old one")
    first = (made / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="found files in"):
        sft_command(recipe, ["seed=1"], quiet=True)
    sft_command(recipe, ["optim.lr=1e-3"], overwrite=True, quiet=True)
    assert (made / "model.safetensors").read_bytes() != first
    assert not (made / "old-00001.safetensors").exists() and problems(made) == []


class Ended(RuntimeError):
    """What a test ends a run with, as a kill would: nothing is written after it."""


def ends_at(monkeypatch: pytest.MonkeyPatch, last: int, number: int = 0) -> None:
    """The next run of the command line dies after that step, or gets a signal in it."""
    seen = Display.step

    def step(self: Display, done: int, *rest: Any) -> None:
        seen(self, done, *rest)
        if done == last and number:
            os.kill(os.getpid(), number)
        elif done == last:
            raise Ended

    monkeypatch.setattr(Display, "step", step)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["killed", "told to end", "lora"])
def test_a_warm_start_that_was_interrupted_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    data = album_data(tmp_path / "data", [[picture((56, 56), i)] * (i % 3) for i in range(6)])
    sections = {
        "train": {
            "steps": 6,
            "prompts_per_step": 3,
            "save_every": 0 if way == "told to end" else 2,
        },
        "optim": {"lr": 1e-3, "schedule": "cosine"},
        **({"model": {"lora": {"r": 4}}} if way == "lora" else {}),
    }
    recipe = Path(config_file(tmp_path / "c.yaml", small_run(tmp_path, data, **sections)))
    sft_command(recipe, [], tmp_path / "whole", quiet=True)
    whole = (tmp_path / "whole" / "model.safetensors").read_bytes()
    with monkeypatch.context() as m:
        told = way == "told to end"
        ends_at(m, 4 if told else 5, signal.SIGTERM if told else 0)
        with pytest.raises((Ended, SystemExit)) as ended:
            sft_command(recipe, [], tmp_path / "cut", quiet=True)
    kept = tmp_path / "cut_checkpoints"
    assert [p.name for p in kept.glob("step_*")] == ["step_000004"] and not (
        tmp_path / "cut"
    ).exists()
    if told:
        assert (
            ended.value.code == 143 and "the same command and --resume" in capsys.readouterr().err
        )
    with pytest.raises(
        ConfigError, match=r"no unfinished run .* step 4 in .*--resume.*--overwrite"
    ):
        sft_command(recipe, [], tmp_path / "cut", quiet=True)
    with pytest.raises(
        ConfigError, match=r"no longer be the same run.*optim\.lr was 0\.001, now 0\.1"
    ):
        sft_command(recipe, ["optim.lr=0.1"], tmp_path / "cut", resume=True, quiet=True)
    steps = []
    with monkeypatch.context() as m:
        m.setattr(Display, "step", lambda self, done, *_: steps.append(done))
        sft_command(recipe, [], tmp_path / "cut", resume=True, quiet=True)
    assert steps == [5, 6] and (tmp_path / "cut" / "model.safetensors").read_bytes() == whole
    assert not kept.exists() and problems(tmp_path / "cut") == []
    # what a message asks for that came before the first checkpoint: the run begins
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    sft_command(recipe, [], tmp_path / "link", resume=True, quiet=True)
    assert (tmp_path / "empty" / "model.safetensors").read_bytes() == whole
    assert (tmp_path / "link").is_symlink()


@pytest.mark.slow
def test_what_makes_it_another_run_is_said_before_a_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = album_data(tmp_path / "data", [[picture((56, 56), i)] for i in range(4)])
    sections = {
        "train": {"steps": 3, "prompts_per_step": 2, "save_every": 1},
        "optim": {"schedule": "constant"},
    }
    recipe = Path(config_file(tmp_path / "c.yaml", small_run(tmp_path, data, **sections)))
    with monkeypatch.context() as m:
        ends_at(m, 2)
        with pytest.raises(Ended):
            sft_command(recipe, [], tmp_path / "model", quiet=True)
    (step,) = (tmp_path / "model_checkpoints").glob("step_*")
    with monkeypatch.context() as m:
        m.setattr("mmrl.training.gold_answers.load_policy", None)  # nothing is loaded
        for changed, words in (
            ("model.lora={r: 4}", r"model\.lora.* was None, now "),
            ("model.freeze=[vision]", r"model\.freeze was "),
            ("optim.schedule=cosine", r"optim\.schedule was 'constant', now 'cosine'"),
        ):
            with pytest.raises(
                ConfigError, match=rf"same run\. Changed since: .*{words}.*--overwrite"
            ):
                sft_command(recipe, [changed], tmp_path / "model", resume=True, quiet=True)
    weights = step / "model.safetensors"
    kept = weights.read_bytes()
    flipped = bytes([*kept[:-1], kept[-1] ^ 1])
    for damaged in (kept[:1000], flipped):
        weights.write_bytes(damaged)
        with pytest.raises(
            CheckpointError, match=r"every one damaged: step 1: model\.safetensors.*--overwrite"
        ):
            sft_command(recipe, [], tmp_path / "model", resume=True, quiet=True)
    weights.write_bytes(kept)
    # of another section than those that a warm start reads, and more steps at a constant rate
    longer = ["train.steps=4", "algorithm.clip_high=0.3"]
    sft_command(recipe, longer, tmp_path / "model", resume=True, quiet=True)
    whole = tmp_path / "whole"
    sft_command(recipe, longer, whole, quiet=True)
    assert (whole / "model.safetensors").read_bytes() == (
        tmp_path / "model" / "model.safetensors"
    ).read_bytes()
