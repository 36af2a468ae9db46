"""The wall clock is set while things run: no run is taken for abandoned, no deadline moves, the cache keeps its order."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from mmrl.errors import MMRLError
from mmrl.operations.lock import RunLock
from mmrl.video.store import TensorStore

REPO = Path(__file__).resolve().parents[2]
DAY = 86400.0
HOLDER = """
import sys
from pathlib import Path
from mmrl.operations.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
lock.release()
"""
# where the wall clock is meant: stamps for people and of files; everything that waits or measures uses time.monotonic()
WALL = {
    "mmrl/serve/answers.py",
    "mmrl/serve/app.py",
    "mmrl/cli/cache.py",
    "mmrl/operations/prometheus.py",
    "mmrl/judges/endpoint.py",  # Retry-After may be a date
    "mmrl/judges/store.py",  # part of a file's name
    "robotics/lerobot_client.py",  # the date of an observation
    "tasks/verifiers_host.py",  # the date of a chat completion
    "mmrl/viewer/glance.py",  # how old a file is
    "video/store_space.py",
    "video/locks.py",
    "video/store.py",
    "video/probing.py",
    "video/file_identity.py",
}


@pytest.fixture()
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that uses the run tmp_path/run."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPO,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.communicate("", timeout=60)


@pytest.mark.check_takes(1)
@pytest.mark.parametrize("jump", [-400 * DAY, -5.0, 5.0, 400 * DAY])
def test_a_run_in_use_is_not_taken_when_the_clock_jumps(
    jump: float, holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux tells when a process began in ticks since the boot; the wall clock of that moment moves when the clock is set."""
    now, born = time.time, psutil.Process.create_time
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    # what psutil says after the jump
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: born(self) + jump)
    with pytest.raises(MMRLError, match="to be free"):
        RunLock(tmp_path / "run").acquire()


def test_a_dead_process_leaves_its_run_and_so_does_a_zombie(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    holder.kill()
    while psutil.Process(holder.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    lock = RunLock(tmp_path / "run")
    lock.acquire()
    lock.release()


def test_a_stamp_from_the_future_is_renewed_at_the_next_use(tmp_path: Path) -> None:
    """Else an entry that was used while the clock was wrong would be the last to go for years."""
    store, key = TensorStore(tmp_path), "a" * 32
    store.put(key, {"x": torch.zeros(9)})
    [file] = [
        p
        for p in tmp_path.rglob("*")
        if p.is_file() and p.stat().st_size > 36 and key[2:] in p.name
    ]
    future = time.time() + 400 * DAY
    os.utime(file, (future, file.stat().st_mtime))
    assert store.get(key) is not None
    assert file.stat().st_atime < time.time() + DAY


@pytest.mark.slow
def test_nothing_that_waits_or_measures_reads_the_wall_clock() -> None:
    found = set()
    for folder in ("mmrl", "tasks", "rewards", "video", "robotics"):
        for path in (REPO / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "time"
                    and (node.attr in ("time", "time_ns"))
                ):
                    found.add(path.relative_to(REPO).as_posix())
    assert found <= WALL, (
        "time.time() moves when the clock is set: use time.monotonic(), or say here that a date is meant"
    )
