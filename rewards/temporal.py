"""Temporal IoU: how well predicted spans of a video cover the true ones. Seconds, or any one unit for both sides.

A span is (start, end). One that ends before it starts is worth 0, and so is one without length: that is the rule of TALL
(Charades-STA), 2D-TAN, VTimeLLM, VideoChat-R1, EasyVideoR1 and OneThinker; lmms-eval alone sorts the two times. Nothing is
clipped: time beyond the video's end counts against an answer as any other time does. `clip_spans` is for rewards that ask for
it, because then every end from the video's end on, however large, is worth the same.

    union    IoU of the two merged unions ("glue", VideoChat-R1): how the spans are cut into pieces does not matter
    matched  one-to-one matching with the largest sum of IoUs, over the larger number of spans: splitting and surplus spans cost
    near     (1 + IoU of the unions - gap / (gap + true length)) / 2, the gap being the time between the two sides where they
             lie apart: it still tells spans apart that do not meet. Not the generalised IoU, which divides by the hull and
             so pays a span beside the truth for growing away from it. Warning: whatever meets the truth starts at 0.5, so
             the whole video earns 0.55 for the truth [10, 20] of 100 s, more than a short span that just misses; use it to
             get learning started, then union

For one span and one truth, union and matched are max(0, min(e) - max(s)) / (max(e) - min(s)), the rule of Charades-STA
(jiyanggao/TALL, main.py, calculate_IoU).

    python -c "from mmrl.rewards.temporal import union_iou; print(union_iou([(1, 3), (2, 5)], [(2, 6)]))"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmrl.rewards.modes import by_mode
from mmrl.rewards.times import Span

__all__ = [
    "MODES",
    "SpanReward",
    "clip_spans",
    "has_length",
    "make_span_reward",
    "matched_iou",
    "merged",
    "near_iou",
    "span_iop",
    "span_iou",
    "union_iou",
]

SpanReward = Callable[[Sequence[Sequence[float]], Sequence[Sequence[float]]], float]
"""reward(predicted spans, true spans) in [0, 1]."""


def has_length(span: Sequence[float]) -> bool:
    """True for two finite times, the first before the second."""
    return span[0] < span[1] and math.isfinite(span[0]) and math.isfinite(span[1])


def clip_spans(spans: Sequence[Sequence[float]], duration: float | None = None) -> list[Span]:
    """Both times of each span clipped to [0, duration], in the order they have; a span wholly outside becomes one without
    length."""
    most = math.inf if duration is None else duration
    return [(min(max(0.0, start), most), min(max(0.0, end), most)) for start, end in spans]


def merged(spans: Sequence[Sequence[float]]) -> list[Span]:
    """The union of the spans as disjoint spans in order; spans without length and those that end before they start vanish."""
    ordered = sorted((span[0], span[1]) for span in spans if has_length(span))
    union: list[Span] = []
    for start, end in ordered:
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def _overlap(a: Sequence[Span], b: Sequence[Span]) -> float:
    """Common length of two unions (as `merged` gives them)."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def span_iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection over union of two spans, in [0, 1]; 0 when either has no length or ends before it starts."""
    if not (has_length(a) and has_length(b)):
        return 0.0
    (s, e), (t, f) = a, b
    # the hull is the union wherever they meet
    return max(0.0, min(e, f) - max(s, t)) / (max(e, f) - min(s, t))


def span_iop(predicted: Sequence[float], true: Sequence[float]) -> float:
    """Intersection over the length of the prediction, in [0, 1]; 0 when either has no length (NExT-GQA pays 1 for a
    prediction without length inside the truth, see mmrl.tasks.metrics.nextgqa)."""
    if not (has_length(predicted) and has_length(true)):
        return 0.0
    (s, e), (t, f) = predicted, true
    return max(0.0, min(e, f) - max(s, t)) / (e - s)


def union_iou(predicted: Sequence[Sequence[float]], true: Sequence[Sequence[float]]) -> float:
    """IoU of the merged unions; 0 when either has no length."""
    a, b = merged(predicted), merged(true)
    if not a or not b:
        return 0.0
    common = _overlap(a, b)
    total = math.fsum(e - s for s, e in a) + math.fsum(e - s for s, e in b) - common
    return min(1.0, common / total) if total > 0 else 0.0


def near_iou(predicted: Sequence[Sequence[float]], true: Sequence[Sequence[float]]) -> float:
    """(1 + IoU - gap / (gap + true length)) / 2 of the merged unions; 0 when either has no length. Gaps inside one side do
    not count. A span over the whole video is worth more than 0.5, see the module."""
    a, b = merged(predicted), merged(true)
    if not a or not b:
        return 0.0
    common = _overlap(a, b)
    length = math.fsum(e - s for s, e in b)
    total = math.fsum(e - s for s, e in a) + length - common
    gap = max(0.0, max(a[0][0], b[0][0]) - min(a[-1][1], b[-1][1]))
    return (
        min(1.0, max(0.0, (1.0 + common / total - gap / (gap + length)) / 2.0))
        if total > 0 and length > 0
        else 0.0
    )


def _pairwise(predicted_N2: Any, true_M2: Any) -> Any:
    """`span_iou` of every pair of spans, (N, 2) and (M, 2) -> (N, M)."""
    import numpy as np

    common = np.minimum(predicted_N2[:, None, 1], true_M2[:, 1]) - np.maximum(
        predicted_N2[:, None, 0], true_M2[:, 0]
    )
    hull = np.maximum(predicted_N2[:, None, 1], true_M2[:, 1]) - np.minimum(
        predicted_N2[:, None, 0], true_M2[:, 0]
    )
    proper = (
        (predicted_N2[:, 1] > predicted_N2[:, 0])[:, None]
        & (true_M2[:, 1] > true_M2[:, 0])
        & np.isfinite(hull)
    )
    return np.divide(
        np.maximum(common, 0.0), hull, out=np.zeros_like(hull), where=proper & (hull > 0)
    )


def matched_iou(predicted: Sequence[Sequence[float]], true: Sequence[Sequence[float]]) -> float:
    """The largest sum of IoUs of a one-to-one matching (Hungarian) over max(number predicted, number true)."""
    if not predicted or not true:
        return 0.0
    if len(predicted) == 1 or len(true) == 1:
        return max(span_iou(p, t) for p in predicted for t in true) / max(len(predicted), len(true))
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    ious = _pairwise(np.array(predicted, float), np.array(true, float))
    rows, columns = linear_sum_assignment(ious, maximize=True)
    return min(1.0, float(ious[rows, columns].sum()) / max(ious.shape))


def _union() -> SpanReward:
    return union_iou


def _matched() -> SpanReward:
    return matched_iou


def _near() -> SpanReward:
    return near_iou


MODES: Mapping[str, Callable[..., SpanReward]] = {
    "union": _union,
    "matched": _matched,
    "near": _near,
}
"""Mode -> factory(**parameters) -> SpanReward."""


def make_span_reward(mode: str, **params: Any) -> SpanReward:
    """The reward of `mode`. Raises ConfigError for unknown modes and parameters."""
    return by_mode("accuracy", MODES, mode, params)
