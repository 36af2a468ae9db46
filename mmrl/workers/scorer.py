"""Run rewards where they can do no harm: in worker processes with a deadline per completion.

    with Scorer([("grounding", {})], [task], workers=2, timeout_s=10) as scorer:
        scores = scorer.score([ScoreJob(0, sample, text, context) for text in texts])     # one each, in order

A reward that raises, hangs or kills its process costs its completion a recorded zero (reason `reward_error`,
`reward_timeout`, `reward_crash`) and nothing else. With workers=0 rewards run in this process, without a deadline.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from mmrl.task import Task
from mmrl.types import Score
from mmrl.workers.process import END_S, patience
from mmrl.workers.reward_pipe import GarbledError
from mmrl.workers.scoring import RewardWorker, ScoreJob, is_reward_failure, score_one
from mmrl.workers.spawned import close_all

__all__ = ["Scorer"]


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
        # of rewards in this process, and of process rewards (mmrl.rollout.process_rewards): without a folder of no run before.
        # What asks judges takes a quarter of a second to import; where nobody did, nothing is kept
        if verdicts is not None or "mmrl.judges.store" in sys.modules:
            from mmrl.judges.store import keep_in

            keep_in(verdicts)
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
