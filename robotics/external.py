"""A policy in another process, under another interpreter: checkpoints whose packages cannot live beside mmrl's, for evaluation.

    with ExternalPolicy("envs/openvla/bin/python robotics/openvla_server.py --checkpoint openvla/openvla-7b-...") as policy:
        outputs = policy.act(observations, keys, greedy=True)

    mmrl eval --policy-command "..." --suite libero_spatial --protocol openvla_oft

Any program that speaks the messages described in mmrl.robotics.openvla_server can be that policy: it says hello with its versions
and what it needs (cameras, proprioception), and answers each batch of observations with action chunks. For evaluation it is a
mmrl.robotics.remote.RemotePolicy. A process that dies, hangs or answers nonsense is ended, with its whole group, and the error says
what was expected and how its stderr ends.

Legend: B observations, K action steps of a chunk, A action dimensions, C control steps.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from mmrl.errors import ConfigError
from mmrl.robotics.openvla_server import FRAME, lengths, pack, unpack
from mmrl.robotics.remote import PolicyError, PolicyFacts, RemotePolicy
from mmrl.workers.process import END_S, ChildError
from mmrl.workers.program import Program

__all__ = ["ExternalPolicy", "PolicyError"]

_PROTOCOL = 1


class ExternalPolicy(RemotePolicy):
    """A running policy process. `command`: program and arguments, as a shell would split them (no shell runs). It must say hello
    within start_s (reading 15 GB of weights takes a while) and answer each batch within act_s seconds.

    Raises ConfigError when it cannot be started or refuses to run, PolicyError when it fails later.
    """

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
                if header["kind"] != "hello" or header.get("protocol") != _PROTOCOL:
                    raise ValueError(
                        f"expected hello with protocol {_PROTOCOL}, found {header['kind']} with protocol "
                        f"{header.get('protocol')}"
                    )
                self._is(PolicyFacts.of(header))
            except ValueError as error:
                self._fail(str(error))
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._program.pid

    def _where(self) -> dict[str, Any]:
        return {"command": shlex.join(self.command)}

    def _ask(
        self,
        inputs: Sequence[Mapping[str, np.ndarray]],
        instructions: Sequence[str],
        keys: Sequence[tuple[int, ...]],
        greedy: bool,
        temperature: float,
    ) -> np.ndarray:
        """See RemotePolicy."""
        self._number += 1
        self._send(
            {
                "kind": "act",
                "number": self._number,
                "greedy": greedy,
                "temperature": temperature,
                "keys": [list(key) for key in keys],
                "instructions": list(instructions),
            },
            {f"{i}/{name}": array for i, one in enumerate(inputs) for name, array in one.items()},
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
            (len(inputs), self.facts.chunk, self.facts.action_dim),
        )
        if actions is None or actions.dtype != np.float32 or actions.shape != shape:
            words = "none" if actions is None else f"{actions.dtype} {actions.shape}"
            self._fail(
                f"expected actions float32 {shape} (observations, chunk, action_dim as in its hello), found {words}"
            )
        return actions

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
