"""Temporal grounding: R1@0.3 / 0.5 / 0.7 with >=, and mIoU (Charades-STA, ActivityNet Captions), with prediction files.

IoU = max(0, min(e) - max(s)) / (max(e) - min(s)) of the first predicted span and the true one, both as they are: nothing is
clipped to the video, and a span that ends before it starts is 0, as in the programs of TALL (Charades-STA), VTimeLLM and
VideoChat-R1 (lmms-eval's sorts the two times: `reversed_as="sorted"`). Several true spans: the best counts. A missing prediction
is 0 and stays in every denominator. Shares, not percent.

    python -c "from mmrl.tasks.metrics.temporal import evaluate; print(evaluate({'a': [1, 3]}, {'a': [2, 4]}))"
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError
from mmrl.rewards.temporal import span_iou
from mmrl.tasks.spans import duration_of, outside_clip, spell_seconds, true_spans, video_id
from mmrl.types import Sample, Score

__all__ = [
    "LEVELS",
    "best_iou",
    "evaluate",
    "first_span",
    "recall_at",
    "span_counts",
    "temporal_benchmark",
]

LEVELS = (0.3, 0.5, 0.7)


def _spans(value: Any) -> list[Sequence[float]]:
    """One span or a list of spans, as a list."""
    return [value] if value and isinstance(value[0], (int, float)) else list(value or ())


def best_iou(
    predicted: Sequence[Any] | None, true: Sequence[Any], reversed_as: str = "zero"
) -> float:
    """IoU of the first predicted span (None or []: no answer, 0) with the true span it fits best. Either may be one span."""
    spans = _spans(predicted)
    if not spans:
        return 0.0
    first = sorted(spans[0]) if reversed_as == "sorted" else spans[0]
    return max((span_iou(first, truth) for truth in _spans(true)), default=0.0)


def recall_at(ious: Sequence[float], levels: Sequence[float] = LEVELS) -> dict[str, float]:
    """{"R1@0.3": share of IoUs >= 0.3, ...}; {} without IoUs."""
    return (
        {f"R1@{level:g}": sum(iou >= level for iou in ious) / len(ious) for level in levels}
        if ious
        else {}
    )


def evaluate(
    predictions: Mapping[Any, Sequence[Any]],
    truths: Mapping[Any, Sequence[Any]],
    levels: Sequence[float] = LEVELS,
    *,
    reversed_as: str = "zero",
) -> dict[str, float]:
    """R1@level and mIoU over all keys of `truths`; a key without prediction counts as 0. `reversed_as`: a span that ends before
    it starts is worth 'zero', or is 'sorted' first (lmms-eval)."""
    if reversed_as not in ("zero", "sorted"):
        raise ConfigError(f"expected reversed_as 'zero' or 'sorted', found {reversed_as!r}")
    ious = [best_iou(predictions.get(key), truth, reversed_as) for key, truth in truths.items()]
    return {**recall_at(ious, levels), "mIoU": math.fsum(ious) / len(ious)} if ious else {}


def first_span(score: Score) -> list[float] | None:
    """The first predicted span of an answer that was parsed, else None."""
    spans = score.detail.get("pred_spans") if score.parsed else None
    return [float(v) for v in spans[0]] if spans else None


def span_counts(pairs: Sequence[tuple[Sample, Score]]) -> dict[str, float]:
    """Samples by what the numbers have to bear: num_reversed (a predicted span ends before it starts), num_outside (a predicted
    time lies outside the clip), num_truths_outside (a true one does)."""
    counts = dict.fromkeys(("num_reversed", "num_outside", "num_truths_outside"), 0.0)
    for sample, score in pairs:
        duration, said = (
            duration_of(sample),
            (score.detail.get("pred_spans") or []) if score.parsed else [],
        )
        counts["num_reversed"] += any(start > end for start, end in said)
        counts["num_outside"] += outside_clip(said, duration)
        counts["num_truths_outside"] += outside_clip(true_spans(sample), duration)
    return counts


def temporal_benchmark(pairs: Sequence[tuple[Sample, Score]], folder: Path) -> dict[str, float]:
    """R1@0.3 / 0.5 / 0.7, mIoU and `span_counts`, and two files with one prediction per sample, in the order of samples:

    temporal_grounding.json  ActivityNet Captions' results form: {"version", "results": {video: [{"sentence", "timestamp"}]},
                             "external_data"}; every answered query, sentences as asked
    temporal_grounding.txt   Charades-STA's own form, 'VIDEO start end##sentence'; a failure is written as 0 0
    """
    if not pairs:
        return {}
    results: dict[str, list[dict[str, Any]]] = {}
    lines = []
    for sample, score in pairs:
        span = first_span(score)
        if span is not None:
            results.setdefault(video_id(sample), []).append(
                {"sentence": sample.question, "timestamp": span}
            )
        start, end = span or (0.0, 0.0)
        times = f"{spell_seconds(start, 9)} {spell_seconds(end, 9)}"  # as many decimals as an answer may have: nothing is rounded
        lines.append(f"{video_id(sample)} {times}##{' '.join(sample.question.split())}\n")
    document = {
        "version": "VERSION 1.0",
        "results": results,
        "external_data": {"used": False, "details": ""},
    }
    (folder / "temporal_grounding.json").write_text(
        json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (folder / "temporal_grounding.txt").write_text("".join(lines), encoding="utf-8")
    found = {
        number: [span]
        for number, (_, score) in enumerate(pairs)
        if (span := first_span(score)) is not None
    }
    return {
        **evaluate(found, {number: true_spans(sample) for number, (sample, _) in enumerate(pairs)}),
        **span_counts(pairs),
    }
