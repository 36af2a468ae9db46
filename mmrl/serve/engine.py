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
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Policy
from mmrl.rollout import PrefillOnceEngine
from mmrl.serve.decode import Batch, Piece, Row
from mmrl.serve.errors import RequestError, shutting_down
from mmrl.serve.protocol import Asked
from mmrl.serve.text import StopTexts, TextStream

__all__ = ["Accepted", "Event", "Failed", "Job", "ServingEngine"]

_SHORT_PROMPT, _SHORT_ANSWERS = 1024, 256  # tokens; a request within both is short
# that a long request lets short ones overtake while no long one is being answered
_PATIENCE_S = 10.0
_PREFILL = 8192  # tokens of long prompts that are read between two steps, one prompt at least
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
    since: float = field(default_factory=time.monotonic)
    short: bool = False  # a question of little work, whatever waits before it


@dataclass
class _Joining:
    """Rows that are about to join the batch: prompts with theirs, and of each row its prompt's length and its limit."""

    groups: list[tuple[Prompt, list[Row]]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    prompt_tokens: int = 0


class ServingEngine:
    """See the module's text. `max_tokens` is the length of answers that name none; `context` bounds prompt and answer."""

    def __init__(
        self, policy: Policy, *, batch_tokens: int, max_tokens: int, context: int | None = None
    ) -> None:
        self.policy, self.batch_tokens, self.max_tokens = policy, batch_tokens, max_tokens
        config = policy.base.config
        self.context = context or int(
            getattr(config, "text_config", config).max_position_embeddings
        )
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
                job.give(Failed(shutting_down()))
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
            job.give(Failed(shutting_down()))

    def _guarded(self, work: Callable[[], None]) -> bool:
        """Whether `work` succeeded; if not, the requests that were being answered fail and the server goes on."""
        try:
            work()
            return True
        except Exception as error:
            # out of memory, a fault of a kernel: the next request must not suffer
            _log.exception("a batch failed")
            jobs = {job for row, job in self._live.items() if not row.done}
            self._batch.clear()
            self._live.clear()
            for job in jobs:
                job.cancelled = True
                job.give(
                    Failed(
                        RequestError(
                            f"the model failed on this batch ({_words(error)}); ask again, with smaller pictures "
                            "or shorter answers",
                            status=500,
                        )
                    )
                )
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
        job.rows.extend(
            Row(
                n,
                s,
                limit,
                key,
                job.give,
                lambda: not job.cancelled,
                TextStream(self.policy.processor.tokenizer, stops),
            )
            for n in range(s.n)
        )
        job.short = job.prompt.length <= _SHORT_PROMPT and s.n * limit <= _SHORT_ANSWERS
        self.counts["prompt_tokens"] += job.prompt.length
        job.give(Accepted(job.prompt.length))
        self._waiting.append(job)

    def _limit(self, job: Job) -> int:
        wanted, room = job.asked.sampling.max_tokens, self.context - job.prompt.length
        if room < 1 or (wanted or 1) > room:
            raise RequestError(
                f"expected prompt and answer within the model's {self.context} tokens, found a prompt of "
                f"{job.prompt.length} and max_tokens {wanted or self.max_tokens}; lower max_tokens or shorten the "
                "prompt",
                "max_tokens",
                code="context_length_exceeded",
            )
        return wanted or min(self.max_tokens, room)

    def _forget_cancelled(self) -> None:
        self._waiting = deque(job for job in self._waiting if not job.cancelled)
        self._batch.drop_unwanted()

    def _admit(self) -> None:
        """Let waiting choices join, first come first served, as far as the cache budget allows; one may always.

        Short requests do not wait behind long ones: these leave room for one more row, and read few prompts between two steps.
        Nor do long ones wait for ever: while none is being answered and one has waited long, no short one joins.
        """
        joining = _Joining()
        starved = any(
            not job.short and job.since < time.monotonic() - _PATIENCE_S for job in self._waiting
        )
        only_long = starved and all(job.short for job in self._live.values())
        for kind in (False,) if only_long else (True, False):
            for job in [job for job in self._waiting if job.short == kind]:
                if not self._joined(job, joining):
                    break
        self._waiting = deque(job for job in self._waiting if job.rows)
        if joining.groups:
            self.counts["prefills"] += len(joining.groups)
            self._batch.join(
                [prompt for prompt, _ in joining.groups], [rows for _, rows in joining.groups]
            )

    def _joined(self, job: Job, joining: _Joining) -> bool:
        """Whether all rows of `job` are among those that join now."""
        spare = [] if job.short else [0]  # a row that a short request may take
        new = not joining.groups or joining.groups[-1][0].fingerprint != job.prompt.fingerprint
        if (
            new
            and not job.short
            and joining.prompt_tokens
            and joining.prompt_tokens + job.prompt.length > _PREFILL
        ):
            return False
        while job.rows:
            lengths, limits = (
                [*joining.lengths, job.prompt.length],
                [*joining.limits, job.rows[0].limit],
            )
            slots = self._batch.slots([*lengths, *spare], [*limits, *spare])
            if slots > self.batch_tokens and (self._batch.alive or joining.lengths):
                return False
            if not joining.groups or joining.groups[-1][0].fingerprint != job.prompt.fingerprint:
                joining.groups.append((job.prompt, []))
                joining.prompt_tokens += job.prompt.length
            joining.lengths, joining.limits = lengths, limits
            row = job.rows.popleft()
            joining.groups[-1][1].append(row)
            self._live[row] = job
        return True


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
