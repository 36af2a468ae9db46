"""Workers as their pool sees them: what starts one, what it owes, how it ended; and the local kind, a process of this machine.

    python -c "from mmrl.robotics.pool_process import ONE_THREAD; print(ONE_THREAD)"

Started as a fresh interpreter, never forked, and without importing the parent's main module again: a worker that draws
pictures does not load what trains. Workers on other machines are mmrl.robotics.ray_pool's: both are WorkerHandles, and the pool
knows no more of them.
"""

from __future__ import annotations

import abc
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from mmrl.robotics.worker import Answer, Area, Command
from mmrl.workers.program import Program
from mmrl.workers.spawned import MessageError, read_message

__all__ = [
    "ONE_THREAD",
    "LocalWorkers",
    "Pending",
    "WorkerHandle",
    "WorkerProcess",
    "Workers",
    "memory_fd",
]

ONE_THREAD = {
    name: "1"
    for name in (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        "LP_NUM_THREADS",  # Mesa's software renderer, behind OSMesa and Vulkan where there is no GPU
    )
}
"""Set before the worker imports anything: with more threads, workers and trainer slow each other down many times."""

_MOST_BYTES = 64 << 20  # of one answer; pictures are not in it
_ENDING_S = 1.0  # for one whose pipe is closed to have a status
_STACK_S = 0.5  # for a hanging worker to write where it hangs


@dataclass
class Pending:
    """A command on its way, one of `together` in its message; `sent` in time.monotonic()."""

    command: Command
    sent: float
    together: int = 1


class WorkerHandle(abc.ABC):
    """Worker number `worker`, wherever it runs.

    `pending` are the commands it still owes an answer to; it works on the first. `free_since` is when it became free for that
    one: the end of the answer before, or of the handshake (None: it has not said hello yet).
    """

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.started = time.monotonic()
        self.pending: deque[Pending] = deque()
        self.free_since: float | None = None
        self.retiring = False
        self.closed = False

    @property
    @abc.abstractmethod
    def pid(self) -> int:
        """Process id, on the machine where it runs."""

    def send(self, commands: Sequence[Command]) -> None:
        """Queue commands; a worker that has just died is noticed when its answers are read. What goes together may be played
        together."""
        now = time.monotonic()
        self.post(commands)
        self.pending.extend(Pending(command, now, len(commands)) for command in commands)

    def head_since(self) -> float | None:
        """Since when the first pending command is worked on; None when nothing is."""
        if not self.pending or self.free_since is None:
            return None
        return max(self.pending[0].sent, self.free_since)

    @abc.abstractmethod
    def post(self, commands: Sequence[Command]) -> None:
        """Bring commands on their way, in one message."""

    @abc.abstractmethod
    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether `receive` would return, or raise, at once; waits so long for it."""

    @abc.abstractmethod
    def receive(self) -> float | Answer:
        """First its resident memory in GiB (the hello), then answers in the order of the commands. Raises EOFError or OSError
        when the worker has ended."""

    @abc.abstractmethod
    def pictures(self, slot: int, count: int, side: int) -> list[np.ndarray]:
        """Copies of the first `count` pictures, uint8 (side, side, 3), that came with the answer just received for `slot`."""

    @abc.abstractmethod
    def stack(self) -> str:
        """What a hanging worker was doing: its Python stack, as faulthandler writes it."""

    @abc.abstractmethod
    def ended(self) -> tuple[str, bool]:
        """How the worker ended, in words, and whether memory was the reason. Ends it if it still runs."""

    def trim(self) -> None:  # noqa: B027
        """Forget what it has written to stderr, where that is long."""

    @abc.abstractmethod
    def ask_to_end(self) -> None:
        """Tell it to return; close() waits for it."""

    @abc.abstractmethod
    def close(self, patience_s: float = 0.0) -> None:
        """End the worker, by force after `patience_s`; may be called more than once."""


class Workers(abc.ABC):
    """What starts workers for a pool and waits for several of them."""

    @abc.abstractmethod
    def start(
        self, worker: int, slots: Sequence[int], *, hard_gib: float, environment: Mapping[str, str]
    ) -> WorkerHandle:
        """Worker number `worker` for these slots; returns at once. `hard_gib`: memory at which it ends itself (0: never)."""

    @abc.abstractmethod
    def reserve(self, slot: int, size: int) -> int:
        """Make room for `size` bytes of pictures of a slot; what a command says about it."""

    @abc.abstractmethod
    def wait(self, handles: Sequence[Any], timeout_s: float) -> None:
        """Until one of these workers, all of this kind, has something to receive, or the time is over."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what workers shared with this process; they have ended. May be called more than once."""


