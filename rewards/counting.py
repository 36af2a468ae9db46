"""Counting: the number in an answer, and rewards for it: exact, smooth, relative, or with the points that were counted.

The number is read from the answer only. It must be the one number of a short text: digits ("3", "1,200", "3.0") or words
from "zero" to "ninety-nine"; "3 or 4" is no answer, and neither is "not 3", "about 3" or "at least 3". 0 is a number like
any other.

    python -c "from mmrl.rewards.counting import parse_count; print(parse_count('There are twenty-one.'))"
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmrl.errors import ConfigError, did_you_mean
from mmrl.rewards.matching import hungarian_pairs, matched_sum
from mmrl.rewards.modes import by_mode
from mmrl.rewards.reading.words import HEDGES, LEADS, ONES, TENS

__all__ = [
    "CountParse",
    "CountingReward",
    "MAX_COUNT",
    "MODES",
    "closeness",
    "found_points",
    "make_counting_reward",
    "parse_count",
    "point_closeness",
]

MAX_COUNT = 1_000_000
"""Larger numbers are refused ('out_of_range')."""
_MAX_CHARS = 200
_DIAGONAL = 1000 * math.sqrt(2)
_NEAR = 10.0  # thousandths: true points this near to each other may be answered by equal points; the least reach
_POINT_RULES = ("matched", "published")
_WORDS = {
    **{word: value for value, word in enumerate(ONES)},
    **{word: 10 * (i + 2) for i, word in enumerate(TENS)},
}
_TOKEN = re.compile(
    rf"(?P<digits>(?<![\w.,])-?[0-9]+(?:,[0-9]{{3}})*(?:\.[0-9]+)?(?![\w%]|[.,][0-9]))"
    rf"|\b(?P<tens>{'|'.join(TENS)})(?:[- ](?P<ones>{'|'.join(ONES[1:10])}))?\b"
    rf"|\b(?P<small>{'|'.join(ONES)})\b",
    re.IGNORECASE,
)
_OTHER_SIZES = re.compile(
    r"\b(?:hundreds?|thousands?|\w*illi(?:on|ard)s?|lakhs?|crores?|googol|dozens?|scores?|percent|bn|mn|tn|k|m"
    r"|half|halves|quarters?|thirds?|minus|negative)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class CountParse:
    """The count, or None with the reason; `alone`: no letter or digit stands beside it."""

    count: int | None
    reason: str | None = None
    alone: bool = True


def parse_count(answer: str) -> CountParse:
    """The one number of an answer text of at most 200 characters.

    Reasons: empty, answer_too_long, not_a_number, several_numbers, hedged ('not 4', 'about 4', 'at least 4', '4 or more'),
    not_a_count (negative or broken), out_of_range.
    Never raises on any text.
    """
    if len(answer) > _MAX_CHARS:
        return CountParse(None, "answer_too_long")
    if not answer.strip():
        return CountParse(None, "empty")
    if _OTHER_SIZES.search(answer):  # "one hundred" is not 1
        return CountParse(None, "not_a_number")
    tokens = list(_TOKEN.finditer(answer))
    digits = sum(char.isdigit() for char in answer)
    if len(tokens) != 1 or digits != sum(char.isdigit() for char in tokens[0][0]):
        # a stray digit is a second number
        return CountParse(None, "several_numbers" if tokens else "not_a_number")
    token = tokens[0]
    if HEDGES.search(answer) or LEADS.search(answer[: token.start()]):
        return CountParse(None, "hedged")
    alone = not any(char.isalnum() for char in answer[: token.start()] + answer[token.end() :])
    if not token["digits"]:
        ones = _WORDS[token["ones"].lower()] if token["ones"] else 0
        return CountParse(_WORDS[(token["tens"] or token["small"]).lower()] + ones, alone=alone)
    whole, _, fraction = token["digits"].replace(",", "").partition(".")
    if whole.startswith("-") or fraction.strip("0"):
        return CountParse(None, "not_a_count")
    if len(whole.lstrip("0")) > 7 or int(whole) > MAX_COUNT:
        return CountParse(None, "out_of_range")
    return CountParse(int(whole), alone=alone)


def closeness(predicted: int, true: int) -> float:
    """min / max, in [0, 1]; 1 when both are 0."""
    return min(predicted, true) / max(predicted, true) if predicted != true else 1.0


def point_closeness(predicted: Sequence[Sequence[float]], true: Sequence[Sequence[float]]) -> float:
    """1 - mean distance of matched points / (1000 * sqrt(2)), in [0, 1]; points in thousandths of the picture's sides.

    Pairs are matched by the smallest sum of distances. Both empty: 1; only one: 0. Points outside the picture are moved
    to its edge.
    """
    if not len(predicted) or not len(true):
        return float(len(predicted) == len(true))
    a, b = (
        np.clip(np.asarray(predicted, dtype=np.float64), 0, 1000),
        np.clip(np.asarray(true, dtype=np.float64), 0, 1000),
    )
    distance_NM = np.sqrt(((a[:, None] - b[None, :]) ** 2).sum(-1))
    pairs = hungarian_pairs(1.0 - distance_NM / (_DIAGONAL + 1), count_first=True)
    return max(
        0.0, 1.0 - math.fsum(float(distance_NM[i, j]) for i, j in pairs) / len(pairs) / _DIAGONAL
    )


def found_points(
    predicted: Sequence[Sequence[float]], true: Sequence[Sequence[float]], reach: float = 100.0
) -> float:
    """How many true points were found, in [0, min(N, M)]; points in thousandths of the picture's sides.

    Pairs are one to one, with the largest sum of credits. A pair's credit is 1 up to half the reach of its true point and
    falls in a straight line to 0 at its reach: half the distance to the nearest other true point, within [10, `reach`].
    So a point that is near to several true points is one of them at most, however crowded the picture.
    """
    if not len(predicted) or not len(true):
        return 0.0
    a, b = (np.clip(np.asarray(points, dtype=np.float64), 0, 1000) for points in (predicted, true))
    apart_MM = np.sqrt(((b[:, None] - b[None, :]) ** 2).sum(-1))
    np.fill_diagonal(apart_MM, math.inf)
    reach_M = np.clip(apart_MM.min(1) / 2, _NEAR, reach)
    distance_NM = np.sqrt(((a[:, None] - b[None, :]) ** 2).sum(-1))
    credit_NM = np.clip(2 * (1 - distance_NM / reach_M[None, :]), 0, 1)
    return matched_sum(credit_NM, hungarian_pairs(credit_NM))


def _without_copies(
    points: Sequence[Sequence[float]], true: Sequence[Sequence[float]]
) -> list[Sequence[float]]:
    """`points`, each at most as often as there are true points within _NEAR of it (but at least once)."""
    kept: list[Sequence[float]] = []
    for point, times in Counter(tuple(p) for p in points).items():
        near = (
            sum(max(abs(a - b) for a, b in zip(point, t, strict=True)) <= _NEAR for t in true)
            if times > 1
            else 1
        )
        kept += [point] * min(times, max(1, near))
    return kept


def _published_points(
    predicted: Sequence[Sequence[float]], true: Sequence[Sequence[float]]
) -> float:
    """Perception-R1's formula; a point that is given again counts in max only."""
    kept = _without_copies(predicted, true)
    share = (
        min(len(kept), len(true)) / max(len(predicted), len(true))
        if len(predicted) or len(true)
        else 1.0
    )
    return share * point_closeness(kept, true)


