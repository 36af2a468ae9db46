"""One worker process as its parent sees it: start, what it owes, how it ended.

    python -c "from robotics.pool_process import ONE_THREAD; print(ONE_THREAD)"

Started as a fresh interpreter, never forked, and without importing the parent's main module again: a worker that draws
pictures does not load what trains.
"""
from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe

from robotics.worker import MEMORY_EXIT, Command

__all__ = ["ONE_THREAD", "Pending", "WorkerProcess"]

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS",
                                     "VECLIB_MAXIMUM_THREADS")}
"""Set before the worker imports anything: with more threads, workers and trainer slow each other down many times."""

_TAIL = 3000  # characters of stderr in an error
_STDERR_LIMIT = 4 << 20
_STACK_S = 0.5  # for a hanging worker to write where it hangs


@dataclass
class Pending:
    """A command on its way; `sent` in time.monotonic()."""

    command: Command
    sent: float


class WorkerProcess:
    """Worker number `worker`, which hosts the slots in `areas` (slot -> descriptor of its memory).

    `pending` are the commands it still owes an answer to; it works on the first. `free_since` is when it became free for that
    one: the end of the answer before, or of the handshake (None: it has not said hello yet).
    """

    def __init__(self, worker: int, areas: Mapping[int, int], *, hard_gib: float, environment: Mapping[str, str]) -> None:
        self.worker = worker
        self.connection, child = Pipe()
        self.stderr = tempfile.TemporaryFile("a+b")  # noqa: SIM115 (lives as long as the process)
        plan = {"parent": os.getpid(), "areas": dict(areas), "hard_gib": hard_gib}
        code = (f"import sys; sys.path[:] = {sys.path!r}; from robotics.worker import main; "
                f"main({child.fileno()}, {plan!r})")
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.stderr,
                pass_fds=[child.fileno(), *areas.values()], env={**os.environ, **ONE_THREAD, **environment})
        except BaseException:
            self.connection.close()
            self.stderr.close()
            raise
        finally:
            child.close()
        self.started = time.monotonic()
        self.pending: deque[Pending] = deque()
        self.free_since: float | None = None
        self.retiring = False
        self.closed = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def send(self, command: Command) -> None:
        """Queue a command; a worker that has just died is noticed when its answers are read."""
        item = Pending(command, time.monotonic())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(command)
        self.pending.append(item)

    def head_since(self) -> float | None:
        """Since when the first pending command is worked on; None when nothing is."""
        if not self.pending or self.free_since is None:
            return None
        return max(self.pending[0].sent, self.free_since)

    def stack(self) -> str:
        """What a hanging process was doing: its Python stack, as faulthandler writes it."""
        before = self._stderr_size()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_S
        while self._stderr_size() == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.02)  # the rest of the text
        return self.tail()

    def _stderr_size(self) -> int:
        return os.fstat(self.stderr.fileno()).st_size

    def tail(self) -> str:
        """The end of what it wrote to stderr."""
        size = self._stderr_size()
        return os.pread(self.stderr.fileno(), _TAIL, max(0, size - _TAIL)).decode("utf-8", "replace").strip()

    def trim(self) -> None:
        """Forget a long stderr: simulators that warn in every step would fill the disk."""
        if self._stderr_size() > _STDERR_LIMIT:
            os.ftruncate(self.stderr.fileno(), 0)

    def ended(self) -> tuple[str, bool]:
        """How the process ended, in words, and whether memory was the reason. Ends it if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        running = self.process.poll() is None
        self.process.kill()
        status = self.process.wait()
        if running:
            how = "closed its pipe"
        elif status < 0:
            with contextlib.suppress(ValueError):
                how = f"was killed by {signal.Signals(-status).name}"
                return self._with_tail(how), False
            how = f"was killed by signal {-status}"
        else:
            how = f"exited with status {status}"
        return self._with_tail(how), status == MEMORY_EXIT

    def _with_tail(self, how: str) -> str:
        tail = self.tail()
        return f"the worker process {how}" + (f"; the end of its stderr:\n{tail}" if tail else "")

    def ask_to_end(self) -> None:
        """Tell it to return; close() waits for it."""
        with contextlib.suppress(OSError, ValueError):
            self.connection.send(None)

    def close(self, patience_s: float = 0.0) -> None:
        """End the process, by force after `patience_s`; may be called more than once."""
        if self.closed:
            return
        self.closed = True
        if patience_s > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel ends when the kernel lets it
            self.process.wait(5.0)
        self.connection.close()
        self.stderr.close()


