"""Coordinate frames. The prompt template declares the frame of the boxes a model emits; it is never guessed.

    abs_orig     pixels of the original picture, as displayed (mmrl.video.media)
    abs_resized  pixels of the picture after the processor's resize (Qwen2.5-VL)
    rel1000      0..1000 of width and height (Qwen2-VL, Qwen3-VL)
    rel1         0..1 of width and height

Only two functions convert, `to_orig` and `from_orig`; both work on boxes (x1, y1, x2, y2) and on points (x, y).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

__all__ = ["CoordFrame", "from_orig", "to_orig"]


class CoordFrame(str, enum.Enum):
    """The frame in which a prompt template asks for coordinates."""

    ABS_ORIG = "abs_orig"
    ABS_RESIZED = "abs_resized"
    REL1000 = "rel1000"
    REL1 = "rel1"

    def extent(self, resized_wh: Sequence[float], orig_wh: Sequence[float]) -> tuple[float, float]:
        """Width and height of the whole picture in this frame."""
        if self is CoordFrame.ABS_ORIG:
            return float(orig_wh[0]), float(orig_wh[1])
        if self is CoordFrame.ABS_RESIZED:
            return float(resized_wh[0]), float(resized_wh[1])
        side = 1000.0 if self is CoordFrame.REL1000 else 1.0
        return side, side


def _frame(frame: CoordFrame | str) -> CoordFrame:
    return frame if type(frame) is CoordFrame else CoordFrame(frame)


def _scale(values: Sequence[float], sx: float, sy: float) -> tuple[float, ...]:
    if len(values) == 4:  # most are boxes or points, and every reward with either comes here
        x1, y1, x2, y2 = values
        return float(x1) * sx, float(y1) * sy, float(x2) * sx, float(y2) * sy
    if len(values) == 2:
        x1, y1 = values
        return float(x1) * sx, float(y1) * sy
    if len(values) % 2:
        raise ValueError(f"expected x, y pairs, found {len(values)} numbers: {list(values)}")
    return tuple(float(v) * (sy if i % 2 else sx) for i, v in enumerate(values))


def to_orig(
    values: Sequence[float],
    frame: CoordFrame,
    resized_wh: Sequence[float],
    orig_wh: Sequence[float],
) -> tuple[float, ...]:
    """Coordinates in `frame` -> pixels of the original picture. Floats, nothing is clipped or rounded."""
    w, h = _frame(frame).extent(resized_wh, orig_wh)
    return _scale(values, orig_wh[0] / w, orig_wh[1] / h)


def from_orig(
    values: Sequence[float],
    frame: CoordFrame,
    resized_wh: Sequence[float],
    orig_wh: Sequence[float],
) -> tuple[float, ...]:
    """Pixels of the original picture -> coordinates in `frame`; the inverse of `to_orig`."""
    w, h = _frame(frame).extent(resized_wh, orig_wh)
    return _scale(values, w / orig_wh[0], h / orig_wh[1])
