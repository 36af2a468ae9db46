"""Kill an embodied training run with SIGKILL again and again, resume it each time, and compare it with one nobody disturbed.

    OMP_NUM_THREADS=1 python -m scripts.torture_robot --minutes 6                     # the tiny simulator
    OMP_NUM_THREADS=1 python -m scripts.torture_robot --suite maniskill --minutes 6   # real worker processes with Vulkan

`mmrl train` runs as a process of its own with simulators in worker processes, once for each schedule: serial, pipelined with
`schedule.order: key`, pipelined as groups arrive. Kills come while it starts, rolls out, trains, evaluates, writes a checkpoint
or its report: before most of them the process is asked for its stack (SIGUSR2) until it does what is wanted. After each, its
workers must be gone and every checkpoint readable. In the end the run must equal the undisturbed one: metrics but for clocks,
every step once, evaluations, rollouts, alarms, weights, optimizer and run state, bit for bit; where groups are added as they
arrive, sums are rounded in another order in every run, killed or not, and the first step is compared to rounding instead.
Writes assets/results/torture_robot.json (torture_robot_maniskill.json); exit status 1 when a check fails.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from scripts._bench import parse, write_results
from scripts._torture_runs import (
    Kill,
    Run,
    half_written,
    killed,
    left_in,
    played_out,
    promises,
    rows_of,
    shared_memory,
    wait_for,
)
from scripts.torture_resume import differences

__all__ = ["SCHEDULES", "torture"]

SCHEDULES: dict[str, dict[str, Any]] = {
    "serial": {"kind": "serial"},
    "pipelined, order key": {"kind": "pipelined", "order": "key", "stages": 2},
    "pipelined, order arrival": {"kind": "pipelined", "order": "arrival", "stages": 2},
}

_TREE: dict[str, Any] = {
    "seed": 0,
    "threads": 1,
    "model": {"device": "cpu", "system": ""},
    "rollout": {"group_size": 4},
    "algorithm": {"max_rounds": 1},
    "optim": {"lr": 1e-3},
    "eval_states": 10,
    "eval": {
        "every": 2,
        "limit": 8,
        "samples": 1,
        "gallery": 2,
        "best_metric": "sampled/success_once",
    },
    "train": {"prompts_per_step": 3, "save_every": 1, "keep_last": 2},
}
_SUITES: dict[str, dict[str, Any]] = {
    "tiny": {
        "env": {
            "suite": "tiny",
            "tasks": ["reach"],
            "horizon": 12,
            "image_size": 32,
            "slots": 6,
            "workers": 2,
            "options": {"tolerance": 0.5},
        },
        "action": {"bins": 9, "chunk": 2, "repeat": 2},
    },
    "maniskill": {
        "env": {
            "suite": "maniskill",
            "tasks": ["PushCube-v1"],
            "horizon": 16,
            "image_size": 32,
            "slots": 4,
            "workers": 2,
            "options": {"dims": 4, "reward": "normalized_dense"},
        },
        "action": {"bins": 9, "chunk": 4, "repeat": 2},
        "rl": {"reward": "shaped"},
    },
}

_PHASES = {
    "checkpoint": ("in save_checkpoint",),
    "evaluation": ("in _evaluate",),
    "report": ("in build_report",),
    "update": ("in add", "in finish"),
    "rollout": ("in _train_step",),
    "worker start": ("in open_runtime",),
    "loading": ("in __init__",),
}


def prepare(folder: Path, suite: str, steps: int) -> dict[str, Any]:
    """Make an untrained policy for `suite` under `folder`; the configuration without a schedule."""
    import torch

    from mmrl.policy.tiny import TinySpec, build_tiny
    from mmrl.robotics.config import load_embodied
    from mmrl.robotics.contract import make_simulator
    from mmrl.robotics.load import load_vla
    from mmrl.robotics.source import env_specs

    build_tiny(
        TinySpec(
            arch="qwen2_5_vl",
            hidden=64,
            layers=2,
            heads=2,
            kv=1,
            vision_hidden=32,
            vision_layers=1,
            vision_heads=1,
            patch_size=8,
            min_patches=4,
            max_patches=4,
        ),
        folder / "model",
    )
    tree = {**_TREE, **_SUITES[suite], "dir": str(folder / "runs")}
    tree["train"] = {**tree["train"], "steps": steps}
    tree["model"] = {**tree["model"], "path": str(folder / "model")}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    config = load_embodied(folder / "run.yaml")
    simulator = make_simulator(env_specs(config)[0])
    torch.manual_seed(0)
    load_vla(config, space=simulator.action_space).save(folder / "policy")
    simulator.close()
    tree["model"] = {**tree["model"], "path": str(folder / "policy")}
    return tree


def _wait_for_moment(run: Run, rng: random.Random, start_s: float, patience_s: float) -> str:
    """Wait for a moment to kill in; what the process was doing, as its stack says."""
    wanted = rng.choice(
        (
            "start",
            "any",
            "checkpoint",
            "checkpoint",
            "evaluation",
            "evaluation",
            "rollout",
            "update",
            "report",
        )
    )
    if wanted == "start":
        time.sleep(rng.random() * start_s)
    elif wanted == "report" and run.steps - run.saved > 2:
        wanted = "checkpoint"
    if wanted != "start":
        target = run.saved + (0 if wanted == "report" else rng.randint(0, 2))
        wait_for(
            run,
            lambda: run.rows >= target and time.monotonic() - run.began > 0.7 * start_s,
            0.005,
            patience_s,
        )
    if wanted == "checkpoint":
        wait_for(run, lambda: run.saving, 0.0005, patience_s)
        time.sleep(rng.random() * 0.03)
        return "checkpoint" if run.saving else run.phase()
    if wanted == "any":
        time.sleep(rng.random() * 2.0)
    elif wanted != "start":
        wait_for(run, lambda: run.phase() == wanted, 0.02, patience_s)
        time.sleep(rng.random() * 0.05)
    return run.phase()


def _kills(run: Run, rng: random.Random, start_s: float, seconds: float) -> Iterator[Kill]:
    """Start, kill, resume ... for `seconds`; yields each kill and leaves the run finished."""
    end, resume = time.monotonic() + seconds, False
    while time.monotonic() < end:
        run.start(resume=resume)
        kill = killed(run, _wait_for_moment(run, rng, start_s, max(10.0, end - time.monotonic())))
        resume = run.path.exists()
        if kill is None:
            run.finish()
            return
        yield kill
    run.start(resume=resume)
    run.finish()


def _close(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether what two rows say about training agrees to rounding."""
    keys = [
        k
        for k in {*a, *b}
        if k.startswith("train/") and k != "train/logprob_gap/max" and k != "train/logprob_gap/mean"
    ]
    return all(
        a.get(k) == b.get(k) or math.isclose(a[k], b[k], rel_tol=1e-3, abs_tol=1e-5) for k in keys
    )


