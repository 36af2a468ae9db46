"""`mmrl train` in a process of its own that is asked what it does, killed with SIGKILL and started again.

    with Run(folder, tree, "torn", {"rollout": ("in _train_step",)}) as run:
        run.start(resume=False)
        kill = killed(run, run.phase())          # waits until no process of its family is left
        half_written(run.path, all_files=False)  # what a reader could not read; [] where all is whole

scripts/torture_robot.py and scripts/torture_turns.py kill such runs; torture_resume.py compares the folders of two.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from scripts._bench import ROOT

__all__ = [
    "Kill",
    "Run",
    "half_written",
    "killed",
    "left_in",
    "played_out",
    "promises",
    "rows_of",
    "shared_memory",
    "wait_for",
]

_GONE_S = 20.0  # in which the processes of a killed run must end

_MAIN = """import atexit, os, signal, sys, traceback
def tell(number, frame):
    at = [f.f_locals.get("number") for f, _ in traceback.walk_stack(frame) if f.f_code.co_name == "play"]
    os.write(2, ("".join(traceback.format_stack(frame)) + "".join(f"in turn {n}\\n" for n in at)).encode())
signal.signal(signal.SIGUSR2, tell)
atexit.register(signal.signal, signal.SIGUSR2, signal.SIG_IGN)  # asked while it exits, it exits
print("MMRL-TORTURE", flush=True, file=sys.stderr)
from mmrl.cli.main import main
main()"""
"""`mmrl train` as the console command starts it, whose main thread writes its stack when it is asked (faulthandler's signal
walks the stacks of threads that run on, and now and then crashes by it), and the turn that its rollouts are at."""


@dataclass(frozen=True)
class Kill:
    """One SIGKILL: seconds after the process started, what it was doing, the last step that was saved, how many processes it had,
    and seconds until they were gone."""

    seconds: float
    phase: str
    checkpoint: int
    workers: int
    gone_s: float


class Run:
    """One run, started as often as need be; `log` holds what its processes wrote to stderr.

    `phases`: what it may be doing -> texts of a stack of which one says so; the first that fits counts, and where none does it
    still imports. Its processes have a folder for temporary files of their own, `scratch`.
    """

    popen: Any = subprocess.Popen  # tests have one that need not import everything

    def __init__(
        self, folder: Path, tree: Mapping[str, Any], name: str, phases: Mapping[str, Sequence[str]]
    ) -> None:
        self.path, self.log = folder / "runs" / name, folder / f"{name}.log"
        # short: sockets lie below it, whose paths have 107 bytes at most
        self.scratch, self.phases = Path(tempfile.mkdtemp(prefix="mmrl-torn-")), phases
        self.steps = int(tree["train"]["steps"])
        self.config = folder / f"{name}.yaml"
        self.config.write_text(yaml.safe_dump({**tree, "name": name}), encoding="utf-8")
        self.process: Any = None
        self.began = 0.0

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process is not None and self.alive:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def start(self, *, resume: bool) -> None:
        """Start its process."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.scratch),
        }
        self.began = time.monotonic()
        with self.log.open("wb") as output:
            self.process = self.popen(
                [
                    sys.executable,
                    "-c",
                    _MAIN,
                    "train",
                    str(self.config),
                    "--quiet",
                    *(["--auto-resume"] if resume else []),
                ],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=output,
            )

    def finish(self) -> float:
        """Wait for its end; seconds since the start. Raises SystemExit with the log when it failed."""
        if self.process.wait() != 0:
            raise SystemExit(
                f"the run {self.path.name} ended with status {self.process.returncode}:\n"
                f"{self.log.read_text(encoding='utf-8', errors='replace')[-4000:]}"
            )
        return time.monotonic() - self.began

    @property
    def alive(self) -> bool:
        return bool(self.process.poll() is None)

    @property
    def rows(self) -> int:
        """Steps in metrics.jsonl."""
        file = self.path / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    @property
    def saved(self) -> int:
        """The last checkpoint's step."""
        return max(
            (int(p.name.removeprefix("step_")) for p in self.path.glob("checkpoints/step_*")),
            default=0,
        )

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any((self.path / "checkpoints").glob(".partial-step*"))

    def stack(self) -> str:
        """Of its main thread, now; empty while it still imports."""
        before = self.log.stat().st_size
        if not self.alive or b"MMRL-TORTURE" not in self.log.read_bytes():
            return ""
        self.process.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + 1.0
        while self.log.stat().st_size == before and self.alive and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.log.read_bytes()[before:].decode("utf-8", "replace")

    def phase(self) -> str:
        """What its process does now, by its stack."""
        stack = self.stack()
        return next(
            (name for name, signs in self.phases.items() if any(sign in stack for sign in signs)),
            "imports",
        )

    def family(self) -> list[psutil.Process]:
        """All processes below it, and those that work in its folder for temporary files whoever their parent is now."""
        try:
            below = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            below = []
        return list({*below, *_working_in(self.scratch, {self.process.pid})})


