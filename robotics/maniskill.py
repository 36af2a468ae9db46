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

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from mmrl.errors import ConfigError, install_command
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
from mmrl.robotics.maniskill_build import RENDER_VARIABLE
from mmrl.robotics.maniskill_scene import (
    SHORT_AXES,
    ManiSkillOptions,
    Scene,
    action_space_of,
    build_scene,
    instruction_of,
    tells_success,
    versions,
)
from mmrl.robotics.vector import VectorSimulator

__all__ = ["RENDER_VARIABLE", "ManiSkillOptions", "ManiSkillSimulator", "instruction_of"]


class ManiSkillSimulator(Simulator):
    """One ManiSkill environment; see the module for cameras and proprioception, ManiSkillOptions for the options."""

    packages: ClassVar[Mapping[str, str]] = {"mani_skill": install_command("robotics")}

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.options = ManiSkillOptions.read(spec)
        if self.batches(spec.options):
            raise ConfigError(
                f"maniskill/{spec.task}: expected env.options.sim_backend cpu where one environment is played by itself (experts, "
                "recording, several simulators one after the other), found gpu, which steps a batch: set it to cpu here"
            )
        self._scene: Scene | None = None
        self._space: ActionSpace | None = None
        self._steps = 0
        self._ended = True

    @property
    def env(self) -> Any:
        """ManiSkill's own environment (a BaseEnv), built on first use."""
        return self.scene.env

    @property
    def scene(self) -> Scene:
        """The scene, built on first use."""
        if self._scene is None:
            self._scene = build_scene(self.spec, self.options)
        return self._scene

    @classmethod
    def batches(cls, options: Mapping[str, Any]) -> bool:
        """See Simulator: on the GPU."""
        return options.get("sim_backend", "cpu") == "gpu"

    @classmethod
    def vector(cls, spec: EnvSpec, rows: int) -> VectorSimulator | None:
        """See Simulator: ManiSkill's own batch on the GPU."""
        if not cls.batches(spec.options):
            return None
        from mmrl.robotics.maniskill_vector import ManiSkillVector

        return ManiSkillVector(spec, rows)

    @property
    def action_space(self) -> ActionSpace:
        """Builds the environment if need be."""
        if self._space is None:
            self._space = action_space_of(self.env, self.options, self.spec.task)
        return self._space

    @property
    def proprio_dim(self) -> int:
        """S: 8, or the number of joints. Builds the environment if need be."""
        return len(self._proprio())

    def reset(self, state: InitialState) -> None:
        """Start the episode of `state.seed`; renders nothing."""
        self.env.reset(seed=int(state.seed))
        self._ended = True
        tells_success(self.spec, self.env)
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
            full[list(SHORT_AXES)] = action
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
            {
                camera: np.ascontiguousarray(batch[0].cpu().numpy())
                for camera, batch in self.scene.pictures(self.options.show_goal).items()
            },
            self._proprio(),
            self.options.instruction
            or next(iter(self.scene.instructions()), "")
            or instruction_of(self.spec.task),
        )

    def close(self) -> None:
        if self._scene is not None:
            self._scene.env.close()
        self._scene, self._space, self._ended = None, None, True

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
        return versions(self.options) if self._scene is None else self._scene.versions(self.options)

    def _proprio(self) -> np.ndarray:
        agent, fingers_at = self.env.agent, self.scene.fingers
        qpos = agent.robot.get_qpos()[0].numpy()
        if fingers_at is None:
            return qpos.astype(np.float32)
        pose = agent.robot.pose.sp.inv() * agent.tcp.pose.sp
        fingers = np.zeros(2)
        fingers[: len(fingers_at)] = qpos[fingers_at]
        import torch

        from mmrl.robotics.maniskill_vector import from_down

        turned = from_down(torch.from_numpy(pose.q)[None])[0].numpy()
        return np.concatenate([pose.p, turned, fingers]).astype(np.float32)


def _flag(info: Mapping[str, Any], name: str) -> bool:
    return bool(info[name][0]) if name in info else False
