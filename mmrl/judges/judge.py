"""A judge: a model behind an OpenAI-compatible endpoint that grades answers, or compares two of them.

    judge = Judge(url="http://127.0.0.1:8000/v1", model="qwen", rubric="correctness")
    verdict = await judge.grade(question="How many cups?", answer=completion, reference="3")
    verdict.value                                           # 0.7 in [0, 1], or None with verdict.reason

The endpoint may be `mmrl serve`, vLLM's server or anybody's; what is asked is in mmrl/judges/rubrics.py, what may go wrong in
mmrl/judges/endpoint.py. A verdict that there is none of has a reason, and is never a number. Verdicts, junk among them, are kept
by the content of the question (mmrl/judges/store.py); what an outage prevented is asked again. One question that several ask at
once is asked once.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from mmrl.errors import ConfigError, did_you_mean
from mmrl.judges.endpoint import Answered, Endpoint, check_url
from mmrl.judges.rubrics import (
    Rubric,
    Unread,
    find_rubric,
    preference_in_json,
    score_in_json,
    score_in_tag,
    share_of_words,
)
from mmrl.judges.store import current, digest
from mmrl.judges.verdict import (
    SHOWN,
    Comparison,
    Verdict,
    check_whole,
    from_row,
    reply_of,
    to_row,
    together,
    top_of,
    usage_of,
)

__all__ = ["Comparison", "Judge", "Verdict", "judge_from"]

_KEPT = ("judge_junk", "judge_out_of_range")
"""Failures that are the reply's: asked again, the judge would be given another chance to say what suits."""
_LIMITS = (
    "url",
    "concurrency",
    "per_minute",
    "attempts",
    "timeout_s",
    "deadline_s",
    "key_env",
)
_PICTURES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif"}


@dataclass
class _Loop:
    """What belongs to one event loop: servers, questions on their way, and room for those that are written."""

    servers: dict[tuple[Any, ...], Endpoint] = field(default_factory=dict)
    flights: dict[str, asyncio.Task[Verdict]] = field(default_factory=dict)
    desks: dict[tuple[Any, ...], asyncio.Semaphore] = field(default_factory=dict)


_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = WeakKeyDictionary()


