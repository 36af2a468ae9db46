"""Official benchmark numbers: (sample, score) pairs of an evaluation -> numbers and submission files.

coco      COCO AP by pycocotools, beside precision, recall and F1 that depend on no order
lvis      federated LVIS AP
ovdeval   NMS-AP of OVDEval

python -c "from mmrl.tasks.metrics import detection_benchmark; help(detection_benchmark)"
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmrl.types import Sample, Score

__all__ = ["detection_benchmark"]


def detection_benchmark(pairs: Sequence[tuple[Sample, Score]], folder: Path) -> dict[str, float]:
    """The numbers of a detection evaluation, by what its samples carry: LVIS (params.neg_category_ids), OVDEval
    (params.neg_text), else COCO. An evaluation that mixes them gives every number as '<coco|lvis|ovdeval>/<name>'.
    """
    from mmrl.tasks.metrics.coco import coco_benchmark
    from mmrl.tasks.metrics.lvis import lvis_benchmark
    from mmrl.tasks.metrics.ovdeval import ovdeval_benchmark

    scorers = {"lvis": lvis_benchmark, "ovdeval": ovdeval_benchmark, "coco": coco_benchmark}
    groups: dict[str, list[tuple[Sample, Score]]] = {}
    for pair in pairs:
        params = pair[0].params
        name = (
            "lvis"
            if "neg_category_ids" in params
            else "ovdeval"
            if "neg_text" in params
            else "coco"
        )
        groups.setdefault(name, []).append(pair)
    if len(groups) <= 1:
        return next((scorers[name](group, folder) for name, group in groups.items()), {})
    return {
        f"{name}/{key}": value
        for name, group in groups.items()
        for key, value in scorers[name](group, folder).items()
    }
