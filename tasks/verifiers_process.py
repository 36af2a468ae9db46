"""Processes that play environments of `verifiers` (mmrl.tasks.verifiers_host), in a Python of their own.

    worlds = Worlds(Settings(python, "wordle", "{}"))
    session = worlds.session()
    first = session.begin("train", 3, seed=7, limit=8)         # Asked(messages, tools), or Over
    then = session.say({"role": "assistant", "content": "crane"})

verifiers asks for an mcp of another major version than vLLM does, and environments bring requirements of their own: none of that is
installed beside mmrl. A process plays many rollouts, each on a connection of its own. One that waits for ever is given up alone;
where the process itself no longer answers, it is ended with all rollouts in it, and the next rollout starts another.
What a process says is data: JSON, bounded in bytes and time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from mmrl.errors import ConfigError, MMRLError
from mmrl.workers.process import ChildError
from mmrl.workers.program import Program

__all__ = ["Asked", "Over", "Session", "Settings", "WorldError", "Worlds"]

_HOST = Path(__file__).with_name("verifiers_host.py")
_MOST_BYTES = 64 << 20
_MOST_READY = 1 << 20
_PING_S = 5.0
_END_S = 10.0
_ROWS = 500  # of one answer


class WorldError(MMRLError, RuntimeError):
    """A rollout of verifiers failed: its environment raised, hangs, died, or does what cannot be played."""


class _Lost(WorldError):
    """The process is gone, or the connection to it."""


@dataclass(frozen=True)
class Settings:
    """One environment: `python`, a program; `env` and `arguments` (JSON) of load_environment; `folders` that its module may lie in;
    `variables`: names of environment variables that it may read; seconds to start and to answer; how many processes."""

    python: str
    env: str
    arguments: str = "{}"
    folders: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    start_s: float = 300.0
    answer_s: float = 120.0
    processes: int = 1


@dataclass(frozen=True)
class Asked:
    """The environment asks the policy: messages, in OpenAI's form, that are new since it was asked last; tools, the first time."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Over:
    """A rollout's end: the rubric's weighted sum, what each of its functions gave, whether it was cut off, and verifiers' stop
    condition. `error`: `kinds` and words (`said`) of what ended it, where something did; `reward_errors`: of functions that raised
    and counted as 0."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False
    stopped: str = ""
    error: Mapping[str, str] | None = None
    reward_errors: Sequence[str] = ()


class _Host:
    """One process: started when it is needed, and again after it was lost."""

    def __init__(self, settings: Settings, number: int) -> None:
        self.settings, self.name = settings, f"verifiers {settings.env} {number}"
        self.sessions: set[Session] = set()  # that are open
        self.facts: Mapping[str, Any] = {}
        self._lock = threading.Lock()
        self._program: Program | None = None
        self._folder = ""

    def ready(self) -> Mapping[str, Any]:
        """What the environment is; the process runs then. Raises ConfigError where none can be started."""
        with self._lock:
            if self._program is not None and self._program.alive:
                self._program.trim()
                return self.facts
            self._forget()
            self._start()
            return self.facts

    def _start(self) -> None:
        s = self.settings
        self._folder = tempfile.mkdtemp(prefix="mmrl-verifiers-")
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(os.path.join(self._folder, "s"))
            listening.listen(256)
            listening.setblocking(False)
            try:
                program = Program(
                    # -I: neither the folder of that file nor PYTHONPATH can stand before the environment's own modules
                    [s.python, "-I", "-B", str(_HOST)],
                    self.name,
                    passed=(listening.fileno(),),
                    group=True,
                )
            except OSError as error:
                raise ConfigError(
                    f"expected verifiers.python as a program, found {s.python!r} ({error.strerror})"
                ) from error
            self._program = program
            told = {
                "env": s.env,
                "args": json.loads(s.arguments),
                "folders": list(s.folders),
                "variables": list(s.variables),
                "socket": listening.fileno(),
            }
            program.begin(s.start_s)
            try:
                program.write(json.dumps(told).encode() + b"\n")
                said = json.loads(program.read_line(_MOST_READY))
            except (ChildError, ValueError) as error:
                tail = program.tail()
                raise ConfigError(
                    f"expected the environment {s.env!r} to be loaded within {s.start_s:g} s (verifiers.start_s) by {s.python}, "
                    f"found: {error}" + (f"\n{tail}" if tail else "")
                ) from error
            program.clear_deadline()
            if "refused" in said:
                raise ConfigError(f"task verifiers: {said['refused']}")
            self.facts = said["ready"]
        except BaseException:
            self._forget()
            raise
        finally:
            listening.close()

    def connect(self) -> socket.socket:
        """A connection to the process. Raises WorldError."""
        self.ready()
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(_PING_S)
        try:
            sock.connect(os.path.join(self._folder, "s"))
        except OSError as error:
            sock.close()
            raise _Lost(
                f"{self.name}: expected a process that takes rollouts, found {self.ended() or error}"
            ) from error
        return sock

    def answers(self) -> bool:
        """Whether the process still does anything but what it hangs in; one that does not is ended."""
        with contextlib.suppress(WorldError, ConfigError, OSError), self.connect() as sock:
            sock.sendall(b'{"do": "ping"}\n')
            if sock.recv(16):
                return True
        with self._lock:
            if self._program is not None:
                self._program.stop()
                self._program.wait(_END_S)
        return False

    def ended(self) -> str:
        """How the process ended, with its last words; '' while it runs."""
        program = self._program
        if program is None or program.closed:
            return "it was ended"
        death = program.death(1.0)
        return "" if death.code is None else f"that it {death.how}. {death.tail[-1000:]}".strip()

    def _forget(self) -> None:
        if self._program is not None:
            self._program.kill()
            self._program = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """End the process, after its own clean-up."""
        with self._lock:
            if self._program is not None:
                self._program.close(_END_S)
                self._forget()


class Worlds:
    """`settings.processes` processes, each with the whole environment; used by many threads."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._hosts = [_Host(settings, number + 1) for number in range(settings.processes)]
        self._lock = threading.Lock()
        atexit.register(self.close)

    def facts(self) -> Mapping[str, Any]:
        """What the environment says of itself. Raises ConfigError."""
        return self._hosts[0].ready()

    def rows(self, split: str) -> list[Mapping[str, Any]]:
        """The environment's rows of 'train' or 'eval', as they are listed. Raises ConfigError, WorldError."""
        found: list[Mapping[str, Any]] = []
        with contextlib.closing(self.session()) as session:
            while True:
                told = session.exchange(
                    {"do": "rows", "split": split, "first": len(found), "count": _ROWS},
                    self.settings.start_s,
                )
                if "failed" in told:
                    raise ConfigError(f"task verifiers: {told['failed']}")
                found.extend(told["rows"])
                if not told["rows"] or len(found) >= told["total"]:
                    return found

    def session(self) -> Session:
        """A connection for one rollout."""
        with self._lock:
            return Session(min(self._hosts, key=lambda h: len(h.sessions)), self.settings)

    def close(self) -> None:
        """End the processes."""
        for host in self._hosts:
            host.close()


