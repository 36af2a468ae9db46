"""ManiSkill 3 tasks as simulators of the bridge: physics on the CPU, pictures only when asked for.

    python -c "
    from mmrl.robotics.contract import EnvSpec, initial_states, make_simulator, run_chunk
    simulator = make_simulator(EnvSpec('maniskill', 'PushCube-v1', horizon=50))
    simulator.reset(initial_states('eval', 1)[0])
    print(run_chunk(simulator, [[1, 0, 0, 0, 0, 0, -1]] * 8).observation.proprio)"

A control step never renders: the environment runs in its observation mode 'none' and `observe` takes one picture per camera
of the spec. Cameras: 'base' (the task's own), 'wrist' (a hand camera; the plain Panda is exchanged for the one that carries
a camera), or ManiSkill's own names. The horizon is the spec's, not the task's registered one.

Proprioception, S = 8 for every arm with a tool centre point: its position in the frame of the robot's base (m, 3), its
rotation vector relative to the gripper pointing straight down (rad, 3; at rest near 0 for the Panda, near (0, 0, -pi/2) for
the one with a hand camera), positions of the two fingers (m, 2; 0 where there are none). Other robots, and option
proprio='qpos': all joint positions.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from mmrl.errors import ConfigError, MissingExtraError, did_you_mean
from mmrl.robotics.contract import (
    ActionError,
    ActionSpace,
    EnvSpec,
    InitialState,
    Observation,
    Simulator,
    StepResult,
    check_actions,
)
from mmrl.robotics.maniskill_build import (
    RENDER_VARIABLE,
    check_assets,
    check_horizon,
    check_task,
    default_robot,
    fixed_robot,
    registered_tasks,
    render_backend_of,
    reward_mode,
)
from mmrl.robotics.options import Place, SimulatorOptions

__all__ = ["RENDER_VARIABLE", "ManiSkillOptions", "ManiSkillSimulator"]

_EE_NAMES = ("x", "y", "z", "rx", "ry", "rz")
_SHORT_AXES = (0, 1, 2, 6)  # of the seven of pd_ee_delta_pose: x, y, z, gripper

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
    reads MMRL_MANISKILL_RENDER, then takes an NVIDIA GPU where Vulkan has one. show_goal: draw goal markers that ManiSkill
    hides from its cameras (without them the goal of PickCube-v1 cannot be seen). camera_eye, camera_target (m, world
    frame), camera_fov (rad): another view for 'base'. instruction: what to do, in words; empty: the environment's own
    (get_language_instruction), or those of the task's name.
    """

    control_mode: str = "pd_ee_delta_pose"
    dims: Literal[4, 7] | None = None
    robot: str = ""
    reward: Literal["sparse", "dense", "normalized_dense"] = "sparse"
    stop_at_success: bool = True
    render_backend: str = "auto"
    shader: str = "minimal"
    proprio: Literal["tcp", "qpos"] = "tcp"
    show_goal: bool = True
    instruction: str = ""
    camera_eye: Place | None = None
    camera_target: Place = (0.0, 0.0, 0.05)
    camera_fov: Annotated[float, Field(gt=0, lt=math.pi)] | None = None


