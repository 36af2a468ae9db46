"""OVDEval's NMS-AP: of all boxes on one true object, whatever their labels, only the best-scoring one is scored.

Plain AP rewards naming one object with every fine-grained label asked for ("red car", "blue car"). NMS-AP removes, for
each true box, all predictions with IoU > 0.5 but the best, unless they are the best of another true box; then COCOeval.

Without confidences 'best' is a tie, so the rule is declared: 'last' keeps the last box emitted, as the official script
does for equal scores; 'first' keeps the first. NMS-AP is 'last'; NMS-AP_first stands beside it.

    python -c "from mmrl.tasks.metrics.ovdeval import TIE_RULE; print(TIE_RULE)"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError
from mmrl.rewards.iou import pairwise_iou
from mmrl.tasks.metrics.boxes import Evaluation, Pair, gather, order_free, per_source
from mmrl.tasks.metrics.coco import coco_ap

__all__ = ["TIE_RULE", "nms_by_truth", "ovdeval_benchmark"]

TIE_RULE = "score 1.0 for every box; of several boxes on one object the last emitted is kept, then the ties of COCO AP"


def _corners(entries: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    return [[x, y, x + w, y + h] for x, y, w, h in (entry["bbox"] for entry in entries)]


def nms_by_truth(
    results: Sequence[Mapping[str, Any]],
    annotations: Sequence[Mapping[str, Any]],
    threshold: float = 0.5,
    ties: str = "last",
) -> list[dict[str, Any]]:
    """The results that survive, in the order given. Crowd annotations count like others, as in the official script.

    `ties` ('last' or 'first' emitted) decides between equal scores. Raises ConfigError for another word.
    """
    if ties not in ("last", "first"):
        raise ConfigError(f"expected ties 'last' or 'first', found {ties!r}")
    by_image: dict[Any, tuple[list[int], list[Mapping[str, Any]]]] = {}
    for index, result in enumerate(results):
        by_image.setdefault(result["image_id"], ([], []))[0].append(index)
    for annotation in annotations:
        if annotation["image_id"] in by_image:
            by_image[annotation["image_id"]][1].append(annotation)
    removed: set[int] = set()
    for indices, truth in by_image.values():
        if not truth:
            continue
        near = pairwise_iou(_corners([results[i] for i in indices]), _corners(truth)) > threshold
        best, beaten = set(), set()
        for column in range(len(truth)):
            on_it = [i for row, i in enumerate(indices) if near[row, column]]
            if on_it:
                order = (
                    (lambda i: (results[i]["score"], i))
                    if ties == "last"
                    else (lambda i: (results[i]["score"], -i))
                )
                winner = max(on_it, key=order)
                best.add(winner)
                beaten.update(set(on_it) - {winner})
        removed |= beaten - best
    return [dict(result) for index, result in enumerate(results) if index not in removed]


def _numbers(evaluation: Evaluation) -> dict[str, float]:
    truth, results = evaluation.truth(), evaluation.results()
    official = coco_ap(truth, nms_by_truth(results, truth["annotations"]))
    other = coco_ap(truth, nms_by_truth(results, truth["annotations"], ties="first"))
    plain = coco_ap(truth, results)
    numbers = {f"NMS-{name}": official[name] for name in ("AP", "AP50", "AP75") if name in official}
    if "AP" in other:
        numbers["NMS-AP_first"] = other["AP"]
    numbers.update({name: plain[name] for name in ("AP", "AP50", "AR100") if name in plain})
    return {
        **numbers,
        **order_free(evaluation),
        "unknown_label_rate": evaluation.unknown_label_rate(),
    }


def ovdeval_benchmark(pairs: Sequence[Pair], folder: Path) -> dict[str, float]:
    """OVDEval's numbers of (sample, score) pairs, and `folder`/ovdeval_results.json, the official script's input.

    NMS-AP, NMS-AP50, NMS-AP75 (TIE_RULE), NMS-AP_first, plain AP, AP50 and AR100, and precision@0.5, recall@0.5, F1@0.5,
    which depend on no order. Annotation ids count from 1 here: pycocotools never matches the id 0 of the released files.
    Several subsets: each by name, and their mean.
    """

    def compute(group: Sequence[Pair], path: Path) -> dict[str, float]:
        evaluation = gather(group)
        evaluation.write(path)
        return _numbers(evaluation)

    return per_source(pairs, Path(folder), "ovdeval_results", compute)
