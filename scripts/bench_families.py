"""Does each kind of family learn? A tiny model of three, warm-started and then trained with GRPO, beside shuffled rewards.

    OMP_NUM_THREADS=1 python -m scripts.bench_families [--only internvl] [--jobs 1]    (half an hour on two cores)

One family per kind: a grid with M-RoPE, tiles at plain rotary positions, a mixture of experts. Each begins as random weights of the
family's own classes, and learns format and sight as the demo's model does (assets/make_tiny_vlm.py), in one stage instead of four:
`mmrl sft` on scenes of one object whose boxes were drawn with a margin and a shaky hand. Then `mmrl train configs/demo.yaml` on
scenes with true boxes, and once more with rewards shuffled within each group: what the control gains is not learned from rewards.
Both are held near the warm start by a KL penalty.
Held-out results with intervals go to assets/results/bench_families.json; docs/families.md shows them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from assets.make_tiny_vlm import loosen, sft
from scripts._bench import ROOT, parse, recorded_rows, write_results
from scripts.bench_learning import run_one

KINDS = {
    "qwen3_vl": "grid, M-RoPE",
    "internvl": "tiles, plain RoPE",
    "qwen3_vl_moe": "grid, M-RoPE, mixture of experts",
}
# (warm start, reinforcement learning): what each had time for; a longer warm start begins higher
STEPS = {"qwen3_vl": (700, 100), "internvl": (400, 80), "qwen3_vl_moe": (400, 80)}
# Rewards that say nothing still move weights, in no direction: with the demo's 1e-4 and no penalty a control forgets what its warm
# start knew (0.18 -> 0.05 in 60 steps), and tells nothing of learning. A penalty on the distance to the warm start holds it there.
SEEDS = (0, 1)  # of the training; the warm start is one
SETTINGS = ["optim.lr=5e-5", "algorithm.kl.coef=0.2"]
SPEC: dict[str, Any] = {
    "hidden": 128,
    "layers": 3,
    "heads": 4,
    "kv": 2,
    "vision_hidden": 128,
    "vision_layers": 2,
    "vision_heads": 4,
}
MARGIN, JITTER = 0.10, 0.12


def scenes(folder: Path) -> tuple[Path, Path, Path]:
    """Rows of the warm start (loose boxes), of training and held out; no picture is in two of them."""
    from mmrl.tasks.scenes import make_scenes

    files = []
    for name, count, seed in (("warm", 6000, 2001), ("train", 2000, 21), ("eval", 200, 22)):
        file = folder / name / "data.jsonl"
        if not file.exists():
            make_scenes(folder / name, count, seed, 112, 0, f"family-{name}-", background="graded")
        files.append(file)
    loose = folder / "warm" / "loose.jsonl"
    loosen(str(files[0]), loose, MARGIN, JITTER, 2003)
    return loose, files[1], files[2]


def warm_start(family: str, loose: Path, folder: Path, steps: int) -> Path:
    """A tiny model of the family that answers in the format, loosely; kept where it is there already."""
    from mmrl.policy.tiny import TinySpec, build_tiny

    build_tiny(TinySpec(arch=family, **SPEC), folder / f"{family}_0")
    sft(
        folder / f"{family}_0",
        str(loose),
        folder / f"{family}_1",
        f"train.steps={steps}",
        "optim.schedule=cosine",
        "optim.min_lr_ratio=0.02",
    )
    return folder / f"{family}_1"


def learn(family: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The warm start and both runs of one family."""
    folder = options.out
    loose, train, held_out = scenes(folder / "data")
    if not options.keep:
        shutil.rmtree(folder / f"{family}_1", ignore_errors=True)
    warm, steps = (
        given or usual
        for given, usual in zip((options.warm, options.steps), STEPS[family], strict=True)
    )
    model = warm_start(family, loose, folder, warm)
    seconds = int(model.with_suffix(".seconds").read_text(encoding="utf-8"))
    common = [
        f"model.path={model}",
        f"data.train.0.path={train}",
        f"data.eval.0.path={held_out}",
        "eval.limit=200",
        "rollout.max_new_tokens=28",
        *SETTINGS,
    ]
    variants = {f"{family} rewards": common, f"{family} shuffled": [*common, "reward.shuffle=true"]}
    runs = []
    for variant, seed in itertools.product(variants, SEEDS):
        run = run_one(variant, seed, steps, folder, options.keep, variants)
        cell = run["held_out"]["sampled"]["iou"]
        print(
            f"{variant:24} seed {seed}: sampled mIoU {cell['before']['mean']:.3f} -> {cell['after']['mean']:.3f} "
            f"[{cell['after']['low']:.3f}, {cell['after']['high']:.3f}], {run['training_s']:.0f} s",
            flush=True,
        )
        runs.append(
            {
                **run,
                "family": family,
                "control": "shuffled" in variant,
                "warm_steps": warm,
                "warm_start_s": seconds,
            }
        )
    return runs


def rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What docs/families.md shows of each family and seed, and whether it is what this script is to show."""
    found = []
    for family, seed in dict.fromkeys((r["family"], r["seed"]) for r in runs):
        cells = {
            r["control"]: r["held_out"]["sampled"]["iou"]
            for r in runs
            if (r["family"], r["seed"]) == (family, seed)
        }
        gains = {k: c["after"]["mean"] - c["before"]["mean"] for k, c in cells.items()}
        found.append(
            {
                "family": family,
                "seed": seed,
                "kind": KINDS[family],
                "warm_steps": STEPS[family][0],
                "steps": STEPS[family][1],
                "rewards": cells[False],
                "shuffled": cells[True],
                "intervals_apart": cells[False]["after"]["low"] > cells[False]["before"]["high"],
                "control_flat": abs(gains[True]) < gains[False] / 2,
            }
        )
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", choices=KINDS, help="these anew, the others as recorded"
    )
    parser.add_argument("--jobs", type=int, default=1, help="families at a time, one thread each")
    parser.add_argument(
        "--warm", type=int, help="steps of the warm start; nothing is recorded then"
    )
    parser.add_argument(
        "--steps", type=int, help="steps of reinforcement learning; nothing is recorded then"
    )
    parser.add_argument("--keep", action="store_true", help="go on from what is in --out")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench_families")
    options = parse(parser)
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [
            r for rs in pool.map(lambda f: learn(f, options), options.only or KINDS) for r in rs
        ]
    table = rows(runs)
    if not (options.warm or options.steps):
        kept = [
            r
            for r in recorded_rows("bench_families", "runs", {"settings": SETTINGS})
            if r["family"] not in (options.only or KINDS)
        ]
        runs = sorted([*kept, *runs], key=lambda r: list(KINDS).index(r["family"]))
        table = rows(runs)
        facts = {"spec": SPEC, "settings": SETTINGS, "table": table, "runs": runs}
        print(f"recorded in {write_results('bench_families', facts, 'torch', 'transformers')}")
    else:
        print(json.dumps(table, indent=1))
    return 0 if all(r["intervals_apart"] and r["control_flat"] for r in table) else 1


if __name__ == "__main__":
    raise SystemExit(main())
