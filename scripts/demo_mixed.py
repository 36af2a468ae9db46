"""One run, eight tasks: grounding, detection, counting, classification, choice, boolean, reading and clicking.

    python -m scripts.demo_mixed [--seed 1] [section.key=value ...]          (two CPU cores, under a quarter of an hour)

Every answer is scored by its own task's rubric. Generates pictures, trains from assets/tiny_vlm_mixed with
configs/mixed_tiny.yaml, prints every task's held-out score before and after with intervals and whether it fell
significantly (paired, 95 %), and the path of the report. `--record` also writes assets/results/demo_mixed.json, which the
page of results quotes. Exit status 1 when a task fell significantly.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmrl.evaluation.stats import paired_gain
from mmrl.registry import resolve_task
from mmrl.tasks.playground import KINDS, make_playground
from scripts._bench import parse, print_table, write_results

ROOT = Path(__file__).resolve().parent.parent


def make_data(folder: Path, *, train: int = 800, held_out: int = 60) -> None:
    """Training and held-out pictures of every task; generated from seeds, so they are the same everywhere."""
    for name, count, seed in (("train", train, 31), ("eval", held_out, 32)):
        for task in KINDS:
            if not (folder / name / task / "data.jsonl").exists():
                make_playground(
                    folder / name / task, task, count, seed, 112, f"mixed-{name}-{task}-"
                )


def _scores(predictions: Path, mode: str) -> dict[str, dict[str, list[float]]]:
    """source -> sample -> its headline metric in each completion."""
    out: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with predictions.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if row["mode"] == mode:
                name = resolve_task(row["task"]).headline
                out[row["source"]][row["id"]].append(row["score"]["metrics"].get(name, 0.0))
    return out


def before_and_after(run: Path) -> dict[str, Any]:
    """mode -> source -> metric, before, after and paired gain with its interval, from the run's own predictions."""
    folders = sorted((run / "eval").glob("step_*"))
    headlines = json.loads((folders[-1] / "results.json").read_text(encoding="utf-8"))["headlines"][
        "per_source"
    ]
    table: dict[str, Any] = {}
    for mode in ("sampled", "greedy"):
        first, last = (
            _scores(folder / "predictions.jsonl", mode) for folder in (folders[0], folders[-1])
        )
        for source in sorted(last):
            gain = paired_gain(first[source], last[source])
            assert gain is not None, (
                f"source {source} shares no sample between the first and the last evaluation"
            )
            before, after = (
                sum(sum(v) / len(v) for v in s[source].values()) / len(s[source])
                for s in (first, last)
            )
            table.setdefault(mode, {})[source] = {
                "metric": headlines[source],
                "samples": len(last[source]),
                "before": before,
                "after": after,
                "gain": gain.mean,
                "low": gain.low,
                "high": gain.high,
                "fell": gain.high < 0,
            }
    return table


def print_gains(table: dict[str, Any]) -> None:
    """The table of `before_and_after` for people."""
    rows = [
        (
            f"{source} ({row['metric']}, {mode})",
            f"{row['before']:.3f}",
            f"{row['after']:.3f}",
            f"{row['gain']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]",
            "FELL" if row["fell"] else "",
        )
        for mode, sources in table.items()
        for source, row in sources.items()
    ]
    print_table(("held-out", "before", "after", "gain", ""), rows)


def run_demo(
    name: str, description: str | None, generate: Callable[[], None], *libraries: str
) -> int:
    """The command line of a demo: generate data, train with configs/NAME_tiny.yaml, print the gains, record them as
    assets/results/demo_NAME.json when asked. Returns 1 when a task fell significantly."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--record", action="store_true", help=f"write assets/results/demo_{name}.json"
    )
    parser.add_argument("overrides", nargs="*", help="configuration overrides")
    options = parse(parser)
    began = time.time()
    print("generating data in runs/ ...", flush=True)
    generate()
    from mmrl.cli.run import train_command
    from mmrl.config import load_config

    run = train_command(
        ROOT / "configs" / f"{name}_tiny.yaml",
        [f"seed={options.seed}", *options.overrides],
        resume=False,
        overwrite=True,
        quiet=False,
    )
    seconds = time.time() - began
    table = before_and_after(run)
    print_gains(table)
    print(f"done in {seconds / 60:.1f} minutes; report: {run / 'report.html'}")
    if options.record:
        used = load_config(run / "config.yaml")
        info = json.loads((run / "run.json").read_text(encoding="utf-8"))
        facts = {
            "seconds": round(seconds),
            "seed": options.seed,
            "steps": info["total_steps"],
            "prompts_per_step": used.train.prompts_per_step,
            "group_size": used.rollout.group_size,
            "held_out": table,
        }
        print(
            f"recorded in {write_results(f'demo_{name}', facts, 'torch', 'transformers', *libraries)}"
        )
    return int(any(row["fell"] for sources in table.values() for row in sources.values()))


def main() -> int:
    """Command line."""
    return run_demo("mixed", __doc__, lambda: make_data(ROOT / "runs" / "mixed_data"))


if __name__ == "__main__":
    raise SystemExit(main())
