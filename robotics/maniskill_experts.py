"""Scripted experts for four ManiSkill tasks: proportional controllers of the tool centre point that read the true poses.

    python -c "
    import numpy as np
    from mmrl.robotics.contract import EnvSpec, initial_states, make_simulator
    simulator = make_simulator(EnvSpec('maniskill', 'PickCube-v1', 100, options={'render_backend': 'none'}))
    simulator.reset(initial_states('eval', 1)[0])
    expert = simulator.expert(np.random.default_rng(0), noise=0.1)
    print([simulator.step(expert()[0]).success for _ in range(60)].index(True))"

Each call decides anew from where robot and cubes are, with no stages to fall out of, so an expert recovers from its own noise and
a recorded label is right for the state it was taken in. One thing is remembered: an arm that does not move was asked for a
place out of its reach (the controller then does nothing), so the stride is shortened until it moves again. Control mode
pd_ee_delta_pose, in 7 or 4 dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mmrl.robotics.contract import ActionSpace

__all__ = ["EXPERTS", "Expert", "Goal"]

_OPEN, _CLOSED = 1.0, -1.0
_FULL_STEP = 0.1  # m and rad that an action of 1 asks for
# how much of the remaining way (turn) one step asks for; the arm lags behind what is asked
_GAIN, _TURN_GAIN = 1.6, 0.5
_PUSH = 0.03  # m asked for in one step of a push: a faster one kicks the cube past the goal
_CUBE = 0.04  # edge of every cube here, m

Goal = tuple[np.ndarray, float]
"""Where the tool centre point should go (3,), world frame, m; and the gripper's action."""


class Expert:
    """Call it for (action to execute, clean label), both (A,) in [-1, 1].

    `noise`: standard deviation, in units of the action, of what is added to every dimension of the executed action but the
    gripper's; the executed action is clipped to the bounds.
    """

    def __init__(
        self, task: str, env: Any, space: ActionSpace, rng: np.random.Generator, noise: float = 0.0
    ) -> None:
        self._goal, self._env, self._space, self._rng, self._noise = (
            EXPERTS[task],
            env,
            space,
            rng,
            float(noise),
        )
        self._stride, self._last = 1.0, np.full(3, np.inf)

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        target, gripper = self._goal(self._env)
        pose = self._env.agent.tcp.pose.sp
        way = target - pose.p
        stuck = np.linalg.norm(pose.p - self._last) < 0.002 and np.linalg.norm(way) > 0.02
        self._stride = max(0.1, self._stride / 2) if stuck else min(1.0, self._stride * 1.5)
        self._last = np.array(pose.p)
        full = np.zeros(7)
        full[:3] = np.clip(way / _FULL_STEP * _GAIN, -1.0, 1.0) * self._stride
        # ManiSkill 3.0.1 scales rotations by the lower bound, -0.1
        full[3:6] = -_TURN_GAIN * _turn_to_down(pose.q) / _FULL_STEP
        full[6] = gripper
        label = np.clip(
            full if self._space.dim == 7 else full[[0, 1, 2, 6]], self._space.low, self._space.high
        )
        executed = label.copy()
        if self._noise:
            executed[:-1] += self._rng.normal(0.0, self._noise, len(label) - 1)
        return np.clip(executed, self._space.low, self._space.high), label


def _turn_to_down(quaternion: Any) -> np.ndarray:
    """Rotation vector (3,), root frame, that brings a gripper at (w, x, y, z) to straight down, at the nearest quarter turn."""
    w, x, y, z = (float(v) for v in quaternion)
    turns = []
    for quarter in range(4):
        c, s = math.cos(quarter * math.pi / 4), math.sin(quarter * math.pi / 4)
        # (0, c, s, 0) * conj(q)
        turn = np.array([c * x + s * y, c * w - s * z, c * z + s * w, s * x - c * y])
        turns.append(turn if turn[0] >= 0 else -turn)
    turn = max(turns, key=lambda t: float(t[0]))
    length = float(np.linalg.norm(turn[1:]))
    return turn[1:] * (2 * math.atan2(length, turn[0]) / length if length > 1e-9 else 2.0)


def _place(thing: Any) -> np.ndarray:
    return np.asarray(thing.pose.sp.p, dtype=np.float64)


def _beside(env: Any, sign: float) -> Goal:
    """Push a cube along sign * x from its far side: over it, down behind it, forward."""
    tcp, cube, goal = _place(env.agent.tcp), _place(env.obj), _place(env.goal_region)
    along, across = sign * (tcp[0] - cube[0]), tcp[1] - cube[1]
    if sign * (cube[0] - goal[0]) > -0.03:  # there, or past it
        return tcp, _CLOSED
    if along < -0.02 and abs(across) < 0.015 and tcp[2] < 0.045:
        ahead = min(_PUSH, sign * (goal[0] - tcp[0]) - 0.03)
        return np.array([tcp[0] + sign * ahead, cube[1], 0.02]), _CLOSED
    start = np.array([cube[0] - sign * 0.07, cube[1], 0.02])
    if along > -0.045:  # the way leads over the cube
        if tcp[2] < 0.07:
            return np.array([tcp[0], tcp[1], 0.12]), _CLOSED
        start[2] = 0.1
    return start, _CLOSED


def _grasp(env: Any, cube: np.ndarray) -> Goal:
    """Go above the cube with an open gripper, down, and close."""
    tcp = _place(env.agent.tcp)
    away = float(np.linalg.norm(tcp[:2] - cube[:2]))
    closing = float(env.agent.robot.get_qpos()[0, -1]) < 0.035
    if away < (0.03 if closing else 0.015) and tcp[2] - cube[2] < (0.025 if closing else 0.015):
        return cube, _CLOSED
    if away > 0.02:
        return np.array([cube[0], cube[1], max(cube[2] + 0.07, 0.0)]), _OPEN
    return cube, _OPEN


def _pick_cube(env: Any) -> Goal:
    cube, goal = _place(env.cube), _place(env.goal_site)
    if not bool(env.agent.is_grasping(env.cube)[0]):
        return _grasp(env, cube)
    return _place(env.agent.tcp) + goal - cube, _CLOSED


def _stack_cube(env: Any) -> Goal:
    tcp, red, green = _place(env.agent.tcp), _place(env.cubeA), _place(env.cubeB)
    way = green + np.array([0.0, 0.0, _CUBE]) - red
    across = float(np.linalg.norm(way[:2]))
    grasped = bool(env.agent.is_grasping(env.cubeA)[0])
    if across < 0.025 and abs(way[2]) < 0.006:  # it lies there: let go, then leave
        return (tcp if grasped else tcp + np.array([0.0, 0.0, 0.05])), _OPEN
    if not grasped:
        return _grasp(env, red)
    if across > 0.012:
        lift = max(0.0, way[2] + 0.04)
        step = way[:2] if lift < 0.03 else np.zeros(2)
        return tcp + np.array([*step, lift if lift else way[2] + 0.04]), _CLOSED
    return tcp + way, _CLOSED


EXPERTS: dict[str, Callable[[Any], Goal]] = {
    "PushCube-v1": lambda env: _beside(env, 1.0),
    "PullCube-v1": lambda env: _beside(env, -1.0),
    "PickCube-v1": _pick_cube,
    "StackCube-v1": _stack_cube,
}
"""Task -> where to go next, from ManiSkill's own environment."""
