"""What has to be known before a ManiSkill environment is built: task, robot, files, reward and what renders.

    python -c "from mmrl.robotics.maniskill_build import render_backend_of; print(render_backend_of('auto'))"

ManiSkill itself asks on the terminal for files it misses, and a broken Vulkan driver can end the process: both are found here
first and raised as errors that name the fix.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Mapping
from typing import Any

from mmrl.errors import ConfigError, MissingExtraError, did_you_mean, install_command

__all__ = [
    "BATCHED",
    "RENDER_VARIABLE",
    "REWARDS",
    "check_assets",
    "check_batched",
    "check_horizon",
    "check_task",
    "default_robot",
    "fixed_robot",
    "registered_tasks",
    "render_backend_of",
    "reward_mode",
]

RENDER_VARIABLE = "MMRL_MANISKILL_RENDER"
"""Environment variable that chooses the render backend where the options do not."""

REWARDS = ("sparse", "dense", "normalized_dense")

BATCHED = (
    "PushCube-v1",
    "PullCube-v1",
    "PickCube-v1",
    "StackCube-v1",
    "StackPyramid-v1",
    "PlaceSphere-v1",
    "PokeCube-v1",
    "PullCubeTool-v1",
    "LiftPegUpright-v1",
    "PlugCharger-v1",
    "PushT-v1",
    "RollBall-v1",
)
"""Of ManiSkill 3.0.1's own tasks those whose environments can be reset one by one in a batch, by their code. In others a reset of
one changes what the others have or count (RotateValve's rest position, DrawTriangle's dots), fails (FMBAssembly1Easy, DrawSVG), or
a group does not start from one state, because objects are drawn when the scene is built (PegInsertionSide, PickSingleYCB)."""

# of tasks in ManiSkill 3.0.1 whose constructor names the robot itself and takes no other
_FIXED_ROBOTS = {"PickCubeSO100-v1": "so100", "PickCubeWidowXAI-v1": "widowxai"}


def registered_tasks() -> dict[str, Any]:
    """ManiSkill's tasks by id. Raises MissingExtraError where it is not installed or cannot be imported."""
    # robots that a task does not list work, with a warning
    logging.getLogger("mani_skill").setLevel(logging.ERROR)
    try:
        import mani_skill.envs  # noqa: F401  registers the tasks
        from mani_skill.utils.registration import REGISTERED_ENVS
    except (ImportError, OSError) as error:
        raise MissingExtraError(
            f"suite maniskill needs ManiSkill 3 (Python 3.10 to 3.12), and importing it fails: {error}. "
            f"Install it with: {install_command('robotics')}"
        ) from error
    return dict(REGISTERED_ENVS)


def check_task(task: str, registered: Mapping[str, Any]) -> None:
    """Raises ConfigError for a task there is not."""
    if task not in registered:
        raise ConfigError(
            f"suite maniskill: expected one of its {len(registered)} tasks (PushCube-v1, PickCube-v1, StackCube-v1, "
            f"...), found {task!r}.{did_you_mean(task, registered)}"
        )


def default_robot(cls: Any) -> str:
    """The robot a task takes when none is named; '' when that is no single id. Raises ConfigError for several robots."""
    parameters = (
        inspect.signature(base.__dict__["__init__"]).parameters
        for base in cls.__mro__
        if "__init__" in base.__dict__
    )
    found = next((known["robot_uids"].default for known in parameters if "robot_uids" in known), "")
    if isinstance(found, tuple) and len(found) > 1:
        raise ConfigError(
            f"suite maniskill: expected a task with one robot, found {cls.__name__} with {', '.join(found)}"
        )
    return found if isinstance(found, str) else ""


def check_batched(task: str, cls: Any) -> None:
    """Raises ConfigError for a task whose environments cannot be the rows of a batch. Of tasks that are not ManiSkill's own those
    that are built anew for each episode are known by their constructor."""
    built_anew = any(
        "reconfiguration_freq" in inspect.signature(base.__dict__["__init__"]).parameters
        for base in cls.__mro__
        if "__init__" in base.__dict__ and base.__qualname__ != "BaseEnv"
    )
    own = cls.__module__.startswith("mani_skill.")
    if built_anew or (own and task not in BATCHED):
        raise ConfigError(
            f"maniskill/{task}: expected with env.options.sim_backend gpu a task whose environments are reset one by one "
            f"({', '.join(BATCHED)}), found another: its rows would share what is an episode's own, or a group would not start "
            "from one state. Set env.options.sim_backend to cpu"
        )


