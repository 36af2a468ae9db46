"""The HTTP side: routes, limits, streaming, disconnects and a clean shutdown. Needs the extra `serve` (starlette, uvicorn).

    /v1/models  /v1/chat/completions  /health  /metrics

The first SIGTERM or SIGINT lets requests at hand finish within the grace period while new ones get status 503; the second ends
the server at once.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from mmrl.errors import MissingExtraError, install_command
from mmrl.serve.answers import Answer
from mmrl.serve.decode import Piece
from mmrl.serve.engine import Accepted, Event, Failed, Job, ServingEngine
from mmrl.serve.errors import RequestError, shutting_down
from mmrl.serve.fetch import Fetcher
from mmrl.serve.guard import Budget, Hold, body_of, guarded
from mmrl.serve.limits import Limits
from mmrl.serve.media import MediaRules
from mmrl.serve.pool import Readers
from mmrl.serve.preparing import Reading
from mmrl.serve.protocol import Defaults
from mmrl.serve.unread import Unread

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtraError(
        f"mmrl serve needs starlette and uvicorn ({error}): {install_command('serve')}"
    ) from error

__all__ = ["Service", "serve"]

_POLL_S = 0.25  # how often a waiting request looks whether its client is still there
# answers that may leave a body unread: the connection is closed after them
_UNREAD = (408, 411, 413, 503)
_SWITCH_S = 0.0005  # a busy connection keeps the engine from Python so long, after each of a step's many calls; default 5 ms
_MOST_HEAD = 64 << 10  # bytes of a request's head
_log = logging.getLogger("mmrl.serve")


@dataclass
class Service:
    """What all requests share: the engine, the processes that read them, limits, the key, and counts."""

    engine: ServingEngine
    readers: Readers
    defaults: Defaults
    limits: Limits = field(default_factory=Limits)
    rules: MediaRules = field(default_factory=MediaRules)
    api_key: str | None = None
    draining: bool = False
    open_requests: int = 0
    answered: Counter[int] = field(default_factory=Counter)
    written_tokens: int = 0

    def __post_init__(self) -> None:
        self.budget = Budget(self.limits.held_bytes)
        self.fetcher = (
            Fetcher(self.rules, self.limits) if self.rules.remote or self.rules.hosts else None
        )

    @property
    def waiting(self) -> int:
        """Requests whose turn has not come."""
        return self.engine.load()[1] + self.readers.waiting

    def check_key(self, request: Request) -> None:
        """Raises RequestError for a wrong key."""
        if self.api_key is not None:
            sent = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(sent.encode(), self.api_key.encode()):
                raise RequestError(
                    "expected the server's key as 'Authorization: Bearer KEY', found another or none",
                    status=401,
                    code="invalid_api_key",
                )

    def check(self, request: Request) -> None:
        """Raises RequestError for a wrong key, a server that closes, or one that is full."""
        self.check_key(request)
        if self.draining:
            raise shutting_down()
        if self.waiting >= self.limits.waiting:
            raise RequestError(
                f"expected at most {self.limits.waiting} waiting requests, found as many; ask again later",
                status=429,
                code="rate_limit_exceeded",
            )


class _Exchange:
    """One request from its body to its last event; leaving it gives its place in the engine and its files back."""

    def __init__(self, service: Service, request: Request, folder: str, hold: Hold) -> None:
        self.service, self._request, self._hold = service, request, hold
        self._unread = Unread(service.limits)
        self.loop, self._folder = asyncio.get_running_loop(), folder
        self._job: Job | None = None
        self._looked = time.monotonic()

    async def begin(self, body: bytearray) -> None:
        """Read the request, bring its media into files and ask the engine; returns when it accepted the prompt. Raises
        RequestError."""
        reading = await self._while_there(self._prepared(body))
        assert reading.prompt is not None
        self._hold.release()  # its bytes were read; what waits from here on are pixels
        self._hold.take(
            sum(v.packed.numel() * v.packed.element_size() for v in reading.prompt.visuals)
        )
        self.asked = reading.asked
        self.answer = Answer(reading.asked, self.service.defaults.model)
        self._job = Job(reading.asked, reading.prompt, self._give)
        self.service.engine.submit(self._job)
        event = await self._next()
        assert isinstance(event, Accepted)
        self.answer.prompt_tokens = event.prompt_tokens

    async def _prepared(self, body: bytearray) -> Reading:
        client = self._request.client.host if self._request.client is not None else ""
        reading = await self.service.readers.read(body, self._folder, client)
        if reading.prompt is None:
            assert self.service.fetcher is not None, (
                "a reader refuses addresses where none is fetched"
            )
            missing = [
                media
                for media, path in zip(reading.asked.media, reading.paths, strict=True)
                if path is None
            ]
            fetched = iter(
                await self.service.fetcher.files(missing, Path(self._folder), self._hold, client)
            )
            reading = await self.service.readers.encode(
                reading, [path or next(fetched) for path in reading.paths], client
            )
        return reading

    async def _while_there(self, work: Coroutine[Any, Any, Reading]) -> Reading:
        """What `work` returns; it is given up, with ClientDisconnect, when nobody listens any more."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=_POLL_S))[0]:
                if await self._request.is_disconnected():
                    raise ClientDisconnect()
            return task.result()
        finally:
            task.cancel()

    def _give(self, event: Event) -> None:
        if not self.loop.is_closed():  # else the server was ended at once, and nobody waits
            self.loop.call_soon_threadsafe(self._came, event)

    def _came(self, event: Event) -> None:
        if not self._unread.put(event) and self._job is not None and not self._job.cancelled:
            self._job.cancelled = True  # nobody will read the rest
            self.service.engine.nudge()

    async def _next(self) -> Event:
        """The next event; raises RequestError for a failure, or a client that is too slow, and ClientDisconnect when nobody listens
        any more."""
        while True:
            if time.monotonic() - self._looked > _POLL_S:  # also while events come all the time
                self._looked = time.monotonic()
                if await self._request.is_disconnected():
                    raise ClientDisconnect()
            event = await self._unread.get(_POLL_S)
            if isinstance(event, Failed):
                raise event.error
            if event is not None:
                return event

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of all choices until the last one ended."""
        while True:
            piece = await self._next()
            assert isinstance(piece, Piece)
            ended = self.answer.add(piece)
            yield piece
            if ended:
                return

    def end(self) -> None:
        """Give the place in the engine back."""
        if self._job is not None:
            self.service.written_tokens += self.answer.completion_tokens
            self._job.cancelled = True
            self.service.engine.nudge()


def _routes(service: Service) -> list[Route]:
    async def chat(request: Request) -> Response:
        service.check(request)
        service.open_requests += 1
        folder = tempfile.TemporaryDirectory(prefix="mmrl-serve-", ignore_cleanup_errors=True)
        hold = Hold(service.budget)
        exchange = _Exchange(service, request, folder.name, hold)

        def end() -> None:
            exchange.end()
            folder.cleanup()
            # a process that reads for a client who left was just writing there
            if os.path.exists(folder.name):
                exchange.loop.call_later(service.limits.prepare_s, shutil.rmtree, folder.name, True)
            hold.release()
            service.open_requests -= 1

        streams = False
        try:
            await exchange.begin(await body_of(request, service.limits, hold))
            folder.cleanup()  # what it sent was read: an answer may take long, and others wait for their turn
            if exchange.asked.stream:
                streams = True
                return _Events(exchange, end)
            async for _ in exchange.pieces():
                pass
            return JSONResponse(exchange.answer.completion())
        finally:
            if not streams:
                end()

    async def models(request: Request) -> Response:
        service.check_key(request)
        card = {
            "id": service.defaults.model,
            "object": "model",
            "created": _STARTED,
            "owned_by": "mmrl",
            "max_model_len": service.engine.context,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def health(request: Request) -> Response:
        running, waiting = service.engine.load()[0], service.waiting
        state = {
            "status": "draining" if service.draining else "ok",
            "model": service.defaults.model,
            "running": running,
            "waiting": waiting,
        }
        return JSONResponse(state, 503 if service.draining else 200)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(_metrics(service), media_type="text/plain; version=0.0.4")

    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
        Route("/metrics", metrics),
    ]


_STARTED = int(time.time())


class _Events(StreamingResponse):
    """Server-sent events. The place in the engine is given back however sending ends, also when it never began."""

    def __init__(self, exchange: _Exchange, end: Callable[[], None]) -> None:
        super().__init__(
            _stream(exchange),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        self._end = end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def _stream(exchange: _Exchange) -> AsyncIterator[str]:
    """An error after the first event is an event of its own."""
    try:
        async for piece in exchange.pieces():
            yield _event(exchange.answer.chunk(piece))
        if exchange.asked.include_usage:
            yield _event(exchange.answer.usage_chunk())
        yield "data: [DONE]\n\n"
    except RequestError as error:
        yield _event(error.body())
    except ClientDisconnect:
        return


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _metrics(service: Service) -> str:
    """Prometheus' text format."""
    running, waiting = service.engine.load()[0], service.waiting
    rows = [
        ("mmrl_serve_choices_running", "gauge", "", running),
        ("mmrl_serve_requests_waiting", "gauge", "", waiting),
        *(
            ("mmrl_serve_responses_total", "counter", f'{{status="{status}"}}', n)
            for status, n in sorted(service.answered.items())
        ),
        ("mmrl_serve_prompt_tokens_total", "counter", "", service.engine.counts["prompt_tokens"]),
        ("mmrl_serve_completion_tokens_total", "counter", "", service.written_tokens),
        ("mmrl_serve_body_bytes_held", "gauge", "", service.budget.held),
        ("mmrl_serve_prefills_total", "counter", "", service.engine.counts["prefills"]),
    ]
    lines: list[str] = []
    for name, kind, labels, value in rows:
        if f"# TYPE {name} {kind}" not in lines:
            lines.append(f"# TYPE {name} {kind}")
        lines.append(f"{name}{labels} {value}")
    return "\n".join(lines) + "\n"


