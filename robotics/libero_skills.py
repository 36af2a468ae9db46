"""What LIBERO's scripted experts can do: pick and place, pull a handle, push a front or a door shut, twist a knob.

A skill is asked once per control step for (the point to go to, the gripper); it turns the hand by the mover's wanted orientation.
Phases follow each other by what is measured, so noise on the actions and a lost thing lead back to an earlier phase.
"""

from __future__ import annotations

import numpy as np

from mmrl.errors import DataError
from mmrl.robotics.arm_expert import CLOSE, OPEN, Mover, above
from mmrl.robotics.grasps import Grasp, GripperShape, plan_grasps, turned_down
from mmrl.robotics.libero_scene import Scene
from mmrl.robotics.solids import Solids

__all__ = ["NEAR", "WAY", "Place", "Pull", "Push", "Skill", "Twist"]

_CLOSING, _OPENING = 10, 5  # control steps
NEAR, _TURNED = 0.012, 0.12  # metres, radians: where a point or an orientation counts as reached
_LOST = 0.045  # metres a held thing may have moved in the hand
WAY = 0.12  # half width of the way that a hand needs
_TILT = 0.6  # radians a pushing hand leans away from what it pushes
_STALLED = 12  # control steps without movement


class Skill:
    """Phases of one predicate; 'done' ends it."""

    def __init__(self, mover: Mover, scene: Scene) -> None:
        self.mover, self.scene, self.gripper = mover, scene, GripperShape()
        self.phase, self.waited, self.tries, self.safe = "plan", 0, 0, 0.0
        self._last = np.full(3, np.inf)
        self._still = self.escape = 0

    @property
    def finished(self) -> bool:
        """Whether everything was done, with or without success."""
        return self.phase == "done"

    def restart(self) -> None:
        """Again, otherwise: the next best grasp."""
        self.tries += 1
        self.go("plan")

    def go(self, phase: str) -> None:
        """Begin a phase."""
        self.phase, self.waited, self._still = phase, 0, 0

    def decide(self) -> tuple[np.ndarray, float]:
        """The point to go to and the gripper."""
        self.waited += 1
        eef = self.mover.eef()
        self._still = self._still + 1 if np.linalg.norm(eef - self._last) < 0.0015 else 0
        self._last = eef
        return self.act(eef)

    def act(self, eef: np.ndarray) -> tuple[np.ndarray, float]:
        """What `decide` returns, by phase."""
        raise NotImplementedError

    @property
    def stalled(self) -> bool:
        """Whether the hand has stopped moving."""
        return self._still >= _STALLED

    def turned(self) -> bool:
        """Whether the hand has the wanted orientation."""
        return bool(np.linalg.norm(self.mover.turn()) < _TURNED)

    def over(self, eef: np.ndarray, point: np.ndarray) -> np.ndarray:
        """First up to the safe height, then across; a hand that got stuck goes back and down, which bends a straight elbow."""
        if self.stalled:
            self.escape = 15
        if self.escape:
            self.escape -= 1
            return np.array([*self.mover.home[:2], eef[2] - 0.05])
        if np.hypot(*(point - eef)[:2]) > 0.03 and eef[2] < self.safe - 0.02:
            return np.array([eef[0], eef[1], self.safe + 0.01])
        return np.array([point[0], point[1], self.safe])

    def leave(self, eef: np.ndarray) -> tuple[np.ndarray, float]:
        """Open the hand, then rise; ends the skill."""
        if self.waited <= _OPENING:
            return eef, OPEN
        if self.waited > _OPENING + 8:
            self.go("done")
        return above(eef, 0.05), OPEN


