"""What `mmrl sft` does for an embodied configuration: record demonstrations where there are none, clone them, save the policy.

Of several processes the main one records and saves; each clones its share of every batch (mmrl.robotics.sft).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from mmrl.distributed.engines import accelerator_options
from mmrl.distributed.world import World
from mmrl.errors import ConfigError
from mmrl.robotics.config import EmbodiedConfig
from mmrl.robotics.contract import (
    ActionSpace,
    EnvSpec,
    InitialState,
    initial_states,
    make_simulator,
)
from mmrl.robotics.datasets import open_demonstrations
from mmrl.robotics.load import load_vla
from mmrl.robotics.sft import DemoEpisode, DemoSteps, clone
from mmrl.robotics.source import env_specs, states_of
from mmrl.robotics.vla import VLAPolicy
from mmrl.training.sft import supervised

__all__ = ["demo_folder", "demo_states", "load_demos", "record_demos", "save_policy", "warm_start"]


def demo_folder(config: EmbodiedConfig) -> Path:
    """Where the run's demonstrations are, or will be."""
    return Path(config.demos.path or Path(config.dir) / f"{config.name}_demos")


def demo_states(config: EmbodiedConfig, spec: EnvSpec) -> list[InitialState]:
    """Training states to record, none of which reinforcement learning begins with (unless all that a suite has are recorded)."""
    known = states_of(spec, "train")
    if known is None:
        return initial_states("train", config.demos.episodes, first=config.demos.first_state)
    return [known[i % len(known)] for i in range(config.demos.episodes)]


def record_demos(
    config: EmbodiedConfig, on_episode: Callable[[int, int], None] | None = None
) -> Path:
    """Record the scripted expert of every task, unless the folder is there. Raises ConfigError for a task without expert."""
    folder = demo_folder(config)
    if folder.exists():
        if config.demos.path is None:
            _check_recorded(config, folder)
        return folder
    if config.demos.path is not None:
        raise ConfigError(
            f"expected demonstrations at demos.path, found nothing at {folder}; remove demos.path to record some"
        )
    from mmrl.robotics.datasets.record import record

    specs = _wanted_specs(config)
    states = demo_states(config, specs[0])
    record(
        specs,
        states,
        folder,
        workers=config.env.workers,
        noise=config.demos.noise,
        speed=config.demos.speed,
        every=config.demos.every,
        seed=config.seed,
        on_episode=on_episode,
    )
    return folder


def _recorded(
    config: EmbodiedConfig, on_episode: Callable[[int, int], None] | None, world: World
) -> Path:
    """`record_demos` in the main process, for which the others wait: from episode to episode, since a wait has a limit (World)."""
    if world.is_main:

        def told(done: int, total: int) -> None:
            world.gather([False])
            if on_episode is not None:
                on_episode(done, total)

        with world.raise_on_all_ranks():
            folder = record_demos(config, told)
        world.gather([True])
        return folder
    while not any(world.gather([])):
        pass
    return demo_folder(config)


def _wanted_specs(config: EmbodiedConfig) -> list[EnvSpec]:
    return [
        replace(spec, horizon=config.demos.horizon or spec.horizon) for spec in env_specs(config)
    ]


def _check_recorded(config: EmbodiedConfig, folder: Path) -> None:
    """Raises ConfigError when the recording that is there was made with other settings than these."""
    d = config.demos
    wanted = {
        "environments": [asdict(spec) for spec in _wanted_specs(config)],
        "noise": d.noise,
        "speed": d.speed,
        "every": d.every,
        "seed": config.seed,
    }
    try:
        found = json.loads((folder / "meta" / "info.json").read_text(encoding="utf-8"))["mmrl"][
            "recorded"
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"expected demonstrations recorded by mmrl in {folder}, found something else ({error}); name them with "
            "demos.path, or remove the folder"
        ) from error
    wanted = json.loads(json.dumps(wanted))
    changed = [
        f"{k} was {found.get(k)!r}, now {v!r}" for k, v in wanted.items() if found.get(k) != v
    ]
    if changed:
        raise ConfigError(
            f"{folder} holds demonstrations of other settings: {'; '.join(changed)}. Remove the folder to record "
            "anew, or use them as they are with demos.path"
        )


def load_demos(folder: Path, cameras: list[str], *, executed: bool = False) -> list[DemoEpisode]:
    """All demonstrations, in memory, with the actions that were meant or, where they differ and `executed` is wanted, done.
    Raises DataError for files that cannot be read or lack a camera."""
    found = []
    for demo in open_demonstrations(folder):
        steps = np.asarray(demo.steps_P)
        images = {camera: demo.pictures(camera) for camera in cameras}
        actions = demo.executed_TA if executed and demo.executed_TA is not None else demo.actions_TA
        found.append(
            DemoEpisode(
                demo.instruction,
                images,
                np.asarray(demo.proprio_TS)[steps],
                np.asarray(actions),
                steps,
            )
        )
    return found


def warm_start(
    config: EmbodiedConfig,
    *,
    on_step: Callable[[int, dict[str, Any]], None] | None = None,
    on_episode: Callable[[int, int], None] | None = None,
    world: World | None = None,
) -> tuple[VLAPolicy, dict[str, float]]:
    """The cloned policy and the last step's metrics. Of several processes (`world`, by default those of the launcher) the main one
    records and calls on_episode and on_step; all must see the folder of the demonstrations."""
    if world is None:
        options = accelerator_options(supervised(config, config.demos.optim))
        world = World(torch.device(config.model.device) if config.model.device else None, **options)
    folder = _recorded(config, on_episode, world)
    with world.raise_on_all_ranks():
        vla, demos = _opened(config, folder, world)
    world.barrier()
    return vla, clone(vla, demos, config, on_step, world)


def _opened(config: EmbodiedConfig, folder: Path, world: World) -> tuple[VLAPolicy, DemoSteps]:
    """The policy that is to learn, and the examples."""
    episodes = load_demos(folder, config.vla.cameras, executed=config.demos.labels == "executed")
    proprio = None
    if config.vla.proprio:
        seen = np.concatenate([e.proprio for e in episodes])
        low, high = np.quantile(seen, [0.01, 0.99], axis=0)
        proprio = (low.tolist(), high.tolist())
    vla = load_vla(config, space=_action_space(config, world), proprio=proprio, device=world.device)
    if episodes[0].actions.shape[1] != vla.codec.dim:
        raise ConfigError(
            f"expected demonstrations of {vla.codec.dim} action dimensions, found "
            f"{episodes[0].actions.shape[1]} in {folder}; record them with this configuration's env.options"
        )
    return vla, DemoSteps(episodes, vla)


def _action_space(config: EmbodiedConfig, world: World) -> ActionSpace:
    """Of the run's simulator, which the main process alone opens. Collective."""
    found = []
    if world.is_main:
        simulator = make_simulator(env_specs(config)[0])
        try:
            found.append(simulator.action_space)
        finally:
            simulator.close()
    return world.gather(found)[0]


def save_policy(vla: VLAPolicy, config: EmbodiedConfig, folder: Path) -> None:
    """The policy with the configuration it was made with, so that an evaluation sees what it was made for."""
    vla.save(folder)
    (folder / "trainer").mkdir(exist_ok=True)
    described = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    (folder / "trainer" / "config.yaml").write_text(described, encoding="utf-8")
