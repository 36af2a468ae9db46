"""A vLLM engine behind HTTP, for a run that samples on another machine or another GPU: `mmrl rollout-server run.yaml --port 8100`.

    GET  /health     model, type, longest sequence, whether weights have arrived
    POST /transfer   opens shared memory or a process group for the weights (mmrl.rollout.weight_transfer)
    POST /weights    a piece of the trainer's weights, or where it lies; the answer to the last one comes when vLLM has taken them
                     over, with digests
    POST /generate   prompts and sampling -> token ids and log-probs
    POST /probe      prompts and completions -> log-probs of the bare distribution

Bodies are mmrl.rollout.vllm_wire's. Pixels and features are kept by their hash: a picture is sent once. It answers 409 with the
missing hashes where it lacks some, 503 while it has no weights, and 412 where those it has are not the ones that the asking run
sent last. It starts without weights: those of model.path give only the architecture and the tokenizer; nor has it any after a sync
that failed. Requests are worked on one after the other; vLLM batches within each.

Needs the extras `serve` and `vllm`. Whoever reaches the port may replace the weights: set a key (MMRL_API_KEY) beyond localhost.
The key is asked for before a body is read; bodies and connections are bounded as those of `mmrl serve` are, and what is no question
of a run is status 400.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import queue
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from mmrl.errors import (
    ConfigError,
    MismatchError,
    MissingExtraError,
    MMRLError,
    RolloutError,
    install_command,
)
from mmrl.rollout.vllm_backend import VLLMBackend
from mmrl.rollout.vllm_parallel import Leader
from mmrl.rollout.vllm_wire import MalformedError, load, load_prompts, load_sampling
from mmrl.rollout.weight_receiver import Transfers, gpu_id
from mmrl.rollout.weight_transfer import host_id
from mmrl.serve.errors import RequestError
from mmrl.serve.guard import Budget, Hold, body_of, guarded
from mmrl.serve.limits import Limits

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtraError(
        f"mmrl rollout-server needs starlette and uvicorn ({error}): "
        f"{install_command('serve', 'vllm')}"
    ) from error

__all__ = ["RolloutServer", "serve"]

_KINDS = {ConfigError: 400, MismatchError: 400, MalformedError: 400}
LIMITS = Limits(
    body_bytes=8 << 30, held_bytes=16 << 30, connections=256, body_s=600.0, send_s=600.0
)  # runs send whole tensors
_CLOSE = {"connection": "close"}  # the body may not have been read
_GIVEN_UP = object()  # among the pieces of the weights: no more come
_log = logging.getLogger(__name__)


class _MediaStore:
    """Tensors by their hash, the least recently used forgotten beyond `limit` bytes. Several requests may use it at once."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> torch.Tensor | None:
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
            return self._kept.get(name)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        with self._lock:
            if name not in self._kept:
                self._kept[name] = tensor
                self._used += tensor.numel() * tensor.element_size()
            while self._used > self._limit and len(self._kept) > 1:
                old = self._kept.popitem(last=False)[1]
                self._used -= old.numel() * old.element_size()


class _Elsewhere(Exception):
    """The server holds other weights than those that a request is about."""


class _NoWeights(Exception):
    """The server holds none."""


@dataclass(frozen=True)
class _Loading:
    """A sync under way: its name, its pieces on their way to vLLM, and the end of their loading."""

    sync: str
    pieces: queue.Queue[Any]
    done: Future[list[dict[str, int]]]


