"""Run rewards where they can do no harm: in worker processes with a deadline per completion.

A reward that raises, hangs or kills its process costs its completion a recorded zero (reason `reward_error`,
`reward_timeout`, `reward_crash`) and nothing else. With workers=0 rewards run in this process, without a deadline.

Every score travels with the id of its job (mmrl.workers.reward_pipe), so that none can belong to another completion. What a score
says beside its numbers is bounded, since every logged one is written: see LONGEST_REASON, LARGEST_DETAIL and MOST_NUMBERS. What
rewards print is bounded by mmrl.workers.spawned.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar

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
    "RewardWorker",
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
        score: Any = (
            task.score(job.sample, job.text, job.ctx)
            if job.peers is None
            else (task.score_in_group(job.sample, job.peers, job.place))
        )
        if inspect.isawaitable(score):
            from mmrl.workers.async_scoring import run_here

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


class Scorer:
    """Scores completions with the tasks given as (registry name, parameters), in `workers` spawned processes."""

    def __init__(
        self,
        specs: Sequence[tuple[str, dict[str, Any]]],
        tasks: Sequence[Task],
        *,
        workers: int = 1,
        timeout_s: float = 10.0,
        concurrency: int = 64,
        verdicts: str | None = None,
    ) -> None:
        self.tasks, self.timeout_s = list(tasks), timeout_s
        self._specs, self._concurrency, self._verdicts = specs, concurrency, verdicts
        # scores that belong to no completion that waits for one, and were dropped
        self.unclaimed = 0
        # never used twice: a score that comes late finds nobody
        self._ids = itertools.count(1)
        self._workers = [RewardWorker(specs, self._ids, timeout_s) for _ in range(workers)]
        # the process with the event loop, made when the first job needs it
        self._waiting: list[RewardWorker] = []

    def score(self, jobs: Sequence[ScoreJob]) -> list[Score]:
        """One Score per job, in order; every job gets one, whatever happens to the reward. Those of `async def` rewards are scored
        together (mmrl.workers.async_scoring), beside the others."""
        waiting = self.waiting(jobs)
        return self._supervised(jobs, waiting) if self._workers else self._score_here(jobs, waiting)

    def waiting(self, jobs: Sequence[ScoreJob]) -> set[int]:
        """Places of the jobs whose reward is an `async def`."""
        from mmrl.workers.async_scoring import is_async

        return {i for i, job in enumerate(jobs) if is_async(self.tasks[job.key], job)}

    def _supervised(self, jobs: Sequence[ScoreJob], waiting: Collection[int]) -> list[Score]:
        """Scores from the worker processes, those of `waiting` from the one with the event loop."""
        table = dict(enumerate(jobs))
        scores: dict[int, Score] = {}
        if waiting:
            self._loop_worker().send(table, sorted(waiting))
        plain = [i for i in range(len(jobs)) if i not in waiting]
        share = -(-len(plain) // max(1, len(self._workers)))
        for number, worker in enumerate(self._workers):
            worker.send(table, plain[number * share : (number + 1) * share])
        while busy := [w for w in (*self._workers, *self._waiting) if w.pending]:
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

    def _score_here(self, jobs: Sequence[ScoreJob], waiting: Collection[int]) -> list[Score]:
        from mmrl.workers.async_scoring import score_here

        later = [jobs[i] for i in sorted(waiting)]
        if later and self._verdicts is not None:
            from mmrl.judges.store import keep_in

            keep_in(self._verdicts)
        found = iter(
            score_here(self.tasks, later, concurrency=self._concurrency, timeout_s=self.timeout_s)
            if later
            else []
        )
        return [
            next(found) if i in waiting else score_one(self.tasks[job.key], job)
            for i, job in enumerate(jobs)
        ]

    def _loop_worker(self) -> RewardWorker:
        from mmrl.workers.async_scoring import AsyncWorker

        if not self._waiting:
            self._waiting = [
                AsyncWorker(
                    self._specs, self._ids, self.timeout_s, self._concurrency, self._verdicts
                )
            ]
        return self._waiting[0]

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
        self, worker: RewardWorker, table: Mapping[int, ScoreJob], scores: dict[int, Score]
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
                self._one_by_one(worker, table)
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
        self,
        worker: RewardWorker,
        table: Mapping[int, ScoreJob],
        scores: dict[int, Score],
        reason: str,
    ) -> None:
        if (culprit := worker.culprit()) is None:
            self._one_by_one(worker, table)
            return
        index = worker.pending.pop(culprit)
        # scores that were computed but not sent are computed again
        rest = list(worker.pending.values())
        scores[index] = Score.failure(reason, self.tasks[table[index].key].part_names)
        worker.restart()
        worker.send(table, [worker.later.pop(0)] if worker.later and not rest else rest)

    @staticmethod
    def _one_by_one(worker: RewardWorker, table: Mapping[int, ScoreJob]) -> None:
        worker.restart()
        worker.later = [*worker.pending.values(), *worker.later]
        worker.send(table, [worker.later.pop(0)])

    def close(self) -> None:
        """End the worker processes."""
        workers = [*self._workers, *self._waiting]
        close_all(workers, workers)
        self._workers, self._waiting = [], []

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
