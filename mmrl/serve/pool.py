"""The processes that read requests (mmrl/serve/preparing.py), each with a thread that feeds it and ends it when its time is up.

    pool = Readers(recipe, limits)
    pool.start()
    reading = await pool.read(body, folder)

The first process takes small requests only, so that none of them waits behind someone's clips; the others take any, at a lower
priority of the operating system. One that dies, or is ended, costs the request it had, and is replaced by a fork server in moments.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmrl.errors import MMRLError
from mmrl.serve.errors import RequestError, shutting_down
from mmrl.serve.limits import Limits
from mmrl.serve.preparing import SMALL_BODY, Encode, ReadBody, Reading, Recipe, run
from mmrl.workers import spawned
from mmrl.workers.process import END_S, ChildError
from mmrl.workers.spawned import START_S, Worker

__all__ = ["Readers", "warm_up"]

_SMALL_S = 5.0  # for a small request; one that takes longer was not small, and goes to the others
_NICENESS = 19
_log = logging.getLogger("mmrl.serve")


def warm_up() -> None:
    """Start the fork server, which imports what all processes need, without waiting for it."""
    spawned.warm_up(["mmrl.serve.preload"])


class _Process(Worker):
    method = "forkserver"


@dataclass(eq=False)
class _Job:
    """What a process is asked, and who hears the answer: a Reading or a RequestError."""

    message: bytes
    body: bytes | bytearray | None
    client: str
    limit_s: float
    give: Callable[[Any], None]
    dropped: bool = False


class _Turns:
    """Jobs in turns by client: one who asks much waits for himself."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, deque[_Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def put(self, job: _Job) -> None:
        """Behind the jobs of the same client."""
        self._jobs.setdefault(job.client, deque()).append(job)

    def take(self) -> _Job | None:
        """The next client's first job that someone still waits for; None without."""
        while self._jobs:
            client, jobs = self._jobs.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._jobs[client] = jobs  # at the end
            if not job.dropped:
                return job
        return None


class _TimeUp(RequestError):
    """The process was ended because the request took too long."""