class Session:
    """One rollout's conversation; one question at a time."""

    def __init__(self, host: _Host, settings: Settings) -> None:
        self._host, self._settings = host, settings
        self._socket: socket.socket | None = None
        self._held = bytearray()  # read, and not yet asked for
        host.sessions.add(self)

    def begin(self, split: str, row: int, *, seed: int, limit: int) -> Asked | Over:
        """Begin a rollout of a row, of at most `limit` turns. Raises WorldError, ConfigError."""
        asked = {"do": "begin", "split": split, "row": row, "seed": seed, "limit": limit}
        try:
            return self._move(asked)
        except _Lost:  # another rollout ended the process in this moment; nothing was played
            self._host.sessions.add(self)
            return self._move(asked)

    def say(
        self, message: Mapping[str, Any], *, cut: bool = False, tokens: int = 0
    ) -> Asked | Over:
        """What the policy answers, an assistant's message in OpenAI's form; cut: by the limit on tokens. Raises WorldError."""
        return self._move({"do": "say", "message": dict(message), "cut": cut, "tokens": tokens})

    def close(self) -> None:
        """End the rollout, where it is not over. May be called more than once."""
        self._host.sessions.discard(self)
        self._held.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _move(self, message: Mapping[str, Any]) -> Asked | Over:
        told = self.exchange(message, self._settings.answer_s)
        try:
            if "failed" in told:
                self._fail(str(told["failed"]))
            if "ask" in told:
                return Asked(told["ask"]["messages"], told["ask"].get("tools", ()))
            return self._over(told["over"])
        except (KeyError, TypeError, ValueError) as error:
            self._fail(f"expected a question or an end, found {str(told)[:200]!r}", error)

    def _over(self, said: Mapping[str, Any]) -> Over:
        reward = said["reward"]
        if isinstance(reward, bool) or not isinstance(reward, (int, float)):
            self._fail(
                f"expected a reward as a number, found {reward!r}: the environment does not score rollouts"
            )
        if not math.isfinite(reward):
            self._fail(f"expected a finite reward, found {reward}")
        metrics = {
            str(name): float(value)
            for name, value in said["metrics"].items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        }
        return Over(
            float(reward),
            metrics,
            bool(said["truncated"]),
            str(said["stopped"]),
            said["error"],
            tuple(map(str, said["reward_errors"])),
        )

    def exchange(self, message: Mapping[str, Any], limit_s: float) -> Mapping[str, Any]:
        """The answer to one message within so many seconds. Raises WorldError."""
        ends = time.monotonic() + limit_s
        if self._socket is None:
            if message["do"] == "say":
                raise WorldError(
                    f"{self._host.name}: expected an open rollout, found one that has ended"
                )
            self._socket = self._host.connect()
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            line = self._line(ends)
        except TimeoutError as error:
            self.close()
            alone = self._host.answers()
            lost = (
                "this rollout was given up"
                if alone
                else "its process did nothing any more and was ended, with the other rollouts in it"
            )
            raise WorldError(
                f"{self._host.name}: expected an answer within {limit_s:g} s, found none; {lost}; raise verifiers.answer_s where "
                "the environment needs longer"
            ) from error
        except OSError as error:
            how = self._host.ended()
            self._fail(
                f"expected an answer, found {how or 'the end of the connection'}", error, _Lost
            )
        try:
            told = json.loads(line)
        except (ValueError, RecursionError) as error:
            self._fail(f"expected JSON, found {line[:80]!r}", error)
        if not isinstance(told, dict):
            self._fail(f"expected an object, found {line[:80]!r}")
        return told

    def _line(self, ends: float) -> bytes:
        assert self._socket is not None
        while (end := self._held.find(b"\n")) < 0:
            if len(self._held) > _MOST_BYTES:
                raise OSError(f"an answer of more than {_MOST_BYTES:,} bytes")
            left = ends - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            data = self._socket.recv(1 << 20)
            if not data:
                raise ConnectionResetError("it closed the connection")
            self._held += data
        line = bytes(self._held[:end])
        del self._held[: end + 1]
        return line

    def _fail(
        self, why: str, cause: BaseException | None = None, kind: type[WorldError] = WorldError
    ) -> NoReturn:
        self.close()
        raise kind(f"{self._host.name}: {why}") from cause
