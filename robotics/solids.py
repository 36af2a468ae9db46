"""What a mujoco scene feels like: its colliding shapes as arrays, for scripted experts that measure instead of assuming.

    solids = Solids.of_body(model, data, body); print(solids.low, solids.high, solids.inside(points_N3))

Boxes, cylinders, capsules, spheres and ellipsoids are exact; a mesh counts as the box around its vertices, a plane as nothing.
Positions are in metres, in world axes, at the instant of reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Solids", "bodies_below", "colliding_geoms"]

_SPHERE, _CAPSULE, _ELLIPSOID, _CYLINDER, _BOX, _MESH = 2, 3, 4, 5, 6, 7
_CORNERS = np.array([[a, b, c] for a in (-1, 1) for b in (-1, 1) for c in (-1, 1)], dtype=float)
_RING = np.array(
    [[np.cos(t), np.sin(t), c] for c in (-1, 1) for t in np.linspace(0, 2 * np.pi, 16, False)]
)


def bodies_below(model: Any, body: int) -> set[int]:
    """`body` and every body that hangs on it."""
    found = {body}
    for child in range(body + 1, model.nbody):  # mujoco numbers parents before children
        if int(model.body_parentid[child]) in found:
            found.add(child)
    return found


def colliding_geoms(model: Any, bodies: Iterable[int]) -> list[int]:
    """Geoms of `bodies` that touch others; ghosts that are only drawn are none."""
    wanted = set(bodies)
    return [
        g
        for g in range(model.ngeom)
        if int(model.geom_bodyid[g]) in wanted
        and (model.geom_contype[g] or model.geom_conaffinity[g])
        and model.geom_type[g] not in (0, 1)
    ]


@dataclass(frozen=True)
class Solids:
    """G shapes. kind (G,): mujoco's geom types; size (G, 3) half sizes; position (G, 3); axes (G, 3, 3): columns are the shape's
    own axes in the world."""

    kind: np.ndarray
    size: np.ndarray
    position: np.ndarray
    axes: np.ndarray

    @classmethod
    def of_geoms(cls, model: Any, data: Any, geoms: Iterable[int]) -> Solids:
        """Read geoms where they are now."""
        ids = np.array(list(geoms), dtype=int)
        kind, size = model.geom_type[ids].copy(), model.geom_size[ids].copy()
        position = data.geom_xpos[ids].copy()
        axes = data.geom_xmat[ids].reshape(-1, 3, 3).copy()
        for i in np.flatnonzero(kind == _MESH):
            # mujoco keeps the middle and half size of the box around a mesh
            middle, half = model.geom_aabb[ids[i], :3], model.geom_aabb[ids[i], 3:]
            position[i] += axes[i] @ middle
            kind[i], size[i] = _BOX, half
        return cls(kind, size, position, axes)

    @classmethod
    def of_body(cls, model: Any, data: Any, body: int) -> Solids:
        """The shapes of a body and of what hangs on it."""
        return cls.of_geoms(model, data, colliding_geoms(model, bodies_below(model, body)))

    def near(self, middle: np.ndarray, radius: float) -> Solids:
        """Those that may reach into a ball."""
        reach = np.linalg.norm(self.size, axis=1) + np.where(
            self.kind == _CAPSULE, self.size[:, 0], 0
        )
        keep = np.linalg.norm(self.position - middle, axis=1) <= radius + reach
        return Solids(self.kind[keep], self.size[keep], self.position[keep], self.axes[keep])

    def surface(self, i: int) -> np.ndarray:
        """Points (n, 3) whose convex hull is the shape, or holds it (spheres, capsules)."""
        kind, (a, b, c) = self.kind[i], self.size[i]
        if kind == _SPHERE:
            local = _CORNERS * a
        elif kind == _CYLINDER:
            local = _RING * np.array([a, a, b])
        elif kind == _CAPSULE:
            local = _RING * np.array([a, a, a + b])
        else:
            local = _CORNERS * np.array([a, b, c])
        return np.asarray(local @ self.axes[i].T + self.position[i])

    @property
    def points(self) -> np.ndarray:
        """Corners of all shapes, (n, 3)."""
        return np.concatenate([self.surface(i) for i in range(len(self.kind))])

    @property
    def low(self) -> np.ndarray:
        """Lowest coordinates, (3,)."""
        return np.asarray(self.points.min(0))

    @property
    def high(self) -> np.ndarray:
        """Highest coordinates, (3,)."""
        return np.asarray(self.points.max(0))

    @property
    def boxes(self) -> tuple[np.ndarray, np.ndarray]:
        """The box around each shape in world axes: low, high, both (G, 3)."""
        surfaces = [self.surface(i) for i in range(len(self.kind))]
        empty = np.zeros((0, 3))
        if not surfaces:
            return empty, empty
        return np.stack([s.min(0) for s in surfaces]), np.stack([s.max(0) for s in surfaces])

    def inside(self, points_N3: np.ndarray, margin: float = 0.0) -> np.ndarray:
        """Which points are in a shape, or nearer than about `margin` to one; bool (N,)."""
        found = np.zeros(len(points_N3), dtype=bool)
        for i in range(len(self.kind)):
            kind, size = self.kind[i], self.size[i] + margin
            local = (points_N3 - self.position[i]) @ self.axes[i]
            if kind == _BOX:
                found |= (np.abs(local) <= size).all(1)
            elif kind == _CYLINDER:
                found |= (np.hypot(local[:, 0], local[:, 1]) <= size[0]) & (
                    np.abs(local[:, 2]) <= size[1]
                )
            elif kind == _CAPSULE:
                beyond = np.maximum(np.abs(local[:, 2]) - self.size[i, 1], 0)
                found |= (local[:, 0] ** 2 + local[:, 1] ** 2 + beyond**2) <= size[0] ** 2
            elif kind == _SPHERE:
                found |= (local**2).sum(1) <= size[0] ** 2
            else:
                found |= ((local / size) ** 2).sum(1) <= 1
        return found
