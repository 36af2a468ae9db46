"""What servers of our policies share, whichever protocol clients speak: what an observation must be, what its answer is, and what
a client may make the server hold.

    served = ServedPolicy(policy, "runs/robot/checkpoints/best", seed=7)
    chunk_CA = served.chunk(observation, *served.own_way(0))

mmrl.robotics.openpi_server and mmrl.robotics.lerobot_server find values in their clients' messages; these are checked here.

Legend: C control steps of a chunk, A action dimensions, S proprioception values, H x W picture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmrl.robotics.acting import ActingPolicy
from mmrl.robotics.contract import ActionError, Observation
from mmrl.robotics.policy_messages import MessageError

__all__ = ["PolicyLimits", "ServedPolicy"]


@dataclass(frozen=True)
class PolicyLimits:
    """What a client may make the server hold. message_bytes: one observation; up to three of them wait on a connection. clients:
    connections. prompt: characters. sides: of a picture, pixels. Times in seconds: open_s until a connection has said what it
    wants, idle_s without an observation, send_s to take an answer."""

    message_bytes: int = 16 << 20
    clients: int = 16
    prompt: int = 2000
    sides: tuple[int, int] = (8, 4096)
    open_s: float = 10.0
    idle_s: float = 3600.0
    send_s: float = 60.0


def _picture(name: str, value: Any, sides: tuple[int, int]) -> np.ndarray:
    """uint8 (H, W, 3) of a picture in that shape or (3, H, W), uint8 or float from 0 to 1. Raises MessageError."""
    if (
        not isinstance(value, np.ndarray)
        or value.ndim != 3
        or 3 not in (value.shape[0], value.shape[-1])
    ):
        found = (
            f"{value.dtype} {value.shape}"
            if isinstance(value, np.ndarray)
            else type(value).__name__
        )
        raise MessageError(f"expected {name} as a picture (H, W, 3) or (3, H, W), found {found}")
    if value.shape[-1] != 3:
        value = value.transpose(1, 2, 0)
    least, most = sides
    if not all(least <= n <= most for n in value.shape[:2]):
        raise MessageError(
            f"expected {name} with sides from {least} to {most} pixels, found {value.shape[:2]}; resize it, as openpi's "
            "image_tools.resize_with_pad(picture, 224, 224) does"
        )
    if value.dtype.kind == "f":
        if not np.isfinite(value).all() or value.min() < 0 or value.max() > 1:
            raise MessageError(f"expected {name} as uint8, or as numbers from 0 to 1, found others")
        value = (255 * value).astype(np.uint8)
    if value.dtype != np.uint8:
        raise MessageError(f"expected {name} as uint8, found {value.dtype}")
    return np.require(value, requirements=("C", "W"))  # views into a message cannot be written


def _numbers(name: str, value: Any) -> np.ndarray:
    """float32 (n,) of numbers. Raises MessageError."""
    if isinstance(value, (int, float, np.generic, list)):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            value = np.asarray(value, np.float64)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu" or value.ndim > 1:
        raise MessageError(f"expected {name} as a row of numbers, found {value!r:.80}")
    with np.errstate(over="ignore"):
        found = np.atleast_1d(value).astype(np.float32)
    if not np.isfinite(found).all():
        raise MessageError(f"expected {name} as finite numbers, found {value!r:.80}")
    return found


@dataclass
class ServedPolicy:
    """One policy and how it is asked. name: what clients are told. seed: of the noise. temperature: of clients that do not say
    how to act; 0: greedy. prompt: of observations without one ('' refuses them)."""

    policy: ActingPolicy
    name: str
    seed: int = 0
    temperature: float = 0.0
    prompt: str = ""
    limits: PolicyLimits = field(default_factory=PolicyLimits)

    def own_way(self, number: int) -> tuple[tuple[int, ...], bool, float]:
        """(key of the noise, whether greedily, temperature) of a client's `number`-th answer, where it does not say."""
        return (self.seed, number), not self.temperature, self.temperature or 1.0

    def observation(
        self,
        pictures: Mapping[str, tuple[str, Any]],
        state: Sequence[tuple[str, Any]],
        prompt: tuple[str, Any],
    ) -> Observation:
        """What the policy sees, of values with the names that the client knows them by: pictures by camera, what makes up the
        state (asked for by `takes_state` only), the instruction. Raises MessageError."""
        settings, limits = self.policy.settings, self.limits
        images = {camera: _picture(*found, limits.sides) for camera, found in pictures.items()}
        if (side := settings.image_size) is not None:
            for camera, picture in images.items():
                if picture.shape != (side, side, 3):
                    raise MessageError(
                        f"expected {pictures[camera][0]} of {side} x {side} pixels, as the policy was trained on (vla.json), found "
                        f"{picture.shape[:2]}; resize it, as openpi's image_tools.resize_with_pad(picture, {side}, {side}) does"
                    )
        proprio = np.zeros(0, np.float32)
        if self.takes_state:
            parts = [_numbers(*found) for found in state]
            proprio = np.concatenate([proprio, *parts])
            if len(proprio) != settings.proprio_dim:
                names = " and ".join(name for name, _ in state)
                raise MessageError(
                    f"expected {settings.proprio_dim} numbers in {names}, found {len(proprio)}; the policy was made for "
                    "another robot"
                )
        return Observation(images, proprio, self._instruction(*prompt))

    @property
    def takes_state(self) -> bool:
        """Whether the policy sees the robot's state."""
        return bool(self.policy.settings.proprio)

    def _instruction(self, name: str, said: Any) -> str:
        text = self.prompt if said is None else said
        if not isinstance(text, str) or not 0 < len(text) <= self.limits.prompt:
            found = f"{len(text):,} characters" if isinstance(text, str) else type(text).__name__
            raise MessageError(
                f"expected {name} as a text of 1 to {self.limits.prompt:,} characters, found {found}"
            )
        return text

    def chunk(
        self, observation: Observation, key: tuple[int, ...], greedy: bool, temperature: float
    ) -> np.ndarray:
        """The answer, float64 (C, A). Raises ActionError where it is not finite."""
        output = self.policy.act([observation], [key], greedy=greedy, temperature=temperature)[0]
        actions = np.asarray(self.policy.actions(output), np.float64)
        if not np.isfinite(actions).all():
            raise ActionError(
                "expected finite actions of the policy, found others; they are not sent"
            )
        return actions
