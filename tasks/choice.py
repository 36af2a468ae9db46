"""Multiple choice: the options stand in params.options without letters; the answer is one letter, or that option's text.

    {"id": "7", "image": "7.png", "question": "Which animal is it?", "answer": "B", "params": {"options": ["dog", "cat"]}}

`answer` in files may be the letter, "B. cat" or "cat"; options that all carry their own letter ("A. dog") lose it. Rows
without options (the question lists them) accept letters only, up to params.num_options. A text that names no option is
wrong, never a random choice as in MMMU's official code: `mmmu_rule` is accuracy under that rule. How MMMU, MVBench and others
take a letter out of a reply: `answers: official` with the `extractor` of that name (mmrl.rewards.official).

    mmrl tasks check choice --data my.jsonl
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError
from mmrl.registry import register
from mmrl.rewards.choice import LETTERS, nearest_option, parse_choice, strip_letters
from mmrl.rewards.official import Asked
from mmrl.rewards.parsing import extract_answer
from mmrl.rewards.reading.choices import one_letter
from mmrl.rewards.router import Part, PartFactory
from mmrl.task import Template
from mmrl.tasks.base import EXPLAINED, AnswerError, AnswerTask, Prediction
from mmrl.tasks.truths import of_sample
from mmrl.types import RewardContext, Sample, Score

__all__ = ["Choice", "options_of", "read_letter", "sample_options"]

_MODES = ("exact", "literal")
_LITERAL = frozenset(LETTERS)


def options_of(params: Mapping[str, Any]) -> list[str]:
    """params.options as texts without letters; [] when the row has none. Raises RowError for anything else."""
    from mmrl.tasks.readers.common import RowError

    options = params.get("options", [])
    if not isinstance(options, (list, tuple)) or not all(
        isinstance(o, str) and o.strip() for o in options
    ):
        raise RowError(
            "params.options as a list of texts",
            repr(options)[:80],
            'write ["dog", "cat"], without letters',
        )
    if len(options) == 1 or len(options) > len(LETTERS):
        raise RowError(f"2 to {len(LETTERS)} options", f"{len(options)}", "correct params.options")
    return strip_letters([option.strip() for option in options])


@of_sample
def sample_options(sample: Sample) -> Sequence[str]:
    """`options_of` the sample's params, read once for all of its completions."""
    return options_of(sample.params)


def _count(params: Mapping[str, Any]) -> int:
    """Number of letters of a row: its options, else params.num_options, else 26."""
    return len(params.get("options", [])) or params.get("num_options", len(LETTERS))


def read_letter(value: Any, params: Mapping[str, Any]) -> str:
    """The truth as a letter from what a file holds: a letter, "B. cat" or the option's text. Raises RowError."""
    from mmrl.tasks.readers.common import RowError

    options, count = options_of(params), _count(params)
    if type(count) is not int or not 2 <= count <= len(LETTERS):
        raise RowError(
            f"params.num_options from 2 to {len(LETTERS)}", repr(count)[:40], "correct or remove it"
        )
    if not isinstance(value, str):
        raise RowError(
            "the letter or the text of the right option",
            repr(value)[:80],
            'write a letter such as "B" (an index may count from 0 or 1, so none is taken)',
        )
    found = parse_choice(value, options, count)
    if found.option is None:
        known = "; ".join(
            f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False)
        )
        raise RowError(
            f"one of {known or 'the letters A to ' + LETTERS[count - 1]}",
            f"{value!r:.80} ({found.reason})",
            "correct 'answer' or params.options",
        )
    return LETTERS[found.option]


@of_sample
def _order(sample: Sample, shuffled: bool) -> Sequence[int]:
    order = list(range(_count(sample.params)))
    if shuffled and sample.params.get("options"):
        random.Random(f"options of {sample.id}").shuffle(order)
    return order


