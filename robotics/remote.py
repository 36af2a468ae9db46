"""A policy that acts somewhere else: what evaluation asks of one, whichever way observations and action chunks travel.

mmrl.robotics.external keeps it in a process that it starts, mmrl.robotics.openpi_client asks a server over a websocket. Either
behaves for mmrl.robotics.rollout.Driver as a VLAPolicy does; it cannot be trained. A subclass says what the policy is
(`PolicyFacts`) and how a batch is answered (`_ask`); cameras, proprioception and finite numbers are checked here.

Legend: B observations, K action steps of a chunk, A action dimensions, C control steps, S proprioception values.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import ConfigError, MMRLError
from mmrl.robotics.contract import ActionError, Observation

if TYPE_CHECKING:
    from typing import Self  # from Python 3.11 on

__all__ = [
    "ExternalAction",
    "ExternalCodec",
    "ExternalSettings",
    "PolicyError",
    "PolicyFacts",
    "RemotePolicy",
]

_TRAINING = ("core", "evaluate", "prompt", "reference", "save", "trainable", "values")


class PolicyError(MMRLError, RuntimeError):
    """A policy elsewhere died, hung, or answered something that is not an action chunk."""


@dataclass(frozen=True)
class ExternalCodec:
    """What evaluation asks of an action codec: sizes only, the other side decodes. bins 0: continuous actions."""

    chunk: int
    dim: int
    bins: int = 0
    repeat: int = 1


@dataclass(frozen=True)
class ExternalSettings:
    """What evaluation asks of VLAConfig."""

    cameras: tuple[str, ...]
    decode: str = "external"


@dataclass(frozen=True)
class ExternalAction:
    """One decision, (K, A) control steps. The other fields are those of mmrl.robotics.vla.ActionOutput, not known here."""

    actions_KA: np.ndarray
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    values_V: tuple[float, ...] = (0.0,)
    prompt: None = None
    decision: None = None


@dataclass(frozen=True)
class PolicyFacts:
    """What the policy said of itself. proprio_dim 0: it takes none. image: how it prepares pictures itself, in the words of
    Protocol.describe(); None: it takes them as the protocol prepares them."""

    name: str
    chunk: int
    action_dim: int
    cameras: tuple[str, ...]
    bins: int = 0
    proprio_dim: int = 0
    greedy_only: bool = False
    image: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> PolicyFacts:
        """From what a policy says: {"name", "policy", "versions", "details"}. Raises ValueError."""
        said = header.get("policy")
        if not isinstance(said, dict):
            raise ValueError(f"expected an object policy in hello, found {said!r:.200}")
        for name, least in (("chunk", 1), ("action_dim", 1), ("bins", 0), ("proprio_dim", 0)):
            value = said.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"expected policy.{name} as a whole number of at least {least}, found {value!r:.200}"
                )
        cameras = said.get("cameras")
        if (
            not isinstance(cameras, list)
            or not cameras
            or not all(isinstance(c, str) for c in cameras)
        ):
            raise ValueError(f"expected policy.cameras as a list of names, found {cameras!r:.200}")
        image, versions, details = (
            said.get("image"),
            header.get("versions", {}),
            header.get("details", {}),
        )
        if not all(isinstance(v, dict) for v in (image or {}, versions, details)):
            raise ValueError(
                f"expected objects image, versions and details, found {image!r:.200}, {versions!r:.200} and {details!r:.200}"
            )
        return cls(
            str(header.get("name", "external")),
            said["chunk"],
            said["action_dim"],
            tuple(cameras),
            said.get("bins", 0),
            said.get("proprio_dim", 0),
            bool(said.get("greedy_only", False)),
            image,
            versions,
            details,
        )


class RemotePolicy(abc.ABC):
    """A policy on the other side of a pipe or a connection. `noun`: what messages call it. A subclass sets `facts`, through `_is`,
    before it is used; it is a context manager that closes what it opened."""

    noun = "external policy"
    value_head = None
    version = 0
    facts: PolicyFacts
    codec: ExternalCodec
    settings: ExternalSettings

    def _is(self, facts: PolicyFacts) -> None:
        """What the policy is, known from now on."""
        self.facts = facts
        self.codec = ExternalCodec(facts.chunk, facts.action_dim, facts.bins)
        self.settings = ExternalSettings(facts.cameras)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name in _TRAINING:
            raise ConfigError(
                f"expected a policy of mmrl for .{name}: an external policy is only evaluated, it cannot be trained; "
                "warm-start a Qwen-VL model with mmrl sft instead"
            )
        raise AttributeError(name)

    @abc.abstractmethod
    def close(self) -> None:
        """Give up the other side; may be called more than once."""

    @abc.abstractmethod
    def _where(self) -> dict[str, Any]:
        """How it is reached, plain JSON values."""

    @abc.abstractmethod
    def _ask(
        self,
        inputs: Sequence[Mapping[str, np.ndarray]],
        instructions: Sequence[str],
        keys: Sequence[tuple[int, ...]],
        greedy: bool,
        temperature: float,
    ) -> np.ndarray:
        """The chunks of a batch, float (B, K, A), of the facts' sizes. Each input holds pictures uint8 (H, W, 3) by camera and,
        where facts.proprio_dim is not 0, "proprio" float32 (S,). Raises PolicyError."""

    @property
    def own_pictures(self) -> bool:
        """Whether the policy prepares pictures itself, from those the simulator renders."""
        return self.facts.image is not None

    @property
    def advice(self) -> str:
        """What whoever evaluates it without a protocol should know, '' where nothing is."""
        return ""

    def describe(self) -> dict[str, Any]:
        """Plain JSON values, to stand beside a result."""
        return {**self._where(), **asdict(self.facts), "cameras": list(self.facts.cameras)}

    def act(
        self,
        observations: Sequence[Observation],
        keys: Sequence[tuple[int, ...]],
        *,
        greedy: bool = False,
        temperature: float = 1.0,
    ) -> list[ExternalAction]:
        """One chunk per observation. Raises ConfigError for cameras, proprioception or sampling that are not there, PolicyError,
        and ActionError for an action that is not finite."""
        if not observations:
            return []
        if self.facts.greedy_only and not greedy:
            raise ConfigError(
                f"{self.facts.name} only acts greedily, found sampling at temperature {temperature:g}: drop "
                "--samples, or take a greedy protocol such as openvla_oft"
            )
        inputs = [self._inputs(o) for o in observations]
        actions = self._ask(
            inputs, [o.instruction for o in observations], keys, greedy, temperature
        )
        if not np.isfinite(actions).all():
            b, k, a = (int(n) for n in np.argwhere(~np.isfinite(actions))[0])
            self.close()
            raise ActionError(
                f"{self.noun} {self.facts.name}: expected finite actions, found {actions[b, k, a]} for "
                f"observation {b}, step {k}, dimension {a}"
            )
        return [ExternalAction(chunk) for chunk in actions.astype(np.float64)]

    def actions(self, output: ExternalAction) -> np.ndarray:
        """Control steps (C, A) of an output, C = K."""
        return output.actions_KA

    def _inputs(self, observation: Observation) -> dict[str, np.ndarray]:
        lacking = [c for c in self.facts.cameras if c not in observation.images]
        if lacking:
            raise ConfigError(
                f"{self.facts.name} needs pictures of cameras {', '.join(self.facts.cameras)}, found "
                f"{', '.join(observation.images)}; add them to env.cameras"
            )
        found: dict[str, np.ndarray] = {
            c: np.asarray(observation.images[c], np.uint8) for c in self.facts.cameras
        }
        if self.facts.proprio_dim:
            proprio = np.asarray(observation.proprio, np.float32)
            if proprio.shape != (self.facts.proprio_dim,):
                raise ConfigError(
                    f"{self.facts.name} needs {self.facts.proprio_dim} proprioception values, found {proprio.shape}; "
                    "it was made for another robot or suite"
                )
            found["proprio"] = proprio
        return found
