"""COCO numbers of an evaluation without confidences, by pycocotools, beside numbers that depend on no order.

Every box gets score 1.0, as the community does, so COCOeval's stable sort breaks the ties. The declared rule (TIE_RULE):
pictures in ascending image_id, boxes as emitted. Renumbering the pictures changes AP and nothing else; therefore
precision, recall and F1 from a per-class matching, and AR100, stand beside it.

    python -c "from mmrl.tasks.metrics.coco import coco_benchmark, TIE_RULE; print(TIE_RULE)"
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.tasks.metrics.boxes import Evaluation, Pair, gather, order_free, per_source

__all__ = ["TIE_RULE", "coco_ap", "coco_benchmark"]

TIE_RULE = "score 1.0 for every box; ties in ascending image_id (order of samples without whole-number ids), then as emitted"

_STATS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
_REPORTED = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR100")


def coco_ap(truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The twelve numbers of COCOeval ('bbox'); those without any truth to count (COCOeval's -1) are left out.

    `truth` is a COCO ground truth with ids from 1, `results` the results list. No results are zeros, not an error
    (COCO.loadRes([]) fails), and every picture of the truth counts.
    """
    import copy

    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress and its table
        gold, found = COCO(), COCO()
        gold.dataset = copy.deepcopy(dict(truth))
        gold.createIndex()
        if results:
            found = gold.loadRes(copy.deepcopy(list(results)))
        else:
            found.dataset = {**gold.dataset, "annotations": []}
            found.createIndex()
        evaluation = COCOeval(gold, found, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {
        name: float(value)
        for name, value in zip(_STATS, evaluation.stats, strict=True)
        if value > -1
    }


def _numbers(evaluation: Evaluation) -> dict[str, float]:
    ap = coco_ap(evaluation.truth(), evaluation.results())
    chosen = {name: value for name, value in ap.items() if name in _REPORTED}
    return {
        **chosen,
        **order_free(evaluation),
        "unknown_label_rate": evaluation.unknown_label_rate(),
    }


def coco_benchmark(pairs: Sequence[Pair], folder: Path) -> dict[str, float]:
    """Official COCO numbers of (sample, score) pairs, and `folder`/coco_results.json for submission.

    AP, AP50, AP75, APs, APm, APl, AR100 (0 to 1) by pycocotools under TIE_RULE: the community's number. Labels that were
    not asked for are invisible to it (`unknown_label_rate` tells their share) but count as false positives in
    precision@0.5, recall@0.5 and F1@0.5, which depend on no order. Failed samples stay as pictures without predictions.
    Per-picture APs are never averaged. Several sources: see mmrl.tasks.metrics.boxes.per_source.
    """

    def compute(group: Sequence[Pair], path: Path) -> dict[str, float]:
        evaluation = gather(group)
        evaluation.write(path)
        return _numbers(evaluation)

    return per_source(pairs, Path(folder), "coco_results", compute)
