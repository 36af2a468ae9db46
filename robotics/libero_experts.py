"""A scripted expert for LIBERO: it reads the goal and the simulator's collision geometry, and works off its predicates.

    sim.reset(state); expert = sim.expert(np.random.default_rng(0), noise=0.1)
    execute, label = expert(); result = sim.step(execute)

`In` and `On` are picked and placed (grasps are planned on collision shapes, mmrl.robotics.grasps), `Turnon` is a knob that is
grasped and twisted, `Open` a handle that is pulled, `Close` a front that is pushed. A drawer that must hold something is opened
first, and what is to be closed is closed last. Heights and rims are measured on the shapes that collide: LIBERO's sites
(top_site, bottom_site) say something else. A lost thing is picked up again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import ConfigError
from mmrl.robotics.arm_expert import CLOSE, OPEN, Mover
from mmrl.robotics.libero_drag import Drag
from mmrl.robotics.libero_scene import Scene
from mmrl.robotics.libero_skills import Place, Pull, Push, Skill, Twist

if TYPE_CHECKING:
    from mmrl.robotics.libero import LiberoSimulator

__all__ = ["GoalExpert"]

_ORDER = {"open": 0, "turnon": 1, "on": 2, "in": 2, "close": 3, "turnoff": 3}
_SETTLE = 8  # control steps a done skill waits for its predicate to hold


class GoalExpert(Mover):
    """Makes the goal's predicates true, in an order in which none undoes another."""

    def __init__(
        self, simulator: LiberoSimulator, rng: np.random.Generator, noise: float = 0.0
    ) -> None:
        super().__init__(simulator, rng, noise)
        self.scene = Scene(simulator.env)
        goal = sorted(simulator.goal, key=lambda one: _ORDER.get(one[0], 9))
        self.todo: list[tuple[list[str], Skill]] = []
        for predicate in goal:
            self.todo += self._skills(predicate)
        self._settled = 0

    def _skills(self, predicate: list[str]) -> list[tuple[list[str], Skill]]:
        verb, scene = predicate[0], self.scene
        if verb in ("in", "on"):
            thing, target = predicate[1:]
            skills: list[tuple[list[str], Skill]] = []
            if verb == "in" and scene.shut(target):
                skills.append((["open", target], Pull(self, scene, target)))
            flat = scene.is_zone(target) and scene.low_and_wide(thing)
            place = (Drag if flat else Place)(self, scene, thing, target, verb)
            return [*skills, (predicate, place)]
        if verb == "open":
            return [(predicate, Pull(self, scene, predicate[1]))]
        if verb == "close":
            return [(predicate, Push(self, scene, predicate[1]))]
        if verb == "turnon":
            return [(predicate, Twist(self, scene, predicate[1]))]
        raise ConfigError(
            f"expert: expected a goal of In, On, Open, Close or Turnon, found {predicate}"
        )

    @property
    def label(self) -> str:
        """What it does now."""
        return f"{'/'.join(self.todo[0][0])}:{self.todo[0][1].phase}" if self.todo else "done"

    def _decide(self) -> tuple[np.ndarray, float]:
        while self.todo:
            predicate, skill = self.todo[0]
            finished = skill.finished
            if skill.phase == "plan" and self.scene.holds(predicate):
                self.todo.pop(0)
                continue
            if finished and not self.scene.holds(predicate):
                self._settled += 1
                if self._settled > _SETTLE:
                    skill.restart()
                    self._settled = 0
            elif finished:
                self.todo.pop(0)
                self._settled = 0
                continue
            self.phase = self.label
            return skill.decide()
        # all was done once; what came undone is done again
        for predicate in self.simulator.goal:  # type: ignore[attr-defined]
            if not self.scene.holds(predicate):
                self.todo += self._skills(predicate)
        if self.todo:
            return self.todo[0][1].decide()
        return self.eef(), OPEN if self.phase == "done" else CLOSE
