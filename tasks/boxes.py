"""Boxes and points as answer text: one grid per frame (units, or thousandths for rel1), rounded once, never to nothing.

python -c "from mmrl.tasks.boxes import format_box; print(format_box((10.2, 8, 60, 61), 'abs_orig'))"
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mmrl.coords import CoordFrame, from_orig, to_orig
from mmrl.rewards.parsing import Box
from mmrl.types import ImageSize

__all__ = [
    "beside",
    "box_to_orig",
    "format_box",
    "format_point",
    "from_picture",
    "grid_step",
    "rounded_box",
]


def grid_step(frame: CoordFrame) -> float:
    """The smallest difference an answer can spell in `frame`: 1, or 0.001 for rel1."""
    return 0.001 if frame is CoordFrame.REL1 else 1.0


def _tick(value: float, frame: CoordFrame) -> int:
    return math.floor(value * (1000 if frame is CoordFrame.REL1 else 1) + 0.5)


def _side(low: float, high: float, frame: CoordFrame) -> tuple[int, int]:
    """A side on the grid: both ends rounded. A side that this would make nothing of is the tick in which its middle lies, for
    the next one need not touch it: 18.6 to 18.9 is [18, 19], not [19, 20]."""
    first, last = _tick(low, frame), _tick(high, frame)
    if last > first:
        return first, last
    middle = math.floor((low + high) / 2 * (1000 if frame is CoordFrame.REL1 else 1))
    return middle, middle + 1


def _ticks(box: Sequence[float], frame: CoordFrame) -> list[int]:
    """A box given in `frame` on the grid of its text; at least one tick wide and high, and upon the box."""
    (x1, x2), (y1, y2) = _side(box[0], box[2], frame), _side(box[1], box[3], frame)
    return [x1, y1, x2, y2]


def _spell(ticks: Sequence[int], frame: CoordFrame) -> str:
    if frame is CoordFrame.REL1:
        return "[" + ", ".join(f"{tick / 1000:.3f}" for tick in ticks) + "]"
    return "[" + ", ".join(str(tick) for tick in ticks) + "]"


def format_box(box: Sequence[float], frame: CoordFrame) -> str:
    """The text of a box given in `frame`: integers, or 3 decimals for rel1, never rounded to zero width or height."""
    frame = CoordFrame(frame)
    return _spell(_ticks(box, frame), frame)


def format_point(point: Sequence[float], frame: CoordFrame) -> str:
    """The text '[x, y]' of a point given in `frame`: integers, or 3 decimals for rel1."""
    frame = CoordFrame(frame)
    return _spell([_tick(value, frame) for value in point], frame)


def from_picture(values: Sequence[float], frame: CoordFrame, size: ImageSize) -> tuple[float, ...]:
    """Boxes or points in pixels of the original picture -> `frame`."""
    return from_orig(values, frame, size.resized_wh, size.orig_wh)


def box_to_orig(values: Sequence[float], frame: CoordFrame, size: ImageSize) -> Box:
    """A box in `frame` -> pixels of the original picture."""
    x1, y1, x2, y2 = to_orig(values, frame, size.resized_wh, size.orig_wh)
    return x1, y1, x2, y2


def rounded_box(box: Sequence[float], frame: CoordFrame, size: ImageSize) -> Box:
    """The best box an answer in `frame` can spell for `box`; both in pixels of the original picture."""
    ticks = _ticks(from_picture(box, frame, size), frame)
    return box_to_orig([tick * grid_step(frame) for tick in ticks], frame, size)


def beside(box: Sequence[float], extent: tuple[float, float], unit: float) -> Box:
    """A box on the `unit` grid that misses `box`: the widest free strip of the picture, or outside it if there is none."""
    (x1, y1, x2, y2), (width, height) = box, extent
    x1, y1, x2, y2 = (
        math.floor(x1 / unit) * unit,
        math.floor(y1 / unit) * unit,
        math.ceil(x2 / unit) * unit,
        math.ceil(y2 / unit) * unit,
    )
    strips: list[Box] = [
        (0, 0, x1, height),
        (x2, 0, width, height),
        (0, 0, width, y1),
        (0, y2, width, height),
    ]
    best = max(strips, key=lambda s: min(s[2] - s[0], s[3] - s[1]))
    if min(best[2] - best[0], best[3] - best[1]) >= 2 * unit:
        return best
    return x2 + unit, y2 + unit, x2 + 11 * unit, y2 + 11 * unit
