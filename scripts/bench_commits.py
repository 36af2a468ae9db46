"""The benchmarks of two commits side by side: whether a redesign cost speed or memory.

    python -m scripts.bench_commits                                  # the commit before the redesign, and this one: an hour
    python -m scripts.bench_commits --commits 05db43f HEAD --only vs_trl,cache --rounds 3 --record
    python -m scripts.bench_commits --quick                          # one round of the two quickest; records nothing

Each commit is checked out into a folder of its own and runs its own scripts/bench_*.py there, by the same interpreter, one run of
one commit after one run of the other in alternating order, on one thread. Of every run the numbers named in `BENCHMARKS` are
read, all so that more is better. The table has the median over rounds of after / before, with the smallest and largest: what the
two differ by beyond that spread is the code's. Only what both commits measure is compared; what one lacks is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts._bench import (
    RESULTS,
    ROOT,
    UNRECORDED,
    alternation,
    parse,
    print_table,
    spread,
    write_results,
)

BEFORE = "05db43f"
"""The last commit before robots and prompts were put upon one rollout, one learner and one trainer."""

Numbers = dict[str, float]


def _vs_trl(found: Mapping[str, Any]) -> Numbers:
    """Optimizer steps per second of processor time, the same against TRL's, and memory against TRL's."""
    numbers: Numbers = {}
    for row in found["settings"]:
        own = [r["step_cpu_s"] for r in row["rounds"]["mmrl"]]
        numbers[f"setting {row['name']}: steps per CPU second"] = 1 / statistics.median(own)
        numbers[f"setting {row['name']}: CPU time, TRL / mmrl"] = row["cpu_time_ratio"]["median"]
        numbers[f"setting {row['name']}: peak memory, TRL / mmrl"] = row["peak_memory_ratio"][
            "median"
        ]
    return numbers


def _cache(found: Mapping[str, Any]) -> Numbers:
    """Steps per second of each system, and inverse peak memory of the one with both levels."""
    numbers: Numbers = {}
    for row in found["results"]:
        for system, seconds in row["step_s"].items():
            numbers[f"{row['frames']} frames, {system}: steps per second"] = 1 / seconds["median"]
        numbers[f"{row['frames']} frames, level_1_2: 1 / peak GiB"] = (
            1024 / row["peak_mib"]["level_1_2"]
        )
    return numbers


def _schedule(found: Mapping[str, Any]) -> Numbers:
    """How near to the bound of its longest stage each executor comes; 1 is perfect."""
    return {
        f"{':'.join(map(str, row['ratio']))}, {row['groups']} groups, {system}: share of the bound": values[
            "share"
        ]
        for row in found["costed"]
        for system, values in row["systems"].items()
    }


def _rewards(found: Mapping[str, Any]) -> Numbers:
    """Completions per second of each reward."""
    return {
        f"{name}: completions per second": row["per_second"]["median"]
        for name, row in found["rewards"].items()
    }


@dataclass(frozen=True)
class Benchmark:
    """A script of both commits, shortened to what several rounds of two commits allow, and what is read of its results."""

    arguments: Sequence[str]
    quick: Sequence[str]
    read: Callable[[Mapping[str, Any]], Numbers]


BENCHMARKS = {
    "vs_trl": Benchmark(
        ["--rounds", "1", "--steps", "4"], ["--rounds", "1", "--steps", "2"], _vs_trl
    ),
    "cache": Benchmark(
        ["--rounds", "1", "--steps", "3"], ["--rounds", "1", "--steps", "2"], _cache
    ),
    "schedule": Benchmark(
        ["--parts", "costed", "--groups", "8", "--seconds", "6"], ["--quick"], _schedule
    ),
    "rewards": Benchmark(
        ["--rounds", "1", "--seconds", "0.2"], ["--rounds", "1", "--seconds", "0.02"], _rewards
    ),
}


@contextmanager
def checkouts(commits: Sequence[str]) -> Iterator[dict[str, Path]]:
    """A folder with each commit's files, removed at the end. Raises SystemExit for a commit that git does not know."""
    with tempfile.TemporaryDirectory(prefix="mmrl-commits-") as parent:
        folders: dict[str, Path] = {}
        try:
            for number, commit in enumerate(commits):
                folder = Path(parent) / str(number)
                made = subprocess.run(
                    ["git", "worktree", "add", "--detach", str(folder), commit],
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if made.returncode:
                    raise SystemExit(
                        f"expected a commit of this repository, found {commit!r}: {made.stderr.strip()}"
                    )
                folders[commit] = folder
            yield folders
        finally:
            for folder in folders.values():
                subprocess.run(
                    ["git", "worktree", "remove", "--force", str(folder)], cwd=ROOT, check=False
                )


def measure(folder: Path, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """One run of a commit's own scripts/bench_NAME.py; what it wrote. Raises RuntimeError with the end of its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-m", f"scripts.bench_{name}", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # A run that is shorter than a record writes to runs/results. Status 1 may mean a ratio below a goal, which is ours to show.
    written = [
        path
        for place in (UNRECORDED.relative_to(ROOT), RESULTS.relative_to(ROOT))
        if (path := folder / place / f"bench_{name}.json").exists()
        and path.stat().st_mtime >= began
    ]
    if not written:
        raise RuntimeError(
            f"bench_{name} of {folder} ended with status {done.returncode} and wrote nothing:\n{done.stdout[-3000:]}"
        )
    return dict(json.loads(written[0].read_text(encoding="utf-8")))


def compare(folders: Mapping[str, Path], name: str, rounds: int, *, quick: bool) -> dict[str, Any]:
    """Medians of both commits and the ratio after / before of each number, over the rounds."""
    benchmark = BENCHMARKS[name]
    columns: dict[str, dict[str, list[float]]] = {c: defaultdict(list) for c in folders}
    for order in alternation(tuple(folders), rounds):
        for commit in order:
            found = measure(
                folders[commit], name, benchmark.quick if quick else benchmark.arguments
            )
            for key, value in benchmark.read(found).items():
                columns[commit][key].append(value)
            print(f"{name}: {commit} measured", flush=True)
    before, after = columns.values()
    shared = [key for key in before if key in after]
    return {
        "numbers": {
            key: {
                "before": spread(before[key]),
                "after": spread(after[key]),
                "ratio": spread([a / b for a, b in zip(after[key], before[key], strict=True)]),
            }
            for key in shared
        },
        "geometric_mean": round(
            statistics.geometric_mean(
                statistics.median(after[key]) / statistics.median(before[key]) for key in shared
            ),
            3,
        ),
        "only_before": sorted(set(before) - set(after)),
        "only_after": sorted(set(after) - set(before)),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commits", nargs=2, default=[BEFORE, "HEAD"], metavar="COMMIT")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round; records nothing")
    parser.add_argument(
        "--record", action="store_true", help="write assets/results/bench_commits.json"
    )
    options = parse(parser)
    unknown = sorted(set(options.only.split(",")) - set(BENCHMARKS))
    if unknown:
        parser.error(
            f"expected names of {', '.join(BENCHMARKS)} after --only, found {unknown[0]!r}"
        )
    rounds = 1 if options.quick else options.rounds
    results: dict[str, Any] = {}
    with checkouts(options.commits) as folders:
        for name in options.only.split(","):
            results[name] = compare(folders, name, rounds, quick=options.quick)
            rows = [
                (key, row["before"]["median"], row["after"]["median"], row["ratio"]["median"],
                 f"{row['ratio']['min']} .. {row['ratio']['max']}")
                for key, row in results[name]["numbers"].items()
            ]  # fmt: skip
            print_table((name, "before", "after", "after / before", "spread"), rows)
            print(f"{name}: geometric mean of after / before {results[name]['geometric_mean']}\n")
    if options.record or options.quick:
        commits = dict(zip(("before", "after"), options.commits, strict=True))
        path = write_results(
            "bench_commits", {"commits": commits, "rounds": rounds, "benchmarks": results}, "torch"
        )
        print(f"written to {path}")


if __name__ == "__main__":
    main()
