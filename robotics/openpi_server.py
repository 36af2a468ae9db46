"""Our policies behind openpi's websocket protocol: robots and simulators that have openpi's client ask them as they ask openpi's.

    mmrl policy-server runs/robot/checkpoints/best --port 8000

    from openpi_client.websocket_client_policy import WebsocketClientPolicy      # in another environment
    chunk = WebsocketClientPolicy("127.0.0.1", 8000).infer(observation)["actions"]         # (C, A)

One policy answers several clients, one observation after the other, so that an answer does not depend on who else asks.
Observations have the names of openpi's LIBERO, DROID or ALOHA clients (`LAYOUTS`), whichever a message has. An answer holds
"actions" float64 (C, A), in the units and with the gripper of the simulator or data set that the policy was trained in, and
"server_timing". What is wrong with an observation is answered by a text, after which the connection is closed, as openpi's server
does.

The noise of the n-th answer on a connection has the key (seed, n), so that the same observations have the same answers. Clients of
mmrl (mmrl.robotics.openpi_client) send their own key, and whether to act greedily.

Beyond this machine a key is needed, sent as `Authorization: Api-Key KEY`; /healthz answers without. Pages of browsers are refused
(they name an Origin). Messages are read as mmrl.robotics.openpi_messages says; `PolicyLimits` bounds the
rest.

Legend: C control steps of a chunk, A action dimensions.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from mmrl.errors import MMRLError
from mmrl.operations.versions import versions
from mmrl.robotics.contract import Observation
from mmrl.robotics.openpi_messages import (
    EXTRA,
    PROTOCOL,
    need_packages,
    pack,
    picture_name,
    unpack,
)
from mmrl.robotics.policy_messages import MessageError
from mmrl.robotics.policy_service import ServedPolicy

__all__ = ["LAYOUTS", "Layout", "PolicyServer", "PolicyService"]

_log = logging.getLogger("mmrl.robotics.openpi_server")
_WAITING = 64  # connections beyond the clients' that have not said yet what they want
_PING_S, _PONG_S = 20.0, 60.0
_INVALID, _INTERNAL, _AWAY = 1007, 1011, 1001  # why a connection is closed (RFC 6455)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MOST_KEY = 16
_HOTTEST = 100.0


@dataclass(frozen=True)
class Layout:
    """Where an observation has what a policy sees: names of pictures by camera, and of what makes up the state, one after the
    other; a name of several words leads through maps."""

    pictures: Mapping[str, tuple[str, ...]]
    state: tuple[tuple[str, ...], ...]

    def picture(self, camera: str) -> tuple[str, ...]:
        """The name of a camera's picture."""
        return self.pictures.get(camera, (picture_name(camera),))


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "libero": Layout({}, (("observation/state",),)),
        "droid": Layout(
            {
                "base": ("observation/exterior_image_1_left",),
                "wrist": ("observation/wrist_image_left",),
            },
            (("observation/joint_position",), ("observation/gripper_position",)),
        ),
        "aloha": Layout(
            {
                "base": ("images", "cam_high"),
                "wrist": ("images", "cam_left_wrist"),
                "right_wrist": ("images", "cam_right_wrist"),
            },
            (("state",),),
        ),
    }
)
"""Names in openpi's src/openpi/policies/{libero,droid,aloha}_policy.py, by our cameras."""


def _layout_of(message: Mapping[Any, Any]) -> Layout:
    if "images" in message:
        return LAYOUTS["aloha"]
    known = LAYOUTS["droid"]
    return known if known.pictures["base"][0] in message else LAYOUTS["libero"]


def _found(message: Mapping[Any, Any], name: tuple[str, ...]) -> Any:
    """What stands under a name. Raises MessageError."""
    value: Any = message
    for word in name:
        if not isinstance(value, dict) or word not in value:
            names = sorted(map(str, message))
            raise MessageError(
                f"expected {'/'.join(name)} in the observation, found {names!r:.300}"
            )
        value = value[word]
    return value


