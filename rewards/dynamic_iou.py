"""From a pair of boxes to a reward in [0, 1]: plain, thresholded, scheduled (Dynamic IoU), averaged or smooth.

Dynamic IoU (V-Triune, "One RL to See Them All", reward_server/verify.py) asks for more precision as training goes on:
with s = step / total_steps the threshold e is 0.85 while s <= 0.10, 0.95 while s <= 0.25, then 0.99.

    python -c "from mmrl.rewards.dynamic_iou import make_iou_reward as m; print(m('dynamic')((0,0,9,9), (0,0,10,9), 0.05))"
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.errors import ConfigError, did_you_mean
from mmrl.rewards.iou import box_giou, box_iou

__all__ = [
    "AVERAGE_THRESHOLDS",
    "DYNAMIC_SCHEDULE",
    "IoUReward",
    "MODES",
    "make_iou_reward",
    "threshold_at",
]

Schedule = tuple[tuple[float, float], ...]

DYNAMIC_SCHEDULE: Schedule = ((0.10, 0.85), (0.25, 0.95), (1.0, 0.99))
"""(upper end of progress, inclusive; IoU threshold), as published with V-Triune."""

AVERAGE_THRESHOLDS = (0.50, 0.55, 0.60, 0.65, 0.70, 0.75, 0.80, 0.85, 0.90, 0.95, 0.99)
"""V-Triune's `average` mode: the COCO thresholds and 0.99."""


def threshold_at(
    progress: float, schedule: Sequence[tuple[float, float]] = DYNAMIC_SCHEDULE
) -> float:
    """IoU threshold at `progress` (step / total_steps, clipped to [0, 1])."""
    clipped = min(1.0, max(0.0, progress))
    return next((threshold for until, threshold in schedule if clipped <= until), schedule[-1][1])


@dataclass(frozen=True)
class IoUReward:
    """reward(predicted box, true box, progress) in [0, 1]; equal boxes give exactly 1 in every mode.

    `ceiling` (default 1) is the best IoU the answer format can reach, since it rounds coordinates: thresholds never ask
    for more, so that small objects keep a reachable reward at e = 0.99. `threshold(progress)` is for logs.
    """

    mode: str
    of_iou: Callable[[float, float, float], float]
    threshold: Callable[[float], float]

    def __call__(
        self,
        predicted: Sequence[float],
        true: Sequence[float],
        progress: float = 1.0,
        ceiling: float = 1.0,
    ) -> float:
        similarity = box_giou(predicted, true) if self.mode == "giou" else box_iou(predicted, true)
        return self.of_iou(similarity, progress, ceiling)


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"expected {name} to be a number in [{low:g}, {high:g}], found {value!r}")
    return float(value)


def _check_schedule(schedule: Any) -> Schedule:
    fix = "for example [[0.10, 0.85], [0.25, 0.95], [1.0, 0.99]]"
    if (
        not isinstance(schedule, (list, tuple))
        or not schedule
        or any(not isinstance(row, (list, tuple)) or len(row) != 2 for row in schedule)
    ):
        raise ConfigError(
            f"expected schedule as pairs [progress until, threshold], found {schedule!r}; {fix}"
        )
    pairs = tuple(
        (_number("schedule progress", u, 0, 1), _number("schedule threshold", t, 0, 1))
        for u, t in schedule
    )
    ends = [until for until, _ in pairs]
    if any(b <= a for a, b in itertools.pairwise(ends)) or ends[-1] != 1.0:
        raise ConfigError(f"expected schedule progress to rise and end at 1.0, found {ends}; {fix}")
    return pairs


def _check_thresholds(thresholds: Any) -> tuple[float, ...]:
    if not isinstance(thresholds, (list, tuple)) or not thresholds:
        raise ConfigError(
            f"expected thresholds as numbers in [0, 1], found {thresholds!r}; for example [0.5, 0.7]"
        )
    return tuple(_number("thresholds", t, 0, 1) for t in thresholds)


def _above(iou: float, threshold: float, ceiling: float, binary: bool) -> float:
    return (1.0 if binary else iou) if iou > 0 and iou >= min(threshold, ceiling) else 0.0


