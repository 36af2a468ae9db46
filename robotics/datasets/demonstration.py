"""The common record of a demonstration, whatever file it comes from, and the episode a recorder hands to a writer.

Legend: T control steps, P steps with a picture of their own, A action dimensions, S proprioception values, H x W pixels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmrl.errors import DataError, MissingExtraError, did_you_mean
from mmrl.robotics.contract import Observation

__all__ = ["Demonstration", "RecordedEpisode", "import_or_say"]


def import_or_say(name: str, command: str) -> Any:
    """The module; raises MissingExtraError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"expected the package {name.partition('.')[0]}, found none ({error}): {command}"
        ) from error


@dataclass(frozen=True, eq=False)
class Demonstration:
    """One episode. actions_TA float32 are the training targets (the demonstrator's clean actions), executed_TA what the
    simulator was given where that differs. proprio_TS float32; S may be 0. steps_P: the control steps whose picture and
    proprioception are their own; at other steps the last ones before are shown again. success None: the file does not say.
    `source` names file and episode; `state` the initial state where it is known."""

    instruction: str
    cameras: tuple[str, ...]
    proprio_TS: np.ndarray
    actions_TA: np.ndarray
    steps_P: np.ndarray
    success: bool | None
    source: str
    fps: float
    load: Callable[[str, Sequence[int]], np.ndarray]
    executed_TA: np.ndarray | None = None
    state: str = ""

    def __len__(self) -> int:
        return len(self.actions_TA)

    def pictures(self, camera: str, steps: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """uint8 (n, H, W, 3) of `camera` at these control steps (None: steps_P), read now. Raises DataError."""
        if camera not in self.cameras:
            raise DataError(
                f"{self.source}: expected a camera of {', '.join(self.cameras) or 'none'}, found {camera!r}."
                f"{did_you_mean(camera, self.cameras)}"
            )
        wanted = [int(s) for s in (self.steps_P if steps is None else steps)]
        if any(not 0 <= step < len(self) for step in wanted):
            raise DataError(
                f"{self.source}: expected steps from 0 to {len(self) - 1}, found {wanted}"
            )
        return self.load(camera, wanted)

    def observation(self, step: int) -> Observation:
        """What a policy would have seen before control step `step`."""
        images = {camera: self.pictures(camera, [step])[0] for camera in self.cameras}
        return Observation(images, self.proprio_TS[step], self.instruction)


@dataclass(frozen=True, eq=False)
class RecordedEpisode:
    """An episode to write. images: uint8 (P, H, W, 3) by camera; steps_P ascending from 0; proprio_PS at those steps;
    actions_TA the labels and executed_TA what was executed; rewards_T; success_T after each step."""

    instruction: str
    images: Mapping[str, np.ndarray]
    steps_P: np.ndarray
    proprio_PS: np.ndarray
    actions_TA: np.ndarray
    executed_TA: np.ndarray
    rewards_T: np.ndarray
    success_T: np.ndarray
    seed: int = 0
    state: str = ""

    @property
    def success(self) -> bool:
        """Whether the task was solved at any step."""
        return bool(np.any(self.success_T))

    def check(self) -> None:
        """Raises DataError for lengths that do not match, values that are not finite and pictures that are not uint8 RGB."""
        T, P = len(self.actions_TA), len(self.steps_P)
        found = {
            "executed_TA": len(self.executed_TA),
            "rewards_T": len(self.rewards_T),
            "success_T": len(self.success_T),
        }
        wrong = [f"{name} {length}" for name, length in found.items() if length != T]
        wrong += [
            f"pictures of {name} {len(frames)} instead of {P}"
            for name, frames in self.images.items()
            if len(frames) != P
        ]
        if len(self.proprio_PS) != P:
            wrong.append(f"proprio_PS {len(self.proprio_PS)} instead of {P}")
        if T < 1 or wrong:
            raise DataError(
                f"episode {self.state or '?'}: expected {T} control steps (at least 1) everywhere, found "
                f"{'; '.join(wrong) or 'none'}"
            )
        steps = np.asarray(self.steps_P)
        if P < 1 or steps[0] != 0 or (np.diff(steps) < 1).any() or steps[-1] >= T:
            raise DataError(
                f"episode {self.state or '?'}: expected picture steps ascending from 0 and below {T}, found "
                f"{steps.tolist()[:8]}"
            )
        for name, values in (
            ("actions", self.actions_TA),
            ("executed actions", self.executed_TA),
            ("proprio", self.proprio_PS),
            ("rewards", self.rewards_T),
        ):
            if not np.isfinite(values).all():
                raise DataError(
                    f"episode {self.state or '?'}: expected finite {name}, found NaN or infinity; drop the episode"
                )
        for name, frames in self.images.items():
            if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
                raise DataError(
                    f"episode {self.state or '?'}: expected uint8 pictures (P, H, W, 3) of {name}, found "
                    f"{frames.dtype} {frames.shape}"
                )