class _Holding(Skill):
    """Plan a grasp from above and take hold: plan, over, descend, close."""

    def body(self) -> int:
        """What is taken hold of."""
        raise NotImplementedError

    def origin(self) -> np.ndarray:
        """A point of it that moves with it."""
        return np.array(self.scene.data.xpos[self.body()])

    def wanted(self, grasp: Grasp) -> float:
        """What a grasp costs here."""
        return grasp.cost

    def plan(self, eef: np.ndarray) -> None:
        """Choose a grasp; the clearance shrinks where there is none."""
        thing, others = self.scene.solids(self.body()), self.scene.others(self.body())
        for clearance, reach in ((0.004, 0.16), (0.001, 0.12), (-0.003, 0.08)):
            found = plan_grasps(
                thing, others, self.gripper, floor=thing.low[2], clearance=clearance, reach=reach
            )
            if found:
                break
        else:
            found = [Grasp(0.5 * (thing.low + thing.high), 0.0, 0.0, 1.0)]
        found.sort(key=self.wanted)
        best = found[self.tries % len(found)]
        self.offset = best.position - self.origin()
        self.mover.upright_33 = turned_down(best.yaw)
        top = self.scene.highest_between(others, eef, best.position, WAY)
        self.safe = max(top, float(thing.high[2])) + 0.04
        self.go("over")

    def take(self, eef: np.ndarray) -> tuple[np.ndarray, float] | None:
        """Phases until the fingers have closed, then None."""
        if self.phase == "plan":
            self.plan(eef)
        grip = self.origin() + self.offset
        away = float(np.hypot(*(grip - eef)[:2]))
        if self.phase == "over":
            if away < NEAR and self.turned():
                self.go("descend")
            return self.over(eef, grip), OPEN
        if self.phase == "descend":
            if away > 0.035:
                self.go("plan")
            elif abs(grip[2] - eef[2]) < 0.008 or self.stalled:
                self.go("close")
            return grip, OPEN
        if self.phase == "close":
            if self.waited > _CLOSING:
                self.go("lift")
                self.held = self.origin() - eef
                return None
            return grip, CLOSE
        return None


class Place(_Holding):
    """Pick `thing` up, carry it over `target`, lower it until it touches, let go."""

    def __init__(self, mover: Mover, scene: Scene, thing: str, target: str, verb: str) -> None:
        super().__init__(mover, scene)
        self.thing, self.target, self.verb = thing, target, verb

    def body(self) -> int:
        """The thing's."""
        return self.scene.body(self.thing)

    def plan(self, eef: np.ndarray) -> None:
        """Also where it will stand."""
        super().plan(eef)
        self.spot = self._spot()

    def _spot(self) -> np.ndarray:
        """Where the thing's origin shall be, seen from above: in the middle, or beside what stands there already; at the edge where
        another thing must find room."""
        middle, half = self.scene.goal_position(self.target)
        if self.target not in self.scene.env.object_sites_dict or self.verb == "in":
            return np.asarray(middle[:2])
        shape = self.scene.solids(self.body())
        low, high = (part[:2] - self.origin()[:2] for part in (shape.low, shape.high))
        obstacles = [
            self.scene.solids(self.scene.body(name))
            for name in self.scene.env.objects_dict
            if name != self.thing
        ]
        shared, steps = self.scene.shared(self.target), np.linspace(-0.85, 0.85, 9)
        spots = [middle[:2] + half[:2] * (a, b) for a in steps for b in steps]

        def cost(spot: np.ndarray) -> float:
            overlap = 0.0
            for other in obstacles:
                gap = np.minimum(spot + high - other.low[:2], other.high[:2] - spot - low) + 0.01
                overlap += float(max(0.0, gap.min())) if (gap > 0).all() else 0.0
            away = float(np.linalg.norm(spot - middle[:2]))
            return 20 * overlap + (-away if shared else away)

        return np.asarray(min(spots, key=cost))

    def _begin_carry(self, eef: np.ndarray) -> None:
        shape, others = self.scene.solids(self.body()), self.scene.others(self.body())
        end = np.array([*self.spot, eef[2]])
        radius = 0.5 * float((shape.high - shape.low)[:2].max()) + 0.02
        top = self.scene.highest_between(others, eef, end, radius)
        # what the thing passes over, and what the hand does, whose lower side is above the fingertips
        beside = self.scene.highest_between(others, eef, end, WAY) + 0.02 + self.gripper.hand_near
        self.safe = max(top + float(eef[2] - shape.low[2]) + 0.03, beside)

    def act(self, eef: np.ndarray) -> tuple[np.ndarray, float]:
        """Phases: plan over descend close lift carry lower open done."""
        grasp = self.take(eef)
        if grasp is not None:
            return grasp
        if self.phase == "open":
            return self.leave(eef)
        if self.phase == "done":
            return eef, OPEN
        lost = float(np.linalg.norm(self.origin() - eef - self.held))
        if lost > _LOST:
            self.tries += 1
            self.safe = float(eef[2]) + 0.02
            self.go("plan")
            return above(eef, 0.02), OPEN
        if self.phase == "lift":
            if self.waited == 0:  # the fingers have just closed
                self._begin_carry(eef)
            if eef[2] > self.safe - 0.02 or self.stalled:
                self.go("carry")
            return np.array([eef[0], eef[1], self.safe + 0.01]), CLOSE
        held = self.origin() - eef
        goal = self.spot - held[:2]
        if self.phase == "carry":
            if np.hypot(*(goal - eef[:2])) < 0.008 or self.stalled:
                self.go("lower")
            return np.array([*goal, self.safe]), CLOSE
        if self.phase == "lower" and (
            self.stalled or (self.waited > 2 and self.scene.touched(self.body()))
        ):
            self.go("open")
        return np.array([*goal, eef[2] - 0.016]), CLOSE


