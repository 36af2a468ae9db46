"""Tasks whose policy looks again before it answers: what `zoom` (pictures) and `rewind` (clips) have in common.

    class Zoom(LookAgain): ...        # medium, row_example, sample_of, environment

The reward is 1 for the right answer between <answer> and </answer>, whether tools were used or not. A row is
{"id": ..., MEDIUM: file, "question": ..., "answer": ..., "options": [...]}, without options where the answer is free.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mmrl.data.json_lines import json_rows
from mmrl.environment import Observation
from mmrl.errors import ConfigError, DataError
from mmrl.rewards.parsing import extract_answer
from mmrl.task import Task
from mmrl.types import RewardContext, Sample, Score

__all__ = ["LookAgain", "answered", "asked", "check_prompt", "judged", "told"]


class LookAgain(Task):
    """Base class: rows, the score of an answer alone, the right and a wrong one."""

    headline: ClassVar[str] = "correct"
    part_names = ("reward",)
    metric_names: ClassVar[tuple[str, ...]] = ("correct", "looked")
    medium: ClassVar[str]
    """The key of a row that names its file."""
    row_example: ClassVar[str]
    """A row, for errors."""

    @abc.abstractmethod
    def sample_of(self, row: Mapping[str, Any], file: str, where: str) -> Sample:
        """The sample of a row with id, source, and checked question, answer and options; `file`: the medium's path. Raises
        DataError, which names `where`."""

    def load(self, path: str) -> Iterable[Sample]:
        """Rows of a data.jsonl or of the folder that holds one. Raises DataError."""
        data = Path(path) / "data.jsonl" if os.path.isdir(path) else Path(path)
        for number, row in json_rows(data):
            where = f"{data}:{number}"
            needed = (self.medium, "question", "answer")
            if not all(isinstance(row.get(key), str) for key in needed):
                raise DataError(f"{where}: expected {self.row_example}, found {row!r:.80}")
            _check_options(where, row.get("options"), row["answer"])
            file = str(data.parent / row[self.medium])
            yield self.sample_of(
                {"id": f"{data.stem}-{number}", "source": self.name, **row}, file, where
            )

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """Of an answer alone."""
        right, reason = judged(sample, text)
        if reason is not None:
            return Score.failure(f"parse_error: {reason}", self.part_names)
        return Score.combine(
            {"reward": right},
            {"reward": 1.0},
            parsed=True,
            metrics={"correct": right, "looked": 0.0},
        )

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        """The right answer."""
        return f"<answer>{sample.answer}</answer>"

    def wrong(self, sample: Sample, ctx: RewardContext) -> str:
        """Another one."""
        options = sample.params.get("options") or (f"not {sample.answer}",)
        return f"<answer>{next(o for o in options if o != sample.answer)}</answer>"


def answered(content: Sequence[Mapping[str, Any]], pictures: Sequence[Any] = ()) -> Observation:
    """What a tool answers."""
    return Observation([{"role": "tool", "content": [dict(part) for part in content]}], pictures)


def told(words: str) -> Observation:
    """The same in words alone."""
    return answered([{"type": "text", "text": words}])


def asked(sample: Sample, prompt: str) -> str:
    """`prompt` with the sample's {question}, and its {options} with commas between them."""
    options = sample.params.get("options") or ()
    return prompt.replace("{question}", sample.question).replace("{options}", ", ".join(options))


def judged(sample: Sample, text: str) -> tuple[float, str | None]:
    """Whether the answer is right, and why there is none."""
    found = extract_answer(text)
    if found.answer is None:
        return 0.0, found.reason
    return float(found.answer.casefold() == str(sample.answer).strip().casefold()), None


def _check_options(where: str, options: Any, answer: str) -> None:
    """Raises DataError for options of a row that are no list of different texts with the answer; None: there are none."""
    if options is not None and (
        not isinstance(options, list)
        or not all(isinstance(o, str) for o in options)
        or answer not in options
        or len(set(options)) < 2
    ):
        raise DataError(
            f"{where}: expected options as a list of texts with the answer {answer!r} among them, found {options!r:.80}"
        )


def check_prompt(task: str, prompt: Any) -> None:
    """Raises ConfigError for a prompt that does not ask the question; None: the task's own."""
    if prompt is not None and (not isinstance(prompt, str) or "{question}" not in prompt):
        raise ConfigError(f"expected a {task}.prompt that contains {{question}}, found {prompt!r}")
