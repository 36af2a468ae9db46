"""ManiSkill tasks in batches on a GPU: PhysX steps all rows at once, all cameras are rendered in one picture call.

    env:
      suite: maniskill
      slots: 256               # environments
      workers: 2               # processes, each with a batch of 128 of them
      options: {sim_backend: gpu}
    schedule: {stages: 2}      # as many as workers: the policy decides for one batch while the other is stepped

ManiSkill draws where things lie for all rows that are reset in one call from one stream of random numbers, so that what a row gets
depends on the rows beside it. Here each row is reset by itself with its state's seed: equal states are equal in every row, and a
group of RL starts from one state. They are drawn on the GPU, and so are not the states of the same seeds on the CPU.

A physics step moves every row. Rows with an episode that are not to move, because the policy has not decided for them yet, are put
back to where they were: positions and velocities, not the contacts that PhysX keeps from step to step, nor what a task counts by
itself. With one stage, or as many stages as workers, all rows that play move together and none is put back. One row on the CPU is
the same class, and gives ManiSkillSimulator's episodes.

Legend: N rows of the batch, R those of a call, A action dimensions, J joints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mmrl.errors import ConfigError
from mmrl.robotics.contract import ActionError, ActionSpace, EnvSpec, InitialState
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
from mmrl.robotics.vector import Observations, Steps, VectorSimulator

__all__ = ["ManiSkillVector", "from_down"]


class ManiSkillVector(VectorSimulator):
    """Rows of one ManiSkill scene; options and proprioception as ManiSkillSimulator's. Raises ConfigError for several rows on the
    CPU, for controllers that keep a target (ManiSkill moves those of all rows when one is reset), and for tasks that cannot be
    reset row by row (mmrl.robotics.maniskill_build.BATCHED)."""

    several_tasks = False  # each would be a scene with all rows, stepped as a whole

    def __init__(self, spec: EnvSpec, rows: int) -> None:
        super().__init__(spec, rows)
        self.options = ManiSkillOptions.read(spec)
        if rows > 1 and self.options.sim_backend == "cpu":
            raise ConfigError(
                f"maniskill/{spec.task}: expected one row with env.options.sim_backend cpu (ManiSkill batches on a GPU "
                f"only), found {rows}: set it to gpu, or use SerialVector"
            )
        if rows > 1 and "target" in self.options.control_mode:
            raise ConfigError(
                f"maniskill/{spec.task}: expected a control_mode without a target of its own in a batch, found "
                f"{self.options.control_mode}: when a row is reset, ManiSkill moves the targets of all. Take one such as "
                "pd_ee_delta_pose, or set env.options.sim_backend to cpu"
            )
        self._scene: Scene | None = None
        self._space: ActionSpace | None = None
        self._steps_N = np.zeros(rows, np.int64)
        self._running_N = np.zeros(rows, bool)

    @property
    def scene(self) -> Scene:
        """The scene, built on first use."""
        if self._scene is None:
            self._scene = build_scene(self.spec, self.options, self.rows)
            _seed_row_by_row(self._scene.env)
        return self._scene

    @property
    def action_space(self) -> ActionSpace:
        """Builds the scene if need be."""
        if self._space is None:
            self._space = action_space_of(self.scene.env, self.options, self.spec.task)
        return self._space

    @property
    def proprio_dim(self) -> int:
        """S: 8, or J. Builds the scene if need be."""
        return int(self._proprio().shape[1])

    def reset(self, states: Mapping[int, InitialState]) -> dict[int, Exception]:
        """See VectorSimulator. Renders nothing."""
        env = self.scene.env
        for row, state in states.items():
            # of this row alone: what is drawn depends on its seed only, not on which row it is
            env.reset(
                seed=[int(state.seed)],
                options={"env_idx": torch.tensor([row], device=env.device)},
            )
            self._steps_N[row], self._running_N[row] = 0, True
        tells_success(self.spec, env)
        return {}

    def step(self, actions: Mapping[int, np.ndarray]) -> Steps:
        """See VectorSimulator."""
        env, options = self.scene.env, self.options
        failed: dict[int, Exception] = {
            row: ActionError(
                f"maniskill/{self.spec.task}: expected a reset before this step, found an episode that is over"
            )
            for row in actions
            if not self._running_N[row]
        }
        rows = np.array([row for row in actions if row not in failed], np.int64)
        if not len(rows):
            empty = np.zeros(0, bool)
            return Steps((), np.zeros(0, np.float32), empty, empty, empty, failed)
        full_NA = np.zeros((self.rows, len(env.single_action_space.low)), np.float32)
        axes = list(SHORT_AXES) if options.dims == 4 else slice(None)
        for row in rows:
            full_NA[row, axes] = actions[row]
        held = np.flatnonzero(self._running_N & ~np.isin(np.arange(self.rows), rows))
        before = env.get_state_dict() if len(held) else None
        _, reward_N, _, _, info = env.step(torch.from_numpy(full_NA).to(env.device))
        if before is not None:
            self._put_back(before, held)
        success_N, failure_N = (
            info[name].bool() if name in info else torch.zeros_like(info["success"].bool())
            for name in ("success", "fail")
        )
        value_N = success_N.float() - failure_N.float() if options.reward == "sparse" else reward_N
        # one transfer for all that decides how it goes on
        flags_2N = torch.stack([success_N, failure_N]).cpu().numpy()
        self._steps_N[rows] += 1
        ended_R = flags_2N[:, rows].any(0) & options.stop_at_success
        truncated_R = (self._steps_N[rows] >= self.spec.horizon) & ~ended_R
        self._running_N[rows] = ~(ended_R | truncated_R)
        return Steps(
            tuple(rows.tolist()), value_N[rows], ended_R, truncated_R, flags_2N[0, rows], failed
        )

    def _put_back(self, state: Mapping[str, Any], rows: np.ndarray) -> None:
        """Rows to where `state` has them, and their clock."""
        env = self.scene.env
        places = torch.from_numpy(rows).to(env.device)
        env.set_state_dict(
            {
                kind: {name: values[places] for name, values in parts.items()}
                for kind, parts in state.items()
                if kind in ("actors", "articulations")
            },
            env_idx=places,
        )
        env._elapsed_steps[places] -= 1

    def observe(self, rows: Sequence[int]) -> Observations:
        """See VectorSimulator: all rows are rendered at once, and those of `rows` are returned, on the device."""
        places = list(rows)
        said = self.scene.instructions()
        own = self.options.instruction or (None if said else instruction_of(self.spec.task))
        return Observations(
            tuple(rows),
            {
                camera: pictures_NHW3[places]
                for camera, pictures_NHW3 in self.scene.pictures(self.options.show_goal).items()
            },
            self._proprio()[places],
            tuple(said[row] if own is None else own for row in rows),
        )

    def drop(self, row: int) -> None:
        """See VectorSimulator."""
        self._running_N[row] = False

    def close(self) -> None:
        """See VectorSimulator."""
        if self._scene is not None:
            self._scene.env.close()
        self._scene, self._space = None, None
        self._running_N[:] = False

    def versions(self) -> dict[str, str]:
        """See Simulator."""
        return versions(self.options) if self._scene is None else self._scene.versions(self.options)

    def _proprio(self) -> torch.Tensor:
        """(N, S) float32; see ManiSkillSimulator."""
        agent, fingers_at = self.scene.env.agent, self.scene.fingers
        qpos_NJ = agent.robot.get_qpos()
        if fingers_at is None:
            return qpos_NJ.float()
        pose = agent.robot.pose.inv() * agent.tcp.pose
        fingers_N2 = torch.zeros(self.rows, 2, device=qpos_NJ.device)
        fingers_N2[:, : len(fingers_at)] = qpos_NJ[:, fingers_at]
        return torch.cat([pose.p, from_down(pose.q), fingers_N2], 1).float()


def _streams(seeds: Sequence[int]) -> Any:
    """A stream of random numbers for each seed, as ManiSkill has them by default."""
    from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG

    return BatchedRNG.from_seeds(list(seeds))


def _seed_row_by_row(env: Any) -> None:
    """Make a seeded reset of one row seed the streams of random numbers of that row, and torch's. ManiSkill seeds anew those of all
    rows, with seeds that depend on the row: running episodes would begin theirs again, and 256 rows take a quarter of a second.
    """

    def episode(seed: Sequence[int], env_idx: torch.Tensor) -> None:
        (number,), (row,) = seed, env_idx.tolist()
        # torch is seeded with the first
        env._episode_seed = np.full(env.num_envs, number, np.int64)
        env._batched_episode_rng[row] = env._episode_rng = _streams([number])[0]

    env._set_main_rng = lambda seed: None  # what draws seeds where none is given
    env._set_episode_rng = episode


def from_down(quaternions_N4: torch.Tensor) -> torch.Tensor:
    """Rotation vectors (N, 3) of (w, x, y, z) relative to the gripper pointing straight down, (0, 1, 0, 0): near 0 in use."""
    w, x, y, z = quaternions_N4.double().unbind(1)
    relative_N4 = torch.stack([x, -w, z, -y], 1)  # conj((0, 1, 0, 0)) * q
    relative_N4 = torch.where(relative_N4[:, :1] < 0, -relative_N4, relative_N4)
    length_N = relative_N4[:, 1:].norm(dim=1)
    small = length_N <= 1e-9
    angle_N = 2 * torch.atan2(length_N, relative_N4[:, 0])
    factor_N = torch.where(
        small, torch.full_like(length_N, 2.0), angle_N / length_N.clamp_min(1e-9)
    )
    return relative_N4[:, 1:] * factor_N[:, None]
