"""mmrl's presets on the recorded completions of their peers: the same text, untouched, and both values side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.registry import task_from_spec
from mmrl.task import Task
from mmrl.types import ImageSize, RewardContext, Sample, VideoSize

__all__ = ["FIXTURES", "TOLERANCE", "Fixture", "Value", "fixtures", "values"]

FIXTURES = Path(__file__).resolve().parent.parent / "assets" / "fixtures" / "peers"
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Fixture:
    """One recorded preset: `head` says where the peer's values come from, `cases` are its completions."""

    name: str
    head: Mapping[str, Any]
    cases: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Value:
    """A completion's two values; `peer` is None where the peer's code fails on it. `switched` is ours with the settings that
    give the published number, None where a preset has no such settings."""

    what: str
    text: str
    peer: tuple[float, float] | None
    ours: tuple[float, float]
    reason: str | None
    switched: tuple[float, float] | None

    @property
    def equal(self) -> bool:
        """Total and format agree to 1e-6."""
        return self.peer is not None and _same(self.peer, self.ours)

    @property
    def switch_gives_it(self) -> bool:
        """The published settings agree with the peer to 1e-6."""
        return (
            self.peer is not None and self.switched is not None and _same(self.peer, self.switched)
        )


def _same(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return all(abs(x - y) <= TOLERANCE for x, y in zip(a, b, strict=True))


def fixtures() -> Iterator[Fixture]:
    """All recorded presets, by name."""
    for path in sorted(FIXTURES.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        name = f"{data['task']}:{data['preset']}" + (
            f" {data['variant']}" if data["variant"] else ""
        )
        yield Fixture(name, {k: v for k, v in data.items() if k != "cases"}, tuple(data["cases"]))


def _sample(fixture: Fixture, case: Mapping[str, Any]) -> tuple[Sample, RewardContext]:
    size, resized = tuple(case.get("size", (1000, 1000))), tuple(case.get("resized", (1000, 1000)))
    params = dict(case.get("params", {}))
    task, clip = fixture.head["task"], "duration" in params
    if task == "detection":
        params["categories"] = ["cat", "dog", "sofa"]
    sample = Sample(
        "case",
        task,
        "peers",
        "?",
        case["truth"],
        () if clip else ("a.png",),
        ("a.mp4",) if clip else (),
        params=params,
    )
    frame = CoordFrame.ABS_ORIG if clip else CoordFrame.ABS_RESIZED
    images = () if clip else (ImageSize(size, resized),)
    videos = (VideoSize(size, resized, float(params["duration"])),) if clip else ()
    step, total = case.get("progress", (100, 100))
    return sample, RewardContext(
        step, total, frame, images, num_tokens=24, max_tokens=1024, videos=videos
    )


def _score(
    task: Task, fixture: Fixture, case: Mapping[str, Any]
) -> tuple[tuple[float, float], str | None]:
    sample, ctx = _sample(fixture, case)
    score = task.score(sample, case["text"], ctx)
    return (score.parts["format"], score.value), score.reason


def values(fixture: Fixture) -> list[Value]:
    """Both values of every completion of a preset, in order."""
    made = task_from_spec(
        fixture.head["task"], {"preset": fixture.head["preset"], **fixture.head["settings"]}
    )
    published = fixture.head["published"]
    switched = (
        task_from_spec(fixture.head["task"], {"preset": fixture.head["preset"], **published})
        if published
        else None
    )
    found = []
    for case in fixture.cases:
        peer = case["peer"]
        ours, reason = _score(made, fixture, case)
        other = None if switched is None else _score(switched, fixture, case)[0]
        found.append(
            Value(
                case["what"],
                case["text"],
                None if peer is None else (peer["format"], peer["total"]),
                ours,
                reason,
                other,
            )
        )
    return found
