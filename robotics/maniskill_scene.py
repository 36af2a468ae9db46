"""A ManiSkill scene: its options, how it is built, and what is read from it. One environment or a batch of them are built alike.

python -c "from mmrl.robotics.maniskill_scene import instruction_of; print(instruction_of('PushCube-v1'))"
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from mmrl.errors import ConfigError, MissingExtraError, did_you_mean
from mmrl.robotics.contract import ActionSpace, EnvSpec
from mmrl.robotics.maniskill_build import (
    RENDER_VARIABLE,
    check_assets,
    check_batched,
    check_horizon,
    check_task,
    default_robot,
    fixed_robot,
    registered_tasks,
    render_backend_of,
    reward_mode,
)
from mmrl.robotics.options import Place, SimulatorOptions

__all__ = [
    "SHORT_AXES",
    "ManiSkillOptions",
    "Scene",
    "action_space_of",
    "build_scene",
    "instruction_of",
    "tells_success",
    "versions",
]

_EE_NAMES = ("x", "y", "z", "rx", "ry", "rz")
SHORT_AXES = (0, 1, 2, 6)  # of the seven of pd_ee_delta_pose: x, y, z, gripper

_INSTRUCTIONS = {
    "PushCube-v1": "push the cube to the goal",
    "PullCube-v1": "pull the cube to the goal",
    "PickCube-v1": "pick up the cube and move it to the goal",
    "StackCube-v1": "stack the red cube on the green cube",
    "StackPyramid-v1": "stack the cubes into a pyramid",
    "PlaceSphere-v1": "put the ball into the bin",
    "PokeCube-v1": "poke the cube with the peg",
    "PullCubeTool-v1": "pull the cube closer with the tool",
    "LiftPegUpright-v1": "lift the peg and stand it upright",
    "PegInsertionSide-v1": "insert the peg into the hole in the box",
    "PlugCharger-v1": "plug the charger into the socket",
    "PushT-v1": "push the T onto its outline",
    "RollBall-v1": "roll the ball to the goal",
    "DrawTriangle-v1": "draw along the outline of the triangle",
    "DrawSVG-v1": "draw along the outline",
    "FMBAssembly1Easy-v1": "put the green bridge into the board",
    "PickCubeSO100-v1": "pick up the cube and move it to the goal",
    "PickCubeWidowXAI-v1": "pick up the cube and move it to the goal",
}


class ManiSkillOptions(SimulatorOptions):
    """`EnvSpec.options` of this suite.

    control_mode: ManiSkill's controller. dims: 4 leaves x, y, z and gripper of a 7-dimensional pose controller and holds the
    rotation. robot: ManiSkill's robot id, '' for the task's own. reward: sparse (1 success, -1 failure, else 0), dense or
    normalized_dense where the task has them. stop_at_success: end the episode with its first success or failure; otherwise it
    always runs to the horizon. render_backend: auto, cpu, gpu, cuda:1, a PCI address, or none (no pictures, no Vulkan); auto
    reads MMRL_MANISKILL_RENDER, then takes an NVIDIA GPU where Vulkan has one. sim_backend: gpu computes the physics of all slots
    of a worker at once, on an NVIDIA GPU (mmrl.robotics.maniskill_vector). show_goal: draw goal markers that ManiSkill hides from
    its cameras (without them the goal of PickCube-v1 cannot be seen). camera_eye, camera_target (m, world frame), camera_fov
    (rad): another view for 'base'. instruction: what to do, in words; empty: the environment's own (get_language_instruction),
    or those of the task's name.
    """

    control_mode: str = "pd_ee_delta_pose"
    dims: Literal[4, 7] | None = None
    robot: str = ""
    reward: Literal["sparse", "dense", "normalized_dense"] = "sparse"
    stop_at_success: bool = True
    render_backend: str = "auto"
    sim_backend: Literal["cpu", "gpu"] = "cpu"
    shader: str = "minimal"
    proprio: Literal["tcp", "qpos"] = "tcp"
    show_goal: bool = True
    instruction: str = ""
    camera_eye: Place | None = None
    camera_target: Place = (0.0, 0.0, 0.05)
    camera_fov: Annotated[float, Field(gt=0, lt=math.pi)] | None = None


@dataclass
class Scene:
    """What was built: ManiSkill's environment (a BaseEnv), what renders, in words, its sensor for each camera of the spec, and the
    places of the fingers in the joint positions (None: proprioception is all joints)."""

    env: Any
    render: str
    sensors: dict[str, str]
    fingers: list[int] | None

    def pictures(self, show_goal: bool) -> dict[str, Any]:
        """Renders now: uint8 tensors (N, H, W, 3) by camera; empty where nothing renders."""
        if not self.sensors:
            return {}
        if not show_goal:
            for hidden in self.env._hidden_objects:
                hidden.hide_visual()
        scene = self.env.scene
        scene.update_render(update_sensors=True, update_human_render_cameras=False)
        for name in self.sensors.values():
            scene.sensors[name].capture()
        return {camera: _picture(scene.sensors[name]) for camera, name in self.sensors.items()}

    def instructions(self) -> list[str]:
        """The episodes' instructions in the environment's own words; empty where it has none (ManiSkill's bridge tasks have)."""
        say = getattr(self.env, "get_language_instruction", None)
        words = [] if say is None else say()
        return [words] * self.env.num_envs if isinstance(words, str) else list(map(str, words))

    def versions(self, options: ManiSkillOptions) -> dict[str, str]:
        """See Simulator.versions."""
        return versions(options) | {"robot": str(self.env.agent.uid), "render": self.render}


def versions(options: ManiSkillOptions) -> dict[str, str]:
    """What a result must name of a scene that has not been built."""
    found = {
        "control_mode": options.control_mode,
        "shader": options.shader,
        "reward": options.reward,
        "goal": "shown" if options.show_goal else "hidden",
    }
    if options.sim_backend != "cpu":
        found["physics"] = options.sim_backend
    for package in ("mani_skill", "sapien", "torch"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def build_scene(spec: EnvSpec, options: ManiSkillOptions, rows: int = 1) -> Scene:
    """ManiSkill's environment with `rows` copies of the task. Raises ConfigError and MissingExtraError as Simulator does."""
    registered = registered_tasks()
    check_task(spec.task, registered)
    entry = registered[spec.task]
    check_horizon(spec.task, entry.cls, spec.horizon)
    if rows > 1:
        check_batched(spec.task, entry.cls)
    fixed = fixed_robot(spec.task, options.robot)
    robot = fixed or options.robot or default_robot(entry.cls)
    if "wrist" in spec.cameras and robot == "panda":
        robot = "panda_wristcam"
    check_assets(spec.task, entry.asset_download_ids, robot)
    _check_device(spec, options)
    backend, render = render_backend_of(options.render_backend)
    if options.sim_backend == "gpu" and backend not in ("gpu", "cuda", "none"):
        raise MissingExtraError(
            f"maniskill/{spec.task}: expected pictures from the GPU that computes the physics (env.options.sim_backend gpu), found "
            f"render backend {backend} ({render}). Fix: let Vulkan see the GPU (in containers NVIDIA_DRIVER_CAPABILITIES needs "
            "graphics), and leave render_backend at auto"
        )
    settings: dict[str, Any] = {
        "num_envs": rows,
        "obs_mode": "none",
        "reward_mode": reward_mode(spec.task, entry.cls, options.reward),
        "control_mode": options.control_mode,
        "sim_backend": options.sim_backend,
        "render_backend": backend,
        "sensor_configs": {
            "width": spec.image_size,
            "height": spec.image_size,
            "shader_pack": options.shader,
        },
    }
    if robot and not fixed:
        settings["robot_uids"] = robot
    if options.camera_eye is not None or options.camera_fov is not None:
        settings["sensor_configs"]["base_camera"] = _view(options)
    try:
        env = entry.make(**settings)
    except Exception as error:
        # whatever a task's own code raises: the user hears which task, and why
        message = (
            f"maniskill/{spec.task}: ManiSkill cannot build it with control_mode {options.control_mode}, robot "
            f"{robot or 'default'}, render backend {backend}: {type(error).__name__}: {error}"
        )
        if isinstance(error, ImportError):
            raise MissingExtraError(message) from error
        if re.search(r"vk::|vulkan|physical device|render", str(error), re.IGNORECASE):
            if backend == "none":
                raise ConfigError(
                    f"{message}. Some tasks need a renderer even where no picture is taken: set render_backend to cpu or gpu"
                ) from error
            raise MissingExtraError(
                f"{message}. Run `mmrl doctor`, or set {RENDER_VARIABLE}=cpu"
            ) from error
        raise ConfigError(message) from error
    return Scene(
        env,
        render,
        {} if backend == "none" else _sensor_names(spec, env),
        _finger_indices(env) if options.proprio == "tcp" else None,
    )


def _check_device(spec: EnvSpec, options: ManiSkillOptions) -> None:
    if options.sim_backend == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise MissingExtraError(
            f"maniskill/{spec.task}: env.options.sim_backend gpu needs an NVIDIA GPU and a torch built for CUDA, found torch "
            f"{torch.__version__} without a GPU. Fix: set it to cpu, or run where `mmrl doctor` shows a GPU (workers on Ray: "
            "engine.ray.gpus_per_worker)"
        )


def tells_success(spec: EnvSpec, env: Any) -> None:
    """Raises ConfigError where the task does not."""
    if "success" not in env.evaluate():
        raise ConfigError(
            f"maniskill/{spec.task}: expected a task that tells success, found one that does not: nothing could be "
            "rewarded or counted. Choose another"
        )


def instruction_of(task: str) -> str:
    """What to do, in words: 'push the cube to the goal'; for tasks not listed, the words of their name."""
    if task in _INSTRUCTIONS:
        return _INSTRUCTIONS[task]
    name = re.sub(r"-v\d+$", "", task)
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)).lower() or task


