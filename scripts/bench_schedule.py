"""What overlapping rendering, inference and training is worth, against the bound that the longest stage sets.

    python -m scripts.bench_schedule            (about ten minutes, writes assets/results/bench_schedule.json)
    python -m scripts.bench_schedule --quick    (about a minute, writes nothing)

Costed part: the real executor, thread and worker processes; a picture, an inference batch and a group's gradient cost a set
time of sleep, so that any ratio of stages can be had on any machine. Systems alternate within one run:

    serial          one stage of environments: render, infer, render ...; then train
    stage_overlap   two stages: one renders while the policy infers for the other; training after the rollout (RLinf's overlap)
    streaming       pipelined: the same, and each group is trained on when it closes; same result as serial
    streaming_1dev  the same with one device for inference and training, which take turns (its bound is larger)
    async           staleness 1: the next step is rolled out while this one trains; not the same result

bound: longest stage / sum of the stages, the least share of the serial time any schedule can reach within its staleness.
share: longest stage / measured step, 1 is perfect. What is missing is mostly filling (nothing to train on until the first
group closes) and draining (the last groups train when nothing is left to render), each about one group's rollout or training
of the step's; fewer groups per step cost more, which --groups shows. async does neither. Required: share >= 0.9 for streaming.
"""
from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Sequence
from typing import Any

from scripts import _bench as bench

RATIOS = ((1, 1, 1), (2, 1, 1), (4, 2, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8))
SYSTEMS = ("serial", "stage_overlap", "streaming", "streaming_1dev", "async")
REQUIRED = 0.9
REAL: dict[str, str] = {name: f"scripts._schedule_real:{name}" for name in ("tiny", "maniskill", "libero")}
"""Name -> module:function of a real simulator's measurement; the function takes (rounds, steps) and returns rows like `measure`."""


def run_system(system: str, pool: Any, costs: Any, steps: int) -> list[dict[str, Any]]:
    """Timeline summaries of `steps` steps after a first one that warms up."""
    from mmrl.pipeline import Pipeline, PipelineSettings
    from mmrl.timeline import Timeline
    from scripts._costed import CostedLearner, CostedSource

    timeline = Timeline({"render": costs.workers, "infer": 1, "train": 1}, keep=steps + 2)
    schedule = {"serial": "serial", "stage_overlap": "serial", "async": "async"}.get(system, "pipelined")
    settings = PipelineSettings(schedule=schedule, staleness=int(schedule == "async"),  # type: ignore[arg-type]
                                shared=system == "streaming_1dev")
    source = CostedSource(pool, costs, 1 if system == "serial" else 2, timeline)
    last = 1 + steps + (schedule == "async")  # async is measured in the middle of a run, where it always has a next step
    with Pipeline(source, CostedLearner(costs), settings, last_step=last, timeline=timeline) as pipeline:
        for step in range(1, last + 1):
            outcome = pipeline.step(step)
            assert outcome.result == costs.groups and outcome.stale == 0
    return [timeline.summary(step) for step in range(2, 2 + steps)]


def measure(ratio: Sequence[float], *, seconds: float, groups: int, rounds: int, steps: int, systems: Sequence[str] = SYSTEMS,
            workers: int = 4) -> dict[str, Any]:
    """One ratio: all systems, alternating. `seconds`: the sum of the stages."""
    from robotics.pool import EnvPool
    from scripts._costed import Costs

    render, infer, train = (seconds * r / sum(ratio) for r in ratio)
    costs = Costs(render, infer, train, groups=groups, workers=workers)
    found: dict[str, list[dict[str, Any]]] = {s: [] for s in systems}
    with EnvPool(2 * costs.members, workers) as pool:
        for order in bench.alternation(systems, rounds):
            for system in order:
                found[system] += run_system(system, pool, costs, steps)
    serial = statistics.median(s["wall_s"] for s in found["serial"])
    rows = {}
    for system, summaries in found.items():
        longest = max(render, infer + train) if system == "streaming_1dev" else max(render, infer, train)
        walls = [s["wall_s"] for s in summaries]
        wall = statistics.median(walls)
        rows[system] = {
            "step_s": bench.spread(walls), "steps_per_s": round(1 / wall, 4), "of_serial": round(wall / serial, 3),
            "bound": round(longest / seconds, 3), "share": round(longest / wall, 3), "over_s": round(wall - longest, 3),
            "bubble": {stage: round(statistics.median(s["stages"][stage]["bubble"] for s in summaries), 3)
                       for stage in ("render", "infer", "train")},
            "train_queue": {k: round(statistics.median(s["queues"].get("train queue", {}).get(k, 0.0) for s in summaries), 2)
                            for k in ("mean", "max")}}
    return {"ratio": list(ratio), "groups": groups, "seconds": seconds, "systems": rows}


