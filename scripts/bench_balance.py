"""How unequal the tokens of processes are, place by place and dealt by length (train.balance_batch), over made-up steps.

    python -m scripts.bench_balance        # seconds, writes assets/results/bench_balance.json

Lengths: pictures of 256 to 1,280 tokens (uniform; usual bounds of Qwen2.5-VL), clips of 2,000 to 16,000 (log-uniform),
completions log-normal around a median of 250 with sigma 0.6, cut off at 1,024. Imbalance is the largest load over the mean load of
the processes: the share of an update in which a process waits is about 1 - 1 / imbalance. Moved: groups that another process trains
on than the one that rolled them out.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from mmrl.training.dealing import dealt, imbalance
from scripts import _bench as bench

STEPS, GROUPS_EACH, G = 200, 8, 8
PROCESSES = (2, 8, 64)
SHARES = {"pictures": 0.0, "half clips": 0.5, "clips": 1.0}


def step_costs(rng: np.random.Generator, groups: int, clips: float) -> list[int]:
    """Packed tokens of each group of a step."""
    pictures = rng.integers(256, 1281, groups)
    videos = np.exp(rng.uniform(np.log(2_000), np.log(16_000), groups))
    prompts = np.where(rng.random(groups) < clips, videos, pictures) + 100
    written = np.minimum(rng.lognormal(np.log(250), 0.6, (groups, G)), 1024).sum(1)
    return [int(n) for n in prompts + written]


def measure(clips: float, processes: int) -> dict[str, Any]:
    """Means over the steps."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(STEPS):
        costs = step_costs(rng, processes * GROUPS_EACH, clips)
        homes = [n % processes for n in range(len(costs))]
        owners = dealt(costs, homes, processes)
        moved = sum(a != b for a, b in zip(homes, owners, strict=True)) / len(costs)
        rows.append(
            (imbalance(costs, homes, processes), imbalance(costs, owners, processes), moved)
        )
    by_place, by_length, moved = np.mean(rows, 0)
    return {
        "processes": processes,
        "by_place": round(float(by_place), 3),
        "by_length": round(float(by_length), 3),
        "moved": round(float(moved), 3),
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bench.parse(parser)
    found = {name: [measure(share, n) for n in PROCESSES] for name, share in SHARES.items()}
    for name, rows in found.items():
        print(name)
        bench.print_table(list(rows[0]), [list(row.values()) for row in rows])
    settings = {"steps": STEPS, "groups_each": GROUPS_EACH, "group_size": G}
    print(bench.write_results("bench_balance", {"settings": settings, **found}, "mmrl", "numpy"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