def _accuracy_part(mode: str) -> Part:
    """exact: the chosen option is the right one. literal: the answer text is the letter itself, as Video-R1 compares."""
    if mode not in _MODES:
        raise ConfigError(
            f"unknown mode {mode!r} of task choice; expected one of {', '.join(_MODES)}"
        )

    def accuracy(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
        return float(predicted.correct and (mode == "exact" or predicted.answer in _LITERAL))

    return accuracy


@register("choice")
class Choice(AnswerTask):
    """Multiple choice. Beside the parameters of AnswerTask:

    mode             exact (default), or literal: the answer must be the letter and nothing else (Video-R1)
    shuffle_options  show the options in an order drawn from the sample's id (default false); not for options such as
                     "A and B" or pictures that carry letters
    nearest_option   measure `mathvista_rule` as well (default false): an answer that names no option counts as the one
                     with the smallest edit distance. A metric only: as a reward it would pay for near misses
    """

    ask: ClassVar[str] = "{question}\n{options}"
    shape: ClassVar[str] = "the letter of the right option"
    own_params: ClassVar[Mapping[str, Any]] = {"shuffle_options": False, "nearest_option": False}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "video_r1": {
            "mode": "literal",
            "answer_format": "think",
            "format_rule": "tags",
            "weights": {"accuracy": 1.0, "format": 1.0},
            "normalise": False,
        },
        "easyvideo_r1": {
            "request": EXPLAINED,
            "mode": "exact",
            "answers": "native",
            "format_rule": "easyvideo_r1",
            "weights": {"accuracy": 0.9, "format": 0.1},
        },
        "mathvista_rule": {"nearest_option": True},
    }
    metric_names: ClassVar[tuple[str, ...]] = ("correct",)

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        for key in ("shuffle_options", "nearest_option"):
            if not isinstance(self.settings[key], bool):
                raise ConfigError(
                    f"expected choice.{key} true or false, found {self.settings[key]!r}"
                )

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format."""
        return {"accuracy": _accuracy_part, "format": self.format_factory()}

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> Any:
        """The letter of the right option."""
        return read_letter(value, params)

    def order(self, sample: Sample) -> Sequence[int]:
        """Indices of the options in the order shown: [0, 1, ...] unless `shuffle_options`."""
        return _order(sample, self.settings["shuffle_options"])

    def shown_options(self, sample: Sample) -> Sequence[str]:
        """Texts of the options in the order shown; [] when the row has none."""
        options = sample_options(sample)
        return (
            [options[i] for i in self.order(sample)]
            if self.settings["shuffle_options"] and options
            else options
        )

    def fill_prompt(self, prompt: str, sample: Sample, template: Template) -> str:
        """{options} becomes lines "A. dog"; a prompt without {options} gets them behind the question."""
        lines = "\n".join(
            f"{letter}. {text}"
            for letter, text in zip(LETTERS, self.shown_options(sample), strict=False)
        )
        if "{options}" not in prompt:
            prompt = prompt.replace("{question}", "{question}\n{options}")
        head, _, tail = prompt.replace("\n{options}", "{options}").partition("{options}")
        head, tail = (
            super().fill_prompt(head, sample, template),
            super().fill_prompt(tail, sample, template),
        )
        return (
            f"{head}\n{lines}\n{tail.lstrip()}" if lines else f"{head} {tail.lstrip()}"
        ).rstrip()

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> str:
        """The letter (of the row, also when shuffled) of the option named. Reasons: those of mmrl.rewards.choice."""
        found = parse_choice(answer, self.shown_options(sample), _count(sample.params))
        if found.option is None:
            raise AnswerError(found.reason or "not_a_choice")
        return LETTERS[self.order(sample)[found.option]]

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """The only letter, or the only option, that a sentence names."""
        return one_letter(answer, self.shown_options(sample), _count(sample.params))

    def asked(self, sample: Sample, ctx: RewardContext) -> Asked:
        """The options, and the letter of the truth, as shown."""
        return Asked(
            "choice",
            self.gold_answer(sample, ctx),
            self.shown_options(sample),
            _count(sample.params),
            sample.params,
        )

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """As every task's; with `nearest_option` also the metric mathvista_rule, which never changes the reward."""
        score = super().score(sample, text, ctx)
        if not self.settings["nearest_option"]:
            return score
        value = score.metrics.get("correct", 0.0)
        if score.reason in ("not_a_choice", "letter_and_text_disagree"):
            found = nearest_option(
                extract_answer(text, self.answer_format).answer or "", sample_options(sample)
            )
            value = float(found.option is not None and LETTERS[found.option] == sample.answer)
        return replace(score, metrics={**score.metrics, "mathvista_rule": value})

    def measure(self, value: str, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """correct: 1 for the right option."""
        return {"correct": float(value == sample.answer)}

    def describe(self, value: str | None, sample: Sample, ctx: RewardContext) -> Mapping[str, Any]:
        """pred_text and gold_text: letter (of the row) and option text."""
        options = sample_options(sample)

        def show(letter: str) -> str:
            index = LETTERS.index(letter)
            return f"{letter}. {options[index]}" if index < len(options) else str(letter)

        shown = {} if value is None else {"pred_text": show(value)}
        return {**shown, "gold_text": show(sample.answer)}

    def _letter_shown(self, letter: str, sample: Sample) -> str:
        return LETTERS[self.order(sample).index(LETTERS.index(letter))]

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The letter, e.g. `B`, as shown."""
        return self._letter_shown(sample.answer, sample)

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The next letter."""
        return LETTERS[(LETTERS.index(self.gold_answer(sample, ctx)) + 1) % _count(sample.params)]

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """mmmu_rule: share of right answers, a text that names no option is wrong; mathvista_rule when it is switched on."""
        if not rows:
            return {}
        rules = {"mmmu_rule": "correct"}
        if self.settings["nearest_option"]:
            rules["mathvista_rule"] = "mathvista_rule"
        shares = {
            rule: sum(row.metrics.get(name, 0.0) for row in rows) / len(rows)
            for rule, name in rules.items()
        }
        return {**shares, **super().summarize(rows)}

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        """Numbers of video benchmarks by task, type and length, for samples with params.suite (mmrl.tasks.metrics.video_suites)."""
        from mmrl.tasks.metrics.video_suites import suite_numbers

        return suite_numbers(pairs)

    def example_data(self, folder: str) -> str:
        """12 scenes of one shape, asked for its colour, with 3 to 6 options; returns their data.jsonl."""
        from mmrl.tasks.examples import write_rows
        from mmrl.tasks.scenes import COLORS, example_scenes

        rows = []
        for index, row in enumerate(example_scenes(folder, 12)):
            thing, rng = row["params"]["objects"][0], random.Random(index)
            options = [
                *rng.sample([c for c in COLORS if c != thing["color"]], 2 + index % 4),
                thing["color"],
            ]
            rng.shuffle(options)
            rows.append(
                {
                    **row,
                    "question": f"Which colour has the {thing['shape']}?",
                    "answer": LETTERS[options.index(thing["color"])],
                    "params": {"options": options},
                }
            )
        return write_rows(folder, rows)
