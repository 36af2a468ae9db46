"""Clicking on generated screens: the GUI recipe at toy size, on pages that headless Chromium renders.

    python -m scripts.demo_gui [--seed 1] [section.key=value ...]          (two CPU cores, a few minutes; needs Chromium)

Renders pages with mmrl.tasks.pages, trains from assets/tiny_vlm_mixed with configs/gui.yaml and SETTINGS, prints the share of
clicks inside the named element before and after with intervals, and the path of the report. `--record` also writes
assets/results/demo_gui.json, which configs/gui.yaml and docs/results.md quote. Exit status 1 when it fell significantly.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from mmrl.tasks.pages import make_pages
from scripts._bench import parse, print_table, write_results
from scripts.demo_mixed import before_and_after

ROOT = Path(__file__).resolve().parent.parent
SIZE = 112
_ASK = "prompt: 'click {question}', reply: point, answer_format: answer"  # as the tiny model was warm-started
SETTINGS = (
    "name=gui_tiny",
    "threads=1",
    "model.path=assets/tiny_vlm_mixed",
    "model.system=''",
    "model.freeze=[]",
    "data.train.0.path=runs/gui_data/train",
    f"data.train.0.params={{preset: null, mode: gaussian, {_ASK}}}",
    "data.eval.0.path=runs/gui_data/eval",
    f"data.eval.0.params={{{_ASK}}}",
    "rollout.max_new_tokens=24",
    "optim.lr=5e-5",
    "optim.schedule=linear",
    "optim.min_lr_ratio=0.2",
    "optim.warmup_steps=5",
    "algorithm.kl.coef=0",
    "algorithm.filter.key=reward",
    "train.prompts_per_step=16",
    "train.steps=80",
    "eval.every=40",
    "eval.samples=4",
)
"""What differs from configs/gui.yaml."""


def make_data(folder: Path, *, train: int = 1000, held_out: int = 100) -> None:
    """Training and held-out pages in style `simple`, from seeds of their own."""
    for name, count, seed in (("train", train, 0), ("eval", held_out, 1)):
        if not (folder / name / "screenspot_web.json").exists():
            make_pages(folder / name, count, seed, SIZE, SIZE, "simple")


def results(run: Path, seed: int, seconds: float) -> dict[str, Any]:
    """What is recorded of a finished run; `held_out` is before_and_after's row of each mode."""
    from mmrl.config import load_config

    used = load_config(run / "config.yaml")
    held_out = {
        mode: next(iter(sources.values())) for mode, sources in before_and_after(run).items()
    }
    return {
        "seconds": round(seconds),
        "seed": seed,
        "steps": used.train.steps,
        "model": used.model.path,
        "prompts_per_step": used.train.prompts_per_step,
        "group_size": used.rollout.group_size,
        "samples": used.eval.samples,
        "held_out": held_out,
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="write assets/results/demo_gui.json")
    parser.add_argument("overrides", nargs="*", help="configuration overrides")
    options = parse(parser)
    began = time.time()
    print("rendering pages in runs/gui_data ...", flush=True)
    make_data(ROOT / "runs" / "gui_data")
    from mmrl.cli.run import train_command

    run = train_command(
        ROOT / "configs" / "gui.yaml",
        [*SETTINGS, f"seed={options.seed}", *options.overrides],
        resume=False,
        overwrite=True,
        quiet=False,
    )
    seconds = time.time() - began
    facts = results(run, options.seed, seconds)
    table = facts["held_out"]
    print_table(
        ("held-out", "before", "after", "gain"),
        [
            (
                f"{row['metric']}, {mode}",
                f"{row['before']:.3f}",
                f"{row['after']:.3f}",
                f"{row['gain']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]",
            )
            for mode, row in table.items()
        ],
    )
    print(f"done in {seconds / 60:.1f} minutes; report: {run / 'report.html'}")
    if options.record:
        print(f"recorded in {write_results('demo_gui', facts, 'torch', 'transformers')}")
    return int(any(row["fell"] for row in table.values()))


if __name__ == "__main__":
    raise SystemExit(main())
