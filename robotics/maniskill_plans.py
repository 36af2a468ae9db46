"""Plans of the scripted experts of ManiSkill: what to do next in each task, from where its things are now.

    PLANS["PegInsertionSide-v1"](env)                      # -> Goal(position, gripper, facing, stride)

A plan asks only for the state of the simulator and puts skills of mmrl.robotics.maniskill_skills together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mmrl.robotics.maniskill_skills import (
    CLOSED,
    OPEN,
    Goal,
    angle_between,
    axis_of,
    beside,
    carry,
    facing_down,
    follow,
    grasp,
    holding,
    insert,
    place,
    place_of,
    up,
)

__all__ = ["PLANS", "TURNING"]

_CUBE = 0.04  # edge of every cube here, m
# m: where the hand can be turned until it points back at the robot; forwards its wrist would meet the table
_ROOM = (-0.2, 0.0)


def _pick_cube(env: Any) -> Goal:
    cube, goal = place_of(env.cube), place_of(env.goal_site)
    if not holding(env, env.cube):
        return grasp(env, cube)
    return Goal(place_of(env.agent.tcp) + goal - cube, CLOSED)


def _stack_cube(env: Any) -> Goal:
    return place(env, env.cubeA, up(place_of(env.cubeB), _CUBE))


def _stack_pyramid(env: Any) -> Goal:
    """Red beside green, then blue on both."""
    red, green, blue = (place_of(cube) for cube in (env.cubeA, env.cubeB, env.cubeC))
    if float(np.linalg.norm((red - green)[:2])) > 0.0595 or holding(env, env.cubeA):
        # on a side of green where the fingers, which close along one of the two axes, have room
        x, y = axis_of(env.agent.tcp.pose.sp, 0)[:2]
        side = np.array([1.0, 0, 0]) if abs(x) > abs(y) else np.array([0, 1.0, 0])
        away = [float(np.linalg.norm(green + sign * 0.053 * side - blue)) for sign in (1, -1)]
        spot = green + side * (0.053 if away[0] > away[1] else -0.053)
        return place(env, env.cubeA, spot, near=0.005, hover=0.065)
    return place(env, env.cubeC, up((red + green) / 2, _CUBE), near=0.01)


def _place_sphere(env: Any) -> Goal:
    spot = up(place_of(env.bin), env.radius + env.block_half_size[0])
    return place(env, env.obj, spot, near=0.005, drop=0.006)


def _peg_upright(env: Any) -> Goal:
    peg = env.peg.pose.sp
    along = axis_of(peg)
    if not holding(env, env.peg):
        return grasp(env, place_of(env.peg), facing_down(env, along))
    left = math.acos(float(np.clip(-along[2], -1, 1)))
    axis = np.cross(along, [0.0, 0.0, -1.0])
    axis = axis / max(1e-6, float(np.linalg.norm(axis)))
    turn = type(peg)(q=[math.cos(left / 2), *(math.sin(left / 2) * axis)])
    height = env.peg_half_length + (0.02 if left > 0.06 else 0.001)
    wanted = type(peg)([*_ROOM, height], (turn * type(peg)(q=peg.q)).q)
    return carry(env, peg, wanted)


def _insert_peg(env: Any) -> Goal:
    peg, half = env.peg.pose.sp, float(env.peg_half_sizes[0, 0])
    if not holding(env, env.peg):
        tail = (peg * type(peg)([-max(0.05, half / 2 + 0.01), 0, 0])).p
        return grasp(env, np.asarray(tail, dtype=np.float64), facing_down(env, axis_of(peg)))
    return insert(env, peg, env.goal_pose.sp, depth=half, tolerance=0.002, stride=0.03)


def _plug_charger(env: Any) -> Goal:
    charger = env.charger.pose.sp
    if not holding(env, env.charger):
        base = np.asarray(env.charger_base_pose.sp.p, dtype=np.float64)
        return grasp(env, base, facing_down(env, axis_of(charger)))
    depth = 2 * env._peg_size[0]
    return insert(env, charger, env.goal_pose.sp, depth=depth, tolerance=0.0004, stride=0.005)


def _poke_cube(env: Any) -> Goal:
    """Hold the peg by its tail, bring it in line with the cube, push."""
    peg, cube, goal = env.peg.pose.sp, place_of(env.cube), place_of(env.goal_region)
    if goal[0] - cube[0] < 0.03:
        return Goal(place_of(env.agent.tcp), CLOSED, np.asarray(env.agent.tcp.pose.sp.q))
    if not holding(env, env.peg):
        tail = (peg * type(peg)([-0.06, 0, 0])).p
        return grasp(env, np.asarray(tail, dtype=np.float64), facing_down(env, axis_of(peg)))
    reach = env.peg_half_length + env.cube_half_size
    aside, gap = abs(float(peg.p[1] - cube[1])), float(cube[0] - peg.p[0]) - reach
    straight = angle_between(peg.q, [1, 0, 0, 0]) < 0.1
    height = env.peg_half_width + 0.005  # off the table
    if straight and aside < (0.006 if gap > 0.015 else 0.02):
        return carry(env, peg, type(peg)([peg.p[0] + 0.05, cube[1], height]), stride=0.05)
    return carry(env, peg, type(peg)([cube[0] - reach - 0.05, cube[1], height]))


def _pull_with_tool(env: Any) -> Goal:
    """Hold the handle, bring the hook over the cube and down behind it, pull."""
    tool, cube = env.l_shape_tool.pose.sp, env.cube.pose.sp
    if not holding(env, env.l_shape_tool):
        handle = (tool * type(tool)([0.05, 0, 0])).p
        return grasp(env, np.asarray(handle, dtype=np.float64), facing_down(env, axis_of(tool)))
    low = env.height / 2 + 0.003
    inner = env.handle_length - env.hook_length  # where the hook begins
    within = (tool.inv() * cube).p
    hooked = within[0] < inner and env.width / 2 < within[1] < 0.1
    if hooked and tool.p[2] < low + 0.015:
        return carry(env, tool, type(tool)([tool.p[0] - 0.05, tool.p[1], low]), stride=0.05)
    over = np.array([cube.p[0] + 0.052 - inner, cube.p[1] - 0.066])
    high = 0.15  # the hook hangs down, however the handle is held
    aside = float(np.linalg.norm(over - tool.p[:2]))
    if aside < (0.012 if tool.p[2] > high - 0.02 else 0.025):
        return carry(env, tool, type(tool)([*over, low]), stride=0.05)
    at = over if tool.p[2] > high - 0.02 else tool.p[:2]
    return carry(env, tool, type(tool)([*at, high]))


def _roll_ball(env: Any) -> Goal:
    """Bring the ball onto the line from the robot's base to the goal, where the arm pushes straightest, and push it along."""
    tcp, ball, goal = place_of(env.agent.tcp), place_of(env.ball), place_of(env.goal_region)
    base, speed = place_of(env.agent.robot), np.asarray(env.ball.linear_velocity[0], dtype=float)
    line = (goal - base)[:2] / float(np.linalg.norm((goal - base)[:2]))
    out, off = _along_and_across((ball - base)[:2], line)
    fast, held = float(np.linalg.norm(speed[:2])), holding(env, env.ball)
    if held or (fast < 0.1 and (abs(off) > 0.03 or out < 0.5)):
        spot = np.array([*(base[:2] + 0.58 * line), env.ball_radius])
        return place(env, env.ball, spot, near=0.02)
    way = (goal - ball)[:2]
    ahead = way / max(1e-6, float(np.linalg.norm(way)))
    towards, aside = _along_and_across(speed[:2], ahead)
    if (towards > 0.3 and abs(aside) * float(np.linalg.norm(way)) < 0.09 * towards) or out > 0.85:
        # it rolls on alone
        return Goal(up(tcp, 0.02 if tcp[2] < 0.15 else 0.0), CLOSED)
    facing = facing_down(env, ahead)
    along, across = _along_and_across((tcp - ball)[:2], ahead)
    ready = angle_between(env.agent.tcp.pose.sp.q, facing) < 0.03 and abs(across) < 0.004
    if tcp[2] < 0.05 and along < -0.02 and (ready or (along > -0.11 and abs(across) < 0.012)):
        return Goal(
            np.array([*(ball[:2] + (along + 0.1) * ahead), env.ball_radius]), CLOSED, facing
        )
    start = np.array([*(ball[:2] - 0.12 * ahead), env.ball_radius])
    if along > -0.06:
        if tcp[2] < 0.1:  # open: the ball may be between the fingers
            return Goal(np.array([tcp[0], tcp[1], 0.14]), OPEN)
        start[2] = 0.13
    return Goal(start, CLOSED, facing)