class ManiSkillSimulator(Simulator):
    """One ManiSkill environment; see the module for cameras and proprioception, ManiSkillOptions for the options."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.options = ManiSkillOptions.read(spec)
        self._env: Any = None
        self._render = ""
        self._space: ActionSpace | None = None
        self._sensors: dict[str, str] = {}
        self._fingers: list[int] | None = None
        self._steps = 0
        self._ended = True

    @property
    def env(self) -> Any:
        """ManiSkill's own environment (a BaseEnv), built on first use."""
        if self._env is None:
            self._build()
        return self._env

    @property
    def action_space(self) -> ActionSpace:
        """Builds the environment if need be."""
        if self._space is None:
            self._space = _action_space(self.env, self.options, self.spec.task)
        return self._space

    @property
    def proprio_dim(self) -> int:
        """S: 8, or the number of joints. Builds the environment if need be."""
        return len(self._proprio())

    def reset(self, state: InitialState) -> None:
        """Start the episode of `state.seed`; renders nothing."""
        self.env.reset(seed=int(state.seed))
        if "success" not in self.env.evaluate():
            self._ended = True
            raise ConfigError(
                f"maniskill/{self.spec.task}: expected a task that tells success, found one that does not: nothing could be "
                "rewarded or counted. Choose another"
            )
        self._steps, self._ended = 0, False

    def step(self, action_A: np.ndarray) -> StepResult:
        """One control step (A,). Raises ActionError for a wrong shape, NaN, or an episode that is over."""
        if self._ended:
            raise ActionError(
                f"maniskill/{self.spec.task}: expected a reset before this step, found an episode that is over"
            )
        action = check_actions(np.asarray(action_A)[None], self.action_space)[0].astype(np.float32)
        if self.options.dims == 4:
            full = np.zeros(7, np.float32)
            full[list(_SHORT_AXES)] = action
            action = full
        _, reward, _, _, info = self.env.step(action)
        self._steps += 1
        success, failure = _flag(info, "success"), _flag(info, "fail")
        terminated = self.options.stop_at_success and (success or failure)
        truncated = self._steps >= self.spec.horizon and not terminated
        self._ended = terminated or truncated
        value = (
            float(success) - float(failure) if self.options.reward == "sparse" else float(reward[0])
        )
        return StepResult(value, terminated, truncated, success)

    def observe(self) -> Observation:
        """Renders now. Pictures are empty with render_backend='none'."""
        return Observation(
            self._pictures(),
            self._proprio(),
            self.options.instruction or self._said() or instruction_of(self.spec.task),
        )

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env, self._space, self._ended = None, None, True

    def expert(self, rng: np.random.Generator, noise: float = 0.0) -> Any:
        """A scripted expert (mmrl.robotics.maniskill_experts) for the episode just reset."""
        from mmrl.robotics.maniskill_experts import Expert
        from mmrl.robotics.maniskill_plans import PLANS, TURNING

        if self.spec.task not in PLANS:
            return super().expert(rng, noise)
        if self.options.control_mode != "pd_ee_delta_pose":
            raise ConfigError(
                f"maniskill/{self.spec.task}: expected control_mode pd_ee_delta_pose for the scripted expert, found "
                f"{self.options.control_mode}"
            )
        if self.options.dims == 4 and self.spec.task in TURNING:
            raise ConfigError(
                f"maniskill/{self.spec.task}: expected dims 7 for the scripted expert, which turns the gripper, found 4"
            )
        return Expert(self.spec.task, self.env, self.action_space, rng, noise)

    def versions(self) -> dict[str, str]:
        found = {
            "control_mode": self.options.control_mode,
            "shader": self.options.shader,
            "reward": self.options.reward,
            "goal": "shown" if self.options.show_goal else "hidden",
        }
        for package in ("mani_skill", "sapien", "torch"):
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                found[package] = "not installed"
        if self._env is not None:
            found["robot"] = str(self._env.agent.uid)
            found["render"] = self._render
        return found

    def _build(self) -> None:
        registered = registered_tasks()
        check_task(self.spec.task, registered)
        options, spec = self.options, registered[self.spec.task]
        check_horizon(self.spec.task, spec.cls, self.spec.horizon)
        fixed = fixed_robot(self.spec.task, options.robot)
        robot = fixed or options.robot or default_robot(spec.cls)
        if "wrist" in self.spec.cameras and robot == "panda":
            robot = "panda_wristcam"
        check_assets(self.spec.task, spec.asset_download_ids, robot)
        backend, self._render = render_backend_of(options.render_backend)
        settings: dict[str, Any] = {
            "num_envs": 1,
            "obs_mode": "none",
            "reward_mode": reward_mode(self.spec.task, spec.cls, options.reward),
            "control_mode": options.control_mode,
            "sim_backend": "cpu",
            "render_backend": backend,
            "sensor_configs": {
                "width": self.spec.image_size,
                "height": self.spec.image_size,
                "shader_pack": options.shader,
            },
        }
        if robot and not fixed:
            settings["robot_uids"] = robot
        if options.camera_eye is not None or options.camera_fov is not None:
            settings["sensor_configs"]["base_camera"] = _view(options)
        try:
            env = spec.make(**settings)
        except Exception as error:
            # whatever a task's own code raises: the user hears which task, and why
            message = (
                f"maniskill/{self.spec.task}: ManiSkill cannot build it with control_mode {options.control_mode}, robot "
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
        self._sensors = {} if backend == "none" else _sensor_names(self.spec, env)
        self._fingers = _finger_indices(env) if options.proprio == "tcp" else None
        self._env = env

    def _pictures(self) -> dict[str, np.ndarray]:
        env = self.env
        if not self._sensors:
            return {}
        if not self.options.show_goal:
            for hidden in env._hidden_objects:
                hidden.hide_visual()
        env.scene.update_render(update_sensors=True, update_human_render_cameras=False)
        for name in self._sensors.values():
            env.scene.sensors[name].capture()
        return {camera: _picture(env.scene.sensors[name]) for camera, name in self._sensors.items()}

    def _said(self) -> str:
        """The episode's instruction in the environment's own words; "" where it has none (ManiSkill's bridge tasks have one)."""
        say = getattr(self.env, "get_language_instruction", None)
        if say is None:
            return ""
        words = say()
        return str(words if isinstance(words, str) else words[0])

    def _proprio(self) -> np.ndarray:
        agent = self.env.agent
        qpos = agent.robot.get_qpos()[0].numpy()
        if self._fingers is None:
            return qpos.astype(np.float32)
        pose = agent.robot.pose.sp.inv() * agent.tcp.pose.sp
        fingers = np.zeros(2)
        fingers[: len(self._fingers)] = qpos[self._fingers]
        return np.concatenate([pose.p, _from_down(pose.q), fingers]).astype(np.float32)


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


def _action_space(env: Any, options: ManiSkillOptions, task: str) -> ActionSpace:
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
        axes = list(_SHORT_AXES)
    return ActionSpace(
        tuple(float(box.low[i]) for i in axes),
        tuple(float(box.high[i]) for i in axes),
        tuple(names[i] for i in axes),
        len(axes) - 1 if has_gripper else None,
        float(box.high[-1]) if has_gripper else 1.0,
    )


def _picture(sensor: Any) -> np.ndarray:
    """uint8 (H, W, 3), a copy."""
    rgb = sensor.get_obs(rgb=True, depth=False, position=False, segmentation=False)["rgb"]
    return np.ascontiguousarray(rgb[0].cpu().numpy().astype(np.uint8))


def _flag(info: Mapping[str, Any], name: str) -> bool:
    return bool(info[name][0]) if name in info else False


def _from_down(quaternion: Any) -> np.ndarray:
    """Rotation vector (3,) of (w, x, y, z) relative to the gripper pointing straight down, (0, 1, 0, 0): near 0 in use."""
    w, x, y, z = (float(v) for v in quaternion)
    relative = np.array([x, -w, z, -y])  # conj((0, 1, 0, 0)) * q
    if relative[0] < 0:
        relative = -relative
    length = float(np.linalg.norm(relative[1:]))
    return relative[1:] * (2 * math.atan2(length, relative[0]) / length if length > 1e-9 else 2.0)
