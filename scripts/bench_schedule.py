"""What overlapping rendering, inference and training is worth in a run, against the bound that the longest stage sets.

    python -m scripts.bench_schedule            (about 25 minutes, writes assets/results/bench_schedule*.json)
    python -m scripts.bench_schedule --quick    (about a minute, writes nothing)

Every row is a run of `mmrl train`'s own trainer on a configuration file's settings, on one device: inference and training use the
same weights and take turns, rendering overlaps with both.

Costed part: a picture, an observation decided for and a group's gradient cost a set time of sleep on top of what they really take
(scripts/_costed.py), so that any ratio of stages can be had on any machine. A step is 32 groups of 8 episodes (SimpleVLA-RL's) of
three decisions, on 16 environments in 4 processes, and 24 s of sleep. Systems, which alternate, are values of schedule.kind and
schedule.stages:

    serial        render, infer, render ...; then train
    pipelined_2   the policy decides for one half of the environments while the other renders, and each group is trained on when it
                  closes; same result as serial
    pipelined_4   the same with four stages of environments
    async_4       staleness 1: the next step is rolled out while this one trains; not the same result

bound: max(rendering, inference + training) / sum of the stages, the least share of the serial time that taking turns allows.
share: that longest part / measured step, 1 is perfect; stages as long as they were in the serial runs (what was set and what
a control step, a picture, a forward pass, a message and waking up really take). What is missing is filling (nothing to train on
until the first group closes) and draining (the last groups train when nothing is left to render), which cost more with fewer
groups per step (--groups), and milliseconds per batch.

Passes: the same for serial and async_4 with two passes of two optimizer steps over a step's groups, which are trained on when the
last has closed (bench_schedule_passes.json). The sleep of training is that of both passes together.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import statistics
import tempfile
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from scripts import _bench as bench

RATIOS = ((1, 1, 1), (2, 1, 1), (4, 2, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8))
SYSTEMS: dict[str, tuple[str, ...]] = {
    "serial": ("schedule.kind=serial",),
    "pipelined_2": ("schedule.kind=pipelined", "schedule.stages=2"),
    "pipelined_4": ("schedule.kind=pipelined", "schedule.stages=4"),
    "async_4": ("schedule.kind=async", "schedule.staleness=1", "schedule.stages=4"),
}
"""Name -> overrides of a configuration."""
PASSES_RATIOS = ((1, 1, 1), (4, 1, 2))
PASSES = (
    "algorithm.epochs=2",
    "algorithm.minibatches=2",
    "train.token_budget=600",  # micro-batches of about a group
)
STAGES = ("render", "infer", "train")
REAL: dict[str, str] = {
    name: f"scripts._schedule_real:{name}" for name in ("tiny", "maniskill", "libero")
}
"""Name -> module:function of a real simulator's measurement; the function takes (rounds, steps) and returns rows like `measure`."""


def measure(
    ratio: Sequence[float],
    *,
    seconds: float,
    groups: int,
    rounds: int,
    steps: int,
    systems: Sequence[str] = tuple(SYSTEMS),
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """One ratio: all systems, alternating. `seconds`: the sum of the stages; `overrides`: of all systems."""
    from scripts._costed import CostedRollouts, Costs, config_of, run

    render, infer, train = (seconds * r / sum(ratio) for r in ratio)
    costs = Costs(render, infer, train, groups=groups)
    found: dict[str, list[dict[str, Any]]] = {s: [] for s in systems}
    made: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="mmrl-schedule-") as folder:
        for order in bench.alternation(systems, rounds):
            for system in order:
                config = config_of(
                    costs, Path(folder), f"name={system}", *SYSTEMS[system], *overrides
                )
                summaries, settings = run(
                    config, steps, functools.partial(CostedRollouts, costs=costs)
                )
                found[system] += summaries
                made[system] = dataclasses.asdict(settings)
    serial = statistics.median(s["wall_s"] for s in found["serial"])
    busy = [
        statistics.median(s["wall_s"] * (1 - s["stages"][stage]["bubble"]) for s in found["serial"])
        for stage in STAGES
    ]
    return {
        "ratio": list(ratio),
        "groups": groups,
        "seconds": seconds,
        "measured_s": [round(b, 3) for b in busy],
        "systems": {
            system: {
                "overrides": [*SYSTEMS[system], *overrides],
                "executor": made[system],
                **_row(summaries, busy, serial),
            }
            for system, summaries in found.items()
        },
    }


def _row(
    summaries: Sequence[dict[str, Any]], busy: Sequence[float], serial: float
) -> dict[str, Any]:
    longest = max(busy[0], busy[1] + busy[2])
    walls = [s["wall_s"] for s in summaries]
    wall = statistics.median(walls)
    return {
        "step_s": bench.spread(walls),
        "steps_per_s": round(1 / wall, 4),
        "of_serial": round(wall / serial, 3),
        "bound": round(longest / sum(busy), 3),
        "share": round(longest / wall, 3),
        "over_s": round(wall - longest, 3),
        "bubble": {
            stage: round(statistics.median(s["stages"][stage]["bubble"] for s in summaries), 3)
            for stage in STAGES
        },
        "train_queue": {
            k: round(
                statistics.median(
                    s["queues"].get("train queue", {}).get(k, 0.0) for s in summaries
                ),
                2,
            )
            for k in ("mean", "max")
        },
    }


