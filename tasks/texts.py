"""What tasks with a text for an answer share (ocr, open_text, chart): accepted texts, checks, and the base class TextTask."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.rewards.parsing import strip_end_tokens
from mmrl.rewards.reading import unwrap_text
from mmrl.rewards.router import Part, PartFactory
from mmrl.rewards.text import MAX_CHARS, check_number, is_coordinates, make_text_reward, normalise
from mmrl.tasks.base import AnswerError, AnswerTask
from mmrl.types import RewardContext, Sample, Score

__all__ = ["TextTask", "accepted_texts", "check_texts", "foreign_text", "read_text", "text_part"]

# runs of combining marks no script needs; normalising thousands of them would cost milliseconds
_PILED_UP = re.compile("[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff]{65}")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FOREIGN = "zqxjkvw08 \u03a9\u0416\u05d0\u0e01\u30c4\u9f98\u9ea4\u9750\u9f49"


def accepted_texts(sample: Sample) -> list[str]:
    """The accepted answers of a sample as a list."""
    return (
        [sample.answer] if isinstance(sample.answer, str) else [str(text) for text in sample.answer]
    )


def check_texts(value: Any, name: str, max_chars: int) -> str | list[str]:
    """A truth as text, or as a list of accepted texts, stripped at both ends. Raises RowError.

    Empty texts, texts over `max_chars`, and texts that hold the answer envelope's own tags cannot be answered.
    """
    from mmrl.tasks.readers.common import RowError, text_of

    if isinstance(value, list):
        if not value:
            raise RowError(
                f"at least one accepted text in '{name}'", "[]", "add one or remove the row"
            )
        return [str(check_texts(text_of(item, name), name, max_chars)) for item in value]
    text = text_of(value, name)
    if len(text) > max_chars:
        raise RowError(
            f"a text of up to {max_chars} characters in '{name}'",
            f"{len(text)}",
            "raise max_chars (up to 65536) or split the picture",
        )
    if any(tag in text for tag in _TAGS) or strip_end_tokens(text) != text:
        raise RowError(
            f"'{name}' without <think>, <answer> and end-of-turn tokens",
            repr(text)[:80],
            "such a text cannot stand inside an answer: remove the row",
        )
    return text


def read_text(answer: str, truths: Sequence[str], max_chars: int) -> str:
    """The answer as text, without wrappers that no accepted text wears.

    Raises AnswerError: empty, answer_too_long, not_text (numbers in brackets, a box for instance, where no accepted text is one;
    more than 64 accents on one letter).
    """
    if not answer:
        raise AnswerError("empty")
    if len(answer) > max_chars:
        raise AnswerError("answer_too_long")
    if not answer.isascii() and _PILED_UP.search(answer):
        raise AnswerError("not_text")
    if is_coordinates(answer) and not any(is_coordinates(truth) for truth in truths):
        raise AnswerError("not_text")
    return unwrap_text(answer, truths)


def foreign_text(truths: Sequence[str], length: int = 1) -> str:
    """A text of `length` equal characters none of which stands in a truth, in either case or compatible form."""
    joined = "".join(truths)
    known = {
        char
        for text in (joined, normalise(joined, ("nfkc",)))
        for case in (text, text.lower(), text.upper())
        for char in case
    }
    letter = next((c for c in _FOREIGN if c not in known and not c.isspace()), None)
    if letter is None:
        letter = next(chr(code) for code in range(0x4E00, 0x9FFF) if chr(code) not in known)
    return letter * length


def text_part(mode: str, **params: Any) -> Part:
    """The text reward `mode` of mmrl.rewards.text against all accepted answers."""
    reward = make_text_reward(mode, **params)
    return lambda predicted, sample, ctx: reward(predicted.value, accepted_texts(sample))


class TextTask(AnswerTask):
    """A task whose truth is a text, or a list of accepted texts of which the best one counts.

    Parameters of its own: max_chars (longer answers are failures, longer truths errors, default 8192); a subclass that names
    `normalise_text` among its `own_params` hands it to the accuracy part with max_chars.
    """

    own_params: ClassVar[Mapping[str, Any]] = {"max_chars": MAX_CHARS}

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self.max_chars = int(check_number("max_chars", self.settings["max_chars"], 1, 65_536))

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy (a text reward) and format."""
        return {"accuracy": text_part, "format": self.format_factory()}

    def _accuracy_settings(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "normalise": settings["normalise_text"],
            "max_chars": settings["max_chars"],
            **settings["accuracy"],
            "mode": settings["mode"],
        }

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> str | list[str]:
        """A text, or a list of accepted texts."""
        return check_texts(value, "answer", self.max_chars)

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> str:
        """The text, see `read_text`. Reasons: empty, answer_too_long, not_text."""
        return read_text(answer, accepted_texts(sample), self.max_chars)

    def describe(self, value: str | None, sample: Sample, ctx: RewardContext) -> Mapping[str, Any]:
        """pred_text and gold_text, accepted texts joined by ' | '."""
        shown = {} if value is None else {"pred_text": value}
        return {**shown, "gold_text": " | ".join(accepted_texts(sample))}

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The first accepted text."""
        return accepted_texts(sample)[0]

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """A character that stands in no accepted text."""
        return foreign_text(accepted_texts(sample))

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """mean_length of the answers in characters, beside the shared rates."""
        if not rows:
            return {}
        return {
            "mean_length": sum(len(str(row.detail.get("pred_text", ""))) for row in rows)
            / len(rows),
            **super().summarize(rows),
        }
