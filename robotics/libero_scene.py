"""What a scripted expert may ask of a LIBERO scene: shapes of things now, obstacles on a way, regions, joints and predicates."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from mmrl.robotics.solids import Solids, bodies_below, colliding_geoms

__all__ = ["Scene"]

_ROBOT = ("robot0", "gripper0", "mount0")


class Scene:
    """One reset environment; positions are read when asked for."""

    def __init__(self, env: Any) -> None:
        self.env, self.model = env, env.sim.model._model
        names = [self.model.body(b).name for b in range(self.model.nbody)]
        robot = {b for b, name in enumerate(names) if name.startswith(_ROBOT)}
        self._world = [g for g in colliding_geoms(self.model, set(range(self.model.nbody)) - robot)]
        fingers = {b for b, name in enumerate(names) if name.startswith("gripper0")}
        self._gripper = set(colliding_geoms(self.model, fingers))

    @property
    def data(self) -> Any:
        """mujoco's data."""
        return self.env.sim.data._data

    def body(self, name: str) -> int:
        """Of an object or a fixture."""
        return int(self.env.obj_body_id[name])

    def position(self, name: str) -> np.ndarray:
        """Of its body's origin, which the predicates look at, (3,)."""
        return np.array(self.data.xpos[self.body(name)])

    def solids(self, body: int) -> Solids:
        """Of a body and what hangs on it."""
        return Solids.of_body(self.model, self.data, body)

    def others(self, body: int) -> Solids:
        """Everything but a body and the robot."""
        mine = bodies_below(self.model, body)
        keep = [g for g in self._world if int(self.model.geom_bodyid[g]) not in mine]
        return Solids.of_geoms(self.model, self.data, keep)

    def highest_between(
        self, others: Solids, begin: np.ndarray, end: np.ndarray, radius: float
    ) -> float:
        """Top of what stands on the way from `begin` to `end` (seen from above), `radius` metres to each side."""
        low, high = others.boxes
        way = np.linspace(begin[:2], end[:2], 9)
        gap = np.maximum(low[:, None, :2] - way, way - high[:, None, :2]).max(2).min(1)
        near = gap < radius
        return float(high[near, 2].max()) if near.any() else float(min(begin[2], end[2]))

    @staticmethod
    def pressed(
        boxes: tuple[np.ndarray, np.ndarray],
        begin: np.ndarray,
        end: np.ndarray,
        layer: tuple[float, float, float],
    ) -> float:
        """How far a disc runs into what stands on its way from `begin` to `end`, both (2,), seen from above: depth times way, in
        square metres. boxes: around the obstacles (`Solids.boxes`); layer: the disc's radius, and between which heights it is."""
        radius, under, upper = layer
        low, high = boxes
        there = (high[:, 2] > under) & (low[:, 2] < upper)
        way = np.linspace(begin, end, 25)
        apart = np.maximum(low[there, None, :2] - way, way - high[there, None, :2])
        distance = np.linalg.norm(np.maximum(apart, 0.0), axis=2)
        depth = float(np.maximum(radius - distance, 0.0).sum(0).mean())
        return depth * float(np.linalg.norm(end - begin))

    def touched(self, body: int) -> bool:
        """Whether anything but the gripper touches a body from below."""
        mine = set(colliding_geoms(self.model, bodies_below(self.model, body)))
        height = float(self.solids(body).low[2]) + 0.03
        for i in range(self.data.ncon):
            pair = {int(self.data.contact[i].geom1), int(self.data.contact[i].geom2)}
            low = float(self.data.contact[i].pos[2]) < height
            if low and len(pair & mine) == 1 and not pair & self._gripper:
                return True
        return False

    def holds(self, predicate: list[str]) -> bool:
        """Whether a predicate is true now."""
        if predicate[0] == "open" and predicate[1] not in self.env.object_states_dict:
            return False
        return bool(self.env._eval_predicate(predicate))

    def is_zone(self, target: str) -> bool:
        """Whether a target is a marked area of a table or floor."""
        site = self.env.object_sites_dict.get(target)
        owner = getattr(site, "parent_name", None)
        return site is not None and owner not in {*self.env.objects_dict, *self.env.fixtures_dict}

    def low_and_wide(self, thing: str) -> bool:
        """A thing that is dragged rather than lifted: a plate."""
        shape = self.solids(self.body(thing))
        size = shape.high - shape.low
        return bool(size[2] < 0.03 and size[:2].min() > 0.1)

    def shared(self, target: str) -> bool:
        """Whether the goal puts several things there."""
        return (
            sum(p[-1] == target for p in self.env.parsed_problem["goal_state"] if len(p) == 3) > 1
        )

    def goal_position(self, target: str) -> tuple[np.ndarray, np.ndarray]:
        """Middle (3,) of an object or region, and half its size in world axes (3,)."""
        if target in self.env.object_sites_dict:
            site = self.model.site(target).id
            half = np.abs(self.data.site_xmat[site].reshape(3, 3)) @ self.model.site_size[site]
            return np.array(self.data.site_xpos[site]), half
        shape = self.solids(self.body(target))
        middle = self.position(target)
        return middle, 0.5 * (shape.high - shape.low)

    def joint(self, target: str) -> int | None:
        """The joint that opens, closes or turns a region or fixture; None where nothing moves."""
        if target in self.env.object_sites_dict:
            names = list(self.env.object_sites_dict[target].joints or [])
        else:
            names = list(self.env.get_object(target).joints)
        names = [n for n in names if n and not re.search("free", n)]
        moving = [self.model.joint(n).id for n in names]
        moving = [j for j in moving if self.model.jnt_type[j] in (2, 3)]
        return moving[0] if moving else None

    def shut(self, target: str) -> bool:
        """Whether a region lies in a drawer that is not open."""
        joint = self.joint(target) if target in self.env.object_sites_dict else None
        if joint is None or self.model.jnt_type[joint] != 2:
            return False
        return abs(float(self.data.qpos[self.model.jnt_qposadr[joint]])) < 0.1
