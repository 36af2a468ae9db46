"""A very small VLA policy and configuration for tests of embodied runs: seconds, not minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmrl.policy.tiny import TinySpec, build_tiny
from mmrl.robotics.config import EmbodiedConfig, load_embodied
from mmrl.robotics.contract import EnvSpec, Observation, initial_states, make_simulator
from mmrl.robotics.load import load_vla
from mmrl.robotics.source import env_specs
from mmrl.robotics.vla import VLAPolicy

BASE = [
    "env.suite=tiny",
    "env.tasks=[reach]",
    "env.horizon=12",
    "env.image_size=32",
    "env.slots=4",
    "env.workers=2",
    "action.bins=9",
    "action.chunk=2",
    "action.repeat=2",
    "rollout.group_size=3",
    "train.prompts_per_step=3",
    "train.steps=2",
    "train.save_every=1",
    "algorithm.max_rounds=2",
    "eval.samples=1",
    "eval.every=0",
    "eval.gallery=0",
    "eval_states=2",
    "eval.best_metric=sampled/success_once",
    "optim.lr=1e-3",
    "model.device=cpu",
    "threads=1",
    "model.system=''",
    "env.options={tolerance: 0.5}",
]
"""A reach task with a wide goal, which an untrained policy meets now and then: groups have signal."""


def make_model(folder: Path, arch: str = "qwen2_5_vl") -> Path:
    """An untrained backbone that sees 32 px pictures as four tokens."""
    build_tiny(
        TinySpec(
            arch=arch,
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
        folder,
    )
    return folder


def config_of(model: Path, *overrides: str) -> EmbodiedConfig:
    """The small configuration with `overrides`."""
    return load_embodied(None, [*BASE, f"model.path={model}", *overrides])


def make_vla(model: Path, *overrides: str, **options: Any) -> VLAPolicy:
    """A policy with new action tokens."""
    config = config_of(model, *overrides)
    simulator = make_simulator(env_specs(config)[0])
    torch.manual_seed(0)
    return load_vla(
        config, space=simulator.action_space, proprio=([-1.0, -1.0], [1.0, 1.0]), **options
    )


def saved_vla(folder: Path) -> Path:
    """A fresh policy as `mmrl sft` would leave it in folder / "vla"."""
    make_vla(make_model(folder / "model")).save(folder / "vla")
    return folder / "vla"


def observations(
    count: int, task: str = "reach", cameras: tuple[str, ...] = ("base",), size: int = 32
) -> list[Observation]:
    """First pictures of `count` held-out episodes."""
    found = []
    for state in initial_states("eval", count):
        simulator = make_simulator(EnvSpec("tiny", task, 12, size, cameras))
        simulator.reset(state)
        found.append(simulator.observe())
    return found
