"""What the page asks of predictions.jsonl: a metric of one row, what to draw of it, paired gains between evaluations.

The metric 'headline' is each row's own: its task's, named in the row. So rows of several tasks share one column.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mmrl.evaluation.stats import Estimate, describe, macro_estimate, paired_gain
from mmrl.report.load import EvalStep, number
from mmrl.report.text import plural

__all__ = [
    "Paired",
    "boxes_of",
    "gains",
    "headline_of",
    "is_right",
    "labels_of",
    "metric_of",
    "paired",
    "part_gains",
    "points_of",
    "score_of",
    "seconds",
    "spans_of",
    "spans_text",
    "task_of",
    "text_of",
    "track_of",
    "unit_of",
]

Scores = dict[tuple[str, str], dict[tuple[str, str], list[float]]]
"""(mode, metric) -> prompt -> one score per completion."""
_ALWAYS = ("reward", "parse_rate", "headline")
_MOST = 1000  # spans or boxes of one answer


def score_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row's score, or {} when it has none."""
    score = row.get("score")
    return score if isinstance(score, Mapping) else {}


def unit_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """(source, id): the prompt a row belongs to, the unit that is resampled."""
    return str(row.get("source", "")), str(row.get("id", ""))


def task_of(row: Mapping[str, Any]) -> str:
    """Name of the row's task."""
    return str(row.get("task", ""))


def headline_of(row: Mapping[str, Any], default: str = "reward") -> str:
    """The metric the row's task is judged by; `default` for rows that do not name it."""
    return str(row.get("headline") or default)


def metric_of(row: Mapping[str, Any], name: str, default: str = "reward") -> float:
    """'reward', 'parse_rate', 'headline' or one of the score's metrics; what a failure lacks counts as 0, as in evaluation.

    `default` is the headline of rows that name none."""
    if name == "headline":
        name = headline_of(row, default)
    score = score_of(row)
    if name == "reward":
        return number(score.get("value")) or 0.0
    if name == "parse_rate":
        return float(bool(score.get("parsed")))
    metrics = score.get("metrics")
    return (number(metrics.get(name)) if isinstance(metrics, Mapping) else None) or 0.0


def is_right(row: Mapping[str, Any]) -> bool | None:
    """The task's own verdict (its metric 'correct'), or None when it has none."""
    metrics = score_of(row).get("metrics")
    value = number(metrics.get("correct")) if isinstance(metrics, Mapping) else None
    return None if value is None else value >= 0.5


def _detail(row: Mapping[str, Any]) -> Mapping[str, Any]:
    detail = score_of(row).get("detail")
    return detail if isinstance(detail, Mapping) else {}


def _tuples(row: Mapping[str, Any], key: str, length: int) -> list[tuple[float, ...]]:
    """Lists of `length` finite numbers under `key`, in pixels of the original picture."""
    detail = _detail(row)
    found = detail.get(key)
    if detail.get("frame", "abs_orig") != "abs_orig" or not isinstance(found, list):
        return []
    out = []
    for item in found:
        values = [number(v) for v in item] if isinstance(item, (list, tuple)) else []
        if len(values) == length and None not in values:
            out.append(tuple(v or 0.0 for v in values))
    return out


def boxes_of(row: Mapping[str, Any], kind: str) -> list[tuple[float, ...]]:
    """Valid boxes (x1, y1, x2, y2) in pixels of the original picture; 'pred_boxes' or 'gold_boxes'."""
    return _tuples(row, kind, 4)


def points_of(row: Mapping[str, Any], kind: str) -> list[tuple[float, ...]]:
    """Valid points (x, y) in pixels of the original picture; 'pred_points' or 'gold_points'."""
    return _tuples(row, kind, 2)


def labels_of(row: Mapping[str, Any], kind: str) -> list[str]:
    """The words beside the boxes; [] unless there is one per box. 'pred_labels' or 'gold_labels'."""
    found = _detail(row).get(kind)
    boxes = _detail(row).get(kind.replace("labels", "boxes"))
    if not isinstance(found, list) or not isinstance(boxes, list) or len(found) != len(boxes):
        return []
    return [str(label) for label in found]


