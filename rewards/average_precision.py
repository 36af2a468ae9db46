"""Average precision of one picture when every box has the same score, which is all a language model gives.

Two rules. 'coco' is COCOeval's own number with all scores 1: boxes count in the order they were written, so junk at the
end of the list is free and labels that the truth does not have are ignored. 'order_free', the rule of our rewards, takes
the tie for what it is: all boxes enter at once, precision and recall are one point, and every box with a label that is
not in the truth is a false positive, shared evenly among the true labels.

    python -c "from mmrl.rewards.average_precision import image_ap as a; print(a([('cat', (0, 0, 9, 9))], [('cat', (0, 0, 9, 8))]))"
"""

from __future__ import annotations

from collections import Counter
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
_MAX_DETECTIONS = 100  # per label, COCOeval's maxDets[-1]

Labelled = Sequence[tuple[str, Sequence[float]]]


def check_rule(rule: str) -> str:
    """`rule` when it is known; raises ConfigError otherwise."""
    if rule not in AP_RULES:
        raise ConfigError(
            f"unknown AP rule {rule!r}; expected one of {', '.join(AP_RULES)}.{did_you_mean(rule, AP_RULES)}"
        )
    return rule


def _coco_hits(iou_NM: Floats, levels_T: Floats) -> npt.NDArray[np.bool_]:
    """(T, N): which boxes, taken in order, find a truth that is still free; the best one, the last among equals."""
    last, rows_T = iou_NM.shape[1] - 1, np.arange(len(levels_T))
    hits_TN = np.zeros((len(levels_T), len(iou_NM)), dtype=bool)
    left_TNM = np.where(iou_NM >= levels_T[:, None, None], iou_NM, -1.0)
    for i in range(len(iou_NM)):
        best_T = last - left_TNM[:, i, ::-1].argmax(1)
        hits_TN[:, i] = taken_T = left_TNM[rows_T, i, best_T] >= 0
        left_TNM[rows_T[taken_T], :, best_T[taken_T]] = -1.0
    return hits_TN


def _coco_ap(iou_NM: Floats, thresholds_T: Floats) -> float:
    iou_NM = iou_NM[:_MAX_DETECTIONS]
    count, true = iou_NM.shape
    if not count:
        return 0.0
    levels_T = np.minimum(thresholds_T, 1 - 1e-10)
    pairs_T = (iou_NM >= levels_T[:, None, None]).sum((1, 2)).tolist()
    # levels between which no IoU lies have the same pairs, and so the same AP; without pairs it is 0
    times = Counter(pairs for pairs in pairs_T if pairs)
    if not times:
        return 0.0
    found_TN = np.cumsum(_coco_hits(iou_NM, levels_T[[pairs_T.index(p) for p in times]]), axis=1)
    precision_TN = found_TN / (np.arange(1, count + 1) + np.spacing(1.0))
    envelope_TN = np.maximum.accumulate(precision_TN[:, ::-1], axis=1)[:, ::-1]
    # each of the 101 recalls is read at the first box with which it is reached
    reached_TN = np.searchsorted(_RECALLS, found_TN / true, side="right")
    per_level_T = (envelope_TN * np.diff(reached_TN, axis=1, prepend=0)).sum(1) / len(_RECALLS)
    return float(per_level_T @ np.array(list(times.values()))) / len(levels_T)


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
