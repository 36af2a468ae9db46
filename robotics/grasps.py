"""Where a parallel gripper can take hold of a thing from above: candidates measured on collision geometry, best first.

    best = plan_grasps(thing, others, gripper)[0]        # Solids, Solids, GripperShape
    eef_position, yaw = best.position, best.yaw

A candidate is kept where something of the thing lies between the open fingers at the pads, with room on both sides, and where
neither finger nor the hand meets anything on the way straight down. It is good where the two faces are parallel to the fingers and
near the middle of the thing. Bowls and mugs are taken by their rim, boxes across their narrow side, without a rule for either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmrl.robotics.solids import Solids

__all__ = ["Grasp", "GripperShape", "plan_grasps", "turned_down"]

_STEP = 0.003  # metres between points of a line from finger to finger
_YAWS = np.linspace(-np.pi / 2, np.pi / 2, 8, endpoint=False)
_DEPTHS = (0.008, 0.016, 0.026, 0.04, 0.06, 0.08)  # of the grip point below the thing's top
_ACROSS = np.array([-0.006, 0.0, 0.006])  # lines on the pads, along their width
_ALONG = np.array([-0.004, 0.003])  # and along the fingers
_TRIED = 300  # candidates whose way down is looked at


@dataclass(frozen=True)
class GripperShape:
    """A gripper in its own frame (x from finger to finger, z forwards), metres: half the opening; a finger's outer face, half width
    and ends along z; half sizes and the near end of the hand."""

    opening: float = 0.038
    finger_outer: float = 0.0655
    finger_width: float = 0.0105
    finger_tip: float = 0.0095
    hand_half: tuple[float, float] = (0.104, 0.032)
    hand_near: float = -0.031

    def fingers(self, clearance: float, reach: float) -> np.ndarray:
        """Points (n, 3) of both open fingers and of the way above them, `reach` metres of it."""
        x = np.linspace(self.opening - clearance, self.finger_outer + clearance, 5)
        y = np.linspace(-self.finger_width - clearance, self.finger_width + clearance, 3)
        z = np.linspace(self.finger_tip, -reach, 24)
        return _grid(np.concatenate([-x, x]), y, z)

    def hand(self, reach: float) -> np.ndarray:
        """Points (n, 3) of the hand and of the way above it."""
        half_x, half_y = self.hand_half
        z = np.linspace(self.hand_near, -reach, 8)
        return _grid(np.linspace(-half_x, half_x, 21), np.linspace(-half_y, half_y, 5), z)


@dataclass(frozen=True)
class Grasp:
    """The eef's position (3,), the turn about the vertical (0: fingers open along y), how wide the thing is there, and a cost."""

    position: np.ndarray
    yaw: float
    width: float
    cost: float


def _grid(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    return np.stack(np.meshgrid(x, y, z, indexing="ij"), axis=-1).reshape(-1, 3)


def turned_down(yaw: float) -> np.ndarray:
    """Orientation (3, 3) of an eef that looks down, turned about the vertical; its columns are the gripper's x, y, z."""
    c, s = np.cos(yaw), np.sin(yaw)
    return np.array([[-s, c, 0.0], [c, s, 0.0], [0.0, 0.0, -1.0]])


def _candidates(
    thing: Solids, gripper: GripperShape, floor: float
) -> tuple[np.ndarray, np.ndarray]:
    """Positions (n, 3) and yaws (n,)."""
    low, high = thing.low, thing.high
    heights = [h for h in (high[2] - d for d in _DEPTHS) if h > floor + gripper.finger_tip + 0.002]
    heights = heights or [floor + gripper.finger_tip + 0.002]
    axes = [
        np.linspace(a, b, max(2, int((b - a) / 0.012) + 1)) for a, b in zip(low, high, strict=True)
    ]
    spots = _grid(axes[0], axes[1], np.array(heights))
    positions = np.repeat(spots, len(_YAWS), axis=0)
    return positions, np.tile(_YAWS, len(spots))


def _lines(gripper: GripperShape) -> np.ndarray:
    """Points of the lines from finger to finger, (lines, points, 3)."""
    x = np.arange(-gripper.opening + 0.002, gripper.opening - 0.001, _STEP)
    return np.stack(
        [np.stack([x, np.full_like(x, y), np.full_like(x, z)], 1) for y in _ACROSS for z in _ALONG]
    )


def _placed(local: np.ndarray, position: np.ndarray, yaw: float) -> np.ndarray:
    return np.asarray(local @ turned_down(yaw).T + position)


def _measured(thing: Solids, gripper: GripperShape, floor: float) -> list[Grasp]:
    """Candidates with the thing between the fingers, by cost."""
    positions, yaws = _candidates(thing, gripper, floor)
    lines = _lines(gripper)
    count, n_lines, n_points = len(positions), *lines.shape[:2]
    frames = np.stack([turned_down(yaw) for yaw in yaws])
    points = np.einsum("nij,lpj->nlpi", frames, lines) + positions[:, None, None]
    filled = thing.inside(points.reshape(-1, 3)).reshape(count, n_lines, n_points)
    some = np.all(np.any(filled, axis=2), axis=1) & ~np.any(filled[:, :, [0, -1]], axis=(1, 2))
    first = filled.argmax(2)
    last = n_points - 1 - filled[:, :, ::-1].argmax(2)
    middle, found = 0.5 * (thing.low + thing.high), []
    for i in np.flatnonzero(some):
        begin, end = first[i].min(), last[i].max()
        uneven = (np.ptp(first[i]) + np.ptp(last[i])) * _STEP
        shift = lines[0, begin, 0] / 2 + lines[0, end, 0] / 2
        position = positions[i] + frames[i][:, 0] * shift
        away = float(np.hypot(*(position - middle)[:2]))
        high = abs(float(position[2] - middle[2]))
        cost = 2.0 * uneven + 0.6 * away + 0.3 * high + 0.01 * abs(float(yaws[i]))
        found.append(Grasp(position, float(yaws[i]), (end - begin + 1) * _STEP, cost))
    return sorted(found, key=lambda grasp: grasp.cost)


def plan_grasps(
    thing: Solids,
    others: Solids,
    gripper: GripperShape,
    *,
    floor: float,
    clearance: float = 0.003,
    reach: float = 0.16,
) -> list[Grasp]:
    """Grasps of `thing` among `others` from above, best first; empty where there is none.

    floor: lowest height a fingertip may have. clearance: of the fingers to everything. reach: metres above the grip point that must
    be free for the hand.
    """
    middle = 0.5 * (thing.low + thing.high)
    around = others.near(middle, 0.35)
    fingers, hand, found = gripper.fingers(clearance, reach), gripper.hand(reach), []
    for grasp in _measured(thing, gripper, floor)[:_TRIED]:
        at_fingers = _placed(fingers, grasp.position, grasp.yaw)
        if thing.inside(at_fingers).any() or around.inside(at_fingers).any():
            continue
        at_hand = _placed(hand, grasp.position, grasp.yaw)
        if thing.inside(at_hand).any() or around.inside(at_hand).any():
            continue
        found.append(grasp)
        if len(found) == 5:
            break
    return found
