"""Rewards that wait for others: tasks whose `score` (or `score_in_group`) is an `async def`, all of them on one event loop.

    class Asked(Task):
        async def score(self, sample, text, ctx):
            verdict = await judge.grade(sample.question, text)
            if verdict.value is None:
                return Score.failure(f"reward_error: {verdict.reason}", ("judge",))
            return Score.combine({"judge": verdict.value}, {"judge": 1.0}, parsed=True)

A scorer (mmrl.workers.scorer) gives the completions of such tasks to one process beside its others, where as many as
`reward.concurrency` of them wait at once: 64 questions to a judge that answers in 0.2 s take 0.2 s, not 13. Each has
`reward.timeout_s` (or its task's own `deadline_s`) from when it begins; one that is late is cancelled and recorded, and the others
go on. The loop beats: where it stands still for as long, because a reward computes or sleeps without `await`, the process is
replaced, the one at fault is recorded, and the others are asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from mmrl.registry import adopt, task_from_spec
from mmrl.task import Task
from mmrl.types import Score
from mmrl.workers.event_loop import run_here
from mmrl.workers.reward_pipe import ScoreWriter
from mmrl.workers.scoring import RewardWorker, ScoreJob, checked, failed

__all__ = ["AsyncWorker", "is_async", "score_here"]

_BEAT_S = 0.1
# a busy machine may hold up a loop that is well
_GRACE_S = 2.0


def is_async(task: Any, job: ScoreJob) -> bool:
    """Whether the function that would score `job` is an `async def`."""
    if not isinstance(task, Task):
        return False
    member = task.member(job.sample.task)
    return inspect.iscoroutinefunction(member.score if job.peers is None else member.score_in_group)


class _Watched:
    """Awaits `work`; `mark(True)` before each of its steps, `mark(False)` after it: whose code runs when the loop stands still."""

    def __init__(self, work: Awaitable[Any], mark: Callable[[bool], None]) -> None:
        self.work, self.mark = work, mark

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self.work.__await__()
        raised: BaseException | None = None
        while True:
            self.mark(True)
            try:
                waits_for = inner.send(None) if raised is None else inner.throw(raised)
            except StopIteration as end:
                return end.value
            finally:
                self.mark(False)
            raised = None
            try:
                yield waits_for
            except BaseException as error:  # a cancellation, which is the work's to hear of
                raised = error


async def _found(task: Task, job: ScoreJob, mark: Callable[[bool], None]) -> Score:
    """As mmrl.workers.scoring.score_one; SystemExit, which would end the loop, is an error of the reward like any other."""
    try:
        asked: Any = (
            task.score(job.sample, job.text, job.ctx)
            if job.peers is None
            else task.score_in_group(job.sample, job.peers, job.place)
        )
        score = await _Watched(asked, mark) if inspect.isawaitable(asked) else asked
        if not isinstance(score, Score):
            raise TypeError(f"expected a mmrl.Score, found {type(score).__name__}")
        return checked(score, task.value_range)
    except (Exception, SystemExit) as error:
        # user code: recorded on the sample, counted by the trainer
        return failed("reward_error", error, task.part_names)


async def _within(
    task: Task, job: ScoreJob, timeout_s: float | None, mark: Callable[[bool], None]
) -> Score:
    """The job's score, or the recorded failure of one that took longer; what does not hear its cancellation is left behind."""
    own = task.member(job.sample.task).deadline_s
    limit = timeout_s if own is None else own
    work = asyncio.ensure_future(_found(task, job, mark))
    await asyncio.wait({work}, timeout=None if limit is None or limit == float("inf") else limit)
    if not work.done():
        work.cancel()
        return Score.failure(f"reward_timeout: no answer within {limit:g} s", task.part_names)
    if work.cancelled():
        return Score.failure("reward_error: CancelledError: it cancelled itself", task.part_names)
    return work.result()


# in the training process (reward.workers 0, and tools that score a completion or two)


def score_here(
    tasks: Sequence[Task], jobs: Sequence[ScoreJob], *, concurrency: int, timeout_s: float
) -> list[Score]:
    """Scores of `jobs` on the event loop of this process, so many at a time."""

    async def every() -> list[Score]:
        slots = asyncio.Semaphore(concurrency)

        async def one(job: ScoreJob) -> Score:
            async with slots:
                return await _within(tasks[job.key], job, timeout_s, lambda runs: None)

        return list(await asyncio.gather(*(one(job) for job in jobs)))

    found: list[Score] = run_here(every())
    return found


# in the process of its own


def _serve(
    connection: Connection,
    progress: Any,
    specs: Sequence[tuple[str, dict[str, Any]]],
    token: bytes,
    tasks_here: bytes,
    timeout_s: float,
    concurrency: int,
    verdicts: str | None,
) -> None:
    """Score lists of (id, job), each list at once, until None comes. `progress` holds the id of the job whose code runs, 0 for
    none, and when the loop last beat."""
    try:
        adopt(tasks_here)
        tasks = [task_from_spec(spec, params) for spec, params in specs]
        if verdicts is not None:
            from mmrl.judges.store import keep_in

            keep_in(verdicts)
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")
        raise
    connection.send(None)
    asyncio.run(
        _answer(connection, progress, tasks, ScoreWriter(connection, token), timeout_s, concurrency)
    )


async def _answer(
    connection: Connection,
    progress: Any,
    tasks: Sequence[Task],
    writer: ScoreWriter,
    timeout_s: float,
    concurrency: int,
) -> None:
    async def beat() -> None:
        while True:
            progress[1] = time.monotonic()
            await asyncio.sleep(_BEAT_S)

    slots = asyncio.Semaphore(concurrency)

    async def one(number: int, job: ScoreJob) -> None:
        def mark(runs: bool) -> None:
            progress[0] = number if runs else 0

        async with slots:
            score = await _within(tasks[job.key], job, timeout_s, mark)
        writer.add(number, score, tasks[job.key].part_names)
        writer.flush()

    beating = asyncio.ensure_future(beat())
    loop = asyncio.get_running_loop()
    while (jobs := await loop.run_in_executor(None, connection.recv)) is not None:
        await asyncio.gather(*(one(number, job) for number, job in jobs))
    beating.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await beating


class AsyncWorker(RewardWorker):
    """The process with the event loop. All jobs sent are at hand at once: who is at fault may not be known."""

    serves = staticmethod(_serve)
    called = "mmrl-reward-async"
    at_once = True

    def __init__(
        self,
        specs: Sequence[tuple[str, dict[str, Any]]],
        ids: Iterator[int],
        timeout_s: float,
        concurrency: int,
        verdicts: str | None,
    ) -> None:
        self.more = (timeout_s, concurrency, verdicts)
        super().__init__(specs, ids, timeout_s)

    @property
    def deadline(self) -> float:
        """When the loop counts as standing still."""
        return self.began + self.timeout_s + _GRACE_S
