"""Processes of Python that begin with torch, transformers and mmrl imported: of a small run's ten seconds of the processor eight go
into its imports.

    Prepared([sys.executable, "-m", "mmrl.cli.main", "train", ...], stdout=PIPE)      # as subprocess.Popen, whose child it is

Each worker of pytest has one process that imports them (tests/kits/prepared_process.py), and forks a process whenever it is asked
for one. That is a child of the worker as any other: it has a process id, environment, folder and streams of its own, is signalled,
killed and waited for. What a process imports, how it is found by its command line, and that the interpreter itself starts, is what
tests with subprocess.Popen show.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any
from unittest import mock

from mmrl.workers import program
from mmrl.workers.spawned import warm_up
from tests.kits.engine_kit import ENVIRONMENT, REPO

__all__ = [
    "MANISKILL",
    "SERVING",
    "TINY",
    "TRAINING",
    "Prepared",
    "launch_prepared",
    "prepared_generators",
    "prepared_simulators",
    "prepared_subprocess",
    "run_prepared",
]

TRAINING = (
    "mmrl.cli.run",
    "mmrl.diagnostics.memory",
    "mmrl.evaluation.evaluate",
    "mmrl.policy.loading",
    "mmrl.rollout.build",
    "mmrl.training.generator",
    "mmrl.training.metrics",
    "mmrl.training.prompts",
    "mmrl.training.trainer",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "tests.kits.processor_preload",
)
SERVING = (*TRAINING, "vllm")
TINY = ("mmrl.robotics.tiny", "tests.robotics.faulty")
MANISKILL = ("mani_skill.envs", "mmrl.robotics.maniskill_scene")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
# libraries read such variables when they are imported
_READ_AT_IMPORT = (
    *("CUDA", "HF_", "LD_", "MKL_", "OMP_", "PYTHON", "TORCH", "TRANSFORMERS", "VLLM"),
    *("LIBERO", "LP_", "MESA", "MS_", "MUJOCO", "NUMEXPR", "OPENBLAS", "PYOPENGL", "SAPIEN", "VK_"),
)
_FAULTS = "PYTHONFAULTHANDLER"  # which a process minds when it begins its work, too
_BEGAN = dict(os.environ)  # without what a test adds to find the processes of its own
_LOCK = threading.RLock()


class _Source:
    """One process that has imported `modules` under such an environment."""

    def __init__(self, modules: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.kits.prepared_process", str(theirs.fileno())]
            begins_with = set(TRAINING) < set(modules)  # the rest is imported in a fork of that one
            start: Any = partial(Prepared, modules=TRAINING) if begins_with else subprocess.Popen
            self.process: subprocess.Popen[bytes] = start(
                [*command, *modules],
                cwd=REPO,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        assert self.ours.recv(16) == b"ready", f"importing {modules} failed"

    def fork(self, asked: Mapping[str, Any], descriptors: list[int]) -> int:
        """The process id of a new child of this process."""
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        # it is orphaned at once, and ours by that
        assert prctl(_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
        try:
            socket.send_fds(self.ours, [json.dumps(asked).encode()], descriptors)
            return int(self.ours.recv(16))
        finally:
            prctl(_SUBREAPER, 0, 0, 0, 0)

    def end(self) -> None:
        """It ends when nobody can ask it any more."""
        self.ours.close()
        self.process.wait()


_sources: dict[Any, _Source] = {}


def _source(modules: tuple[str, ...], environment: Mapping[str, str]) -> _Source:
    read = {n: v for n, v in environment.items() if n.startswith(_READ_AT_IMPORT) and n != _FAULTS}
    key = modules, *sorted(read.items())
    if key not in _sources:
        others = {n: v for n, v in _BEGAN.items() if not n.startswith(_READ_AT_IMPORT)}
        _sources[key] = _Source(modules, {**others, **read})
        atexit.register(_sources[key].end)
    return _sources[key]


class Prepared(subprocess.Popen[Any]):
    """`subprocess.Popen` of `[sys.executable, "-m" or "-c", ...]` in a process that has imported `modules`."""

    def __init__(
        self, args: list[str], *rest: Any, modules: tuple[str, ...] = TRAINING, **options: Any
    ) -> None:
        assert args[0] == sys.executable and args[1] in ("-m", "-c"), args
        assert not {"preexec_fn", "shell", "executable"} & options.keys(), options
        self.modules = modules
        super().__init__(args, *rest, **options)

    def _execute_child(self, *arguments: Any) -> None:  # what Popen leaves to the system
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        environment = dict(os.environ if given["env"] is None else given["env"])
        asked = {
            "args": given["args"][1:],
            "cwd": str(given["cwd"] or os.getcwd()),
            "env": environment,
            "start_new_session": given["start_new_session"],
            "passed": list(given["pass_fds"]),
        }
        pipes = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        streams = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        with _LOCK:
            source = _source(self.modules, environment)
            self.pid = source.fork(asked, [*streams, *given["pass_fds"]])
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]


def run_prepared(
    args: list[str], *, timeout: float = 300, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of the same, with what it printed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Prepared(args, **{"cwd": REPO, "env": ENVIRONMENT, **pipes, **options}) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def prepared_subprocess() -> Any:
    """What a script takes for the module `subprocess` where it runs Python children (scripts._bench.run_child)."""

    def run(command: list[str], *, timeout: float = 600, **options: Any) -> Any:
        known = {name: options[name] for name in ("cwd", "env") if name in options}
        return run_prepared(command, timeout=timeout, **known)

    return SimpleNamespace(run=run, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)


@contextmanager
def prepared_generators(*modules: str) -> Iterator[None]:
    """Generator processes come from a fork server, which imports once what each of them imports when it is spawned, for
    eight seconds of the processor, and `modules`: a run's first one, and another one for each that is killed."""
    from mmrl.training.generator import _Process

    # one that others had started for media, or this one afterwards, would keep what it has imported
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    warm_up(["tests.kits.generator_preload", *modules])
    with mock.patch.object(_Process, "method", "forkserver"):
        yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@contextmanager
