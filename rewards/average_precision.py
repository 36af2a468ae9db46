"""Average precision of one picture when every box has the same score, which is all a language model gives.

Two rules. 'coco' is COCOeval's own number with all scores 1: boxes count in the order they were written, so junk at the
end of the list is free and labels that the truth does not have are ignored. 'order_free', the rule of our rewards, takes
the tie for what it is: all boxes enter at once, precision and recall are one point, and every box with a label that is
not in the truth is a false positive, shared evenly among the true labels.

    python -c "from mmrl.rewards.average_precision import image_ap as a; print(a([('cat', (0, 0, 9, 9))], [('cat', (0, 0, 9, 8))]))"
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import ConfigError, did_you_mean
from mmrl.rewards.iou import pairwise_iou
from mmrl.rewards.matching import most_pairs

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

__all__ = ["AP_RULES", "COCO_THRESHOLDS", "check_rule", "class_ap", "image_ap"]

# N predicted boxes of one label, M true ones, T IoU thresholds

COCO_THRESHOLDS: tuple[float, ...] = tuple(np.linspace(0.5, 0.95, 10).tolist())
"""0.50, 0.55, ..., 0.95, as COCOeval makes them."""
AP_RULES = ("order_free", "coco")

_RECALLS = np.linspace(0.0, 1.0, 101)
_TINY = float(np.spacing(1.0))  # as COCOeval divides
_MAX_DETECTIONS = 100  # per label, COCOeval's maxDets[-1]

Labelled = Sequence[tuple[str, Sequence[float]]]


def check_rule(rule: str) -> str:
    """`rule` when it is known; raises ConfigError otherwise."""
    if rule not in AP_RULES:
        raise ConfigError(
            f"unknown AP rule {rule!r}; expected one of {', '.join(AP_RULES)}.{did_you_mean(rule, AP_RULES)}"
        )
    return rule


def _coco_hits(pairs: Sequence[tuple[int, int, float]], level: float) -> list[int]:
    """Which boxes, taken in order, find a truth that is still free, from (box, truth, IoU) in the order of boxes, then of truths.

    A box takes its best free truth that reaches `level`, the last among equals.
    """
    hits: list[int] = []
    taken: set[int] = set()
    of_box, best, closest = -1, -1, level
    for box, truth, iou in (*pairs, (_MAX_DETECTIONS, -1, 0.0)):
        if box != of_box:
            if best >= 0:
                hits.append(of_box)
                taken.add(best)
            of_box, best, closest = box, -1, level
        if iou >= closest and truth not in taken:
            best, closest = truth, iou
    return hits


@functools.lru_cache(maxsize=1024)
def _recalls_reached(true: int) -> list[int]:
    """How many of the 101 recalls are reached with 0, 1, ... `true` truths found."""
    return np.searchsorted(_RECALLS, np.arange(true + 1) / true, side="right").tolist()


def _level_ap(hits: Sequence[int], true: int) -> float:
    """AP of boxes whose hits stand at these places: precision only falls between hits, and recall rises at hits alone."""
    reached, total, envelope = _recalls_reached(true), 0.0, 0.0
    for found in range(len(hits), 0, -1):
        envelope = max(envelope, found / (hits[found - 1] + 1 + _TINY))
        # nothing is found before the first hit: the recall of 0 is read there, too
        total += envelope * (reached[found] - (reached[found - 1] if found > 1 else 0))
    return total / len(_RECALLS)


def _coco_ap(iou_NM: Floats, thresholds_T: Floats) -> float:
    iou_NM, true = iou_NM[:_MAX_DETECTIONS], iou_NM.shape[1]
    levels = np.minimum(thresholds_T, 1 - 1e-10).tolist()
    # few pairs overlap as much: a loop over these is quicker than arrays of (level, box, truth)
    boxes, truths = np.nonzero(iou_NM >= min(levels))
    pairs = list(zip(boxes.tolist(), truths.tolist(), iou_NM[boxes, truths].tolist(), strict=True))
    total, before, value = 0.0, -1, 0.0
    for level in levels:
        wanted = sum(iou >= level for _, _, iou in pairs)
        if wanted != before:  # the same pairs as at the level before otherwise: levels rise
            before, value = wanted, _level_ap(_coco_hits(pairs, level), true) if wanted else 0.0
        total += value
    return total / len(levels)


def _order_free_ap(iou_NM: Floats, thresholds_T: Floats, strangers: float) -> float:
    count, true = iou_NM.shape
    total, before, found = 0.0, -1, 0
    for level in thresholds_T.tolist():
        allowed_NM = iou_NM >= level
        wanted = int(np.count_nonzero(allowed_NM))
        if wanted != before:  # the same pairs as at the level before otherwise: levels rise
            before, found = wanted, most_pairs(allowed_NM) if wanted else 0
        if found:
            reached = int(np.searchsorted(_RECALLS, found / true, side="right"))
            total += found / (count + strangers) * reached / len(_RECALLS)
    return total / len(thresholds_T)


def class_ap(
    iou_NM: npt.ArrayLike,
    thresholds: Sequence[float] = COCO_THRESHOLDS,
    rule: str = "order_free",
    strangers: float = 0.0,
) -> float:
    """AP in [0, 1] of one label with M >= 1 truths, averaged over rising `thresholds`, from IoUs (N, M).

    'order_free' also counts `strangers` false positives from elsewhere; 'coco' takes rows in order.
    """
    matrix, levels = np.asarray(iou_NM, dtype=np.float64), np.asarray(thresholds, dtype=np.float64)
    if rule == "coco":
        return _coco_ap(matrix, levels)
    return _order_free_ap(matrix, levels, strangers)


def image_ap(
    predicted: Labelled,
    true: Labelled,
    thresholds: Sequence[float] = COCO_THRESHOLDS,
    rule: str = "order_free",
) -> float:
    """Mean over the true labels of `class_ap`, in [0, 1]. Both lists empty: 1; only one: 0.

    Labels are compared as they are. rule 'coco' equals pycocotools' stats[0] for this picture (areas up to 1e10, no
    crowds); thresholds (0.5,) give stats[1].
    """
    check_rule(rule)
    if not predicted or not true:
        return 1.0 if len(predicted) == len(true) else 0.0
    true_labels = sorted({label for label, _ in true})
    known = set(true_labels)
    strangers = sum(label not in known for label, _ in predicted) / len(known)
    total = 0.0
    for label in true_labels:
        boxes_N = [box for name, box in predicted if name == label]
        boxes_M = [box for name, box in true if name == label]
        if boxes_N:
            total += class_ap(pairwise_iou(boxes_N, boxes_M), thresholds, rule, strangers)
    return total / len(true_labels)