@dataclass(frozen=True)
class Judge:
    """Settings of a judge; cheap, picklable, usable from any event loop.

    Args:
        url: the server's address up to and with /v1.
        model: name of the model, as the server calls it.
        rubric: correctness, quality, thinking, progress and turn (of rollouts of several turns), preference (which compares two),
            or {system, prompt} of your own.
        read: json (default: {"score": S} at the reply's end), answer (<answer>S</answer> at its end), or words (the share of the
            first of `words` in the first token's probability; needs top_logprobs).
        low, high: scale of S.
        words: the two words of read words: that of a good answer, that of a bad one; of a comparison: first, second.
        swap: a comparison is asked in both orders.
        votes: replies asked for one verdict, whose mean counts; needs a temperature.
        temperature, max_tokens: of the reply. `extra`: further keys of the request's body.
        images: the sample's pictures are shown to the judge.
        most_chars: of a text shown; of a longer one the middle is left out, and the judge is told.
        concurrency, per_minute, attempts, timeout_s, deadline_s, key_env: see mmrl.judges.endpoint.Endpoint.
        price: of a million prompt tokens and of a million reply tokens, for the cost.
        version: any text; another one asks anew what was kept.

    Raises ConfigError.
    """

    url: str
    model: str
    rubric: Any = "correctness"
    read: Literal["json", "answer", "words"] = "json"
    low: float = 0.0
    high: float = 10.0
    words: tuple[str, str] = ("yes", "no")
    swap: bool = True
    votes: int = 1
    temperature: float = 0.0
    max_tokens: int = 512
    extra: Mapping[str, Any] = field(default_factory=dict)
    images: bool = False
    most_chars: int = 24_000
    concurrency: int = 64
    per_minute: float | None = None
    attempts: int = 4
    timeout_s: float = 30.0
    deadline_s: float = 120.0
    key_env: str | None = None
    price: tuple[float, float] = (0.0, 0.0)
    version: str = ""

    def __post_init__(self) -> None:
        check_url(self.url)
        fixed = vars(self)
        for name in ("words", "price"):
            _check(isinstance(fixed[name], (tuple, list)), name, "two entries", fixed[name])
            fixed[name] = tuple(fixed[name])
        _check(isinstance(self.extra, Mapping), "extra", "a mapping", self.extra)
        fixed["extra"] = dict(self.extra)
        _check(isinstance(self.model, str) and bool(self.model), "model", "a name", self.model)
        _check(self.read in ("json", "answer", "words"), "read", "json, answer or words", self.read)
        _check(
            _number(self.low) and _number(self.high) and self.low < self.high,
            "low and high",
            "two numbers, low below high",
            (self.low, self.high),
        )
        _check(
            len(self.words) == 2
            and all(isinstance(w, str) and w.strip() for w in self.words)
            and self.words[0].strip().lower() != self.words[1].strip().lower(),
            "words",
            "two different words",
            self.words,
        )
        _check(
            len(self.price) == 2 and all(_number(p) and p >= 0 for p in self.price),
            "price",
            "two numbers of at least 0",
            self.price,
        )
        for name in ("votes", "max_tokens", "most_chars", "concurrency", "attempts"):
            value = getattr(self, name)
            _check(type(value) is int and value >= 1, name, "a whole number of at least 1", value)
        for name in (
            "timeout_s",
            "deadline_s",
            *(() if self.per_minute is None else ("per_minute",)),
        ):
            value = getattr(self, name)
            _check(_number(value) and value > 0, name, "a number above 0", value)
        _check(
            _number(self.temperature) and self.temperature >= 0,
            "temperature",
            "a number of at least 0",
            self.temperature,
        )
        _check(
            self.votes == 1 or self.temperature > 0,
            "votes",
            "1 with temperature 0, where each reply would be the same",
            self.votes,
        )
        _check(
            self.votes == 1 or self.read != "words",
            "votes",
            "1 with read words, which reads probabilities",
            self.votes,
        )
        _check(
            self.read != "answer" or not self.template.compares,
            "read",
            "json or words with a rubric that compares",
            self.read,
        )

    @property
    def template(self) -> Rubric:
        """The rubric. Raises ConfigError."""
        return find_rubric(self.rubric, low=float(self.low), high=float(self.high))

    async def grade(
        self,
        question: str,
        answer: str,
        *,
        reference: str | None = None,
        images: Sequence[Any] = (),
    ) -> Verdict:
        """The verdict on one answer; `images` are files or pixels, uint8 (H, W, 3), shown with `images` true. Raises ConfigError
        for a rubric that compares."""
        if self.template.compares:
            raise ConfigError("judge.rubric: expected one that grades, found one that compares two")
        texts = {"question": question, "answer": answer, "reference": reference}
        votes = await asyncio.gather(
            *(self._vote(texts, images, self._score, n) for n in range(self.votes))
        )
        return votes[0] if len(votes) == 1 else together(votes)

    async def compare(
        self,
        question: str,
        first: str,
        second: str,
        *,
        reference: str | None = None,
        images: Sequence[Any] = (),
    ) -> Comparison:
        """Which answer is better, asked in both orders (`swap`). Raises ConfigError for a rubric that grades one."""
        if not self.template.compares:
            raise ConfigError(
                "judge.rubric: expected one that compares two answers (preference), found one that grades one"
            )
        orders = [(first, second), (second, first)][: 1 + self.swap]
        verdicts = await asyncio.gather(
            *(
                self._vote(
                    {"question": question, "first": a, "second": b, "reference": reference},
                    images,
                    self._preference,
                    0,
                )
                for a, b in orders
            )
        )
        values = [v.value for v in verdicts]
        if len(values) == 1 or None in values:
            return Comparison(values[0] if len(values) == 1 else None, None, tuple(verdicts))
        ahead, behind = float(values[0] or 0.0), 1.0 - float(values[1] or 0.0)
        agreed = (ahead > 0.5) == (behind > 0.5) and (ahead < 0.5) == (behind < 0.5)
        return Comparison((ahead + behind) / 2, agreed, tuple(verdicts))

    async def _vote(
        self,
        texts: Mapping[str, str | None],
        images: Sequence[Any],
        read: Callable[[Mapping[str, Any]], float],
        number: int,
    ) -> Verdict:
        mine = _loops.setdefault(asyncio.get_running_loop(), _Loop())
        # a question with pictures takes megabytes: no more are written than can be asked
        async with mine.desks.setdefault(self._place(), asyncio.Semaphore(self.concurrency)):
            try:
                body = self._body(texts, images, number)
            except (OSError, ValueError) as error:
                return Verdict(None, f"judge_media: {error}"[:300])
            return await self._once(mine, body, read)

    def _body(
        self, texts: Mapping[str, str | None], images: Sequence[Any], number: int
    ) -> dict[str, Any]:
        shown = {name: None if text is None else self._cut(text) for name, text in texts.items()}
        messages = self.template.messages(shown)
        if self.images and images:
            pictures = [
                {"type": "image_url", "image_url": {"url": _data_url(picture)}}
                for picture in images
            ]
            messages[-1]["content"] = [
                *pictures,
                {"type": "text", "text": messages[-1]["content"]},
            ]
        words = self.read == "words"
        return {
            "model": self.model,
            "messages": messages,
            "temperature": self.temperature,
            "max_tokens": 1 if words else self.max_tokens,
            **({"logprobs": True, "top_logprobs": 20} if words else {}),
            **({"seed": number} if self.votes > 1 else {}),
            **self.extra,
        }

    def _cut(self, text: str) -> str:
        if len(text) <= self.most_chars:
            return text
        half = self.most_chars // 2
        left_out = len(text) - 2 * half
        return f"{text[:half]}\n[{left_out:,} characters are left out here]\n{text[-half:]}"

    async def _once(
        self,
        mine: _Loop,
        body: Mapping[str, Any],
        read: Callable[[Mapping[str, Any]], float],
    ) -> Verdict:
        """The kept verdict on this question, that of who is asking it now, or a new one."""
        reading = [self.read, self.low, self.high, *self.words]
        key = digest([self.version, reading, body])
        if (row := current().get(key)) is not None and (kept := from_row(row)) is not None:
            return kept
        if (flight := mine.flights.get(key)) is None:
            asking = self._ask(mine, key, body, read)
            flight = mine.flights[key] = asyncio.get_running_loop().create_task(asking)
            flight.add_done_callback(lambda _: mine.flights.pop(key, None))
        # who is cancelled leaves the question to the others, and its answer to the store
        return await asyncio.shield(flight)

    async def _ask(
        self,
        mine: _Loop,
        key: str,
        body: Mapping[str, Any],
        read: Callable[[Mapping[str, Any]], float],
    ) -> Verdict:
        answered = await self._server(mine).post("/chat/completions", body)
        verdict = self._verdict(answered, read)
        if verdict.value is not None or (verdict.reason or "").startswith(_KEPT):
            current().put(key, to_row(verdict))
        return verdict

    def _place(self) -> tuple[Any, ...]:
        """What tells servers apart."""
        return tuple(getattr(self, name) for name in _LIMITS)

    def _server(self, mine: _Loop) -> Endpoint:
        place = self._place()
        if place not in mine.servers:
            mine.servers[place] = Endpoint(**dict(zip(_LIMITS, place, strict=True)))
        return mine.servers[place]

    def _verdict(self, answered: Answered, read: Callable[[Mapping[str, Any]], float]) -> Verdict:
        known = {"calls": answered.calls, "seconds": answered.seconds}
        if answered.document is None:
            return Verdict(None, answered.reason, **known)  # type: ignore[arg-type]  # an int and a float
        tokens = usage_of(answered.document)
        cost = (tokens[0] * self.price[0] + tokens[1] * self.price[1]) / 1e6
        text = ""
        value, reason = None, None
        try:
            text = reply_of(answered.document)
            if self.read != "words":  # of those the first token alone is asked for
                check_whole(answered.document)
            value = read(answered.document)
        except Unread as error:
            reason = str(error)
        return Verdict(value, reason, text[-SHOWN:], answered.calls, tokens, cost, answered.seconds)

    def _score(self, document: Mapping[str, Any]) -> float:
        if self.read == "words":
            return share_of_words(top_of(document), self.words)
        read = score_in_json if self.read == "json" else score_in_tag
        return read(reply_of(document), float(self.low), float(self.high))

    def _preference(self, document: Mapping[str, Any]) -> float:
        if self.read == "words":
            return share_of_words(top_of(document), self.words)
        return preference_in_json(reply_of(document))


