"""Do episodes teach by more than GRPO? RLOO and GDPO on the tiny robot, and a control whose rewards are dealt anew in each group.

    OMP_NUM_THREADS=1 python -m scripts.bench_robot_learning [--steps 30] [--seeds 1]

Each run is `mmrl train configs/robot_tiny.yaml` with the overrides of its variant: only the algorithm section and rl.reward
differ. Success on 100 held-out initial states, sampled (T = 1) and greedy, before and after, comes from the runs' own
eval/*/results.json and goes to assets/results/bench_robot_learning.json with the machine and versions. The control keeps the
distribution of the rewards and loses their meaning: what it gains is not learned from them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts._bench import parse, print_table, write_results
from scripts.demo_robot import outcome

ROOT = Path(__file__).resolve().parent.parent
RLOO = ("algorithm.advantage=rloo", "algorithm.advantage_scale=batch")
VARIANTS: dict[str, tuple[str, ...]] = {
    "rloo": RLOO,
    "gdpo": ("algorithm.reward_aggregation=gdpo", "rl.reward={success: 1.0, brevity: 0.2}"),
    "rloo, shuffled": (*RLOO, "reward.shuffle=true"),
}


def run_one(variant: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """One training run in a process of its own; its held-out numbers."""
    name, began = f"{variant.replace(', ', '_')}_{seed}", time.time()
    command = [
        sys.executable,
        "-m",
        "mmrl.cli.main",
        "train",
        "configs/robot_tiny.yaml",
        "--overwrite",
        "--quiet",
        f"name={name}",
        f"dir={folder}",
        f"seed={seed}",
        f"train.steps={steps}",
        "eval.gallery=0",
        "schedule.timeline=0",
        *VARIANTS[variant],
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(f"{variant}, seed {seed}: the run failed\n{done.stderr[-3000:]}")
    return {
        "variant": variant,
        "overrides": list(VARIANTS[variant]),
        **outcome(folder / name, time.time() - began),
    }


def row_of(run: dict[str, Any]) -> tuple[str, ...]:
    """Variant, seed, and success before and after with their 95 % intervals."""
    cells = [run["variant"], str(run["seed"])]
    for mode in ("sampled", "greedy"):
        table = run["held_out"][mode]["success_once"]
        cells += [
            f"{e['mean']:.2f} [{e['low']:.2f}, {e['high']:.2f}]"
            for e in (table["before"], table["after"])
        ]
    return tuple(cells)


def learned(runs: list[dict[str, Any]]) -> bool:
    """Whether every run that was not shuffled raised sampled success beyond the interval before, and no shuffled one did."""

    def beyond(run: dict[str, Any]) -> bool:
        table = run["held_out"]["sampled"]["success_once"]
        return bool(table["after"]["mean"] > table["before"]["high"])

    return all(beyond(run) == ("shuffled" not in run["variant"]) for run in runs)


def main() -> int:
    """Command line; exit status 1 when something else than the meaning of rewards decided what was learned."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--variants", nargs="*", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--dir", type=Path, default=ROOT / "runs" / "bench_robot_learning")
    options = parse(parser)
    runs = []
    for seed in range(options.seeds):
        for variant in options.variants:
            runs.append(run_one(variant, seed, options.steps, options.dir))
            print(*row_of(runs[-1]), json.dumps(runs[-1]["wall_s"]), flush=True)
    print_table(
        ("variant", "seed", "sampled, before", "after", "greedy, before", "after"),
        [row_of(run) for run in runs],
    )
    if options.variants == list(VARIANTS):
        print(
            write_results(
                "bench_robot_learning",
                {"steps": options.steps, "learned": learned(runs), "runs": runs},
                "torch",
                "transformers",
            )
        )
    return int(not learned(runs))


if __name__ == "__main__":
    raise SystemExit(main())
