"""Parts about the form of a text rather than its answer: length, repetition, tags, steps. Off unless weights name them.

    weights: {accuracy: 0.9, format: 0.1, overlong: 0.2}
    parts: {overlong: {cache: 128}}

Each is a factory(**parameters) -> part(prediction, sample, ctx); see `PARTS`. Lengths are tokens of the whole completion
(ctx.num_tokens). A part whose paper leaves [0, 1] declares its range in `low` and `high`. Note for those: a text without
a readable answer earns 0 in every part, which is more than a penalty; give the format or accuracy part a larger weight.

    python -c "from mmrl.rewards.lengths import PARTS; print(sorted(PARTS))"
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.errors import ConfigError, DataError
from mmrl.rewards.process import process
from mmrl.rewards.router import PartFactory
from mmrl.rewards.text import check_names, check_number, words
from mmrl.types import RewardContext, Sample

__all__ = ["PARTS", "FormPart", "cosine_value", "overlong_penalty", "repeated_share"]

_MOST_TOKENS = 10_000_000
_SEEN_CHARS = 16_384
"""Repetition looks at the last characters of a text: loops stand at its end, and the time stays a few milliseconds."""


@dataclass(frozen=True)
class FormPart:
    """A part with its range: rule(prediction, sample, ctx) in [low, high]."""

    rule: Callable[[Any, Sample, RewardContext], float]
    low: float = 0.0
    high: float = 1.0

    def __call__(self, prediction: Any, sample: Sample, ctx: RewardContext) -> float:
        return self.rule(prediction, sample, ctx)


def _checked(factory: Callable[..., FormPart]) -> PartFactory:
    """The factory, with ConfigError for unknown parameters."""

    @functools.wraps(factory)
    def build(**params: Any) -> FormPart:
        check_names(f"part {factory.__name__!r}", factory, params)
        return factory(**params)

    return build


def _length(prediction: Any, ctx: RewardContext) -> int:
    if ctx.num_tokens <= 0 and prediction.text:
        raise DataError(
            "expected ctx.num_tokens, the length of the completion in tokens, found none; pass it"
        )
    return ctx.num_tokens


def _tokens(name: str, value: Any) -> int:
    return int(check_number(name, value, 1, _MOST_TOKENS))


def overlong_penalty(length: int, max_length: int, cache: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13) in [-1, 0]: 0 up to max_length - cache tokens, then
    linear down to -1 at max_length and beyond. Needs 0 < cache <= max_length."""
    return max(-1.0, min(0.0, (max_length - cache - length) / cache))


@_checked
def overlong(
    max_length: int | None = None, cache: int | None = None, penalty: bool = False
) -> FormPart:
    """1 + DAPO's soft overlong punishment, in [0, 1]; with `penalty` the punishment itself, in [-1, 0].

    max_length in tokens (default: the run's limit, ctx.max_tokens), cache in tokens (default: a fifth of it, as DAPO's
    4096 of 20480).
    """
    fixed = _tokens("max_length", max_length) if max_length is not None else None
    last = _tokens("cache", cache) if cache is not None else None
    if fixed is not None and last is not None and last > fixed:
        raise ConfigError(
            f"expected cache <= max_length in tokens, found cache {last} and max_length {fixed}"
        )

    def rule(prediction: Any, sample: Sample, ctx: RewardContext) -> float:
        limit = fixed or ctx.max_tokens
        if limit <= 0:
            raise DataError(
                "expected max_length, or ctx.max_tokens, found neither; set parts.overlong.max_length"
            )
        found = overlong_penalty(
            _length(prediction, ctx), limit, min(limit, last or max(1, limit // 5))
        )
        return found if penalty else 1.0 + found

    return FormPart(rule, -1.0, 0.0) if penalty else FormPart(rule)


def cosine_value(length: float, max_length: float, start: float, end: float) -> float:
    """From `start` at length 0 to `end` at max_length on half a cosine wave; `end` beyond max_length."""
    share = min(1.0, max(0.0, length / max_length))
    value = end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * share))
    return min(max(start, end), max(min(start, end), value))


