"""From a completion to a value at a level of mmrl.rewards.reading: what AnswerTask reads with, and AnswerError.

The answer is parsed as it stands, else without wrappers, else (above strict) in the canonical spelling that the task's `native`
translates it into: so no level makes another value valid, and a text that holds two answers is one at no level but official. There
the benchmark's own extractor (the parameter `extractor`) says what the answer is, and in some benchmarks whether it is right.
"""

from __future__ import annotations

import abc
import contextlib
from typing import Any

from mmrl.rewards.official import Asked, Found, extract
from mmrl.rewards.parsing import Extraction, extract_answer
from mmrl.rewards.reading import LEVELS, Unread, unwrap
from mmrl.task import Task
from mmrl.types import RewardContext, Sample, StopReason

__all__ = ["AnswerError", "ReadingTask"]

_SEVERAL = ("several_", "both_", "hedged")
"""Reasons that tell of two answers in one, which no level reads."""


class AnswerError(ValueError):
    """A text that is not an answer of the task; `reason` is one snake_case word, for example 'not_a_number'. `envelope`: there
    is no answer to be read, rather than one that cannot be."""

    def __init__(self, reason: str, *, envelope: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.envelope = reason, envelope


class ReadingTask(Task):
    """A task whose completions are read at a level: `answers`, set when it is made, beside `answer_format` and `extractor`."""

    answers: str = "strict"
    answer_format: str = "answer"
    extractor: str | None = None

    def extract(self, text: str) -> Extraction:
        """The one answer of a completion, or why there is none."""
        return extract_answer(text, self.answer_format)

    @abc.abstractmethod
    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> Any:
        """The value an answer text stands for, coordinates in original pixels. Raises AnswerError(reason)."""

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """`answer`, in which wrappers are removed and which `parse` refused, translated from a dialect of mmrl.rewards.reading into
        the canonical spelling; None where it is in none of them. Raises mmrl.rewards.reading.Unread for two values. Default:
        None."""
        return None

    def asked(self, sample: Sample, ctx: RewardContext) -> Asked:
        """What an extractor of mmrl.rewards.official is told of the question. Default: the truth and the row's params."""
        return Asked(str(self.name), sample.answer, params=sample.params)

    def official(self, answer: str, sample: Sample, ctx: RewardContext) -> Found | None:
        """What the benchmark's own extractor takes out of `answer`; None without `extractor`: answers are read as native."""
        return (
            None
            if self.extractor is None
            else extract(self.extractor, answer, self.asked(sample, ctx))
        )

    def read(
        self, sample: Sample, text: str, ctx: RewardContext, level: str = ""
    ) -> tuple[str, Any]:
        """(text of the answer, its value) of a completion, read at `level` (default: the task's own). Raises AnswerError(reason).

        Above strict a completion without any <answer>, that the length limit did not cut, is its own answer; an extractor reads
        one that was cut, too, as its benchmark does.
        """
        level = level or self.answers
        found = self.extract(text)
        whole = ctx.stop is not StopReason.LENGTH or (
            level == "official" and self.extractor is not None
        )
        if level != "strict" and found.reason == "no_answer" and whole:
            found = extract_answer(text, "bare")
        if found.answer is None:
            raise AnswerError(found.reason or "no_answer", envelope=True)
        if (
            level == "official"
            and (official := self.official(found.answer, sample, ctx)) is not None
        ):
            return found.answer, self.parse(official.text, sample, ctx)
        return found.answer, self._read_answer(found.answer, sample, ctx, level)

    def _read_answer(self, answer: str, sample: Sample, ctx: RewardContext, level: str) -> Any:
        """As it stands, else without wrappers, else translated; the reason of a failure is that of the answer as it stands."""
        try:
            return self.parse(answer, sample, ctx)
        except AnswerError as err:
            first = err
        inner = unwrap(answer)
        if inner != answer:
            with contextlib.suppress(AnswerError):
                return self.parse(inner, sample, ctx)
        if level == "strict" or first.reason.startswith(_SEVERAL):
            raise first
        try:
            translated = self.native(inner, sample, ctx)
        except Unread as err:
            raise AnswerError(err.reason) from None
        if translated is None:
            raise first
        return self.parse(translated, sample, ctx)

    def verdict(
        self, answer: str, sample: Sample, ctx: RewardContext, metrics: dict[str, float]
    ) -> dict[str, float]:
        """`metrics` of an answer that `read` gave, with `correct` as the benchmark's own rule has it where that decides by
        itself."""
        found = self.official(answer, sample, ctx) if self.answers == "official" else None
        if found is None or found.right is None or "correct" not in metrics:
            return metrics
        return {**metrics, "correct": float(found.right)}

    def readable_at(self, sample: Sample, text: str, ctx: RewardContext) -> str | None:
        """The first of the levels strict and native, and official where the task has an extractor, that reads a completion; None
        when none does."""
        for level in LEVELS if self.extractor is not None else LEVELS[:2]:
            with contextlib.suppress(ValueError, TypeError, KeyError, ArithmeticError):
                self.read(sample, text, ctx, level)
                return level
        return None