def report(results: Sequence[dict[str, Any]]) -> None:
    """Print the tables."""
    for r in results:
        print(
            f"\nrender : infer : train = {':'.join(f'{x:g}' for x in r['ratio'])}, {r['groups']} groups per step, "
            f"{r['seconds']:g} s of work; measured {', '.join(f'{b:.2f}' for b in r['measured_s'])} s"
        )
        header = (
            "",
            "s/step",
            "steps/s",
            "of serial",
            "bound",
            "share",
            "over s",
            "idle render",
            "infer",
            "train",
        )
        bench.print_table(
            header,
            [
                (
                    name,
                    f"{s['step_s']['median']:.2f}",
                    f"{s['steps_per_s']:.3f}",
                    f"{s['of_serial']:.3f}",
                    f"{s['bound']:.3f}",
                    f"{s['share']:.3f}",
                    f"{s['over_s']:.2f}",
                    *(f"{s['bubble'][k]:.0%}" for k in STAGES),
                )
                for name, s in r["systems"].items()
            ],
        )


def costed(o: argparse.Namespace) -> None:
    """All ratios; written unless --quick."""
    ratios, rounds, steps, seconds = (
        ((RATIOS[0], RATIOS[3]), 1, 1, 4.0) if o.quick else (RATIOS, o.rounds, o.steps, o.seconds)
    )
    groups = sorted(o.groups)
    results = []
    for count, ratio in [
        *((n, RATIOS[0]) for n in groups[:-1] if not o.quick),
        *((groups[-1], r) for r in ratios),
    ]:
        results.append(
            measure(
                ratio,
                seconds=seconds * count / groups[-1],
                groups=count,
                rounds=rounds,
                steps=steps,
            )
        )
        report(results[-1:])
    if not o.quick:
        print(bench.write_results("bench_schedule", {"costed": results}, "torch"))


def passes(o: argparse.Namespace) -> None:
    """Groups that are collected and trained on in several passes; written unless --quick."""
    # in the first measured step the next one's episodes have no training to overlap with yet: a median over four leaves it out
    rounds, steps, seconds = (1, 1, 4.0) if o.quick else (o.rounds, max(4, o.steps), o.seconds)
    results = []
    for ratio in PASSES_RATIOS[: 1 if o.quick else None]:
        results.append(
            measure(
                ratio,
                seconds=seconds,
                groups=max(o.groups),
                rounds=rounds,
                steps=steps,
                systems=("serial", "async_4"),
                overrides=PASSES,
            )
        )
        report(results[-1:])
    if not o.quick:
        print(bench.write_results("bench_schedule_passes", {"costed": results}, "torch"))


def kept_rows(
    found: Mapping[str, Any], here: Mapping[str, Any], systems: Collection[str]
) -> dict[str, Any]:
    """Rows of a recorded result that may stand beside rows measured `here`: of the same machine, and of the same `systems`."""
    same = all(found["machine"].get(k) == here[k] for k in ("cpu", "cores", "memory_gib"))
    return {
        name: row
        for name, row in found.get("real", {}).items()
        if same and set(row["systems"]) == set(systems)
    }


def real(o: argparse.Namespace) -> None:
    """Real simulators and a real policy; simulators that are not measured now keep their rows if those are of this machine and of
    the systems measured here. Each row says when it was measured: the file's own date and load are those of the last one."""
    file = bench.RESULTS / "bench_schedule_real.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"machine": {}}
    rows = kept_rows(
        found, bench.machine(), importlib.import_module("scripts._schedule_real").SYSTEMS
    )
    for name in o.real:
        module, _, function = REAL[name].partition(":")
        rows[name] = getattr(importlib.import_module(module), function)(o.rounds, o.steps)
        rows[name].update(
            rounds=o.rounds,
            steps=o.steps,
            date=datetime.now(timezone.utc).date().isoformat(),
            load_1min=bench.machine()["load_1min"],
        )
        print(f"\n{name}, {rows[name]['episodes_per_step']} episodes per step")
        bench.print_table(
            ("", "s/step", "of serial", "bound", "idle render", "infer", "train"),
            [
                (
                    system,
                    f"{row['step_s']['median']:.2f}",
                    f"{row['of_serial']:.3f}",
                    f"{row['bound']:.3f}",
                    *(f"{row['bubble'][k]:.0%}" for k in STAGES),
                )
                for system, row in rows[name]["systems"].items()
            ],
        )
    print(
        bench.write_results("bench_schedule_real", {"real": rows}, "torch", "mani_skill", "mujoco")
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="costed: two ratios, one round, four seconds of work; writes nothing",
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1, help="measured steps per run")
    parser.add_argument(
        "--seconds",
        type=float,
        default=24.0,
        help="sum of the stages per step of the largest number of groups",
    )
    parser.add_argument(
        "--groups",
        type=int,
        nargs="+",
        default=[8, 32],
        help="groups per step; the first ratio is run with each, at the same work per group",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        default=["costed", "passes", "real"],
        choices=("costed", "passes", "real"),
    )
    parser.add_argument(
        "--real",
        nargs="+",
        default=sorted(REAL),
        choices=sorted(REAL),
        help="simulators to measure",
    )
    o = bench.parse(parser, least=("groups",))
    if "costed" in o.parts:
        costed(o)
    if "passes" in o.parts:
        passes(o)
    if "real" in o.parts and not o.quick:
        real(o)


if __name__ == "__main__":
    main()
