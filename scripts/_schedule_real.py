"""bench_schedule on real simulators and a real (tiny) policy: runs of `mmrl train`'s own trainer, serial and pipelined.

Each function takes (rounds, steps) and returns the rows of bench_schedule's JSON. The two systems differ in schedule.kind only:
`serial` steps all simulators in lock-step and trains afterwards; `streaming` (pipelined) lets the policy decide for one half of
them while the other half renders, and trains on groups as they close.
One process renders and one infers and trains, as where a GPU does the latter: with a rendering process on every core there is
nothing left to overlap with. The policy is sized so that its work is of the order of the simulators'.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from mmrl.policy.tiny import TinySpec
from mmrl.robotics.config import load_embodied
from scripts import _bench as bench
from scripts._costed import QUIET, run, saved_vla

__all__ = ["libero", "maniskill", "tiny"]

SYSTEMS: dict[str, tuple[str, ...]] = {
    "serial": ("schedule.kind=serial",),
    "streaming": ("schedule.kind=pipelined", "schedule.stages=2"),
}
COMMON = [
    *QUIET,
    "action.bins=17",
    "action.chunk=4",
    "action.repeat=2",
    "rollout.group_size=4",
    "train.prompts_per_step=4",
    "env.slots=8",
    "env.workers=1",
    "env.image_size=64",
]


def tiny(rounds: int, steps: int) -> dict[str, Any]:
    """The tiny simulator: rendering costs next to nothing, so there is little to overlap but training."""
    return measure(["env.suite=tiny", "env.tasks=[push]", "env.horizon=16"], rounds, steps)


def maniskill(rounds: int, steps: int) -> dict[str, Any]:
    """PushCube-v1, software rendering, full episodes of 16 steps."""
    return measure(
        [
            "env.suite=maniskill",
            "env.tasks=[PushCube-v1]",
            "env.horizon=16",
            "env.options={dims: 4, stop_at_success: false}",
        ],
        rounds,
        steps,
    )


def libero(rounds: int, steps: int) -> dict[str, Any]:
    """libero_object on stand-in assets, two cameras."""
    return measure(
        [
            "env.suite=libero",
            "env.tasks=[libero_object/0]",
            "env.horizon=16",
            "env.cameras=[base, wrist]",
            "vla.cameras=[base, wrist]",
            "env.options={assets: stand-in}",
        ],
        rounds,
        steps,
        width=512,
        layers=8,
    )


def measure(
    overrides: list[str], rounds: int, steps: int, *, width: int = 256, layers: int = 4
) -> dict[str, Any]:
    """Seconds per step of each system, alternating; one untimed step warms each up."""
    spec = TinySpec(
        hidden=width,
        layers=layers,
        vision_hidden=width,
        vision_layers=layers,
        heads=4,
        vision_heads=4,
        patch_size=8,
        min_patches=16,
        max_patches=16,
    )
    found: dict[str, list[dict[str, Any]]] = {s: [] for s in SYSTEMS}
    with tempfile.TemporaryDirectory() as folder:
        common = [*COMMON, *overrides]
        common += [f"model.path={saved_vla(Path(folder), spec, common)}", f"dir={folder}"]
        for order in bench.alternation(list(SYSTEMS), rounds):
            for system in order:
                config = load_embodied(None, [*common, f"name={system}", *SYSTEMS[system]])
                found[system] += run(config, steps)[0]
    serial = statistics.median(s["wall_s"] for s in found["serial"])
    rows = {}
    for system, summaries in found.items():
        wall = statistics.median(s["wall_s"] for s in summaries)
        rows[system] = {
            "step_s": bench.spread([s["wall_s"] for s in summaries]),
            "steps_per_s": round(1 / wall, 4),
            "of_serial": round(wall / serial, 3),
            "bubble": {
                stage: round(statistics.median(s["stages"][stage]["bubble"] for s in summaries), 3)
                for stage in ("render", "infer", "train")
            },
            "bound": round(statistics.median(s["bound"] for s in summaries), 3),
        }
    return {
        "overrides": overrides,
        "policy": {"width": width, "layers": layers},
        "systems": rows,
        "episodes_per_step": config.train.prompts_per_step * config.rollout.group_size,
    }
