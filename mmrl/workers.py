"""One spawned process behind a pipe: what scores rewards and what prepares media run in, and are killed with.

    worker = Worker(serve, (tasks,), "mmrl-reward")     # serve(connection, progress, tasks) in a process of its own
    worker.connection.send(job)

A worker never outlives the process that started it, and leaves Ctrl-C and SIGTERM to it. What it prints, and what its own children
print, goes to the standard error of the process that started it, up to MOST_OUTPUT bytes; the rest is read and dropped, so that a
reward that prints every box of every answer neither fills the disk with its log nor waits for it.
"""
from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["MOST_OUTPUT", "Worker"]

MOST_OUTPUT = 1 << 20
"""Bytes that a worker may print, its restarts included."""
_LOOK_S = 0.5
_MAIN = threading.Lock()
_END_S = 5.0  # for a process to end once asked to, or killed


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """A spawned process imports the script that started its parent, which would run a script without a main guard, or that of a
    notebook, once more. Ours needs nothing of it: what the script defines comes along by value (mmrl.registry.carried)."""
    main = sys.modules["__main__"]
    with _MAIN:
        hidden: dict[str, Any] = {name: vars(main).pop(name) for name in ("__spec__", "__file__") if name in vars(main)}
        main.__spec__ = None
        try:
            yield
        finally:
            vars(main).update(hidden)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)  # also out of a job that hangs; what it was writing is cleaned up by whoever finds it


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
                shown += (f"\n[{worker.name}: the {MOST_OUTPUT:,} bytes that are shown of its output are used up; what it prints "
                          "from here on is dropped]\n").encode()
            with contextlib.suppress(OSError, ValueError, AttributeError):  # our own standard error is gone: nobody to tell
                sys.stderr.write(shown.decode("utf-8", "replace"))
                sys.stderr.flush()


def _main(target: Callable[..., None], connection: Connection, progress: Any, output: Connection,
          args: tuple[Any, ...]) -> None:
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # not a terminal: lines would wait for a full block
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # terminals and schedulers send them to all processes
        signal.signal(number, signal.SIG_IGN)  # .. the parent finishes its step with us and ends us in its own order
    threading.Thread(target=_leave_with_parent, daemon=True, name="parent-watch").start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone: so are we
        target(connection, progress, *args)


class Worker:
    """A process that runs `target(connection, progress, *args)`; `progress` is an array of two doubles shared with it.

    The target sends None when it is ready, or the text of what is wrong, and returns when it receives None.
    """

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> None:
        self.target, self.args, self.name = target, args, name
        self.printed = 0  # bytes so far
        self.start()

    method = "spawn"  # fork is unsafe beside torch threads; a fork server has none

    def start(self) -> None:
        """Start the process; `ready` is False until its first message has been read."""
        context: Any = multiprocessing.get_context(self.method)
        self.connection, child = context.Pipe()
        self.progress = context.RawArray("d", 2)
        reader, output = context.Pipe(duplex=False)
        self.process = context.Process(target=_main, args=(self.target, child, self.progress, output, self.args), daemon=True,
                                       name=self.name)
        with _without_main():
            self.process.start()
        child.close()
        output.close()
        self._ended = threading.Event()
        self._output = threading.Thread(target=_forward, args=(reader, self, self._ended), daemon=True, name=f"{self.name}-output")
        self._output.start()
        self.ready = False
        atexit.register(self.kill)  # multiprocessing would ask by SIGTERM and wait for ever

    def kill(self) -> None:
        """End the process without asking it."""
        atexit.unregister(self.kill)
        self.process.kill()
        self.process.join(_END_S)  # one that hangs in the kernel (a dead network disk) ends when the kernel lets it
        self._ended.set()
        self._output.join(2 * _LOOK_S)  # its last words; children that it left behind may print for ever
        self.connection.close()

    def restart(self) -> None:
        """Kill the process and start another."""
        self.kill()
        self.start()

    def ask_to_end(self) -> None:
        """Tell the process to return after its job."""
        with contextlib.suppress(OSError, ValueError):  # already gone: nothing to ask it to do
            self.connection.send(None)

    def close(self) -> None:
        """End the process, by force if it does not end when asked to."""
        if self.process.is_alive():
            self.ask_to_end()
            self.process.join(_END_S)
        self.kill()
