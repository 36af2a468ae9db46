"""Episodes of a generator process (mmrl.training.generator): what it tells the trainer, and what that keeps of it.

`HostedEpisodes` is the process's side, which has the simulators and acts; `EpisodeLedger` the trainer's. Which initial state a
place gets depends on step, place and attempt alone, so that a process that takes the place of a lost one needs to know no more than
which places have closed and which attempts were made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.robotics.rollout import Driver, Failure
from mmrl.robotics.source import StepRecord
from mmrl.training.pipeline import ClosedGroup

__all__ = ["EpisodeLedger", "HostedEpisodes"]


@dataclass(frozen=True)
class _Told:
    """Records by step, counts and failed attempts since it was last told."""

    records: dict[int, StepRecord]
    counters: dict[str, float]
    failures: list[Failure]


class HostedEpisodes:
    """A mmrl.training.rollouts.HostedWork. `rollouts`: EpisodeRollouts, open."""

    def __init__(self, rollouts: Any) -> None:
        self._rollouts = rollouts
        self._driver: Driver = rollouts.driver
        self._counters = dict(self._driver.counters)
        self._failures = 0
        self._ahead: list[Failure] = []

    def resume(self, point: dict[tuple[int, int], int | None]) -> None:
        """See HostedWork."""
        self._rollouts.groups.tried = dict(point)

    def act_with(self, version: int) -> None:
        """See HostedWork."""
        self._rollouts.groups.publish(version)

    def evaluate(self, step: int, *, full: bool, folder: Path) -> Any:
        """See HostedWork. Its episodes are counted in its results alone, failures of others that went on meanwhile with theirs."""
        found = self._rollouts.evaluate(step, full=full, folder=folder)
        self._ahead = self._rollouts.take_ahead()
        self._counters = dict(self._driver.counters)
        self._failures = len(self._driver.failures)
        return found

    def take(self) -> _Told | None:
        """See HostedWork."""
        records = {
            step: taken
            for step, record in self._rollouts.groups.records.items()
            if (taken := record.take()) != StepRecord()
        }
        now, before = dict(self._driver.counters), self._counters
        failures = self._ahead + self._driver.failures[self._failures :]
        self._counters, self._failures, self._ahead = now, len(self._driver.failures), []
        counters = {name: value - before[name] for name, value in now.items()}
        if records or failures or any(counters.values()):
            return _Told(records, counters, failures)
        return None

    def portable(self, closed: ClosedGroup[Any]) -> ClosedGroup[Any]:
        """See HostedWork: as it is."""
        return closed


@dataclass
class EpisodeLedger:
    """A mmrl.training.rollouts.Ledger that stands where an inline run has its driver: records of steps that are open or just
    trained, counts, failed attempts."""

    counters: dict[str, float]
    records: dict[int, StepRecord] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    _closed: set[tuple[int, int]] = field(default_factory=set)

    def add(self, work: _Told | None) -> None:
        """See Ledger."""
        if work is None:
            return
        for step, record in work.records.items():
            self.records.setdefault(step, StepRecord()).add(record)
        for name, count in work.counters.items():
            self.counters[name] += count
        self.failures += work.failures

    def whole(self, closed: ClosedGroup[Any]) -> ClosedGroup[Any]:
        """See Ledger."""
        self._closed.add((closed.step, closed.place))
        return closed

    def resume_point(self) -> dict[tuple[int, int], int | None]:
        """See Ledger: by step and place the attempt to go on with, None where the place has closed."""
        point: dict[tuple[int, int], int | None] = {}
        for record in self.records.values():
            for step, place, attempt in (group[0].key for group in record.groups):
                point[step, place] = max(attempt + 1, point.get((step, place)) or 0)
        return point | dict.fromkeys(self._closed)

    def ended(self, step: int) -> bool:
        """See Ledger: a step that is opened again finds its places closed."""
        return False

    def forget(self, step: int) -> None:
        """`step` begins: those before it are not asked for again."""
        self._closed = {key for key in self._closed if key[0] >= step}
