"""When and where: temporal grounding and tracking learn on generated clips.

    python -m scripts.demo_video [--seed 1] [section.key=value ...]          (two CPU cores, some minutes)

Generates H.264 clips, trains from assets/tiny_video with configs/video_tiny.yaml, prints both tasks' held-out score before and
after with intervals (paired, 95 %) and the path of the report, whose filmstrips show gold and predicted spans and boxes.
`--record` also writes assets/results/demo_video.json, which the README quotes. Exit status 1 when a task fell significantly.
"""
from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from assets.make_tiny_video import TASKS, clips
from scripts._bench import write_results
from scripts.demo_mixed import ROOT, before_and_after, print_gains

FOLDER = ROOT / "runs" / "video_data"


def make_data(folder: Path = FOLDER, *, train: int = 600, held_out: int = 80) -> None:
    """Training and held-out clips of every task; generated from seeds, so they are the same everywhere."""
    for name, count, seed in (("train", train, 41), ("eval", held_out, 42)):
        for task in TASKS:
            if not (folder / name / task / "data.jsonl").exists():
                clips(folder / name / task, task, count, seed, f"video-{name}-{task}-")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="write assets/results/demo_video.json")
    parser.add_argument("overrides", nargs="*", help="configuration overrides")
    options = parser.parse_args()
    began = time.time()
    print("generating clips in runs/video_data ...", flush=True)
    make_data()
    from mmrl.cli.run import train_command

    run = train_command(ROOT / "configs" / "video_tiny.yaml", [f"seed={options.seed}", *options.overrides], resume=False,
                        overwrite=True, quiet=False)
    seconds = time.time() - began
    table = before_and_after(run)
    print_gains(table)
    print(f"done in {seconds / 60:.1f} minutes; report: {run / 'report.html'}")
    if options.record:
        from mmrl.config import load_config

        used = load_config(run / "config.yaml")
        info = json.loads((run / "run.json").read_text(encoding="utf-8"))
        facts = {"seconds": round(seconds), "seed": options.seed, "steps": info["total_steps"],
                 "prompts_per_step": used.train.prompts_per_step, "group_size": used.rollout.group_size, "held_out": table}
        print(f"recorded in {write_results('demo_video', facts, 'torch', 'transformers', 'av')}")
    return int(any(row["fell"] for sources in table.values() for row in sources.values()))


if __name__ == "__main__":
    raise SystemExit(main())
