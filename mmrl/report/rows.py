"""What the page asks of predictions.jsonl: a metric of one row, scores per prompt, paired gains between evaluations."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from mmrl.report.load import EvalStep, number
from mmrl.stats import Estimate, paired_gain

__all__ = ["boxes_of", "gains", "metric_of", "score_of", "unit_of"]

Scores = dict[tuple[str, str], dict[tuple[str, str], list[float]]]
"""(mode, metric) -> prompt -> one score per completion."""


def score_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row's score, or {} when it has none."""
    score = row.get("score")
    return score if isinstance(score, Mapping) else {}


def unit_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """(source, id): the prompt a row belongs to, the unit that is resampled."""
    return str(row.get("source", "")), str(row.get("id", ""))


def metric_of(row: Mapping[str, Any], name: str) -> float:
    """'reward', 'parse_rate' or one of the score's metrics; what a failure lacks counts as 0, as in evaluation."""
    score = score_of(row)
    if name == "reward":
        return number(score.get("value")) or 0.0
    if name == "parse_rate":
        return float(bool(score.get("parsed")))
    metrics = score.get("metrics")
    return (number(metrics.get(name)) if isinstance(metrics, Mapping) else None) or 0.0


def boxes_of(row: Mapping[str, Any], kind: str) -> list[tuple[float, float, float, float]]:
    """Valid boxes (x1, y1, x2, y2) in pixels of the original picture; 'pred_boxes' or 'gold_boxes'."""
    detail = score_of(row).get("detail")
    if not isinstance(detail, Mapping) or detail.get("frame", "abs_orig") != "abs_orig":
        return []
    found = detail.get(kind)
    out = []
    for box in found if isinstance(found, list) else []:
        values = [number(v) for v in box] if isinstance(box, (list, tuple)) else []
        if len(values) == 4 and None not in values:
            x1, y1, x2, y2 = (v or 0.0 for v in values)
            out.append((x1, y1, x2, y2))
    return out


def _scores(evaluation: EvalStep, metrics: Iterable[str]) -> Scores:
    out: Scores = defaultdict(lambda: defaultdict(list))
    names = list(metrics)
    for row in evaluation.rows():
        for name in names:
            out[str(row.get("mode", "")), name][unit_of(row)].append(metric_of(row, name))
    return out


def gains(first: EvalStep, last: EvalStep, metrics: Iterable[str]) -> dict[tuple[str, str], Estimate]:
    """(mode, metric) -> paired gain over the prompts present in both evaluations."""
    names = list(dict.fromkeys(metrics))
    before, after = _scores(first, names), _scores(last, names)
    found = {key: paired_gain(before[key], after[key]) for key in after if key in before}
    return {key: gain for key, gain in found.items() if gain is not None}
