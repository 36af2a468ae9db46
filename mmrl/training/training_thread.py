"""The thread that trains while the caller's thread rolls out, and the lock that keeps the two off shared modules.

    thread = TrainingThread(FairLock, timeline)
    thread.put(lambda: learner.add(group), "add", step=1)
    thread.put(learner.finish, "finish", step=1)
    thread.wait(1); thread.check(); print(thread.result)

Used by mmrl.training.pipeline; knows neither groups nor models.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Generic, TypeVar

from mmrl.diagnostics.timeline import Timeline

__all__ = ["FairLock", "TrainingThread"]

R = TypeVar("R")


class FairLock:
    """A mutual exclusion that is granted in order of asking (threading.Lock lets one thread take it again and again).

    The thread that holds it may enter again.
    """

    @property
    def contended(self) -> bool:
        """Whether another thread waits for it."""
        return bool(self._waiting)

    def __init__(self) -> None:
        self._inner = threading.Lock()
        self._waiting: deque[tuple[int, threading.Lock]] = deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        with self._inner:
            if self._owner is None:
                self._owner = me
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append((me, turn))
        try:
            turn.acquire()  # released by the one before, who hands the lock over
        except BaseException:
            # interrupted while waiting: leave the line, or pass on what was just handed over
            with self._inner:
                handed_over = (me, turn) not in self._waiting
                if not handed_over:
                    self._waiting.remove((me, turn))
            if handed_over:
                self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        if self._depth:
            self._depth -= 1
            return
        with self._inner:
            self._owner = None
            if self._waiting:
                self._owner, turn = self._waiting.popleft()
                turn.release()


class TrainingThread(Generic[R]):
    """Does what it is given, in order, each job inside `exclusive()`, until its first error, which `check` raises.

    A job of kind "finish" ends a step: its value is `result`, and `finished` names its step while the policy is still held. A long
    job calls `make_way` where others may use the policy; `contended` tells whether somebody waits for it.
    """

    def __init__(
        self,
        exclusive: Callable[[], AbstractContextManager[Any]],
        timeline: Timeline,
        contended: Callable[[], bool] = lambda: False,
    ) -> None:
        self._exclusive, self._timeline, self._contended = exclusive, timeline, contended
        self._hold: Callable[[], ExitStack]  # takes the policy for the job that runs
        self._held = ExitStack()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], str, int, dict[str, int]] | None] = (
            queue.SimpleQueue()
        )
        self._changed = threading.Condition()
        self.error: BaseException | None = None
        self._ending = False
        # the last step whose finish() returned; set while the policy is still held
        self.finished = -1
        self.result: R  # of the last finish
        self._done = -1
        self._thread = threading.Thread(target=self._run, name="mmrl-train", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], Any], kind: str, step: int, place: int | None = None) -> None:
        """Do `job` after those given before."""
        self._jobs.put((job, kind, step, {} if place is None else {"place": place}))
        self._timeline.count("train queue", self._jobs.qsize())

    def check(self) -> None:
        """Raise the thread's error, if it had one."""
        if self.error is not None:
            raise self.error

    def done(self, step: int) -> bool:
        """Whether `step` was finished."""
        with self._changed:
            return self._done >= step

    def wait(self, step: int) -> None:
        """Until `step` is trained or something failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._done >= step or self.error is not None)

    def close(self, patience_s: float) -> bool:
        """Drop what waits and end; whether the thread has ended."""
        self._ending = True
        self._jobs.put(None)
        self._thread.join(patience_s)
        return self.ended

    @property
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def make_way(self) -> None:
        """Of the job that runs, in its thread: let go of the policy for whoever waits for it, and take it again afterwards."""
        if self._contended():
            self._held.close()
            self._held = self._hold()

    def _enter(self, kind: str, step: int, args: dict[str, int]) -> ExitStack:
        with ExitStack() as stack:
            stack.enter_context(self._exclusive())
            stack.enter_context(self._timeline.span("train", "train", kind=kind, step=step, **args))
            return stack.pop_all()

    def _run(self) -> None:
        try:
            while (taken := self._jobs.get()) is not None and not self._ending:
                job, kind, step, args = taken
                self._timeline.count("train queue", self._jobs.qsize())
                self._hold = partial(self._enter, kind, step, args)
                self._held = self._hold()
                try:
                    found = job()
                    if kind == "finish":
                        self.finished, self.result = step, found
                finally:
                    self._held.close()
                if kind == "finish":
                    with self._changed:
                        self._done = step
                        self._changed.notify_all()
                del taken, job, found  # the group of a job is let go before the next one is there
        except BaseException as error:
            with self._changed:
                self.error = error
                self._changed.notify_all()