def _working_in(folder: Path, without: set[int]) -> Iterator[psutil.Process]:
    """Processes whose command line or environment names the folder: browsers leave their parent's session, and whom an ended
    process leaves behind has another parent."""
    for process in psutil.process_iter():
        try:
            named = str(folder) in " ".join(process.cmdline()) or process.environ().get(
                "TMPDIR"
            ) == str(folder)
        except psutil.Error:
            continue
        if named and process.pid not in without:
            yield process


def _living(processes: set[psutil.Process]) -> set[psutil.Process]:
    """Those that run, and what they started meanwhile; one that has ended and waits to be asked how does not."""
    found = set()
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found |= {process, *process.children(recursive=True)}
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for(run: Run, condition: Callable[[], bool], every_s: float, seconds: float) -> None:
    """Until the condition holds, the run has ended or the seconds are over."""
    deadline = time.monotonic() + seconds
    while run.alive and time.monotonic() < deadline and not condition():
        time.sleep(every_s)


def killed(run: Run, phase: str) -> Kill | None:
    """SIGKILL its process alone and wait for its workers' end; None when it had ended by itself."""
    workers = set(run.family())
    if not run.alive:
        return None
    run.process.kill()
    run.process.wait()
    seconds = time.monotonic() - run.began
    phase = "checkpoint" if run.saving else phase
    began, left = time.monotonic(), workers
    # asked again: between the list and the kill it may have started one more, which ends once it has begun
    while (left := _living({*left, *run.family()})) and time.monotonic() - began < _GONE_S:
        time.sleep(0.02)
    gone_s = time.monotonic() - began if not left else _GONE_S
    return Kill(round(seconds, 2), phase, run.saved, len(workers), round(min(gone_s, _GONE_S), 2))


def half_written(run: Path, *, all_files: bool) -> list[str]:
    """What cannot be read back: checkpoints and run.json; with `all_files` whatever a finished run holds, and leftovers."""
    from safetensors import safe_open

    found = []
    names = ("checkpoints/step_*/**/*", "run.json", *(("**/*",) if all_files else ()))
    for file in sorted({f for name in names for f in run.glob(name) if f.is_file()}):
        try:
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
            elif file.suffix == ".jsonl":
                [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            elif file.suffix == ".yaml":
                assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict)
            elif file.suffix == ".safetensors":
                # checks the header against the file's size
                with safe_open(str(file), "pt") as tensors:
                    assert list(tensors.keys())
            elif file.suffix == ".pt":
                _load(file)
            assert file.stat().st_size or file.name in ("alarms.jsonl", "failures.jsonl"), (
                "it is empty"
            )
        except Exception as error:  # whatever a reader makes of half a file
            found.append(f"{file.relative_to(run)}: {type(error).__name__}: {error}")
    if all_files:
        found += [f"left: {f.relative_to(run)}" for f in run.rglob(".*")]
    return found


def _load(file: Path) -> None:
    import torch

    torch.load(file, weights_only=True)


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def held_elsewhere(name: str) -> bool:
    """Whether a process other than this one has mapped or opened a name of /dev/shm: somebody else's, who works with it now."""
    path = f"/dev/shm/{name}"
    for process in Path("/proc").glob("[0-9]*"):
        # processes come and go, and some are another user's
        with contextlib.suppress(OSError):
            if int(process.name) == os.getpid():
                continue
            # the last of a line's fields: another name may begin with this one
            maps = (process / "maps").read_text(errors="replace").splitlines()
            if any(line.endswith(f" {path}") for line in maps):
                return True
            if any(os.readlink(fd) == path for fd in (process / "fd").iterdir()):
                return True
    return False


def left_in(before: set[str]) -> list[str]:
    """What there is of ours in shared memory that was not there before, and nobody works with."""
    return sorted(
        name
        for name in shared_memory() - before
        if ("mmrl" in name or "torch" in name or name.startswith("psm_"))
        and not held_elsewhere(name)
    )


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Its metrics, step by step."""
    return [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def played_out(run: Run) -> tuple[float, float]:
    """Run it undisturbed; seconds until its first evaluation was there, and until its end."""
    run.start(resume=False)
    first = run.path / "eval" / "step_000000" / "results.json"
    wait_for(run, first.exists, 0.02, 600.0)
    start_s = time.monotonic() - run.began
    return start_s, run.finish()


def promises(torn: Run, kills: Sequence[Kill], damage: Sequence[str]) -> dict[str, bool]:
    """What a run must keep that was killed and is finished now -> whether it is so; `damage`: what could not be read on the way."""
    rows = rows_of(torn.path)
    status = json.loads((torn.path / "run.json").read_text(encoding="utf-8"))["status"]
    return {
        "no_worker_outlived_it": all(k.gone_s < _GONE_S for k in kills),
        "checkpoints_always_readable": not damage,
        "every_step_once": [r["step"] for r in rows] == list(range(1, torn.steps + 1)),
        "finished": status == "finished",
        "nothing_half_written": not half_written(torn.path, all_files=True),
        "something_was_learned": any(
            r.get("train/groups/trained") or r.get("train/groups/kept") for r in rows
        ),
    }
