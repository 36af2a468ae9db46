"""Where to click: one point out of an answer text, and what it earns against the element's box.

A point is written `[x, y]`, `(x, y)`, `{"point_2d": [x, y]}`, `{"coordinate": [x, y]}` or `<|box_start|>(x,y)<|box_end|>`;
a box in a spelling of mmrl.rewards.parsing stands for its centre. Exactly one: several points are a failure, not a choice.

    inside     1 in the element's box, its edges included (ScreenSpot's rule)
    gaussian   GUI-G2: exp(-1/2 [(dx/sx)^2 + (dy/sy)^2]) of the centres, and exp(-Bhattacharyya distance) of the boxes
    distance   1 in the box, falling in a straight line to 0 at `reach` of the picture beside it
    ui_r1      UI-R1: as inside            gui_r1     GUI-R1: strictly inside, the edges are out

Without truth, `region_votes` pays agreement among the answers of one group (GUI-RCPO).

    python -c "from mmrl.rewards.gui import parse_point; print(parse_point('{\"point_2d\": [12, 30]}'))"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmrl.errors import ConfigError
from mmrl.rewards.modes import by_mode
from mmrl.rewards.parsing import (
    MAX_ANSWER_CHARS,
    MAX_COORDINATE,
    Box,
    json_once,
    parse_boxes,
    strip_fence,
)

__all__ = [
    "MODES",
    "Point",
    "PointParse",
    "PointReward",
    "bhattacharyya",
    "centre",
    "in_box",
    "make_point_reward",
    "parse_point",
    "place_of",
    "region_votes",
]

Point = tuple[float, float]
PointReward = Callable[[Point, "Box | None", Sequence[float], Sequence[float]], float]
"""reward(point, predicted box or None, true box, (width, height) of the picture) in [0, 1]; all in original pixels."""

POINT_KEYS = ("point_2d", "point", "coordinate", "coordinates", "position", "start_point")
BOX_KEYS = ("bbox_2d", "bbox", "box_2d", "box")
_PLACES = frozenset((*POINT_KEYS, *BOX_KEYS))
_EDGE = 1e-6
"""Pixels an edge may be missed by: what converting coordinates between frames costs in float arithmetic."""
_BOX_TOKENS = ("<|box_start|>", "<|box_end|>")


@dataclass(frozen=True)
class PointParse:
    """One point, and the box it is the centre of when a box was written; None with the `reason` when parsing failed."""

    point: Point | None
    box: Box | None = None
    reason: str | None = None


# from text to a point


def _no(reason: str) -> PointParse:
    return PointParse(None, reason=reason)


def centre(box: Sequence[float]) -> Point:
    """The middle of (x1, y1, x2, y2)."""
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def place_of(value: Any) -> PointParse:
    """The one point (or box, reduced to its centre) of a value as `load_json` gives it; reasons as in `parse_point`."""
    for _ in range(3):  # [[x, y]] and [{"point_2d": [[x, y]]}] are still one point
        if isinstance(value, dict):
            keys = list(_PLACES & value.keys())
            if len(keys) != 1:
                return _no("ambiguous_keys" if keys else "no_point_key")
            value = value[keys[0]]
            continue
        if not isinstance(value, list):
            return _no("not_a_point")
        if not value:
            return _no("no_point")
        for v in value:
            if type(v) is not int and type(v) is not float:
                break
        else:
            return _from_numbers(value)
        if len(value) > 1:
            several = all(isinstance(item, (list, dict)) for item in value)
            return _no("several_points" if several else "not_a_point")
        value = value[0]
    return _no("not_a_point")


def _from_numbers(numbers: list[Any]) -> PointParse:
    if len(numbers) not in (2, 4):
        return _no("wrong_count")
    for v in numbers:
        if not -MAX_COORDINATE <= v <= MAX_COORDINATE:  # inf and huge integers, too
            return _no("out_of_range")
    if len(numbers) == 2:
        return PointParse((float(numbers[0]), float(numbers[1])))
    box = (float(numbers[0]), float(numbers[1]), float(numbers[2]), float(numbers[3]))
    return PointParse(centre(box), box)


def parse_point(answer: str) -> PointParse:
    """The one point of an answer text, in whatever frame the text uses; the text must be that point and nothing else.

    A box becomes its centre and is kept in `box`. Reasons: answer_too_long, not_a_point, no_point, several_points,
    no_point_key, ambiguous_keys, wrong_count, not_finite, out_of_range. Never raises on any text.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return _no("answer_too_long")
    answer = answer.strip()
    if answer.startswith("<|"):
        boxes = parse_boxes(answer).boxes  # <|box_start|>(x1,y1),(x2,y2)<|box_end|>
        if len(boxes) == 1:
            return PointParse(centre(boxes[0]), boxes[0])
        opened, closed = _BOX_TOKENS
        if not (answer.startswith(opened) and answer.endswith(closed)):
            return _no("not_a_point")
        answer = answer[len(opened) : -len(closed)]
    try:
        return place_of(json_once(strip_fence(answer)))
    except (ValueError, RecursionError) as err:
        if str(err) == "duplicate keys":
            return _no("ambiguous_keys")
        return _no("not_finite" if str(err).startswith("not a number") else "not_a_point")


