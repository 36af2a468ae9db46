"""One server that is asked: so many requests at once, so many a minute, again where it is worth it, and never beyond a deadline.

    server = Endpoint(url="http://127.0.0.1:8000/v1", concurrency=64)
    answered = await server.post("/chat/completions", {"model": "m", "messages": [...]})
    answered.document or answered.reason                    # JSON of a 200, or why there is none

The host is the one that the user named: redirects are not followed and proxies of the environment not used. Its answers are
foreign text: bounded in bytes, JSON without NaN, never evaluated. Every request ends with an answer or a reason:

    judge_timeout       nothing, or not all of it, within deadline_s
    judge_unreachable   no connection, or one that broke
    judge_rate_limited  status 429, and no time left to wait as long as it says (Retry-After)
    judge_overloaded    status 5xx, 408 or 425 each time
    judge_refused       another status: asking again would be refused again
    judge_garbled       a 200 whose body is no JSON object, or too long
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from zlib import crc32

from mmrl.errors import ConfigError, MissingExtraError, install_command

__all__ = ["MOST_BYTES", "Answered", "Endpoint", "check_url"]

MOST_BYTES = 4 << 20
"""Bytes of an answer's body; a longer one is not read to its end."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0
_LATER = (408, 425, 429)
_SHOWN = 200


@dataclass(frozen=True)
class Answered:
    """The JSON object of a 200, or the reason why there is none; how often it was asked, and for how many seconds."""

    document: Mapping[str, Any] | None
    reason: str | None
    calls: int
    seconds: float


def check_url(url: Any) -> str:
    """An http(s) address without credentials, query and fragment, and without a slash at its end. Raises ConfigError."""
    example = "for example http://127.0.0.1:8000/v1"
    if not isinstance(url, str):
        raise ConfigError(
            f"expected judge.url as the address of a server, {example}, found {url!r}"
        )
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or not url.isascii() or parts.query or parts.fragment:
        raise ConfigError(
            f"expected judge.url as the address of a server, {example}, found {url!r}"
        )
    if parts.username or parts.password:
        raise ConfigError(
            "expected judge.url without a name and a password, which logs would show; put the key into an environment "
            "variable and name that as judge.key_env"
        )
    return url.rstrip("/")