class Twist(_Holding):
    """Take hold of a knob and turn it until the predicate holds."""

    def __init__(self, mover: Mover, scene: Scene, target: str) -> None:
        super().__init__(mover, scene)
        self.joint = _joint(scene, target)
        self.predicate = ["turnon", target]

    def body(self) -> int:
        """The knob's."""
        return int(self.scene.model.jnt_bodyid[self.joint])

    def act(self, eef: np.ndarray) -> tuple[np.ndarray, float]:
        """Phases: plan over descend close lift (which turns) open done."""
        grasp = self.take(eef)
        if grasp is not None:
            return grasp
        if self.phase == "open":
            return self.leave(eef)
        if self.phase == "done":
            return eef, OPEN
        if self.waited == 0:  # the fingers have just closed
            self.begin, self.around = eef.copy(), self.mover.orientation().copy()
        axis = float(np.sign(self.scene.data.xaxis[self.joint][2]))
        angle = axis * min(0.08 * self.waited, 1.3)
        c, s = np.cos(angle), np.sin(angle)
        turn = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])
        self.mover.upright_33 = turn @ self.around
        anchor = np.array(self.scene.data.xanchor[self.joint])
        if self.waited > 30 or self.scene.holds(self.predicate):
            self.go("open")
        return anchor + turn @ (self.begin - anchor), CLOSE


def _joint(scene: Scene, target: str) -> int:
    joint = scene.joint(target)
    if joint is None:
        raise DataError(f"expert: expected {target} to have a joint that moves, found none")
    return joint


class Pull(Skill):
    """Take hold of a drawer's handle from the front, fingers above and below it, and pull."""

    def __init__(self, mover: Mover, scene: Scene, target: str) -> None:
        super().__init__(mover, scene)
        self.joint, self.target = _joint(scene, target), target
        self.level = mover.upright_33.copy()

    def _front(self) -> tuple[np.ndarray, np.ndarray]:
        """Middle of the handle's bar (3,), and the direction in which the drawer opens (3,)."""
        model, data = self.scene.model, self.scene.data
        low, high = model.jnt_range[self.joint]
        out = np.array(data.xaxis[self.joint]) * (1 if abs(high) > abs(low) else -1)
        shapes = self.scene.solids(int(model.jnt_bodyid[self.joint]))
        reach = [float((shapes.surface(i) @ out).max()) for i in range(len(shapes.kind))]
        return np.array(shapes.position[int(np.argmax(reach))]), out

    def _pulled(self) -> float:
        return abs(float(self.scene.data.qpos[self.scene.model.jnt_qposadr[self.joint]]))

    def act(self, eef: np.ndarray) -> tuple[np.ndarray, float]:
        """Phases: plan over turn reach close pull open back done."""
        bar, out = self._front()
        ready = bar + out * 0.10
        if self.phase == "plan":
            self.level = turned_down(0.0)
            up = np.array([0.0, 0.0, 1.0])
            frames = [np.stack([a, np.cross(-out, a), -out], 1) for a in (up, -up)]
            now = self.mover.orientation()
            self.mover.upright_33 = max(frames, key=lambda f: float(np.trace(now.T @ f)))
            # a hand that looks at the handle is broad downwards: it comes from above all that stands on the way
            others = self.scene.others(0)
            top = self.scene.highest_between(others, eef, ready, self.gripper.hand_half[1] + 0.02)
            self.safe = max(top + self.gripper.hand_half[0] + 0.02, float(ready[2]))
            self.go("over")
        if self.phase == "over":
            if np.hypot(*(ready - eef)[:2]) < 0.03:
                self.go("turn")
            return self.over(eef, ready), OPEN
        if self.phase == "turn":
            if (np.linalg.norm(ready - eef) < 0.02 and self.turned()) or self.waited > 60:
                self.go("reach")
            return ready, OPEN
        if self.phase == "reach":
            if np.linalg.norm(bar - eef) < 0.010 or self.stalled:
                self.go("close")
            return bar, OPEN
        if self.phase == "close":
            if self.waited > _CLOSING:
                self.go("pull")
            return bar, CLOSE
        if self.phase == "pull":
            if self.waited > 70 or self._pulled() > 0.152:
                self.go("open")
            return eef + out * 0.03, CLOSE
        if self.phase == "open":
            if self.waited > _OPENING:
                self.go("back")
            return eef, OPEN
        if self.phase == "back":
            if self.waited > 6:
                self.mover.upright_33 = self.level
            if self.waited > 40 or (
                self.waited > 6 and np.linalg.norm(eef - self.mover.home) < 0.1
            ):
                self.go("done")
            return (eef + out * 0.04 if self.waited <= 6 else self.mover.home), OPEN
        return eef, OPEN


