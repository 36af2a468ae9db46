"""A Python process that has imported what others need, and forks one of them whenever it is asked: see tests/kits/prepared_kit.py.

    python -m tests.kits.prepared_process SOCKET MODULE ...

It has one thread and runs next to nothing of what it imported, so that what is forked from it is as if it had imported that itself.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import importlib
import io
import json
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
import time
import types
from typing import Any

import numpy as np

from mmrl.operations.leaving import run_and_leave

_MOST_BYTES = 1 << 20
_MOST_DESCRIPTORS = 253  # of one message, by Linux
_HIGH = 700


def _serve(listening: socket.socket) -> dict[str, Any]:
    """Fork whenever asked; returns in the new process, with what it shall do. Ends when nobody can ask any more."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(listening, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not data:
            os._exit(0)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        between = os.getpid()
        if os.fork():
            # whoever asked takes in orphans at present: it becomes the parent of the new process
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.0005)
        asked: dict[str, Any] = json.loads(data)
        listening.send(str(os.getpid()).encode())
        listening.close()
        # out of the way of the numbers that they shall have
        moved = [fcntl.fcntl(d, fcntl.F_DUPFD_CLOEXEC, _HIGH) for d in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
        for number, descriptor in zip((0, 1, 2, *asked["passed"]), moved, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        return asked


def _stream(number: int, before: io.TextIOWrapper) -> io.TextIOWrapper:
    """A standard stream as Python makes it."""
    raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedReader(raw) if number == 0 else io.BufferedWriter(raw),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=number == 2 or os.isatty(number),
        write_through=bool(os.environ.get("PYTHONUNBUFFERED")),
    )


def _become(asked: dict[str, Any]) -> tuple[str, str]:
    """What the system and the interpreter would have set up; returns ("-m" or "-c", a module or a program)."""
    if asked["start_new_session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    tempfile.tempdir = None  # TMPDIR may be another
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        # those of before know whether their file could be sought in
        made = _stream(number, getattr(sys, name))
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    random.seed()
    np.random.seed()
    kind, what, *arguments = asked["args"]
    sys.orig_argv = [sys.executable, *asked["args"]]
    sys.argv = [kind, *arguments]
    sys.path[0] = "" if kind == "-c" else asked["cwd"]
    return kind, what


def main() -> tuple[str, str]:
    listening = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when nobody can ask any more
    for name in sys.argv[2:]:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a module of {sys.argv[2:]} started threads: {threads}"
    gc.collect()
    gc.freeze()
    listening.send(b"ready")
    return _become(_serve(listening))


def _run(kind: str, what: str) -> None:
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    exec(compile(what, "<string>", "exec"), vars(program))


if __name__ == "__main__":
    asked = main()
    # to take down all that was imported costs two seconds of the processor
    run_and_leave(lambda: _run(*asked))
