"""What the tests of the executor share: environments with random speeds and lengths, and a learner with real gradients.

`Arena` is a source of groups without processes: whether an environment has answered is drawn anew at every poll, so the
order in which groups close changes with `speed_seed`, while what an episode does depends only on its place and on the
weights. Its inference reads the learner's weights, so a wrong version shows in the result.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mmrl.rollout.stages import Stages
from mmrl.training.pipeline import ClosedGroup

__all__ = ["Arena", "Episode", "Job", "SmallLearner", "Told"]


@dataclass(frozen=True)
class Job:
    """One member of a group."""

    step: int
    place: int
    member: int
    length: int
    attempt: int = 0


@dataclass
class Episode:
    """What a member did: the answers the policy gave and the versions that gave them."""

    job: Job
    answers: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class SmallLearner:
    """One linear layer, AdamW; `calls` are (name, argument, thread)."""

    def __init__(self, hook: Callable[[str, Any], None] | None = None) -> None:
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 1)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=0.05)
        self.calls: list[tuple[str, Any, int]] = []
        self.hook = hook or (lambda name, argument: None)
        self.trained: list[list[Episode]] = []
        self.denominator = 0
        self.version = 0

    def _note(self, name: str, argument: Any = None) -> None:
        self.calls.append((name, argument, threading.get_ident()))
        self.hook(name, argument)

    def begin(self, step: int) -> None:
        self._note("begin", step)
        self.optimizer.zero_grad()
        self.denominator = 0

    def add(self, group: list[Episode]) -> None:
        self._note("add", group)
        for episode in group:
            x_DF = features(episode.job, len(episode.answers))
            target_D = torch.tensor(episode.answers) * 0.7 - 1.0
            (self.layer(x_DF)[:, 0] - target_D).square().sum().backward()
            self.denominator += len(episode.answers)
        self.trained.append(group)

    def finish(self) -> float:
        self._note("finish")
        for p in self.layer.parameters():
            if p.grad is not None:
                p.grad /= max(1, self.denominator)
        if self.denominator:
            self.optimizer.step()
        self.version += 1
        return float(self.layer.weight.detach().abs().sum())

    def act(self, job: Job, decision: int) -> float:
        with torch.no_grad():
            return float(self.layer(features(job, decision + 1)[decision]))


def features(job: Job, count: int) -> torch.Tensor:
    """What an episode sees (decisions, 8): a function of its place alone."""
    generator = torch.Generator().manual_seed(
        1_000_003 * job.step + 1009 * job.place + 31 * job.member
    )
    return torch.randn(64, 8, generator=generator)[:count]


@dataclass(frozen=True)
class Told:
    """Something the executor did to the source."""

    name: str
    value: Any


class Arena:
    """A GroupSource; see the module. `empty` places give nothing; `lag` versions pass until its actor takes weights over."""

    def __init__(
        self,
        learner: SmallLearner,
        *,
        places: int = 6,
        members: int = 3,
        slots: int = 8,
        stages: int = 2,
        speed_seed: int = 0,
        empty: Sequence[tuple[int, int]] = (),
        lag: int = 0,
        hook: Callable[[str, Any], None] | None = None,
    ) -> None:
        self.learner, self.places, self.members, self.lag = learner, places, members, lag
        self.stages, self.slots = Stages(slots, stages), slots
        self.rng = random.Random(speed_seed)
        self.empty = set(empty)
        self.hook = hook or (lambda name, value: None)
        self.told: list[Told] = []
        self.waiting: list[Job] = []
        self.playing: dict[int, Episode] = {}
        self.groups: dict[tuple[int, int], list[Episode]] = defaultdict(list)
        self.lengths: dict[tuple[int, int, int], int] = {}

    def _note(self, name: str, value: Any) -> None:
        self.told.append(Told(name, value))
        self.hook(name, value)

    def start(self, step: int) -> int:
        self._note("start", step)
        for place in range(self.places):
            self._ask(step, place, 0)
        return self.places

    def _ask(self, step: int, place: int, attempt: int) -> None:
        rng = random.Random(f"{step} {place}")
        for member in range(self.members):
            length = rng.choice((1, 1, 2, 3, 9))
            self.lengths[step, place, member] = length
            self.waiting.append(Job(step, place, member, length, attempt))
        self.waiting.sort(key=lambda j: (j.step, j.place, j.member))

    def _fill(self) -> None:
        for slot in range(self.slots):
            if self.waiting and slot not in self.playing:
                self.playing[slot] = Episode(self.waiting.pop(0))
                self.stages.sent(slot)  # a reset

    def poll(self, timeout_s: float) -> list[ClosedGroup[list[Episode]]]:
        self._note("poll", timeout_s)
        if timeout_s:
            time.sleep(0.0002)
        self._fill()
        closed = []
        for slot in [s for s in self.playing if self.stages.working(s) and self.rng.random() < 0.4]:
            self.stages.answered(slot)
            episode = self.playing[slot]
            if len(episode.answers) == episode.job.length:
                self.stages.release(slot)
                del self.playing[slot]
                closed += self._end(episode)
        return closed

    def _end(self, episode: Episode) -> list[ClosedGroup[list[Episode]]]:
        key = (episode.job.step, episode.job.place)
        self.groups[key].append(episode)
        if len(self.groups[key]) < self.members:
            return []
        group = sorted(self.groups.pop(key), key=lambda e: e.job.member)
        oldest = min(v for e in group for v in e.versions)
        return [ClosedGroup(*key, None if key in self.empty else group, oldest)]

    @property
    def running(self) -> int:
        return self.stages.at_work + len(self.waiting)

    def ready(self) -> list[int] | None:
        return list(self.stages.due()) or None

    def infer(self, batch: list[int], version: int) -> list[ClosedGroup[list[Episode]]]:
        self._note("infer", [self.playing[s].job for s in batch])
        for slot in batch:
            episode = self.playing[slot]
            episode.answers.append(self.learner.act(episode.job, len(episode.answers)))
            episode.versions.append(version - self.lag)
            self.stages.sent(slot)
        return []

    def again(self, closed: ClosedGroup[list[Episode]]) -> None:
        self._note("again", closed)
        assert closed.group is not None
        self._ask(closed.step, closed.place, closed.group[0].job.attempt + 1)

    def publish(self, version: int) -> None:
        self._note("publish", version)