@_checked
def cosine_length(
    max_length: int = 1024,
    correct: Sequence[float] = (1.0, 0.5),
    wrong: Sequence[float] = (0.0, -0.5),
) -> FormPart:
    """Cosine length reward ("Demystifying Long Chain-of-Thought", arXiv 2502.03373) with VLM-R1's constants.

    `correct` and `wrong` are (value at length 0, value at max_length). VLM-R1 overwrites the accuracy by 1.0, so that
    there every answer takes the correct branch; here the task's verdict (prediction.correct) decides. Lengths beyond
    max_length keep its value, where the paper's cosine would rise again. The range is the four values' (default
    [-0.5, 1]).
    """
    limit = _tokens("max_length", max_length)
    ends = []
    for name, pair in (("correct", correct), ("wrong", wrong)):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ConfigError(
                f"expected {name} as [value at length 0, value at max_length], found {pair!r}"
            )
        ends.append([check_number(name, value, -100, 100) for value in pair])
    good, bad = ends

    def rule(prediction: Any, sample: Sample, ctx: RewardContext) -> float:
        start, end = good if prediction.correct else bad
        return cosine_value(_length(prediction, ctx), limit, start, end)

    return FormPart(rule, min(*good, *bad), max(*good, *bad))


@_checked
def length_window(low: int = 320, high: int = 512) -> FormPart:
    """1 for a correct answer of low..high tokens, else 0; Video-R1 gives it the weight 0.2.

    Fixed windows belong to one model and one task. Video-R1 pays it only where more than one completion of the group is
    correct; here each completion is judged by itself.
    """
    first, last = _tokens("low", low), _tokens("high", high)
    if first > last:
        raise ConfigError(f"expected low <= high in tokens, found {first} and {last}")
    return FormPart(
        lambda prediction, sample, ctx: float(
            bool(prediction.correct) and first <= _length(prediction, ctx) <= last
        )
    )


def repeated_share(text: str, ngram: int, unit: str = "word") -> float:
    """1 - different n-grams / all n-grams of a text, in [0, 1); 0 for a text shorter than one n-gram. Linear time.

    unit 'word' counts words in lower case (mmrl.rewards.text.words), 'char' characters. Looks at the last 16,384 characters.
    """
    tail = text[-_SEEN_CHARS:].lower()
    units: Sequence[str] = words(tail) if unit == "word" else tail
    count = len(units) - ngram + 1
    if count <= 0:
        return 0.0
    if isinstance(units, str):
        return 1.0 - len({units[i : i + ngram] for i in range(count)}) / count
    return 1.0 - len(set(zip(*(units[i:] for i in range(ngram)), strict=False))) / count


@_checked
def repetition(ngram: int = 6, unit: str = "word", penalty: bool = False) -> FormPart:
    """1 - share of repeated n-grams of the whole text, in [0, 1]; with `penalty` minus that share, in [-1, 0] (VLM-R1).

    VLM-R1 uses 6-grams for text and 1-grams for boxes with labels. A share falls when varied text is added: this part
    keeps loops down, it does not ask for brevity (see `overlong`).
    """
    size = int(check_number("ngram", ngram, 1, 40))
    if unit not in ("word", "char"):
        raise ConfigError(f"expected unit 'word' or 'char', found {unit!r}")
    base = 0.0 if penalty else 1.0
    return FormPart(
        lambda prediction, sample, ctx: base - repeated_share(prediction.text, size, unit),
        base - 1.0,
        base,
    )


_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_TAG_LINES = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")


@_checked
def tags(expected: Sequence[str] | None = None, lines: bool = False) -> FormPart:
    """Share of the expected tags that stand in the text exactly once: 0.25 for each of think and answer (V-Triune).

    `lines` wants them on lines of their own, as V-Triune counts them. It is a soft form of `format`; where a tag stands
    is not judged.
    """
    if expected is not None and (
        isinstance(expected, str)
        or not expected
        or not all(isinstance(tag, str) and tag for tag in expected)
    ):
        raise ConfigError(
            f"expected a list of tags, found {expected!r}; for example ['<answer>', '</answer>']"
        )
    wanted = tuple(expected) if expected is not None else _TAG_LINES if lines else _TAGS
    patterns = [re.compile(re.escape(tag)) for tag in wanted]

    def rule(prediction: Any, sample: Sample, ctx: RewardContext) -> float:
        return sum(_stands_once(pattern, prediction.text) for pattern in patterns) / len(patterns)

    return FormPart(rule)


def _stands_once(pattern: re.Pattern[str], text: str) -> bool:
    found = pattern.finditer(text)
    return next(found, None) is not None and next(found, None) is None


PARTS: dict[str, PartFactory] = {
    "overlong": overlong,
    "cosine_length": cosine_length,
    "length_window": length_window,
    "repetition": repetition,
    "tags": tags,
    "process": process,
}
"""Part name -> factory(**parameters) -> part(prediction, sample, ctx); prediction has .text, .answer and .correct."""
