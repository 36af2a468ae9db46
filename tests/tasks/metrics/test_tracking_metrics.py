"""GOT-10k's numbers against the box IoU of rewards, its exclusions, its files; tubes; what was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import DataError
from mmrl.rewards.iou import box_iou
from mmrl.tasks.metrics.tracking import asked_frames, got10k, rect_iou, success_curve
from mmrl.tasks.st_grounding import SpatioTemporalGrounding
from mmrl.tasks.tracking import Tracking
from mmrl.types import RewardContext, Sample

CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG)
side = st.integers(0, 30)
rects = st.lists(
    st.tuples(side, side, st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=6
)


def _corners(rect: Any) -> tuple[float, ...]:
    x, y, w, h = rect
    return x, y, x + w, y + h


@settings(max_examples=80, deadline=None)
@given(rects, rects, st.booleans())
def test_rect_iou_is_box_iou(a: list[Any], b: list[Any], clipped: bool) -> None:
    count = min(len(a), len(b))
    a, b = a[:count], b[:count]

    def shown(rect: Any) -> tuple[float, ...]:
        return tuple(min(v, 25) for v in _corners(rect)) if clipped else _corners(rect)

    expected = [box_iou(shown(p), shown(g)) for p, g in zip(a, b, strict=True)]
    assert rect_iou(a, b, (25, 25) if clipped else None).tolist() == pytest.approx(expected)


def test_first_frame_and_hidden_frames_are_left_out() -> None:
    truth, far, half = [0, 0, 10, 10], [50, 50, 10, 10], [0, 0, 5, 10]
    predictions = {"a": [far, truth, half, far], "b": [truth, truth]}
    truths = {"a": [truth] * 4, "b": [truth] * 2}
    assert got10k(predictions, truths) == pytest.approx(
        {"AO": 2.5 / 4, "SR0.50": 0.5, "SR0.75": 0.5}
    )
    assert got10k(predictions, truths, covers={"a": [8, 8, 8, 0]})["AO"] == pytest.approx(2.5 / 3)
    assert got10k({"a": predictions["a"]}, truths)["AO"] == pytest.approx(1.5 / 4), (
        "a missing sequence counts as 0"
    )
    assert got10k({}, {"a": [truth]}) == {} == got10k({}, {})
    assert got10k({"a": [truth, [0, 0, 100, 10]]}, {"a": [truth, truth]}, sizes={"a": (10, 10)})[
        "AO"
    ] == pytest.approx(1)
    with pytest.raises(DataError, match="as many boxes"):
        got10k({"a": [truth]}, {"a": [truth] * 2})
    with pytest.raises(DataError, match="visible share per frame"):
        got10k(predictions, truths, covers={"b": [8]})


def test_success_is_strict_and_falls() -> None:
    curve = success_curve([0.5, 0.505, 1.0])
    assert (
        curve[50] == pytest.approx(2 / 3)
        and curve[100] == 0
        and curve[0] == 1
        and np.all(np.diff(curve) <= 0)
    )


def _track(name: str, count: int, **params: Any) -> Sample:
    return Sample(
        name,
        "tracking",
        "got",
        "bird",
        {"boxes": {str(k): [10.0, 10.0, 30.0, 40.0] for k in range(count)}},
        videos=(f"val/{name}",),
        params={"width": 100, "height": 80, "duration": 4.0, **params},
    )


def _score(task: Any, sample: Sample, boxes: dict[Any, list[float]] | None, **more: Any) -> Any:
    text = "lost" if boxes is None else f"<answer>{json.dumps({**more, 'boxes': boxes})}</answer>"
    return sample, task.score(sample, text, CTX)


def test_whole_sequences_become_got10k_files(tmp_path: Path) -> None:
    task, frames = Tracking(), {"keys": "frames", "frame_count": 4, "first_box": True}
    box = [10, 10, 30, 40]
    pairs = [
        _score(task, _track("GOT-10k_Val_000001", 4, **frames), {0: box, 1: box, 3: box}),
        _score(task, _track("b c", 4, **frames), None),
        _score(task, _track("asked", 3), {0: box, 1: box, 2: box}),
    ]
    numbers = task.benchmark(pairs, tmp_path)
    assert numbers["AO"] == pytest.approx((2 / 3 + 0) / 2) == numbers["SR0.50"]
    assert numbers["mIoU"] == pytest.approx((0.75 + 0 + 1) / 3)
    assert numbers["mIoU_after_first"] == pytest.approx((2 / 3 + 0 + 1) / 3)
    place = tmp_path / "GOT-10k" / "mmrl"
    assert sorted(p.name for p in place.iterdir()) == ["GOT-10k_Val_000001", "b_c"]
    rows = np.loadtxt(place / "GOT-10k_Val_000001" / "GOT-10k_Val_000001_001.txt", delimiter=",")
    assert rows.tolist() == [[10, 10, 20, 30], [10, 10, 20, 30], [0, 0, 0, 0], [10, 10, 20, 30]]
    lines = [json.loads(line) for line in (tmp_path / "tracking.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ["GOT-10k_Val_000001", "b c", "asked"] and lines[1][
        "pred"
    ] == {}
    assert "AO" not in task.benchmark(pairs[2:], tmp_path), "a few asked frames have no AO"
    assert task.benchmark([], tmp_path) == {} == asked_frames([])
    hostile = _score(
        task,
        _track("../../x", 2, keys="frames", frame_count=2, sequence="../../x"),
        {0: box, 1: box},
    )
    task.benchmark([hostile], tmp_path)
    assert not (tmp_path.parent / "x").exists() and all(
        p.resolve().is_relative_to(place) for p in place.rglob("*")
    )


def test_tubes(tmp_path: Path) -> None:
    task, box = SpatioTemporalGrounding(), [10.0, 10.0, 30.0, 40.0]
    sample = Sample(
        "1",
        "st_grounding",
        "s",
        "dog",
        {"time": [2.0, 4.0], "boxes": {"2": box, "3": box}},
        videos=("7.mp4",),
        params={"width": 100, "height": 80, "duration": 9.0},
    )
    pairs = [
        _score(task, sample, {"2": box, "3": box}, time=[2, 4]),
        _score(task, sample, {"2": box}, time=[2, 3]),
        _score(task, sample, None),
    ]
    assert task.benchmark(pairs, tmp_path) == pytest.approx(
        {"m_tIoU": 0.5, "m_vIoU": 0.5, "vIoU@0.3": 2 / 3, "vIoU@0.5": 1 / 3}
    )
    apart = [
        _score(task, sample, {"2": box, "3": box}, time=time)
        for time in ([6, 8], [2, 6], [0, 9], [3, 5])
    ]
    assert task.benchmark(apart, tmp_path) == pytest.approx(
        {
            "m_tIoU": (0 + 2 / 4 + 2 / 9 + 1 / 3) / 4,
            "m_vIoU": (0 + 2 / 4 + 2 / 9 + 1 / 3) / 4,
            "vIoU@0.3": 2 / 4,
            "vIoU@0.5": 0,
        }
    )
    task.benchmark(pairs, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "st_grounding.jsonl").read_text().splitlines()]
    assert (
        rows[1]["pred"] == {"time": [2, 3], "boxes": {"2": box}}
        and rows[2]["pred"] is None
        and task.benchmark([], tmp_path) == {}
    )