def _weights_apart(one: Path, other: Path) -> float:
    """Largest difference of a weight between the last checkpoints of two runs."""
    from safetensors.torch import load_file

    a, b = (
        load_file(max((run / "checkpoints").glob("step_*")) / "model.safetensors")
        for run in (one, other)
    )
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


def _torture_one(
    folder: Path, tree: dict[str, Any], schedule: str, rng: random.Random, seconds: float
) -> dict[str, Any]:
    """One schedule: an undisturbed run and a killed one, compared."""
    short = schedule.replace(", order ", "_")
    tree = {**tree, "schedule": SCHEDULES[schedule]}
    with (
        Run(folder, tree, f"calm_{short}", _PHASES) as calm,
        Run(folder, tree, f"killed_{short}", _PHASES) as torn,
    ):
        return _compared(calm, torn, schedule, rng, seconds)


def _compared(
    calm: Run, torn: Run, schedule: str, rng: random.Random, seconds: float
) -> dict[str, Any]:
    start_s, total_s = played_out(calm)
    print(
        f"{schedule}: undisturbed {total_s:.1f} s, of which {start_s:.1f} s until the first evaluation was there",
        flush=True,
    )
    kills, damage = [], []
    for kill in _kills(torn, rng, start_s, seconds):
        kills.append(kill)
        damage += half_written(torn.path, all_files=False)
        print(
            f"killed after {kill.seconds:6.2f} s: {kill.phase} (checkpoint {kill.checkpoint}; {kill.workers} processes gone "
            f"within {kill.gone_s:.2f} s)",
            flush=True,
        )
    identical = differences(calm.path, torn.path)
    checks = promises(torn, kills, damage)
    if "arrival" in schedule:
        checks["first_step_equal_to_rounding"] = _close(
            rows_of(calm.path)[0], rows_of(torn.path)[0]
        )
    else:
        checks.update({f"identical: {name}": same for name, same in identical.items()})
    return {
        "undisturbed_s": round(total_s, 1),
        "kills": [asdict(k) for k in kills],
        "damage": damage + half_written(torn.path, all_files=True),
        "largest_difference_of_a_weight": _weights_apart(calm.path, torn.path),
        "checks": checks,
    }


def torture(
    folder: Path,
    *,
    suite: str,
    minutes: float,
    seed: int,
    steps: int,
    schedules: tuple[str, ...] = tuple(SCHEDULES),
) -> dict[str, Any]:
    """The whole torture under `folder`; the record that is written."""
    rng, shared, tree = random.Random(seed), shared_memory(), prepare(folder, suite, steps)
    found = {}
    for schedule in schedules:
        found[schedule] = _torture_one(folder, tree, schedule, rng, 60.0 * minutes / len(schedules))
        for name, good in found[schedule]["checks"].items():
            print(f"{'ok' if good else 'FAILED':7} {name}", flush=True)
    left = left_in(shared)
    kills = [kill for one in found.values() for kill in one["kills"]]
    checks = {
        "no_shared_memory_left": not left,
        "killed": len(kills) > 0,
        "all_schedules": all(all(one["checks"].values()) for one in found.values()),
    }
    return {
        "what": "`mmrl train` with simulators in worker processes, killed with SIGKILL at chosen and random moments and "
        "resumed each time, compared with an undisturbed run",
        "suite": suite,
        "seed": seed,
        "steps": steps,
        "num_kills": len(kills),
        "phases": dict(sorted(Counter(k["phase"] for k in kills).items())),
        "left_in_shared_memory": left,
        "longest_until_workers_gone_s": max((k["gone_s"] for k in kills), default=0.0),
        "schedules": found,
        "checks": checks,
        "passed": all(checks.values()),
    }


def main() -> int:
    """Command line; exit status 1 when a check fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--suite", choices=tuple(_SUITES), default="tiny", help="where the policy acts"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=6.0,
        help="time in which runs are killed, all schedules together",
    )
    parser.add_argument("--steps", type=int, default=12, help="training steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument(
        "--keep", type=Path, default=None, help="work in this new folder and keep the runs"
    )
    args = parse(parser)
    folder = args.keep or Path(tempfile.mkdtemp(prefix="mmrl-torture-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        record = torture(
            folder, suite=args.suite, minutes=args.minutes, seed=args.seed, steps=args.steps
        )
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(
        f"{'passed' if record['passed'] else 'FAILED'}: {record['num_kills']} kills, {record['phases']}"
    )
    name = "torture_robot" if args.suite == "tiny" else f"torture_robot_{args.suite}"
    print(write_results(name, record, "numpy", "torch"))
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
