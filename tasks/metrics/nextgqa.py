"""NExT-GQA: grounded video QA. Per question the best IoU and IoP over the true spans; Acc@GQA = right answer and IoP >= 0.5.

The rules of the benchmark's eval_ground, in percent, with two differences that can be switched: questions without a prediction
count as 0 (the official program leaves them out: `drop_missing`), and a prediction without length has IoP 0 (officially 1 when
it lies inside a true span, which pays for naming a moment: `point_hits`). Both are False here, True for its own numbers.

    python -c "from mmrl.tasks.metrics.nextgqa import iou_iop; print(iou_iop((2, 6), (3, 5)))"
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.errors import DataError
from mmrl.rewards.choice import LETTERS
from mmrl.tasks.metrics.temporal import first_span, span_counts
from mmrl.tasks.spans import duration_of, true_spans, video_id
from mmrl.types import Sample, Score

__all__ = ["evaluate", "iou_iop", "nextgqa_benchmark"]


def iou_iop(
    true: Sequence[float], predicted: Sequence[float], *, point_hits: bool = False
) -> tuple[float, float]:
    """(IoU, IoP) of one pair. Both are below 0 for spans apart, as in the official program: the best over the truths, and 0,
    counts. Pairs are not sorted: a prediction that ends before it starts has IoP 0."""
    if predicted[0] == predicted[-1]:
        return 0.0, float(point_hits and true[0] <= predicted[0] <= true[1])
    hull = max(true[1], predicted[-1]) - min(true[0], predicted[0])
    common = min(true[1], predicted[-1]) - max(true[0], predicted[0])
    length = predicted[-1] - predicted[0]
    return common / hull if hull > 0 else 0.0, common / length if length > 0 else 0.0


def evaluate(
    predictions: Mapping[str, Sequence[float] | None],
    truths: Mapping[str, Mapping[str, Any]],
    answers: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    drop_missing: bool = False,
    point_hits: bool = False,
) -> dict[str, float]:
    """Acc@GQA, mIoP, IoP@0.3, IoP@0.5, mIoU, IoU@0.3, IoU@0.5 in percent; with `answers` also Acc@QA over the same questions.

    predictions {'<video>_<qid>': [start, end]}, truths as gsub_test.json {video: {"location": {qid: [[start, end], ...]}}},
    answers {'<video>_<qid>': {"answer", "prediction"}}; without answers Acc@GQA is left out.
    """
    rows: list[tuple[float, float, bool]] = []
    for video, facts in truths.items():
        for qid, spans in facts["location"].items():
            key = f"{video}_{qid}"
            span = predictions.get(key)
            if span is None and drop_missing:
                continue
            best_iou = best_iop = 0.0
            for true in spans if span is not None else ():
                iou, iop = iou_iop(true, span, point_hits=point_hits)  # type: ignore[arg-type]
                best_iou, best_iop = max(best_iou, iou), max(best_iop, iop)
            row = (answers or {}).get(key)
            rows.append(
                (best_iou, best_iop, row is not None and row["answer"] == row["prediction"])
            )
    if not rows:
        return {}
    count = len(rows)
    numbers = (
        {"Acc@GQA": sum(right and iop >= 0.5 for _, iop, right in rows) / count}
        if answers is not None
        else {}
    )
    for name, values in (
        ("IoP", [iop for _, iop, _ in rows]),
        ("IoU", [iou for iou, _, _ in rows]),
    ):
        numbers |= {
            f"m{name}": sum(values) / count,
            **{f"{name}@{level}": sum(v >= level for v in values) / count for level in (0.3, 0.5)},
        }
    if answers is not None:
        numbers["Acc@QA"] = sum(right for _, _, right in rows) / count
    return {name: 100 * value for name, value in numbers.items()}


def _qid(sample: Sample) -> str:
    return str(sample.params.get("qid", sample.id))


def nextgqa_benchmark(pairs: Sequence[tuple[Sample, Score]], folder: Path) -> dict[str, float]:
    """The numbers under our rules and, as official/<name>, under the program's own, and `span_counts`; and its files:
    nextgqa_ground.json {'<video>_<qid>': [start, end]} and nextgqa_res.json {'<video>_<qid>': {"prediction", "answer"}} (numbers
    of options, a failure is -1 and has no span). Keys come from params.video_id (or the clip's name) and params.qid (or the id);
    raises DataError for a key given twice."""
    if not pairs:
        return {}
    spans: dict[str, list[float]] = {}
    answers: dict[str, dict[str, int]] = {}
    truths: dict[str, dict[str, Any]] = {}
    for sample, score in pairs:
        video, qid = video_id(sample), _qid(sample)
        if f"{video}_{qid}" in answers:
            raise DataError(
                f"expected one question per video and params.qid, found '{video}_{qid}' twice; number the questions"
            )
        truths.setdefault(video, {"duration": duration_of(sample), "location": {}})["location"][
            qid
        ] = true_spans(sample)
        span = first_span(score)
        if span is not None:
            spans[f"{video}_{qid}"] = span
        text = str(score.detail.get("pred_text") or "") if score.parsed else ""
        answers[f"{video}_{qid}"] = {
            "prediction": LETTERS.index(text[0]) if text else -1,
            "answer": LETTERS.index(sample.answer["choice"]),
        }
    for name, table in (("ground", spans), ("res", answers)):
        (folder / f"nextgqa_{name}.json").write_text(json.dumps(table) + "\n", encoding="utf-8")
    official = evaluate(spans, truths, answers, drop_missing=True, point_hits=True)
    return {
        **evaluate(spans, truths, answers),
        **{f"official/{name}": value for name, value in official.items()},
        **span_counts(pairs),
    }
