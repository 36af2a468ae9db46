"""Numbers of video benchmarks that are not a mean over questions: means over tasks, types, tracks and lengths.

Samples say what they belong to: params.suite (videomme, mvbench, tempcompass, vsibench, videommmu, longvideobench, mlvu),
params.category (task, type, aspect or track) and, where there are, params.duration_group and params.form (TempCompass's four
forms of question are counted apart: tempcompass/yes_no/accuracy). Every question counts; an answer that cannot be read is 0
(lmms-eval leaves empty answers of MVBench out of the denominator).

    mvbench/average   mean over its tasks (officially all 20: mvbench/categories tells how many there were)
    mlvu/M-Avg        mean over its multiple-choice tasks: 7 on dev, 9 on test
    vsibench/macro    mean over its types, object_rel_direction_{easy,medium,hard} averaged into one first. Four types have
                      options and four a number, so the mean of both tasks' numbers is the official mean over eight

    python -c "from mmrl.tasks.metrics.video_suites import macro_mean; print(macro_mean({'a': [1, 0], 'b': [1]}))"
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mmrl.types import Sample, Score

__all__ = ["SUITES", "macro_mean", "means", "merge_directions", "suite_numbers"]

Groups = Mapping[str, Sequence[float]]
SUITES: Mapping[str, str] = {
    "mvbench": "average",
    "mlvu": "M-Avg",
    "vsibench": "macro",
    "tempcompass": "macro",
    "videommmu": "macro",
    "videomme": "macro",
    "longvideobench": "macro",
}
"""Suite -> the name of its mean over categories."""
_DIRECTIONS = (
    "object_rel_direction_easy",
    "object_rel_direction_medium",
    "object_rel_direction_hard",
)


def means(groups: Groups) -> dict[str, float]:
    """Mean of each group that has values, by name."""
    return {
        name: math.fsum(values) / len(values) for name, values in sorted(groups.items()) if values
    }


def macro_mean(groups: Groups) -> float:
    """Unweighted mean of the groups' means; a group counts once, however many values it has. Raises ValueError without values."""
    found = means(groups)
    if not found:
        raise ValueError("expected at least one group with values")
    return math.fsum(found.values()) / len(found)


def merge_directions(values: Mapping[str, float]) -> dict[str, float]:
    """VSI-Bench's values by type, with the mean of the three difficulties of object_rel_direction as one type.

    As thinking-in-space's scorer does; where some of the three are missing, the mean is over those that are there.
    """
    parts = [values[name] for name in _DIRECTIONS if name in values]
    merged = {name: value for name, value in values.items() if name not in _DIRECTIONS}
    return {**merged, "object_rel_direction": math.fsum(parts) / len(parts)} if parts else merged


def _numbers(title: str, items: Sequence[tuple[Sample, float]]) -> dict[str, float]:
    """The numbers of one suite, or of one form of its questions, named 'title/number'."""
    suite = title.partition("/")[0]
    categories: dict[str, list[float]] = {}
    lengths: dict[str, list[float]] = {}
    for sample, value in items:
        categories.setdefault(str(sample.params.get("category", "unknown")), []).append(value)
        if "duration_group" in sample.params:
            lengths.setdefault(str(sample.params["duration_group"]), []).append(value)
    each = means(categories)
    if suite == "vsibench":
        each = merge_directions(each)
    macro = math.fsum(each.values()) / len(each)
    numbers = {
        "accuracy": math.fsum(value for _, value in items) / len(items),
        SUITES[suite]: macro,
        "categories": float(len(each)),
        "items": float(len(items)),
        **each,
        **{f"duration {name}": value for name, value in means(lengths).items()},
    }
    return {f"{title}/{name}": value for name, value in numbers.items()}


def suite_numbers(
    pairs: Sequence[tuple[Sample, Score]], metric: str = "correct"
) -> dict[str, float]:
    """Numbers of every video suite among the pairs, by its samples' params; {} where there is none.

    `metric` is the metric of the scores that counts: 'correct', or 'mra' for the numeric types of VSI-Bench. A score without
    it, a failure for example, counts as 0.
    """
    groups: dict[str, list[tuple[Sample, float]]] = {}
    for sample, score in pairs:
        suite = sample.params.get("suite")
        if suite in SUITES:
            title = f"{suite}/{sample.params['form']}" if "form" in sample.params else str(suite)
            groups.setdefault(title, []).append((sample, float(score.metrics.get(metric, 0.0))))
    return {
        name: value
        for title, items in groups.items()
        for name, value in _numbers(title, items).items()
    }