# from a point to a reward


def in_box(point: Sequence[float], box: Sequence[float], *, strict: bool = False) -> bool:
    """Is the point in (x1, y1, x2, y2), edges included, or with `strict` excluded?"""
    (x, y), (x1, y1, x2, y2) = point, box
    if strict:
        return x1 < x < x2 and y1 < y < y2
    return x1 - _EDGE <= x <= x2 + _EDGE and y1 - _EDGE <= y <= y2 + _EDGE


def _spread(box: Sequence[float], alpha: float, eps: float) -> tuple[float, float]:
    """Variances of the Gaussian of a box along x and y: (alpha * size)^2 + eps."""
    return (alpha * (box[2] - box[0])) ** 2 + eps, (alpha * (box[3] - box[1])) ** 2 + eps


def bhattacharyya(
    box: Sequence[float], other: Sequence[float], alpha: float = 0.5, eps: float = 1e-8
) -> float:
    """Bhattacharyya distance of the Gaussians of two boxes (centre, sigma = alpha * size), 0 for equal boxes.

    1/8 d^T S^-1 d + 1/2 ln(det S / sqrt(det S1 det S2)) with S = (S1 + S2) / 2 and diagonal S1, S2 (GUI-G2).
    """
    total = 0.0
    ends = zip(
        centre(box),
        centre(other),
        _spread(box, alpha, eps),
        _spread(other, alpha, eps),
        strict=True,
    )
    for a, b, first, second in ends:
        mean = (first + second) / 2
        total += (a - b) ** 2 / (8 * mean) + 0.5 * math.log(mean / math.sqrt(first * second))
    return max(0.0, total)


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"expected {name} to be a number in [{low:g}, {high:g}], found {value!r}")
    return float(value)


def _inside() -> PointReward:
    return lambda point, box, true, size: float(in_box(point, true))


def _strictly_inside() -> PointReward:
    return lambda point, box, true, size: float(in_box(point, true, strict=True))


def _gaussian(
    alpha: float = 0.5, coverage: float = 0.5, decimals: int | None = None, eps: float = 1e-8
) -> PointReward:
    """(1 - coverage) * point + coverage * overlap. Without a predicted box (or with one that has no area) overlap is 0."""
    alpha, share = _number("alpha", alpha, 1e-3, 10), _number("coverage", coverage, 0, 1)
    eps = _number("eps", eps, 1e-12, 1)
    if decimals is not None and (
        isinstance(decimals, bool) or not isinstance(decimals, int) or not 0 <= decimals <= 12
    ):
        raise ConfigError(
            f"expected decimals as a whole number in 0..12 or null, found {decimals!r}"
        )

    def rounded(value: float) -> float:
        return value if decimals is None else round(value, decimals)

    def reward(
        point: Point, box: Box | None, true: Sequence[float], size: Sequence[float]
    ) -> float:
        sx, sy = (
            max(math.sqrt(eps), alpha * side) for side in (true[2] - true[0], true[3] - true[1])
        )
        x, y = centre(true)
        value = rounded(math.exp(-0.5 * (((point[0] - x) / sx) ** 2 + ((point[1] - y) / sy) ** 2)))
        overlap = 0.0
        if box is not None and box[2] > box[0] and box[3] > box[1]:
            overlap = rounded(math.exp(-bhattacharyya(box, true, alpha, eps)))
        return min(1.0, (1 - share) * value + share * overlap)

    return reward


