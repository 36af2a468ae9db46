"""A policy behind openpi's websocket protocol, in our simulators: openpi's own servers, and others that answer as they do.

    with OpenPIPolicy("ws://gpu-box:8000") as policy:
        outputs = policy.act(observations, keys, greedy=True)

    mmrl eval --policy-server ws://gpu-box:8000 --suite libero_spatial --protocol openpi

The protocol (Physical-Intelligence/openpi, src/openpi/serving/websocket_policy_server.py): on connection the server sends a map of
metadata; then each binary message with an observation is answered by one with "actions" (K, A), or by a *text* that is an error. An
observation is what openpi's LIBERO client sends (examples/libero/main.py): observation/image and observation/wrist_image uint8
(H, W, 3), observation/state (S,): end effector position 3, axis-angle 3, fingers 2; prompt.

openpi's metadata do not say how long a chunk is: the policy is asked once with black pictures, before any simulator starts. Servers
of mmrl (mmrl.robotics.openpi_server) say it, and take the noise's key and whether to act greedily with each observation, so that an
evaluation is the same as in process. Other servers draw their own noise: no two evaluations of theirs are bit for bit the same.

openpi's server computes in its event loop and answers no pings meanwhile: none are sent here, and one deadline holds for sending
an observation and its answer. The connection goes to the host that was named, without the environment's proxies and without
redirects: a key reaches nobody else.

Legend: B observations, K action steps of a chunk, A action dimensions, S proprioception values, H x W picture.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from mmrl.errors import ConfigError
from mmrl.robotics.openpi_messages import (
    EXTRA,
    PROTOCOL,
    need_packages,
    pack,
    picture_name,
    unpack,
)
from mmrl.robotics.policy_client import (
    LARGEST,
    ServerPolicy,
    plain,
    plain_lines,
    split_address,
)
from mmrl.robotics.policy_messages import MessageError
from mmrl.robotics.remote import PolicyError, PolicyFacts

__all__ = ["PICTURE", "OpenPIPolicy"]

PICTURE = 224
"""Sides of the pictures that openpi's policies see, pixels."""
_STATE = 8
_PAUSE_S = 0.5  # between attempts to reach a server that is starting
_CLOSE_S = 2.0
_MOST_DETAILS = 32
_MOST_CAMERAS = 16
_CAMERA = re.compile(r"[A-Za-z0-9_]{1,40}")


def _checked(address: str) -> tuple[str, int]:
    """(host, port) of ws://HOST:PORT or wss://HOST:PORT. Raises ConfigError."""
    form = "ws://HOST:PORT or wss://HOST:PORT (openpi's protocol), or lerobot://HOST:PORT?type=TYPE&path=NAME"
    return split_address(address, {"ws": 80, "wss": 443}, form)[1:]


