"""A robot policy learns from success alone: GRPO on a tiny vision-language-action model, on the CPU.

    python -m scripts.demo_robot                      # the tiny simulator of our own: minutes, no graphics libraries
    python -m scripts.demo_robot maniskill            # PushCube-v1 in ManiSkill 3, software rendering: eight minutes
    python -m scripts.demo_robot maniskill_pull       # the same recipe on PullCube-v1
    python -m scripts.demo_robot maniskill_48         # PushCube-v1 with 48 steps instead of 14: time for a second try
    python -m scripts.demo_robot libero               # two tasks of libero_goal, cloned first: two hours
    python -m scripts.demo_robot libero_stove         # one of them, from a weaker clone, for twice as long: two hours
    python -m scripts.demo_robot maniskill --seeds 3 --record

Trains the warm-started policy of assets/ with configs/robot_tiny.yaml or configs/maniskill_tiny.yaml, prints success on 100 fresh
initial states before and after with 95 % intervals, and the path of the report with curves and videos. For LIBERO
(configs/libero_tiny.yaml) the scripted expert is recorded and cloned first, and `mmrl eval` plays the 300 control steps of suite
libero_goal before and after, from the rows of each task's init file that neither cloning nor training saw. `--record` writes
assets/results/demo_robot_SUITE.json, which docs/results.md quotes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts._bench import parse, write_results

ROOT = Path(__file__).resolve().parent.parent
RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "tiny": ("robot_tiny", ()),
    "maniskill": ("maniskill_tiny", ()),
    "maniskill_48": ("maniskill_tiny", ("env.horizon=48",)),
    "maniskill_pull": (
        "maniskill_tiny",
        ("env.tasks=[PullCube-v1]", "vla.prompt=pull", "model.path=assets/tiny_vla_pull"),
    ),
    "libero": ("libero_tiny", ()),
    # one task alone, from a clone that solves half of its states
    "libero_stove": (
        "libero_tiny",
        (
            "env.tasks=[libero_goal/7]",
            "demos.steps=200",
            "optim.lr=4e-4",
            "optim.schedule=constant",
            "train.steps=40",
            "eval.samples=10",
        ),
    ),
}
"""Suite -> recipe of configs/ and what is changed in it."""

PACKAGES = {"maniskill": ("mani_skill", "sapien"), "libero": ("hf-libero", "robosuite", "mujoco")}
"""Simulator -> packages whose versions a record names."""

SUITES = {"libero": "libero_goal", "libero_stove": "libero_goal"}
"""Recipes whose policy is cloned first, and trained for fewer control steps than the published ones of this suite, whose rules its
evaluations follow."""


def cloned(recipe: str, overrides: list[str]) -> Path:
    """The policy that the recipe's expert is cloned into, made where it is not there yet; relative, as records name it."""
    from mmrl.cli.run import sft_command

    clone = Path("runs") / f"demo_{recipe}_clone"
    if (clone / "vla.json").is_file():
        print(
            f"trains the policy that was cloned earlier into {clone}; remove the folder to clone it anew"
        )
    else:
        name, changes = RECIPES[recipe]
        recipe_file = ROOT / "configs" / f"{name}.yaml"
        sft_command(recipe_file, [*changes, *overrides], clone, overwrite=True, quiet=False)
    return clone


def evaluated(recipe: str, overrides: list[str], policy: Path, out: Path) -> Path:
    """`mmrl eval` of a policy on the run's tasks by the rules of its suite; the folder of the results."""
    from mmrl.evaluation.progress import PARTIAL
    from mmrl.robotics.config import load_embodied

    found = out / SUITES[recipe]
    if (found / "results.json").is_file():  # of an earlier call
        return found
    name, changes = RECIPES[recipe]
    config = load_embodied(ROOT / "configs" / f"{name}.yaml", [*changes, *overrides])
    command = ["eval", str(policy), "--suite", SUITES[recipe], "--out", str(out)]
    command += ["--resume"] * (out / PARTIAL).exists()
    command += ["--samples", str(config.eval.samples), f"env.tasks={json.dumps(config.env.tasks)}"]
    command += [f"env.options={json.dumps(config.env.options)}"]
    command += [f"env.slots={config.env.slots}", f"env.workers={config.env.workers}"]
    subprocess.run([sys.executable, "-m", "mmrl.cli.main", *command], check=True)
    return found


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The run's metrics, step by step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def gained(first: Path, last: Path) -> dict[str, Any]:
    """Paired gains of success over the states that both evaluations played, with 95 % intervals, of all tasks and of each."""
    from mmrl.report.load import Run, load_eval
    from mmrl.report.rows import part_gains, task_of

    before, after = (load_eval(0, folder, Run(folder)) for folder in (first, last))
    assert before is not None and after is not None, "both wrote results.json"
    everything = part_gains(before, after, lambda _: "", "success_once")
    parts = part_gains(before, after, task_of, "success_once")
    return {
        "held_out": {mode: asdict(gain) for (mode, _), gain in everything.items()},
        "tasks": {
            task: {mode: asdict(gain) for (mode, name), gain in parts.items() if name == task}
            for task in dict.fromkeys(name for _, name in parts)
        },
    }