def _along_and_across(way: np.ndarray, line: np.ndarray) -> tuple[float, float]:
    """Parts of a way (2,) along a unit vector (2,) and to the left of it."""
    return float(way @ line), float(line[0] * way[1] - line[1] * way[0])


def _draw_triangle(env: Any) -> Goal:
    line = np.asarray(env.triangles[0], dtype=np.float64)
    return follow(env, line, ahead=8, low=env.CANVAS_THICKNESS + 0.002, high=0.06)


PLANS: dict[str, Callable[[Any], Goal]] = {
    "PushCube-v1": lambda env: beside(env, place_of(env.obj), place_of(env.goal_region), 1.0),
    "PullCube-v1": lambda env: beside(env, place_of(env.obj), place_of(env.goal_region), -1.0),
    "PickCube-v1": _pick_cube,
    "StackCube-v1": _stack_cube,
    "StackPyramid-v1": _stack_pyramid,
    "PlaceSphere-v1": _place_sphere,
    "LiftPegUpright-v1": _peg_upright,
    "PegInsertionSide-v1": _insert_peg,
    "PlugCharger-v1": _plug_charger,
    "PokeCube-v1": _poke_cube,
    "PullCubeTool-v1": _pull_with_tool,
    "RollBall-v1": _roll_ball,
    "DrawTriangle-v1": _draw_triangle,
}
"""Task -> where to go next, from ManiSkill's own environment."""

TURNING = frozenset(
    {"LiftPegUpright-v1", "PegInsertionSide-v1", "PlugCharger-v1", "PullCubeTool-v1", "RollBall-v1"}
)
"""Tasks whose plans turn the gripper: an action needs its rotation."""
