"""Threads in the place of reward processes: the pipe, the frames and the loop of mmrl.workers.scorer are real, starting is
free."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import mmrl.workers.scoring as scoring
from mmrl.coords import CoordFrame
from mmrl.task import Task
from mmrl.types import RewardContext, Sample, Score
from mmrl.workers.scorer import Scorer
from mmrl.workers.scoring import ScoreJob
from mmrl.workers.spawned import Worker

__all__ = ["PATIENCE_S", "Told", "ending", "in_threads", "jobs", "scorer"]

CONTEXT = RewardContext(1, 1, CoordFrame.ABS_ORIG)
PATIENCE_S = 20  # for one test; each takes less than a second


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """A loop inside that does not end raises TimeoutError."""

    def too_long(*_: Any) -> None:
        raise TimeoutError(f"expected the test to end within {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Killed(BaseException):
    """Ends a thread in the place of SIGKILL."""


class Told(Task):
    """Scores a text as its number; `tricks` are texts that do something else, with the worker whose thread it is."""

    part_names = ("accuracy",)
    value_range = (0.0, 1.0)
    in_group = True

    def __init__(self, result: Any = None, factor: float = 1.0) -> None:
        super().__init__()
        self.result, self.factor = result, factor

    def load(self, path: Any) -> list[Sample]:
        return []

    def messages(self, sample: Sample, template: Any) -> list[Any]:
        return []

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        return "1"

    def wrong(self, sample: Sample, ctx: RewardContext) -> str:
        return "0"

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        if isinstance(self.result, BaseException):
            raise self.result
        if self.result is not None:
            return self.result
        if text in TRICKS:
            TRICKS[text](HERE.worker)
        value = self.factor * float(text.split()[0])
        return Score.combine({"accuracy": value}, {"accuracy": 1.0}, parsed=True)

    def score_in_group(self, sample: Sample, scores: Sequence[Score], index: int) -> Score:
        return Score(sum(s.value < scores[index].value for s in scores) / len(scores), True)


HERE = threading.local()  # .worker: the stand-in whose thread this is
TRICKS: dict[str, Callable[[Any], None]] = {}


def trick(name: str) -> Callable[[Callable[[Any], None]], None]:
    def add(what: Callable[[Any], None]) -> None:
        TRICKS[name] = what

    return add


@trick("hang")
def _(worker: Any) -> None:
    worker.hangs.set()
    worker.killed.wait(PATIENCE_S)
    raise Killed


@trick("die")
def _(worker: Any) -> None:
    worker.exitcode = 7
    raise Killed


@trick("0 half")
def _(worker: Any) -> None:
    os.write(worker.descriptor, worker.token + b"\0\0")
    worker.killed.wait(PATIENCE_S)
    raise Killed


@trick("0 babble")
def _(worker: Any) -> None:
    os.write(worker.descriptor, b"no frame at all: " * 4)


class Stand:
    """What a worker sees of its process: a thread that runs its target."""

    def __init__(self, worker: Any) -> None:
        worker.connection, child = multiprocessing.Pipe()
        worker.progress, worker.ready = [0.0, 0.0], False
        self.descriptor, self.token = child.fileno(), worker.args[1]
        self.sentinel, self._held = os.pipe()  # readable once the thread has ended
        self.exitcode: int | None = None
        self.hangs, self.killed, self._ended = (threading.Event() for _ in range(3))

        def run() -> None:
            HERE.worker = self
            try:
                worker.target(child, worker.progress, *worker.args)
            except (Killed, EOFError, OSError):
                pass  # as a process that was killed, or whose run is gone
            finally:
                self.exitcode = self.exitcode or 0
                self._ended.set()
                child.close()
                os.close(self._held)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self.thread.join(timeout)

    def kill(self) -> None:
        self.killed.set()


def _start(self: Any) -> None:
    self.process = Stand(self)


def _kill(self: Any) -> None:
    self.process.kill()
    self.connection.close()
    self.process.join(PATIENCE_S)
    os.close(self.process.sentinel)


def in_threads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Let threads stand for processes; what is sent from now on, as (number of the worker, indices of its jobs)."""
    found: list[tuple[int, list[int]]] = []
    known: list[Any] = []
    real = scoring.RewardWorker.send

    def noted(self: Any, jobs: Any, indices: list[int]) -> None:
        if self not in known:
            known.append(self)
        found.append((known.index(self), list(indices)))
        real(self, jobs, indices)

    monkeypatch.setattr(Worker, "start", _start)
    monkeypatch.setattr(Worker, "kill", _kill)
    monkeypatch.setattr(scoring.RewardWorker, "send", noted)
    monkeypatch.setattr(scoring, "task_from_spec", lambda spec, params: Told(**params))
    return found


def scorer(workers: int, timeout_s: float = 5.0) -> Scorer:
    return Scorer([("told", {})], [Told()], workers=workers, timeout_s=timeout_s)


def jobs(*texts: str, key: int = 0) -> list[ScoreJob]:
    return [
        ScoreJob(key, Sample(f"{i}", "told", "s", "q", None), text, CONTEXT)
        for i, text in enumerate(texts)
    ]
