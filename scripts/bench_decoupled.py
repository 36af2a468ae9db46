"""Generation beside training: `mmrl train` with a generator process against the serial run, stage by stage.

    python -m scripts.bench_decoupled            (half an hour, most of it sleep; writes assets/results/bench_decoupled.json)
    python -m scripts.bench_decoupled --keep     (goes on after an interruption)
    python -m scripts.bench_decoupled --quick    (about two minutes, writes nothing that stands for a record)

Every row is a run of `mmrl train`'s own trainer. `serial` rolls a step out and then trains it; `decoupled` sets
engine.generator.kind process, schedule.kind async and schedule.staleness 1: a process with a copy of the weights rolls the next
step out while this one trains. Systems alternate, each run in a process of its own.

costed    each stage sleeps so many seconds per group on top of what it really takes, so that any ratio of stages can be had, on a
          busy machine too: prompts (the demo's model and data; generation : training), robots (the tiny simulator;
          rendering : inference : training, two stages of environments) and ManiSkill (inference : training; PushCube-v1 is
          stepped and rendered as it is)
real      the demo's model and data without any sleep, one thread per process: one core generates, another trains; by mmrl's own
          engine, by vLLM's CPU build and by an engine in a Ray actor. Two idle cores are needed for the numbers to mean
          anything: the file says how busy the machine was.

share: the longest stage / the measured step, 1 is perfect. Stages are those of the serial runs: what was set and what model,
encoder, messages and optimizer take. A step counts from its end to the end of the one before, and the first two do not: they start
processes and fill the pipeline; nor does the last, with which nothing is rolled out.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts import _bench as bench

SYSTEMS: dict[str, tuple[str, ...]] = {
    "serial": ("schedule.kind=serial",),
    "decoupled": (
        "schedule.kind=async",
        "schedule.staleness=1",
        "engine.generator.kind=process",
    ),
}
_VLLM = ("engine.rollout=vllm", "engine.vllm.kv_cache_gib=0.25")
_RAY = ("engine.workers=ray", "engine.ray.cpus=2", "engine.ray.rollout_actors=1")
CASES: dict[str, tuple[str, tuple[float, ...], tuple[str, ...]]] = {
    "prompts 1:1": ("prompts", (1, 1), ()),
    "prompts 2:1": ("prompts", (2, 1), ()),
    "prompts 1:3": ("prompts", (1, 3), ()),
    "robots 1:1:1": ("robots", (1, 1, 1), ()),
    "robots 2:1:3": ("robots", (2, 1, 3), ()),
    "ManiSkill 1:1": ("maniskill", (1, 1), ()),
    "prompts, real": ("prompts", (), ()),
    "prompts with vLLM, real": ("prompts", (), _VLLM),
    "prompts with Ray, real": ("prompts", (), _RAY),
}
"""Name -> what is rolled out, the ratio of its stages (none: as they are), and overrides of both systems."""
ROWS = bench.ROOT / "runs" / "bench_decoupled"
_SKIPPED = 2
_GROUPS = 8


def prompts(
    system: str, ratio: Sequence[float], seconds: float, steps: int, given: Sequence[str]
) -> dict[str, Any]:
    """A run of the demo's model, with sleeps of so many seconds per step in all."""
    from mmrl.cli.demo import make_data
    from mmrl.config import load_config
    from scripts._costed_prompts import CostedPrompts, PromptCosts

    data = bench.ROOT / "runs" / "demo_data"
    make_data(data)
    with tempfile.TemporaryDirectory(prefix="mmrl-decoupled-") as folder:
        # as many groups at once as the serial run's, or decoding would cost more than the stages that were measured there
        wave = f"schedule.wave={_GROUPS}" if system != "serial" else "schedule.wave=null"
        quiet = (f"dir={folder}", "data.eval=[]", "eval.every=0", "train.save_every=0", wave)
        size = (f"train.prompts_per_step={_GROUPS}", f"train.steps={steps}")
        config = load_config(
            bench.ROOT / "configs" / "demo.yaml", [*quiet, *size, *SYSTEMS[system], *given]
        )
        generate, train = (seconds * r / sum(ratio) / _GROUPS for r in ratio) if ratio else (0, 0)
        costs = PromptCosts(generate, train)
        return _timed(
            config,
            functools.partial(CostedPrompts, costs=costs),
            {"generation": ("time/rollout", "time/reward"), "training": ("time/update",)},
            {"training": train * _GROUPS},
        )


def robots(
    system: str, ratio: Sequence[float], seconds: float, steps: int, given: Sequence[str]
) -> dict[str, Any]:
    """A run in the tiny simulator, with sleeps of so many seconds per step in all."""
    from scripts._costed import CostedRollouts, Costs, config_of

    render, infer, train = (seconds * r / sum(ratio) for r in ratio)
    costs = Costs(render, infer, train, groups=_GROUPS)
    # two halves take turns, as of ManiSkill; more would be smaller batches than the serial run's
    stages = "schedule.stages=2" if system != "serial" else "schedule.stages=1"
    with tempfile.TemporaryDirectory(prefix="mmrl-decoupled-") as folder:
        config = config_of(
            costs, Path(folder), f"train.steps={steps}", stages, *SYSTEMS[system], *given
        )
        return _timed(
            config,
            functools.partial(CostedRollouts, costs=costs),
            {"inference": ("time/rollout",), "training": ("time/update",)},
            {"training": train, "rendering": render},
        )


