"""How LIBERO's scripted experts move a plate, which no hand can lift: closed fingers draw it over a table, around things."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mmrl.robotics.arm_expert import CLOSE, Mover
from mmrl.robotics.grasps import turned_down
from mmrl.robotics.libero_scene import Scene
from mmrl.robotics.libero_skills import NEAR, WAY, Skill
from mmrl.robotics.solids import Solids

__all__ = ["Drag"]

_SUNK = 0.012  # metres above a plate's underside: where the fingertips draw it
_ROOM = 0.01  # metres that a drawn plate keeps from other things
_PER_BEND = 0.1  # metres of way that a squared radian is worth
_PER_PRESSED = 50.0  # metres of way that a square metre of `Scene.pressed` is worth
_BEND = 0.16  # metres around the middle where a way may bend
_BENT = 0.015  # metres from a bend where it counts as reached


def _angle(a: np.ndarray, b: np.ndarray) -> float:
    """Radians between two directions (2,)."""
    return abs(float(np.arctan2(a[0] * b[1] - a[1] * b[0], a @ b)))


class Drag(Skill):
    """Put closed fingers into a plate and draw it along by its rim: what is drawn follows, what is pushed turns away. It goes
    around what stands on the straight way, over one bend."""

    def __init__(self, mover: Mover, scene: Scene, thing: str, target: str, verb: str) -> None:
        super().__init__(mover, scene)
        self.thing, self.target = thing, target
        self.route: list[np.ndarray] = []

    def _route(self, plate: Solids, origin: np.ndarray) -> list[np.ndarray]:
        """Where the plate's middle goes, (2,) each: a bend, or none, and a place in the zone. What counts is metres to go, and what
        the plate or the hand above it would run into."""
        boxes = self.scene.others(self.scene.body(self.thing)).boxes
        radius = 0.5 * float((plate.high - plate.low)[:2].max()) + _ROOM
        hand = float(plate.low[2]) + _SUNK - self.gripper.hand_near
        beside = 0.5 * sum(self.gripper.hand_half)  # of a hand that is broad across its way
        layers = ((radius, plate.low[2] + 0.004, hand), (beside, hand, np.inf))
        middle, half = (part[:2] for part in self.scene.goal_position(self.target))
        begin = origin[:2]
        ends = [middle + half * (a, b) for a in (-0.5, 0.0, 0.5) for b in (-0.5, 0.0, 0.5)]
        steps = np.linspace(-_BEND, _BEND, 7)
        routes = [[end] for end in ends]
        routes += [
            [0.5 * (begin + end) + (a, b), end] for end in ends for a in steps for b in steps
        ]

        def cost(route: list[np.ndarray]) -> float:
            legs = list(pairwise([begin, *route]))
            pressed = [self.scene.pressed(boxes, a, b, layer) for a, b in legs for layer in layers]
            ways = [b - a for a, b in legs]
            metres = sum(float(np.linalg.norm(way)) for way in ways)
            bent = sum(_angle(a, b) for a, b in pairwise(ways))  # the fingers slip where it turns
            away = float(np.linalg.norm(route[-1] - middle))
            return metres + away + _PER_BEND * bent**2 + _PER_PRESSED * sum(pressed)

        return min(routes, key=cost)

    def act(self, eef: np.ndarray) -> tuple[np.ndarray, float]:
        """Phases: plan over descend drag done."""
        body = self.scene.body(self.thing)
        plate, origin = self.scene.solids(body), self.scene.position(self.thing)
        if self.phase == "plan":
            self.route = self._route(plate, origin)
        if len(self.route) > 1 and np.linalg.norm(self.route[0] - origin[:2]) < _BENT:
            self.route.pop(0)
        left = float(np.linalg.norm(self.route[-1] - origin[:2]))
        way = np.array([*(self.route[0] - origin[:2]), 0.0])
        way = way / max(float(np.linalg.norm(way)), 1e-6)
        begin = np.array([*origin[:2], plate.low[2] + _SUNK]) + way * 0.02
        if self.phase == "plan":
            yaw = float(np.arctan2(way[1], way[0]))  # the fingers' broad side forwards
            self.mover.upright_33 = turned_down((yaw + np.pi / 2) % np.pi - np.pi / 2)
            top = self.scene.highest_between(self.scene.others(body), eef, begin, WAY)
            self.safe = top + 0.04
            self.go("over")
        if self.phase == "over":
            if np.hypot(*(begin - eef)[:2]) < NEAR and self.turned():
                self.go("descend")
            return self.over(eef, begin), CLOSE
        if self.phase == "descend":
            if abs(begin[2] - eef[2]) < 0.006 or self.stalled:
                self.go("drag")
            return begin, CLOSE
        if self.phase == "drag":
            if left < 0.01 or self.stalled or np.hypot(*(eef - origin)[:2]) > 0.08:
                self.go("done")
            # ahead of the plate's middle, whatever side the fingers are on: where the way bends they slide along the rim
            ahead = float(np.linalg.norm((eef - origin)[:2])) + 0.016
            aim = origin + way * ahead
            return np.array([aim[0], aim[1], begin[2]]), CLOSE
        return eef, CLOSE
