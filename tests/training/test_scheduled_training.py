"""Overlapped training of VLMs: the groups and weights of serial runs, resumed runs, staleness and its correction, files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import load_config
from mmrl.errors import ConfigError
from mmrl.robotics.config import load_embodied
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import (
    ALBUM,
    album_data,
    config_file,
    merge,
    picture,
    read_jsonl,
    small_run,
)

CLOCK = ("time/", "speed/", "memory/", "schedule/", "train/staleness")
ALONE = {"train": {"token_budget": 1}, "rollout": {"batch_tokens": 1}}
"""Every group is a micro-batch of its own and every completion a batch of its own, whatever it is asked together with."""


pytestmark = pytest.mark.slow


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Nine rows of pictures, of which groups mostly have signal, and three rows without any: they are replaced."""
    rows = [[picture(((112, 84), (56, 56), (84, 112))[i % 3], i)] * (i % 3) for i in range(9)]
    return (album_data(tmp_path / "data", rows), album_data(tmp_path / "data", rows[:3], "flat"))


def make(folder: Path, files: tuple[str, str], name: str, *changes: dict[str, Any]) -> Any:
    train = [
        {"task": ALBUM, "path": files[0]},
        {"task": ALBUM, "path": files[1], "params": {"value": 0.5}, "weight": 0.5},
    ]
    tree = small_run(
        folder / "runs",
        files[0],
        name=name,
        data={"train": train},
        train={"steps": 3, "prompts_per_step": 4, "keep_last": 9},
        optim={"lr": 0.005, "schedule": "cosine", "warmup_steps": 2},
    )
    for change in changes:
        merge(tree, json.loads(json.dumps(change)))
    return load_config(config_file(folder / f"{name}.yaml", tree))


def run(
    folder: Path, files: tuple[str, str], name: str, *changes: dict[str, Any], resume: bool = False
) -> Trainer:
    trainer = Trainer(make(folder, files, name, *changes), resume=resume)
    trainer.fit()
    return trainer


def scheduled(kind: str, **options: Any) -> dict[str, Any]:
    return {"schedule": {"kind": kind, **options}}


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in trainer.policy.model.named_parameters()}


def same(a: Trainer, b: Trainer) -> bool:
    return all(torch.equal(p, weights(b)[n]) for n, p in weights(a).items())


def rows(trainer: Trainer) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if not k.startswith(CLOCK)}
        for row in read_jsonl(trainer.folder.path / "metrics.jsonl")
    ]


def rollouts(trainer: Trainer) -> list[Any]:
    return [read_jsonl(p) for p in sorted((trainer.folder.path / "rollouts").glob("*.jsonl"))]


@pytest.mark.parametrize("order", ["key", "arrival"])
def test_pipelined_is_serial_bit_for_bit_where_the_micro_batches_are_the_same(
    order: str, tmp_path: Path, files: tuple[str, str]
) -> None:
    serial = run(tmp_path, files, "serial", ALONE)
    pipelined = run(tmp_path, files, "pipelined", ALONE, scheduled("pipelined", order=order))
    assert (
        same(serial, pipelined)
        and rows(serial) == rows(pipelined)
        and rollouts(serial) == rollouts(pipelined)
    )
    assert serial.rollouts.rollouter.state_dict() == pipelined.rollouts.rollouter.state_dict()
    assert sum(r["train/groups/no_signal"] for r in rows(serial)) > 0, (
        "places were refilled, and in the same way"
    )
    assert all(r["train/groups/kept"] > 1 for r in rows(serial))


@pytest.mark.parametrize(
    "algorithm", [{"epochs": 2, "minibatches": 2}, {"advantage_scale": "batch"}]
)
def test_steps_that_need_all_groups_are_serial_ones_bit_for_bit(
    algorithm: dict[str, Any], tmp_path: Path, files: tuple[str, str]
) -> None:
    """Groups are kept until the last has closed, and trained on in the micro-batches of serial runs."""
    changes = {"algorithm": algorithm, "rollout": {"batch_tokens": 1}, "train": {"steps": 2}}
    serial = run(tmp_path, files, "serial", changes)
    pipelined = run(tmp_path, files, "pipelined", changes, scheduled("pipelined"))
    assert (
        not pipelined.learner.streams
        and same(serial, pipelined)
        and rows(serial) == rows(pipelined)
    )


