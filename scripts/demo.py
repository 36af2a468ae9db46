"""The demo: a tiny Qwen2.5-VL learns to draw tighter boxes with GRPO, on the CPU, in minutes.

    make demo            (or python -m scripts.demo [--seed 1] [section.key=value ...])

Generates scenes, trains from assets/tiny_vlm with configs/demo.yaml, prints held-out results before and after with
intervals and the path of the report. `--record` also writes them to assets/results/demo.json, which the README quotes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from mmrl.cli.demo import make_data
from scripts._bench import parse, write_results

ROOT = Path(__file__).resolve().parent.parent

__all__ = ["ROOT", "make_data", "summary"]


def summary(run: Path) -> dict[str, object]:
    """Before and after, from the run's own files."""
    folders = sorted((run / "eval").glob("step_*"))
    first, last = (
        json.loads((f / "results.json").read_text(encoding="utf-8"))
        for f in (folders[0], folders[-1])
    )
    names = ("iou", "acc@0.5", "acc@0.75", "parse_rate")
    return {
        mode: {name: {"before": first[mode][name], "after": last[mode][name]} for name in names}
        for mode in ("sampled", "greedy")
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="write assets/results/demo.json")
    parser.add_argument("overrides", nargs="*", help="configuration overrides")
    options = parse(parser)
    began = time.time()
    print("generating scenes in runs/demo_data ...", flush=True)
    make_data(ROOT / "runs" / "demo_data")
    from mmrl.cli.run import train_command

    run = train_command(
        ROOT / "configs" / "demo.yaml",
        [f"seed={options.seed}", *options.overrides],
        resume=False,
        overwrite=True,
        quiet=False,
    )
    seconds = time.time() - began
    print(f"done in {seconds / 60:.1f} minutes")
    if options.record:
        info = json.loads((run / "run.json").read_text(encoding="utf-8"))
        facts = {
            "seconds": round(seconds),
            "seed": options.seed,
            "steps": info["total_steps"],
            "held_out": summary(run),
        }
        print(f"recorded in {write_results('demo', facts, 'torch', 'transformers')}")


if __name__ == "__main__":
    main()
