"""A spawned Python behind a pipe: what scores rewards, prepares media, reads requests and records run in, and are killed with.

    worker = Worker(serve, (tasks,), "mmrl-reward")     # serve(connection, progress, tasks) in a process of its own
    worker.await_ready(START_S)
    worker.give(job, 10.0)                              # wait([worker.connection], patience([worker.deadline])), then
    answer = worker.receive()                           # raises ChildError when it has died or babbles

A worker never outlives the process that started it, and leaves Ctrl-C and SIGTERM to it. What it prints, and what its own children
print, goes to the standard error of the process that started it, up to MOST_OUTPUT bytes; the rest is read and dropped, so that a
reward that prints every box of every answer neither fills the disk with its log nor waits for it.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from mmrl.operations.startup import loaded, loading
from mmrl.workers.process import END_S, Child

__all__ = [
    "MOST_BYTES",
    "MOST_OUTPUT",
    "START_S",
    "MessageError",
    "Worker",
    "close_all",
    "read_message",
    "warm_up",
]

MOST_OUTPUT = 1 << 20
"""Bytes that a worker may print, its restarts included."""
MOST_BYTES = 4 << 30
"""Bytes of one message, both ways, unless the user of the worker sets fewer."""
START_S = 300.0
"""Seconds for a process to come up: it may import torch beside many others that do."""
_LOOK_S = 0.5
_MAIN = threading.Lock()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """A spawned process imports the script that started its parent, which would run a script without a main guard, or that of a
    notebook, once more. Ours needs nothing of it: what the script defines comes along by value (mmrl.registry.carried)."""
    main = sys.modules["__main__"]
    with _MAIN:
        hidden: dict[str, Any] = {
            name: vars(main).pop(name) for name in ("__spec__", "__file__") if name in vars(main)
        }
        main.__spec__ = None
        try:
            yield
        finally:
            vars(main).update(hidden)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        # also out of a job that hangs; what it was writing is cleaned up by whoever finds it
        os._exit(1)


def _forward(reader: Connection, worker: Worker, stop: threading.Event) -> None:
    """Hand on what a worker prints, in a thread, until it and its children are gone or `stop` is set."""
    with reader:
        while (ready := wait([reader], _LOOK_S)) or not stop.is_set():
            if not ready:
                continue
            data = os.read(reader.fileno(), 65_536)
            if not data:
                return
            room, worker.printed = max(0, MOST_OUTPUT - worker.printed), worker.printed + len(data)
            shown = data[:room]
            if len(data) >= room > 0:
                shown += (
                    f"\n[{worker.name}: the {MOST_OUTPUT:,} bytes that are shown of its output are used up; what it prints "
                    "from here on is dropped]\n"
                ).encode()
            # our own standard error is gone: nobody to tell
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(shown.decode("utf-8", "replace"))
                sys.stderr.flush()


class _Loading:
    """First of a worker's arguments: when it is read, `loading` is called, before the others import what they are made of."""

    def __reduce__(self) -> tuple[Any, ...]:
        return loading, ()


def _main(
    _loading: None,
    target: Callable[..., None],
    connection: Connection,
    progress: Any,
    output: Connection,
    args: tuple[Any, ...],
) -> None:
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # not a terminal: lines would wait for a full block
    # terminals and schedulers send them to all processes
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # .. the parent finishes its step with us and ends us in its own order
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True, name="parent-watch").start()
    loaded()
    # the parent is gone: so are we
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        target(connection, progress, *args)


class MessageError(Exception):
    """What came through a pipe is no message of ours; the text goes on from 'the process'."""


def read_message(connection: Connection, most: int) -> Any:
    """The next object that came through a pipe, of at most so many bytes; waits for one. It is unpickled: our own code must have
    sent it. Raises EOFError and OSError when the other end is gone, MessageError."""
    try:
        data = connection.recv_bytes(most)
    except OSError as error:
        if str(error) == "bad message length":  # multiprocessing's words, and all it says
            raise MessageError(f"sent a message of more than {most:,} bytes") from error
        raise
    except MemoryError as error:
        raise MessageError("sent a message that memory does not hold") from error
    try:
        return pickle.loads(data)
    except Exception as error:  # whatever a class does when it is read
        raise MessageError(
            f"sent a message that cannot be read: {type(error).__name__}: {error}"
        ) from error