def test_with_its_own_waves_a_pipelined_run_is_serial_to_rounding_and_overlaps(
    tmp_path: Path, files: tuple[str, str]
) -> None:
    serial = run(tmp_path, files, "serial", {"train": {"steps": 2}})
    pipelined = run(
        tmp_path, files, "pipelined", {"train": {"steps": 2}}, scheduled("pipelined", timeline=2)
    )
    assert pipelined.learner.streams
    for a, b in zip(rows(serial), rows(pipelined), strict=True):
        assert a.keys() == b.keys()
        for key in (
            "train/reward/mean",
            "train/loss",
            "train/grad_norm",
            "train/entropy",
            "train/groups/kept",
        ):
            assert a[key] == pytest.approx(b[key], rel=2e-4, abs=1e-6), key
    assert not any(
        k.startswith("schedule/") for k in read_jsonl(serial.folder.path / "metrics.jsonl")[0]
    )
    assert not (serial.folder.path / "timeline").exists()
    folder = pipelined.folder.path / "timeline"
    assert {p.name for p in folder.glob("step_*")} == {"step_000001.json", "step_000002.json"}
    events = [
        e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"
    ]
    spans = {
        kind: [e["ts"] for e in events if e["name"] == kind]
        for kind in ("infer", "reward", "train")
    }
    trained = [
        e["ts"]
        for e in events
        if e["name"] == "train" and e["args"]["kind"] == "add" and e["args"]["step"] == 1
    ]
    answered = [e["ts"] for e in events if e["name"] == "infer" and e["args"]["step"] == 1]
    assert all(spans.values()) and min(trained) < max(answered), (
        "the first group was trained on before the last was answered"
    )
    row = read_jsonl(pipelined.folder.path / "metrics.jsonl")[-1]
    assert row["schedule/busy/train"] > 0 and row["train/staleness"] == 0


def test_a_resumed_pipelined_run_is_the_whole_one(tmp_path: Path, files: tuple[str, str]) -> None:
    keyed = scheduled("pipelined", order="key", wave=2)
    whole = run(tmp_path, files, "whole", keyed)
    expected, learned = rows(whole), {n: p.clone() for n, p in weights(whole).items()}
    shutil.copytree(whole.folder.path, tmp_path / "runs" / "cut", symlinks=True)
    for step in (2, 3):
        shutil.rmtree(tmp_path / "runs" / "cut" / "checkpoints" / f"step_{step:06d}")
    cut = run(tmp_path, files, "cut", keyed, resume=True)
    assert cut.start_step == 1 and rows(cut) == expected and rollouts(cut) == rollouts(whole)
    assert all(torch.equal(p, learned[n]) for n, p in weights(cut).items())
    with pytest.raises(ConfigError, match=r"schedule\.kind was 'pipelined', now 'serial'"):
        run(tmp_path, files, "cut", resume=True)


class Eager(Trainer):
    """Holds the policy for a whole wave. Otherwise training comes first whenever both could go on, and nothing gets old."""

    @contextmanager
    def open_runtime(self) -> Iterator[None]:
        with super().open_runtime():
            generator = self.rollouts.rollouter.generator  # type: ignore[attr-defined]
            generate = generator.generate

            def whole(tickets: Any) -> Any:
                with self.pipeline.exclusive():
                    return generate(tickets)

            generator.generate = whole
            yield


