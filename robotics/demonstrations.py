"""The demonstrations that an embodied configuration names (section demos): recorded where there are none, and read.

mmrl.robotics.sft learns from them. Legend: T control steps of an episode, A action dimensions, S proprioception values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from mmrl.errors import ConfigError
from mmrl.robotics.config import EmbodiedConfig
from mmrl.robotics.contract import EnvSpec, InitialState, initial_states
from mmrl.robotics.datasets import open_demonstrations
from mmrl.robotics.source import env_specs, states_of

__all__ = ["DemoEpisode", "demo_folder", "demo_states", "load_demos", "record_demos"]


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
        "states": [state.name for state in demo_states(config, _wanted_specs(config)[0])],
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
        f"{k} was {_brief(found.get(k))}, now {_brief(v)}"
        for k, v in wanted.items()
        if found.get(k) != v
    ]
    if changed:
        raise ConfigError(
            f"{folder} holds demonstrations of other settings: {'; '.join(changed)}. Remove the folder to record "
            "anew, or use them as they are with demos.path"
        )


def _brief(value: object) -> str:
    """A value in a message; of initial states how many, and the first."""
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return f"{len(value)} from {value[0]}"
    return repr(value)


@dataclass(frozen=True)
class DemoEpisode:
    """One demonstration in memory: pictures uint8 (T, H, W, 3) by camera, proprio (T, S), the demonstrator's actions (T, A).

    `steps` (P,): the control steps that have a picture, for recordings that did not render all; images and proprio then have
    P rows.
    """

    instruction: str
    images: Mapping[str, np.ndarray]
    proprio: np.ndarray
    actions: np.ndarray
    steps: np.ndarray


def load_demos(
    folder: Path,
    cameras: Sequence[str],
    *,
    executed: bool = False,
    names: Mapping[str, str] = MappingProxyType({}),
    **columns: str,
) -> list[DemoEpisode]:
    """All demonstrations, in memory, with the actions that were meant or, where they differ and `executed` is wanted, done.
    names: what `cameras` are called in the data set, where it is something else; columns: action_key and state_key of a LeRobot
    folder. Raises DataError for files that cannot be read, ConfigError for a camera or column that they lack."""
    if columns and not (folder / "meta" / "info.json").is_file():
        raise ConfigError(
            f"{' and '.join(f'demos.{name}' for name in columns)}: expected a LeRobot folder, found {folder}; the columns of "
            "LIBERO's files have names of their own: remove it"
        )
    stored = {camera: names.get(camera, camera) for camera in cameras}
    found = []
    for demo in open_demonstrations(folder, **columns):
        steps = np.asarray(demo.steps_P)
        if missing := [name for name in stored.values() if name not in demo.cameras]:
            raise ConfigError(
                f"{demo.source}: expected a camera {missing[0]}, found {', '.join(demo.cameras) or 'none'}; say which is which "
                f"with demos.cameras, as in demos.cameras={{{cameras[0]}: {next(iter(demo.cameras), 'image')}}}"
            )
        images = {camera: demo.pictures(name) for camera, name in stored.items()}
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