def fixed_robot(task: str, wanted: str) -> str:
    """The robot that a task names itself, '' for other tasks. Raises ConfigError where `wanted` is another."""
    robot = _FIXED_ROBOTS.get(task, "")
    if robot and wanted not in ("", robot):
        raise ConfigError(
            f"maniskill/{task}: expected its own robot, {robot}, found {wanted!r}: leave out env.options.robot"
        )
    return robot


def check_horizon(task: str, cls: Any, horizon: int) -> None:
    """Raises ConfigError for a horizon beyond what a task can be played: one that draws has a dot for each control step."""
    dots = getattr(cls, "MAX_DOTS", None)
    if dots is not None and horizon > dots:
        raise ConfigError(
            f"maniskill/{task}: expected a horizon of at most {dots} control steps (it has as many dots to draw), found "
            f"{horizon}: set env.horizon"
        )


def check_assets(task: str, wanted: list[str], robot: str) -> None:
    """Raises MissingExtraError that names the command: ManiSkill itself would stop and ask on the terminal."""
    from mani_skill.agents.registration import REGISTERED_AGENTS
    from mani_skill.utils import assets

    if robot and robot not in REGISTERED_AGENTS:
        raise ConfigError(
            f"maniskill/{task}: expected a robot of ManiSkill, found {robot!r}."
            f"{did_you_mean(robot, REGISTERED_AGENTS)}"
        )
    names = [*wanted, *(REGISTERED_AGENTS[robot].asset_download_ids if robot else ())]
    missing: list[str] = []
    for name in names:
        parts = (
            assets.expand_data_group_into_individual_data_source_ids(name)
            if name in assets.DATA_GROUPS
            else [name]
        )
        if not all(assets.is_data_source_downloaded(part) for part in parts):
            missing.append(name)
    if missing:
        commands = " && ".join(
            f"python -m mani_skill.utils.download_asset {name}" for name in missing
        )
        raise MissingExtraError(
            f"maniskill/{task} needs files that are not in its package: {', '.join(missing)}. Get them with: "
            f"{commands} (they go to $MS_ASSET_DIR, by default ~/.maniskill)"
        )


def reward_mode(task: str, cls: Any, reward: str) -> str:
    """ManiSkill's reward_mode for `reward`. Raises ConfigError where the task has no such reward."""
    supported = tuple(cls.SUPPORTED_REWARD_MODES)
    if reward == "sparse":  # computed here from success and failure, which every task can tell
        return "none" if "none" in supported else "sparse"
    if reward not in supported:
        known = ["sparse", *(name for name in REWARDS[1:] if name in supported)]
        raise ConfigError(
            f"maniskill/{task}: expected reward among {', '.join(known)}, found {reward}"
        )
    return reward


def render_backend_of(wanted: str) -> tuple[str, str]:
    """(ManiSkill's render_backend, what renders, in words). Raises MissingExtraError where Vulkan is missing or too old."""
    wanted = os.environ.get(RENDER_VARIABLE, "auto") if wanted == "auto" else wanted
    if wanted == "none":
        return "none", "none"
    devices, finding = _vulkan()
    nvidia = [d for d in devices if "nvidia" in (d["name"] + d["driver"]).lower()]
    if wanted == "auto":
        wanted = "gpu" if nvidia else "cpu"
    if (wanted == "cpu" and not any(d["type"] == "CPU" for d in devices)) or finding.status != "ok":
        raise MissingExtraError(
            f"pictures from ManiSkill (render backend {wanted}) need Vulkan: {finding.found}. "
            f"Fix: {finding.fix or 'install mesa-vulkan-drivers (Mesa 25 or newer)'}"
        )
    used = [d for d in devices if d["type"] == "CPU"] if wanted == "cpu" else nvidia or devices
    return wanted, f"{wanted}: {used[0]['name']}, {used[0]['driver_info'] or used[0]['driver']}"


@functools.cache
def _vulkan() -> tuple[list[dict[str, Any]], Any]:
    """Vulkan devices and the doctor's opinion, asked in a child process: a broken driver ends that, not this worker."""
    from mmrl.diagnostics._doctor_probes import vulkan_state

    return vulkan_state()
