"""The tasks of the tiny simulator: what lies on the table, what the arm does to it, and what an expert would do next.

    python -c "import numpy as np; from mmrl.robotics.tiny_tasks import TASKS; t = TASKS['reach'](0.12); \
               t.lay(np.random.default_rng(0)); print(t.instruction, t.advice())"

push: the round arm pushes a round block onto the goal. A push off centre deflects the block, so it must be steered.
reach: discs of different colours (option discs, 1 to 4, default 3); the instruction names one (option apart: how far it is from
the arm, by its larger coordinate, which is what control steps depend on). Touching another ends the episode as a failure.
pick: go over the block, close the gripper, carry it to the goal.
Plain floats; places are (x, y) on the table [-1, 1] x [-1, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["COLOURS", "SPEED", "TASKS", "PickTask", "PushTask", "ReachTask", "TinyTask"]

SPEED = 0.15
"""Units of the table the arm moves per control step at action 1."""

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 40, 40),
    "green": (52, 168, 83),
    "blue": (44, 92, 214),
    "yellow": (240, 190, 20),
}
"""What instructions call the colours."""

_ARM, _BLOCK, _GOAL = 0.10, 0.12, 0.20  # radii
_ARM_COLOUR = (40, 36, 60)
_ARM_LIMIT = 1.0 - _ARM
_BLOCK_LIMIT = 1.0 - _BLOCK
_SUBSTEPS = 3  # of a control step, so that the arm cannot jump over the block's edge

Place = tuple[float, float]
Shape = tuple[Place, float, tuple[int, int, int], float]


def _distance(a: Place, b: Place) -> float:
    return math.hypot(a[0] - b[0], a[1] - b[1])


def _longest(a: Place, b: Place) -> float:
    return max(abs(a[0] - b[0]), abs(a[1] - b[1]))


def _towards(a: Place, b: Place) -> tuple[float, ...]:
    """The action that moves a to b, or as far as it can on the straight line."""
    dx, dy = (b[0] - a[0]) / SPEED, (b[1] - a[1]) / SPEED
    longest = max(1.0, abs(dx), abs(dy))
    return dx / longest, dy / longest


def _clip(place: Place, limit: float) -> Place:
    return min(limit, max(-limit, place[0])), min(limit, max(-limit, place[1]))


def _draw(rng: np.random.Generator, limit: float) -> Place:
    x, y = rng.uniform(-limit, limit, 2)
    return float(x), float(y)


class TinyTask:
    """What the tasks share: the arm, how it moves, and success by distance. `tolerance`: how near counts, in table units."""

    gripper = False

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.arm: Place = (0.0, 0.0)
        self.width = 1.0
        self.instruction = ""

    def lay(self, rng: np.random.Generator) -> None:
        """Lay the table anew: every random choice of the episode."""
        raise NotImplementedError

    def move(self, action: Sequence[float]) -> None:
        """One control step."""
        self.arm = _clip(
            (self.arm[0] + SPEED * action[0], self.arm[1] + SPEED * action[1]), _ARM_LIMIT
        )

    def potential(self) -> float:
        """Minus the distance still to go, for shaped rewards."""
        raise NotImplementedError

    def success(self) -> bool:
        """Whether the task is solved now."""
        raise NotImplementedError

    def failure(self) -> bool:
        """Whether it can no longer be solved."""
        return False

    def shapes(self) -> list[Shape]:
        """(place, radius, colour, hole) from the lowest to the highest."""
        raise NotImplementedError

    def advice(self) -> tuple[float, ...]:
        """The expert's next action."""
        raise NotImplementedError


