"""What a scorer (mmrl.workers.scorer) sends to a reward process, what such a process does with it, and what it may send back.

Every score travels with the id of its job (mmrl.workers.reward_pipe), so that none can belong to another completion. What a score
says beside its numbers is bounded, since every logged one is written: see LONGEST_REASON, LARGEST_DETAIL and MOST_NUMBERS. What
rewards print is bounded by mmrl.workers.spawned.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from mmrl.errors import RewardError
from mmrl.registry import adopt, carried, task_from_spec
from mmrl.task import Task
from mmrl.types import RewardContext, Sample, Score
from mmrl.workers.process import ChildError
from mmrl.workers.reward_pipe import TOKEN_BYTES, ScoreInbox, ScoreWriter
from mmrl.workers.spawned import START_S, Worker

__all__ = [
    "LARGEST_DETAIL",
    "LONGEST_REASON",
    "MOST_NUMBERS",
    "RewardWorker",
    "ScoreJob",
    "checked",
    "failed",
    "is_reward_failure",
    "score_one",
]

LONGEST_REASON = 500
"""Characters of a score's `reason`; the rest is cut, which the reason then says."""
LARGEST_DETAIL = 65_536
"""Characters of a score's `detail` as JSON; a larger one is left out, and {"left_out": why} takes its place."""
MOST_NUMBERS = 256
"""Entries of `parts`, `weights` and `metrics` each, whose names have at most 200 characters; more are a reward_error."""
_LONGEST_NAME = 200
# scores travel together for so long: one message each would cost more than most rewards
_FLUSH_S = 0.005


@dataclass(frozen=True)
class ScoreJob:
    """One completion to score: `key` names the task (index of its data source).

    With `peers`, the individual scores of its whole group, `task.score_in_group` is asked for the one at `place`.
    """

    key: int
    sample: Sample
    text: str
    ctx: RewardContext
    peers: tuple[Score, ...] | None = None
    place: int = 0


def is_reward_failure(score: Score) -> bool:
    """True when the reward itself failed (raised, hung, died, left its range), as opposed to a text it could not parse."""
    return (score.reason or "").startswith("reward_")


def score_one(task: Task, job: ScoreJob) -> Score:
    """The job's score with every exception, non-finite or out-of-range value turned into a recorded failure."""
    try:
        score: Any = (
            task.score(job.sample, job.text, job.ctx)
            if job.peers is None
            else (task.score_in_group(job.sample, job.peers, job.place))
        )
        if inspect.isawaitable(score):
            from mmrl.workers.event_loop import run_here

            score = run_here(score)
        if not isinstance(score, Score):
            raise TypeError(f"expected a mmrl.Score, found {type(score).__name__}")
        return checked(score, task.value_range)
    except (Exception, SystemExit) as error:
        # user code: recorded on the sample, counted by the trainer
        return failed("reward_error", error, task.part_names)


def failed(kind: str, error: BaseException, parts: Sequence[str]) -> Score:
    """The recorded zero of what somebody else's code raised; `kind` begins its reason."""
    return Score.failure(_cut(f"{kind}: {type(error).__name__}: {_said(error)}"), parts)


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # user code as well
        return f"(its text cannot be made: {type(second).__name__})"


def _cut(reason: str) -> str:
    cut = f" [cut, {len(reason):,} characters]"
    return reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - len(cut)] + cut


def _detail(detail: Mapping[str, Any]) -> Mapping[str, Any]:
    """`detail`, or why it was left out: it must fit into a line of a log."""
    if not detail:
        return detail
    try:
        size = len(json.dumps(detail, default=str))
    except Exception as error:  # a cycle, a key that is no text, a __str__ that raises
        return {
            "left_out": _cut(
                f"it cannot be written as JSON: {type(error).__name__}: {_said(error)}"
            )
        }
    return (
        detail
        if size <= LARGEST_DETAIL
        else {"left_out": f"{size:,} characters as JSON, at most {LARGEST_DETAIL:,} are kept"}
    )