@dataclass
class PolicyService(ServedPolicy):
    """A policy that openpi's clients ask. key: what clients must send, '' for none.

    `metadata` and `answer` are what is sent; the latter raises MMRLError for an observation that it cannot answer.
    """

    key: str = ""

    def metadata(self) -> bytes:
        """What a new connection is told first."""
        codec, settings = self.policy.codec, self.policy.settings
        facts = {
            "chunk": codec.steps,
            "action_dim": codec.dim,
            "bins": codec.bins if settings.decode != "flow" else 0,
            "cameras": list(settings.cameras),
            "proprio_dim": settings.proprio_dim if settings.proprio else 0,
        }
        said = {"protocol": PROTOCOL, "name": self.name, "policy": facts, "versions": versions()}
        return pack({EXTRA: said})

    def answer(self, message: bytes, number: int) -> bytes:
        """The answer to the `number`-th observation of a connection, from 0 on."""
        began = time.monotonic()
        actions = self.chunk(*self.read(unpack(message), number))
        timing = {"infer_ms": 1000 * (time.monotonic() - began)}
        return pack({"actions": actions, "server_timing": timing})

    def read(
        self, message: Mapping[Any, Any], number: int
    ) -> tuple[Observation, tuple[int, ...], bool, float]:
        """(observation, key of the noise, whether greedily, temperature) that a message asks for. Raises MessageError."""
        layout = _layout_of(message)

        def found(name: tuple[str, ...]) -> tuple[str, Any]:
            return "/".join(name), _found(message, name)

        pictures = {c: found(layout.picture(c)) for c in self.policy.settings.cameras}
        state = [found(name) for name in layout.state] if self.takes_state else []
        prompt = ("prompt", message.get("prompt", self.prompt))
        return self.observation(pictures, state, prompt), *self._how(message.get(EXTRA), number)

    def _how(self, said: Any, number: int) -> tuple[tuple[int, ...], bool, float]:
        """Key, greedy and temperature: a client's of mmrl, else ours."""
        if said is None:
            return self.own_way(number)
        if not isinstance(said, dict):
            said = {}
        key, greedy, temperature = (said.get(n) for n in ("key", "greedy", "temperature"))
        if (
            not isinstance(key, list)
            or not 0 < len(key) <= _MOST_KEY
            or not all(type(k) is int for k in key)
            or not isinstance(greedy, bool)
            or type(temperature) not in (int, float)
            or not (math.isfinite(temperature) and 0 < temperature <= _HOTTEST)
        ):
            raise MessageError(
                f"expected {EXTRA} with a key of 1 to {_MOST_KEY} whole numbers, greedy and a temperature above 0 up to "
                f"{_HOTTEST:g}, found {said!r:.200}"
            )
        return tuple(key), greedy, float(temperature)

    def admits(self, given: Sequence[str]) -> bool:
        """Whether the values of Authorization headers hold the key."""
        if not self.key:
            return True
        wanted = self.key.encode()
        words = [value.partition(" ") for value in given]
        return any(
            kind.lower() in ("api-key", "bearer")
            and hmac.compare_digest(rest.strip().encode("utf-8", "surrogateescape"), wanted)
            for kind, _, rest in words
        )


class _Stopping(Exception):
    """The server stops: no answer is begun."""


