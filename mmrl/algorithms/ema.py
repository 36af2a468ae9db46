"""EMA-GRPO: advantages divided by one running standard deviation per task instead of by each group's own.

Tasks reward on different scales: a group of IoUs spreads little, a group of right-or-wrong answers much. Dividing by the
group's own std inflates nearly solved prompts, dividing by none favours the task with the largest spread. OneThinker
(arXiv 2512.03043) divides by the task's exponential moving average of it. mmrl feeds it the groups of all processes in
order of their keys, and saves it with the checkpoint, so that ranks agree and a resumed run equals the uninterrupted one.

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


@dataclass(frozen=True, kw_only=True)
class EmaSettings:
    """OneThinker's constants."""

    decay: float = 0.99
    min_std: float = 1e-3
    """The smallest divisor, in rewards."""
    limit: float = 5.0
    """A group with a larger |advantage| is divided by its own std instead."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(f"expected ema.decay in [0, 1), found {self.decay}")
        if not self.min_std > 0 or not self.limit > 0:
            raise ConfigError(f"expected ema.min_std and ema.limit above 0, found {self.min_std} and {self.limit}")


class EmaScale:
    """Running mean and std of the rewards' groups per task; a state machine of plain numbers."""

    def __init__(self, settings: EmaSettings | None = None) -> None:
        self.settings = settings or EmaSettings()
        self._std: dict[str, float] = {}
        self._mean: dict[str, float] = {}  # logged only
        self.fallbacks = 0  # groups divided by their own std since the last update

    def update(self, groups: Sequence[tuple[str, Sequence[float]]]) -> None:
        """One step's groups (task, rewards), of all processes: EMA <- decay * EMA + (1 - decay) * x, once per task.

        x is the mean over the task's groups of their std (of their mean). Groups without signal do not count: dynamic
        sampling drops them, so counting them elsewhere would make the scale depend on it. The first x starts the EMA.
        """
        self.fallbacks = 0
        by_task: dict[str, list[Sequence[float]]] = {}
        for task, rewards in groups:
            if has_signal(rewards):
                by_task.setdefault(task, []).append(rewards)
        decay = self.settings.decay
        for task, rows in sorted(by_task.items()):
            std = math.fsum(group_std(r) for r in rows) / len(rows)
            mean = math.fsum(math.fsum(r) / len(r) for r in rows) / len(rows)
            self._std[task] = decay * self._std[task] + (1 - decay) * std if task in self._std else std
            self._mean[task] = decay * self._mean[task] + (1 - decay) * mean if task in self._mean else mean

    def advantages(self, task: str, rewards_G: Sequence[float]) -> list[float]:
        """(r - group mean) / max(EMA std of the task, min_std); the group's own std when that exceeds the limit.

        Call `update` with the group first: OneThinker updates, then uses.
        """
        offsets = centred(rewards_G)
        if not any(offsets):
            return offsets
        scale = max(self._std.get(task, 0.0), self.settings.min_std)
        scaled = [a / scale for a in offsets]
        if max(abs(a) for a in scaled) > self.settings.limit:
            self.fallbacks += 1
            return group_advantages(rewards_G).double().tolist()
        return scaled

    def metrics(self) -> dict[str, float]:
        """'TASK/std' and 'TASK/mean' for logging."""
        return {f"{task}/{name}": table[task] for task in sorted(self._std)
                for name, table in (("std", self._std), ("mean", self._mean))}

    def state_dict(self) -> dict[str, Any]:
        """JSON values; floats survive JSON exactly."""
        return {"std": dict(self._std), "mean": dict(self._mean)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Raises CheckpointError for a state of another shape."""
        try:
            std, mean = ({str(k): float(v) for k, v in state[name].items()} for name in ("std", "mean"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"expected the EMA state (std, mean by task), found something else ({error!r}); resume from "
                                  "an earlier checkpoint") from error
        self._std, self._mean = std, mean