class PushTask(TinyTask):
    """Push the red block onto the green disc."""

    def lay(self, rng: np.random.Generator) -> None:
        """Block and goal apart, the arm on any side of the block."""
        self.goal = self.block = _draw(rng, 0.6)
        while not 0.4 <= _distance(self.block, self.goal) <= 0.9:
            self.block = _draw(rng, 0.6)
        self.arm = self.block
        while not 0.3 <= _distance(self.arm, self.block) <= 0.7:
            self.arm = _draw(rng, 0.85)
        self.instruction = "push the red block onto the green disc"

    def move(self, action: Sequence[float]) -> None:
        """The arm moves, the block gives way along the line between the centres; walls stop both."""
        for _ in range(_SUBSTEPS):
            super().move([value / _SUBSTEPS for value in action])
            apart = _distance(self.arm, self.block)
            if apart >= _ARM + _BLOCK:
                continue
            normal = (
                ((self.block[0] - self.arm[0]) / apart, (self.block[1] - self.arm[1]) / apart)
                if apart
                else (1.0, 0.0)
            )
            away = _ARM + _BLOCK
            self.block = _clip(
                (self.arm[0] + away * normal[0], self.arm[1] + away * normal[1]), _BLOCK_LIMIT
            )
            # the block is at a wall: the arm stops at it
            if _distance(self.arm, self.block) < away:
                self.arm = _clip(
                    (self.block[0] - away * normal[0], self.block[1] - away * normal[1]), _ARM_LIMIT
                )

    def potential(self) -> float:
        """Block to goal, and half of arm to block."""
        return -_distance(self.block, self.goal) - 0.5 * max(
            0.0, _distance(self.arm, self.block) - _ARM - _BLOCK
        )

    def success(self) -> bool:
        """The block's centre lies near the goal's."""
        return _distance(self.block, self.goal) <= self.tolerance

    def shapes(self) -> list[Shape]:
        """Goal, block, arm."""
        return [
            (self.goal, _GOAL, COLOURS["green"], 0.0),
            (self.block, _BLOCK, COLOURS["red"], 0.0),
            (self.arm, _ARM, _ARM_COLOUR, 0.0),
        ]

    def advice(self) -> tuple[float, ...]:
        """Walk round the block until behind it as seen from the goal, then push, steering against the drift."""
        apart = max(1e-9, _distance(self.block, self.goal))
        ux, uy = (self.goal[0] - self.block[0]) / apart, (self.goal[1] - self.block[1]) / apart
        rx, ry = self.arm[0] - self.block[0], self.arm[1] - self.block[1]
        # the arm seen from the block, goal ahead
        along, across = rx * ux + ry * uy, -rx * uy + ry * ux
        if along < 0 and abs(across) < 0.08:
            sideways = -2.5 * across
            return _towards(
                self.arm,
                (
                    self.arm[0] + SPEED * ux - sideways * uy,
                    self.arm[1] + SPEED * uy + sideways * ux,
                ),
            )
        angle = math.atan2(ry, rx)
        turn = math.remainder(math.atan2(-uy, -ux) - angle, 2 * math.pi)
        if abs(turn) > 0.45:
            turn = math.copysign(0.45, turn)
        ring = _ARM + _BLOCK + 0.06
        return _towards(
            self.arm,
            (
                self.block[0] + ring * math.cos(angle + turn),
                self.block[1] + ring * math.sin(angle + turn),
            ),
        )


class ReachTask(TinyTask):
    """Move to the disc whose colour the instruction names, one of `discs_wanted`."""

    discs_wanted = 3
    apart = (0.3, 4.0)  # between arm and named disc, the larger of |dx| and |dy|, in table units

    def lay(self, rng: np.random.Generator) -> None:
        """Different colours; the straight way from the arm to the named disc is free."""
        names = [str(name) for name in rng.permutation(list(COLOURS))[: self.discs_wanted]]
        while True:
            places = [_draw(rng, 0.75) for _ in names]
            self.arm = _draw(rng, 0.85)
            if (
                min(_distance(a, b) for i, a in enumerate((*places, self.arm)) for b in places[:i])
                >= 0.5
                and (self.apart[0] <= _longest(places[0], self.arm) <= self.apart[1])
                and all(self._clearance(places[0], other) >= 0.3 for other in places[1:])
            ):
                break
        # what is drawn first says nothing about the target
        order = [int(i) for i in rng.permutation(len(names))]
        self.discs = [(names[i], places[i]) for i in order]
        self.target, self.colour = places[0], names[0]
        self.instruction = f"move to the {self.colour} disc"

    def _clearance(self, target: Place, other: Place) -> float:
        """Distance of `other` from the segment between arm and target."""
        dx, dy = target[0] - self.arm[0], target[1] - self.arm[1]
        share = ((other[0] - self.arm[0]) * dx + (other[1] - self.arm[1]) * dy) / (
            dx * dx + dy * dy
        )
        share = min(1.0, max(0.0, share))
        return _distance(other, (self.arm[0] + share * dx, self.arm[1] + share * dy))

    def potential(self) -> float:
        """Arm to the named disc."""
        return -_distance(self.arm, self.target)

    def success(self) -> bool:
        """The arm's centre lies near the named disc's."""
        return _distance(self.arm, self.target) <= self.tolerance

    def failure(self) -> bool:
        """The arm's centre lies near another disc's."""
        return any(
            _distance(self.arm, place) <= self.tolerance
            for name, place in self.discs
            if name != self.colour
        )

    def shapes(self) -> list[Shape]:
        """Discs, arm."""
        return [
            *((place, 0.15, COLOURS[name], 0.0) for name, place in self.discs),
            (self.arm, _ARM, _ARM_COLOUR, 0.0),
        ]

    def advice(self) -> tuple[float, ...]:
        """The straight way; when drift brought another disc near it, away from that one first."""
        ax, ay = _towards(self.arm, self.target)
        for name, place in self.discs:
            apart = _distance(self.arm, place)
            if name != self.colour and apart < 0.26:
                push = 2.0 * (0.26 - apart) / SPEED / max(apart, 1e-9)
                ax, ay = ax + push * (self.arm[0] - place[0]), ay + push * (self.arm[1] - place[1])
        return ax, ay