def outcome(run: Path, seconds: float, evaluations: Sequence[Path] = ()) -> dict[str, Any]:
    """Before and after, and what it took, from the run's own files, or from those of two other evaluations."""
    folders = evaluations or sorted((run / "eval").glob("step_*"))
    first, last = (
        json.loads((f / "results.json").read_text(encoding="utf-8"))
        for f in (folders[0], folders[-1])
    )
    rows = steps_of(run)
    return {
        "seed": first["protocol"]["seed"],
        "steps": len(rows),
        "episodes": int(sum(r["train/episodes"] for r in rows)),
        "training_s": round(sum(r["time/total"] for r in rows), 1),
        "wall_s": round(seconds, 1),
        "protocol": last["protocol"],
        "held_out": {
            mode: {
                name: {"before": first[mode][name], "after": last[mode][name]}
                for name in ("success_once", "steps")
            }
            for mode in ("sampled", "greedy")
        },
        "tasks": {
            task: {
                mode: {"before": first["per_task"][task][key], "after": row[key]}
                for mode, key in (("sampled", "sampled/success_once"), ("greedy", "success_once"))
            }
            for task, row in last["per_task"].items()
        },
        "gains": gained(folders[0], folders[-1]),
    }


def main() -> int:
    """Command line; exit status 1 when a run's sampled success fell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", nargs="?", default="tiny", choices=tuple(RECIPES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    parser.add_argument(
        "--name", default="", help="added to the names of the runs and of the recorded file"
    )
    parser.add_argument(
        "--again", action="store_true", help="evaluate and record runs of earlier calls"
    )
    parser.add_argument("overrides", nargs="*", help="configuration overrides")
    options = parse(parser)
    from mmrl.cli.run import train_command

    recipe, changes = RECIPES[options.suite]
    clone = cloned(options.suite, options.overrides) if options.suite in SUITES else None
    if clone is not None:
        changes = (*changes, f"model.path={clone}")
    runs = []
    for seed in range(options.seeds):
        began, name = time.time(), f"demo_{options.suite}{options.name}_{seed}"
        if options.again:
            run = Path("runs") / name
            seconds = sum(row["time/total"] for row in steps_of(run))
        else:
            run = train_command(
                ROOT / "configs" / f"{recipe}.yaml",
                [*changes, f"seed={seed}", f"name={name}", *options.overrides],
                resume=False,
                overwrite=True,
                quiet=False,
            )
            seconds = time.time() - began
        evaluations = []
        if clone is not None:
            last = max((run / "checkpoints").glob("step_*"))
            evaluations = [
                evaluated(options.suite, options.overrides, policy, run / "eval" / when)
                for when, policy in (("before", clone), ("after", last))
            ]
        runs.append(outcome(run, seconds, evaluations))
        found = runs[-1]["held_out"]
        for mode, table in found.items():
            a, b = table["success_once"]["before"], table["success_once"]["after"]
            print(
                f"seed {seed}, {mode}: {a['mean']:.2f} [{a['low']:.2f}, {a['high']:.2f}] -> {b['mean']:.2f} "
                f"[{b['low']:.2f}, {b['high']:.2f}] in {runs[-1]['wall_s'] / 60:.1f} minutes",
                flush=True,
            )
    if options.record:
        facts = {"overrides": [*changes, *options.overrides], "runs": runs}
        print(
            write_results(
                f"demo_robot_{options.suite}{options.name}",
                facts,
                "torch",
                "transformers",
                *PACKAGES.get(options.suite.partition("_")[0], ()),
            )
        )
    sampled = [r["held_out"]["sampled"]["success_once"] for r in runs]
    return int(any(s["after"]["mean"] < s["before"]["mean"] for s in sampled))


if __name__ == "__main__":
    raise SystemExit(main())
