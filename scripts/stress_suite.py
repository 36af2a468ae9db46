"""The test suite where it is hard: with AVX2 only, and beside other work, several times over.

    python -m scripts.stress_suite                               # the whole suite, three times: hours on two cores
    python -m scripts.stress_suite --runs 1 --record             # once more; the record counts the green runs in a row
    python -m scripts.stress_suite --runs 3 tests/policy tests/training/test_sft_processes.py     # any pytest arguments

Numbers differ in their last bits between instruction sets, and what is only fast enough, or only ends in time, on a quiet machine
fails on a busy one. Each run has torch, oneDNN and MKL kept to AVX2 (every x86-64 server of the last ten years) and `--load`
processes that compute all the time; a test that is skipped for another reason than a missing GPU fails. With --record, each run
of the whole suite is added to assets/results/stress_suite.json with its commit: how many tests passed, which failed, and the
machine's mean load, whoever made it (pytest's workers are in it). Exit status 1 when one failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from scripts._bench import RESULTS, ROOT, parse, print_table, write_results

AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
_TESTS = {
    "MMRL_NO_SKIP": "1",
    "PYTHONDONTWRITEBYTECODE": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_BUSY = "x = 1.0\nwhile True:\n    x = x * 1.0000001 % 7.0"


@contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes that compute, until the block ends."""
    running = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(processes)]
    try:
        yield
        assert all(p.poll() is None for p in running), "the load has ended before the tests"
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextmanager
def measured_load(every_s: float = 5.0) -> Iterator[list[float]]:
    """A list that gets the machine's load (its mean of one minute), at first and then every so many seconds."""
    seen, ended = [os.getloadavg()[0]], threading.Event()

    def look() -> None:
        while not ended.wait(every_s):
            seen.append(os.getloadavg()[0])

    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    try:
        yield seen
    finally:
        ended.set()
        watching.join()


def run(arguments: Sequence[str], jobs: int, timeout_s: float, log: Path) -> dict[str, Any]:
    """One run of pytest, whose output goes to `log`; counts by outcome, the names of the tests that failed, and the end of
    the output where there are any."""
    with tempfile.TemporaryDirectory(prefix="mmrl-stress-") as folder:
        report = Path(folder) / "report.xml"
        # after a worker that crashed xdist may wait for ever for what another one has done
        spread = (
            [
                "-n",
                str(jobs),
                "--dist",
                "loadfile",
                "--no-loadscope-reorder",
                "--max-worker-restart=0",
            ]
            if jobs > 1
            else []
        )
        began, status, late = time.monotonic(), -1, ""
        log.parent.mkdir(parents=True, exist_ok=True)
        # read while it runs: what crashed says so at once, and at length
        with open(log, "wb") as output:
            try:
                status = subprocess.run(
                    [
                        sys.executable,
                        "-m",
                        "pytest",
                        "-v",
                        "-p",
                        "no:cacheprovider",
                        f"--junitxml={report}",
                        *spread,
                        *arguments,
                    ],
                    cwd=ROOT,
                    env={**os.environ, **_TESTS, **AVX2, "TORCHINDUCTOR_CACHE_DIR": folder},
                    timeout=timeout_s,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                late = f"\nno end within {timeout_s:g} s"
        found = outcomes(report) if report.exists() else {"passed": 0, "skipped": 0, "failed": []}
    return {
        **found,
        "status": status,
        "seconds": round(time.monotonic() - began),
        "output": ""
        if status == 0
        else log.read_text(encoding="utf-8", errors="replace")[-6000:] + late,
    }


def outcomes(report: Path) -> dict[str, Any]:
    """How many tests of a JUnit report passed and were skipped, and the names of those that did not."""
    passed = skipped = 0
    failed: list[str] = []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "skipped": skipped, "failed": sorted(set(failed))}


def commit() -> str:
    """The commit that is tested, with "+" where files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + "+" * bool(
        git("status", "--porcelain", "--untracked-files=no")
    )


def joined(recorded: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All runs in the order made, and how many of the last are green without a red one between."""
    runs = [*recorded, *({k: v for k, v in row.items() if k != "output"} for row in new)]
    green = list(itertools.takewhile(lambda row: row["status"] == 0, reversed(runs)))
    return {"green_in_a_row": len(green), "runs": runs}


def main() -> int:
    """Command line; exit status 1 when a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--load", type=int, default=4, help="processes that compute meanwhile")
    parser.add_argument("--jobs", type=int, default=2, help="pytest workers")
    parser.add_argument("--timeout", type=float, default=4 * 3600, help="seconds of one run")
    parser.add_argument(
        "--record", action="store_true", help="add the runs to assets/results/stress_suite.json"
    )
    parser.add_argument("tests", nargs="*", help="arguments of pytest; default: the whole suite")
    options = parse(parser, least=("load",))
    if options.record and options.tests:
        parser.error(
            f"expected --record with the whole suite, found {' '.join(options.tests)}; leave one of them out"
        )
    runs: list[dict[str, Any]] = []
    with load(options.load):
        for number in range(options.runs):
            row = {"date": date.today().isoformat(), "commit": commit(), "load": options.load}
            with measured_load() as seen:
                row |= run(
                    options.tests,
                    options.jobs,
                    options.timeout,
                    ROOT / "runs" / "stress" / f"run_{number + 1}.log",
                )
            row["mean_load"] = round(sum(seen) / len(seen), 1)
            runs.append(row)
            print(
                f"run {number + 1} of {options.runs}: {row['passed']} passed, {len(row['failed'])} failed, "
                f"{row['skipped']} skipped in {row['seconds']} s, mean load {row['mean_load']}\n{row['output']}",
                flush=True,
            )
    green = all(row["status"] == 0 for row in runs)
    print_table(
        ("run", "passed", "failed", "skipped", "seconds"),
        [
            (n, r["passed"], len(r["failed"]), r["skipped"], r["seconds"])
            for n, r in enumerate(runs, 1)
        ],
    )
    if options.record:
        path = RESULTS / "stress_suite.json"
        before = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
        print(
            write_results(
                "stress_suite",
                {"instructions": AVX2, **joined(before, runs)},
                "torch",
                "transformers",
                "pytest",
            )
        )
    return int(not green)


if __name__ == "__main__":
    sys.exit(main())
