"""A costed rollout and trainer for scripts/bench_schedule.py: real worker processes, threads and executor, sleep as the work.

`CostedSource` plays the tiny simulator in an EnvPool, where a picture costs `render_s` of sleep; its inference sleeps
`infer_s` per observation; `CostedLearner` sleeps per decision of a group. What is measured is the scheduling, not the machine.
"""
from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmrl.pipeline import Closed
from mmrl.stages import Stages
from mmrl.timeline import Timeline
from robotics.contract import EnvSpec, initial_states
from robotics.pool import EnvPool

__all__ = ["Costs", "CostedLearner", "CostedSource"]


@dataclass(frozen=True)
class Costs:
    """A step's work: `groups` of `members` episodes with `decisions` each, and what each stage costs in all, in seconds per step
    when it works alone on all its workers. An episode has one picture more than decisions: the reset's."""

    render: float
    infer: float
    train: float
    groups: int = 64
    members: int = 4
    decisions: int = 3
    workers: int = 4

    @property
    def render_s(self) -> float:
        """Per picture."""
        return self.render * self.workers / (self.groups * self.members * (self.decisions + 1))

    @property
    def infer_s(self) -> float:
        """Per observation."""
        return self.infer / (self.groups * self.members * self.decisions)

    @property
    def train_s(self) -> float:
        """Per group."""
        return self.train / self.groups

    @property
    def spec(self) -> EnvSpec:
        """The environment."""
        return EnvSpec("tiny", "push", horizon=self.decisions, image_size=16,
                       options={"render_s": self.render_s, "stop_at_success": False})


@dataclass
class _Playing:
    step: int
    place: int
    version: int


class CostedSource:
    """A GroupSource on a pool, with `stages` stages of slots; see mmrl.pipeline."""

    def __init__(self, pool: EnvPool, costs: Costs, stages: int, timeline: Timeline) -> None:
        self.pool, self.costs, self.timeline = pool, costs, timeline
        self.stages = Stages(pool.num_slots, stages)
        self.state = initial_states("train", 1)[0]
        self._jobs: deque[tuple[int, int]] = deque()
        self._playing: dict[int, _Playing] = {}
        self._ended: Counter[tuple[int, int]] = Counter()

    def start(self, step: int) -> int:
        """See GroupSource."""
        self._jobs.extend((step, place) for place in range(self.costs.groups) for _ in range(self.costs.members))
        self._fill(range(self.pool.num_slots))
        return self.costs.groups

    def _fill(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self._jobs and slot not in self._playing:
                self._playing[slot] = _Playing(*self._jobs.popleft(), version=1 << 60)
                self.pool.reset(slot, self.costs.spec, self.state)
                self.stages.sent(slot)

    def poll(self, timeout_s: float) -> list[Closed[int]]:
        """See GroupSource."""
        closed = []
        for reply in self.pool.ready(timeout_s):
            if reply.error is not None:
                raise RuntimeError(reply.error)
            self.timeline.add("render", f"worker {reply.worker}", reply.started, reply.ended)
            if reply.chunk is None or not reply.chunk.done:
                self.stages.answered(reply.slot)
                continue
            self.stages.release(reply.slot)
            ended = self._playing.pop(reply.slot)
            self._ended[ended.step, ended.place] += 1
            if self._ended[ended.step, ended.place] == self.costs.members:
                closed.append(Closed(ended.step, ended.place, ended.place, ended.version))
            self._fill([reply.slot])
        return closed

    def ready(self) -> Sequence[int] | None:
        """See GroupSource."""
        return self.stages.due(lambda slot: (self._playing[slot].step, self._playing[slot].place)) or None

    def infer(self, batch: Sequence[int], version: int) -> list[Closed[int]]:
        """Sleep, then send an action to each slot."""
        time.sleep(self.costs.infer_s * len(batch))
        for slot in batch:
            self._playing[slot].version = min(self._playing[slot].version, version)
            self.pool.step(slot, np.zeros((1, 2)))
            self.stages.sent(slot)
        return []

    @property
    def running(self) -> int:
        """See GroupSource."""
        return self.stages.at_work

    def again(self, closed: Closed[int]) -> None:
        """Never needed here: every inference has the newest weights."""
        raise AssertionError(f"{closed} was refused")

    def publish(self, version: int) -> None:
        """Nothing to copy."""


class CostedLearner:
    """A Learner whose gradient is sleep."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.added = costs, 0

    def begin(self, step: int) -> None:
        """See Learner."""
        self.added = 0

    def add(self, group: Any) -> None:
        """Sleep for one group."""
        time.sleep(self.costs.train_s)
        self.added += 1

    def finish(self) -> int:
        """How many groups were added."""
        return self.added
