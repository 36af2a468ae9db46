"""A client of OpenEnv's protocol: one episode of an environment that runs on another process or machine.

    with Session("http://127.0.0.1:8000") as session:
        first = session.reset({"seed": 3})                      # Step(observation, reward, done)
        then = session.step({"message": "hello"})               # or a Refused action, which the policy is told

The protocol (OpenEnv's `env_server/http_server.py`, of openenv-core 0.3 and openenv 0.10): a WebSocket at /ws, on which a server
makes an environment for each connection and ends it with the connection; messages are JSON, {"type": "reset" | "step" | "mcp",
"data": ...}, each answered by one {"type": "observation" | "mcp" | "error", "data": ...}. GET /schema tells the JSON schema of
actions.

OpenEnv's own client is not used: its packages need an MCP of another major version than vLLM does, and it follows redirects and the
environment's proxies. Here the connection goes to the host that was named, so that a key reaches nobody else. What a server says is
data: bounded in bytes and time, JSON, never evaluated.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn
from urllib.parse import SplitResult, urlsplit

from mmrl.errors import ConfigError, MMRLError, need_package

__all__ = ["MOST_BYTES", "Refused", "ServerError", "Session", "Step", "check_url", "key_of"]

MOST_BYTES = 64 << 20
"""Bytes of an answer; a longer one is not read to its end."""
_PAUSE_S = 0.25  # between attempts to reach a server that starts, or has no free session
_CLOSE_S = 2.0
_SHOWN = 500  # characters of what a server said, in an error
_SCHEMA_KEPT_S = 60.0
_schemas: dict[str, tuple[float, Mapping[str, Any] | str]] = {}
_schemas_lock = threading.Lock()


class ServerError(MMRLError, RuntimeError):
    """An OpenEnv server cannot be reached, hangs, dies, fails or says what is not of its protocol."""


class _Lost(ServerError):
    """There is no connection, or it broke: another attempt may find a server that starts again."""


@dataclass(frozen=True)
class Step:
    """What an environment answers: fields of its observation by name, the reward (None: none was said), whether the episode is
    over."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


@dataclass(frozen=True)
class Refused:
    """An action that the environment's own schema does not take: why, in one line for the policy."""

    why: str


def _plain(said: Any, most: int = _SHOWN) -> str:
    """What a server said, as a line of at most `most` characters that a terminal shows as it is."""
    return "".join(c if c.isprintable() else " " for c in str(said)[:most])


def check_url(url: Any) -> SplitResult:
    """The parts of http(s)://HOST:PORT or ws(s)://HOST:PORT, a path may follow. Raises ConfigError."""
    example = "for example http://127.0.0.1:8000"
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        good = (
            parts is not None
            and parts.scheme in ("http", "https", "ws", "wss")
            and bool(parts.hostname)
            and parts.port != 0
        )
    except ValueError:
        good = False
    if not good or parts is None or not url.isascii() or parts.query or parts.fragment:
        raise ConfigError(
            f"expected openenv.url as the address of a running server, {example}, found {url!r}"
        )
    if parts.username or parts.password:
        raise ConfigError(
            "expected openenv.url without a name and a password, which logs would show; put the key into an environment "
            "variable and name that as openenv.key_env"
        )
    return parts


def key_of(name: str | None) -> str | None:
    """The key in the environment variable `name`. Raises ConfigError for none."""
    if name is None:
        return None
    key = os.environ.get(str(name), "").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        # the key itself is never shown
        raise ConfigError(
            f"expected the server's key as one word of printable ASCII in the environment variable {name} "
            f"(openenv.key_env), found {len(key)} characters; export {name}=... before the run"
        )
    return key


