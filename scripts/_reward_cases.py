"""Every reward mmrl offers, as (task, parameters, range), for the fuzzer, the throughput benchmark and the tests.

A new task or preset must appear here: tests/scripts/test_fuzz_rewards.py compares this list with the registry and the presets.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.registry import BUILT_IN, resolve_task, task_from_spec
from mmrl.task import Task
from mmrl.types import ImageSize, RewardContext, Sample, VideoSize
from mmrl.video.media import image_size

__all__ = ["MODES", "RewardCase", "all_cases", "contexts", "example_samples"]

MODES: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "grounding": tuple(
        {"mode": m} for m in ("iou", "giou", "static", "dynamic", "average", "smooth")
    ),
    "detection": (
        {"accuracy": {"threshold": "dynamic"}},
        {"mode": "vlm_r1_map"},
        {"mode": "od_length"},
        {"mode": "weighted_sum"},
    ),
    "counting": ({"mode": "smooth"}, {"mode": "relative"}, {"mode": "points"}),
    # not ocr's ned, cer and anls: where missing characters are as dear as wrong ones, a guessed character never costs and may
    # match, so junk can pay a little; the default, indel, is there for that reason
    "ocr": ({"mode": "exact"}, {"mode": "token_f1"}, {"mode": "wer"}),
    "open_text": ({"mode": "rouge"}, {"mode": "token_f1"}),
    "temporal_grounding": (
        {"mode": "matched"},
        {"mode": "near"},
        {"time_frame": "rel1", "spans": "one"},
        {"spelling": "clock", "spans": "one"},
        {"answer_format": "think", "weights": {"accuracy": 0.8, "format": 0.1, "anchors": 0.1}},
    ),
    "grounded_qa": ({"mode": "gated"},),
    "st_grounding": ({"mode": "viou"},),
    "tracking": ({"mode": "viou"}, {"count_first": True}),
}
"""Parameters worth a case of their own, beside a task's defaults and its presets."""


@dataclass(frozen=True)
class RewardCase:
    """One reward as a user would configure it; `name` is 'task' or 'task:what differs from the default'."""

    name: str
    task: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Task:
        """A fresh task with these parameters."""
        return task_from_spec(self.task, dict(self.params))


def all_cases() -> Iterator[RewardCase]:
    """Defaults, presets and modes of every built-in task but 'mixed', which only dispatches to the others."""
    for task in BUILT_IN:
        if task == "mixed":
            continue
        yield RewardCase(task, task)
        for preset in getattr(resolve_task(task), "presets", {}):
            yield RewardCase(f"{task}:{preset}", task, {"preset": preset})
        for params in MODES.get(task, ()):
            yield RewardCase(f"{task}:" + ",".join(str(v) for v in params.values()), task, params)


def example_samples(task: Task, count: int = 12) -> list[Sample]:
    """A few samples of the task's own generated data."""
    with tempfile.TemporaryDirectory() as folder:
        path = task.example_data(folder)
        assert path is not None, f"task {task.name} has no example data"
        samples = list(itertools.islice(task.load(path), count))
        for sample in samples:  # the pictures go with the folder, their sizes stay
            for number, image in enumerate(sample.images):
                _SIZES[sample.id, number] = image_size(image)
    return samples


_SIZES: dict[tuple[str, int], tuple[int, int]] = {}


def contexts(sample: Sample) -> list[RewardContext]:
    """Contexts of a finished answer in every coordinate frame, the resize of pictures and clips being a mild one."""

    def resized(width: int, height: int) -> tuple[int, int]:
        return max(28, round(width / 28) * 28), max(28, round(height / 28) * 28)

    images = tuple(
        ImageSize(size, resized(*size))
        for size in (_SIZES[sample.id, n] for n in range(len(sample.images)))
    )
    size = (sample.params.get("width", 0), sample.params.get("height", 0))
    videos = tuple(
        VideoSize(size, resized(*size), float(sample.params["duration"])) for _ in sample.videos
    )
    return [
        RewardContext(1, 1, frame, images, num_tokens=24, max_tokens=1024, videos=videos)
        for frame in CoordFrame
    ]


def results_folder() -> Path:
    """Where measured results go."""
    return Path(__file__).resolve().parent.parent / "assets" / "results"