class PolicyServer:
    """Serves `service` on the bound socket `sock` until `stop`, or a signal where it runs in the main thread: an answer under way
    is still sent, clients that wait are told that there is none. A second signal ends the process at once. `ready` is called when
    it listens. Raises MissingExtraError."""

    def __init__(
        self, service: PolicyService, sock: socket.socket, ready: Callable[[], None] = lambda: None
    ) -> None:
        need_packages("policy servers")
        self.service, self._sock, self._ready = service, sock, ready
        self._clients: set[Any] = set()
        self._sockets: set[Any] = set()
        self._asking: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._worker = ThreadPoolExecutor(1, "policy")

    def run(self) -> None:
        """Serve."""
        main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in _SIGNALS} if main else {}
        try:
            asyncio.run(self._serve())
        finally:
            self._worker.shutdown(cancel_futures=True)
            self._sock.close()
            for number, handler in before.items():
                if handler is not None:  # one of C's cannot be put back
                    signal.signal(number, handler)

    def stop(self) -> None:
        """End `run`, from another thread."""
        loop, ended = self._loop, self._ended
        if loop is not None and ended is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(ended.set)

    def _signalled(self) -> None:
        assert self._loop is not None and self._ended is not None
        for number in _SIGNALS:  # no thread can be ended, the process can
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        self._ended.set()

    async def _serve(self) -> None:
        from websockets.asyncio.server import serve

        limits = self.service.limits
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._loop.add_signal_handler(number, self._signalled)
        quiet = logging.getLogger("mmrl.robotics.openpi_server.connections")
        quiet.addHandler(logging.NullHandler())
        quiet.propagate = (
            False  # strangers would fill the log with what is wrong with their requests
        )
        async with serve(
            self._talk,
            sock=self._sock,
            origins=[None],
            compression=None,
            process_request=self._admit,
            server_header=None,
            open_timeout=limits.open_s,
            ping_interval=_PING_S,
            ping_timeout=_PONG_S,
            close_timeout=5.0,
            max_size=limits.message_bytes,
            max_queue=1,
            logger=quiet,
            create_connection=self._bounded(),
        ):
            self._ready()
            await self._ended.wait()
            if self._asking:
                await asyncio.wait(self._asking)

    def _bounded(self) -> type[Any]:
        """Connections that are counted from the first byte on."""
        from websockets.asyncio.server import ServerConnection

        most = self.service.limits.clients + _WAITING
        sockets, clients = self._sockets, self._clients

        class Bounded(ServerConnection):
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                sockets.add(self)
                if len(sockets) > most:
                    transport.abort()

            def connection_lost(self, exc: Exception | None) -> None:
                sockets.discard(self)
                clients.discard(self)
                super().connection_lost(exc)

        return Bounded

    def _admit(self, connection: Any, request: Any) -> Any:
        """None for a request that may become a websocket, else the answer to it."""
        if request.path == "/healthz":
            return connection.respond(HTTPStatus.OK, "OK\n")
        if not self.service.admits(request.headers.get_all("Authorization")):
            return connection.respond(
                HTTPStatus.UNAUTHORIZED,
                "expected the server's key as Authorization: Api-Key KEY, found none or another one\n",
            )
        if len(self._clients) >= self.service.limits.clients:
            return connection.respond(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"expected at most {self.service.limits.clients} clients at once, found more; come again later\n",
            )
        self._clients.add(connection)
        return None

    async def _talk(self, connection: Any) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            with contextlib.suppress(ConnectionClosed, asyncio.TimeoutError):
                await self._answers(connection)
        finally:
            self._clients.discard(connection)

    async def _answers(self, connection: Any) -> None:
        """Observations of a client, answered one by one."""
        limits, number = self.service.limits, 0
        await asyncio.wait_for(connection.send(self.service.metadata()), limits.send_s)
        while True:
            try:
                message = await asyncio.wait_for(connection.recv(), limits.idle_s)
            except asyncio.TimeoutError:
                await connection.close(_AWAY, "no observation for a long time")
                return
            task = asyncio.current_task()
            assert task is not None and self._ended is not None
            self._asking.add(task)
            try:
                answer, code = await self._answer(message, number)
                await asyncio.wait_for(connection.send(answer), limits.send_s)
            finally:
                self._asking.discard(task)
            if code is not None:
                await connection.close(code, "the frame before says why")
                return
            if self._ended.is_set():
                await connection.close(_AWAY, "the server stops")
                return
            number += 1

    def _computed(self, message: bytes, number: int) -> bytes:
        """In the worker's thread: an answer, unless the server stops meanwhile."""
        assert self._ended is not None
        if self._ended.is_set():
            raise _Stopping
        return self.service.answer(message, number)

    async def _answer(self, message: Any, number: int) -> tuple[bytes | str, int | None]:
        """The answer, or in words what is wrong, with the code that the connection is closed with."""
        if isinstance(message, str):
            return "expected an observation as a binary message, found a text", _INVALID
        assert self._loop is not None
        try:
            answer = await self._loop.run_in_executor(self._worker, self._computed, message, number)
        except _Stopping:
            return "expected a server that goes on, found one that stops", _AWAY
        except MessageError as error:
            return str(error), _INVALID
        except MMRLError as error:
            return str(error), _INTERNAL
        except Exception as error:
            _log.exception("the policy failed")
            return (
                f"the policy failed ({type(error).__name__}); the server's log says more",
                _INTERNAL,
            )
        return answer, None
