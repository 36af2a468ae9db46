"""What every benchmark needs: the machine and versions, measured children in alternation, medians, JSON results.

A benchmark compares systems only by ratios of runs that alternate in one session, each in a process of its own:

    for number, order in enumerate(alternation(("mmrl", "trl"), rounds=3)):
        for system in order:
            row = run_child("scripts.bench_vs_trl", ["--child", system])

The parent must stay light (no torch): on Linux a child's `ru_maxrss` starts at the memory of the process it was forked
from. Children call `finish_child(row)`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mmrl.operations.versions import versions

__all__ = [
    "RESULTS",
    "ROOT",
    "UNRECORDED",
    "alternation",
    "destination",
    "finish_child",
    "kept",
    "machine",
    "parse",
    "peak_mib",
    "print_table",
    "recorded_rows",
    "results_folder",
    "run_child",
    "spread",
    "warm_start",
    "write_results",
]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "assets" / "results"
UNRECORDED = ROOT / "runs" / "results"
"""Where results go that are less than what a record stands for; see `parse`."""
_SIZES = (
    "episodes",
    "evaluations",
    "inputs",
    "kills",
    "minutes",
    "rounds",
    "seconds",
    "seeds",
    "steps",
)
"""Options by whose names every script means how much it measures."""
_less: list[str] = []  # what makes this run's results so
_ROW_FILE = "MMRL_BENCH_ROW"
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def machine() -> dict[str, Any]:
    """CPU name, cores, memory, operating system and the load of the last minute: a busy machine blurs every timing."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next(
            (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
            name,
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "platform": platform.platform(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None = None,
    *,
    least: Sequence[str] = (),
    adds: Sequence[str] = (),
) -> argparse.Namespace:
    """A script's arguments. Every script that records parses them here, so that no shorter run replaces a record.

    With --quick or --smoke, configuration overrides, or less than its default of an option of _SIZES or of those named in `least`
    (a number below it, a list that lacks one of it), `write_results` writes to runs/results/ instead of assets/results/. `adds`:
    options of which less is no less, since the run adds to what is recorded.
    """
    options = parser.parse_intermixed_args(argv)  # overrides may follow options
    _less[:] = [f"--{name}" for name in ("quick", "smoke") if getattr(options, name, False)]
    _less.extend(getattr(options, "overrides", None) or ())
    _less.extend(
        f"--{name} {getattr(options, name)}"
        for name in sorted({*least, *_SIZES} - {*adds})
        if _less_than(getattr(options, name, None), parser.get_default(name))
    )
    return options


def _less_than(value: Any, default: Any) -> bool:
    if value is None or default is None:
        return False
    if isinstance(default, list):
        return not set(default) <= set(value)
    return bool(value < default)


def alternation(systems: Sequence[str], rounds: int) -> Iterator[tuple[str, ...]]:
    """Orders of `rounds` rounds; every second one is reversed, so that a slow drift of the machine favours nobody."""
    for number in range(rounds):
        yield tuple(systems) if number % 2 == 0 else tuple(reversed(systems))


def run_child(module: str, arguments: Sequence[str], *, timeout: float = 1800) -> dict[str, Any]:
    """Run `python -m module arguments` on one thread and return the row it gave to `finish_child`.

    Raises RuntimeError with the end of its output when it fails.
    """
    with tempfile.TemporaryDirectory(prefix="mmrl-bench-") as folder:
        row = Path(folder) / "row.json"
        environment = {**os.environ, **_ONE_THREAD, _ROW_FILE: str(row)}
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
        if done.returncode or not row.exists():
            raise RuntimeError(
                f"python -m {module} {' '.join(arguments)} ended with status {done.returncode}:\n"
                f"{done.stdout[-4000:]}"
            )
        return dict(json.loads(row.read_text(encoding="utf-8")))


def kept(path: Path, measure: Callable[[], dict[str, Any]], *, keep: bool) -> dict[str, Any]:
    """What `measure` returns, written to `path`: with `keep` what an interrupted run has left there, if anything."""
    if not (keep and path.exists()):
        found = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found), encoding="utf-8")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def finish_child(row: Mapping[str, Any]) -> None:
    """Hand a child's results to its parent; started by hand, it prints them."""
    text = json.dumps(row)
    target = os.environ.get(_ROW_FILE)
    if target:
        Path(target).write_text(text, encoding="utf-8")
    else:
        print(text)


def warm_start(recipe: str, overrides: Sequence[str], folder: Path) -> float:
    """What `mmrl sft` makes of configs/RECIPE, in this process, saved in `folder`; returns its seconds of processor time."""
    from mmrl.cli.run import sft_command

    began = time.process_time()
    sft_command(ROOT / "configs" / recipe, [*overrides], folder, overwrite=True, quiet=True)
    return round(time.process_time() - began, 1)


def peak_mib() -> float:
    """Largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform == "darwin" else 2**10
    )


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, smallest and largest value."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def destination() -> Path:
    """Where this run's results go, and those of an earlier run like it lie: the records, or runs/results/ (see `parse`)."""
    return UNRECORDED if _less else RESULTS


def recorded_rows(
    name: str, key: str, setting: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Rows that an earlier run of the same `setting` (entries of its results) wrote as `key` into NAME.json, if any.
    Rows without date and machine of their own get their record's."""
    file = destination() / f"{name}.json"
    if not file.is_file():
        return []
    found = json.loads(file.read_text(encoding="utf-8"))
    if any(found.get(entry) != value for entry, value in (setting or {}).items()):
        return []
    head = {entry: found[entry] for entry in ("date", "machine")}
    return [head | row for row in found[key]]


def results_folder() -> Path:
    """`destination`, which is there now; says so where the results are less than a record."""
    folder = destination()
    if _less:
        print(f"less than what {RESULTS} records ({' '.join(_less)}): written to {UNRECORDED}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_results(name: str, value: Mapping[str, Any], *libraries: str) -> Path:
    """Write assets/results/NAME.json with date, command, machine and versions; returns its path.

    What is less than a record (see `parse`) goes to runs/results/NAME.json.
    """
    path = results_folder() / f"{name}.json"
    arguments = "".join(f" {a}" for a in sys.argv[1:])
    head = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": f"python -m scripts.{Path(sys.argv[0]).stem}{arguments}",
        "machine": machine(),
        "versions": versions(libraries),
    }
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps({**head, **value}, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns wide enough for their entries; the first is left-aligned."""
    cells = [[str(c) for c in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for number, row in enumerate(cells):
        print(
            "  ".join(
                c.ljust(w) if i == 0 else c.rjust(w)
                for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
        )
        if number == 0:
            print("  ".join("-" * w for w in widths))