def spans_of(row: Mapping[str, Any], kind: str) -> list[tuple[float, float]] | None:
    """Valid spans (start, end) in seconds of the shown part; 'pred_spans' or 'gold_spans'. None when the task has none."""
    found = _detail(row).get(kind)
    if not isinstance(found, (list, tuple)):
        return None
    pairs = [
        [number(v) for v in item]
        for item in found[:_MOST]
        if isinstance(item, (list, tuple)) and len(item) == 2
    ]
    return [
        (start, end)
        for start, end in pairs
        if start is not None and end is not None and start <= end
    ]


def track_of(row: Mapping[str, Any], kind: str) -> dict[float, tuple[float, ...]] | None:
    """Boxes by second of the shown part, in pixels of the displayed frame; 'pred_tracks' or 'gold_tracks'. None when the task
    has none."""
    found = _detail(row).get(kind)
    if not isinstance(found, Mapping) or _detail(row).get("frame", "abs_orig") != "abs_orig":
        return None
    out = {}
    for key, box in list(found.items())[:_MOST]:
        values = [number(v) for v in box] if isinstance(box, (list, tuple)) else []
        second = _second(key)
        if second is not None and len(values) == 4 and None not in values:
            out[second] = tuple(v or 0.0 for v in values)
    return out


def _second(key: Any) -> float | None:
    try:
        return number(float(key))
    except (TypeError, ValueError):
        return None