def checked(score: Score, value_range: tuple[float, float]) -> Score:
    """The score with plain floats (not numpy's or torch's) that are finite, its value in range; raises ValueError.

    A weighted sum may leave the range by rounding (1e-9); such a value is clipped.
    """
    low, high = value_range
    parts, weights, metrics = (
        {str(k): float(v) for k, v in t.items()}
        for t in (score.parts, score.weights, score.metrics)
    )
    for name, table in (("parts", parts), ("weights", weights), ("metrics", metrics)):
        if len(table) > MOST_NUMBERS or any(len(k) > _LONGEST_NAME for k in table):
            raise ValueError(
                f"expected at most {MOST_NUMBERS} {name} with names of at most {_LONGEST_NAME} characters, found "
                f"{len(table)}, the longest name of {max(map(len, table))}"
            )
        broken = {k: v for k, v in table.items() if not math.isfinite(v)}
        if broken:
            raise ValueError(f"expected finite {name}, found {broken}")
    if not low - 1e-9 <= score.value <= high + 1e-9:
        raise ValueError(f"expected a value in [{low:g}, {high:g}], found {score.value}")
    reason = None if score.reason is None else _cut(str(score.reason))
    return replace(
        score,
        value=min(high, max(low, float(score.value))),
        parsed=bool(score.parsed),
        reason=reason,
        parts=parts,
        weights=weights,
        metrics=metrics,
        detail=_detail(score.detail),
    )


def _serve(
    connection: Connection,
    progress: Any,
    specs: Sequence[tuple[str, dict[str, Any]]],
    token: bytes,
    tasks_here: bytes,
) -> None:
    """Score lists of (id, job) until None comes. `progress` holds the id of the job at hand and when it began; `tasks_here` are
    the parent's own tasks (mmrl.registry.carried)."""
    try:
        adopt(tasks_here)
        tasks = [task_from_spec(spec, params) for spec, params in specs]
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")
        raise
    connection.send(None)
    writer = ScoreWriter(connection, token)
    while (jobs := connection.recv()) is not None:
        flushed = time.monotonic()
        for number, job in jobs:
            progress[:] = number, time.monotonic()
            score = score_one(tasks[job.key], job)
            writer.check()
            writer.add(number, score, tasks[job.key].part_names)
            if time.monotonic() - flushed > _FLUSH_S:
                writer.flush()
                flushed = time.monotonic()
        writer.flush()


class RewardWorker(Worker):
    """One process and its pipe; `pending` are the ids of jobs sent but not answered, oldest first, with their indices, `later` the
    indices of jobs that are to be sent one by one: one of them spoils the pipe, and this tells which."""

    serves: ClassVar[Callable[..., None]] = staticmethod(_serve)
    called: ClassVar[str] = "mmrl-reward"
    # whether all jobs sent are at hand together (mmrl.workers.async_scoring), or each after the other
    at_once: ClassVar[bool] = False
    more: tuple[Any, ...] = ()  # further arguments of `serves`

    def __init__(
        self, specs: Sequence[tuple[str, dict[str, Any]]], ids: Iterator[int], timeout_s: float
    ) -> None:
        self.pending: dict[int, int] = {}
        self.later: list[int] = []
        self._specs, self._ids, self.timeout_s = specs, ids, timeout_s
        super().__init__(type(self).serves, (), self.called)

    def start(self) -> None:
        token = os.urandom(TOKEN_BYTES)
        self.args = (self._specs, token, carried({spec for spec, _ in self._specs}), *self.more)
        super().start()
        self.inbox = ScoreInbox(self.connection, token)

    def wait_ready(self) -> None:
        try:
            self.await_ready(START_S)
        except ChildError as error:
            death = error.death
            found = {"timeout": "no answer", "refused": death.said}.get(
                death.cause, "the process died"
            )
            raise RewardError(
                f"a reward worker did not start ({found}); set reward.workers=0 to see where"
            ) from error

    def send(self, jobs: Mapping[int, ScoreJob], indices: list[int]) -> None:
        self.pending = {next(self._ids): index for index in indices}
        if indices:
            if not self.alive:
                self.restart()  # it died while idle, so no completion is to blame
            self.wait_ready()
            first = 0 if self.at_once else next(iter(self.pending))
            self.progress[:] = first, time.monotonic()
            self.give(
                [(number, jobs[index]) for number, index in self.pending.items()], self.timeout_s
            )

    @property
    def began(self) -> float:
        """When the job at hand began (the clock is the same in all processes)."""
        return float(self.progress[1])

    @property
    def deadline(self) -> float:
        """Of the job at hand, which the process begins by itself."""
        return self.began + self.timeout_s

    def culprit(self) -> int | None:
        """Id of the job at hand; those before it may be finished without their scores having been sent. None where it can be any of
        several."""
        if (number := int(self.progress[0])) in self.pending:
            return number
        return None if self.at_once and len(self.pending) > 1 else next(iter(self.pending))
