"""Run rewards where they can do no harm: in worker processes with a deadline per completion.

A reward that raises, hangs or kills its process costs its completion a recorded zero (reason `reward_error`,
`reward_timeout`, `reward_crash`) and nothing else. With workers=0 rewards run in this process, without a deadline.
"""
from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from mmrl.errors import RewardError
from mmrl.registry import task_from_spec
from mmrl.task import Task
from mmrl.types import RewardContext, Sample, Score
from mmrl.workers import Worker

__all__ = ["ScoreJob", "Scorer", "is_reward_failure", "score_one"]

_START_TIMEOUT_S = 300.0
_FLUSH_S = 0.005  # scores travel together for so long: one message each would cost more than most rewards


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
        score = task.score(job.sample, job.text, job.ctx) if job.peers is None else (
            task.score_in_group(job.sample, job.peers, job.place))
        if not isinstance(score, Score):
            raise TypeError(f"expected a mmrl.Score, found {type(score).__name__}")
        return _checked(score, task.value_range)
    except (Exception, SystemExit) as error:  # user code: recorded on the sample, counted by the trainer
        return Score.failure(f"reward_error: {type(error).__name__}: {error}"[:500], task.part_names)


def _checked(score: Score, value_range: tuple[float, float]) -> Score:
    """The score with plain floats (not numpy's or torch's) that are finite, its value in range; raises ValueError.

    A weighted sum may leave the range by rounding (1e-9); such a value is clipped.
    """
    low, high = value_range
    parts, weights, metrics = ({k: float(v) for k, v in t.items()} for t in (score.parts, score.weights, score.metrics))
    for name, table in (("parts", parts), ("weights", weights), ("metrics", metrics)):
        broken = {k: v for k, v in table.items() if not math.isfinite(v)}
        if broken:
            raise ValueError(f"expected finite {name}, found {broken}")
    if not low - 1e-9 <= score.value <= high + 1e-9:
        raise ValueError(f"expected a value in [{low:g}, {high:g}], found {score.value}")
    return replace(score, value=min(high, max(low, float(score.value))), parsed=bool(score.parsed), parts=parts,
                   weights=weights, metrics=metrics)


def _serve(connection: Connection, progress: Any, specs: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Score lists of jobs until None comes. `progress` holds the place of the job at hand in its list and when it began."""
    try:
        tasks = [task_from_spec(spec, params) for spec, params in specs]
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")
        raise
    connection.send(None)
    while (jobs := connection.recv()) is not None:
        done: list[Score] = []
        flushed = time.monotonic()
        for place, job in enumerate(jobs):
            progress[:] = place, time.monotonic()
            done.append(score_one(tasks[job.key], job))
            if time.monotonic() - flushed > _FLUSH_S:
                _send(connection, done, tasks, jobs[place + 1 - len(done):place + 1])
                done, flushed = [], time.monotonic()
        if done:
            _send(connection, done, tasks, jobs[len(jobs) - len(done):])


def _send(connection: Connection, scores: Sequence[Score], tasks: Sequence[Task], jobs: Sequence[ScoreJob]) -> None:
    """Send scores together, or one by one where one of them cannot be sent."""
    try:
        connection.send(list(scores))  # pickles everything before it writes anything
    except Exception:
        for score, job in zip(scores, jobs, strict=True):
            try:
                connection.send([score])
            except Exception as error:
                reason = f"reward_error: the score cannot be sent between processes: {type(error).__name__}: {error}"
                connection.send([Score.failure(reason[:500], tasks[job.key].part_names)])


class _Worker(Worker):
    """One process and its pipe; `pending` are indices of jobs sent but not answered, oldest first."""

    def __init__(self, specs: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self.pending: list[int] = []
        super().__init__(_serve, (specs,), "mmrl-reward")

    def wait_ready(self) -> None:
        if self.ready:
            return
        try:
            answer = self.connection.recv() if self.connection.poll(_START_TIMEOUT_S) else "no answer"
        except EOFError:
            answer = "the process died"
        if answer is not None:
            raise RewardError(f"a reward worker did not start ({answer}); set reward.workers=0 to see where")
        self.ready = True

    def send(self, jobs: Mapping[int, ScoreJob], indices: list[int]) -> None:
        self.pending, self.sent = list(indices), len(indices)
        if indices:
            if not self.process.is_alive():
                self.restart()  # it died while idle, so no completion is to blame
            self.wait_ready()
            self.progress[:] = 0, time.monotonic()
            with contextlib.suppress(OSError):  # it died just now: its closed pipe is noticed when the answer is read
                self.connection.send([jobs[i] for i in indices])

    @property
    def began(self) -> float:
        """When the job at hand began (the clock is the same in all processes)."""
        return self.progress[1]

    def culprit(self) -> int:
        """Index of the job at hand; those before it may be finished without their scores having been sent."""
        answered = self.sent - len(self.pending)
        return self.pending[min(max(0, int(self.progress[0]) - answered), len(self.pending) - 1)]


class Scorer:
    """Scores completions with the tasks given as (registry name, parameters), in `workers` spawned processes."""

    def __init__(self, specs: Sequence[tuple[str, dict[str, Any]]], tasks: Sequence[Task], *, workers: int = 1,
                 timeout_s: float = 10.0) -> None:
        self.tasks, self.timeout_s = list(tasks), timeout_s
        self._workers = [_Worker(specs) for _ in range(workers)]

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
            deadline = min(w.began for w in busy) + self.timeout_s
            ready = wait([w.connection for w in busy], max(0.0, deadline - time.monotonic()))
            for worker in busy:
                if worker.connection in ready:
                    self._receive(worker, table, scores)
                elif time.monotonic() >= worker.began + self.timeout_s and not worker.connection.poll():  # restarts take time
                    self._fail(worker, table, scores, f"reward_timeout: no answer within {self.timeout_s:g} s")
        return [scores[i] for i in range(len(jobs))]

    def score_groups(self, groups: Sequence[Sequence[ScoreJob]]) -> list[list[Score]]:
        """Scores of groups of completions of one prompt each, in order.

        First every completion by itself; then, for tasks with `in_group`, `task.score_in_group` for each of them with the
        individual scores of its whole group, under the same deadline. A completion whose own reward failed stays failed.
        """
        flat = iter(self.score([job for group in groups for job in group]))
        scores = [[next(flat) for _ in group] for group in groups]
        places = [(g, i) for g, group in enumerate(groups) for i, job in enumerate(group)
                  if self.tasks[job.key].member(job.sample.task).in_group and not is_reward_failure(scores[g][i])]
        jobs = [replace(groups[g][i], peers=tuple(scores[g]), place=i) for g, i in places]
        final = [list(group) for group in scores]
        for (g, i), score in zip(places, self.score(jobs) if jobs else [], strict=True):
            final[g][i] = score
        return final

    def _receive(self, worker: _Worker, table: Mapping[int, ScoreJob], scores: dict[int, Score]) -> None:
        try:
            received = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(5)
            self._fail(worker, table, scores, f"reward_crash: the process died (exit code {worker.process.exitcode})")
            return
        for score in received:
            scores[worker.pending.pop(0)] = score

    def _fail(self, worker: _Worker, table: Mapping[int, ScoreJob], scores: dict[int, Score], reason: str) -> None:
        index = worker.culprit()
        rest = [i for i in worker.pending if i != index]  # scores that were computed but not sent are computed again
        scores[index] = Score.failure(reason, self.tasks[table[index].key].part_names)
        worker.restart()
        worker.send(table, rest)

    def close(self) -> None:
        """End the worker processes."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
