"""Variance-based selection: keep the groups that teach most, and bring their samples back before others.

VCRL (Jiang et al. 2025, arXiv 2509.19803): the variance of a group's rewards, relative to the largest possible, is high
where the policy solves a prompt about half of the time. Groups below a threshold are replaced; replacements come first from
a memory of high-variance samples, ordered by a priority with momentum. Temporal-R1 filters by the standard deviation of the
rewards instead (kind 'std'). The engine's DynamicSampler does the replacing; this adds the verdict and the memory:

    selection.begin_step(step, places)
    strength = selection.strength(rewards, 0.0, 1.0)          # kept when selection.keeps(strength)
    selection.observe(source, sample_id, strength)            # in order of group key, the same on every process
    again = selection.replay(allowed)                         # (source, sample id) for a place to refill, or None
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmrl.algorithms.advantages import group_std
from mmrl.config import SelectionConfig
from mmrl.errors import CheckpointError

__all__ = ["VarianceSelection", "largest_variance"]

Name = tuple[str, str]


def largest_variance(group_size: int, low: float = 0.0, high: float = 1.0) -> float:
    """Largest unbiased variance of `group_size` rewards in [low, high]: half at each end (VCRL's sigma_max squared).

    (high - low)^2 * k (G - k) / (G (G - 1)) with k = G // 2, that is G / (4 (G - 1)) for even and (G + 1) / (4 G) for odd G.
    """
    if group_size < 2:
        return 0.0
    k = group_size // 2
    return (high - low) ** 2 * k * (group_size - k) / (group_size * (group_size - 1))


class VarianceSelection:
    """Verdicts and the replay memory. All of its state is in `state_dict`, as JSON values."""

    def __init__(self, settings: SelectionConfig) -> None:
        self.settings = settings
        # (source, sample id) -> (priority, last step rolled out)
        self._memory: dict[Name, tuple[float, int]] = {}
        self._step, self._room = 0, 0
        self.replayed = 0  # in this step

    def __len__(self) -> int:
        return len(self._memory)

    def begin_step(self, step: int, places: int) -> None:
        """Open a step of `places` groups."""
        self._step, self.replayed, self._room = (
            step,
            0,
            math.floor(places * self.settings.replay_share),
        )

    def strength(self, rewards_G: Sequence[float], low: float = 0.0, high: float = 1.0) -> float:
        """Spread of one group: variance / largest variance of rewards in [low, high], at most 1; or the unbiased std."""
        std = group_std(rewards_G)
        if self.settings.kind == "std":
            return std
        largest = largest_variance(len(rewards_G), low, high)
        return min(1.0, std * std / largest) if largest > 0 else 0.0

    def keeps(self, strength: float) -> bool:
        """Whether a group is trained on: it must spread at all, and reach the threshold (up to rounding)."""
        return strength > 0 and strength >= self.settings.threshold_at(self._step) - 1e-12

    def observe(self, source: str, sample_id: str, strength: float) -> None:
        """A rolled-out group. New samples enter when kept; known ones move their priority, and leave below the threshold."""
        name, momentum = (source, sample_id), self.settings.momentum
        if name in self._memory:
            priority = momentum * self._memory[name][0] + (1 - momentum) * strength
        else:
            priority = strength
        if self.keeps(priority):
            self._memory[name] = (priority, self._step)
        else:
            self._memory.pop(name, None)
        while len(self._memory) > self.settings.memory:
            del self._memory[min(self._memory, key=lambda n: (*self._memory[n], n))]

    def replay(
        self, allowed: Callable[[str, str], bool] = lambda source, sample_id: True
    ) -> Name | None:
        """The remembered sample of highest priority that has rested, or None when there is none or the share is used up."""
        if self.replayed >= self._room:
            return None
        rested = [
            n
            for n, (_, last) in self._memory.items()
            if self._step - last >= self.settings.rest and allowed(*n)
        ]
        if not rested:
            return None
        best = min(rested, key=lambda n: (-self._memory[n][0], self._memory[n][1], n))
        self._memory[best] = (self._memory[best][0], self._step)  # not twice in one step
        self.replayed += 1
        return best

    def metrics(self) -> dict[str, float]:
        """Numbers for the step's row."""
        priorities = [priority for priority, _ in self._memory.values()]
        mean = {"priority": math.fsum(priorities) / len(priorities)} if priorities else {}
        return {"replayed": self.replayed, "memory": len(priorities), **mean}

    def state_dict(self) -> dict[str, Any]:
        """The memory; take it between steps."""
        return {
            "memory": [[*name, priority, last] for name, (priority, last) in self._memory.items()]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Raises CheckpointError for a state of another shape."""
        try:
            memory = {
                (str(source), str(name)): (float(priority), int(last))
                for source, name, priority, last in state["memory"]
            }
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"expected the memory of variance selection, found something else ({error!r}); resume from "
                "an earlier checkpoint"
            ) from error
        self._memory = memory