class _Count:
    """Counts statuses of responses (ASGI middleware)."""

    def __init__(self, app: Any, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.service.answered[message["status"]] += 1
            await send(message)

        await self.app(scope, receive, counted)


def application(service: Service) -> Any:
    """The ASGI application."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return JSONResponse(
            error.body(), error.status, {"connection": "close"} if error.status in _UNREAD else None
        )

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; the number is nginx's

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = (
            f"{request.method} {request.url.path}: {error.detail}; expected POST /v1/chat/completions or GET /v1/models, "
            "/health, /metrics"
        )
        return JSONResponse(RequestError(words, status=error.status_code).body(), error.status_code)

    async def fault(request: Request, error: Exception) -> Response:
        return JSONResponse(
            RequestError(
                f"the server failed ({type(error).__name__}); its log says more", status=500
            ).body(),
            500,
        )

    app = Starlette(
        routes=_routes(service),
        exception_handlers={
            RequestError: refused,
            ClientDisconnect: gone,
            HTTPException: unknown,
            Exception: fault,
        },
    )
    return _Count(app, service)


class _Server(uvicorn.Server):
    """Uvicorn that drains: see the module's text."""

    def __init__(
        self, config: uvicorn.Config, service: Service, grace_s: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service, self._grace_s, self._ready = service, grace_s, ready
        self._draining: asyncio.Task[None] | None = None
        self._events: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._events = asyncio.get_running_loop()
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining or self._events is None:
            self.force_exit = self.should_exit = True
            return
        self._service.draining = True
        self._events.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        async def wait() -> None:
            ends = time.monotonic() + self._grace_s
            while self._service.open_requests and time.monotonic() < ends:
                await asyncio.sleep(0.05)
            await asyncio.to_thread(self._service.engine.stop)
            self.should_exit = True

        self._draining = asyncio.ensure_future(wait())


def serve(
    service: Service, sock: socket.socket, *, grace_s: float, ready: Callable[[], None]
) -> None:
    """Answer until a signal ends the server; `ready` is called when it listens."""
    # not uvicorn's warnings: strangers would fill the log with a line for each of their invalid requests
    config = uvicorn.Config(
        application(service),
        log_level="error",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=_MOST_HEAD,
        http=guarded(service.limits),
        ws="none",
        proxy_headers=False,
    )
    sys.setswitchinterval(_SWITCH_S)
    service.engine.start()
    try:
        service.readers.start()
        _Server(config, service, grace_s, ready).run(sockets=[sock])
    finally:
        service.readers.close()
        service.engine.stop()
