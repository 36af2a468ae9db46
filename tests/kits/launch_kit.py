"""Launch scripts and documented commands as a shell runs them, with what they start run in the tests' own process.

bash gets for `python` a program that writes down how it was called. Those calls then run here, module by module as `python -m`
would run it, so that libraries are imported once for all of them; with `really` the named modules are started by the shell itself.
"""

from __future__ import annotations

import gc
import io
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from tests.kits.engine_kit import ENVIRONMENT, REPO

__all__ = ["launch", "run_here", "shell"]

_RECORDER = """#!/bin/sh
case " $MMRL_REALLY " in *" $2 "*) exec "$MMRL_REAL_PYTHON" "$@" ;; esac
printf '%s\\0' "$#" "$PWD" "$@" >> "$MMRL_CALLS"
"""
Done = subprocess.CompletedProcess


def run_here(module: str, *arguments: str, cwd: str | Path = REPO) -> Done[str]:
    """`python -m MODULE ARGUMENTS` in this process, whose variables stay as they are; a bug's exception is raised, not printed."""
    before, status, out, err = Path.cwd(), 0, io.StringIO(), io.StringIO()
    os.chdir(cwd)
    try:
        with (
            mock.patch.object(sys, "argv", [module, *arguments]),
            mock.patch.dict(os.environ, MMRL_TRACEBACK=""),
            redirect_stdout(out),
            redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings(
                "ignore", ".*found in sys.modules after import of package.*", RuntimeWarning
            )
            runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        os.chdir(before)
        gc.collect()  # what a process writes when it ends: counts of a tensor store
    return Done([module, *arguments], status, out.getvalue(), err.getvalue())


def shell(*command: str, cwd: Path = REPO, really: str = "") -> Done[str]:
    """Run COMMAND and then what it wanted of Python, in turn; the first that fails, else the last, with all that was printed."""
    with tempfile.TemporaryDirectory() as folder:
        recorder, calls = Path(folder) / "python", Path(folder) / "calls"
        recorder.write_text(_RECORDER, encoding="utf-8")
        recorder.chmod(0o755)
        done = subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=300,
            env={
                **ENVIRONMENT,
                "MMRL_PYTHON": str(recorder),
                "MMRL_REAL_PYTHON": sys.executable,
                "MMRL_REALLY": really,
                "MMRL_CALLS": str(calls),
            },
        )
        left = calls.read_text(encoding="utf-8").split("\0")[:-1] if calls.exists() else []
    while left and done.returncode == 0:
        count = int(left[0])
        where, dash, module, *arguments = left[1 : count + 2]
        assert dash == "-m", left
        left = left[count + 2 :]
        ran = run_here(module, *arguments, cwd=where)
        done = Done(done.args, ran.returncode, done.stdout + ran.stdout, done.stderr + ran.stderr)
    return done


def launch(
    *arguments: str, cwd: Path = REPO, script: str = "grounding", really: str = ""
) -> Done[str]:
    """Run scripts/train_SCRIPT.sh from the folder `cwd`."""
    return shell(
        "bash", str(REPO / "scripts" / f"train_{script}.sh"), *arguments, cwd=cwd, really=really
    )
