"""What multiprocessing's fork server does for our workers: it imports once what all of them need, and outlives them.

    import_for_all(["torch", "av"])         # in a module that the fork server is told to import

It takes no part in what a run does when it is told to end: a signal that terminals and schedulers send to all processes would end
it at once while the workers, which leave such signals to the run, go on; the run could no longer see whether they live.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
from collections.abc import Iterable

from mmrl.operations.startup import loaded, loading

__all__ = ["SENT_TO_ALL", "import_for_all"]

SENT_TO_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that terminals and schedulers send to all processes: what they mean is the run's affair."""


def import_for_all(names: Iterable[str]) -> None:
    """Import those modules that are there, and ignore signals that are sent to all processes; in the fork server."""
    before, server = {n: signal.signal(n, signal.SIG_IGN) for n in SENT_TO_ALL}, os.getpid()

    def listen_again() -> None:
        if os.getppid() == server:
            for number, handler in before.items():
                signal.signal(number, handler)

    # a process that is no worker of ours can be asked to end, whoever starts it by this server
    os.register_at_fork(after_in_child=listen_again)
    loading()
    for name in names:
        with contextlib.suppress(ImportError):  # what needs it says so
            importlib.import_module(name)
    # what is here stays, in every process that is forked from this one: to look through it would also copy its pages
    gc.freeze()
    # at the server's end extension modules would complain of objects that are still there; processes that it starts leave without
    atexit.register(gc.unfreeze)
    loaded()
    # multiprocessing has the server ignore this one, and hands on to its processes what it finds here
    signal.signal(signal.SIGINT, before[signal.SIGINT])