@pytest.mark.parametrize(
    "changes",
    [
        scheduled("async", wave=4),
        {"algorithm": {"epochs": 2}, **scheduled("async", wave=4, correction="mask")},
    ],
)
def test_async_keeps_its_bound_measures_staleness_and_saves_what_it_has_not_trained(
    changes: dict[str, Any], tmp_path: Path, files: tuple[str, str]
) -> None:
    trainer = Eager(make(tmp_path, files, "async", {"train": {"steps": 4}}, changes))
    trainer.fit()
    found = read_jsonl(trainer.folder.path / "metrics.jsonl")
    assert len(found) == 4 and all(r["train/staleness"] <= 1 for r in found)
    late = [r for r in found if r["train/offpolicy/share"] > 0]
    assert all(
        0 < r["train/offpolicy/weight"] <= 2 and 0 <= r["train/offpolicy/masked"] <= 1 for r in late
    )
    assert all(
        r["train/logprob_gap/max"] is None or r["train/logprob_gap/max"] < 1e-4 for r in found
    ), "of current weights only"
    # the position in a checkpoint is that after its step, however far the rollout had come
    for step in (1, 2, 3, 4):
        state = json.loads((trainer.checkpoints.path(step) / "trainer" / "state.json").read_text())
        drawn = sum(r["train/groups/asked"] - r["train/groups/carried"] for r in found[:step])
        assert state["schedule"]["stream"]["draws"] == drawn
    shutil.rmtree(trainer.checkpoints.path(4))
    again = run(tmp_path, files, "async", {"train": {"steps": 4}}, changes, resume=True)
    assert again.start_step == 3 and len(read_jsonl(again.folder.path / "metrics.jsonl")) == 4


@pytest.mark.parametrize(("mode", "threshold"), [("truncate", 1.01), ("mask", 1.01), ("none", 2.0)])
def test_the_correction_weighs_tokens_of_older_weights(
    mode: str, threshold: float, tmp_path: Path, files: tuple[str, str]
) -> None:
    """Against the gradient of weight * advantage * log-prob, written down by itself."""
    from mmrl.policy.pack import PackItem, pack

    trainer = Trainer(
        make(
            tmp_path,
            files,
            "one",
            scheduled("async", correction=mode, threshold=threshold),
            {"algorithm": {"clip_low": 1.0, "clip_high": 50.0, "dual_clip": None}},
        )
    )
    with trainer.open_runtime():
        trainer.policy.publish()
        group = next(iter(trainer.rollouts.rollouter.groups(1)))
        with torch.no_grad():
            for _, p in trainer.policy.trainable():
                p += 0.01 * torch.randn_like(p)
        trainer.policy.publish()
        trainer.learner.begin(2)
        trainer.learner.add(group)
        mine = {n: p.grad.clone() for n, p in trainer.policy.trainable() if p.grad is not None}
        trainer.optimizer.zero_grad(set_to_none=True)
        sample, task = trainer.rollouts.rollouter.stream.find(group.sample.source, group.sample.id)
        turns = [t.turns[0] for t in group.rollouts]
        item = PackItem(trainer.policy.encoder(sample, task), tuple(c.token_ids for c in turns))
        logp_N = trainer.policy.logp(pack([item])).logp_N
        advantages = trainer.learner.advantages.assign([group])[group.key]
        advantage_N = torch.tensor(
            [a for a, c in zip(advantages, turns, strict=True) for _ in c.token_ids]
        )
        ratio_N = (logp_N.detach() - torch.tensor([x for c in turns for x in c.logprobs])).exp()
        assert (ratio_N > threshold).any() or mode == "none"
        weight_N = {
            "none": ratio_N,
            "truncate": ratio_N.clamp(max=threshold),
            "mask": torch.where(ratio_N > threshold, 0.0, ratio_N),
        }[mode]
        (-(weight_N * advantage_N) * logp_N).sum().backward()
        expected = {n: p.grad for n, p in trainer.policy.trainable() if p.grad is not None}
    assert mine.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(
            mine[name], grad, rtol=1e-3, atol=1e-5 * float(grad.abs().max() + 1)
        )


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.staleness of at least 1"):
        load_config(None, ["schedule.kind=async", "schedule.staleness=0"])
    with pytest.raises(ConfigError, match=r"schedule\.wave"):
        load_config(None, ["schedule.wave=0"])
    with pytest.raises(ConfigError, match=r"remove it; simulators are split by schedule\.stages"):
        load_embodied(None, ["schedule.wave=2"])
