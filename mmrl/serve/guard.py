"""What holds for connections, before there is a request: how many, how long a head, a body and an unread answer may take; and how
many bytes of bodies are held at once. uvicorn has no such bounds: half a head would be kept open for ever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from mmrl.errors import MissingExtraError, install_command
from mmrl.serve.errors import RequestError
from mmrl.serve.limits import Limits

try:
    import h11
    from starlette.requests import Request
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise MissingExtraError(
        f"mmrl serve needs starlette and uvicorn ({error}): {install_command('serve')}"
    ) from error

__all__ = ["Budget", "Hold", "body_of", "guarded"]

# bytes of each body that do not count: small requests go on while large ones fill the budget
_FREE = 256 << 10
_DRAIN = 4  # bodies that are too large are read up to so many times the limit, so that the client gets to read the refusal
# the application answers a late body with words; what it did not read is ended here, later
_AFTER_BODY_S = 5.0
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\nretry-after: 5\r\n\r\n"
_MOST_HEAD = 64 << 10  # bytes of a request's head
_CHUNKED = b"HTTP/1.1 411 Length Required\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Budget:
    """Bytes of bodies and fetched media that are held at once, by all requests together."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0


class Hold:
    """One request's part of the budget; `release` gives it back. For the event loop's thread."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self._seen, self._held = budget, 0, 0

    def take(self, count: int) -> None:
        """`count` more bytes are held. Raises RequestError with status 503 where there is no room."""
        self._seen += count
        more = max(0, self._seen - _FREE) - self._held
        if self._budget.held + more > self._budget.limit:
            raise RequestError(
                f"expected bodies of at most {self._budget.limit:,} bytes at once, found more from all clients "
                "together; ask again later",
                status=503,
                code="overloaded",
            )
        self._held += more
        self._budget.held += more

    def release(self) -> None:
        """Give everything back."""
        self._budget.held -= self._held
        self._seen = self._held = 0


async def body_of(request: Request, limits: Limits, hold: Hold) -> bytearray:
    """The body. Raises RequestError: 413 beyond the limit, 408 when it takes too long, 411 without a length, 503 without room."""
    if "content-length" not in request.headers:
        raise RequestError(
            "expected a request with Content-Length, found none; send its length",
            status=411,
            code="length_required",
        )
    data, seen, limit = bytearray(), 0, limits.body_bytes
    declared = int(request.headers["content-length"])
    too_large = declared > limit
    ends, stream = time.monotonic() + limits.body_s, request.stream()
    while declared <= _DRAIN * limit:
        try:
            chunk = await asyncio.wait_for(anext(stream), ends - time.monotonic())
        except StopAsyncIteration:
            break
        except asyncio.TimeoutError:
            raise RequestError(
                f"expected the whole body within {limits.body_s:g} s, found {seen:,} bytes of it; send it faster, "
                "or start the server with a larger --body-timeout",
                status=408,
                code="timeout",
            ) from None
        seen += len(chunk)
        too_large = too_large or seen > limit
        if not too_large:
            hold.take(len(chunk))
            data += chunk
        elif seen > _DRAIN * limit:
            break
    if too_large:
        raise RequestError(
            f"expected a request of at most {limit:,} bytes, found more; send smaller pictures, or start the server "
            "with a larger --max-body-mib",
            status=413,
            code="request_too_large",
        )
    return data


class _Unchunked(h11.Connection):
    """Ends with the head of a request in chunks: thousands of one byte, all parsed before anything else, would hold up the rest."""

    chunked = False

    def next_event(self) -> Any:
        """The next event. Raises RemoteProtocolError for a request in chunks."""
        event = super().next_event()
        if isinstance(event, h11.Request) and any(
            name == b"transfer-encoding" for name, _ in event.headers
        ):
            self.chunked = True
            raise h11.RemoteProtocolError("no chunks", error_status_hint=411)
        return event


def guarded(limits: Limits) -> type[H11Protocol]:
    """uvicorn's own HTTP protocol with these bounds on a connection."""

    class Guarded(H11Protocol):
        """`_idle` holds connections that wait for nothing, without a whole head or with their answer before their body, the oldest
        first: when there are too many connections, they go first."""

        _idle: dict[Any, None] = {}  # noqa: RUF012 (of all connections of this server)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._timers: dict[str, asyncio.TimerHandle] = {}
            self.conn = _Unchunked(
                h11.SERVER, self.config.h11_max_incomplete_event_size or _MOST_HEAD
            )

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                oldest = next(iter(self._idle), None)
                if oldest is None:  # every one of them is being answered
                    transport.write(_BUSY)
                    transport.close()
                    return
                oldest._end("for a newer connection")
            self._idle[self] = None
            self._start("head", limits.header_s)

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look(came=True)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._look(came=bool(self.conn.trailing_data[0]))

        def send_400_response(self, msg: str) -> None:
            if isinstance(self.conn, _Unchunked) and self.conn.chunked:
                self.transport.write(_CHUNKED)
                self.transport.close()
            else:
                super().send_400_response(msg)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._start("answer", limits.send_s)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop("answer")

        def _look(self, *, came: bool) -> None:
            """Which bound holds now: the head's until it is whole, then the body's."""
            if self.transport.is_closing():
                return
            state = self.conn.their_state
            if state is h11.IDLE:
                self._stop("body")
                self._stop("rest")
                self._idle[self] = None
                if came:
                    self._start("head", limits.header_s)
                return
            self._stop("head")
            # a wrong key, a wrong path: the body is of no use
            if state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
                self._stop("body")
                self._idle[self] = None
                self._start("rest", _AFTER_BODY_S)
                return
            self._idle.pop(self, None)
            if state is h11.SEND_BODY:
                self._start("body", limits.body_s + _AFTER_BODY_S)
            else:
                self._stop("body")

        def _start(self, name: str, seconds: float) -> None:
            if name not in self._timers:
                self._timers[name] = self.loop.call_later(seconds, self._end, name)

        def _stop(self, name: str) -> None:
            if (timer := self._timers.pop(name, None)) is not None:
                timer.cancel()

        def _forget(self) -> None:
            self._idle.pop(self, None)
            for name in list(self._timers):
                self._stop(name)

        def _end(self, why: str) -> None:
            """Close the connection; one that was asking hears that it was too late."""
            logging.getLogger("mmrl.serve").info("closed a connection: %s", why)
            self._forget()
            if why == "head" and self.conn.our_state is h11.IDLE:
                self.transport.write(_LATE)
                self.transport.close()
            else:
                self.transport.abort()

    return Guarded