def maniskill(
    system: str, ratio: Sequence[float], seconds: float, steps: int, given: Sequence[str]
) -> dict[str, Any]:
    """A run of the ManiSkill demo: its episodes as they are, with sleeps of so many seconds per step in inference and training."""
    from mmrl.robotics.config import load_embodied
    from scripts._costed import QUIET, CostedRollouts, Costs

    infer, train = (seconds * r / sum(ratio) for r in ratio)
    costs = Costs(0.0, infer, train, groups=_GROUPS, members=2, decisions=2, slots=8, workers=1)
    stages = "schedule.stages=2" if system != "serial" else "schedule.stages=1"
    with tempfile.TemporaryDirectory(prefix="mmrl-decoupled-") as folder:
        size = (
            f"dir={folder}",
            f"train.steps={steps}",
            f"train.prompts_per_step={_GROUPS}",
            f"rollout.group_size={costs.members}",
            f"env.slots={costs.slots}",
            f"env.workers={costs.workers}",
            "algorithm.epochs=1",
            "algorithm.minibatches=1",
        )
        config = load_embodied(
            bench.ROOT / "configs" / "maniskill_tiny.yaml",
            [*QUIET, *size, stages, *SYSTEMS[system], *given],
        )
        found = _timed(
            config,
            functools.partial(CostedRollouts, costs=costs),
            {"inference": ("time/rollout",), "training": ("time/update",)},
            {"training": train},
        )
    # a serial step has one stage at a time: what is neither is the simulators'
    found["busy"]["simulators"] = statistics.median(found["walls"]) - sum(found["busy"].values())
    return found


def _timed(
    config: Any,
    make: Any,
    stages: dict[str, tuple[str, ...]],
    slept: dict[str, float],
) -> dict[str, Any]:
    """Seconds between the ends of steps, and of each stage; `slept` is what the rows' own clocks do not see."""
    from mmrl.training.trainer import Trainer

    ends: list[float] = []
    rows: list[dict[str, Any]] = []

    def note(kind: str, row: Any) -> None:
        if kind == "step":
            ends.append(time.monotonic())
            rows.append(row)

    Trainer(config, overwrite=True, on_event=note, rollouts=make).fit()
    walls = [b - a for a, b in pairwise(ends)][_SKIPPED - 1 : -1]
    counted = rows[_SKIPPED:-1]
    busy = {
        stage: statistics.median(sum(r[name] for name in names) for r in counted)
        for stage, names in stages.items()
    }
    for stage, seconds in slept.items():
        busy[stage] = busy.get(stage, 0.0) + seconds
    return {
        "walls": walls,
        "busy": busy,
        "staleness": max((r.get("train/staleness", 0.0) for r in counted), default=0.0),
    }


def case(name: str, rounds: int, steps: int, seconds: float) -> dict[str, Any]:
    """Both systems of a case, alternating."""
    found: dict[str, list[dict[str, Any]]] = {s: [] for s in SYSTEMS}
    for order in bench.alternation(tuple(SYSTEMS), rounds):
        for system in order:
            found[system].append(
                bench.run_child(
                    "scripts.bench_decoupled",
                    ["--child", name, system, "--steps", str(steps), "--seconds", str(seconds)],
                )
            )
    busy = {
        stage: statistics.median(row["busy"][stage] for row in found["serial"])
        for stage in found["serial"][0]["busy"]
    }
    walls = {s: [w for row in rows for w in row["walls"]] for s, rows in found.items()}
    median = {s: statistics.median(w) for s, w in walls.items()}
    longest, whole = max(busy.values()), sum(busy.values())
    return {
        "case": name,
        "stages_s": {stage: round(b, 3) for stage, b in busy.items()},
        "step_s": {s: bench.spread(w) for s, w in walls.items()},
        "steps_per_s": {s: round(1 / m, 4) for s, m in median.items()},
        "faster": round(median["serial"] / median["decoupled"], 3),
        "bound": round(whole / longest, 3),
        "share": round(longest / median["decoupled"], 3),
        "staleness": max(row["staleness"] for row in found["decoupled"]),
        "load_1min": bench.machine()["load_1min"],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two cases, once")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8.0, help="of sleep per step, in all")
    parser.add_argument(
        "--keep", action="store_true", help=f"take cases that are in {ROWS} already"
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    o = bench.parse(parser, least=("cases",))
    if o.child:
        name, system = o.child
        kind, ratio, given = CASES[name]
        run = {"prompts": prompts, "robots": robots, "maniskill": maniskill}[kind]
        bench.finish_child(run(system, ratio, o.seconds, o.steps, given))
        return
    names = ["prompts 1:1", "robots 1:1:1"] if o.quick else o.cases
    rounds = 1 if o.quick else o.rounds
    size = f"{rounds} times {o.steps} steps of {o.seconds:g} s"
    rows = [
        bench.kept(
            ROWS / f"{name}, {size}.json",
            functools.partial(case, name, rounds, o.steps, o.seconds),
            keep=o.keep,
        )
        for name in names
    ]
    bench.print_table(
        ("", "stages", "serial s/step", "decoupled", "faster", "bound", "share", "staleness"),
        [
            (
                r["case"],
                json.dumps(r["stages_s"]),
                f"{r['step_s']['serial']['median']:.2f}",
                f"{r['step_s']['decoupled']['median']:.2f}",
                f"{r['faster']:.2f}",
                f"{r['bound']:.2f}",
                f"{r['share']:.3f}",
                f"{r['staleness']:g}",
            )
            for r in rows
        ],
    )
    print(bench.write_results("bench_decoupled", {"cases": rows}, "torch", "transformers"))


if __name__ == "__main__":
    main()
