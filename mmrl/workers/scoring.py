"""Run rewards where they can do no harm: in worker processes with a deadline per completion.

A reward that raises, hangs or kills its process costs its completion a recorded zero (reason `reward_error`,
`reward_timeout`, `reward_crash`) and nothing else. With workers=0 rewards run in this process, without a deadline.

Every score travels with the id of its job (mmrl.workers.reward_pipe), so that none can belong to another completion. What a score
says beside its numbers is bounded, since every logged one is written: see LONGEST_REASON, LARGEST_DETAIL and MOST_NUMBERS. What
rewards print is bounded by mmrl.workers.spawned.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from mmrl.errors import RewardError
from mmrl.registry import adopt, carried, task_from_spec
from mmrl.task import Task
from mmrl.types import RewardContext, Sample, Score
from mmrl.workers.process import END_S, ChildError, patience
from mmrl.workers.reward_pipe import TOKEN_BYTES, GarbledError, ScoreInbox, ScoreWriter
from mmrl.workers.spawned import START_S, Worker, close_all

__all__ = [
    "LARGEST_DETAIL",
    "LONGEST_REASON",
    "MOST_NUMBERS",
    "ScoreJob",
    "Scorer",
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
        score = (
            task.score(job.sample, job.text, job.ctx)
            if job.peers is None
            else (task.score_in_group(job.sample, job.peers, job.place))
        )
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


class _Worker(Worker):
    """One process and its pipe; `pending` are the ids of jobs sent but not answered, oldest first, with their indices, `later` the
    indices of jobs that are to be sent one by one: one of them spoils the pipe, and this tells which."""

    def __init__(
        self, specs: Sequence[tuple[str, dict[str, Any]]], ids: Iterator[int], timeout_s: float
    ) -> None:
        self.pending: dict[int, int] = {}
        self.later: list[int] = []
        self._specs, self._ids, self.timeout_s = specs, ids, timeout_s
        super().__init__(_serve, (), "mmrl-reward")

    def start(self) -> None:
        token = os.urandom(TOKEN_BYTES)
        self.args = (self._specs, token, carried({spec for spec, _ in self._specs}))
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
            self.progress[:] = next(iter(self.pending)), time.monotonic()
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

    def culprit(self) -> int:
        """Id of the job at hand; those before it may be finished without their scores having been sent."""
        return (
            number
            if (number := int(self.progress[0])) in self.pending
            else next(iter(self.pending))
        )


class Scorer:
    """Scores completions with the tasks given as (registry name, parameters), in `workers` spawned processes."""

    def __init__(
        self,
        specs: Sequence[tuple[str, dict[str, Any]]],
        tasks: Sequence[Task],
        *,
        workers: int = 1,
        timeout_s: float = 10.0,
    ) -> None:
        self.tasks, self.timeout_s = list(tasks), timeout_s
        # scores that belong to no completion that waits for one, and were dropped
        self.unclaimed = 0
        ids = itertools.count(1)  # never used twice: a score that comes late finds nobody
        self._workers = [_Worker(specs, ids, timeout_s) for _ in range(workers)]

    def score(self, jobs: Sequence[ScoreJob]) -> list[Score]:
        """One Score per job, in order; every job gets one, whatever happens to the reward."""
        if not self._workers:
            return [score_one(self.tasks[job.key], job) for job in jobs]
        table = dict(enumerate(jobs))
        scores: dict[int, Score] = {}
        share = -(-len(jobs) // len(self._workers))
        for number, worker in enumerate(self._workers):
            worker.send(table, list(range(number * share, min(len(jobs), (number + 1) * share))))
        while busy := [w for w in self._workers if w.pending]:
            sources = [source for w in busy for source in (w.connection, w.process.sentinel)]
            ready = wait(sources, patience(w.deadline for w in busy))
            for worker in busy:
                if worker.connection in ready or worker.process.sentinel in ready:
                    self._receive(worker, table, scores)
                elif worker.late and not worker.connection.poll():  # restarts take time
                    self._fail(
                        worker,
                        table,
                        scores,
                        f"reward_timeout: no answer within {self.timeout_s:g} s",
                    )
        return [scores[i] for i in range(len(jobs))]

    def score_groups(self, groups: Sequence[Sequence[ScoreJob]]) -> list[list[Score]]:
        """Scores of groups of completions of one prompt each, in order.

        First every completion by itself; then, for tasks with `in_group`, `task.score_in_group` for each of them with the
        individual scores of its whole group, under the same deadline. A completion whose own reward failed stays failed.
        """
        flat = iter(self.score([job for group in groups for job in group]))
        scores = [[next(flat) for _ in group] for group in groups]
        places = [
            (g, i)
            for g, group in enumerate(groups)
            for i, job in enumerate(group)
            if self.tasks[job.key].member(job.sample.task).in_group
            and not is_reward_failure(scores[g][i])
        ]
        jobs = [replace(groups[g][i], peers=tuple(scores[g]), place=i) for g, i in places]
        final = [list(group) for group in scores]
        for (g, i), score in zip(places, self.score(jobs) if jobs else [], strict=True):
            final[g][i] = score
        return final

    def _receive(
        self, worker: _Worker, table: Mapping[int, ScoreJob], scores: dict[int, Score]
    ) -> None:
        alive = worker.alive  # looked at before reading: what it wrote before it died is there
        try:
            received = worker.inbox.read()
        except GarbledError as error:
            if len(worker.pending) == 1:
                self._fail(
                    worker,
                    table,
                    scores,
                    f"reward_crash: what came from its process could not be read ({error})",
                )
            else:  # the job at hand need not be the one that wrote it
                worker.restart()
                worker.later = [*worker.pending.values(), *worker.later]
                worker.send(table, [worker.later.pop(0)])
            return
        except (EOFError, OSError):
            received, alive = [], False
        for number, score in received:
            if (index := worker.pending.pop(number, None)) is None:
                self.unclaimed += 1
            else:
                scores[index] = score
        if not worker.pending and worker.later:
            worker.send(table, [worker.later.pop(0)])
        if received or not worker.pending:
            return
        if not alive:
            self._fail(
                worker,
                table,
                scores,
                f"reward_crash: the process died (exit code {worker.death(END_S).code})",
            )
        elif time.monotonic() >= worker.deadline:  # half a score, and no more of it
            self._fail(
                worker, table, scores, f"reward_timeout: no answer within {self.timeout_s:g} s"
            )

    def _fail(
        self, worker: _Worker, table: Mapping[int, ScoreJob], scores: dict[int, Score], reason: str
    ) -> None:
        index = worker.pending.pop(worker.culprit())
        # scores that were computed but not sent are computed again
        rest = list(worker.pending.values())
        scores[index] = Score.failure(reason, self.tasks[table[index].key].part_names)
        worker.restart()
        worker.send(table, [worker.later.pop(0)] if worker.later and not rest else rest)

    def close(self) -> None:
        """End the worker processes."""
        close_all(self._workers, self._workers)
        self._workers = []

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