def report(results: Sequence[dict[str, Any]]) -> None:
    """Print the tables."""
    for r in results:
        print(f"\nrender : infer : train = {':'.join(f'{x:g}' for x in r['ratio'])}, {r['groups']} groups per step, "
              f"{r['seconds']:g} s of work")
        bench.print_table(("", "s/step", "steps/s", "of serial", "bound", "share", "over s", "idle render", "infer", "train"), [
            (name, f"{s['step_s']['median']:.2f}", f"{s['steps_per_s']:.3f}", f"{s['of_serial']:.3f}", f"{s['bound']:.3f}",
             f"{s['share']:.3f}", f"{s['over_s']:.2f}", *(f"{s['bubble'][k]:.0%}" for k in ("render", "infer", "train")))
            for name, s in r["systems"].items()])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two ratios, one round, three seconds of work; writes nothing")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="measured steps per run, after one that warms up")
    parser.add_argument("--seconds", type=float, default=6.0, help="sum of the stages per step")
    parser.add_argument("--groups", type=int, nargs="+", default=[32, 64], help="groups per step; the first ratio is run with each")
    parser.add_argument("--real", nargs="*", default=sorted(REAL), choices=sorted(REAL), help="simulators to measure")
    o = parser.parse_args()
    ratios, rounds, steps, seconds = ((RATIOS[0], RATIOS[3]), 1, 1, 3.0) if o.quick else (RATIOS, o.rounds, o.steps, o.seconds)
    groups = sorted(o.groups)
    results = []
    for count, ratio in [*((n, RATIOS[0]) for n in groups[:-1] if not o.quick), *((groups[-1], r) for r in ratios)]:
        results.append(measure(ratio, seconds=seconds, groups=count, rounds=rounds, steps=steps))
        report(results[-1:])
    shares = {":".join(map(str, r["ratio"])): r["systems"]["streaming"]["share"] for r in results if r["groups"] == groups[-1]}
    met = all(share >= REQUIRED for share in shares.values())
    print(f"\nstreaming reaches {min(shares.values()):.1%} of the bound or more with {groups[-1]} groups per step; required "
          f"{REQUIRED:.0%}: {'met' if met else 'NOT met'}")
    real = {}
    for name in o.real if not o.quick else ():
        module, _, function = REAL[name].partition(":")
        real[name] = getattr(importlib.import_module(module), function)(rounds, steps)
        print(f"\n{name}, {real[name]['episodes_per_step']} episodes per step")
        bench.print_table(("", "s/step", "of serial", "bound", "idle render", "infer", "train"), [
            (system, f"{row['step_s']['median']:.2f}", f"{row['of_serial']:.3f}", f"{row['bound']:.3f}",
             *(f"{row['bubble'][k]:.0%}" for k in ("render", "infer", "train"))) for system, row in real[name]["systems"].items()])
    if not o.quick:
        print(bench.write_results("bench_schedule", {
            "required": {"share": REQUIRED, "met": met, "shares": shares}, "costed": results, "real": real}, "torch"))


if __name__ == "__main__":
    main()