def _retry_after(value: str) -> float | None:
    """Seconds that a Retry-After header asks to wait (RFC 9110, 10.2.3: seconds, or a date)."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


@dataclass(frozen=True)
class _Tried:
    """One attempt: a document, or why there is none, whether another attempt may help, and how long the server asks to wait."""

    document: Mapping[str, Any] | None = None
    reason: str | None = None
    again: bool = False
    wait_s: float | None = None


class Endpoint:
    """A server, for one event loop.

    Args:
        concurrency: requests at once.
        per_minute: requests begun in a minute at most, evenly; None: no limit.
        attempts: times that a request is sent at most, with pauses that double from 0.25 s to 8 s, or as the server says.
        timeout_s: of one attempt.
        deadline_s: of a request, its attempts and pauses together, from when its turn has come.
        key_env: environment variable that holds the key, sent as a bearer token; None: no key.

    Raises ConfigError for settings that cannot be, MissingExtraError without httpcore.
    """

    def __init__(
        self,
        *,
        url: str,
        concurrency: int = 64,
        per_minute: float | None = None,
        attempts: int = 4,
        timeout_s: float = 30.0,
        deadline_s: float = 120.0,
        key_env: str | None = None,
    ) -> None:
        try:
            import httpcore
        except ImportError as error:
            raise MissingExtraError(
                f"judges need httpcore ({error}): {install_command('judge')}"
            ) from error
        self.url, self.attempts, self.per_minute = check_url(url), attempts, per_minute
        self.timeout_s, self.deadline_s = timeout_s, deadline_s
        self._headers = [
            (b"content-type", b"application/json"),
            (b"accept", b"application/json"),
            (b"accept-encoding", b"identity"),
            (b"user-agent", b"mmrl"),
        ]
        if key_env is not None:
            if not (key := os.environ.get(key_env)):
                raise ConfigError(
                    f"judge.key_env: expected the key of {self.url} in the environment variable {key_env}, found none; "
                    f"export {key_env}=... before the run"
                )
            key = key.strip()
            if not key.isascii() or not key.isprintable() or " " in key:
                # the key itself is never shown
                raise ConfigError(
                    f"judge.key_env: expected one word of printable ASCII in the environment variable {key_env}, found "
                    f"{len(key)} characters with others among them; export the key again"
                )
            self._headers.append((b"authorization", f"Bearer {key}".encode()))
        self._slots = asyncio.Semaphore(concurrency)
        self._next = self._paused_until = 0.0
        self._failures: tuple[type[Exception], ...] = (
            httpcore.NetworkError,
            httpcore.ProtocolError,
            httpcore.ProxyError,
            httpcore.UnsupportedProtocol,
            OSError,
        )
        self._timeouts: tuple[type[Exception], ...] = (
            httpcore.TimeoutException,
            asyncio.TimeoutError,
        )
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=concurrency, max_keepalive_connections=concurrency, keepalive_expiry=5.0
        )

    async def post(self, path: str, question: Mapping[str, Any]) -> Answered:
        """What the server answers to a JSON object. Never raises for what the server does."""
        body = json.dumps(question).encode()
        loop = asyncio.get_running_loop()
        async with self._slots:
            await self._turn()
            began = loop.time()
            end = began + self.deadline_s
            calls, found = 0, _Tried(reason="judge_timeout: not asked")
            for attempt in range(self.attempts):
                if attempt:
                    await self._turn(end)
                pause = self._paused_until - loop.time()
                if pause > 0 and loop.time() + pause >= end:
                    found = _Tried(
                        reason=f"judge_rate_limited: it asks to wait {pause:.0f} s, beyond deadline_s"
                    )
                    break
                await asyncio.sleep(max(0.0, pause))
                if loop.time() >= end:
                    break
                calls += 1
                found = await self._try(path, body, min(self.timeout_s, end - loop.time()))
                if not found.again:
                    break
                await self._pause(found, attempt, crc32(body), end)
            return Answered(found.document, found.reason, calls, loop.time() - began)

    async def _turn(self, end: float = math.inf) -> None:
        """Wait until per_minute lets another request begin."""
        if self.per_minute is None:
            return
        now = asyncio.get_running_loop().time()
        at = max(now, self._next)
        self._next = at + 60.0 / self.per_minute
        await asyncio.sleep(max(0.0, min(at, end) - now))

    async def _pause(self, found: _Tried, attempt: int, seed: int, end: float) -> None:
        """Before another attempt: as long as the server says, for all requests to it; else twice as long each time, less up to a
        half that differs between requests, so that they do not come back together."""
        now = asyncio.get_running_loop().time()
        if found.wait_s is not None:
            # a server may ask for hours: it is asked again after a question's own time
            pause_s = min(found.wait_s, self.deadline_s)
            self._paused_until = max(self._paused_until, now + pause_s)
            return
        spread = 1.0 - 0.5 * ((seed + attempt * 40_503) % 1024) / 1024
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt) * spread
        if attempt + 1 < self.attempts:
            await asyncio.sleep(max(0.0, min(pause, end - now)))

    async def _try(self, path: str, body: bytes, limit_s: float) -> _Tried:
        try:
            status, headers, data = await asyncio.wait_for(self._send(path, body), limit_s)
        except self._timeouts:
            return _Tried(reason=f"judge_timeout: no answer within {limit_s:.3g} s", again=True)
        except self._failures as error:
            return _Tried(
                reason=f"judge_unreachable: {type(error).__name__}: {error}"[:_SHOWN], again=True
            )
        return self._read(status, headers, data)

    async def _send(self, path: str, body: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
        data = bytearray()
        async with self._pool.stream(
            "POST", self.url + path, headers=self._headers, content=body
        ) as response:
            async for chunk in response.aiter_stream():
                data += chunk
                if len(data) > MOST_BYTES:
                    break
            headers = {name.lower(): value for name, value in response.headers}
            return response.status, headers, bytes(data)

    def _read(self, status: int, headers: Mapping[bytes, bytes], data: bytes) -> _Tried:
        if status != 200:
            said = f"status {status}: {data[:_SHOWN].decode('utf-8', 'replace')}"
            if status == 429:
                after = headers.get(b"retry-after", b"").decode("latin-1")
                return _Tried(
                    reason=f"judge_rate_limited: {said}", again=True, wait_s=_retry_after(after)
                )
            if status in _LATER or status >= 500:
                return _Tried(reason=f"judge_overloaded: {said}", again=True)
            return _Tried(reason=f"judge_refused: {said}")
        if len(data) > MOST_BYTES:
            return _Tried(reason=f"judge_garbled: over {MOST_BYTES:,} bytes", again=True)
        try:
            document = json.loads(data, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            return _Tried(reason=f"judge_garbled: {error}"[:_SHOWN], again=True)
        if not isinstance(document, dict):
            return _Tried(reason=f"judge_garbled: {type(document).__name__}, no object", again=True)
        return _Tried(document=document)
