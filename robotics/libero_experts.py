"""Scripted experts that read the simulator's state: pick a grocery up and put it into the basket (libero_object), lift a cube.

    sim.reset(state); expert = sim.expert(np.random.default_rng(0), noise=0.1)
    execute, label = expert(); result = sim.step(execute)

Each call looks where things are now and returns (action to execute, clean label), both (7,): the label is what the expert wants
from here, the executed action carries the noise (not on the gripper), so recordings show how to recover from
disturbances (as in DART, Laskey et al. 2017). A proportional controller on the eef position; a lost object is picked up again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import ConfigError

if TYPE_CHECKING:
    from mmrl.robotics.libero import LiberoSimulator
    from mmrl.robotics.robosuite import ArmSimulator

__all__ = ["BasketExpert", "LiftExpert"]

_REACH = 0.05  # metres an action of 1 asks for
_TURN = 0.5  # radians an action of 1 asks for
# how far above the grip point the hand has room: tall things are held near their top
_FINGERS = 0.03
_OPEN, _CLOSE = -1.0, 1.0
_CLOSING_STEPS, _OPENING_STEPS = 10, 6
# a hand that sinks by less (metres in a step) for so many steps lies on something
_STILL, _STILL_STEPS = 0.001, 5
_HOLD = 0.003  # metres of a thing that the grip point must be below its top


def _turn_between(current_33: np.ndarray, target_33: np.ndarray) -> np.ndarray:
    """Small-angle rotation vector (3,) that leads from one orientation to another, in world axes."""
    return 0.5 * sum((np.cross(current_33[:, i], target_33[:, i]) for i in range(3)), np.zeros(3))


def _above(point: np.ndarray, height: float) -> np.ndarray:
    return point + np.array([0.0, 0.0, height])


class _Mover:
    """Moves the eef to points while it keeps its orientation; a subclass decides which points, phase by phase."""

    def __init__(self, simulator: ArmSimulator, rng: np.random.Generator, noise: float) -> None:
        if not 0 <= noise <= 1:
            raise ConfigError(
                f"expert: expected noise between 0 and 1 (the range of actions), found {noise}"
            )
        self.simulator, self.rng, self.noise = simulator, rng, noise
        self.upright_33 = self._orientation().copy()
        self.phase = "approach"
        self.waited, self.height = 0, np.inf

    @property
    def _data(self) -> Any:
        return self.simulator.env.sim.data

    def _eef(self) -> np.ndarray:
        return np.array(self._data.site_xpos[self.simulator.env.robots[0].eef_site_id])

    def _orientation(self) -> np.ndarray:
        return np.array(self._data.site_xmat[self.simulator.env.robots[0].eef_site_id]).reshape(
            3, 3
        )

    def _decide(self) -> tuple[np.ndarray, float]:
        """The point to go to and the gripper, from the state now."""
        raise NotImplementedError

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        """(action to execute, clean label)."""
        target, gripper = self._decide()
        move = np.clip((target - self._eef()) * (2.5 / _REACH), -1, 1)
        turn = np.clip(_turn_between(self._orientation(), self.upright_33) / _TURN, -1, 1)
        label = np.concatenate([move, turn, [gripper]])
        executed = label.copy()
        executed[:6] = np.clip(executed[:6] + self.noise * self.rng.standard_normal(6), -1, 1)
        return executed, label

    def _go(self, phase: str) -> None:
        self.phase, self.waited, self.height = phase, 0, np.inf

    def _rests(self) -> bool:
        """Whether the hand no longer sinks: a taller thing beside the wanted one carries it."""
        height = float(self._eef()[2])
        self.waited = self.waited + 1 if self.height - height < _STILL else 0
        self.height = height
        return self.waited >= _STILL_STEPS

    def _grasp(
        self, thing: np.ndarray, hover: float, top: float
    ) -> tuple[np.ndarray, float] | None:
        """approach -> descend -> close; None once the fingers have closed. `thing`: where to grip, `top`: how much of it is above.
        A hand that something carries closes where it is, as long as its fingers reach around the thing there."""
        offset = thing - self._eef()
        if self.phase == "approach":
            if np.hypot(*offset[:2]) < 0.012:
                self._go("descend")
            return _above(thing, hover), _OPEN
        if self.phase == "descend":
            if np.hypot(*offset[:2]) > 0.03:
                self._go("approach")
            elif abs(offset[2]) < 0.012 or (self._rests() and -offset[2] < top - _HOLD):
                self._go("close")
            return thing, _OPEN
        if self.phase == "close":
            self.waited += 1
            if self.waited <= _CLOSING_STEPS:
                return thing, _CLOSE
            self._go("lift")
        return None


class BasketExpert(_Mover):
    """Grasp the goal's object, lift it over the rim, carry it over the basket, lower it, let go."""

    def __init__(
        self, simulator: LiberoSimulator, rng: np.random.Generator, noise: float = 0.0
    ) -> None:
        super().__init__(simulator, rng, noise)
        goal = simulator.goal
        if len(goal) != 1 or goal[0][0] != "in":
            raise ConfigError(
                f"expert: expected the goal to be one thing in the basket, found {goal}"
            )
        _, self.name, self.site = goal[0]
        env = simulator.env
        self.body = env.obj_body_id[self.name]
        self.half = abs(float(env.objects_dict[self.name].bottom_offset[2]))
        basket = self.site.removesuffix("_contain_region")
        self.basket_body, self.rim = (
            env.obj_body_id[basket],
            float(env.objects_dict[basket].top_offset[2]),
        )

    def _decide(self) -> tuple[np.ndarray, float]:
        thing, eef = np.array(self._data.body_xpos[self.body]), self._eef()
        basket = np.array(self._data.body_xpos[self.basket_body])
        grip = _above(thing, max(0.0, self.half - _FINGERS))
        grasp = self._grasp(grip, hover=self.half + 0.06, top=min(self.half, _FINGERS))
        if grasp is not None:
            return grasp
        held = thing - eef
        safe = basket[2] + self.rim + self.half + 0.04
        if self.phase in ("lift", "carry", "lower") and np.linalg.norm(grip - eef) > 0.05:
            self._go("approach")
            return _above(grip, self.half + 0.06), _OPEN
        over = basket[:2] - held[:2]
        if self.phase == "lift":
            if thing[2] > safe - 0.02:
                self._go("carry")
            return np.array([eef[0], eef[1], safe - held[2]]), _CLOSE
        if self.phase == "carry":
            if np.hypot(*(eef[:2] - over)) < 0.03:
                self._go("lower")
            return np.array([*over, safe - held[2]]), _CLOSE
        if self.phase == "lower":
            low = basket[2] + self.half - 0.01
            if thing[2] < low + 0.015:
                self._go("open")
            return np.array([*over, low - held[2]]), _CLOSE
        self.waited += 1
        if self.waited > _OPENING_STEPS:
            self._go("approach")
        return _above(eef, 0.02), _OPEN


class LiftExpert(_Mover):
    """Grasp robosuite's cube and lift it."""

    def __init__(
        self, simulator: ArmSimulator, rng: np.random.Generator, noise: float = 0.0
    ) -> None:
        super().__init__(simulator, rng, noise)
        self.body = simulator.env.cube_body_id

    def _decide(self) -> tuple[np.ndarray, float]:
        cube, eef = np.array(self._data.body_xpos[self.body]), self._eef()
        grasp = self._grasp(cube, hover=0.06, top=0.02)
        if grasp is not None:
            return grasp
        if np.linalg.norm(cube - eef) > 0.05:
            self._go("approach")
            return _above(cube, 0.06), _OPEN
        return _above(eef, 0.05), _CLOSE
