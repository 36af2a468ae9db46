"""Rollouts of prompts in a generator process (mmrl.training.generator): what it tells the trainer, and what that keeps of it.

`HostedPrompts` is the process's side, `PromptLedger` the trainer's. A wave's groups are sent once, with what was counted while they
were made; places that close name theirs by their keys. When a step has ended the rollouter's position is sent with it: a checkpoint
keeps that of the step just trained, and a process that takes the place of a lost one starts from the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmrl.data.sources import PromptStream
from mmrl.evaluation.result import Evaluation
from mmrl.rollout.group_generator import StepTally
from mmrl.rollout.prompt_rollouter import PromptRollouter
from mmrl.training.pipeline import ClosedGroup
from mmrl.types import RolloutGroup

__all__ = ["HostedPrompts", "PromptLedger"]

Key = tuple[int, int, int]


@dataclass(frozen=True)
class _Told:
    """What was counted for a step since it was last told, and, when the step has ended, the rollouter's state and what the rollout
    engine measured when it took its newest weights (RolloutEngine.publish)."""

    tally: StepTally
    state: dict[str, Any] | None
    synced: Mapping[str, float]


@dataclass(frozen=True)
class _Point:
    """Where to go on: the state behind a step (None: the run's beginning), and groups of later ones."""

    state: Mapping[str, Any] | None
    known: dict[Key, RolloutGroup]


class HostedPrompts:
    """A mmrl.training.rollouts.HostedWork. `rollouts`: PromptRollouts, open."""

    def __init__(self, rollouts: Any) -> None:
        self._rollouts = rollouts
        self._rollouter: PromptRollouter = rollouts.rollouter
        self._rollouter.keeps_states = True
        self._synced: Mapping[str, float] = {}

    def resume(self, point: _Point) -> None:
        """See HostedWork."""
        if point.state is not None:
            self._rollouter.load_state_dict(point.state)
        self._rollouter.known = dict(point.known)

    def act_with(self, version: int) -> None:
        """See HostedWork. Completions name the step that their weights begin."""
        self._rollouts.policy.version = version + 1
        self._rollouts.sync()
        self._synced = {k: v for k, v in self._rollouts.sent.items() if not k.startswith("time/")}

    def evaluate(self, step: int, *, full: bool, folder: Path) -> Evaluation | None:
        """See HostedWork."""
        found: Evaluation | None = self._rollouts.evaluate(step, full=full, folder=folder)
        return found

    def take(self) -> dict[int, _Told]:
        """See HostedWork: by step."""
        told = {}
        for step, tally in list(self._rollouter.tallies.items()):
            state = self._rollouter.states.pop(step, None)
            taken = tally.take()
            if state is not None:
                del self._rollouter.tallies[step]
            if state is not None or taken != StepTally():
                told[step] = _Told(taken, state, {} if state is None else self._synced)
        return told

    def portable(self, closed: ClosedGroup[Any]) -> ClosedGroup[Any]:
        """See HostedWork: the group's key in its place."""
        return replace(closed, group=None if closed.group is None else closed.group.key)


class PromptLedger:
    """A mmrl.training.rollouts.Ledger that stands where an inline run has its PromptRollouter: tallies, states and what weight
    syncs measured by step, the stream to look samples up in, and the state that a checkpoint keeps."""

    def __init__(self, stream: PromptStream) -> None:
        self.stream = stream
        self.tallies: dict[int, StepTally] = {}
        self.states: dict[int, dict[str, Any]] = {}
        self.synced: dict[int, Mapping[str, float]] = {}
        self._behind: Mapping[str, Any] | None = (
            None  # the last step that ended, of the states told
        )
        self._ended = 0
        self._groups: dict[Key, RolloutGroup] = {}  # of steps that have not ended

    def add(self, work: Mapping[int, _Told]) -> None:
        """See Ledger."""
        for step, told in work.items():
            self.tallies.setdefault(step, StepTally()).add(told.tally)
            self._groups.update({g.key: g for g in told.tally.groups})
            if told.state is not None:
                self.states[step] = dict(told.state)
                self.synced[step] = told.synced
                self._behind, self._ended = told.state, step

    def whole(self, closed: ClosedGroup[Any]) -> ClosedGroup[RolloutGroup]:
        """See Ledger."""
        return replace(closed, group=None if closed.group is None else self._groups[closed.group])

    def resume_point(self) -> _Point:
        """See Ledger."""
        return _Point(self._behind, {k: g for k, g in self._groups.items() if k[0] > self._ended})

    def ended(self, step: int) -> bool:
        """See Ledger. Its places have arrived with its state; some may wait to be polled."""
        return step <= self._ended

    def forget(self, step: int) -> None:
        """`step` begins: groups of those before it are not asked for again."""
        self._groups = {k: g for k, g in self._groups.items() if k[0] >= step}

    def state_dict(self) -> dict[str, Any]:
        """Where the next step begins, before the first one was trained."""
        return {} if self._behind is None else dict(self._behind)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a rollouter's `state_dict`."""
        self._behind = state or None
