"""scripts/stress_suite.py finds what fails under AVX2 and load, counts it, and leaves no process behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from scripts import stress_suite

CASES = """
import os, pytest, torch

def test_it_runs_with_avx2_only():
    assert "AVX512" not in torch.backends.cpu.get_cpu_capability()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"

def test_it_fails():
    assert False, "on purpose"

@pytest.mark.skip(reason="no")
def test_it_is_skipped():
    pass
"""


@pytest.mark.slow
def test_a_run_says_what_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_cases.py").write_text(CASES, encoding="utf-8")
    with stress_suite.load(2):
        # a process that has just begun its program may not show its command yet
        end = time.monotonic() + 60
        while len(busy := _busy()) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert len(busy) >= 2
        found = stress_suite.run(
            [str(tmp_path), "--rootdir", str(tmp_path), "-c", os.devnull],
            1,
            300,
            tmp_path / "logs" / "1.log",
        )
    assert (found["passed"], found["skipped"], found["status"]) == (1, 1, 1), found["output"]
    assert [name.rpartition("::")[2] for name in found["failed"]] == [
        "test_it_fails"
    ] and "on purpose" in found["output"]
    assert not any(_alive(pid) and _parent(pid) == os.getpid() for pid in busy)
    late = stress_suite.run([str(tmp_path)], 1, 0.2, tmp_path / "2.log")
    assert late["status"] == -1 and "no end within 0.2 s" in late["output"]


def test_the_record_counts_green_runs_since_the_last_red_one() -> None:
    red, green = {"status": 1, "output": "E"}, {"status": 0, "output": ""}
    assert stress_suite.joined([], [green, red])["green_in_a_row"] == 0
    found = stress_suite.joined([{"status": 1}, {"status": 0}], [green, green])
    assert found == {"green_in_a_row": 3, "runs": [{"status": 1}] + 3 * [{"status": 0}]}


def test_the_load_of_a_run_is_looked_at_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter(float(n) for n in range(10_000))
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    with stress_suite.measured_load(0.001) as seen:
        assert seen[:1] == [0.0], "a run that is over at once has a load, too"
        end = time.monotonic() + 30
        while len(seen) < 4 and time.monotonic() < end:
            time.sleep(0.001)
    assert len(seen) >= 4 and seen == [float(n) for n in range(len(seen))]


def _busy() -> list[int]:
    return [
        int(p.name)
        for p in Path("/proc").iterdir()
        if p.name.isdigit() and _command(p) == stress_suite._BUSY
    ]


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().split(b"\0")[2].decode()
    except (OSError, IndexError):
        return ""


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1