def _view(options: ManiSkillOptions) -> dict[str, Any]:
    """Settings of the camera 'base_camera'."""
    from mani_skill.utils import sapien_utils

    view: dict[str, Any] = {}
    if options.camera_eye is not None:
        view["pose"] = sapien_utils.look_at(list(options.camera_eye), list(options.camera_target))
    if options.camera_fov is not None:
        view["fov"] = float(options.camera_fov)
    return view


def _sensor_names(spec: EnvSpec, env: Any) -> dict[str, str]:
    """ManiSkill's sensor for every camera of the spec. Raises ConfigError for a camera that the task has not."""
    there = list(env.scene.sensors)
    outside = [name for name in there if name not in env._agent_sensor_configs]
    aliases = {"wrist": "hand_camera", "base": "base_camera"}
    if "base_camera" not in there and outside:
        aliases["base"] = outside[0]
    found = {}
    for camera in spec.cameras:
        name = camera if camera in there else aliases.get(camera, camera)
        if name not in there:
            known = [alias for alias, target in aliases.items() if target in there] + there
            env.close()
            raise ConfigError(
                f"maniskill/{spec.task}: expected cameras among {', '.join(known) or 'none'}, found {camera!r}."
                f"{did_you_mean(camera, known)}"
            )
        found[camera] = name
    return found


