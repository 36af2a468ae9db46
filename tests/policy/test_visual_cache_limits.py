"""The visual cache when room is short, files vanish and many entries are open: it may cost time, never the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import load_config
from mmrl.errors import ConfigError, MediaError
from mmrl.training.trainer import Trainer
from tests.kits.clip_kit import ALL, TASK, clip, mixed_file, policy_of, sample
from tests.kits.engine_kit import config_file, read_jsonl, small_run

VIDEO = {"kind": "all", "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 6}


def clips(folder: Path, count: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    return [clip(folder, 8, (84, 56), seed) for seed in range(count)]


def prompts_of(p: Any, paths: list[str]) -> list[Any]:
    return [p.encoder(sample((path,), (), n), TASK) for n, path in enumerate(paths)]


CLIP_BYTES = 113_472  # of one of them in the cache


@pytest.mark.slow
def test_a_bound_smaller_than_the_data_evicts_and_trains_on(tmp_path: Path) -> None:
    paths = clips(tmp_path / "clips", 12)
    p = policy_of("qwen2_5_vl", cache=str(tmp_path / "cache"), limit=4 * CLIP_BYTES + 9000)
    free = policy_of("qwen2_5_vl")
    for own, other in zip(prompts_of(p, paths), prompts_of(free, paths), strict=True):
        assert torch.equal(
            p.encoder.visuals.pixels(own.visuals[0]), free.encoder.visuals.pixels(other.visuals[0])
        )
    counts = p.encoder.visuals.store.counts
    assert counts["evicted"] > 0, (
        "room is made: what the process holds open is only a part of the cache"
    )


def test_features_that_find_no_room_stay_in_memory(tmp_path: Path) -> None:
    paths = clips(tmp_path / "clips", 3)
    p = policy_of(
        "qwen2_5_vl", freeze=("vision", "projector"), cache=str(tmp_path / "cache"), limit=1000
    )
    prompts = prompts_of(p, paths)
    found = p.encoder.visuals.features([v for x in prompts for v in x.visuals], p.tower())
    assert len(found) == 3 and p.encoder.visuals.stats.uncached == 3
    again = p.encoder.visuals.features([prompts[0].visuals[0]], p.tower())
    assert torch.equal(again[0].main, found[0].main) and p.encoder.visuals.stats.encoded == 3


def test_memory_is_bounded_also_for_what_is_not_cached(tmp_path: Path) -> None:
    paths = clips(tmp_path / "clips", 8)
    p = policy_of("qwen2_5_vl", cache=str(tmp_path / "cache"), memory=0.0003, limit=1000)
    prompts_of(p, paths)
    held = p.encoder.visuals._pixels
    assert 0 < held.used <= held.limit_bytes
    assert held.used == sum(entry.nbytes for entry, _, _ in held.values.values())


def test_open_files_are_bounded(tmp_path: Path) -> None:
    paths = clips(tmp_path / "clips", 12)
    p = policy_of("qwen2_5_vl", freeze=("vision", "projector"), cache=str(tmp_path / "cache"))
    visuals = p.encoder.visuals
    visuals._pixels.limit_files = visuals._features.limit_files = 3
    before = len(os.listdir("/proc/self/fd"))
    references = [v for x in prompts_of(p, paths) for v in x.visuals]
    for visual in references * 2:
        visuals.features([visual], p.tower())
    assert len(os.listdir("/proc/self/fd")) - before <= 8


def test_what_a_step_has_encoded_cannot_vanish_under_it(tmp_path: Path) -> None:
    path = Path(clip(tmp_path))
    p = policy_of("qwen2_5_vl", memory=0.0)  # nothing stays in memory but what is pinned
    prompt = p.encoder(sample((str(path),)), TASK)
    p.encoder.visuals.pin(prompt.visuals)
    expected = p.encoder.visuals.pixels(prompt.visuals[0])
    path.unlink()
    assert torch.equal(p.encoder.visuals.pixels(prompt.visuals[0]), expected)
    p.encoder.visuals.unpin()
    with pytest.raises(MediaError):
        p.encoder.visuals.pin(prompt.visuals)


@pytest.mark.slow
def test_a_clip_that_vanishes_in_the_middle_of_training_is_one_failed_group(tmp_path: Path) -> None:
    data = mixed_file(tmp_path / "data")
    tree = small_run(
        tmp_path / "runs",
        data,
        train={"steps": 3, "prompts_per_step": 5},
        algorithm={"dynamic_sampling": False},
        data={"video": VIDEO, "prompt_cache_gib": 0.0, "on_error": "record"},
        alarms={"stop": []},
    )
    made: Trainer

    def on_event(kind: str, payload: Any) -> None:
        if kind == "step" and payload["step"] == 1:
            Path(clip(tmp_path / "data")).unlink()

    made = Trainer(load_config(config_file(tmp_path / "c.yaml", tree)), on_event=on_event)
    made.fit()
    failures = read_jsonl(made.folder.path / "failures.jsonl")
    assert {f["id"] for f in failures} == {"m0"} and all(
        "MediaError" in f["reason"] for f in failures
    )
    assert len(read_jsonl(made.folder.path / "metrics.jsonl")) == 3


def test_a_view_whose_pixels_are_gone_costs_the_view_and_not_the_run(tmp_path: Path) -> None:
    data = mixed_file(tmp_path / "data")
    tree = small_run(
        tmp_path / "runs",
        data,
        train={"steps": 2, "prompts_per_step": 5},
        model={"freeze": ["vision", "projector"]},
        algorithm={"dynamic_sampling": False, "contrast": {"kind": "shuffle", "skip": False}},
        data={"video": VIDEO, "on_error": "record"},
        alarms={"stop": []},
    )
    made: Trainer

    def on_event(kind: str, payload: Any) -> None:
        if kind == "step" and payload["step"] == 1:  # prompts and features stay in memory
            made.policy.encoder.visuals._pixels.clear()
            Path(clip(tmp_path / "data")).unlink()

    made = Trainer(load_config(config_file(tmp_path / "c.yaml", tree)), on_event=on_event)
    made.fit()
    failures = read_jsonl(made.folder.path / "failures.jsonl")
    assert [f["id"] for f in failures] == ["m0"] and "no shuffle view: MediaError" in failures[0][
        "reason"
    ]
    lost = [g for g in made.rollouts.rollouter.tally.groups if g.sample.id == "m0"]
    assert len(lost) == 1 and lost[0].rollouts and not lost[0].view and not lost[0].contrast


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        (
            {"max_pixels": 50176},
            r"data\.video\.min_pixels <= data\.video\.max_pixels, found 100352 > 50176: .*min_pixels \(default",
        ),
        (
            {"min_pixels": 5000, "max_pixels": 200},
            r"found 5000 > 200: data\.video\.min_pixels \(configured\)",
        ),
        (
            {"min_pixels": 5000, "max_pixels": 6000, "total_pixels": 100},
            r"total_pixels of at least data\.video\.min_pixels",
        ),
    ],
)
def test_budgets_no_frame_can_meet_are_refused_at_the_start(
    bounds: dict[str, int], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        policy_of(
            "qwen2_5_vl",
            video=ALL.model_copy(update={"min_pixels": None, "max_pixels": None, **bounds}),
        )
