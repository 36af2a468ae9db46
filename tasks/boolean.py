"""Yes/no questions: the answer is one word, yes or no (true and false are accepted), and nothing else.

    {"id": "7", "image": "7.png", "question": "Is there a red circle?", "answer": true}

`answer` in files is true or false, or the words yes, no, true, false. Words are compared whole: "yesterday" is no yes,
"I do not know" is no no; a text with neither, or with both, is a failure.

    mmrl tasks check boolean --data my.jsonl
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError
from mmrl.registry import register
from mmrl.rewards.choice import parse_boolean
from mmrl.rewards.reading.choices import yes_or_no
from mmrl.rewards.router import Part, PartFactory
from mmrl.tasks.base import EXPLAINED, AnswerError, AnswerTask, Prediction
from mmrl.types import RewardContext, Sample, Score

__all__ = ["Boolean", "read_truth"]

_WORDS = {True: "yes", False: "no"}


def read_truth(value: Any) -> bool:
    """True or false from what a file holds: a JSON boolean or one of yes, no, true, false. Raises RowError."""
    from mmrl.tasks.readers.common import RowError

    if isinstance(value, bool):
        return value
    found = parse_boolean(value) if isinstance(value, str) else None
    if found is None or found.value is None:
        raise RowError('true, false, "yes" or "no"', repr(value)[:80], "correct 'answer'")
    return found.value


def _accuracy_part(mode: str) -> Part:
    if mode != "exact":
        raise ConfigError(f"unknown mode {mode!r} of task boolean; expected exact")
    return _accuracy


def _accuracy(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
    return float(predicted.correct)


@register("boolean")
class Boolean(AnswerTask):
    """Yes or no. Parameters: those of AnswerTask; the only mode is exact."""

    shape: ClassVar[str] = "yes or no"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "easyvideo_r1": {
            "request": EXPLAINED,
            "mode": "exact",
            "answers": "native",
            "format_rule": "easyvideo_r1",
            "weights": {"accuracy": 0.9, "format": 0.1},
        },
    }
    metric_names: ClassVar[tuple[str, ...]] = ("correct",)

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format."""
        return {"accuracy": _accuracy_part, "format": self.format_factory()}

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> bool:
        """True or false."""
        return read_truth(value)

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> bool:
        """True for yes. Reasons: both_answers, not_yes_or_no, answer_too_long."""
        found = parse_boolean(answer)
        if found.value is None:
            raise AnswerError(found.reason or "not_yes_or_no")
        return found.value

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """The yes or no that a sentence begins with."""
        return yes_or_no(answer)

    def measure(self, value: bool, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """correct: 1 for the right word."""
        return {"correct": float(value == sample.answer)}

    def describe(self, value: bool | None, sample: Sample, ctx: RewardContext) -> Mapping[str, Any]:
        """pred_text and gold_text: yes or no."""
        shown = {} if value is None else {"pred_text": _WORDS[value]}
        return {**shown, "gold_text": _WORDS[bool(sample.answer)]}

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """`yes` or `no`."""
        return _WORDS[bool(sample.answer)]

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The other word."""
        return _WORDS[not sample.answer]

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """yes_rate of the parsed answers (near 0 or 1: always the same word), parse_failure_rate, truncated_rate."""
        if not rows:
            return {}
        said = [row.detail.get("pred_text") for row in rows if row.parsed]
        return {
            "yes_rate": said.count("yes") / len(said) if said else 0.0,
            **super().summarize(rows),
        }

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        """Numbers by aspect for samples with params.suite (TempCompass), see mmrl.tasks.metrics.video_suites."""
        from mmrl.tasks.metrics.video_suites import suite_numbers

        return suite_numbers(pairs)

    def example_data(self, folder: str) -> str:
        """12 scenes, half of the questions true; returns their data.jsonl."""
        from mmrl.tasks.examples import write_rows
        from mmrl.tasks.scenes import COLORS, example_scenes

        rows, colors = [], list(COLORS)
        for index, row in enumerate(example_scenes(folder, 12)):
            thing = row["params"]["objects"][0]
            other = colors[(colors.index(thing["color"]) + 1 + index % 5) % len(colors)]
            asked = thing["color"] if index % 2 == 0 else other
            rows.append(
                {
                    **row,
                    "question": f"Is the {thing['shape']} {asked}?",
                    "answer": asked == thing["color"],
                    "params": {},
                }
            )
        return write_rows(folder, rows)
