"""T-GRPO against GRPO on questions that only the order of frames answers: accuracy, and the gap to shuffled frames.

    OMP_NUM_THREADS=1 python -m scripts.bench_tgrpo [--steps 400] [--seeds 3] [--jobs 2]      (starts again where it was killed)

Each run is `mmrl train configs/tgrpo_tiny.yaml` in a process of its own on one thread: `t_grpo` as it is, `grpo` without
contrast. A bonus on every right answer of a group cancels where the group's rewards are divided by their own spread (rewards
that are right or wrong and nothing else then have the same advantages with it and without), so both are run again with
advantages that are not divided (Dr. GRPO), where the bonus, here 1.0 and paid only above the shuffled accuracy, weighs the
groups in which the order of frames matters twice. Held-out accuracy on ordered frames (sampled,
avg@4, T = 1, and greedy), the accuracy on shuffled frames and the gap between them come from the runs' evaluations before and
after, and go to assets/results/bench_tgrpo.json with the machine and versions.

What a run measured is kept in OUT/rows when it has finished, under its settings and the bytes of everything it is made from (code,
configuration, model, data): a benchmark that was killed takes the finished runs from there, and makes all anew after a change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts._bench import parse, print_table, write_results
from scripts.demo_video import make_data

ROOT = Path(__file__).resolve().parent.parent
UNSCALED = "algorithm.advantage_scale=none"
VARIANTS: dict[str, list[str]] = {
    "grpo": ["algorithm.contrast={kind: none}"],
    "t_grpo": [],
    "dr_grpo": ["algorithm.contrast={kind: none}", UNSCALED],
    "t_dr_grpo": [UNSCALED, "algorithm.contrast.bonus=1.0", "algorithm.contrast.factor=1.0"],
}


def measured(results: dict[str, Any]) -> dict[str, float]:
    """The measures of one evaluation, from its results.json."""
    view = results["views"]["shuffle"]
    return {
        "sampled": results["sampled"]["correct"]["mean"],
        "greedy": results["greedy"]["correct"]["mean"],
        "plain": view["plain"]["mean"],
        "shuffled": view["changed"]["mean"],
        "gap": view["gap"]["mean"],
    }


def made_from(root: Path = ROOT) -> str:
    """Hash of what every run is made from: the packages' code, the configuration, the model, the training and held-out clips."""
    digest = hashlib.sha256()
    files = [
        path
        for package in ("mmrl", "rewards", "tasks", "video")
        for path in (root / package).rglob("*.py")
    ]
    files += [
        root / "configs" / "tgrpo_tiny.yaml",
        *(p for p in (root / "assets" / "tiny_video").rglob("*") if p.is_file()),
    ]
    clips = [root / "runs" / "video_data" / part / "direction" for part in ("train", "eval")]
    files += [path for folder in clips for path in folder.rglob("*") if path.is_file()]
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kept(
    folder: Path, settings: list[str], code: str, run: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """The row that a finished run with these settings and this code left in `folder`, else that of `run`, which is kept."""
    key = hashlib.sha256(json.dumps([settings, code]).encode()).hexdigest()[:24]
    path = folder / f"{key}.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        assert found["settings"] == settings and found["code"] == code, (
            f"{path} is not its own: delete it"
        )
        return dict(found["row"])
    row = run()
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(
        json.dumps({"settings": settings, "code": code, "row": row}), encoding="utf-8"
    )
    os.replace(partial, path)
    return row


def settings_of(variant: str, seed: int, steps: int | None) -> list[str]:
    """What a run changes of the configuration."""
    return [f"seed={seed}", *([f"train.steps={steps}"] if steps else []), *VARIANTS[variant]]


def run_one(variant: str, seed: int, steps: int | None, folder: Path) -> dict[str, Any]:
    """One training run; returns its held-out numbers, seconds and rollouts."""
    name = f"{''.join(c if c.isalnum() else '_' for c in variant)}_{seed}"
    command = [
        sys.executable,
        "-m",
        "mmrl.cli.main",
        "train",
        "configs/tgrpo_tiny.yaml",
        "--overwrite",
        "--quiet",
        f"name={name}",
        f"dir={folder}",
        *settings_of(variant, seed, steps),
    ]
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
    evaluations = sorted((folder / name / "eval").glob("step_*"))
    before, after = (
        measured(json.loads((e / "results.json").read_text(encoding="utf-8")))
        for e in (evaluations[0], evaluations[-1])
    )
    return {
        "variant": variant,
        "seed": seed,
        "steps": len(rows),
        "before": before,
        "after": after,
        "training_s": round(sum(r["time/total"] for r in rows), 1),
        "rolled_out": statistics.mean(r.get("train/contrast/rolled_out", 0.0) for r in rows),
    }


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean, lowest and highest over seeds of every measure, before and after."""
    rows = []
    for variant in dict.fromkeys(r["variant"] for r in runs):
        mine = [r for r in runs if r["variant"] == variant]
        row: dict[str, Any] = {
            "variant": variant,
            "seeds": len(mine),
            "training_s": statistics.mean(r["training_s"] for r in mine),
            "rolled_out": statistics.mean(r["rolled_out"] for r in mine),
        }
        for name in mine[0]["after"]:
            values = [r["after"][name] for r in mine]
            row[name] = {
                "before": statistics.mean(r["before"][name] for r in mine),
                "after": statistics.mean(values),
                "low": min(values),
                "high": max(values),
            }
        rows.append(row)
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, help="of the configuration unless given; nothing is recorded then"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench_tgrpo")
    options = parse(parser)
    make_data(held_out={"direction": 300})
    jobs = [(variant, seed) for seed in range(options.seeds) for variant in VARIANTS]
    code = made_from()

    def row(variant: str, seed: int) -> dict[str, Any]:
        return kept(
            options.out / "rows",
            [variant, *settings_of(variant, seed, options.steps)],
            code,
            lambda: run_one(variant, seed, options.steps, options.out),
        )

    with ThreadPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(lambda job: row(*job), jobs))
    rows = table(runs)
    names = ("sampled", "greedy", "shuffled", "gap")
    print_table(
        ("held-out, mean of seeds", *names, "rolled out", "seconds"),
        [
            (
                r["variant"],
                *(
                    f"{r[n]['before']:.3f} -> {r[n]['after']:.3f} [{r[n]['low']:.3f}, {r[n]['high']:.3f}]"
                    for n in names
                ),
                f"{r['rolled_out']:.2f}",
                f"{r['training_s']:.0f}",
            )
            for r in rows
        ],
    )
    if options.steps is None and options.seeds >= 3:
        print(
            write_results(
                "bench_tgrpo", {"table": rows, "runs": runs}, "torch", "transformers", "av"
            )
        )


if __name__ == "__main__":
    main()
