"""Scripted movement of a robosuite arm: a proportional controller on the eef, and an expert that lifts robosuite's cube.

    sim.reset(state); expert = sim.expert(np.random.default_rng(0), noise=0.1)
    execute, label = expert(); result = sim.step(execute)

Each call looks where things are now and returns (action to execute, clean label), both (7,): the label is what the expert wants
from here, the executed action carries the noise (not on the gripper), so recordings show how to recover from
disturbances (as in DART, Laskey et al. 2017).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import ConfigError

if TYPE_CHECKING:
    from mmrl.robotics.robosuite import ArmSimulator

__all__ = ["CLOSE", "OPEN", "LiftExpert", "Mover", "above"]

_REACH = 0.05  # metres an action of 1 asks for
_TURN = 0.5  # radians an action of 1 asks for
# how far above the grip point the hand has room: tall things are held near their top
_FINGERS = 0.03
OPEN, CLOSE = -1.0, 1.0
_CLOSING_STEPS = 10
_ARM = 0.69  # metres from the shoulder to the wrist that the hand is held within
# a hand that sinks by less (metres in a step) for so many steps lies on something
_STILL, _STILL_STEPS = 0.001, 5
_HOLD = 0.003  # metres of a thing that the grip point must be below its top


def _turn_between(current_33: np.ndarray, target_33: np.ndarray) -> np.ndarray:
    """Rotation vector (3,) that leads from one orientation to another, in world axes; a little short for angles near pi."""
    axis = 0.5 * sum((np.cross(current_33[:, i], target_33[:, i]) for i in range(3)), np.zeros(3))
    sine, cosine = float(np.linalg.norm(axis)), 0.5 * (np.trace(current_33.T @ target_33) - 1)
    return (
        axis if sine < 0.1 and cosine > 0 else axis * (np.arctan2(sine, cosine) / max(sine, 1e-3))
    )


def above(point: np.ndarray, height: float) -> np.ndarray:
    return point + np.array([0.0, 0.0, height])


class Mover:
    """Moves the eef to points while it keeps its orientation; a subclass decides which points, phase by phase."""

    def __init__(self, simulator: ArmSimulator, rng: np.random.Generator, noise: float) -> None:
        if not 0 <= noise <= 1:
            raise ConfigError(
                f"expert: expected noise between 0 and 1 (the range of actions), found {noise}"
            )
        self.simulator, self.rng, self.noise = simulator, rng, noise
        self.upright_33 = self.orientation().copy()
        self.home = self.eef()
        self._base = simulator.env.sim.model.body_name2id("robot0_base")
        self.phase = "approach"
        self.waited, self.height = 0, np.inf

    @property
    def _data(self) -> Any:
        return self.simulator.env.sim.data

    def eef(self) -> np.ndarray:
        """Position of the grip point, (3,)."""
        return np.array(self._data.site_xpos[self.simulator.env.robots[0].eef_site_id])

    def orientation(self) -> np.ndarray:
        """Of the gripper, (3, 3): columns are its axes in the world, the last one looks forwards."""
        return np.array(self._data.site_xmat[self.simulator.env.robots[0].eef_site_id]).reshape(
            3, 3
        )

    def turn(self) -> np.ndarray:
        """Rotation vector (3,) to the wanted orientation `upright_33`."""
        return _turn_between(self.orientation(), self.upright_33)

    def _decide(self) -> tuple[np.ndarray, float]:
        """The point to go to and the gripper, from the state now."""
        raise NotImplementedError

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        """(action to execute, clean label)."""
        target, gripper = self._decide()
        target = np.array([*target[:2], min(target[2], max(self._ceiling(target), self.eef()[2]))])
        move = np.clip((target - self.eef()) * (2.5 / _REACH), -1, 1)
        turn = np.clip(self.turn() / _TURN, -1, 1)
        label = np.concatenate([move, turn, [gripper]])
        executed = label.copy()
        executed[:6] = np.clip(executed[:6] + self.noise * self.rng.standard_normal(6), -1, 1)
        return executed, label

    def _ceiling(self, point: np.ndarray) -> float:
        """How high the hand may be over a point: a straight elbow is a singularity that the controller does not leave again. The
        Panda's shoulder is 0.333 m above its base; its wrist, 0.21 m above a hand that looks down and 0.088 m behind, can be 0.70 m
        away."""
        base = np.array(self._data.body_xpos[self._base])
        across = max(0.0, float(np.hypot(*(point - base)[:2])) - 0.088)
        return float(base[2]) + 0.333 - 0.21 + float(np.sqrt(max(_ARM**2 - across**2, 0.0)))

    def _go(self, phase: str) -> None:
        self.phase, self.waited, self.height = phase, 0, np.inf

    def _rests(self) -> bool:
        """Whether the hand no longer sinks: a taller thing beside the wanted one carries it."""
        height = float(self.eef()[2])
        self.waited = self.waited + 1 if self.height - height < _STILL else 0
        self.height = height
        return self.waited >= _STILL_STEPS

    def _grasp(
        self, thing: np.ndarray, hover: float, top: float
    ) -> tuple[np.ndarray, float] | None:
        """approach -> descend -> close; None once the fingers have closed. `thing`: where to grip, `top`: how much of it is above.
        A hand that something carries closes where it is, as long as its fingers reach around the thing there."""
        offset = thing - self.eef()
        if self.phase == "approach":
            if np.hypot(*offset[:2]) < 0.012:
                self._go("descend")
            return above(thing, hover), OPEN
        if self.phase == "descend":
            if np.hypot(*offset[:2]) > 0.03:
                self._go("approach")
            elif abs(offset[2]) < 0.012 or (self._rests() and -offset[2] < top - _HOLD):
                self._go("close")
            return thing, OPEN
        if self.phase == "close":
            self.waited += 1
            if self.waited <= _CLOSING_STEPS:
                return thing, CLOSE
            self._go("lift")
        return None


class LiftExpert(Mover):
    """Grasp robosuite's cube and lift it."""

    def __init__(
        self, simulator: ArmSimulator, rng: np.random.Generator, noise: float = 0.0
    ) -> None:
        super().__init__(simulator, rng, noise)
        self.body = simulator.env.cube_body_id

    def _decide(self) -> tuple[np.ndarray, float]:
        cube, eef = np.array(self._data.body_xpos[self.body]), self.eef()
        grasp = self._grasp(cube, hover=0.06, top=0.02)
        if grasp is not None:
            return grasp
        if np.linalg.norm(cube - eef) > 0.05:
            self._go("approach")
            return above(cube, 0.06), OPEN
        return above(eef, 0.05), CLOSE
