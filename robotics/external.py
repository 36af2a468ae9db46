"""A policy in another process, under another interpreter: checkpoints whose packages cannot live beside mmrl's, for evaluation.

    with ExternalPolicy("envs/openvla/bin/python robotics/openvla_server.py --checkpoint openvla/openvla-7b-...") as policy:
        outputs = policy.act(observations, keys, greedy=True)

    mmrl eval --policy-command "..." --suite libero_spatial --protocol openvla_oft

Any program that speaks the messages described in mmrl.robotics.openvla_server can be that policy: it says hello with its versions
and what it needs (cameras, proprioception), and answers each batch of observations with action chunks. For
mmrl.robotics.rollout.Driver it behaves as a VLAPolicy does; it cannot be trained. A process that dies, hangs or answers nonsense is
ended, with its whole group, and the error says what was expected and how its stderr ends.

Legend: B observations, K action steps of a chunk, A action dimensions, C control steps.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import numpy as np

from mmrl.errors import ConfigError, MMRLError
from mmrl.robotics.contract import ActionError, Observation
from mmrl.robotics.openvla_server import FRAME, lengths, pack, unpack
from mmrl.workers.process import END_S, ChildError
from mmrl.workers.program import Program

__all__ = [
    "ExternalAction",
    "ExternalCodec",
    "ExternalPolicy",
    "ExternalSettings",
    "PolicyError",
    "PolicyFacts",
]

_PROTOCOL = 1
_TRAINING = ("core", "evaluate", "prompt", "reference", "save", "trainable", "values")


class PolicyError(MMRLError, RuntimeError):
    """The external process died, hung, or answered something that is not an action chunk."""


@dataclass(frozen=True)
class ExternalCodec:
    """What evaluation asks of an action codec: sizes only, the process decodes. bins 0: continuous actions."""

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
    """What the process said of itself. proprio_dim 0: it takes none. image: how it prepares pictures itself, in the words of
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
        """From a hello. Raises ValueError."""
        if header["kind"] != "hello" or header.get("protocol") != _PROTOCOL:
            raise ValueError(
                f"expected hello with protocol {_PROTOCOL}, found {header['kind']} with protocol "
                f"{header.get('protocol')}"
            )
        said = header.get("policy")
        if not isinstance(said, dict):
            raise ValueError(f"expected an object policy in hello, found {said!r}")
        for name, least in (("chunk", 1), ("action_dim", 1), ("bins", 0), ("proprio_dim", 0)):
            value = said.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"expected policy.{name} as a whole number of at least {least}, found {value!r}"
                )
        cameras = said.get("cameras")
        if (
            not isinstance(cameras, list)
            or not cameras
            or not all(isinstance(c, str) for c in cameras)
        ):
            raise ValueError(f"expected policy.cameras as a list of names, found {cameras!r}")
        image, versions, details = (
            said.get("image"),
            header.get("versions", {}),
            header.get("details", {}),
        )
        if not all(isinstance(v, dict) for v in (image or {}, versions, details)):
            raise ValueError(
                f"expected objects image, versions and details, found {image!r}, {versions!r} and {details!r}"
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


class ExternalPolicy:
    """A running policy process. `command`: program and arguments, as a shell would split them (no shell runs). It must say hello
    within start_s (reading 15 GB of weights takes a while) and answer each batch within act_s seconds.

    Raises ConfigError when it cannot be started or refuses to run, PolicyError when it fails later.
    """

    value_head = None
    version = 0

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        start_s: float = 1800.0,
        act_s: float = 600.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.command = tuple(shlex.split(command) if isinstance(command, str) else command)
        self.act_s = act_s
        self._number, self._broken = 0, ""
        if not self.command:
            raise ConfigError("external policy: expected a command, found an empty one")
        try:
            self._program = Program(
                self.command, "external policy", environment=environment, group=True
            )
        except OSError as error:
            raise ConfigError(
                f"external policy: expected a program that can be started, found {self.command[0]!r}: "
                f"{error.strerror}"
            ) from error
        try:
            header, _ = self._receive("hello", start_s)
            if header["kind"] == "error":
                self.close()
                raise ConfigError(f"external policy: {header.get('message')}")
            try:
                self.facts = PolicyFacts.of(header)
            except ValueError as error:
                self._fail(str(error))
        except BaseException:
            self.close()
            raise
        self.codec = ExternalCodec(self.facts.chunk, self.facts.action_dim, self.facts.bins)
        self.settings = ExternalSettings(self.facts.cameras)

    def __enter__(self) -> ExternalPolicy:
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

    @property
    def pid(self) -> int:
        """Process id."""
        return self._program.pid

    @property
    def own_pictures(self) -> bool:
        """Whether the process prepares pictures itself, from those the simulator renders."""
        return self.facts.image is not None

    def describe(self) -> dict[str, Any]:
        """Plain JSON values, to stand beside a result."""
        return {
            "command": shlex.join(self.command),
            **asdict(self.facts),
            "cameras": list(self.facts.cameras),
        }

    # acting

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
        arrays: dict[str, np.ndarray] = {}
        for i, observation in enumerate(observations):
            arrays |= {f"{i}/{name}": array for name, array in self._inputs(observation).items()}
        self._number += 1
        self._send(
            {
                "kind": "act",
                "number": self._number,
                "greedy": greedy,
                "temperature": temperature,
                "keys": [list(key) for key in keys],
                "instructions": [o.instruction for o in observations],
            },
            arrays,
        )
        header, found = self._receive("actions", self.act_s)
        self._program.trim()
        if header["kind"] == "error":
            self._fail(f"it could not act: {header.get('message')}")
        if header["kind"] != "actions" or header.get("number") != self._number:
            self._fail(
                f"expected actions number {self._number}, found {header['kind']} number {header.get('number')}"
            )
        actions, shape = (
            found.get("actions"),
            (len(observations), self.facts.chunk, self.facts.action_dim),
        )
        if actions is None or actions.dtype != np.float32 or actions.shape != shape:
            words = "none" if actions is None else f"{actions.dtype} {actions.shape}"
            self._fail(
                f"expected actions float32 {shape} (observations, chunk, action_dim as in its hello), found {words}"
            )
        if not np.isfinite(actions).all():
            b, k, a = (int(n) for n in np.argwhere(~np.isfinite(actions))[0])
            self.close()
            raise ActionError(
                f"external policy {self.facts.name}: expected finite actions, found {actions[b, k, a]} for "
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

    # the process

    def _send(
        self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        if self._broken:
            raise PolicyError(self._broken)
        self._program.begin(self.act_s)
        try:
            self._program.write(pack(header, arrays))
        except ChildError as error:
            self._lost(error, "a reader of its stdin")

    def _receive(self, wanted: str, limit_s: float) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        self._program.begin(limit_s)
        try:
            header, body = lengths(self._program.read(FRAME.size))
            return unpack(self._program.read(header), self._program.read(body))
        except ChildError as error:
            self._lost(error, wanted)
        except (ValueError, RecursionError) as error:  # JSON that is too deep
            self._fail(
                f"{error} on its stdout, where only messages may stand: it must print to stderr"
            )

    def _lost(self, error: ChildError, wanted: str) -> NoReturn:
        said, parts = error.death.said, bytes(self._program.held)
        if error.death.cause == "timeout":
            self._fail(f"expected {wanted} within {self._program.limit_s:g} s, found none")
        if said == "closed its stdin":
            self._fail(f"it {said}")
        found = f", found {parts!r} and its end" if parts and len(parts) < 200 else ""
        self._fail(f"expected {wanted} on its stdout{found}" if said else f"expected {wanted}")

    def _fail(self, what: str) -> NoReturn:
        """End the process; its next use fails with the same words."""
        death = self._program.death()
        code = death.code
        ended = (
            "it was ended"
            if code is None
            else f"it ended by signal {-code}"
            if code < 0
            else f"it ended with status {code}"
        )
        self._program.stop()
        tail = self._tail()
        self._broken = f"external policy ({shlex.join(self.command)}): {what}; {ended}; " + (
            f"its stderr ends:\n{tail}" if tail else "nothing on its stderr"
        )
        self.close()
        raise PolicyError(self._broken)

    def _tail(self) -> str:
        return self._program.tail()

    def close(self) -> None:
        """Ask it to end, then end it; may be called more than once."""
        if self._program.closed:
            return
        self._broken = self._broken or (
            f"external policy ({shlex.join(self.command)}): expected a running process, found a closed "
            "one"
        )
        if self._program.alive:
            self._program.begin(0.0)
            # it does not read: the end of its stdin is told as well
            with contextlib.suppress(ChildError):
                self._program.write(pack({"kind": "close"}))
        self._program.close(END_S)