def seconds(value: float) -> str:
    """2.5 -> '2.5', 7.0 -> '7': at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def spans_text(spans: Iterable[tuple[float, float]]) -> str:
    """[(0, 1.5), (2, 3)] -> '0–1.5 and 2–3 s'; 'no span' without any."""
    words = [f"{seconds(start)}–{seconds(end)}" for start, end in spans]
    return " and ".join(words) + " s" if words else "no span"


def text_of(row: Mapping[str, Any], kind: str) -> str | None:
    """'pred_text' or 'gold_text', followed by the answer's spans and the number of its boxes over time; None when the task gives
    none of them, or an answer that was not parsed."""
    found, side = _detail(row).get(kind), kind.removesuffix("_text")
    parts = [] if found is None else [str(found)]
    spans, track = spans_of(row, f"{side}_spans"), track_of(row, f"{side}_tracks")
    if side == "gold" or score_of(row).get("parsed"):
        parts += [] if spans is None else [spans_text(spans)]
        if track is not None:
            ends = (
                list(dict.fromkeys(seconds(end) for end in (min(track), max(track))))
                if track
                else []
            )
            parts.append(
                plural(len(track), "box", "boxes") + (f" at {'–'.join(ends)} s" if ends else "")
            )
    return " · ".join(parts) if parts else None


def _measured(evaluations: Iterable[EvalStep]) -> dict[tuple[str, str], set[str]]:
    """(source, task) -> the metrics that any of its scores has."""
    out: dict[tuple[str, str], set[str]] = defaultdict(set)
    for evaluation in evaluations:
        for row in evaluation.rows():
            metrics = score_of(row).get("metrics")
            found = {str(k) for k in metrics} if isinstance(metrics, Mapping) else set()
            out[unit_of(row)[0], task_of(row)] |= found | {headline_of(row)}
    return out


def _scores(
    evaluation: EvalStep,
    names: list[str],
    measured: Mapping[tuple[str, str], set[str]],
    default: str,
    keep: Callable[[dict[str, Any]], bool] = lambda row: True,
) -> Scores:
    out: Scores = defaultdict(lambda: defaultdict(list))
    for row in evaluation.rows(keep):
        known = measured[unit_of(row)[0], task_of(row)]
        for name in names:
            if name in known or name in _ALWAYS:
                out[str(row.get("mode", "")), name][unit_of(row)].append(
                    metric_of(row, name, default)
                )
    return out


def gains(
    first: EvalStep, last: EvalStep, metrics: Iterable[str]
) -> dict[tuple[str, str], Estimate]:
    """(mode, metric) -> paired gain over the prompts present in both evaluations whose task measures the metric.

    'macro' is the mean over sources of the gains of their headlines."""
    wanted = list(dict.fromkeys(metrics))
    names, measured = [n for n in wanted if n != "macro"], _measured((first, last))
    before, after = (_scores(e, names, measured, "reward") for e in (first, last))
    paired = {key: paired_gain(before[key], after[key]) for key in after if key in before}
    found = {key: gain for key, gain in paired.items() if gain is not None}
    return {**found, **_macro_gains(first, last)} if "macro" in wanted else found


def _macro_gains(first: EvalStep, last: EvalStep) -> dict[tuple[str, str], Estimate]:
    per_mode: dict[str, list[Estimate]] = defaultdict(list)
    for (mode, _), gain in part_gains(first, last, lambda row: unit_of(row)[0]).items():
        per_mode[mode].append(gain)
    return {(mode, "macro"): macro_estimate(found) for mode, found in per_mode.items()}


@dataclass(frozen=True)
class Paired:
    """A metric in two evaluations over the prompts that both have, and what was gained from one to the other."""

    before: Estimate
    after: Estimate
    gain: Estimate


def paired(
    first: EvalStep, last: EvalStep, metrics: Iterable[str]
) -> dict[tuple[str, str], Paired]:
    """(mode, metric) -> its values over the prompts present in both evaluations: one between may have been of the first
    `eval.limit` only, so that the means of the whole sets do not compare. Gains as of `gains`."""
    wanted = list(dict.fromkeys(metrics))
    names, measured = [n for n in wanted if n != "macro"], _measured((first, last))
    asked = [*names, *(["headline"] if "macro" in wanted and "headline" not in names else [])]
    old, new = (_scores(e, asked, measured, "reward") for e in (first, last))
    found: dict[tuple[str, str], Paired] = {}
    for mode, name in new:
        before, after = (
            _of_both(t[mode, name], u[mode, name]) for t, u in ((old, new), (new, old))
        )
        if before and name in names:
            found[mode, name] = _paired(before, after)
        if before and name == "headline" and "macro" in wanted:
            found[mode, "macro"] = _macro(before, after)
    return found


Prompts = Mapping[tuple[str, str], list[float]]


def _of_both(prompts: Prompts, others: Prompts) -> Prompts:
    return {unit: values for unit, values in prompts.items() if unit in others}


def _paired(before: Prompts, after: Prompts) -> Paired:
    gain = paired_gain(before, after)
    assert gain is not None, "of the prompts of both"
    return Paired(_described(before), _described(after), gain)


def _described(prompts: Prompts) -> Estimate:
    return describe(
        [value for values in prompts.values() for value in values],
        clusters=[unit for unit, values in prompts.items() for _ in values],
    )


def _macro(before: Prompts, after: Prompts) -> Paired:
    """The mean over sources."""
    parts = [
        _paired(*({u: v for u, v in side.items() if u[0] == source} for side in (before, after)))
        for source in dict.fromkeys(unit[0] for unit in before)
    ]
    return Paired(
        macro_estimate([p.before for p in parts]),
        macro_estimate([p.after for p in parts]),
        macro_estimate([p.gain for p in parts]),
    )


def part_gains(
    first: EvalStep,
    last: EvalStep,
    part_of: Callable[[dict[str, Any]], str],
    default: str = "reward",
) -> dict[tuple[str, str], Estimate]:
    """(mode, part) -> paired gain of the headline over the part's prompts; `part_of` names the part of a row."""
    tables = []
    for evaluation in (first, last):
        table: Scores = defaultdict(lambda: defaultdict(list))
        for row in evaluation.rows():
            table[str(row.get("mode", "")), part_of(row)][unit_of(row)].append(
                metric_of(row, "headline", default)
            )
        tables.append(table)
    before, after = tables
    paired = {key: paired_gain(before[key], after[key]) for key in after if key in before}
    return {key: gain for key, gain in paired.items() if gain is not None}