def _iou(power: float = 1.0) -> IoUReward:
    """IoU ** power: power 1 as in VLM-R1 and EasyVideoR1, 2 as in Perception-R1."""
    exponent = _number("power", power, 0.1, 10)
    return IoUReward("iou", lambda iou, progress, ceiling: iou**exponent, lambda progress: 0.0)


def _giou() -> IoUReward:
    """Scaled GIoU, (GIoU + 1) / 2; rewards also approaching a box that is not touched yet."""
    return IoUReward("giou", lambda giou, progress, ceiling: giou, lambda progress: 0.0)


def _static(threshold: float = 0.5, binary: bool = False) -> IoUReward:
    """IoU where IoU >= threshold, else 0; `binary` pays 1 instead of the IoU."""
    fixed, as_one = _number("threshold", threshold, 0, 1), bool(binary)
    return IoUReward(
        "static",
        lambda iou, progress, ceiling: _above(iou, fixed, ceiling, as_one),
        lambda progress: fixed,
    )


def _dynamic(schedule: Any = DYNAMIC_SCHEDULE, binary: bool = False) -> IoUReward:
    """IoU where IoU >= e(progress), else 0 (V-Triune's detection reward for one box without completeness)."""
    pairs, as_one = _check_schedule(schedule), bool(binary)
    return IoUReward(
        "dynamic",
        lambda iou, progress, ceiling: _above(iou, threshold_at(progress, pairs), ceiling, as_one),
        lambda progress: threshold_at(progress, pairs),
    )


def _average(thresholds: Any = AVERAGE_THRESHOLDS, binary: bool = False) -> IoUReward:
    """Mean over `thresholds` of the static reward (V-Triune's default)."""
    levels, as_one = _check_thresholds(thresholds), bool(binary)

    def of_iou(iou: float, progress: float, ceiling: float) -> float:
        return math.fsum(_above(iou, level, ceiling, as_one) for level in levels) / len(levels)

    return IoUReward("average", of_iou, lambda progress: math.fsum(levels) / len(levels))


def _smooth(schedule: Any = DYNAMIC_SCHEDULE, width: float = 0.1, floor: float = 0.1) -> IoUReward:
    """mmrl's soft Dynamic IoU: no cliff, so groups far below the threshold still have different rewards.

        f(u) = u * (floor + (1 - floor) * min(1, sigmoid((u - e) / width) / sigmoid((c - e) / width)))

    with c the ceiling and e = min(e(progress), c). f(0) = 0, f(c) = c, f(1) = 1, rising in u; width -> 0 and floor = 0
    give `dynamic`.
    """
    pairs = _check_schedule(schedule)
    scale, base = _number("width", width, 1e-3, 10), _number("floor", floor, 0, 1)

    def sigmoid(z: float) -> float:
        return 1.0 / (1.0 + math.exp(-z)) if z > -700 else 0.0

    def of_iou(iou: float, progress: float, ceiling: float) -> float:
        level = min(threshold_at(progress, pairs), ceiling)
        gate = min(1.0, sigmoid((iou - level) / scale) / sigmoid((ceiling - level) / scale))
        return min(1.0, iou * (base + (1.0 - base) * gate))

    return IoUReward("smooth", of_iou, lambda progress: threshold_at(progress, pairs))


MODES: Mapping[str, Callable[..., IoUReward]] = {
    "iou": _iou,
    "giou": _giou,
    "static": _static,
    "dynamic": _dynamic,
    "average": _average,
    "smooth": _smooth,
}


def make_iou_reward(mode: str = "dynamic", **params: Any) -> IoUReward:
    """The IoU reward called `mode`: callable(predicted box, true box, progress) -> [0, 1].

    Parameters by mode: iou(power), giou(), static(threshold, binary), dynamic(schedule, binary),
    average(thresholds, binary), smooth(schedule, width, floor). Raises ConfigError for an unknown mode or parameter and
    for values out of range.
    """
    if mode not in MODES:
        raise ConfigError(
            f"unknown IoU mode {mode!r}; expected one of {', '.join(MODES)}.{did_you_mean(mode, MODES)}"
        )
    factory = MODES[mode]
    known = list(inspect.signature(factory).parameters)
    for name in params:
        if name not in known:
            raise ConfigError(
                f"unknown parameter {name!r} of IoU mode {mode!r}; expected "
                f"{', '.join(known) or 'none'}.{did_you_mean(name, known)}"
            )
    return factory(**params)
