"""QVHighlights: R1, mAP of moments and, where saliency is predicted, mAP and HIT@1 of highlights, under the official names.

The rules of the benchmark's standalone evaluation (Lei et al. 2021, moment_detr), written down again:

    R1@t         the first window against the true window it fits best, IoU >= t
    mAP@t        per query: windows by descending score, at most 10, each takes the best-fitting free true window with IoU >= t;
                 interpolated precision summed over recall; mean over queries. "average": over t = 0.5, 0.55, ... 0.95
    short, middle, long   queries with true windows of (0, 10], (10, 30], (30, 150] seconds, and of those only these windows
    HL-mAP, HL-Hit1       2-second clips, three annotators, a clip is relevant from Fair (2), Good (3) or VeryGood (4) on

Windows are taken as they are: neither sorted nor clipped to the video; one that ends before it starts is 0. Numbers are percent,
rounded to 2 decimals as there (`decimals=None` leaves them). Two differences: the official mAP leaves out queries without windows
and its R1 fails on them; here they count as 0, as they should. And where a window that ends before it starts is exactly as long as
a true one, its AP divides 0 by 0 and takes the window for a hit at every level; `nan_hits=True` does so, too.

    python -c "from mmrl.tasks.metrics.qvhighlights import evaluate; help(evaluate)"
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import DataError
from mmrl.tasks.metrics.temporal import span_counts
from mmrl.tasks.spans import duration_of, true_spans, video_id
from mmrl.types import Sample, Score

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

__all__ = [
    "LEVELS",
    "RANGES",
    "evaluate",
    "highlight_ap",
    "moment_ap",
    "qvhighlights_benchmark",
    "submission_row",
]

LEVELS = tuple(round(0.5 + 0.05 * k, 2) for k in range(10))
RANGES = {"short": (0.0, 10.0), "middle": (10.0, 30.0), "long": (30.0, 150.0)}
_MOST_WINDOWS = 10
_CLIP_S = 2
_SALIENCY = {"Fair": 2, "Good": 3, "VeryGood": 4}

# Q queries, W windows, T levels


def _ious(window: Sequence[float], windows: Sequence[Sequence[float]]) -> Floats:
    """IoU of one window with several; NaN where the union has no length."""
    true = np.asarray(windows, float).reshape(-1, 2)
    common = np.clip(np.minimum(window[1], true[:, 1]) - np.maximum(window[0], true[:, 0]), 0, None)
    union = (window[1] - window[0]) + (true[:, 1] - true[:, 0]) - common
    return np.divide(common, union, out=np.full_like(common, np.nan), where=union != 0)


def moment_ap(
    predicted: Sequence[Sequence[float]],
    true: Sequence[Sequence[float]],
    levels: Sequence[float] = LEVELS,
    nan_hits: bool = False,
) -> Floats:
    """Average precision of one query at each IoU level, (T,); `predicted` are (start, end, score), `true` (start, end)."""
    ap_T = np.zeros(len(levels))
    ordered = sorted(predicted[:_MOST_WINDOWS], key=lambda window: -window[2])
    if not ordered or not true:
        return ap_T
    ious = [
        np.nan_to_num(_ious(window, true), nan=np.inf if nan_hits else 0.0, posinf=np.inf)
        for window in ordered
    ]
    best_first = [iou.argsort()[::-1] for iou in ious]
    for place, level in enumerate(levels):
        free, hits = set(range(len(true))), np.zeros(len(ordered))
        for row, (iou, order) in enumerate(zip(ious, best_first, strict=True)):
            match = next((int(j) for j in order if iou[j] >= level and int(j) in free), None)
            if match is not None:
                free.remove(match)
                hits[row] = 1
        found = np.cumsum(hits)
        ap_T[place] = _area(found / np.arange(1, len(hits) + 1), found / len(true))
    return ap_T


def _area(precision: Floats, recall: Floats) -> float:
    """Sum over the steps of recall of the best precision at that recall or beyond (VOC 2011)."""
    envelope = np.maximum.accumulate(np.append(precision, 0.0)[::-1])[::-1][:-1]
    return float(np.sum(np.diff(np.append(0.0, recall)) * envelope))


def highlight_ap(relevant: Sequence[float], scores: Sequence[float]) -> float:
    """Average precision of clips by score: the mean over the distinct recalls of the best precision at that recall or beyond.

    Scores beyond the number of clips are cut off, missing ones are 0; nothing relevant is 0, everything relevant 1.
    """
    true = np.asarray(relevant, float)
    filled = np.zeros(len(true))
    filled[: len(scores)] = np.asarray(scores, float)[: len(true)]
    if len(true) == 0 or true.min() == true.max():
        return float(len(true) > 0 and true[0] > 0)
    order = np.argsort(-filled, kind="stable")
    last = np.append(np.diff(filled[order]) != 0, True)  # the end of every run of equal scores
    found = np.cumsum(true[order])[last]
    precision = found / (np.flatnonzero(last) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    steps = np.diff(np.append(0.0, found)) > 0
    return float(envelope[steps].mean())


def _moments(
    predictions: Mapping[Any, Mapping[str, Any]],
    truths: Sequence[Mapping[str, Any]],
    nan_hits: bool,
) -> tuple[Floats, Floats]:
    """AP (Q, T) and IoU of the first window with its best true one (Q,)."""
    ap_QT, first_Q = np.zeros((len(truths), len(LEVELS))), np.zeros(len(truths))
    for row, truth in enumerate(truths):
        windows = [
            tuple(map(float, w))
            for w in predictions.get(truth["qid"], {}).get("pred_relevant_windows") or ()
        ]
        ap_QT[row] = moment_ap(windows, truth["relevant_windows"], nan_hits=nan_hits)
        if windows and truth["relevant_windows"]:
            first_Q[row] = np.nan_to_num(_ious(windows[0][:2], truth["relevant_windows"])).max()
    return ap_QT, first_Q


def _in_range(truths: Sequence[Mapping[str, Any]], low: float, high: float) -> list[dict[str, Any]]:
    kept = []
    for truth in truths:
        windows = [w for w in truth["relevant_windows"] if low < w[1] - w[0] <= high]
        if windows:
            kept.append({**truth, "relevant_windows": windows})
    return kept


def _highlights(
    predictions: Mapping[Any, Mapping[str, Any]], truths: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, least in _SALIENCY.items():
        aps, hits = [], []
        for truth in truths:
            table = np.zeros((int(truth["duration"] / _CLIP_S), 3))
            table[np.asarray(truth["relevant_clip_ids"], int)] = np.asarray(
                truth["saliency_scores"], float
            )
            relevant = (table >= least).astype(float)
            scores = list(predictions.get(truth["qid"], {}).get("pred_saliency_scores") or ())
            aps += [
                highlight_ap(relevant[:, worker].tolist(), scores) if scores else 0.0
                for worker in range(3)
            ]
            best = int(np.argmax(scores)) if scores else len(relevant)
            hits.append(float(relevant[best].max()) if best < len(relevant) else 0.0)
        numbers[f"HL-min-{name}-mAP"], numbers[f"HL-min-{name}-Hit1"] = (
            float(np.mean(aps)),
            float(np.mean(hits)),
        )
    return numbers


def evaluate(
    predictions: Sequence[Mapping[str, Any]],
    truths: Sequence[Mapping[str, Any]],
    *,
    decimals: int | None = 2,
    nan_hits: bool = False,
) -> dict[str, float]:
    """The official 'brief' numbers in percent: MR-full-mAP, MR-full-mAP@0.5, @0.75, MR-short-mAP, MR-middle-mAP, MR-long-mAP,
    MR-full-R1@0.5, @0.7; HL-min-{Fair,Good,VeryGood}-{mAP,Hit1} where every prediction has pred_saliency_scores and every
    truth saliency_scores.

    Rows as in the benchmark's files: predictions {"qid", "pred_relevant_windows": [[start, end, score]],
    "pred_saliency_scores"?}, truths {"qid", "duration", "relevant_windows", "relevant_clip_ids"?, "saliency_scores"?}. Every
    truth counts, with or without prediction; a length without queries has no number. Raises DataError for a qid given twice
    or unknown.
    """
    known = {truth["qid"] for truth in truths}
    by_qid = {row["qid"]: row for row in predictions}
    if len(known) < len(truths) or len(by_qid) < len(predictions) or not set(by_qid) <= known:
        raise DataError(
            f"expected one row per qid, each among the {len(known)} of the truth, found {len(predictions)} predictions "
            f"with {len(by_qid)} qids, {len(set(by_qid) - known)} of them unknown, for {len(truths)} truths"
        )
    if not truths:
        return {}
    ap_QT, first_Q = _moments(by_qid, truths, nan_hits)
    ap_T = ap_QT.mean(0)
    numbers = {
        "MR-full-mAP": float(ap_T.mean()),
        "MR-full-mAP@0.5": float(ap_T[0]),
        "MR-full-mAP@0.75": float(ap_T[5]),
    }
    for name, (low, high) in RANGES.items():
        some = _in_range(truths, low, high)
        if some:
            numbers[f"MR-{name}-mAP"] = float(_moments(by_qid, some, nan_hits)[0].mean())
    numbers |= {f"MR-full-R1@{level}": float((first_Q >= level).mean()) for level in (0.5, 0.7)}
    if (
        predictions
        and all("pred_saliency_scores" in row for row in predictions)
        and all("saliency_scores" in t for t in truths)
    ):
        numbers |= _highlights(by_qid, truths)
    return {
        name: 100 * value if decimals is None else round(100 * value, decimals)
        for name, value in numbers.items()
    }


def submission_row(sample: Sample, score: Score) -> dict[str, Any]:
    """One line of a submission. Spans keep their order by falling scores, since a language model has none; a failure is one
    window without length, because the official program needs one."""
    spans = (score.detail.get("pred_spans") or []) if score.parsed else []
    spans = [[float(start), float(end)] for start, end in spans] or [[0.0, 0.0]]
    windows = [[*span, round(1.0 - place / len(spans), 4)] for place, span in enumerate(spans)]
    return {
        "qid": sample.params["qid"],
        "query": sample.question,
        "vid": video_id(sample),
        "pred_relevant_windows": windows,
    }


def qvhighlights_benchmark(pairs: Sequence[tuple[Sample, Score]], folder: Path) -> dict[str, float]:
    """The official numbers of an evaluation with `span_counts`, and hl_submission.jsonl in the official form. Samples need
    params.qid; the true windows are the samples' answers. official/<name> are the program's own numbers of that file, which differ
    where a window ends before it starts (`nan_hits`)."""
    rows = [submission_row(sample, score) for sample, score in pairs]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "hl_submission.jsonl").write_text(text, encoding="utf-8")
    truths = [
        {
            "qid": sample.params["qid"],
            "duration": duration_of(sample),
            "relevant_windows": true_spans(sample),
        }
        for sample, _ in pairs
    ]
    official = evaluate(rows, truths, nan_hits=True)
    return {
        **evaluate(rows, truths),
        **{f"official/{name}": value for name, value in official.items()},
        **span_counts(pairs),
    }