class Session:
    """One connection to the server at `url`, which is one environment of its own there.

    key: sent as a bearer token. connect_s: seconds until a server that starts, or has no session free, must have begun an episode;
    answer_s: of a message and its answer. Raises ConfigError for an address that cannot be.
    """

    def __init__(
        self, url: str, *, key: str | None = None, connect_s: float = 30.0, answer_s: float = 60.0
    ) -> None:
        need_package("websockets", "the task openenv", "openenv")
        self.url, parts = url, check_url(url)
        self._secure = parts.scheme in ("https", "wss")
        self._host = str(parts.hostname)
        self._port = parts.port or (443 if self._secure else 80)
        self._path = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.connect_s, self.answer_s = connect_s, answer_s
        self._connection: Any = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # what is asked

    def reset(self, options: Mapping[str, Any]) -> Step:
        """Begin the episode, on a new connection. Raises ServerError.

        Until connect_s are over this is tried again where nobody listens, a proxy says that nobody does, the connection breaks
        before there was an answer, or all sessions are taken: nothing was played by then.
        """
        ends = time.monotonic() + self.connect_s
        while True:
            self.close()
            try:
                self._open(ends)
                return self._step(
                    self._exchange({"type": "reset", "data": dict(options)}, "the reset")
                )
            except _Lost:
                if ends - time.monotonic() < _PAUSE_S:
                    raise
            time.sleep(_PAUSE_S)

    def step(self, action: Mapping[str, Any], *, tell: bool = False) -> Step | Refused:
        """Act. `tell`: what the environment raises is Refused, too. Raises ServerError; there is no second attempt, for the
        environment ends with its connection. Raises ValueError for a number that JSON has not."""
        told = ("VALIDATION_ERROR", *(("EXECUTION_ERROR",) if tell else ()))
        answer = self._exchange({"type": "step", "data": dict(action)}, "the step", told=told)
        return answer if isinstance(answer, Refused) else self._step(answer)

    def tools(self) -> list[Mapping[str, Any]]:
        """The MCP tools that the environment offers, each with name, description and inputSchema; none of one without MCP. Asked by
        MCP's tools/list beside the episode, which counts as no step of it."""
        request = {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1}
        answer = self._exchange({"type": "mcp", "data": request}, "the tools", kind="mcp")
        found = answer.get("result")
        tools = found.get("tools") if isinstance(found, Mapping) else None
        if tools is None and isinstance(answer.get("error"), Mapping):
            return []
        if not isinstance(tools, list) or not all(
            isinstance(t, Mapping) and isinstance(t.get("name"), str) for t in tools
        ):
            self._fail(f"expected a list of tools with names, found {_plain(answer, 200)}")
        return tools

    def schema(self) -> Mapping[str, Any]:
        """The JSON schema of actions, by GET /schema; kept for a minute, since all rollouts of a round ask for it. Raises
        ServerError."""
        began = time.monotonic()
        with _schemas_lock:  # the others wait for the one that asks, and fail with it
            when, known = _schemas.get(self.url, (-math.inf, ""))
            if isinstance(known, str):
                if when > began:
                    raise ServerError(known)
            elif time.monotonic() - when < _SCHEMA_KEPT_S:
                return known
            try:
                said = self._get("/schema")
                action = said.get("action") if isinstance(said, Mapping) else None
                if not isinstance(action, Mapping):
                    raise ServerError(
                        f"{self._who}: expected GET /schema to tell the JSON schema of actions, found {_plain(said, 200)}; is "
                        "it a server of OpenEnv?"
                    )
            except ServerError as error:
                _schemas[self.url] = (time.monotonic(), str(error))
                raise
            _schemas[self.url] = (time.monotonic(), action)
            return action

    def close(self) -> None:
        """End the environment and the connection; may be called more than once."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        from websockets.exceptions import WebSocketException

        # the episode is over: what a broken connection still says concerns nobody
        ended = self._limited(connection.socket, _CLOSE_S, threading.Event())
        with contextlib.suppress(OSError, WebSocketException), ended:
            connection.send('{"type": "close"}')
        with contextlib.suppress(OSError):
            self._stack.close()

    # how

    @property
    def _who(self) -> str:
        return f"OpenEnv server {self.url}"

    def _reached(self, ends: float) -> socket.socket:
        try:
            sock = socket.create_connection(
                (self._host, self._port), max(0.1, ends - time.monotonic())
            )
        except OSError as error:
            raise _Lost(
                f"{self._who}: expected a server that can be reached within {self.connect_s:g} s, found none ({error}); start "
                "it, or mend openenv.url"
            ) from error
        # what stays on the socket would end a connection whose server thinks for longer
        sock.settimeout(None)
        return sock

    def _open(self, ends: float) -> None:
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.sync.client import connect

        host = f"[{self._host}]" if ":" in self._host else self._host
        address = f"{'wss' if self._secure else 'ws'}://{host}:{self._port}{self._path}/ws"
        sock = self._reached(ends)
        try:
            # the socket is given: neither a proxy nor a redirect can lead elsewhere
            opened = connect(
                address,
                sock=sock,
                additional_headers=self._headers or None,
                compression=None,
                max_size=MOST_BYTES,
                open_timeout=max(0.1, ends - time.monotonic()),
                ping_interval=None,  # an environment that computes in its server's event loop answers none
                close_timeout=_CLOSE_S,
            )
            self._connection = self._stack.enter_context(opened)
        except (OSError, ValueError, WebSocketException) as error:
            sock.close()
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, InvalidStatus):
                cause = cause.__cause__ or cause.__context__
            if cause is not None:
                status = cause.response.status_code
                key = (
                    "; name the variable that holds its key as openenv.key_env"
                    if status in (401, 403)
                    else ""
                )
                # what stands before a server that starts says so
                kind = _Lost if status in (429, 502, 503, 504) else ServerError
                raise kind(
                    f"{self._who}: expected a WebSocket at {self._path}/ws, found status {status} (redirects are not "
                    f"followed); mend openenv.url{key}"
                ) from error
            raise _Lost(
                f"{self._who}: expected a WebSocket within {self.connect_s:g} s, found none "
                f"({_plain(f'{type(error).__name__}: {error}', 200)}); is it a server of OpenEnv, and is the scheme right?"
            ) from error

    @contextlib.contextmanager
    def _limited(
        self, sock: socket.socket, limit_s: float, late: threading.Event
    ) -> Iterator[None]:
        """Within it the connection of `sock` ends after limit_s, whatever is waited for, sending included; `late` tells that it
        did."""

        def end() -> None:
            late.set()
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _exchange(
        self,
        message: Mapping[str, Any],
        what: str,
        *,
        kind: str = "observation",
        told: tuple[str, ...] = (),
    ) -> Any:
        """The data of the answer to `message`, or a Refused where it is an error of the codes `told`."""
        from websockets.exceptions import ConnectionClosed

        connection = self._connection
        if connection is None:
            raise ServerError(f"{self._who}: expected an open connection, found a closed one")
        late = threading.Event()
        with self._limited(connection.socket, self.answer_s, late):
            try:
                # a server without a free session says so unasked, and closes: its words are there though nothing can be sent
                with contextlib.suppress(ConnectionClosed):
                    connection.send(json.dumps(message, allow_nan=False))
                raw = connection.recv()
            except (ConnectionClosed, OSError) as error:
                if late.is_set():
                    self._fail(
                        f"expected an answer to {what} within {self.answer_s:g} s, found none; raise openenv.answer_s where "
                        "the environment needs longer",
                        error,
                    )
                closed = getattr(error, "rcvd", None) or getattr(error, "sent", None)
                words = f" ({closed.code} {_plain(closed.reason, 200)})" if closed else ""
                self._fail(
                    f"expected an answer to {what}, found the end of the connection{words}",
                    error,
                    _Lost,
                )
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError) as error:
            self._fail(f"expected JSON, found {_plain(raw, 80)!r} ({_plain(error, 120)})", error)
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, dict) or answer.get("type") not in (kind, "error"):
            self._fail(
                f'expected {{"type": "{kind}", "data": {{...}}}} in answer to {what}, found {_plain(raw, 120)!r}'
            )
        if answer["type"] == "error":
            code, said = _plain(data.get("code"), 40), _plain(data.get("message"))
            if code in told:
                return Refused(_why(data.get("errors")) or said)
            if code == "CAPACITY_REACHED":
                self._fail(
                    f"expected a free session within {self.connect_s:g} s, found none ({said}); start the server with "
                    "max_concurrent_envs of at least the rollouts that are open at once: prompts times group_size of a round "
                    "of training, 64 of an evaluation",
                    kind=_Lost,
                )
            self._fail(f"expected an answer to {what}, found its error {code}: {said}")
        return data

    def _step(self, data: Mapping[str, Any]) -> Step:
        observation, reward, done = (data.get(k) for k in ("observation", "reward", "done"))
        if not isinstance(observation, dict):
            self._fail(f"expected an observation with fields, found {_plain(data, 120)}")
        if reward is not None and not isinstance(reward, (bool, int, float)):
            self._fail(f"expected a reward as a number or null, found {_plain(reward, 80)!r}")
        if not isinstance(done, bool):
            self._fail(f"expected done as true or false, found {_plain(done, 80)!r}")
        try:
            number = None if reward is None else float(reward)
        except OverflowError as error:
            self._fail("expected a reward as a number, found one without measure", error)
        if number is not None and not math.isfinite(number):
            self._fail(f"expected a finite reward, found {number}")
        return Step(observation, number, done)

    def _get(self, path: str) -> Any:
        """JSON of a GET within connect_s. Raises ServerError."""
        ends = time.monotonic() + self.connect_s
        sock, late = self._reached(ends), threading.Event()
        try:
            if self._secure:
                # by the socket's own time: wrapping takes the connection out of the socket that a timer would end
                sock.settimeout(max(0.1, ends - time.monotonic()))
                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=self._host)
                sock.settimeout(None)
            with self._limited(sock, max(0.1, ends - time.monotonic()), late):
                asked = http.client.HTTPConnection(self._host, self._port)
                asked.sock = sock
                asked.request("GET", f"{self._path}{path}", headers=self._headers)
                answer = asked.getresponse()
                raw = answer.read(MOST_BYTES + 1)
            if answer.status != 200 or len(raw) > MOST_BYTES:
                raise ServerError(
                    f"{self._who}: expected {path} with status 200 and at most {MOST_BYTES:,} bytes, found status "
                    f"{answer.status} (redirects are not followed); mend openenv.url"
                )
            return json.loads(raw)
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            silent = late.is_set() or isinstance(error, TimeoutError)
            found = "none" if silent else _plain(f"{type(error).__name__}: {error}", 200)
            raise ServerError(
                f"{self._who}: expected JSON of GET {path} within {self.connect_s:g} s, found {found}"
            ) from error
        finally:
            sock.close()

    def _fail(
        self,
        what: str,
        cause: BaseException | None = None,
        kind: type[ServerError] = ServerError,
    ) -> NoReturn:
        """End the connection: after an answer that is late or junk, the next one would be of another question."""
        self.close()
        raise kind(f"{self._who}: {what}") from cause


def _why(errors: Any) -> str:
    """Pydantic's list of errors as a line: where, and what was expected."""
    found = []
    for error in errors[:8] if isinstance(errors, list) else []:
        if isinstance(error, Mapping):
            place = error.get("loc")
            named = ".".join(map(str, place)) if isinstance(place, (list, tuple)) else ""
            found.append(_plain(f"{named}: {error.get('msg')}" if named else error.get("msg"), 200))
    return "; ".join(found)
