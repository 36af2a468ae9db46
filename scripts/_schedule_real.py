"""bench_schedule on real simulators and a real (tiny) policy: a training step serial, with stage overlap, and streamed.

Each function takes (rounds, steps) and returns the rows of bench_schedule's JSON. The three systems differ in scheduling only:
`serial` steps all simulators in lock-step and trains afterwards, `stage_overlap` (RLinf's pipeline) lets the policy decide for
one half of them while the other half renders and trains afterwards, `streaming` also trains on groups as they close.
One process renders and one infers and trains, as where a GPU does the latter: with a rendering process on every core there is
nothing left to overlap with. The policy is sized so that its work is of the order of the simulators'.
"""
from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from mmrl.engines import build_train_engine
from mmrl.optim import build_optimizer
from mmrl.pipeline import Pipeline, PipelineSettings
from mmrl.policy.tiny import TinySpec, build_tiny
from mmrl.timeline import Timeline
from mmrl.world import World
from robotics.config import EmbodiedConfig, load_embodied
from robotics.contract import make_simulator
from robotics.load import load_vla
from robotics.pool import EnvPool
from robotics.rollout import Driver
from robotics.source import EpisodeSource, env_specs
from robotics.trainer import pool_settings
from robotics.update import EmbodiedUpdater
from scripts import _bench as bench

__all__ = ["libero", "maniskill", "tiny"]

SYSTEMS: dict[str, tuple[str, int]] = {"serial": ("serial", 1), "stage_overlap": ("serial", 2), "streaming": ("pipelined", 2)}
COMMON = ["action.bins=17", "action.chunk=4", "action.repeat=2", "rollout.group_size=4", "train.prompts_per_step=4",
          "algorithm.dynamic_sampling=false", "env.slots=8", "env.workers=1", "env.image_size=64", "train.token_budget=100000",
          "threads=1", "model.device=cpu", "model.system=''", "optim.lr=1e-9"]


def tiny(rounds: int, steps: int) -> dict[str, Any]:
    """The tiny simulator: rendering costs next to nothing, so there is little to overlap but training."""
    return measure(["env.suite=tiny", "env.tasks=[push]", "env.horizon=16"], rounds, steps)


def maniskill(rounds: int, steps: int) -> dict[str, Any]:
    """PushCube-v1, software rendering, full episodes of 16 steps."""
    return measure(["env.suite=maniskill", "env.tasks=[PushCube-v1]", "env.horizon=16",
                    "env.options={dims: 4, stop_at_success: false}"], rounds, steps)


def libero(rounds: int, steps: int) -> dict[str, Any]:
    """libero_object on stand-in assets, two cameras."""
    return measure(["env.suite=libero", "env.tasks=[libero_object/0]", "env.horizon=16", "env.cameras=[base, wrist]",
                    "vla.cameras=[base, wrist]", "env.options={assets: stand-in}"], rounds, steps, width=512, layers=8)


def measure(overrides: list[str], rounds: int, steps: int, *, width: int = 256, layers: int = 4) -> dict[str, Any]:
    """Seconds per step of each system, alternating; one untimed step warms each up."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        build_tiny(TinySpec(hidden=width, layers=layers, vision_hidden=width, vision_layers=layers, heads=4, vision_heads=4,
                            patch_size=8, min_patches=16, max_patches=16), folder)
        config = load_embodied(None, [*COMMON, f"model.path={folder}", *overrides])
        found: dict[str, list[dict[str, Any]]] = {s: [] for s in SYSTEMS}
        with EnvPool(config.env.slots, config.env.workers, pool_settings(config.env)) as pool:
            for order in bench.alternation(list(SYSTEMS), rounds):
                for system in order:
                    found[system] += one_system(config, Path(folder), pool, system, steps)
    serial = statistics.median(s["wall_s"] for s in found["serial"])
    rows = {}
    for system, summaries in found.items():
        wall = statistics.median(s["wall_s"] for s in summaries)
        rows[system] = {"step_s": bench.spread([s["wall_s"] for s in summaries]), "steps_per_s": round(1 / wall, 4),
                        "of_serial": round(wall / serial, 3),
                        "bubble": {stage: round(statistics.median(s["stages"][stage]["bubble"] for s in summaries), 3)
                                   for stage in ("render", "infer", "train")},
                        "bound": round(statistics.median(s["bound"] for s in summaries), 3)}
    return {"overrides": overrides, "policy": {"width": width, "layers": layers}, "systems": rows,
            "episodes_per_step": config.train.prompts_per_step * config.rollout.group_size}


def one_system(config: EmbodiedConfig, folder: Path, pool: EnvPool, system: str, steps: int) -> list[dict[str, Any]]:
    """Timeline summaries of `steps` steps after the first."""
    kind, stages = SYSTEMS[system]
    simulator = make_simulator(env_specs(config)[0])
    torch.manual_seed(0)
    vla = load_vla(config, space=simulator.action_space)
    simulator.close()
    timeline = Timeline({"render": config.env.workers, "infer": 1, "train": 1}, keep=steps + 1)
    driver = Driver(pool, vla, seed=0, stages=stages, timeline=timeline)
    engine = build_train_engine(config, World(vla.device), vla, build_optimizer(vla.trainable(), config.optim))
    updater = EmbodiedUpdater(config, vla, engine)
    settings = PipelineSettings(schedule=kind)  # type: ignore[arg-type]
    with Pipeline(EpisodeSource(config, driver), updater, settings, last_step=steps + 1, timeline=timeline) as pipeline:
        for step in range(1, steps + 2):
            pipeline.step(step)
        return [timeline.summary(step) for step in range(2, steps + 2)]
