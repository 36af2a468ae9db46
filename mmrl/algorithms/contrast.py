"""Contrast groups: does the policy answer better with its input than with a changed one? T-GRPO and its relatives.

T-GRPO (Video-R1, arXiv 2503.21776; grpo_trainer.py) answers each video question twice: G times with the frames in order
and G / 2 times with shuffled frames. Where the mean accuracy p in order is at least `factor` times the mean p~ of the
shuffled group, every ordered answer with accuracy above `threshold` gets `bonus` on its reward. The code uses 0.8, 0.1 and
0.3 (the paper's text writes p >= p~); all are parameters here, and so is the size of the shuffled group.

Rewards that are only right or wrong lose the bonus again where advantages are divided by the group's own spread
(advantage_scale std): right and wrong stay two values, and (r - mean) / std is the same for any two. T-GRPO is GRPO there,
except for its longer rollout. The bonus acts where rewards have more than two values (a format or length part that differs,
graded accuracy), and with advantage_scale none. A divisor that several groups share (batch, batch_rewards, ema, ema_within,
reward_aggregation gdpo) keeps it where some of them get it and others do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mmrl.errors import ConfigError

__all__ = ["ContrastSettings", "bonuses", "gap", "needs_contrast"]


@dataclass(frozen=True)
class ContrastSettings:
    """Video-R1's condition and bonus. With `skip`, a group whose contrast cannot change any advantage, by the rules of
    `needs_contrast`, is not generated."""

    factor: float = 0.8
    threshold: float = 0.1
    bonus: float = 0.3
    skip: bool = True
    pooled: bool = False
    """Advantages are divided by a std of the rewards of several groups (advantage_scale ema, batch_rewards), so that a bonus
    for every answer of a group changes those of others."""

    def __post_init__(self) -> None:
        for name in ("factor", "threshold", "bonus"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(
                    f"expected algorithm.contrast.{name} as a number of at least 0, found {value!r}"
                )


def _qualified(accuracies: Sequence[float], settings: ContrastSettings) -> list[bool]:
    return [a > settings.threshold for a in accuracies]


def _separates(qualified: Sequence[bool], settings: ContrastSettings) -> bool:
    """Whether a bonus for the qualified answers changes an advantage."""
    return any(qualified) and (settings.pooled or not all(qualified))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def needs_contrast(
    accuracies: Sequence[float], settings: ContrastSettings, *, top: float = 1.0
) -> bool:
    """Whether a contrast group can matter to a group with these accuracies (whose highest possible value is `top`).

    It cannot when no answer, or every answer, would get the bonus (advantages compare answers of one group; `pooled`: when
    none would), nor when the condition holds whatever the contrast group does, because p >= factor * top. With `skip` False
    the answer is True.
    """
    if not settings.skip:
        return True
    if settings.bonus == 0 or not _separates(_qualified(accuracies, settings), settings):
        return False
    return _mean(accuracies) < settings.factor * top


def bonuses(
    accuracies: Sequence[float], contrast: Sequence[float] | None, settings: ContrastSettings
) -> list[float]:
    """The bonus of each answer: `bonus` for those above the threshold where p >= factor * p~, else 0.

    `contrast` is None for a group whose contrast was skipped (see `needs_contrast`): the bonus is paid where it matters,
    since the condition was certain there. An empty list (every contrast rollout failed) pays none.
    """
    qualified = _qualified(accuracies, settings)
    if contrast is None:
        granted = settings.skip and _separates(qualified, settings)
    else:
        granted = bool(contrast) and _mean(accuracies) >= settings.factor * _mean(contrast)
    return [settings.bonus if granted and good else 0.0 for good in qualified]


def gap(accuracies: Sequence[float], contrast: Sequence[float]) -> float:
    """p - p~: how much of the accuracy hangs on what was changed."""
    return _mean(accuracies) - _mean(contrast)
