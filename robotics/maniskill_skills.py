"""Skills that the scripted experts of ManiSkill share: grasp, carry, place, push and follow a line.

    goal = grasp(env, place_of(env.cube))                  # each says where the tool centre point should go next
    goal = carry(env, env.peg.pose.sp, wanted)             # move what is held to a pose

A skill looks at the simulator's state and returns a Goal; nothing is remembered between two calls, so a plan made of skills goes
on rightly from wherever noise has moved things. Poses are SAPIEN's, in the world frame; quaternions are (w, x, y, z).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "CLOSED",
    "OPEN",
    "Goal",
    "angle_between",
    "axis_of",
    "beside",
    "carry",
    "facing_down",
    "follow",
    "grasp",
    "holding",
    "insert",
    "place",
    "place_of",
    "turn_between",
    "turn_to_down",
    "up",
]

OPEN, CLOSED = 1.0, -1.0
Quaternion = Sequence[float] | np.ndarray
_PUSH = 0.03  # m asked for in one step of a push: a faster one kicks the cube past the goal
_ALIGNED = 0.12  # rad that an open gripper may be off its wanted turn when it goes down


class Goal(NamedTuple):
    """Where the tool centre point should go: (3,), world frame, m; the gripper's action; how the gripper should be turned, (4,)
    (None: straight down, at the nearest quarter turn); and the longest way that one step may ask for, m."""

    position: np.ndarray
    gripper: float
    facing: np.ndarray | None = None
    stride: float = 0.1


# --- poses ---------------------------------------------------------------------------------------------------------


def place_of(thing: Any) -> np.ndarray:
    """Position (3,), m, of a ManiSkill actor or link."""
    return np.asarray(thing.pose.sp.p, dtype=np.float64)


def axis_of(pose: Any, axis: int = 0) -> np.ndarray:
    """An axis (3,) of a SAPIEN pose, in the world."""
    return np.asarray(pose.to_transformation_matrix()[:3, axis], dtype=np.float64)


def up(point: np.ndarray, height: float) -> np.ndarray:
    return point + np.array([0.0, 0.0, height])


def turn_between(now: Quaternion, wanted: Quaternion) -> np.ndarray:
    """Rotation vector (3,), world frame, rad, that leads from one orientation to another the short way round."""
    w, x, y, z = (float(v) for v in now)
    a, b, c, d = (float(v) for v in wanted)
    # wanted * conj(now)
    turn = np.array(
        [
            a * w + b * x + c * y + d * z,
            -a * x + b * w - c * z + d * y,
            -a * y + b * z + c * w - d * x,
            -a * z - b * y + c * x + d * w,
        ]
    )
    turn = turn if turn[0] >= 0 else -turn
    length = float(np.linalg.norm(turn[1:]))
    return turn[1:] * (2 * math.atan2(length, turn[0]) / length if length > 1e-9 else 2.0)


def angle_between(now: Quaternion, wanted: Quaternion) -> float:
    """How far two orientations are apart, rad in [0, pi]."""
    return float(np.linalg.norm(turn_between(now, wanted)))


def _down(yaw: float) -> np.ndarray:
    """Quaternion of a gripper that looks straight down, turned by yaw (rad) about the vertical; its fingers close along y at 0."""
    return np.array([0.0, math.cos(yaw / 2), math.sin(yaw / 2), 0.0])


def turn_to_down(quaternion: Quaternion) -> np.ndarray:
    """Rotation vector (3,) that brings a gripper at (w, x, y, z) to straight down, at the nearest quarter turn."""
    turns = [turn_between(quaternion, _down(quarter * math.pi / 2)) for quarter in range(4)]
    return min(turns, key=lambda turn: float(np.linalg.norm(turn)))


def facing_down(env: Any, along: np.ndarray) -> np.ndarray:
    """Quaternion (4,) of a gripper that looks down with its fingers on both sides of a thing that lies along `along` (2 or 3,);
    of the two, the one that is nearer to how the gripper is turned now."""
    yaw, now = math.atan2(along[1], along[0]), env.agent.tcp.pose.sp.q
    return min(
        (_down(yaw), _down(yaw + math.pi)), key=lambda quaternion: angle_between(now, quaternion)
    )


# --- skills --------------------------------------------------------------------------------------------------------


def holding(env: Any, thing: Any) -> bool:
    """Whether both fingers press on the thing."""
    # contacts are those of the last physics step: after a reset those of the episode before
    return int(env.elapsed_steps[0]) > 0 and bool(env.agent.is_grasping(thing)[0])


def grasp(
    env: Any, thing: np.ndarray, facing: np.ndarray | None = None, *, hover: float = 0.07
) -> Goal:
    """Go above a place (3,) with an open gripper, turn it, go down, and close."""
    pose = env.agent.tcp.pose.sp
    tcp = np.asarray(pose.p, dtype=np.float64)
    away = float(np.linalg.norm(tcp[:2] - thing[:2]))
    closing = float(env.agent.robot.get_qpos()[0, -1]) < 0.035
    turned = facing is None or angle_between(pose.q, facing) < _ALIGNED
    if (
        turned
        and away < (0.03 if closing else 0.015)
        and tcp[2] - thing[2] < (0.025 if closing else 0.015)
    ):
        return Goal(thing, CLOSED, facing)
    if away > 0.05 and tcp[2] < thing[2] + hover - 0.03:  # not through what stands beside
        return Goal(np.array([tcp[0], tcp[1], thing[2] + hover + 0.03]), OPEN, facing)
    if away > 0.02 or not turned:
        return Goal(up(thing, hover), OPEN, facing)
    return Goal(thing, OPEN, facing)


def carry(env: Any, held: Any, wanted: Any, *, stride: float = 0.1) -> Goal:
    """Move the gripper so that what it holds comes from the pose `held` to the pose `wanted`."""
    target = wanted * held.inv() * env.agent.tcp.pose.sp
    return Goal(np.asarray(target.p, dtype=np.float64), CLOSED, np.asarray(target.q), stride)


def place(
    env: Any,
    thing: Any,
    spot: np.ndarray,
    *,
    near: float = 0.025,
    hover: float = 0.04,
    drop: float = 0.0,
) -> Goal:
    """Bring a cube or ball to lie at `spot` (3,): grasp it, over the spot, down, let go (`drop` metres above), leave.
    near: how far beside the spot it may lie, hover: how far above the spot it is carried, m."""
    tcp, way = place_of(env.agent.tcp), spot - place_of(thing)
    across = float(np.linalg.norm(way[:2]))
    grasped = holding(env, thing)
    if across < near and -drop - 0.006 < way[2] < 0.006:  # it lies there: let go, then leave
        return Goal(tcp if grasped else up(tcp, 0.05), OPEN)
    if not grasped:
        return grasp(env, place_of(thing))
    lift = way[2] + hover
    # a quick way down shakes the hand sideways: once it is under way, that is mended below
    if across > (min(0.012, near) if lift < 0.015 else 0.025):
        step = way[:2] if lift < 0.03 else np.zeros(2)
        return Goal(tcp + np.array([*step, lift]), CLOSED)
    return Goal(tcp + up(way, drop), CLOSED, stride=0.05)


def beside(env: Any, cube: np.ndarray, goal: np.ndarray, sign: float) -> Goal:
    """Push a cube along sign * x from its far side: over it, down behind it, forward."""
    tcp = place_of(env.agent.tcp)
    along, across = sign * (tcp[0] - cube[0]), tcp[1] - cube[1]
    if sign * (cube[0] - goal[0]) > -0.03:  # there, or past it
        return Goal(tcp, CLOSED)
    if along < -0.02 and abs(across) < 0.015 and tcp[2] < 0.045:
        ahead = min(_PUSH, sign * (goal[0] - tcp[0]) - 0.03)
        return Goal(np.array([tcp[0] + sign * ahead, cube[1], 0.02]), CLOSED)
    start = np.array([cube[0] - sign * 0.07, cube[1], 0.02])
    if along > -0.045:  # the way leads over the cube
        if tcp[2] < 0.07:
            return Goal(np.array([tcp[0], tcp[1], 0.12]), CLOSED)
        start[2] = 0.1
    return Goal(start, CLOSED)


def follow(env: Any, line: np.ndarray, *, ahead: int, low: float, high: float) -> Goal:
    """Draw a closed line (N, 2) in the order of its points: above the nearest one, down, then after the point `ahead` of it.
    low, high: heights of the tool that draw and that do not, m."""
    tcp = place_of(env.agent.tcp)
    nearest = int(np.argmin(np.linalg.norm(line - tcp[:2], axis=1)))
    away = float(np.linalg.norm(line[nearest] - tcp[:2]))
    if away > 0.012:  # nothing is drawn beside the line
        return Goal(np.array([*line[nearest], high]), OPEN)
    if tcp[2] > low + 0.008:
        return Goal(np.array([*line[nearest], low]), OPEN)
    return Goal(np.array([*line[(nearest + ahead) % len(line)], low]), OPEN)


def insert(
    env: Any, held: Any, inside: Any, *, depth: float, tolerance: float, stride: float
) -> Goal:
    """Bring what is held into a hole along its own x axis: before the hole, in line with it, forwards.

    inside: the pose when it is in. depth: how far before that its tip meets the hole, m. tolerance: how far beside the hole's axis
    it may enter, m. stride: of one step of the way in, m.
    """
    pose = type(held)
    away = inside.inv() * held
    ahead, beside_y, beside_z = (float(v) for v in away.p)
    aside, angle = math.hypot(beside_y, beside_z), angle_between(held.q, inside.q)
    if ahead > -depth + 0.004 or (aside < tolerance and angle < 0.02):
        ahead = min(0.0, ahead + stride)
    elif aside < 0.01 and angle < 0.05:  # wait there until it is in line
        ahead = min(-depth - 0.003, ahead)
    else:
        ahead = -depth - (0.025 if aside < 0.03 and angle < 0.1 else 0.1)
    # half of what is missing beside the axis goes on top: the arm sags under its load
    return carry(env, held, inside * pose([ahead, -beside_y / 2, -beside_z / 2]))