def warm_up(modules: Sequence[str]) -> None:
    """Start multiprocessing's fork server, which imports `modules`, without waiting for it. There is one for the whole process: one
    that runs already keeps what it has, and what a worker needs beyond that it imports itself."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    forkserver.ensure_running()


class Worker(Child):
    """A process that runs `target(connection, progress, *args)`; `progress` is an array of two doubles shared with it.

    The target sends None when it is ready, or the text of what is wrong, and returns when it receives None. Its messages are
    unpickled here: it must be code of ours that sends them, on whatever data.
    """

    def __init__(
        self,
        target: Callable[..., None],
        args: tuple[Any, ...],
        name: str,
        *,
        most: int = MOST_BYTES,
    ) -> None:
        self.target, self.args, self.name, self.most = target, args, name, most
        self.printed = 0  # bytes so far
        self.start()

    method = "spawn"  # fork is unsafe beside torch threads; a fork server (see warm_up) has none
    # multiprocessing lets a daemon have no children; either way it is killed when this process ends
    daemon = True

    # life

    def start(self) -> None:
        """Start the process; `ready` is False until its first message has been read."""
        context: Any = multiprocessing.get_context(self.method)
        self.connection, child = context.Pipe()
        self.progress = context.RawArray("d", 2)
        reader, output = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_main,
            args=(_Loading(), self.target, child, self.progress, output, self.args),
            daemon=self.daemon,
            name=self.name,
        )
        with _without_main():
            self.process.start()
        child.close()
        output.close()
        self._ended = threading.Event()
        self._output = threading.Thread(
            target=_forward,
            args=(reader, self, self._ended),
            daemon=True,
            name=f"{self.name}-output",
        )
        self._output.start()
        self.ready = False
        self.begin(START_S)
        atexit.register(self.kill)  # multiprocessing would ask by SIGTERM and wait for ever

    @property
    def pid(self) -> int:
        """Process id."""
        return int(self.process.pid)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return bool(self.process.is_alive())

    def wait(self, seconds: float | None) -> int | None:
        """See Child.wait."""
        self.process.join(seconds)
        return self.process.exitcode

    def stop(self) -> None:
        """See Child.stop."""
        self.process.kill()

    def kill(self) -> None:
        """End the process without asking it."""
        atexit.unregister(self.kill)
        self.stop()
        self.wait(END_S)
        self._ended.set()
        # its last words; children that it left behind may print for ever
        self._output.join(2 * _LOOK_S)
        self.connection.close()

    def ask_to_end(self) -> None:
        """Tell the process to return after its job."""
        with contextlib.suppress(OSError, ValueError):  # already gone: nothing to ask it to do
            self.connection.send(None)

    def close(self) -> None:
        """End the process, by force if it does not end when asked to."""
        if self.alive:
            self.ask_to_end()
            self.wait(END_S)
        self.kill()

    # messages

    def await_ready(self, limit_s: float) -> None:
        """Read its first message, waiting so long. Raises ChildError: timeout, refused with its words, or how it ended."""
        if self.ready:
            return
        if not self.connection.poll(limit_s):
            raise self.error("timeout", f"was not ready within {limit_s:g} s")
        fault = self.receive(patience_s=0.0)
        if fault is not None:
            raise self.error("refused", str(fault))
        self.ready = True
        self.clear_deadline()

    def give(self, message: Any, limit_s: float) -> None:
        """Send a job for which it has so many seconds; one that has just died is noticed when its answer is read. Raises
        ValueError for a message that is too long."""
        data = ForkingPickler.dumps(message)
        if len(data) > self.most:
            raise ValueError(
                f"{self.name}: expected a message of at most {self.most:,} bytes, found {len(data):,}"
            )
        self.begin(limit_s)
        with contextlib.suppress(OSError):
            self.connection.send_bytes(data)

    def receive(self, *, patience_s: float = END_S) -> Any:
        """Its next message; waits for one. Raises ChildError when it has ended (whose status is awaited for `patience_s`), or
        sent what is too long or cannot be read."""
        try:
            return read_message(self.connection, self.most)
        except (EOFError, OSError) as error:
            raise self.error(patience_s=patience_s) from error
        except MessageError as error:
            raise self.error("message", str(error)) from error


def close_all(workers: Sequence[Worker], idle: Sequence[Worker]) -> None:
    """End `workers`: the idle ones among them when asked to, within END_S together, all others by force."""
    for worker in idle:
        worker.ask_to_end()
    deadline = time.monotonic() + END_S
    for worker in idle:
        worker.wait(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        worker.kill()
