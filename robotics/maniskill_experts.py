"""Scripted experts for ManiSkill's table-top tasks: proportional controllers of the tool centre point that read the true poses.

    python -c "
    import numpy as np
    from mmrl.robotics.contract import EnvSpec, initial_states, make_simulator
    simulator = make_simulator(EnvSpec('maniskill', 'PickCube-v1', 100, options={'render_backend': 'none'}))
    simulator.reset(initial_states('eval', 1)[0])
    expert = simulator.expert(np.random.default_rng(0), noise=0.1)
    print([simulator.step(expert()[0]).success for _ in range(60)].index(True))"

Each call decides anew from where robot and things are (mmrl.robotics.maniskill_plans), with no stages to fall out of, so an expert
recovers from its own noise and a recorded label is right for the state it was taken in. One thing is remembered: an arm that does
not move was asked for a place out of its reach (the controller then does nothing), so the stride is shortened until it moves again.
Control mode pd_ee_delta_pose, in 7 dimensions, 6 for an arm without a gripper, or 4 where nothing has to be turned.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mmrl.robotics.contract import ActionSpace
from mmrl.robotics.maniskill_plans import PLANS
from mmrl.robotics.maniskill_skills import turn_between, turn_to_down

__all__ = ["Expert"]

_FULL_STEP = 0.1  # m and rad that an action of 1 asks for
# how much of the remaining way (turn) one step asks for; the arm lags behind what is asked
_GAIN, _TURN_GAIN = 1.6, 0.5
_WANTED_TURN_GAIN = 1.2  # where a plan says how the gripper should be turned, and waits for it


class Expert:
    """Call it for (action to execute, clean label), both (A,) in [-1, 1].

    `noise`: standard deviation, in units of the action, of what is added to every dimension of the executed action but the
    gripper's; the executed action is clipped to the bounds.
    """

    def __init__(
        self, task: str, env: Any, space: ActionSpace, rng: np.random.Generator, noise: float = 0.0
    ) -> None:
        self._plan, self._env, self._space, self._rng, self._noise = (
            PLANS[task],
            env,
            space,
            rng,
            float(noise),
        )
        self._axes = {4: [0, 1, 2, 6], 6: list(range(6)), 7: list(range(7))}[space.dim]
        self._stride, self._last = 1.0, np.full(3, np.inf)

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        goal = self._plan(self._env)
        pose = self._env.agent.tcp.pose.sp
        way = goal.position - pose.p
        stuck = np.linalg.norm(pose.p - self._last) < 0.002 and np.linalg.norm(way) > 0.02
        self._stride = max(0.1, self._stride / 2) if stuck else min(1.0, self._stride * 1.5)
        self._last = np.array(pose.p)
        if goal.facing is None:
            turn = _TURN_GAIN * turn_to_down(pose.q)
        else:
            turn = _WANTED_TURN_GAIN * turn_between(pose.q, goal.facing)
        # the controller's axes are those of the robot's base
        base_33 = self._env.agent.robot.pose.sp.to_transformation_matrix()[:3, :3].astype(float)
        limit = goal.stride / _FULL_STEP
        full = np.zeros(7)
        full[:3] = np.clip(base_33.T @ way / _FULL_STEP * _GAIN, -limit, limit) * self._stride
        # ManiSkill 3.0.1 scales rotations by the lower bound, -0.1
        full[3:6] = -(base_33.T @ turn) / _FULL_STEP
        full[6] = goal.gripper
        label = np.clip(full[self._axes], self._space.low, self._space.high)
        executed = label.copy()
        if self._noise:
            noisy = np.arange(len(label)) != self._space.gripper
            executed[noisy] += self._rng.normal(0.0, self._noise, int(noisy.sum()))
        return np.clip(executed, self._space.low, self._space.high), label