class RolloutServer:
    """The routes around one backend, which only its own thread touches."""

    def __init__(
        self,
        backend: VLLMBackend | Leader,
        *,
        api_key: str | None = None,
        media_bytes: int = 4 << 30,
        limits: Limits = LIMITS,
    ) -> None:
        self.backend, self.api_key, self.limits = backend, api_key, limits
        self._budget = Budget(limits.held_bytes)
        self.media = _MediaStore(media_bytes)
        self.loaded = ""  # name of the sync whose weights vLLM has; none, or half of some: empty. Set by the worker
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._loading: _Loading | None = None
        self._lock = threading.Lock()
        self._transfers = Transfers(limits.body_bytes)

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/transfer", self._open_transfer, methods=["POST"]),
                Route("/weights", self._weights, methods=["POST"]),
                Route("/generate", self._generate, methods=["POST"]),
                Route("/probe", self._probe, methods=["POST"]),
            ]
        )

    async def _health(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        s = self.backend.settings
        return JSONResponse(
            {
                "model": s.model,
                "dtype": s.dtype,
                "max_model_len": s.max_model_len,
                "loaded": bool(self.loaded),
                "host": host_id(),
                "gpu": gpu_id(),
            }
        )

    def _refused(self, request: Request) -> Response | None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.api_key and not hmac.compare_digest(given.encode(), self.api_key.encode()):
            return JSONResponse(
                {
                    "kind": "RolloutError",
                    "error": "expected the server's key: set MMRL_API_KEY on both sides",
                },
                401,
                _CLOSE,
            )
        return None

    async def _answer(
        self, request: Request, work: Callable[[Any, dict[str, torch.Tensor]], Response]
    ) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        hold = Hold(self._budget)
        try:
            body = bytes(await body_of(request, self.limits, hold))
            return await run_in_threadpool(lambda: work(*load(body)))
        except RequestError as error:
            return JSONResponse({"kind": "RolloutError", "error": str(error)}, error.status, _CLOSE)
        except MMRLError as error:
            return JSONResponse(
                {"kind": type(error).__name__, "error": str(error)}, _KINDS.get(type(error), 500)
            )
        except _NoWeights:
            return JSONResponse({"kind": "RolloutError", "error": "no weights yet"}, 503)
        except _Elsewhere:
            return JSONResponse({"kind": "RolloutError", "error": "other weights are loaded"}, 412)
        except Exception as error:  # to whoever asked; the trace belongs into the log of this side
            _log.exception("a request failed")
            return JSONResponse(
                {"kind": "RolloutError", "error": f"{type(error).__name__}: {error}"}, 500
            )
        finally:
            hold.release()

    # weights

    async def _open_transfer(self, request: Request) -> Response:
        def work(document: Any, tensors: dict[str, torch.Tensor]) -> Response:
            with self._lock:
                return JSONResponse(self._transfers.open(document))

        return await self._answer(request, work)

    async def _weights(self, request: Request) -> Response:
        return await self._answer(request, self._take)

    def _take(self, document: Any, tensors: dict[str, torch.Tensor]) -> Response:
        """A piece: 'first' begins a sync, 'last' ends it. Raises RolloutError where vLLM does not take it."""
        held: list[dict[str, int]] = []
        where = "layout" if "layout" in document else "names"
        _check(document, {"first": bool, "last": bool, "sync": str, "base": str, where: list})
        with self._lock:
            if document["first"]:
                self._abandon()
                # started again, or a sync failed: no other run has been here
                if document["base"] and not self.loaded:
                    raise _NoWeights
                # the others come on top of weights that are no longer here
                if document["base"] not in ("", self.loaded):
                    raise _Elsewhere
                pieces: queue.Queue[Any] = queue.Queue(2)
                done = self._worker.submit(self._load, document["sync"], pieces)
                self._loading = _Loading(document["sync"], pieces, done)
            if self._loading is None or self._loading.sync != document["sync"]:
                raise _Elsewhere
            try:
                _put(self._loading, self._transfers.piece(document, tensors))
                if document["last"]:
                    _put(self._loading, None)
                    held = self._loading.done.result()
                    self._loading = None
            except Exception as error:
                self._abandon()
                if isinstance(error, MMRLError):
                    raise
                raise RolloutError(
                    f"the weights were not taken over: {type(error).__name__}: {error}"
                ) from error
        return JSONResponse({"loaded": self.loaded, "held": held})

    def _load(self, sync: str, pieces: queue.Queue[Any]) -> list[dict[str, int]]:
        self.loaded = ""
        held = self.backend.load(_pieces(pieces))
        self.loaded = sync
        return held

    def _abandon(self) -> None:
        """End a sync that failed, or whose sender went away: half of its weights are worth nothing."""
        loading, self._loading = self._loading, None
        if loading is not None:
            with contextlib.suppress(Exception):  # that of the loading: its sender has been told
                _put(loading, _GIVEN_UP)
            loading.done.exception()
            self.loaded = ""

    # questions

    async def _generate(self, request: Request) -> Response:
        def work(document: Any, tensors: dict[str, torch.Tensor]) -> Response:
            _check(document, {"sampling": list, "prompts": list, "weights": str})
            sampling = [load_sampling(s) for s in document["sampling"]]
            _same_length(document["prompts"], sampling)
            return self._ask(
                document,
                tensors,
                lambda prompts: self.backend.generate(list(zip(prompts, sampling, strict=True))),
            )

        return await self._answer(request, work)

    async def _probe(self, request: Request) -> Response:
        def work(document: Any, tensors: dict[str, torch.Tensor]) -> Response:
            _check(document, {"completions": list, "prompts": list, "weights": str})
            completions = document["completions"]
            _same_length(document["prompts"], completions)
            return self._ask(
                document,
                tensors,
                lambda prompts: self.backend.score(list(zip(prompts, completions, strict=True))),
            )

        return await self._answer(request, work)

    def _ask(
        self, document: Any, tensors: dict[str, torch.Tensor], work: Callable[[Any], Any]
    ) -> Response:
        prompts, missing = load_prompts(document["prompts"], tensors, self.media.get)
        if missing:
            return JSONResponse({"kind": "missing", "missing": missing}, 409)
        for name, tensor in tensors.items():  # only now: they may push out what this question needs
            if name.startswith("media/"):
                self.media.put(name.removeprefix("media/"), tensor)

        def answer() -> Any:
            if not self.loaded:
                raise _NoWeights
            if document["weights"] != self.loaded:
                raise _Elsewhere
            return work(prompts)

        return JSONResponse({"found": self._worker.submit(answer).result()})

    def close(self) -> None:
        """End the worker thread and vLLM."""
        try:
            with self._lock:
                self._abandon()
                self._transfers.close()
        finally:
            try:
                self._worker.submit(self.backend.close).result()
            finally:
                self._worker.shutdown()


def _check(document: Any, fields: dict[str, type]) -> None:
    """Raises MalformedError for a document without these."""
    for name, kind in fields.items():
        if not isinstance(document.get(name), kind):
            raise MalformedError(
                f"expected {name} as a {kind.__name__} in the document, found "
                f"{type(document.get(name)).__name__}; is the run of another version of mmrl?"
            )


def _same_length(prompts: list[Any], others: list[Any]) -> None:
    if len(prompts) != len(others):
        raise MalformedError(
            f"expected one entry for each of {len(prompts)} prompts, found {len(others)}"
        )


def _put(loading: _Loading, piece: Any) -> None:
    """Hand a piece on, unless the loading that takes it has failed: then raise its error."""
    while True:
        if loading.done.done():
            loading.done.result()
            return
        try:
            return loading.pieces.put(piece, timeout=0.1)
        except queue.Full:
            continue


def _pieces(pieces: queue.Queue[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    while (piece := pieces.get()) is not None:
        if piece is _GIVEN_UP:
            raise RolloutError("the sync was given up before its last piece had come")
        yield from piece


class _Server(uvicorn.Server):
    """Uvicorn that leaves signals to `serve`: it would end the process by them before vLLM is closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None of its own."""
        yield


def serve(server: RolloutServer, sock: Any, ready: Callable[[], None]) -> None:
    """Answer on a bound socket until a signal ends it."""
    config = uvicorn.Config(
        server.app(),
        log_level="error",
        timeout_keep_alive=600,
        http=guarded(server.limits),
        ws="none",
        proxy_headers=False,
        h11_max_incomplete_event_size=64 << 10,
    )
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
