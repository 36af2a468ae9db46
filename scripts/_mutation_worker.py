"""The process in which mutants are tested: it has imported what is slow to import, and forks for every run of tests.

    python scripts/_mutation_worker.py FOLDER MODULE ...      requests on standard input, answers on standard output, JSON lines

Nothing of the project itself is imported before the fork, so that each run sees its files as they then are.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PRELOAD = (
    "hypothesis",
    "numpy",
    "PIL.Image",
    "pydantic",
    "pytest",
    "safetensors.torch",
    "scipy.optimize",
    "torch",
    "torch.optim",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
    "typer",
    "yaml",
)
"""What is imported once, before any fork."""
_RETURNED = 100  # added to an exit status that pytest itself returned
_THREADS = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


class Zygote:
    """A worker process over a copy of the project; `run` runs tests in a fork of it."""

    def __init__(self, folder: Path, preload: Sequence[str] = PRELOAD) -> None:
        self.folder = folder
        environment = {
            **os.environ,
            **_THREADS,
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, str(Path(__file__).resolve()), str(folder), *preload]
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            text=True,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, tests: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
        """pytest's exit status (None: it took longer than `timeout_s`) and its output, up to the first failure."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"tests": list(tests), "timeout_s": timeout_s}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(
            self._process.stdout.readline() or '{"status": -1, "output": "the worker died"}'
        )
        return answer["status"], answer["output"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def _child(tests: Sequence[str], output: Path) -> None:
    """Run pytest and end; a process group of its own, so that what it started can be ended with it."""
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    import pytest

    status: Any = 70
    try:
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_RETURNED + int(status))


def _answer(tests: Sequence[str], timeout_s: float, output: Path) -> int | None:
    """Exit status of a fork that ran the tests; None when its time was up."""
    child = os.fork()
    if child == 0:
        _child(tests, output)
    end = time.monotonic() + timeout_s
    status: int | None = None
    while True:
        done, how = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(how)
            break
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with what the tests left behind
    if status is None:
        os.waitpid(child, 0)
    if status is None:
        return None
    # a mutant that kills or ends the test process is noticed, too, also where it ends it as if all were well
    return status - _RETURNED if status >= _RETURNED else 1


def main() -> None:
    """Answer requests until standard input ends."""
    folder = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print must not be read as an answer
    sys.path[:] = [
        str(folder),
        *(p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent),
    ]
    for name in sys.argv[2:]:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mmrl-mutant-") as scratch:
        output = Path(scratch) / "output.txt"
        for line in sys.stdin:
            request = json.loads(line)
            status = _answer(request["tests"], request["timeout_s"], output)
            text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
            answers.write(json.dumps({"status": status, "output": text[-20000:]}) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
