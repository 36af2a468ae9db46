"""Advantages divided by one running standard deviation per task instead of by each group's own.

Tasks reward on different scales: a group of IoUs spreads little, a group of right-or-wrong answers much. Dividing by the
group's own std inflates nearly solved prompts, dividing by none favours the task with the largest spread. Two rules:

    ema         EMA-GRPO as OneThinker's code has it (arXiv 2512.03043): EMAs of E[r] and E[r^2] over all rewards of the task
                that are trained on, std = sqrt(E[r^2] - E[r]^2). The spread between prompts counts, and so do equal rewards.
    ema_within  mmrl's own: the EMA of the mean std inside groups with signal. The spread between prompts does not count, so
                that a task whose prompts differ more than their answers do (IoU) gets larger advantages than under ema.

mmrl feeds it the groups of all processes in order of their keys, and saves it with the checkpoint, so that ranks agree and a
resumed run equals the uninterrupted one (OneThinker's tracker is each process's own, and is not saved).

    ema = EmaScale(); ema.update([("grounding", [0.2, 0.4]), ("counting", [0.0, 1.0])])
    ema.advantages("grounding", [0.2, 0.4])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.algorithms.advantages import centred, group_advantages, group_std, has_signal
from mmrl.errors import CheckpointError, ConfigError

__all__ = ["EmaScale", "EmaSettings"]

_EPS = 1e-6  # added to the divisor, as in OneThinker's code


@dataclass(frozen=True, kw_only=True)
class EmaSettings:
    """OneThinker's constants."""

    decay: float = 0.99
    min_std: float = 1e-3
    """The smallest divisor, in rewards."""
    limit: float = 5.0
    """A group with a larger |advantage| is divided by its own std instead."""
    within: bool = False
    """Whether only the spread inside groups counts (ema_within)."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(f"expected ema.decay in [0, 1), found {self.decay}")
        if not self.min_std > 0 or not self.limit > 0:
            raise ConfigError(
                f"expected ema.min_std and ema.limit above 0, found {self.min_std} and {self.limit}"
            )


class EmaScale:
    """Running mean and std of the rewards per task; a state machine of plain numbers."""

    def __init__(self, settings: EmaSettings | None = None) -> None:
        self.settings = settings or EmaSettings()
        self._mean: dict[str, float] = {}  # ema: E[r]; ema_within: logged only
        self._spread: dict[str, float] = {}  # ema: E[r^2]; ema_within: the std
        self.fallbacks = 0  # groups divided by their own std since the last update

    @property
    def _kept_as(self) -> str:
        """What a checkpoint calls `_spread`."""
        return "std" if self.settings.within else "square"

    def update(self, groups: Sequence[tuple[str, Sequence[float]]]) -> None:
        """One step's groups (task, rewards), of all processes: EMA <- decay * EMA + (1 - decay) * x, once per task.

        ema: x is the mean of the task's rewards, and that of their squares. ema_within: x is the mean over the task's groups of
        their std (of their mean); groups without signal do not count: dynamic sampling drops them, so counting them elsewhere
        would make the scale depend on it. The first x starts the EMA.
        """
        self.fallbacks = 0
        by_task: dict[str, list[Sequence[float]]] = {}
        for task, rewards in groups:
            if has_signal(rewards) or (rewards and not self.settings.within):
                by_task.setdefault(task, []).append(rewards)
        decay = self.settings.decay
        for task, rows in sorted(by_task.items()):
            if self.settings.within:
                mean = math.fsum(math.fsum(r) / len(r) for r in rows) / len(rows)
                spread = math.fsum(group_std(r) for r in rows) / len(rows)
            else:
                flat = [r for row in rows for r in row]
                mean, spread = (
                    math.fsum(flat) / len(flat),
                    math.fsum(r * r for r in flat) / len(flat),
                )
            for table, x in ((self._mean, mean), (self._spread, spread)):
                table[task] = decay * table[task] + (1 - decay) * x if task in table else x

    def std(self, task: str) -> float:
        """The task's divisor: its running std, at least min_std; min_std for a task that was never seen."""
        spread = self._spread.get(task, 0.0)
        if not self.settings.within:  # rounding may leave a negative variance
            spread = math.sqrt(max(0.0, spread - self._mean.get(task, 0.0) ** 2))
        return max(spread, self.settings.min_std)

    def advantages(self, task: str, rewards_G: Sequence[float]) -> list[float]:
        """(r - group mean) / running std of the task; by the group's own std where a value would exceed the limit.

        That own std is the population's for ema, as in OneThinker's code, and the unbiased one of GRPO for ema_within.
        Call `update` with the group first: OneThinker updates, then uses.
        """
        offsets = centred(rewards_G)
        if not any(offsets):
            return offsets
        scale = self.std(task) + (0.0 if self.settings.within else _EPS)
        scaled = [a / scale for a in offsets]
        if max(abs(a) for a in scaled) <= self.settings.limit:
            return scaled
        self.fallbacks += 1
        if self.settings.within:
            return group_advantages(rewards_G).double().tolist()
        own = math.sqrt(math.fsum(a * a for a in offsets) / len(offsets)) + _EPS
        return [a / own for a in offsets]

    def metrics(self) -> dict[str, float]:
        """'TASK/std' and 'TASK/mean' for logging."""
        return {
            f"{task}/{name}": value
            for task in sorted(self._mean)
            for name, value in (("std", self.std(task)), ("mean", self._mean[task]))
        }

    def state_dict(self) -> dict[str, Any]:
        """JSON values; floats survive JSON exactly."""
        return {"mean": dict(self._mean), self._kept_as: dict(self._spread)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Raises CheckpointError for a state of another shape or of the other rule."""
        rules = {"square": "ema", "std": "ema_within"}
        try:
            (found,) = rules.keys() & state.keys()
            mean, spread = (
                {str(k): float(v) for k, v in state[name].items()} for name in ("mean", found)
            )
            if mean.keys() != spread.keys():
                raise KeyError(*(mean.keys() ^ spread.keys()))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                "expected the EMA state (mean and square or std, by task), found something else "
                f"({error!r}); resume from an earlier checkpoint"
            ) from error
        if found != self._kept_as and mean:
            raise CheckpointError(
                f"expected the EMA state of advantage_scale {rules[self._kept_as]}, found that of {rules[found]} (the spread "
                f"inside groups, which checkpoints of mmrl before ema_within existed call ema, does not tell that of all rewards, "
                f"nor the other way round): resume with algorithm.advantage_scale={rules[found]}, or start a new run"
            )
        self._mean, self._spread = mean, spread