class OpenPIPolicy(ServerPolicy):
    """A policy at `address`, ws://HOST:PORT. `key`: sent as `Authorization: Api-Key ...`. The server must be reached, say its
    metadata and (where these do not say its chunk) answer once within connect_s and act_s seconds; each later answer has act_s.

    Raises ConfigError when there is no such server, or one that refuses the key or the observations, PolicyError when it fails
    later.
    """

    def __init__(
        self,
        address: str,
        *,
        key: str | None = None,
        connect_s: float = 60.0,
        act_s: float = 600.0,
    ) -> None:
        need_packages("policy servers")
        self._host, self._port = _checked(address)
        super().__init__(address, act_s)
        self._ours = False
        self._connection: Any = None
        try:
            self._connect(key, connect_s)
        except BaseException:
            self.close()
            raise

    # connecting

    def _connect(self, key: str | None, limit_s: float) -> None:
        ends = time.monotonic() + limit_s
        try:
            self._open(key, ends, limit_s)
            metadata = self._receive("its metadata", max(0.1, ends - time.monotonic()))
            said = metadata.get(EXTRA)
            self._ours = said is not None
            self._is(self._said(said) if self._ours else self._tried(metadata))
        except PolicyError as error:
            raise ConfigError(str(error)) from error.__cause__

    def _open(self, key: str | None, ends: float, limit_s: float) -> None:
        """Connect, again and again while nobody listens. Raises ConfigError."""
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.sync.client import connect

        headers = {"Authorization": f"Api-Key {key}"} if key else None
        sock = self._reached(ends, limit_s)
        try:
            # the socket is given: neither a proxy nor a redirect can lead elsewhere
            opened = connect(
                self.address,
                sock=sock,
                additional_headers=headers,
                compression=None,
                max_size=LARGEST,
                open_timeout=max(0.1, ends - time.monotonic()),
                ping_interval=None,
                close_timeout=_CLOSE_S,
            )
            self._connection = self._stack.enter_context(opened)
        except (OSError, ValueError, WebSocketException) as error:
            sock.close()
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, InvalidStatus):
                cause = cause.__cause__ or cause.__context__
            if cause is not None:
                self._refused(cause.response.status_code, bool(key))
            words = plain(f"{type(error).__name__}: {error}", 200)
            raise ConfigError(
                f"{self._who}: expected a websocket server within {limit_s:g} s, found none ({words}); is it one of "
                "openpi's protocol, and is ws:// or wss:// right? Or it is busy: openpi's servers answer nobody while they "
                "compute"
            ) from error

    def _reached(self, ends: float, limit_s: float) -> socket.socket:
        while True:
            left = ends - time.monotonic()
            try:
                sock = socket.create_connection((self._host, self._port), max(0.1, left))
                # websockets bounds what it does until it is open, and `_receive` the rest: what stays on the socket would end a
                # connection whose server thinks, or that nobody asks, for longer
                sock.settimeout(None)
                return sock
            except OSError as error:
                if not isinstance(error, ConnectionRefusedError) or left < _PAUSE_S:
                    raise ConfigError(
                        f"{self._who}: expected a server that can be reached within {limit_s:g} s, found none ({error}); "
                        "start it, or mend the address"
                    ) from error
            time.sleep(_PAUSE_S)

    def _refused(self, status: int, keyed: bool) -> NoReturn:
        if status in (401, 403):
            found = "the one that was sent refused" if keyed else "none sent"
            raise ConfigError(
                f"{self._who}: expected its key, found {found} (status {status}); give it with --policy-key or "
                "MMRL_API_KEY"
            )
        if 300 <= status < 400:
            raise ConfigError(
                f"{self._who}: expected the policy server itself, found a redirect (status {status}), which is not "
                "followed; name the address that it leads to"
            )
        if status == 503:
            raise ConfigError(
                f"{self._who}: expected a free connection, found none (status 503); end another client, or start the "
                "server with more"
            )
        raise ConfigError(
            f"{self._who}: expected a websocket of openpi's protocol, found status {status}; mend the address"
        )

    def _said(self, said: Any) -> PolicyFacts:
        """The facts that a server of mmrl tells."""
        try:
            if not isinstance(said, dict) or said.get("protocol") != PROTOCOL:
                raise ValueError(f"expected protocol {PROTOCOL}, found {said!r:.80}")
            facts = PolicyFacts.of({"policy": said.get("policy")})
            if (
                len(facts.cameras) > _MOST_CAMERAS
                or len(set(facts.cameras)) < len(facts.cameras)
                or not all(map(_CAMERA.fullmatch, facts.cameras))
            ):
                raise ValueError(
                    f"expected at most {_MOST_CAMERAS} different cameras with names of 1 to 40 letters, digits and _, found "
                    f"{list(facts.cameras)!r:.200}"
                )
        except ValueError as error:
            self._fail(f"{error}; update the older side")
        versions = said.get("versions")
        named = list(versions.items())[:_MOST_DETAILS] if isinstance(versions, dict) else []
        return replace(
            facts,
            name=f"{self._host}:{self._port}",  # what it calls itself names no folder here
            image=None,
            versions={plain(name, 80): plain(version, 80) for name, version in named},
            details={
                "name": plain(said.get("name", ""), 200),
                "noise": "of the evaluation's keys",
            },
        )

    def _tried(self, metadata: Mapping[Any, Any]) -> PolicyFacts:
        """The facts of a server that says none: asked with black pictures once."""
        black = np.zeros((PICTURE, PICTURE, 3), np.uint8)
        message = {picture_name(camera): black for camera in ("base", "wrist")}
        state = np.zeros(_STATE, np.float32)
        answer = self._exchange(
            pack({**message, "observation/state": state, "prompt": "do nothing"}), self.act_s
        )
        chunk, dim = self._chunk_of(answer, first=True).shape
        shown = {
            plain(name, 80): f"{value!r:.200}"
            for name, value in list(metadata.items())[:_MOST_DETAILS]
        }
        return PolicyFacts(
            f"{self._host}:{self._port}",
            chunk,
            dim,
            ("base", "wrist"),
            proprio_dim=_STATE,
            details={"noise": "the server's own", "metadata": shown},
        )

    @property
    def advice(self) -> str:
        """See RemotePolicy."""
        if self._ours:
            return ""
        return (
            f"{self._who} is none of mmrl's, and no --protocol was given: its policy sees pictures as the simulator renders "
            f"them, and all {self.facts.chunk} steps of a chunk are played. openpi's LIBERO policies are evaluated with "
            f"--protocol openpi: pictures padded to {PICTURE} pixels, 5 steps of a chunk"
        )

    # acting

    def _ask(
        self,
        inputs: Sequence[Mapping[str, np.ndarray]],
        instructions: Sequence[str],
        keys: Sequence[tuple[int, ...]],
        greedy: bool,
        temperature: float,
    ) -> np.ndarray:
        """See RemotePolicy: one observation after the other, as the protocol has it."""
        chunks = []
        for one, instruction, key in zip(inputs, instructions, keys, strict=True):
            message: dict[str, Any] = {picture_name(c): one[c] for c in self.facts.cameras}
            if self.facts.proprio_dim:
                message["observation/state"] = one["proprio"]
            message["prompt"] = instruction
            if self._ours:
                message[EXTRA] = {
                    "key": [int(k) for k in key],
                    "greedy": greedy,
                    "temperature": float(temperature),
                }
            chunks.append(self._chunk_of(self._exchange(pack(message), self.act_s)))
        return np.stack(chunks)

    def _chunk_of(self, answer: Mapping[Any, Any], *, first: bool = False) -> np.ndarray:
        """The (K, A) of an answer."""
        actions = answer.get("actions")
        if not isinstance(actions, np.ndarray):
            names = sorted(map(str, answer))
            self._fail(
                f"expected actions as numbers (steps, dimensions), found {type(actions).__name__} among {names!r:.200}"
            )
        return self._chunk(actions, first=first)

    # the connection

    def _exchange(self, message: bytes, limit_s: float) -> dict[Any, Any]:
        self._unbroken()
        return self._receive("actions", limit_s, message)

    def _receive(self, wanted: str, limit_s: float, message: bytes | None = None) -> dict[Any, Any]:
        """What the server answers to `message`, or says by itself, within limit_s seconds."""
        from websockets.exceptions import ConnectionClosed

        late = threading.Event()

        def end() -> None:
            late.set()
            # whatever the other thread waits for, sending included
            with contextlib.suppress(OSError):
                self._connection.socket.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            if message is not None:
                self._connection.send(message)
            answer = self._connection.recv()
        except ConnectionClosed as error:
            if late.is_set():
                self._fail(f"expected {wanted} within {limit_s:g} s, found none")
            closed = getattr(error, "rcvd", None) or getattr(error, "sent", None)
            words = f" ({closed.code} {closed.reason!r:.200})" if closed is not None else ""
            self._fail(f"expected {wanted}, found the end of the connection{words}", error)
        except OSError as error:
            self._fail(f"expected {wanted}, found a broken connection ({error})", error)
        finally:
            timer.cancel()
        if isinstance(answer, str):
            self._fail(f"expected {wanted}, found its error:\n{plain_lines(answer)}")
        try:
            return unpack(answer)
        except MessageError as error:
            self._fail(f"{wanted}: {error}", error)
