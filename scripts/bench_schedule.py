"""What overlapping rendering, inference and training is worth, against the bound that the longest stage sets.

    python -m scripts.bench_schedule            (about 35 minutes, writes assets/results/bench_schedule*.json)
    python -m scripts.bench_schedule --quick    (about a minute, writes nothing)

Costed part: the real executor, thread and worker processes; a picture, an inference batch and a group's gradient cost a set
time of sleep, so that any ratio of stages can be had on any machine. A step is 64 groups of 8 episodes (SimpleVLA-RL's) of
three decisions, on 16 environments in 4 processes, and 24 s of work, or 0.05 s per episode; PushCube of
assets/results/demo_robot_maniskill.json takes 0.14 to train with. Systems alternate within one run:

    serial          one stage of environments: render, infer, render ...; then train
    stage_overlap   two stages: one renders while the policy infers for the other; training after the rollout (RLinf's overlap)
    streaming_2     pipelined: the same two stages, and each group is trained on when it closes; same result as serial
    streaming       pipelined with four stages: two wait for each other where rendering and inference take equally long
    streaming_1dev  the same with one device for inference and training, which take turns (its bound is larger)
    async           staleness 1: the next step is rolled out while this one trains; not the same result

bound: longest stage / sum of the stages, the least share of the serial time any schedule can reach within its staleness.
share: longest stage / measured step, 1 is perfect; once with the stages as long as they were in the serial runs (what was set and
what a control step, a picture, a message and waking up really take), once with what was set. What is missing is filling (nothing
to train on until the first group closes) and draining (the last groups train when nothing is left to render), which cost more
with fewer groups per step (--groups), and milliseconds per batch. Required: share >= 0.9 for streaming.
"""
from __future__ import annotations

import argparse
import importlib
import json
import statistics
from collections.abc import Sequence
from typing import Any

from scripts import _bench as bench

RATIOS = ((1, 1, 1), (2, 1, 1), (4, 2, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8))
SYSTEMS: dict[str, tuple[str, int]] = {"serial": ("serial", 1), "stage_overlap": ("serial", 2), "streaming_2": ("pipelined", 2),
                                       "streaming": ("pipelined", 4), "streaming_1dev": ("pipelined", 4), "async": ("async", 4)}
"""Name -> schedule and stages of environments."""
SLOTS, WORKERS, MEMBERS = 16, 4, 8
STAGES = ("render", "infer", "train")
REQUIRED = 0.9
REAL: dict[str, str] = {name: f"scripts._schedule_real:{name}" for name in ("tiny", "maniskill", "libero")}
"""Name -> module:function of a real simulator's measurement; the function takes (rounds, steps) and returns rows like `measure`."""


def run_system(system: str, pool: Any, costs: Any, steps: int) -> list[dict[str, Any]]:
    """Timeline summaries of `steps` steps; async is measured in the middle of a run, where it always has a next step."""
    from mmrl.pipeline import Pipeline, PipelineSettings
    from mmrl.timeline import Timeline
    from scripts._costed import CostedLearner, CostedSource

    schedule, stages = SYSTEMS[system]
    ahead = int(schedule == "async")
    timeline = Timeline({"render": costs.workers, "infer": 1, "train": 1}, keep=steps + 2)
    settings = PipelineSettings(schedule=schedule, staleness=ahead, shared=system == "streaming_1dev")  # type: ignore[arg-type]
    source = CostedSource(pool, costs, stages, timeline)
    last = steps + 2 * ahead
    with Pipeline(source, CostedLearner(costs), settings, last_step=last, timeline=timeline) as pipeline:
        for step in range(1, last + 1):
            outcome = pipeline.step(step)
            assert outcome.result == costs.groups and outcome.stale == 0
    return [timeline.summary(step) for step in range(1 + ahead, 1 + ahead + steps)]


def measure(ratio: Sequence[float], *, seconds: float, groups: int, rounds: int, steps: int,
            systems: Sequence[str] = tuple(SYSTEMS)) -> dict[str, Any]:
    """One ratio: all systems, alternating. `seconds`: the sum of the stages."""
    from robotics.pool import EnvPool
    from scripts._costed import Costs

    render, infer, train = (seconds * r / sum(ratio) for r in ratio)
    costs = Costs(render, infer, train, groups=groups, members=MEMBERS, workers=WORKERS)
    found: dict[str, list[dict[str, Any]]] = {s: [] for s in systems}
    with EnvPool(SLOTS, WORKERS) as pool:
        run_system("serial", pool, Costs(0.0, 0.0, 0.0, groups=8, members=MEMBERS, workers=WORKERS), 1)  # starts the processes
        for order in bench.alternation(systems, rounds):
            for system in order:
                found[system] += run_system(system, pool, costs, steps)
    serial = statistics.median(s["wall_s"] for s in found["serial"])
    busy = [statistics.median(s["wall_s"] * (1 - s["stages"][stage]["bubble"]) for s in found["serial"]) for stage in STAGES]
    return {"ratio": list(ratio), "groups": groups, "seconds": seconds, "measured_s": [round(b, 3) for b in busy],
            "systems": {system: _row(system, summaries, (render, infer, train), busy, serial)
                        for system, summaries in found.items()}}


