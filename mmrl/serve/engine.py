"""One thread owns the model: it admits the choices of requests while the KV cache has room, and steps.

    engine = ServingEngine(policy, batch_tokens=65536, max_tokens=512)
    engine.start()
    job = Job(asked, prompt, give)
    engine.submit(job)              # `give` is called from the engine's thread: Accepted, then Pieces, or Failed

Prompts are made elsewhere (mmrl/serve/pool.py): nothing here depends on what a stranger's bytes take to be read. Equal prompts are
prefilled once. A job whose `cancelled` is set gives its place away after the step at hand.
"""
from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Policy
from mmrl.rollout import PrefillOnceEngine
from mmrl.serve.decode import Batch, Piece, Row
from mmrl.serve.errors import RequestError
from mmrl.serve.protocol import Asked
from mmrl.serve.text import StopTexts, TextStream

__all__ = ["Accepted", "Event", "Failed", "Job", "ServingEngine"]

_log = logging.getLogger("mmrl.serve")


@dataclass(frozen=True)
class Accepted:
    """The request was read; its prompt has so many tokens."""

    prompt_tokens: int


@dataclass(frozen=True)
class Failed:
    """The request has no answer."""

    error: RequestError


Event = Accepted | Piece | Failed


@dataclass(eq=False)
class Job:
    """A request on its way through the engine; its prompt holds the pixels of its pictures and clips."""

    asked: Asked
    prompt: Prompt
    give: Callable[[Event], None]
    cancelled: bool = False
    rows: deque[Row] = field(default_factory=deque)  # not yet being decoded


class ServingEngine:
    """See the module's text. `max_tokens` is the length of answers that name none; `context` bounds prompt and answer."""

    def __init__(self, policy: Policy, *, batch_tokens: int, max_tokens: int, context: int | None = None) -> None:
        self.policy, self.batch_tokens, self.max_tokens = policy, batch_tokens, max_tokens
        config = policy.base.config
        self.context = context or int(getattr(config, "text_config", config).max_position_embeddings)
        self.counts: Counter[str] = Counter()
        self._batch = Batch(PrefillOnceEngine(policy))
        self._arrived: deque[Job] = deque()
        self._waiting: deque[Job] = deque()  # with rows left to admit
        self._live: dict[Row, Job] = {}
        self._wake, self._stopping = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="mmrl-serve", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Ask for answers to `job`. From any thread."""
        with self._wake:
            if self._stopping:
                job.give(Failed(_closing()))
                return
            self._arrived.append(job)
            self._wake.notify()

    def nudge(self) -> None:
        """Something was cancelled."""
        with self._wake:
            self._wake.notify()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Answer no more; requests that are still open fail with status 503."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def load(self) -> tuple[int, int]:
        """Choices being written, requests that wait."""
        return len(self._live), len(self._arrived) + len(self._waiting)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._stopping or self._arrived or self._waiting or self._live):
                    self._wake.wait()
                if self._stopping:
                    break
                fresh = [self._arrived.popleft() for _ in range(len(self._arrived))]
            for job in fresh:
                self._accept(job)
            self._forget_cancelled()
            if self._guarded(self._admit) and self._batch.rows:
                self._guarded(self._batch.step)
            self._live = {row: job for row, job in self._live.items() if not row.done}
        for job in {*self._arrived, *self._waiting, *self._live.values()}:
            job.give(Failed(_closing()))

    def _guarded(self, work: Callable[[], None]) -> bool:
        """Whether `work` succeeded; if not, the requests that were being answered fail and the server goes on."""
        try:
            work()
            return True
        except Exception as error:  # out of memory, a fault of a kernel: the next request must not suffer
            _log.exception("a batch failed")
            jobs = {job for row, job in self._live.items() if not row.done}
            self._batch.clear()
            self._live.clear()
            for job in jobs:
                job.cancelled = True
                job.give(Failed(RequestError(f"the model failed on this batch ({_words(error)}); ask again, with smaller pictures "
                                             "or shorter answers", status=500)))
            return False

    def _accept(self, job: Job) -> None:
        if job.cancelled:
            return
        try:
            limit = self._limit(job)
        except RequestError as error:
            job.cancelled = True
            job.give(Failed(error))
            return
        s = job.asked.sampling
        key = (secrets.randbits(63),) if s.seed is None else (s.seed % (1 << 64),)
        stops = StopTexts(s.stop)
        job.rows.extend(Row(n, s, limit, key, job.give, lambda: not job.cancelled,
                            TextStream(self.policy.processor.tokenizer, stops)) for n in range(s.n))
        self.counts["prompt_tokens"] += job.prompt.length
        job.give(Accepted(job.prompt.length))
        self._waiting.append(job)

    def _limit(self, job: Job) -> int:
        wanted, room = job.asked.sampling.max_tokens, self.context - job.prompt.length
        if room < 1 or (wanted or 1) > room:
            raise RequestError(f"expected prompt and answer within the model's {self.context} tokens, found a prompt of "
                               f"{job.prompt.length} and max_tokens {wanted or self.max_tokens}; lower max_tokens or shorten the "
                               "prompt",
                               "max_tokens", code="context_length_exceeded")
        return wanted or min(self.max_tokens, room)

    def _forget_cancelled(self) -> None:
        self._waiting = deque(job for job in self._waiting if not job.cancelled)
        self._batch.drop_unwanted()

    def _admit(self) -> None:
        """Let waiting choices join, first come first served, as far as the cache budget allows; one may always."""
        groups: list[tuple[Prompt, list[Row]]] = []
        lengths: list[int] = []
        limits: list[int] = []
        while self._waiting:
            job = self._waiting[0]
            while job.rows:
                lengths.append(job.prompt.length)
                limits.append(job.rows[0].limit)
                if self._batch.slots(lengths, limits) > self.batch_tokens and (self._batch.alive or len(lengths) > 1):
                    break
                if not groups or groups[-1][0].fingerprint != job.prompt.fingerprint:
                    groups.append((job.prompt, []))
                row = job.rows.popleft()
                groups[-1][1].append(row)
                self._live[row] = job
            if job.rows:
                break
            self._waiting.popleft()
        if groups:
            self.counts["prefills"] += len(groups)
            self._batch.join([prompt for prompt, _ in groups], [rows for _, rows in groups])


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _closing() -> RequestError:
    return RequestError("the server is shutting down; ask again later", status=503)
