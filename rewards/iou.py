"""Intersection over union of boxes: the one routine for rewards and for evaluation.

Boxes are (x1, y1, x2, y2) floats in one common frame; areas are (x2 - x1) * (y2 - y1) without any +1. A degenerate box
(x2 <= x1, y2 <= y1, or not finite) has IoU 0 with everything and never raises.

    python -c "from mmrl.rewards.iou import box_iou; print(box_iou((0, 0, 2, 2), (1, 0, 3, 2)))"
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

__all__ = ["box_giou", "box_iou", "is_proper", "outside_share", "pairwise_giou", "pairwise_iou"]

# N predicted boxes, M true boxes; boxes_N4 has one box per row


def is_proper(box: Sequence[float]) -> bool:
    """True when the four numbers are finite and enclose an area."""
    x1, y1, x2, y2 = box
    return x2 > x1 and y2 > y1 and math.isfinite((x2 - x1) * (y2 - y1)) and math.isfinite(x1 + y1)


def box_iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection over union of two boxes, in [0, 1]; 0 when either is degenerate."""
    x1, y1, x2, y2 = a
    u1, v1, u2, v2 = b
    width = (u2 if u2 < x2 else x2) - (u1 if u1 > x1 else x1)
    height = (v2 if v2 < y2 else y2) - (v1 if v1 > y1 else y1)
    # most boxes that miss are no more work than this
    if not (width > 0 and height > 0 and is_proper(a) and is_proper(b)):
        return 0.0
    overlap = width * height
    union = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - overlap
    # areas can underflow to 0 for tiny boxes
    return min(1.0, overlap / union) if union > 0 else 0.0


def box_giou(a: Sequence[float], b: Sequence[float]) -> float:
    """Generalised IoU scaled to [0, 1]: (GIoU + 1) / 2, GIoU = IoU - (hull - union) / hull (Rezatofighi et al., 2019).

    Equal boxes give 1, touching neighbours of equal size 0.5, far boxes approach 0: unlike IoU it still tells disjoint
    boxes apart. 0 when either box is degenerate.
    """
    if not (is_proper(a) and is_proper(b)):
        return 0.0
    x1, y1, x2, y2 = a
    u1, v1, u2, v2 = b
    width = (u2 if u2 < x2 else x2) - (u1 if u1 > x1 else x1)
    height = (v2 if v2 < y2 else y2) - (v1 if v1 > y1 else y1)
    overlap = width * height if width > 0 and height > 0 else 0.0
    union = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - overlap
    hull = ((x2 if u2 < x2 else u2) - (x1 if u1 > x1 else u1)) * (
        (y2 if v2 < y2 else v2) - (y1 if v1 > y1 else v1)
    )
    if not (union > 0 and 0 < hull < math.inf):
        return 0.0
    giou = overlap / union - (hull - union) / hull
    return min(1.0, max(0.0, (giou + 1.0) / 2.0))


def outside_share(box: Sequence[float], width: float, height: float) -> float:
    """Share of the box's area outside the picture (0, 0, width, height), in [0, 1]; 1 for a degenerate box."""
    if not is_proper(box):
        return 1.0
    inner_w = min(box[2], width) - max(box[0], 0.0)
    inner_h = min(box[3], height) - max(box[1], 0.0)
    inner = inner_w * inner_h if inner_w > 0 and inner_h > 0 else 0.0
    area = (box[2] - box[0]) * (box[3] - box[1])
    return min(1.0, max(0.0, 1.0 - inner / area)) if area > 0 else 1.0


def _as_boxes(boxes: npt.ArrayLike) -> Floats:
    array = np.asarray(boxes, dtype=np.float64)
    array = array.reshape(0, 4) if array.size == 0 else array
    if array.ndim != 2 or array.shape[1] != 4:
        raise ValueError(
            f"expected boxes of shape (N, 4), found {array.shape}; wrap a single box in a list"
        )
    return array


def _pairwise(
    boxes_a: npt.ArrayLike, boxes_b: npt.ArrayLike
) -> tuple[Floats, Floats, Floats, npt.NDArray[np.bool_]]:
    """Overlap, union and hull areas (N, M), and which pairs consist of two proper boxes. One (N, M) array per corner:
    several times faster for many boxes than one (N, M, 2) array of corners."""
    a_N4, b_M4 = _as_boxes(boxes_a), _as_boxes(boxes_b)
    (x1, y1, x2, y2), proper_N = _columns(a_N4)
    (u1, v1, u2, v2), proper_M = _columns(b_M4)
    width_NM = np.minimum(x2[:, None], u2) - np.maximum(x1[:, None], u1)
    height_NM = np.minimum(y2[:, None], v2) - np.maximum(y1[:, None], v1)
    overlap_NM = np.maximum(width_NM, 0.0) * np.maximum(height_NM, 0.0)
    union_NM = ((x2 - x1) * (y2 - y1))[:, None] + (u2 - u1) * (v2 - v1) - overlap_NM
    hull_NM = (np.maximum(x2[:, None], u2) - np.minimum(x1[:, None], u1)) * (
        np.maximum(y2[:, None], v2) - np.minimum(y1[:, None], v1)
    )
    return overlap_NM, union_NM, hull_NM, proper_N[:, None] & proper_M & (union_NM > 0)


def _columns(boxes_N4: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """(4, N) coordinates with improper boxes set to 0, and `is_proper` of every box."""
    x1, y1, x2, y2 = boxes_N4.T
    with np.errstate(invalid="ignore", over="ignore"):
        proper_N = (x2 > x1) & (y2 > y1) & np.isfinite((x2 - x1) * (y2 - y1)) & np.isfinite(x1 + y1)
    return np.where(proper_N, boxes_N4.T, 0.0), proper_N


def pairwise_iou(boxes_a: npt.ArrayLike, boxes_b: npt.ArrayLike) -> Floats:
    """IoU of every pair: (N, 4) and (M, 4) -> (N, M), equal to `box_iou`. Raises ValueError for other shapes."""
    overlap, union, _, valid = _pairwise(boxes_a, boxes_b)
    return np.minimum(1.0, np.divide(overlap, union, out=np.zeros_like(overlap), where=valid))


def pairwise_giou(boxes_a: npt.ArrayLike, boxes_b: npt.ArrayLike) -> Floats:
    """Scaled generalised IoU of every pair: (N, 4) and (M, 4) -> (N, M), equal to `box_giou` per pair."""
    overlap, union, hull, valid = _pairwise(boxes_a, boxes_b)
    valid = valid & (hull > 0) & np.isfinite(hull)
    iou = np.divide(overlap, union, out=np.zeros_like(overlap), where=valid)
    empty = np.divide(hull - union, hull, out=np.ones_like(overlap), where=valid)
    return np.where(valid, np.clip((iou - empty + 1.0) / 2.0, 0.0, 1.0), 0.0)
