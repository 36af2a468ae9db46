"""A vLLM engine behind HTTP, for a run that samples on another machine or another GPU: `mmrl rollout-server run.yaml --port 8100`.

    GET  /health     model, type, longest sequence, whether weights have arrived
    POST /weights    a piece of the trainer's weights; the answer to the last one comes when vLLM has taken them over
    POST /generate   prompts and sampling -> token ids and log-probs
    POST /probe      prompts and completions -> log-probs of the bare distribution

Bodies are mmrl.rollout.vllm_wire's. Pixels and features are kept by their hash: a picture is sent once. It answers 409 with the
missing hashes where it lacks some, and 503 while it has no weights. It starts without weights: those of model.path give only the
architecture and the tokenizer. Requests are worked on one after the other; vLLM batches within each.

Needs the extras `serve` and `vllm`. Whoever reaches the port may replace the weights: set a key (MMRL_API_KEY) beyond localhost.
"""
from __future__ import annotations

import asyncio
import contextlib
import hmac
import queue
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from mmrl.errors import ConfigError, MismatchError, MissingExtraError, MMRLError, RolloutError
from mmrl.rollout.vllm_backend import VLLMBackend
from mmrl.rollout.vllm_wire import load, load_prompts, load_sampling

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtraError(f"mmrl rollout-server needs starlette and uvicorn ({error}): pip install 'mmrl[serve,vllm]'") from error

__all__ = ["RolloutServer", "serve"]

_KINDS = {ConfigError: 400, MismatchError: 400}


class _MediaStore:
    """Tensors by their hash, the least recently used forgotten beyond `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()

    def get(self, name: str) -> torch.Tensor | None:
        if name in self._kept:
            self._kept.move_to_end(name)
        return self._kept.get(name)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._kept:
            self._kept[name] = tensor
            self._used += tensor.numel() * tensor.element_size()
        while self._used > self._limit and len(self._kept) > 1:
            old = self._kept.popitem(last=False)[1]
            self._used -= old.numel() * old.element_size()


class RolloutServer:
    """The routes around one backend, which only its own thread touches."""

    def __init__(self, backend: VLLMBackend, *, api_key: str | None = None, media_bytes: int = 4 << 30) -> None:
        self.backend, self.api_key = backend, api_key
        self.media = _MediaStore(media_bytes)
        self.loaded = 0  # how often weights have been taken over
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._loading: tuple[queue.Queue[Any], Future[None]] | None = None
        self._lock = threading.Lock()

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(routes=[Route("/health", self._health), Route("/weights", self._weights, methods=["POST"]),
                                 Route("/generate", self._generate, methods=["POST"]),
                                 Route("/probe", self._probe, methods=["POST"])])

    async def _health(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        s = self.backend.settings
        return JSONResponse({"model": s.model, "dtype": s.dtype, "max_model_len": s.max_model_len, "loaded": self.loaded})

    def _refused(self, request: Request) -> Response | None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.api_key and not hmac.compare_digest(given.encode(), self.api_key.encode()):
            return JSONResponse({"kind": "RolloutError", "error": "expected the server's key: set MMRL_API_KEY on both sides"}, 401)
        return None

    async def _answer(self, request: Request, work: Callable[[Any, dict[str, torch.Tensor]], Response]) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        body = await request.body()
        try:
            return await run_in_threadpool(lambda: work(*load(body)))
        except MMRLError as error:
            return JSONResponse({"kind": type(error).__name__, "error": str(error)}, _KINDS.get(type(error), 500))

    # weights

    async def _weights(self, request: Request) -> Response:
        return await self._answer(request, self._take)

    def _take(self, document: Any, tensors: dict[str, torch.Tensor]) -> Response:
        """A piece: 'first' begins a sync, 'last' ends it."""
        with self._lock:
            if document["first"]:
                self._abandon()
                pieces: queue.Queue[Any] = queue.Queue(2)
                self._loading = (pieces, self._worker.submit(self.backend.load, _pieces(pieces)))
            if self._loading is None:
                raise RolloutError("expected the first piece of the weights before the others")
            pieces, done = self._loading
            _put(pieces, [(name, tensors[name]) for name in document["names"]], done)
            if document["last"]:
                _put(pieces, None, done)
                self._loading = None
                done.result()
                self.loaded += 1
        return JSONResponse({"loaded": self.loaded})

    def _abandon(self) -> None:
        """End a sync whose sender went away: vLLM keeps what it had not been given."""
        if self._loading is not None:
            pieces, done = self._loading
            self._loading = None
            _put(pieces, None, done)
            done.exception()

    # questions

    async def _generate(self, request: Request) -> Response:
        def work(document: Any, tensors: dict[str, torch.Tensor]) -> Response:
            sampling = [load_sampling(s) for s in document["sampling"]]
            return self._ask(document, tensors, lambda prompts: self.backend.generate(list(zip(prompts, sampling, strict=True))))

        return await self._answer(request, work)

    async def _probe(self, request: Request) -> Response:
        def work(document: Any, tensors: dict[str, torch.Tensor]) -> Response:
            completions = document["completions"]
            return self._ask(document, tensors, lambda prompts: self.backend.score(list(zip(prompts, completions, strict=True))))

        return await self._answer(request, work)

    def _ask(self, document: Any, tensors: dict[str, torch.Tensor], work: Callable[[Any], Any]) -> Response:
        if not self.loaded:
            return JSONResponse({"kind": "RolloutError", "error": "no weights yet"}, 503)
        prompts, missing = load_prompts(document["prompts"], tensors, self.media.get)
        if missing:
            return JSONResponse({"kind": "missing", "missing": missing}, 409)
        for name, tensor in tensors.items():  # only now: they may push out what this question needs
            if name.startswith("media/"):
                self.media.put(name.removeprefix("media/"), tensor)
        return JSONResponse({"found": self._worker.submit(work, prompts).result()})

    def close(self) -> None:
        """End the worker thread and vLLM."""
        with self._lock:
            self._abandon()
        self._worker.submit(self.backend.close).result()
        self._worker.shutdown()


def _put(pieces: queue.Queue[Any], piece: Any, done: Future[None]) -> None:
    """Hand a piece on, unless the loading that takes it has failed: then raise its error."""
    while True:
        if done.done():
            done.result()
            return
        try:
            return pieces.put(piece, timeout=0.1)
        except queue.Full:
            continue


def _pieces(pieces: queue.Queue[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    while (piece := pieces.get()) is not None:
        yield from piece


class _Server(uvicorn.Server):
    """Uvicorn that leaves signals to `serve`: it would end the process by them before vLLM is closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None of its own."""
        yield


def serve(server: RolloutServer, sock: Any, ready: Callable[[], None]) -> None:
    """Answer on a bound socket until a signal ends it."""
    config = uvicorn.Config(server.app(), log_level="warning", timeout_keep_alive=600)
    own = _Server(config)

    async def run() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, setattr, own, "should_exit", True)
        task = asyncio.create_task(own.serve(sockets=[sock]))
        while not own.started and not task.done():
            await asyncio.sleep(0.05)
        if own.started:
            ready()
        await task

    try:
        asyncio.run(run())
    finally:
        server.close()
