"""Slots of environments in S stages: while one stage's environments work, the policy answers another's.

    stages = Stages(slots=8, stages=2)
    stages.sent(3)                      # an action is on its way to slot 3
    stages.answered(3)                  # its observation is there
    stages.due()                        # [3]: all of its stage that work have answered, so the policy may answer them

A stage is a block of neighbouring slots. It is due when none of its slots is at work, so that its observations go
through the policy in one batch; a slow environment holds up its own stage only. Among several the one that works for the
earliest group comes first (`rank`), so that the step to be trained is not held up by a later one. Without ranks, or with equal
ones, it is the one whose oldest observation waits longest. None starves: earlier groups end. S = 1 is lock-step: environments
and policy alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mmrl.errors import ConfigError

__all__ = ["Stages"]


class Stages:
    """Which slots are free, at work, or have answered. Everything here is bookkeeping of one thread."""

    def __init__(self, slots: int, stages: int) -> None:
        if not 1 <= stages <= slots:
            raise ConfigError(
                f"expected 1 <= stages <= slots, found {stages} stages of {slots} slots"
            )
        self.blocks: tuple[range, ...] = tuple(
            range(s * slots // stages, (s + 1) * slots // stages) for s in range(stages)
        )
        self._stage_of = [s for s, block in enumerate(self.blocks) for _ in block]
        self._at_work: list[set[int]] = [set() for _ in range(stages)]
        # slot -> number of its answer
        self._answered: list[dict[int, int]] = [{} for _ in range(stages)]
        self._clock = 0

    def sent(self, slot: int) -> None:
        """Something was asked of the slot's environment."""
        stage = self._stage_of[slot]
        assert slot not in self._at_work[stage], f"slot {slot} is at work already"
        self._answered[stage].pop(slot, None)
        self._at_work[stage].add(slot)

    def answered(self, slot: int) -> None:
        """Its observation is there and wants an action."""
        stage = self._stage_of[slot]
        self._at_work[stage].remove(slot)
        self._clock += 1
        self._answered[stage][slot] = self._clock

    def release(self, slot: int) -> None:
        """Its episode ended: it is free, and nobody waits for it."""
        stage = self._stage_of[slot]
        self._at_work[stage].discard(slot)
        self._answered[stage].pop(slot, None)

    def free(self, stage: int) -> list[int]:
        """Slots of a stage without an episode."""
        return [
            s
            for s in self.blocks[stage]
            if s not in self._at_work[stage] and s not in self._answered[stage]
        ]

    def working(self, slot: int) -> bool:
        """Whether something was asked of it that has not been answered."""
        return slot in self._at_work[self._stage_of[slot]]

    @property
    def at_work(self) -> int:
        """Slots whose environment works."""
        return sum(map(len, self._at_work))

    def due(self, rank: Callable[[int], Any] | None = None) -> Sequence[int]:
        """Slots the policy is to answer now, all of one stage, in order; empty while every stage is at work or idle. `rank` of a
        slot orders its episodes' groups, earlier first."""
        ready = [
            s for s, answered in enumerate(self._answered) if answered and not self._at_work[s]
        ]
        if not ready:
            return []
        return sorted(
            self._answered[
                min(
                    ready,
                    key=lambda s: min(
                        (rank(slot) if rank else 0, time)
                        for slot, time in self._answered[s].items()
                    ),
                )
            ]
        )