class WorkerProcess(WorkerHandle):
    """A worker as a child of this process. `areas`: the memory of its slots; `path`: what it imports from (null: as we do)."""

    def __init__(
        self,
        worker: int,
        areas: Mapping[int, Area],
        *,
        hard_gib: float,
        environment: Mapping[str, str],
        path: Sequence[str] | None = None,
    ) -> None:
        super().__init__(worker)
        self.areas, self._broken = areas, ""
        self.connection, child = Pipe()
        fds = {slot: area.fd for slot, area in areas.items()}
        plan = {"parent": os.getpid(), "areas": fds, "hard_gib": hard_gib}
        code = (
            f"import sys; sys.path[:] = {list(sys.path if path is None else path)!r}; from mmrl.robotics.worker import main; "
            f"main({child.fileno()}, {plan!r})"
        )
        try:
            self.program = Program(
                [sys.executable, "-c", code],
                "simulator worker",
                talk=False,
                group=True,
                passed=[child.fileno(), *fds.values()],
                environment={**ONE_THREAD, **environment},
            )
        except BaseException:
            self.connection.close()
            raise
        finally:
            child.close()
        self.started = time.monotonic()

    @property
    def pid(self) -> int:
        """Process id."""
        return self.program.pid

    def post(self, commands: Sequence[Command]) -> None:
        """See WorkerHandle.post."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(commands)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """See WorkerHandle.poll."""
        return self.connection.poll(timeout_s)

    def receive(self) -> float | Answer:
        """See WorkerHandle.receive."""
        try:
            return read_message(self.connection, _MOST_BYTES)
        except MessageError as error:  # a library of a simulator wrote into our pipe
            self._broken = str(error)
            raise EOFError from error

    def pictures(self, slot: int, count: int, side: int) -> list[np.ndarray]:
        """See WorkerHandle.pictures."""
        return [self.areas[slot].read(number, side) for number in range(count)]

    def stack(self) -> str:
        """See WorkerHandle.stack."""
        before = self.program.stderr_size
        with contextlib.suppress(ProcessLookupError):
            self.program.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_S
        while self.program.stderr_size == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.02)  # the rest of the text
        return self.program.tail()

    def trim(self) -> None:
        """Forget a long stderr: simulators that warn in every step would fill the disk."""
        self.program.trim()

    def ended(self) -> tuple[str, bool]:
        """See WorkerHandle.ended."""
        death = self.program.death(0.0 if self._broken else _ENDING_S)
        self.program.stop()
        how = f"the worker process {self._broken or death.how}"
        return how + (
            f"; the end of its stderr:\n{death.tail}" if death.tail else ""
        ), death.cause == "memory"

    def ask_to_end(self) -> None:
        """See WorkerHandle.ask_to_end."""
        with contextlib.suppress(OSError, ValueError):
            self.connection.send(None)

    def close(self, patience_s: float = 0.0) -> None:
        """See WorkerHandle.close."""
        if self.closed:
            return
        self.closed = True
        self.program.close(patience_s)
        self.connection.close()


class LocalWorkers(Workers):
    """Workers as processes of this machine; pictures come through memory that they share with this one, one area for a slot."""

    def __init__(self, num_slots: int) -> None:
        self._areas: list[Area] = []
        try:
            for _ in range(num_slots):
                self._areas.append(Area(memory_fd()))
        except BaseException:
            self.close()
            raise

    def start(
        self, worker: int, slots: Sequence[int], *, hard_gib: float, environment: Mapping[str, str]
    ) -> WorkerProcess:
        """See Workers.start."""
        return WorkerProcess(
            worker,
            {slot: self._areas[slot] for slot in slots},
            hard_gib=hard_gib,
            environment=environment,
        )

    def reserve(self, slot: int, size: int) -> int:
        """See Workers.reserve: the size that the worker must attach."""
        return self._areas[slot].grow(size)

    def wait(self, handles: Sequence[WorkerProcess], timeout_s: float) -> None:
        """See Workers.wait."""
        wait([handle.connection for handle in handles], timeout_s)

    def close(self) -> None:
        """See Workers.close."""
        while self._areas:
            area = self._areas.pop()
            area.close()
            os.close(area.fd)


def memory_fd() -> int:
    """Descriptor of memory without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("mmrl-slot")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