def _distance(reach: float = 0.25) -> PointReward:
    """1 - d / reach; d = distance to the box, x and y counted in widths and heights of the picture."""
    reach = _number("reach", reach, 1e-3, 10)

    def reward(
        point: Point, box: Box | None, true: Sequence[float], size: Sequence[float]
    ) -> float:
        if in_box(point, true):
            return 1.0
        dx = max(true[0] - point[0], 0.0, point[0] - true[2]) / size[0]
        dy = max(true[1] - point[1], 0.0, point[1] - true[3]) / size[1]
        return max(0.0, 1.0 - math.hypot(dx, dy) / reach)

    return reward


MODES: Mapping[str, Callable[..., PointReward]] = {
    "inside": _inside,
    "gaussian": _gaussian,
    "distance": _distance,
    "ui_r1": _inside,
    "gui_r1": _strictly_inside,
}
"""Mode -> factory(**parameters) -> PointReward."""


def make_point_reward(mode: str, **params: Any) -> PointReward:
    """The reward of `mode`. Raises ConfigError for unknown modes and parameters, and for values out of range."""
    return by_mode("accuracy", MODES, mode, params)


# without truth


def region_votes(
    places: Sequence[Sequence[float] | None],
    size: Sequence[float] | None = None,
    expand: float = 50.0,
) -> list[float]:
    """GUI-RCPO's label-free reward of each answer in a group: how many votes its region holds, against the most voted spot.

    `places` are boxes, points (grown by `expand` pixels to each side) or None (no answer: votes nothing, earns 0), in pixels
    of the original picture. Each region, rounded to whole pixels and cut to `size` = (width, height), votes for its pixels;
    reward = sum(votes in the region) / (max(votes) * area of the region). Exact for pictures of any size: votes are
    counted between the regions' edges, not pixel by pixel.
    """
    width, height = size if size is not None else (math.inf, math.inf)
    low = 0.0 if size is not None else -math.inf
    regions: list[tuple[float, float, float, float] | None] = []
    for place in places:
        if place is None:
            regions.append(None)
            continue
        x1, y1, x2, y2 = (
            place
            if len(place) == 4
            else (place[0] - expand, place[1] - expand, place[0] + expand, place[1] + expand)
        )
        x1, x2 = (min(max(math.floor(v + 0.5), low), width) for v in (x1, x2))
        y1, y2 = (min(max(math.floor(v + 0.5), low), height) for v in (y1, y2))
        regions.append((x1, y1, x2, y2) if x2 > x1 and y2 > y1 else None)
    voters = [region for region in regions if region is not None]
    if not voters:
        return [0.0] * len(regions)
    xs, ys = (np.unique([v for r in voters for v in (r[k], r[k + 2])]) for k in (0, 1))
    cells = {
        r: tuple(
            int(i)
            for edges, ends in ((ys, r[1::2]), (xs, r[0::2]))
            for i in np.searchsorted(edges, ends)
        )
        for r in set(voters)
    }
    votes = np.zeros((len(ys) - 1, len(xs) - 1))
    for region in voters:
        top, bottom, left, right = cells[region]
        votes[top:bottom, left:right] += 1
    held = votes * np.diff(ys)[:, None] * np.diff(xs)[None, :]
    most = float(votes.max())
    rewards = {}
    for region, (top, bottom, left, right) in cells.items():
        area = (region[2] - region[0]) * (region[3] - region[1])
        rewards[region] = min(1.0, float(held[top:bottom, left:right].sum()) / (most * area))
    return [0.0 if region is None else rewards[region] for region in regions]
