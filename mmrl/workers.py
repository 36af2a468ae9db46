"""One spawned process behind a pipe: what scores rewards and what prepares media run in, and are killed with.

    worker = Worker(serve, (tasks,), "mmrl-reward")     # serve(connection, progress, tasks) in a process of its own
    worker.connection.send(job)

A worker never outlives the process that started it, and leaves Ctrl-C and SIGTERM to it.
"""
from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["Worker"]

_END_S = 5.0  # for a process to end once asked to, or killed


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)  # also out of a job that hangs; what it was writing is cleaned up by whoever finds it


def _main(target: Callable[..., None], connection: Connection, progress: Any, args: tuple[Any, ...]) -> None:
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
        self.start()

    method = "spawn"  # fork is unsafe beside torch threads; a fork server has none

    def start(self) -> None:
        """Start the process; `ready` is False until its first message has been read."""
        context: Any = multiprocessing.get_context(self.method)
        self.connection, child = context.Pipe()
        self.progress = context.RawArray("d", 2)
        self.process = context.Process(target=_main, args=(self.target, child, self.progress, self.args), daemon=True,
                                       name=self.name)
        self.process.start()
        child.close()
        self.ready = False
        atexit.register(self.kill)  # multiprocessing would ask by SIGTERM and wait for ever

    def kill(self) -> None:
        """End the process without asking it."""
        atexit.unregister(self.kill)
        self.process.kill()
        self.process.join(_END_S)  # one that hangs in the kernel (a dead network disk) ends when the kernel lets it
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