class Readers:
    """See the module's text. `start` before asking; `close` ends all processes."""

    def __init__(self, recipe: Recipe, limits: Limits) -> None:
        self._recipe, self._limits = recipe, limits
        self._changed = threading.Condition()
        self._small, self._large = _Turns(), _Turns()
        self._closing = False
        self._places = [
            _Place(self, small_only=n == 0 and limits.workers > 1) for n in range(limits.workers)
        ]

    def start(self) -> None:
        """Start the processes and wait until they are ready. Raises MMRLError."""
        warm_up()
        for place in self._places:
            place.thread.start()
        for place in self._places:
            place.up.wait()
            if place.fault:
                self.close()
                raise MMRLError(f"a process that reads requests did not start: {place.fault}")

    def close(self) -> None:
        """End all processes; what they were asked, and what waits for one, fails."""
        with self._changed:
            self._closing = True
            left = [job for queue in (self._small, self._large) for job in iter(queue.take, None)]
            self._changed.notify_all()
        for job in left:
            job.give(shutting_down())
        for place in self._places:
            place.end()

    @property
    def waiting(self) -> int:
        """Requests that no process has taken yet."""
        with self._changed:
            return len(self._small) + len(self._large)

    async def read(self, body: bytes | bytearray, folder: str, client: str = "") -> Reading:
        """The request in `body`, with its prompt unless media have to be fetched; clients (addresses) take turns. Raises
        RequestError."""
        if len(body) > SMALL_BODY:
            return await self._ask(ReadBody(folder, small=False), body, client, small=False)
        try:
            reading = await self._ask(ReadBody(folder, small=True), body, client, small=True)
        except _TimeUp:
            return await self._ask(ReadBody(folder, small=False), body, client, small=False)
        if reading.prompt is None and None not in reading.paths:
            return await self._ask(Encode(reading), None, client, small=False)
        return reading

    async def encode(self, reading: Reading, paths: Sequence[str], client: str = "") -> Reading:
        """The same with its prompt, all media being files. Raises RequestError."""
        return await self._ask(
            Encode(replace(reading, paths=tuple(paths))), None, client, small=False
        )

    async def _ask(
        self, job: ReadBody | Encode, body: bytes | bytearray | None, client: str, *, small: bool
    ) -> Reading:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Any] = loop.create_future()

        def settle(answer: Any) -> None:
            if not answered.done():
                answered.set_result(answer)

        def give(answer: Any) -> None:  # from a thread
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, answer)

        limit_s = min(_SMALL_S, self._limits.prepare_s) if small else self._limits.prepare_s
        asked = _Job(pickle.dumps(job), body, client, limit_s, give)
        with self._changed:
            if self._closing:
                raise shutting_down()
            (self._small if small else self._large).put(asked)
            self._changed.notify_all()
        try:
            answer = await answered
        finally:
            asked.dropped = True
        if isinstance(answer, RequestError):
            raise answer
        return answer

    def take(self, small_only: bool) -> _Job | None:
        """The next job; waits for one. None when the pool closes. From a place's thread."""
        # the first process sees to small ones already
        queues = (self._small,) if small_only else (self._large, self._small)
        queues = queues if self._limits.workers > 1 else (self._small, self._large)
        with self._changed:
            while True:
                for queue in queues:
                    if (job := queue.take()) is not None:
                        return job
                if self._closing:
                    return None
                self._changed.wait()

    def process(self, small_only: bool) -> _Process:
        """A new process."""
        return _Process(
            run, (self._recipe, 0 if small_only else _NICENESS), "mmrl-reader", most=self.memory
        )

    @property
    def closing(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    @property
    def memory(self) -> int:
        """Bytes that a process may need for one request."""
        return self._limits.worker_bytes


class _Place:
    """One process and the thread that feeds it."""

    def __init__(self, pool: Readers, *, small_only: bool) -> None:
        self._pool, self._small_only = pool, small_only
        self._process: _Process | None = None
        self.up, self.fault = threading.Event(), ""
        self.thread = threading.Thread(target=self._run, name="mmrl-reader", daemon=True)

    def end(self) -> None:
        """End the process and the thread; the pool closes."""
        if self._process is not None:
            self._process.stop()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(10.0)

    def _run(self) -> None:
        try:
            self._begin()
            self.up.set()
            while (job := self._pool.take(self._small_only)) is not None:
                job.give(self._answer(job))
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"
            _log.exception("a process that reads requests failed")
        finally:
            self.up.set()
            if self._process is not None:
                self._process.kill()

    def _begin(self) -> None:
        """Have a process that is ready. Raises MMRLError."""
        if self._process is None:
            self._process = self._pool.process(self._small_only)
        else:
            self._process.restart()
        try:
            self._process.await_ready(START_S)
        except ChildError as error:
            death = error.death
            raise MMRLError(
                {"refused": death.said, "timeout": f"it {death.said}"}.get(
                    death.cause, f"it {death.how}"
                )
            ) from error

    def _answer(self, job: _Job) -> Any:
        try:
            if self._process is None or not self._process.ready:
                self._begin()
        except (MMRLError, OSError, EOFError) as error:
            _log.error("a process that reads requests could not be replaced: %s", error)
            return RequestError(
                "the server has no process left to read this request; ask again later", status=503
            )
        assert self._process is not None
        process, answer = self._process, None
        with process.within(job.limit_s) as late:
            try:
                process.connection.send_bytes(job.message)
                if job.body is not None:
                    process.connection.send_bytes(job.body)
                    job.body = None  # the process has it
                answer = process.receive(patience_s=0.0)
            except OSError:
                process.ready = False
            except Exception as error:  # it died; or what it answered cannot be read, or not be held: this place must go on
                process.ready = False
                if not isinstance(error, ChildError) or error.death.cause == "message":
                    _log.exception("what a process that reads requests answered could not be taken")
                    process.stop()
        if late.is_set():
            process.ready = False
        if not process.ready and answer is None:
            answer = self._lost(job, late=late.is_set())
            job.give(answer)  # before the next process starts
        if not process.ready and not self._pool.closing:
            self._replace()
        return answer

    def _replace(self) -> None:
        try:
            self._begin()
        except (MMRLError, OSError, EOFError) as error:  # tried again when it is needed
            assert self._process is not None
            self._process.ready = False
            _log.error("a process that reads requests could not be replaced: %s", error)

    def _lost(self, job: _Job, *, late: bool) -> RequestError:
        assert self._process is not None
        if self._pool.closing:
            return shutting_down()
        if late:
            return _TimeUp(
                f"expected media and text that can be read within {job.limit_s:g} s, found that these take longer; send "
                "fewer or smaller ones, or start the server with a larger --prepare-timeout",
                "messages",
                code="timeout",
            )
        return RequestError(
            "the process that read this request died of it (exit code "
            f"{self._process.death(END_S).code}); send other media, or start the server with a larger "
            f"--worker-memory-gib (now {self._pool.memory / 2**30:g})",
            "messages",
            code="crashed",
        )