def prepared_simulators(*modules: str) -> Iterator[None]:
    """Workers of simulators come from a process that has imported what their simulators are made of, `modules`."""

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if "from mmrl.robotics.worker import main" not in command[-1]:
            return subprocess.Popen(command, **options)
        return Prepared(list(command), modules=("mmrl.robotics.worker", *modules), **options)

    names = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired")}
    with mock.patch.object(program, "subprocess", SimpleNamespace(Popen=start, **names)):
        yield


def launch_prepared(
    module: str,
    *arguments: str,
    processes: int = 2,
    timeout: float = 300,
    modules: tuple[str, ...] = TRAINING,
) -> tuple[int, str]:
    """`torchrun --nproc_per_node 2 -m MODULE ARGUMENTS` without torchrun, which imports torch and lets each process import what it
    needs: the same variables, and one that fails ends the others. Its exit status and what all of them printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks: list[Prepared] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            for rank in range(processes):
                variables = {
                    "GLOO_SOCKET_IFNAME": "lo",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes)),
                }
                ranks.append(
                    Prepared(
                        [sys.executable, "-m", module, *arguments],
                        modules=modules,
                        cwd=REPO,
                        env={**ENVIRONMENT, **variables},
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
            deadline = time.monotonic() + timeout
            while None in (ended := [rank.poll() for rank in ranks]) and not any(ended):
                assert time.monotonic() < deadline, f"after {timeout} s: {ended}"
                time.sleep(0.05)
            failed = [status for status in ended if status]
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    os.killpg(rank.pid, signal.SIGTERM)
            for rank in ranks:
                try:
                    rank.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(rank.pid, signal.SIGKILL)
                    rank.wait()
        output.seek(0)
        return int(bool(failed)), output.read()
