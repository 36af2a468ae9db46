"""LVIS numbers by federated scoring: at most 300 boxes per picture, and only where the truth is known.

In a picture, a category is scored when it is annotated or listed in neg_category_ids; boxes of all others are ignored.
Unmatched boxes of not_exhaustive_category_ids are neither right nor wrong. faster-coco-eval's `lvis_style` computes it
(the `lvis` package brings a second OpenCV); boxes get score 1.0 under mmrl.tasks.metrics.coco.TIE_RULE.

    python -c "from mmrl.tasks.metrics.lvis import MAX_DETECTIONS; print(MAX_DETECTIONS)"
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.errors import DataError, need_package
from mmrl.tasks.metrics.boxes import Evaluation, Pair, gather, order_free, per_source

__all__ = ["MAX_DETECTIONS", "lvis_ap", "lvis_benchmark"]

MAX_DETECTIONS = 300
"""Boxes per picture, over all categories: the official value. Of equal scores the first emitted stay."""

_NAMES = {
    "AP_all": "AP",
    "AP_50": "AP50",
    "AP_75": "AP75",
    "AP_small": "APs",
    "AP_medium": "APm",
    "AP_large": "APl",
    "APr": "APr",
    "APc": "APc",
    "APf": "APf",
    "AR_all": "AR300",
}


def _limited(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The best MAX_DETECTIONS of every picture, in the order given."""
    best = sorted(range(len(results)), key=lambda i: -results[i]["score"])
    taken: Counter[Any] = Counter()
    kept = set()
    for i in best:
        taken[results[i]["image_id"]] += 1
        if taken[results[i]["image_id"]] <= MAX_DETECTIONS:
            kept.add(i)
    return [dict(results[i]) for i in sorted(kept)]


def _seen(
    truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Truth and results that the official scorer looks at: only what has an area above 0 (lvis/lvis.py, get_ann_ids), so that a
    line is no false positive. The boxes that count are chosen before that."""
    annotations = [one for one in truth["annotations"] if one["area"] > 0]
    return {**truth, "annotations": annotations}, [
        one for one in _limited(results) if one["bbox"][2] * one["bbox"][3] > 0
    ]


def lvis_ap(truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """AP, AP50, AP75, APs, APm, APl, APr, APc, APf and AR300; those without truth to count are left out.

    `truth` is LVIS json (neg_category_ids and not_exhaustive_category_ids per image, frequency r, c or f per category)
    with ids from 1. Raises DataError for a category without frequency.
    """
    need_package("faster_coco_eval", "LVIS's average precision", "lvis")
    from faster_coco_eval import COCO, COCOeval_faster

    for category in truth["categories"]:
        if category.get("frequency") not in ("r", "c", "f"):
            raise DataError(
                f"expected frequency 'r', 'c' or 'f' for LVIS category {category.get('name')!r}, found "
                f"{category.get('frequency')!r}; read the file with format lvis"
            )
    truth, results = _seen(truth, results)
    gold = COCO(copy.deepcopy(dict(truth)))
    evaluation = COCOeval_faster(
        gold, gold.loadRes(copy.deepcopy(list(results))), "bbox", lvis_style=True
    )
    evaluation.params.maxDets = [MAX_DETECTIONS]
    evaluation.run()
    found = evaluation.stats_as_dict
    return {ours: found[theirs] for theirs, ours in _NAMES.items() if found[theirs] > -1}


def _numbers(evaluation: Evaluation) -> dict[str, float]:
    ap = lvis_ap(evaluation.truth(), evaluation.results())
    return {**ap, **order_free(evaluation), "unknown_label_rate": evaluation.unknown_label_rate()}


def lvis_benchmark(pairs: Sequence[Pair], folder: Path) -> dict[str, float]:
    """Official LVIS numbers of (sample, score) pairs, and `folder`/lvis_results.json for submission.

    Beside lvis_ap's numbers: precision@0.5, recall@0.5, F1@0.5 (no order) under the same federated rule.
    """

    def compute(group: Sequence[Pair], path: Path) -> dict[str, float]:
        evaluation = gather(group)
        evaluation.write(path)
        return _numbers(evaluation)

    return per_source(pairs, Path(folder), "lvis_results", compute)