def _finger_indices(env: Any) -> list[int] | None:
    """Places of the fingers in qpos (at most two); None for a robot without a tool centre point."""
    if getattr(env.agent, "tcp", None) is None:
        return None
    names = [joint.name for joint in env.agent.robot.active_joints]
    return [
        names.index(name) for name in getattr(env.agent, "gripper_joint_names", ()) if name in names
    ][:2]


def action_space_of(env: Any, options: ManiSkillOptions, task: str) -> ActionSpace:
    """Of one control step of one environment. Raises ConfigError where it is not flat, or cannot have options.dims."""
    box = env.single_action_space
    if getattr(box, "shape", None) is None or len(box.shape) != 1:
        raise ConfigError(f"maniskill/{task}: expected a flat action space, found {box}")
    count = int(box.shape[0])
    has_gripper = "gripper" in getattr(env.agent.controller, "controllers", {})
    arm = count - 1 if has_gripper else count
    names = (
        list(_EE_NAMES[:arm])
        if "_ee_" in options.control_mode and arm <= 6
        else [f"joint{i + 1}" for i in range(arm)]
    )
    names += ["gripper"] * has_gripper
    axes = list(range(count))
    if options.dims is not None and options.dims != count:
        if not (
            options.dims == 4
            and count == 7
            and options.control_mode.endswith("delta_pose")
            and has_gripper
        ):
            raise ConfigError(
                f"maniskill/{task}: expected dims {count} with control_mode {options.control_mode}, found "
                f"{options.dims} (4 needs a delta_pose controller of 7 dimensions)"
            )
        axes = list(SHORT_AXES)
    return ActionSpace(
        tuple(float(box.low[i]) for i in axes),
        tuple(float(box.high[i]) for i in axes),
        tuple(names[i] for i in axes),
        len(axes) - 1 if has_gripper else None,
        float(box.high[-1]) if has_gripper else 1.0,
    )


def _picture(sensor: Any) -> Any:
    """uint8 tensor (N, H, W, 3) on the device that renders."""
    import torch

    rgb = sensor.get_obs(rgb=True, depth=False, position=False, segmentation=False)["rgb"]
    return rgb.to(torch.uint8)