Points = Sequence[Sequence[float]]


@dataclass(frozen=True)
class CountingReward:
    """reward(predicted count, true count, predicted points, true points) in [0, 1]; points only matter to mode 'points'."""

    mode: str
    of_counts: Callable[[int, int], float]
    of_points: Callable[[Points, Points], float] | None = None

    def __call__(
        self,
        predicted: int,
        true: int,
        points: Points | None = None,
        true_points: Points | None = None,
    ) -> float:
        if min(predicted, true) < 0:
            raise ValueError(f"expected counts >= 0, found {predicted} and {true}")
        if self.of_points is None:
            return self.of_counts(predicted, true)
        if true_points is None or len(true_points) != true:
            raise ValueError(
                f"expected the {true} true points for mode 'points', found "
                f"{'none' if true_points is None else len(true_points)}; give params.points"
            )
        if points is None or len(points) != predicted:
            return 0.0
        return self.of_points(points, true_points)


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"expected {name} to be a number in [{low:g}, {high:g}], found {value!r}")
    return float(value)


def _exact() -> CountingReward:
    """1 for the right number, else 0: the default, since anything smoother pays for being nearly right on large counts."""
    return CountingReward("exact", lambda predicted, true: float(predicted == true))


def _smooth(power: float = 1.0) -> CountingReward:
    """(min / max) ** power; both 0 give 1."""
    exponent = _number("power", power, 0.1, 100)
    return CountingReward("smooth", lambda predicted, true: closeness(predicted, true) ** exponent)


def _relative() -> CountingReward:
    """1 - min(1, abs(p - g) / g) (Video-R1's regression rule); a true 0 is only met by 0."""
    return CountingReward(
        "relative",
        lambda predicted, true: (
            max(0.0, 1 - abs(predicted - true) / true) if true else float(predicted == 0)
        ),
    )


def _points(rule: str = "matched", reach: float = 100.0) -> CountingReward:
    """F1 of the points: 2 * found / (N_p + N_g), see `found_points`; a bare number earns 0. Both empty: 1.

    `rule: published` is Perception-R1's min / max * (1 - mean distance / (1000 * sqrt(2))) over matched points. Distance hardly
    counts in it, so as many points as there are objects, anywhere, earn more than half of the objects found: it pays for
    guessing. It is corrected in one thing only: an equal point given again counts in max alone.
    """
    if rule not in _POINT_RULES:
        raise ConfigError(
            f"expected rule as one of {', '.join(_POINT_RULES)}, found {rule!r}."
            f"{did_you_mean(str(rule), _POINT_RULES)}"
        )
    far = _number("reach", reach, _NEAR, 1000)

    def matched(predicted: Points, true: Points) -> float:
        both = len(predicted) + len(true)
        return min(1.0, 2 * found_points(predicted, true, far) / both) if both else 1.0

    return CountingReward(
        "points", closeness, _published_points if rule == "published" else matched
    )


MODES: Mapping[str, Callable[..., CountingReward]] = {
    "exact": _exact,
    "smooth": _smooth,
    "relative": _relative,
    "points": _points,
}


def make_counting_reward(mode: str = "exact", **params: Any) -> CountingReward:
    """The counting reward called `mode`. Parameters: smooth(power), points(rule, reach), else none. Raises ConfigError."""
    return by_mode("counting", MODES, mode, params)
