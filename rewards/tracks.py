"""Tracks: one box per time. Model text -> boxes by key, and their IoU with the true boxes over the true keys.

    {"boxes": {"0": [x1, y1, x2, y2], "1.5": [...]}}    {"0": [...], "1.5": [...]}    [[x1, y1, x2, y2], ...]  in the order asked

Keys are seconds (also clock readings) or frame numbers, compared as numbers to 3 decimals; a key given twice ("1" and "1.0"
too) fails the answer: whichever counted, the other would be a second answer. Every number divides by the true keys: a missing
box is a 0, one easy frame cannot score 1, a box at a key nobody asked for earns nothing.

A tube is a track with a time. `tube_viou` is the vIoU of VidSTG and HC-STVG: boxes count only inside both times, and the
denominator is the union of both times, so that neither a tiny nor a huge time pays.

    python -c "from mmrl.rewards.tracks import parse_track; print(parse_track('{\"boxes\": {\"0\": [1, 2, 3, 4]}}'))"
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.rewards.iou import box_iou
from mmrl.rewards.parsing import MAX_COORDINATE, Box, number_list, strip_fence
from mmrl.rewards.times import SpanParse, parse_time, read_json, spans_of

__all__ = [
    "LEVELS",
    "MAX_BOXES",
    "MAX_TRACK_CHARS",
    "OVER",
    "TrackParse",
    "mean",
    "mean_iou",
    "parse_track",
    "success",
    "success_area",
    "track_ious",
    "track_key",
    "track_viou",
    "tube_viou",
]

MAX_TRACK_CHARS = 40_000
"""Longer answers are not parsed ('answer_too_long'): 1000 boxes with keys."""
MAX_BOXES = 1000
"""An answer with more boxes is refused ('too_many_boxes')."""
_EPS = 1e-3  # seconds: keys are rounded to 3 decimals
OVER = ("truth", "shared")
"""What a mean IoU of tracks divides by."""
LEVELS = tuple(k / 100 for k in range(101))
"""Thresholds of the success curve (GOT-10k)."""


@dataclass(frozen=True)
class TrackParse:
    """Boxes by key, or `listed` in the order written; in whatever frame the text uses. `time` is what stood under "time".
    Both empty with the `reason` when parsing failed. A box that cannot be read beside others that can (or beside a time) is
    left out (None in `listed`) and counted in `unreadable`."""

    boxes: Mapping[float, Box] = field(default_factory=dict)
    listed: tuple[Box | None, ...] = ()
    time: SpanParse | None = None
    reason: str | None = None
    unreadable: int = 0


_PLAIN = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")  # most keys: a thousand of them stay fast


class _Unreadable(ValueError):
    """Carries the reason."""


def track_key(text: Any) -> float | None:
    """The number a key stands for, to 3 decimals; None for anything but a time that is not negative."""
    if isinstance(text, str):
        value = float(text) if _PLAIN.fullmatch(text) else parse_time(text.strip())
    else:
        value = float(text) if type(text) in (int, float) and 0 <= text <= 1e9 else None
    return None if value is None else round(value, 3)


def _box(values: Any) -> Box:
    values = number_list(values)
    if values is None:
        raise _Unreadable("not_a_box")
    if len(values) != 4:
        raise _Unreadable("wrong_count")
    # False for nan, infinity and huge integers
    if not all(-MAX_COORDINATE <= v <= MAX_COORDINATE for v in values):
        raise _Unreadable("not_finite" if any(v != v for v in values) else "out_of_range")
    return float(values[0]), float(values[1]), float(values[2]), float(values[3])


def _by_key(table: Mapping[str, Any]) -> tuple[dict[float, Box], list[str]]:
    """Boxes by key, and the reasons of those that cannot be read. Raises _Unreadable for a key given twice, readable or not."""
    boxes: dict[float, Box] = {}
    seen: set[float] = set()
    reasons: list[str] = []
    for text, values in table.items():
        key = track_key(text)
        if key is None:
            reasons.append("not_a_time")
            continue
        if key in seen:
            raise _Unreadable("duplicate_keys")
        seen.add(key)
        try:
            boxes[key] = _box(values)
        except _Unreadable as err:
            reasons.append(str(err))
    return boxes, reasons


def _in_order(items: Sequence[Any]) -> tuple[tuple[Box | None, ...], list[str]]:
    boxes: list[Box | None] = []
    reasons: list[str] = []
    for item in items:
        try:
            boxes.append(_box(item))
        except _Unreadable as err:
            boxes.append(None)
            reasons.append(str(err))
    return tuple(boxes), reasons


def _track(value: Any) -> TrackParse:
    time = None
    if isinstance(value, dict):
        if "time" in value:
            time = spans_of(value["time"])
        if "boxes" in value:
            value = value["boxes"]
        elif time is not None:
            raise _Unreadable("no_boxes")
    if not isinstance(value, (dict, list)):
        raise _Unreadable("not_a_track")
    timed = time is not None and time.reason is None
    if not value and not timed:
        raise _Unreadable("no_boxes")
    if len(value) > MAX_BOXES:
        raise _Unreadable("too_many_boxes")
    if isinstance(value, dict):
        boxes, reasons = _by_key(value)
        if reasons and not boxes and not timed:
            raise _Unreadable(reasons[0])
        return TrackParse(boxes, time=time, unreadable=len(reasons))
    listed, reasons = _in_order(value)
    if len(reasons) == len(listed) and reasons and not timed:
        raise _Unreadable(reasons[0])
    return TrackParse(listed=listed, time=time, unreadable=len(reasons))


def parse_track(answer: str) -> TrackParse:
    """The track of an answer text; the text must be one JSON value and nothing else.

    Reasons: answer_too_long, not_a_track, no_boxes, too_many_boxes, duplicate_keys, not_a_time (a key), not_a_box,
    wrong_count, not_finite, out_of_range. What is wrong with "time" stands in `time.reason`. Never raises on any text.
    """
    if len(answer) > MAX_TRACK_CHARS:
        return TrackParse(reason="answer_too_long")
    try:
        return _track(read_json(strip_fence(answer), broken_numbers=True))
    except _Unreadable as err:
        return TrackParse(reason=str(err))
    except (ValueError, RecursionError) as err:
        return TrackParse(
            reason="duplicate_keys" if str(err).startswith("duplicate keys") else "not_a_track"
        )


# from tracks to numbers


def track_ious(
    predicted: Mapping[float, Sequence[float]], true: Mapping[float, Sequence[float]]
) -> list[float]:
    """IoU at every true key, in its order; 0 where the prediction has no box."""
    return [box_iou(predicted[key], box) if key in predicted else 0.0 for key, box in true.items()]


def mean_iou(
    predicted: Mapping[float, Sequence[float]],
    true: Mapping[float, Sequence[float]],
    over: str = "truth",
) -> float:
    """Mean IoU over the true keys, a missing box being 0; with over 'shared' over the keys both sides have (EasyVideoR1, and
    OneThinker for tubes), where one easy frame is worth as much as all of them."""
    if over == "shared":
        true = {key: box for key, box in true.items() if key in predicted}
    return min(1.0, mean(track_ious(predicted, true)))


def mean(values: Sequence[float]) -> float:
    """Their mean, 0 for none."""
    return sum(values) / len(values) if values else 0.0


def track_viou(
    predicted: Mapping[float, Sequence[float]],
    true: Mapping[float, Sequence[float]],
    span: Sequence[float] | None = None,
) -> float:
    """vIoU: the sum of the IoUs over the true keys, divided by the number of true keys and of predicted keys outside `span`.

    `span` is the true time (default: from the first true key to the last). Predicted keys inside it that have no true box
    are not judged: annotations may be coarser than answers. Where the answer names a time of its own, see `tube_viou`.
    """
    if not true:
        return 0.0
    first, last = (min(true), max(true)) if span is None else (min(*span, *true), max(*span, *true))
    outside = sum(key < first or key > last for key in predicted)
    return sum(track_ious(predicted, true)) / (len(true) + outside)


def tube_viou(
    predicted: Mapping[float, Sequence[float]],
    predicted_span: Sequence[float],
    true: Mapping[float, Sequence[float]],
    true_span: Sequence[float],
    step: float = 1.0,
) -> float:
    """vIoU of two tubes, in [0, 1]: the sum of the IoUs at true keys inside the predicted time, over the union of both times.

    The union is counted in true keys, plus the length of the predicted time outside the true one in units of `step` (seconds
    between keys): where both times lie on that grid, these are the frames of VidSTG's denominator. A time holds its start and
    not its end. Where the truth has a key at its end, or a little outside its time (rounded to whole seconds), the predicted
    time is read in the same way, so that the truth itself is worth 1. A predicted time without length is worth 0, and so is
    one that ends before it starts.
    """
    (start, end), (first, last) = predicted_span, true_span
    if not true or not start < end:
        return 0.0
    early, late = max(0.0, first - min(true)), max(true) - last
    # a key at the end: the end belongs to it
    late = max(0.0, late) + 2 * _EPS if late > -_EPS else 0.0
    total = sum(
        box_iou(predicted[key], box)
        for key, box in true.items()
        if key in predicted and start - early - _EPS <= key < end + late
    )
    outside = (end - start) - max(0.0, min(end, last + late) - max(start, first - early))
    return total / (len(true) + max(0.0, outside) / step)


def success(ious: Sequence[float], level: float) -> float:
    """Share of IoUs above `level` (GOT-10k: strictly above)."""
    return mean([float(iou > level) for iou in ious])


def success_area(ious: Sequence[float]) -> float:
    """Area under the success curve: the mean success over 101 thresholds from 0 to 1 (close to the mean IoU, AO)."""
    # levels below each IoU
    return mean([bisect.bisect_left(LEVELS, iou) for iou in ious]) / len(LEVELS)
