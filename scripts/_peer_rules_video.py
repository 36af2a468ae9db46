"""The rules of other projects about time and tracks, written down again in a few lines each; see scripts._peer_rules.

Boxes of tracks are {key: box}, spans (start, end) in seconds. Where a project's own code departs from its formula, the function
does as that code does and says so.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from scripts._peer_rules import Box, iou

Span = Sequence[float]
Track = Mapping[str, Box]


def hull_iou(p: Span, g: Span) -> float | None:
    """Intersection over max(e) - min(s); None: 0 / 0."""
    hull = max(p[1], g[1]) - min(p[0], g[0])
    return max(0.0, min(p[1], g[1]) - max(p[0], g[0])) / hull if hull else None


def temporal_r1(p: Span, g: Span, duration: float, form: float = 1.0) -> float:
    """0.5 tIoU + 0.5 format, both spans as shares of the video's length."""
    found = hull_iou([v / duration for v in p], [v / duration for v in g])
    return 0.5 * (found or 0.0) + 0.5 * form


def glue_iou(p: Sequence[Span], g: Sequence[Span], grid: int = 1000) -> float:
    """VideoChat-R1's "glue": IoU of the unions, counted on a grid of 1 / `grid` seconds; two empty unions give 1."""
    a, b = ({k for s, e in spans for k in range(round(s * grid), round(e * grid))} for spans in (p, g))
    return len(a & b) / len(a | b) if a | b else 1.0


def common_keys(p: Track, g: Track) -> float:
    """EasyVideoR1 (tracking, spatio-temporal), OneThinker (spatio-temporal): mean IoU over the keys both sides have."""
    both = [key for key in p if key in g]
    return sum(iou(p[key], g[key]) for key in both) / len(both) if both else 0.0


def true_keys(p: Track, g: Track) -> float:
    """OneThinker's tracking: mean IoU over the true keys, a missing box is 0."""
    return sum(iou(p[key], box) for key, box in g.items() if key in p) / len(g)


def tube(p: Span, g: Span, boxes: float) -> float:
    """0.5 tIoU + 0.5 of what the boxes are worth."""
    return 0.5 * (hull_iou(p, g) or 0.0) + 0.5 * boxes


def onethinker_structure(valid: bool, p: Track, g: Track) -> float:
    """0.25 for a valid object + 0.25 * share of the true keys that are there."""
    return 0.25 * valid + 0.25 * len(set(p) & set(g)) / len(g)


def videochat_track(p: Sequence[Box], g: Sequence[Box]) -> float:
    """VideoChat-R1: mean IoU of exactly as many boxes as asked (8), the given first one among them; else 0."""
    return sum(iou(a, b) for a, b in zip(p, g, strict=True)) / len(g) if len(p) == len(g) else 0.0


def next_gqa(p: Span | None, g: Sequence[Span]) -> tuple[float, float] | None:
    """(IoU, IoP), best over the truths, as the official program runs: a span without length has IoP 1 where it lies inside, and
    a question without a prediction is left out (None)."""
    if p is None:
        return None
    if p[0] == p[1]:
        return 0.0, float(any(s <= p[0] <= e for s, e in g))
    common = [max(0.0, min(p[1], e) - max(p[0], s)) for s, e in g]
    return (max(c / (max(p[1], e) - min(p[0], s)) for c, (s, e) in zip(common, g, strict=True)),
            max(c / (p[1] - p[0]) for c in common))


def viou(p: Track, g: Track) -> float:
    """vIoU of two tracks: the sum of the IoUs where both have a box, over the keys that either has."""
    return sum(iou(p[key], g[key]) for key in p if key in g) / len(set(p) | set(g))


def tube_viou(p: Track, p_time: Span, g: Track, g_time: Span) -> float:
    """VidSTG, HC-STVG: the sum of the IoUs over the frames in both times, over the frames in either; one frame a second."""
    mine, true = (set(range(int(s), int(e))) for s, e in (p_time, g_time))
    return sum(iou(p[str(k)], g[str(k)]) for k in mine & true if str(k) in p) / len(mine | true)