class PickTask(TinyTask):
    """Carry the red block to the green disc with the gripper. `width` 1 is open, 0 closed; it changes by half per step."""

    gripper = True

    def lay(self, rng: np.random.Generator) -> None:
        """Block and goal apart, the arm beside the block, open."""
        self.goal = self.block = _draw(rng, 0.7)
        while not 0.45 <= _distance(self.block, self.goal) <= 1.2:
            self.block = _draw(rng, 0.7)
        self.arm = self.block
        while not 0.3 <= _distance(self.arm, self.block) <= 1.0:
            self.arm = _draw(rng, 0.85)
        self.width, self.held = 1.0, False
        self.instruction = "pick the red block and bring it to the green disc"

    def move(self, action: Sequence[float]) -> None:
        """Move, then the gripper; a closing gripper holds the block when the arm's centre is over it, within 0.09."""
        before = self.arm
        super().move(action)
        if self.held:
            self.block = (
                self.block[0] + self.arm[0] - before[0],
                self.block[1] + self.arm[1] - before[1],
            )
        was_open = self.width > 0
        self.width = min(1.0, max(0.0, self.width + (0.5 if action[2] > 0 else -0.5)))
        if self.width > 0:
            self.held = False
        elif was_open:
            self.held = _distance(self.arm, self.block) <= 0.09

    def potential(self) -> float:
        """Block to goal, arm to block, and a quarter until it is held."""
        return -_distance(self.block, self.goal) - (
            0.0 if self.held else 0.25 + _distance(self.arm, self.block)
        )

    def success(self) -> bool:
        """The block's centre lies near the goal's."""
        return _distance(self.block, self.goal) <= self.tolerance

    def shapes(self) -> list[Shape]:
        """Goal, block, and the arm as a ring with two fingers that come together as it closes; black when it holds."""
        reach = 0.05 + 0.12 * self.width
        colour = (0, 0, 0) if self.width == 0 else _ARM_COLOUR
        fingers: list[Shape] = [
            ((self.arm[0] + side * reach, self.arm[1]), 0.05, colour, 0.0) for side in (-1, 1)
        ]
        return [
            (self.goal, _GOAL, COLOURS["green"], 0.0),
            (self.block, _BLOCK, COLOURS["red"], 0.0),
            (self.arm, _ARM + 0.06, colour, 0.10),
            *fingers,
        ]

    def advice(self) -> tuple[float, ...]:
        """Over the block, close, carry; open again after a miss."""
        if self.held:
            offset = (self.block[0] - self.arm[0], self.block[1] - self.arm[1])
            return (*_towards(self.arm, (self.goal[0] - offset[0], self.goal[1] - offset[1])), -1.0)
        near = _distance(self.arm, self.block) <= 0.04
        closing = near and (self.width > 0)
        return (*_towards(self.arm, self.block), -1.0 if closing else 1.0)


TASKS: dict[str, type[TinyTask]] = {"push": PushTask, "reach": ReachTask, "pick": PickTask}
"""Name -> task, built with the tolerance."""
