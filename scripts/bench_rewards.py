"""Completions per second and core for every reward, 64 boxes against 64 boxes included, and the share of a demo step.

    OMP_NUM_THREADS=1 python -m scripts.bench_rewards          # assets/results/bench_rewards.json

From text to score, in this process and on one thread: parsing, metrics and every part. The texts are gold answers, wrong
answers and mutated ones, a third each. The share of a step comes from a real run: eight steps of configs/demo.yaml, reward
worker, pipes and waiting included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.coords import CoordFrame
from mmrl.rewards.format import wrap_answer
from mmrl.task import Task
from mmrl.types import ImageSize, RewardContext, Sample
from scripts._bench import parse, print_table, spread, write_results
from scripts._mutations import mutate
from scripts._reward_cases import all_cases, contexts, example_samples
from scripts.fuzz_rewards import POOLED

Job = tuple[Sample, str, RewardContext]


def _jobs(task: Task, seed: int) -> list[Job]:
    rng = random.Random(seed)
    out: list[Job] = []
    for sample in example_samples(task):
        ctx = contexts(sample)[2]  # rel1000, as Qwen3-VL
        gold, wrong = task.gold(sample, ctx), task.wrong(sample, ctx)
        out += [(sample, text, ctx) for text in (gold, wrong, mutate(gold, rng, [gold, wrong]))]
    return out


def _crowd(task: Task, boxes: int) -> list[Job]:
    """A picture with `boxes` objects of eight categories and an answer with as many, each a little off."""
    rng = np.random.default_rng(0)
    corner = rng.integers(0, 900, (boxes, 2))
    side = rng.integers(20, 100, (boxes, 2))
    gold = np.concatenate([corner, corner + side], 1)
    off = np.clip(gold + rng.integers(-5, 6, gold.shape), 0, 1000)
    off[:, 2:] = np.maximum(off[:, 2:], off[:, :2] + 1)
    names = [f"thing {i % 8}" for i in range(boxes)]
    truth = [
        {"bbox": [float(v) for v in box], "label": name}
        for box, name in zip(gold, names, strict=True)
    ]
    text = json.dumps(
        [{"bbox_2d": [int(v) for v in box], "label": n} for box, n in zip(off, names, strict=True)]
    )
    sample = Sample(
        "crowd",
        "detection",
        "bench",
        "all things",
        truth,
        ("crowd.png",),
        params={"categories": sorted(set(names)), "width": 1000, "height": 1000},
    )
    ctx = RewardContext(
        1,
        1,
        CoordFrame.REL1000,
        (ImageSize((1000, 1000), (1008, 1008)),),
        num_tokens=900,
        max_tokens=2048,
    )
    wrapped = wrap_answer(text, getattr(task, "answer_format", "answer"))
    assert task.score(sample, wrapped, ctx).parsed, (
        f"{boxes} boxes are an answer to {task.name} {task.params}"
    )
    return [(sample, wrapped, ctx)]


def _rate(task: Task, jobs: list[Job], seconds: float) -> float:
    """Completions per second of this thread's CPU time; of real time for those that may wait for the verifier process."""
    clock = time.perf_counter if task.name in POOLED else time.thread_time
    for sample, text, ctx in jobs:
        task.score(sample, text, ctx)  # imports, caches, the verifier pool
    count, began = 0, clock()
    while (passed := clock() - began) < seconds:
        for sample, text, ctx in jobs:
            task.score(sample, text, ctx)
        count += len(jobs)
    return count / passed


def _share_of_a_step(steps: int) -> dict[str, Any]:
    """Seconds per step and the rewards' share of it in a short real run of the demo."""
    from mmrl.config import load_config
    from mmrl.training.trainer import Trainer
    from scripts.demo import ROOT, make_data

    make_data(ROOT / "runs" / "demo_data")
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            ROOT / "configs" / "demo.yaml",
            [
                f"train.steps={steps}",
                "train.save_every=0",
                "data.eval=[]",
                f"dir={folder}",
                "name=share",
            ],
        )
        Trainer(config).fit()
        rows = [
            json.loads(line)
            for line in (Path(folder) / "share" / "metrics.jsonl")
            .read_text(encoding="utf-8")
            .splitlines()
        ]
    late = rows[2:]  # the first steps start the worker
    return {
        "step_s": spread([r["time/total"] for r in late]),
        "share": spread([r["time/reward"] / r["time/total"] for r in late], 5),
        "completions_per_step": 128,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="per round and reward")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", default="", help="names of rewards that start with this; nothing is recorded then"
    )
    options = parse(parser)
    os.chdir(Path(__file__).resolve().parent.parent)
    work: list[tuple[str, Task, list[Job]]] = []
    for case in all_cases():
        if case.name.startswith(options.only):
            task = case.make()
            work.append((case.name, task, _jobs(task, 0)))
            if case.task == "detection":
                work.append((f"{case.name}, 64 x 64 boxes", task, _crowd(task, 64)))
    if not work:
        parser.error(
            f"expected the beginning of a reward's name after --only, found {options.only!r}"
        )
    rates: dict[str, list[float]] = {name: [] for name, _, _ in work}
    for _ in range(options.rounds):
        for name, task, jobs in work:
            rates[name].append(_rate(task, jobs, options.seconds))
    rows: dict[str, dict[str, Any]] = {
        name: {
            "per_second": spread(values, 0),
            "us": round(1e6 / sorted(values)[len(values) // 2], 1),
        }
        for name, values in rates.items()
    }
    print_table(
        ("reward", "completions/s/core", "us each"),
        [(n, f"{r['per_second']['median']:,.0f}", r["us"]) for n, r in rows.items()],
    )
    if not options.only:
        share = _share_of_a_step(8)
        print(
            f"share of a demo step: {share['share']['median']:.2%} (largest {share['share']['max']:.2%})"
        )
        print(
            write_results(
                "bench_rewards", {"rewards": rows, "demo": share}, "numpy", "scipy", "torch"
            )
        )


if __name__ == "__main__":
    main()
