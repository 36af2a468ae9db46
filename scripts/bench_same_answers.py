"""The rewards of two commits on the same completions under the same settings, those of the earlier commit.

    python -m scripts.bench_same_answers                  # minutes, one thread; assets/results/bench_same_answers.json
    python -m scripts.bench_same_answers --commits e1ea5ab HEAD --rounds 5
    python -m scripts.bench_same_answers --quick          # one short round; records nothing

scripts/bench_rewards.py times each preset on its own completions. Where a preset has come to mean more (its paper's tags, keys
and format rule), that compares two commits on different work. Here the earlier commit's completions, samples and spelled-out
settings (no preset) are scored by both, in processes that alternate; rows whose scores differ are marked, since a rule that was
mended is other work, too. Completions per second of CPU time; of real time for rewards that may wait for a verifier process.
Exit status 1 where a row that scores the same has become slower by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts._bench import alternation, parse, print_table, spread, write_results
from scripts.bench_commits import checkouts

BEFORE = "e1ea5ab"
"""The last commit whose presets read answers in mmrl's own tags."""
ALLOWED = 0.9

_DESCRIBE = """
import dataclasses, json, sys
from scripts._reward_cases import all_cases
from scripts.bench_rewards import _jobs
rows = []
for case in all_cases():
    task, seen = case.make(), []
    for sample, text, ctx in _jobs(task, 0):
        seen.append([dataclasses.asdict(sample), text, dataclasses.asdict(ctx)])
    rows.append({"name": case.name, "task": case.task, "settings": task.settings, "jobs": seen})
json.dump(rows, open(sys.argv[1], "w"), default=str)
"""

_TIME = """
import json, sys, time
from mmrl.coords import CoordFrame
from mmrl.registry import resolve_task
from mmrl.types import ImageSize, RewardContext, Sample, StopReason, VideoSize
from scripts.fuzz_rewards import POOLED
def fixed(fields):
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
def made(row):
    sample, text, ctx = row
    sample = {k: tuple(v) if k in ("images", "videos") else v for k, v in sample.items()}
    ctx = {**ctx, "frame": CoordFrame(ctx["frame"]), "stop": StopReason(ctx["stop"])}
    ctx["images"] = tuple(ImageSize(**fixed(size)) for size in ctx["images"])
    ctx["videos"] = tuple(VideoSize(**fixed(size)) for size in ctx["videos"])
    return Sample(**sample), text, RewardContext(**ctx)
found = {}
for row in json.load(open(sys.argv[1])):
    settings = {k: v for k, v in row["settings"].items() if k != "preset" and v is not None}
    try:
        task = resolve_task(row["task"])(**settings)
        jobs = [made(job) for job in row["jobs"]]
        values = [round(task.score(*job).value, 9) for job in jobs]
    except Exception as err:
        found[row["name"]] = {"refused": f"{type(err).__name__}: {err}"[:300]}
        continue
    clock = time.perf_counter if row["task"] in POOLED else time.thread_time
    best = 0.0
    for _ in range(int(sys.argv[4])):
        count, began = 0, clock()
        while (passed := clock() - began) < float(sys.argv[3]):
            for job in jobs:
                task.score(*job)
            count += len(jobs)
        best = max(best, count / passed)
    found[row["name"]] = {"values": values, "per_second": best}
json.dump(found, open(sys.argv[2], "w"))
"""


def _run(folder: Path, program: str, *arguments: object) -> None:
    """A program in a commit's checkout. Raises RuntimeError with the end of what it said."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{folder} ended with status {done.returncode}:\n{done.stderr[-3000:]}")


def compare(folders: Mapping[str, Path], rounds: int, seconds: float) -> dict[str, Any]:
    """Rows by name: completions per second of both commits, their ratio, and how many completions score the same."""
    before, after = folders
    rates: dict[str, dict[str, list[float]]] = {c: defaultdict(list) for c in folders}
    values: dict[str, dict[str, list[float]]] = {c: {} for c in folders}
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mmrl-same-") as folder:
        work, result = Path(folder) / "work.json", Path(folder) / "result.json"
        _run(folders[before], _DESCRIBE, work)
        for order in alternation((before, after), rounds):
            for commit in order:
                _run(folders[commit], _TIME, work, result, seconds, 3)
                for name, row in json.loads(result.read_text(encoding="utf-8")).items():
                    if "refused" in row:
                        refused[name] = f"{commit}: {row['refused']}"
                        continue
                    rates[commit][name].append(row["per_second"])
                    values[commit][name] = row["values"]
                print(f"{commit} measured", flush=True)
    rows = {}
    for name in (n for n in rates[before] if n in rates[after]):
        ratios = [a / b for a, b in zip(rates[after][name], rates[before][name], strict=True)]
        same = [a == b for a, b in zip(values[after][name], values[before][name], strict=True)]
        rows[name] = {
            "before": spread(rates[before][name], 0),
            "after": spread(rates[after][name], 0),
            "ratio": spread(ratios),
            "completions": len(same),
            "score_the_same": sum(same),
        }
    return {"rows": rows, "refused": refused}


def slower(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of rows that score as before and have lost more than a tenth."""
    return [
        name
        for name, row in rows.items()
        if row["score_the_same"] == row["completions"] and row["ratio"]["median"] < ALLOWED
    ]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commits", nargs=2, default=[BEFORE, "HEAD"], metavar="COMMIT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.2, help="the best of three such times")
    parser.add_argument("--quick", action="store_true", help="one short round; records nothing")
    options = parse(parser)
    if options.quick:
        options.rounds, options.seconds = 1, 0.02
    with checkouts(options.commits) as folders:
        found = compare(folders, options.rounds, options.seconds)
    rows = found["rows"]
    print_table(
        ("reward", "before", "after", "after / before", "spread", "score the same"),
        [
            (name, row["before"]["median"], row["after"]["median"], row["ratio"]["median"],
             f"{row['ratio']['min']} .. {row['ratio']['max']}",
             f"{row['score_the_same']} of {row['completions']}")
            for name, row in rows.items()
        ],
    )  # fmt: skip
    for name, reason in found["refused"].items():
        print(f"not compared: {name}: {reason}")
    lost = slower(rows)
    print(f"slower by more than a tenth with the same scores: {', '.join(lost) or 'none'}")
    path = write_results(
        "bench_same_answers",
        {"commits": dict(zip(("before", "after"), options.commits, strict=True)), **found},
        "numpy",
        "scipy",
    )
    print(f"written to {path}")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