class Push(Skill):
    """Push a drawer's front, or a door near its free edge, until it is shut; the hand leans away from it."""

    def __init__(self, mover: Mover, scene: Scene, target: str) -> None:
        super().__init__(mover, scene)
        self.joint, self.target = _joint(scene, target), target

    def _contact(self) -> tuple[np.ndarray, np.ndarray]:
        """The point to push at (3,), on the outside, and the direction that shuts it (3,)."""
        model, data = self.scene.model, self.scene.data
        shapes: Solids = self.scene.solids(int(model.jnt_bodyid[self.joint]))
        low, high = model.jnt_range[self.joint]
        sign = -1.0 if abs(high) > abs(low) else 1.0
        axis = np.array(data.xaxis[self.joint]) * sign
        points = shapes.points
        if model.jnt_type[self.joint] == 2:
            height = 0.5 * (shapes.low[2] + shapes.high[2])
            outer = points[(points @ -axis) > (points @ -axis).max() - 0.02]
            middle = 0.5 * (outer.min(0) + outer.max(0))
            return np.array([middle[0], middle[1], height]) - axis * 0.01, axis
        anchor = np.array(data.xanchor[self.joint])
        arm = points - anchor
        far = anchor + 0.85 * arm[int(np.argmax(np.hypot(arm[:, 0], arm[:, 1])))]
        radius = far - anchor
        radius[2] = 0.0
        shut = np.cross(axis, radius)
        shut /= np.linalg.norm(shut)
        reach = float(((points - far) @ -shut).max())
        height = 0.5 * (shapes.low[2] + shapes.high[2])
        return np.array([far[0], far[1], height]) - shut * (reach * 0.5 + 0.01), shut

    def act(self, eef: np.ndarray) -> tuple[np.ndarray, float]:
        """Phases: plan over descend push back done."""
        point, shut = self._contact()
        ready = point - shut * 0.07
        if self.phase == "plan":
            self._lean(shut)
            others = self.scene.others(0)
            self.safe = self.scene.highest_between(others, eef, ready, WAY) + 0.06
            self.go("over")
        if self.phase == "over":
            if np.hypot(*(ready - eef)[:2]) < 0.02:
                self.go("descend")
            return self.over(eef, ready), CLOSE
        if self.phase == "descend":
            if abs(ready[2] - eef[2]) < 0.015 or self.stalled:
                self.go("push")
            return ready, CLOSE
        if self.phase == "push":
            if self.waited > 90 or self.stalled:
                self.go("back")
            aim = eef + shut * 0.03
            return np.array([aim[0], aim[1], max(point[2], 0.0)]), CLOSE
        if self.phase == "back":
            if self.waited > 8:
                self.go("done")
            return eef - shut * 0.04, CLOSE
        return eef, CLOSE

    def _lean(self, shut: np.ndarray) -> None:
        """Look down and forwards, fingers side by side along the front."""
        forwards = np.array([0.0, 0.0, -np.cos(_TILT)]) + shut * np.sin(_TILT)
        side = np.cross(forwards, np.array([0.0, 0.0, 1.0]))
        side /= np.linalg.norm(side)
        frames = [np.stack([a, np.cross(forwards, a), forwards], 1) for a in (side, -side)]
        now = self.mover.orientation()
        self.mover.upright_33 = max(frames, key=lambda f: float(np.trace(now.T @ f)))
