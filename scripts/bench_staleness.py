"""Does a run learn as much from rollouts that are some versions old? The demo with a generator process, beside the serial one.

    OMP_NUM_THREADS=1 python -m scripts.bench_staleness [--steps 40] [--seeds 3] [--jobs 1]

Each run is the demo's own command (`mmrl train configs/demo.yaml`) with half its prompts per step and half its answers per
held-out prompt. `serial` trains each step before the next is rolled out; the others set engine.generator.kind process and
schedule.kind async, so that groups are up to 1 or 4 versions old, with importance weights for their tokens (schedule.correction
truncate) and without. How old groups were, and which share of tokens was stale, is what the runs logged. Written to
assets/results/bench_staleness.json: gains of held-out mIoU per variant and seed, and whether the mean over seeds of each variant
is not below that of the serial seeds by more than the larger range over seeds of the two.
"""

from __future__ import annotations

import argparse
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts._bench import parse, print_table, write_results
from scripts.bench_learning import ROOT, run_one, table
from scripts.demo import make_data

SMALL = ("train.prompts_per_step=8", "eval.samples=4", "eval.limit=50")
APART = (*SMALL, "engine.generator.kind=process", "schedule.kind=async", "schedule.wave=2")
VARIANTS: dict[str, tuple[str, ...]] = {
    "serial": SMALL,
    **{
        f"staleness {bound}, {correction}": (
            *APART,
            f"schedule.staleness={bound}",
            f"schedule.correction={correction}",
        )
        for bound in (1, 4)
        for correction in ("truncate", "none")
    },
}
_METRIC = "sampled/iou"


def ages(run: Path) -> dict[str, float]:
    """How old the run's groups and tokens were, over its steps."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    known = [r for r in rows if "train/staleness" in r]
    if not known:
        return {"oldest": 0.0, "mean_oldest": 0.0, "stale_tokens": 0.0}
    return {
        "oldest": max(r["train/staleness"] for r in known),
        "mean_oldest": statistics.fmean(r["train/staleness"] for r in known),
        "stale_tokens": statistics.fmean(r["train/offpolicy/share"] for r in known),
    }


def verdicts(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """By variant: its mean gain is not below what seeds explain."""
    serial = next(r for r in rows if r["variant"] == "serial")[_METRIC]
    found = {}
    for row in rows:
        own = row[_METRIC]
        spread = max(
            serial["highest_gain"] - serial["lowest_gain"],
            own["highest_gain"] - own["lowest_gain"],
        )
        found[row["variant"]] = own["gain"] >= serial["gain"] - spread
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, two processes each")
    parser.add_argument(
        "--keep", action="store_true", help="take finished runs that are there already"
    )
    o = parse(parser)
    make_data(ROOT / "runs" / "demo_data")
    folder = ROOT / "runs" / "bench_staleness"
    jobs = [(v, s) for s in range(o.seeds) for v in VARIANTS]

    def one(job: tuple[str, int]) -> dict[str, Any]:
        variant, seed = job
        row = run_one(variant, seed, o.steps, folder, o.keep, VARIANTS)
        name = f"{'_'.join(''.join(c if c.isalnum() else ' ' for c in variant).split())}_{seed}"
        row["ages"] = ages(folder / name)
        gain = row["held_out"]["sampled"]["iou"]
        print(
            variant,
            seed,
            f"{gain['before']['mean']:.3f} -> {gain['after']['mean']:.3f}",
            row["ages"],
        )
        return row

    with ThreadPoolExecutor(o.jobs) as pool:
        runs = list(pool.map(one, jobs))
    rows = table(runs)
    passed = verdicts(rows)
    print_table(
        ("", "gain of sampled mIoU", "lowest", "highest", "not below serial"),
        [
            (
                r["variant"],
                f"{r[_METRIC]['gain']:.3f}",
                f"{r[_METRIC]['lowest_gain']:.3f}",
                f"{r[_METRIC]['highest_gain']:.3f}",
                str(passed[r["variant"]]),
            )
            for r in rows
        ],
    )
    print(
        write_results(
            "bench_staleness",
            {"steps": o.steps, "passed": passed, "table": rows, "runs": runs},
            "torch",
            "transformers",
        )
    )
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
