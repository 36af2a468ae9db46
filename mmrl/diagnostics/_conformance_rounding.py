"""What rounding to a coordinate frame's grid does to a right answer: an answer that is right as well as it can be spelled is no
mistake of the task, and a box thinner than the grid is none of the data.

    geometry(score)              # (predicted, true) boxes and points of an answer
    only_rounded(score, ctx)     # True: they differ by the rounding of the frame
    too_thin(score)              # True: so much that the right answer looks wrong
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from mmrl.coords import CoordFrame
from mmrl.diagnostics._conformance_pictures import boxes_of, points_of
from mmrl.types import ImageSize, RewardContext, Score, VideoSize

__all__ = ["HALF", "geometry", "only_rounded", "too_thin"]

HALF = 0.5
"""IoU, and score of a gold answer, below which rounding makes the right answer look wrong."""


def geometry(score: Score) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]] | None:
    """(predicted, true) boxes and points of an answer, aligned; None where there are none or their numbers differ.

    A point that answers a box (a click) is compared with the box's middle.
    """
    detail = score.detail
    boxes, true_boxes = boxes_of(detail, "pred_boxes"), boxes_of(detail, "gold_boxes")
    tracks, true_tracks = (detail.get(name) for name in ("pred_tracks", "gold_tracks"))
    if isinstance(tracks, Mapping) and isinstance(true_tracks, Mapping):
        if tracks.keys() != true_tracks.keys():
            return None
        boxes = [*boxes, *(tuple(tracks[key]) for key in true_tracks)]
        true_boxes = [*true_boxes, *(tuple(box) for box in true_tracks.values())]
    points, true_points = points_of(detail, "pred_points"), points_of(detail, "gold_points")
    if points and not true_points:
        true_points = [((x1 + x2) / 2, (y1 + y2) / 2) for x1, y1, x2, y2 in true_boxes]
        true_boxes = true_boxes if boxes else []
    true_boxes, true_points = (
        true if mine else [] for mine, true in ((boxes, true_boxes), (points, true_points))
    )
    labels, true_labels = detail.get("pred_labels"), detail.get("gold_labels")
    if not (boxes or points) or len(boxes) != len(true_boxes) or len(points) != len(true_points):
        return None
    return (
        None
        if labels is not None and true_labels is not None and labels != true_labels
        else ([*boxes, *points], [*true_boxes, *true_points])
    )


def only_rounded(score: Score, ctx: RewardContext) -> bool:
    """True when the answer's boxes and points are the truth's to one step of the frame's grid (1, or 0.001 for rel1)."""
    if (found := geometry(score)) is None:
        return False
    grid = 0.001 if ctx.frame is CoordFrame.REL1 else 1.0
    sizes: tuple[ImageSize | VideoSize, ...] = (*ctx.images, *ctx.videos)
    for size in sizes:
        extent = ctx.frame.extent(size.resized_wh, size.orig_wh)
        step = [grid * o / e + 1e-6 for o, e in zip(size.orig_wh, extent, strict=True)]
        if all(
            abs(a - b) <= s
            for mine, true in zip(*found, strict=True)
            for a, b, s in zip(mine, true, itertools.cycle(step), strict=False)
        ):
            return True
    return False


def _overlap(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection over union of two boxes."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    inside = max(0.0, width) * max(0.0, height)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inside
    return inside / union if union > 0 else 0.0


def too_thin(score: Score) -> bool:
    """Whether some true box is so thin that its rounded self overlaps it by less than half.

    Asked of answers that are `only_rounded`: predicted and true boxes stand in the same order. (Clicks into thin elements are
    spelled with decimals.)
    """
    mine, true = geometry(score) or ([], [])
    return any(
        len(box) == 4 and _overlap(box, other) < HALF for box, other in zip(mine, true, strict=True)
    )
