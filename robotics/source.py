"""The simulators as a source of closed groups for mmrl.training.pipeline: initial states drawn, episodes played, groups judged.

A group in which all members succeeded, or all failed, teaches nothing: its place is given another initial state, up to
algorithm.max_rounds of them. Which state a place gets depends on step, place and attempt alone, so it is the same in every
schedule, on every machine, with every number of processes and after a resume.

In a run of several processes each plays its share of a step's places, by itself: places 1, 5, 9 are those of process 1 of 4.
Keys and records number the places of the whole step; mmrl.training.pipeline is told the process's own, from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mmrl.algorithms import trainable
from mmrl.robotics.config import EmbodiedConfig
from mmrl.robotics.contract import EnvSpec, InitialState, Split, initial_states, simulator_class
from mmrl.robotics.learning import return_settings, scored, teaches
from mmrl.robotics.rollout import Closing, Driver, GroupRequest
from mmrl.training.pipeline import ClosedGroup
from mmrl.types import RolloutGroup

__all__ = ["EpisodeSource", "Played", "StepRecord", "env_specs", "states_of"]


def env_specs(config: EmbodiedConfig) -> list[EnvSpec]:
    """The environments of a run, one per task."""
    e = config.env
    return [
        EnvSpec(e.suite, task, e.horizon, e.image_size, tuple(e.cameras), e.options)
        for task in e.tasks
    ]


def states_of(spec: EnvSpec, split: Split) -> list[InitialState] | None:
    """The recorded initial states of a split, or None where they come from seeds without end."""
    return simulator_class(spec.suite).recorded_states(spec.task, split)


@dataclass(frozen=True)
class Played:
    """What metrics and rollouts/ say of an episode, without its decisions: those hold prompts and with them pictures."""

    key: tuple[int, int, int]
    task: str
    state: str
    seed: int
    member: int
    success_once: bool
    success_at_end: bool
    steps: int
    reward: float
    error: str | None
    tokens: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, group: RolloutGroup) -> tuple[Played, ...]:
        """The members of a group."""
        s = group.sample
        return tuple(
            cls(
                group.key,
                s.task,
                s.id,
                s.params["state"].seed,
                m,
                bool(r.info.get("success_once")),
                bool(r.info.get("success_at_end")),
                r.steps,
                r.reward,
                r.error,
                tuple(t.token_ids for t in r.turns),
            )
            for m, r in enumerate(group.rollouts)
        )


@dataclass
class StepRecord:
    """What happened in one step: the episodes of every closed group, also of those not trained on."""

    groups: list[tuple[Played, ...]] = field(default_factory=list)
    kept: int = 0
    no_signal: int = 0
    failed: int = 0
    empty: int = 0

    def add(self, other: StepRecord) -> None:
        """Add the groups and counts of `other`."""
        self.groups += other.groups
        self.kept, self.no_signal = self.kept + other.kept, self.no_signal + other.no_signal
        self.failed, self.empty = self.failed + other.failed, self.empty + other.empty

    def take(self) -> StepRecord:
        """What it holds, which is forgotten here: for the record of another process."""
        taken = replace(self)
        self.__init__()  # type: ignore[misc]
        return taken


class EpisodeSource:
    """A mmrl.training.pipeline.GroupSource, of process `rank` of `size`. `records` holds a StepRecord of its places for each step
    that is open or just trained. `policy`: what trains, where the driver's policy is a copy of it: both have the weights of one
    version."""

    def __init__(
        self,
        config: EmbodiedConfig,
        driver: Driver,
        *,
        rank: int = 0,
        size: int = 1,
        policy: Any = None,
    ) -> None:
        self.config, self.driver, self.rank, self.size = config, driver, rank, size
        self._policy = policy
        self.specs = env_specs(config)
        self._states = [states_of(spec, "train") for spec in self.specs]
        self._closing = Closing()
        self.records: dict[int, StepRecord] = {}
        # by step and place: the attempt to begin with, None where a process that was lost has closed it
        self.tried: dict[tuple[int, int], int | None] = {}
        self._over: list[ClosedGroup[RolloutGroup]] = []  # such places

    def start(self, step: int) -> int:
        """See GroupSource."""
        self.records[step] = StepRecord()
        self.driver.begin_dealing()
        places = range(self.rank, self.config.train.prompts_per_step, self.size)
        for place in places:
            attempt = self.tried.pop((step, place), 0)
            if attempt is None:
                self._over.append(ClosedGroup(step, place // self.size, None, step - 1))
            else:
                self.driver.submit(self._request(step, place, attempt))
        return len(places)

    def _request(self, step: int, place: int, attempt: int) -> GroupRequest:
        rounds = self._rounds
        # a group rolled out again (see `again`) counts on above; the states it leads to are the same
        tried = attempt % rounds
        number = ((step - 1) * self.config.train.prompts_per_step + place) * rounds + tried
        # every task has its turn
        which = ((step - 1) * self.config.train.prompts_per_step + place) % len(self.specs)
        known = self._states[which]
        if known is None:
            state = initial_states("train", 1, first=number)[0]
        else:
            state = known[
                int(
                    np.random.default_rng((self.config.seed, 41, step, place, tried)).integers(
                        len(known)
                    )
                )
            ]
        return GroupRequest(
            (step, place, attempt), self.specs[which], state, self.config.rollout.group_size
        )

    @property
    def _rounds(self) -> int:
        a = self.config.algorithm
        # gae: where no episode finished
        return a.max_rounds if a.dynamic_sampling or a.advantage == "gae" else 1

    def poll(self, timeout_s: float) -> Sequence[ClosedGroup[RolloutGroup]]:
        """See GroupSource."""
        closed, self._over = self._over, []
        for ended in self.driver.poll(0.0 if closed else timeout_s):
            group = self._closing.add(ended)
            if group is not None and (end := self._judge(group)) is not None:
                closed.append(end)
        return closed

    def _judge(self, group: RolloutGroup) -> ClosedGroup[RolloutGroup] | None:
        """The end of the group's place, or None when another state is tried there."""
        step, place, attempt = group.key
        group = replace(
            group, rollouts=tuple(scored(r, return_settings(self.config)) for r in group.rollouts)
        )
        record, lesson = self.records[step], teaches(self.config, group)
        record.groups.append(Played.of(group))
        version = min(r.oldest_version(step - 1) for r in group.rollouts)
        # a critic judges each decision: what finished can be learned from
        if self.config.algorithm.advantage == "gae":
            wanted = any(map(trainable, group.rollouts))
        else:
            wanted = lesson is not None and (lesson or not self.config.algorithm.dynamic_sampling)
        if wanted:
            record.kept += 1
            return ClosedGroup(step, place // self.size, group, version)
        record.failed += lesson is None
        record.no_signal += lesson is not None
        if attempt % self._rounds + 1 < self._rounds:
            self.driver.submit(self._request(step, place, attempt + 1))
            return None
        record.empty += 1
        return ClosedGroup(step, place // self.size, None, version)

    def ready(self) -> Any:
        """See GroupSource."""
        return self.driver.due() or None

    def infer(self, batch: Any, version: int) -> Sequence[ClosedGroup[RolloutGroup]]:
        """See GroupSource."""
        self.publish(version)
        self.driver.infer(batch)
        return []

    def again(self, closed: ClosedGroup[RolloutGroup]) -> None:
        """See GroupSource: the same state once more, with the weights of now. Its key is new, so its noise is; which of the place's
        states it is stays readable as attempt modulo the number of rounds."""
        assert closed.group is not None
        step, place, attempt = closed.group.key
        self.records[step].kept -= 1
        self.driver.submit(GroupRequest.again(closed.group, (step, place, attempt + self._rounds)))

    def publish(self, version: int) -> None:
        """See GroupSource: inference uses the trained module itself, which from now on is that version, also for an evaluation
        between two steps, which decides for episodes of later steps as well."""
        self.driver.vla.version = version
        if self._policy is not None:
            self._policy.version = version

    @property
    def running(self) -> int:
        """See GroupSource."""
        return self.driver.at_work + len(self._over)
