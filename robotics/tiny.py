"""A tiny deterministic simulator: a round arm on a table seen from above, pictures drawn with numpy, no GL.

    python -c "from mmrl.robotics.contract import *; s = make_simulator(EnvSpec('tiny', 'push', 24)); \
               s.reset(initial_states('eval', 1)[0]); print(s.observe().images['base'].shape, s.observe().instruction)"

An episode takes milliseconds, so that whole training runs fit into tests. Tasks (see mmrl.robotics.tiny_tasks): push, reach, pick.
The table is the square [-1, 1] x [-1, 1], x to the right and y up in the picture; the camera 'base' sees all of it, 'wrist'
the surroundings of the arm. Actions are displacements of the arm in [-1, 1], 1 being `SPEED` units; pick has a gripper
(1 opens, -1 closes, in two steps). proprio is the arm's place (and the gripper's width). The sparse reward is 1 in every step
that ends in success; option reward: shaped adds the change of the task's potential, minus the distance still to go.

Options: reward (sparse, shaped), stop_at_success (true), tolerance (0.12: how near counts), batched (false), and costs for
scheduling benchmarks in seconds of sleep: render_s per picture, step_s per control step, reset_s per reset.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from mmrl.errors import ConfigError, did_you_mean
from mmrl.robotics.contract import (
    ActionSpace,
    EnvSpec,
    InitialState,
    Observation,
    Simulator,
    StepResult,
)
from mmrl.robotics.options import Seconds, SimulatorOptions
from mmrl.robotics.tiny_tasks import SPEED, TASKS, ReachTask, TinyTask

__all__ = ["SPEED", "Canvas", "TinyOptions", "TinySimulator"]

_CAMERAS = ("base", "wrist")
_WRIST_HALF = 0.45  # half the width of what the wrist camera sees, in units of the table
_OUTSIDE = (92, 92, 98)
_GOLDEN = 0x9E3779B9  # mixes the task into the seed, so that tasks do not share layouts


class Canvas:
    """A square uint8 picture (size, size, 3) of the table around `centre`, `half` units to each side; shapes are smoothed
    over one pixel. The table's colour changes with the place: a vision tower that knows relative positions only can still
    tell where something lies."""

    def __init__(
        self, size: int, centre: tuple[float, float] = (0.0, 0.0), half: float = 1.0
    ) -> None:
        self.size, self.centre, self.half = size, centre, half
        self.scale = size / (2 * half)
        self.pixels = np.empty((size, size, 3), np.uint8)
        self.pixels[:] = _OUTSIDE
        (r0, r1), (c0, c1) = self._span(1, 0.0, 1.0), self._span(0, 0.0, 1.0)
        x, y = (
            (np.arange(a, b, dtype=np.float32) - np.float32(a)) / max(1, b - a)
            for a, b in ((c0, c1), (r0, r1))
        )
        self.pixels[r0:r1, c0:c1, 0] = (150 + 80 * x).astype(np.uint8)
        self.pixels[r0:r1, c0:c1, 1] = (150 + 80 * y[:, None]).astype(np.uint8)
        self.pixels[r0:r1, c0:c1, 2] = (235 - 40 * (x + y[:, None])).astype(np.uint8)

    def _at(self, axis: int, value: float) -> float:
        """Pixel coordinate of a coordinate of the table; axis 0 is x (columns), 1 is y (rows, downwards)."""
        offset = (value - self.centre[axis]) * (1 if axis == 0 else -1)
        return (offset + self.half) * self.scale

    def _span(self, axis: int, middle: float, reach: float) -> tuple[int, int]:
        """First pixel and the one after the last that lie within `reach` of `middle`."""
        at = self._at(axis, middle)
        return (
            min(self.size, max(0, int(np.floor(at - reach * self.scale + 0.5)))),
            min(self.size, max(0, int(np.ceil(at + reach * self.scale - 0.5)))),
        )

    def disc(
        self,
        place: tuple[float, float],
        radius: float,
        colour: tuple[int, int, int],
        inner: float = 0.0,
    ) -> None:
        """A disc, or a ring with the hole `inner`, in colour (R, G, B)."""
        edge = radius + 1.0 / self.scale
        (r0, r1), (c0, c1) = self._span(1, place[1], edge), self._span(0, place[0], edge)
        if r0 >= r1 or c0 >= c1:
            return
        dy = np.arange(r0, r1, dtype=np.float32) + np.float32(0.5 - self._at(1, place[1]))
        dx = np.arange(c0, c1, dtype=np.float32) + np.float32(0.5 - self._at(0, place[0]))
        distance = np.sqrt(dy[:, None] * dy[:, None] + dx * dx)
        cover = np.clip(np.float32(radius * self.scale + 0.5) - distance, 0, 1)
        if inner:
            cover *= np.clip(distance - np.float32(inner * self.scale - 0.5), 0, 1)
        patch = self.pixels[r0:r1, c0:c1]
        mixed = patch + cover[:, :, None] * (np.asarray(colour, np.float32) - patch)
        patch[:] = (mixed + np.float32(0.5)).astype(np.uint8)


class TinyOptions(SimulatorOptions):
    """`EnvSpec.options` of this suite; see the module. discs, apart: of reach; how many discs, and how far from the arm they lie
    (nearest and farthest, in units of the table). batched: the arms of a worker are the rows of one batch (a SerialVector), as
    those of simulators that compute on a GPU are."""

    reward: Literal["sparse", "shaped"] = "sparse"
    stop_at_success: bool = True
    tolerance: Annotated[float, Field(ge=0)] = 0.12
    discs: Annotated[int, Field(ge=1, le=4)] = 3
    apart: Annotated[
        tuple[float, float], Field(strict=False, description="two numbers, [nearest, farthest]")
    ] = (0.3, 4.0)
    batched: bool = False
    render_s: Seconds = 0.0
    step_s: Seconds = 0.0
    reset_s: Seconds = 0.0

    @field_validator("apart")
    @classmethod
    def _can_be_placed(cls, apart: tuple[float, float]) -> tuple[float, float]:
        if not 0.3 <= apart[0] < apart[1] or apart[0] > 1.5:
            raise ValueError(
                "expected options.apart as [nearest, farthest] with 0.3 <= nearest < farthest and nearest up to 1.5, "
                f"found {list(apart)}"
            )
        return apart


class TinySimulator(Simulator):
    """The tiny simulator behind the contract; opens nothing. Raises ConfigError for a task, camera or option it has not."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        if spec.task not in TASKS:
            raise ConfigError(
                f"suite tiny: expected task {', '.join(TASKS)}, found {spec.task!r}.{did_you_mean(spec.task, TASKS)}"
            )
        for camera in spec.cameras:
            if camera not in _CAMERAS:
                raise ConfigError(
                    f"tiny/{spec.task}: expected cameras {', '.join(_CAMERAS)}, found {camera!r}."
                    f"{did_you_mean(camera, _CAMERAS)}"
                )
        self.options = TinyOptions.read(spec)
        self.task: TinyTask = TASKS[spec.task](self.options.tolerance)
        if isinstance(self.task, ReachTask):
            self.task.discs_wanted, self.task.apart = (
                self.options.discs,
                self.options.apart,
            )
        self.steps = 0
        self._running = False

    @classmethod
    def batches(cls, options: Mapping[str, Any]) -> bool:
        """See Simulator: where it is asked for."""
        return options.get("batched") is True

    @property
    def action_space(self) -> ActionSpace:
        """(dx, dy), for pick (dx, dy, gripper), all in [-1, 1]."""
        names = ("dx", "dy", "gripper") if self.task.gripper else ("dx", "dy")
        return ActionSpace(
            (-1.0,) * len(names), (1.0,) * len(names), names, 2 if self.task.gripper else None
        )

    @property
    def proprio_dim(self) -> int:
        """2, for pick 3."""
        return 3 if self.task.gripper else 2

    def reset(self, state: InitialState) -> None:
        """Lay the table for `state.seed`."""
        _sleep(self.options.reset_s)
        number = list(TASKS).index(self.spec.task)
        self.task.lay(np.random.default_rng([state.seed, _GOLDEN + number]))
        self.steps, self._running = 0, True

    def step(self, action_A: np.ndarray) -> StepResult:
        """Move the arm; values outside [-1, 1] are clipped."""
        assert self._running, (
            "expected a running episode, found none or one that has ended: reset first"
        )
        _sleep(self.options.step_s)
        before = self.task.potential()
        self.task.move([min(1.0, max(-1.0, float(value))) for value in action_A])
        self.steps += 1
        success = self.task.success()
        terminated = self.task.failure() or (success and self.options.stop_at_success)
        truncated = not terminated and self.steps >= self.spec.horizon
        self._running = not (terminated or truncated)
        reward = float(success)
        if self.options.reward == "shaped":
            reward += self.task.potential() - before
        return StepResult(reward, terminated, truncated, success)

    def observe(self) -> Observation:
        """Pictures of the table now; every one costs render_s."""
        assert self.task.instruction, "expected a reset before the first observation"
        images: dict[str, np.ndarray] = {}
        for camera in self.spec.cameras:
            _sleep(self.options.render_s)
            canvas = (
                Canvas(self.spec.image_size)
                if camera == "base"
                else Canvas(self.spec.image_size, self.task.arm, _WRIST_HALF)
            )
            for shape in self.task.shapes():
                canvas.disc(*shape)
            images[camera] = canvas.pixels
        proprio = (*self.task.arm, self.task.width) if self.task.gripper else self.task.arm
        return Observation(images, np.asarray(proprio, np.float32), self.task.instruction)

    def expert(self, rng: np.random.Generator, noise: float = 0.0) -> Any:
        """Closed loop, for any state of the episode; `noise` is added to dx and dy before they are clipped to the bounds, never
        to the gripper."""

        def act() -> tuple[np.ndarray, np.ndarray]:
            clean = np.clip(np.asarray(self.task.advice(), np.float64), -1, 1)
            action = clean.copy()
            action[:2] += noise * rng.standard_normal(2)
            return np.clip(action, -1, 1), clean

        return act

    def versions(self) -> dict[str, str]:
        """numpy draws; no assets."""
        return {"render": "numpy", "numpy": np.__version__}


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)