def _longest(system: str, work: Sequence[float]) -> float:
    render, infer, train = work
    return max(render, infer + train) if system == "streaming_1dev" else max(work)


def _row(system: str, summaries: Sequence[dict[str, Any]], work: Sequence[float], busy: Sequence[float],
         serial: float) -> dict[str, Any]:
    longest = _longest(system, busy)
    walls = [s["wall_s"] for s in summaries]
    wall = statistics.median(walls)
    return {"step_s": bench.spread(walls), "steps_per_s": round(1 / wall, 4), "of_serial": round(wall / serial, 3),
            "bound": round(longest / sum(busy), 3), "share": round(longest / wall, 3), "over_s": round(wall - longest, 3),
            "share_of_set": round(_longest(system, work) / wall, 3),
            "bubble": {stage: round(statistics.median(s["stages"][stage]["bubble"] for s in summaries), 3) for stage in STAGES},
            "train_queue": {k: round(statistics.median(s["queues"].get("train queue", {}).get(k, 0.0) for s in summaries), 2)
                            for k in ("mean", "max")}}


def report(results: Sequence[dict[str, Any]]) -> None:
    """Print the tables."""
    for r in results:
        print(f"\nrender : infer : train = {':'.join(f'{x:g}' for x in r['ratio'])}, {r['groups']} groups per step, "
              f"{r['seconds']:g} s of work; measured {', '.join(f'{b:.2f}' for b in r['measured_s'])} s")
        header = ("", "s/step", "steps/s", "of serial", "bound", "share", "of set", "over s", "idle render", "infer", "train")
        bench.print_table(header, [
            (name, f"{s['step_s']['median']:.2f}", f"{s['steps_per_s']:.3f}", f"{s['of_serial']:.3f}", f"{s['bound']:.3f}",
             f"{s['share']:.3f}", f"{s['share_of_set']:.3f}", f"{s['over_s']:.2f}", *(f"{s['bubble'][k]:.0%}" for k in STAGES))
            for name, s in r["systems"].items()])


def costed(o: argparse.Namespace) -> None:
    """All ratios; written unless --quick."""
    ratios, rounds, steps, seconds = ((RATIOS[0], RATIOS[3]), 1, 1, 4.0) if o.quick else (RATIOS, o.rounds, o.steps, o.seconds)
    groups = sorted(o.groups)
    results = []
    for count, ratio in [*((n, RATIOS[0]) for n in groups[:-1] if not o.quick), *((groups[-1], r) for r in ratios)]:
        results.append(measure(ratio, seconds=seconds * count / groups[-1], groups=count, rounds=rounds, steps=steps))
        report(results[-1:])
    shares = {":".join(map(str, r["ratio"])): r["systems"]["streaming"]["share"] for r in results if r["groups"] == groups[-1]}
    met = all(share >= REQUIRED for share in shares.values())
    print(f"\nstreaming reaches {min(shares.values()):.1%} of the bound or more with {groups[-1]} groups per step; required "
          f"{REQUIRED:.0%}: {'met' if met else 'NOT met'}")
    if not o.quick:
        print(bench.write_results("bench_schedule", {"required": {"share": REQUIRED, "met": met, "shares": shares},
                                                     "costed": results}, "torch"))


def real(o: argparse.Namespace) -> None:
    """Real simulators and a real policy; simulators that are not measured now keep their rows if those are of this machine."""
    file = bench.RESULTS / "bench_schedule_real.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"machine": {}}
    here = bench.machine()
    rows = found["real"] if all(found["machine"].get(k) == here[k] for k in ("cpu", "cores", "memory_gib")) else {}
    for name in o.real:
        module, _, function = REAL[name].partition(":")
        rows[name] = getattr(importlib.import_module(module), function)(o.rounds, o.steps)
        rows[name].update(rounds=o.rounds, steps=o.steps)
        print(f"\n{name}, {rows[name]['episodes_per_step']} episodes per step")
        bench.print_table(("", "s/step", "of serial", "bound", "idle render", "infer", "train"), [
            (system, f"{row['step_s']['median']:.2f}", f"{row['of_serial']:.3f}", f"{row['bound']:.3f}",
             *(f"{row['bubble'][k]:.0%}" for k in STAGES)) for system, row in rows[name]["systems"].items()])
    print(bench.write_results("bench_schedule_real", {"real": rows}, "torch", "mani_skill", "mujoco"))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="costed: two ratios, one round, four seconds of work; writes nothing")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1, help="measured steps per run")
    parser.add_argument("--seconds", type=float, default=24.0, help="sum of the stages per step of the largest number of groups")
    parser.add_argument("--groups", type=int, nargs="+", default=[16, 64],
                        help="groups per step; the first ratio is run with each, at the same work per group")
    parser.add_argument("--parts", nargs="+", default=["costed", "real"], choices=("costed", "real"))
    parser.add_argument("--real", nargs="+", default=sorted(REAL), choices=sorted(REAL), help="simulators to measure")
    o = parser.parse_args()
    if "costed" in o.parts:
        costed(o)
    if "real" in o.parts and not o.quick:
        real(o)


if __name__ == "__main__":
    main()