def judge_from(params: Any, where: str = "judge") -> Judge:
    """A judge of a configuration's mapping. Raises ConfigError."""
    known = [f.name for f in dataclasses.fields(Judge)]
    if not isinstance(params, Mapping) or not {"url", "model"} <= params.keys():
        raise ConfigError(
            f"{where}: expected a mapping with the url and the model of a server that judges (url: http://127.0.0.1:8000/v1), "
            f"found {params!r:.200}; settings of a checkpoint or a log never bring a url: give it yourself"
        )
    if unknown := sorted(map(str, set(params) - set(known))):
        raise ConfigError(
            f"{where}: unknown {', '.join(unknown)}.{did_you_mean(unknown[0], known)} It takes: {', '.join(known)}"
        )
    return Judge(**params)


def _check(good: bool, name: str, expected: str, found: Any) -> None:
    if not good:
        raise ConfigError(f"judge.{name}: expected {expected}, found {found!r:.200}")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _data_url(picture: Any) -> str:
    """Of a file, or of pixels as PNG."""
    if isinstance(picture, (str, Path)):
        path = Path(picture)
        if (kind := _PICTURES.get(path.suffix.lower())) is None:
            raise ValueError(f"expected a picture as {', '.join(_PICTURES)}, found {path.name}")
        data = path.read_bytes()
    else:
        from PIL import Image

        kind, file = "png", io.BytesIO()
        Image.fromarray(picture).save(file, "PNG")
        data = file.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
