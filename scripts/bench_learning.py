"""Does it learn? Three seeds of the demo per reward, and a control whose rewards are shuffled within each group.

    OMP_NUM_THREADS=1 python -m scripts.bench_learning [--steps 150] [--seeds 3] [--jobs 2]

Each run is the demo's own command (`mmrl train configs/demo.yaml`, one thread), two at a time. Held-out mIoU, Acc@0.5
and Acc@0.75, sampled (avg@8, T = 1) and greedy, before and after, come from the runs' eval/*/results.json and go to
assets/results/bench_learning.json with the machine and versions. A shuffled reward keeps its distribution and loses its
meaning, so whatever the control gains is not learning from rewards.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts._bench import parse, write_results
from scripts.demo import make_data, summary

ROOT = Path(__file__).resolve().parent.parent
VARIANTS: dict[str, list[str]] = {
    "iou": [],
    "dynamic 0.5 / 0.65 / 0.8": [
        "data.train.0.params.mode=dynamic",
        "data.train.0.params.iou={schedule: [[0.1, 0.5], [0.25, 0.65], [1.0, 0.8]]}",
    ],
    "dynamic, V-Triune": ["data.train.0.params.mode=dynamic"],
    "static 0.8": ["data.train.0.params.mode=static", "data.train.0.params.iou={threshold: 0.8}"],
    "control: shuffled": ["reward.shuffle=true"],
}


def _finished(run: Path) -> bool:
    return (run / "run.json").exists() and json.loads(
        (run / "run.json").read_text(encoding="utf-8")
    )["status"] == "finished"


def run_one(
    variant: str,
    seed: int,
    steps: int | None,
    folder: Path,
    keep: bool,
    variants: Mapping[str, Sequence[str]] = VARIANTS,
) -> dict[str, Any]:
    """One training run in a process of its own (or the finished one already there); returns its held-out numbers. `variants`:
    overrides of the demo by name."""
    name = f"{'_'.join(''.join(c if c.isalnum() else ' ' for c in variant).split())}_{seed}"
    command = [
        sys.executable,
        "-m",
        "mmrl.cli.main",
        "train",
        "configs/demo.yaml",
        "--overwrite",
        "--quiet",
        f"name={name}",
        f"dir={folder}",
        f"seed={seed}",
        "eval.every=0",
        "train.save_every=0",
        *([f"train.steps={steps}"] if steps else []),
        *variants[variant],
    ]
    if not (keep and _finished(folder / name)):
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        if done.returncode:
            raise SystemExit(f"{variant}, seed {seed}: the run failed\n{done.stderr[-3000:]}")
    rows = [
        json.loads(line)
        for line in (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return {
        "variant": variant,
        "seed": seed,
        "steps": len(rows),
        "training_s": round(sum(r["time/total"] for r in rows), 1),
        "held_out": summary(folder / name),
    }


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean over seeds of before, after and gain, with the lowest and highest gain."""
    rows = []
    for variant in dict.fromkeys(r["variant"] for r in runs):
        mine = [r["held_out"] for r in runs if r["variant"] == variant]
        row: dict[str, Any] = {"variant": variant, "seeds": len(mine)}
        for mode in ("sampled", "greedy"):
            for metric in ("iou", "acc@0.5", "acc@0.75"):
                cells = [h[mode][metric] for h in mine]
                gains = [c["after"]["mean"] - c["before"]["mean"] for c in cells]
                row[f"{mode}/{metric}"] = {
                    "before": statistics.fmean(c["before"]["mean"] for c in cells),
                    "after": statistics.fmean(c["after"]["mean"] for c in cells),
                    "gain": statistics.fmean(gains),
                    "lowest_gain": min(gains),
                    "highest_gain": max(gains),
                }
        rows.append(row)
    return rows


def passed(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """What the project promises: IoU reward gains at least 0.15 sampled mIoU with greedy rising, the control gains less
    than a fifth of that."""
    by = {r["variant"]: r for r in rows}
    checks = {}
    if "iou" in by:
        checks["iou: sampled mIoU gain >= 0.15"] = by["iou"]["sampled/iou"]["gain"] >= 0.15
        checks["iou: greedy mIoU rises"] = by["iou"]["greedy/iou"]["gain"] > 0
    if "control: shuffled" in by:
        checks["control: sampled mIoU gain < 0.03"] = (
            by["control: shuffled"]["sampled/iou"]["gain"] < 0.03
        )
    return checks


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="training steps instead of those of configs/demo.yaml; nothing is recorded then",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument(
        "--only", nargs="*", choices=VARIANTS, help="these rewards; nothing is recorded then"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="use finished runs in --out, for example after an interruption",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench_learning")
    options = parse(parser)
    make_data(ROOT / "runs" / "demo_data")
    plan = [(v, s) for v in options.only or VARIANTS for s in range(options.seeds)]
    runs: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(
            lambda job: run_one(job[0], job[1], options.steps, options.out, options.keep), plan
        ):
            runs.append(result)
            cell = result["held_out"]["sampled"]["iou"]
            print(
                f"{result['variant']:26} seed {result['seed']}  sampled mIoU {cell['before']['mean']:.3f} -> "
                f"{cell['after']['mean']:.3f}  {result['training_s']:.0f} s of training",
                flush=True,
            )
    rows = table(runs)
    checks = passed(rows)
    if options.steps is None and not options.only:
        write_results(
            "bench_learning",
            {"passed": checks, "table": rows, "runs": runs},
            "torch",
            "transformers",
        )
    print(f"\n{'reward':26} {'sampled mIoU':24} {'sampled Acc@0.75':24} {'greedy mIoU':24}")
    for row in rows:
        cells = [row[k] for k in ("sampled/iou", "sampled/acc@0.75", "greedy/iou")]
        print(
            f"{row['variant']:26} "
            + " ".join(f"{c['before']:.3f} -> {c['after']:.3f} ({c['gain']:+.3f})  " for c in cells)
        )
    print("\n".join(f"{'passed' if good else 'FAILED'}  {name}" for name, good in checks.items()))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
