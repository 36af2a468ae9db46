"""How a process of a launched run ends: its work done, its files closed, and no interpreter taken down under threads of C++.

torch's process groups have threads of their own (gloo: pt_gloo_runloop) which release Python objects: the tensors of a collective,
the callbacks behind it. One that wants the interpreter's lock while Python is being finalized is ended by pthread_exit, inside C++
that must not throw: "terminate called without an active exception", SIGABRT, and the launcher counts a run as failed that had
written everything. destroy_process_group does not end these threads while anything refers to the group (a DeviceMesh in a cache of
DTensor's does, behind every FSDP2 run), and on a busy machine one may be late. So such a process does what Python's own
multiprocessing does in its children: it waits for its threads, runs what was registered to run at exit, and leaves.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

__all__ = ["launched", "run_and_leave"]


def launched() -> bool:
    """Whether torchrun or accelerate launch started this process."""
    return "LOCAL_RANK" in os.environ


def run_and_leave(work: Callable[[], object]) -> NoReturn:
    """Run `work` and end the process with the status that Python would give it."""
    status = 0
    try:
        work()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        status = 130
    except BaseException:
        traceback.print_exc()
        status = 1
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more
            status = status or 120  # what Python says of that
    os._exit(status)
