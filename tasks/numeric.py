"""Numeric answers: one number, judged by a declared rule.

    {"id": "7", "image": "7.png", "question": "How wide is the square in pixels?", "answer": 42, "params": {"unit": "px"}}

`answer` in files is a number or its text. Per sample, params.precision (decimals both are rounded to), params.tolerance
({"abs": .., "rel": ..}) and params.unit decide what counts as `correct`; without them numbers must be equal. A unit of
"%", or a truth that is written 12%, lets 12% stand for 12.

    mmrl tasks check numeric --data my.jsonl
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError
from mmrl.registry import register
from mmrl.rewards.format import wrap_answer
from mmrl.rewards.numeric import (
    PERCENT,
    NumberParse,
    is_division,
    make_closeness,
    mra,
    parse_first_token,
    parse_number,
    rounded_equal,
    within,
)
from mmrl.rewards.reading.numbers import one_number
from mmrl.rewards.router import Part, PartFactory
from mmrl.tasks.base import EXPLAINED, AnswerError, AnswerTask, Prediction
from mmrl.tasks.truths import of_sample
from mmrl.types import RewardContext, Sample, Score

__all__ = ["Numeric"]

_PARSERS = ("whole", "first_token")


def _spell(answer: Any) -> str:
    """The truth as text, as the file has it."""
    return answer if isinstance(answer, str) else repr(answer)


def _read(text: str, params: Mapping[str, Any], truth: Any, percent: str) -> NumberParse:
    """The number of a text as the row declares numbers, else with the task's `percent`."""
    percent = params.get("percent", percent)
    own = (
        "%"
        if percent == "refuse" and isinstance(truth, str) and truth.rstrip(" .").endswith("%")
        else ""
    )
    return parse_number(text, percent, params.get("unit", own))


@of_sample
def _gold(sample: Sample, percent: str) -> NumberParse:
    return _read(_spell(sample.answer), sample.params, sample.answer, percent)


@of_sample
def _is_share(sample: Sample, percent: str) -> bool:
    """Whether the truth is a share of one, so that 50% of an answer is 0.5."""
    gold = parse_number(_spell(sample.answer), percent).value
    return gold is not None and 0 < abs(gold) < 1


@register("numeric")
class Numeric(AnswerTask):
    """One number. Beside the parameters of AnswerTask:

    mode     exact (default; follows params.precision and params.tolerance of the sample), tolerance, mra, regression or
             rounded; their parameters in `accuracy`, see mmrl.rewards.numeric.make_closeness
    percent  what 12% means: refuse (default, a failure), keep (12) or fraction (0.12)
    parse    whole (default: the answer is the number), or first_token (VSI-Bench's official reading)
    evaluated  a truth that is a whole number asks for its digits, not for a division such as 10/2 (default true)
    regression  mode, and its parameters, of rows with params.regression, in files those of problem type regression: {mode: mra}
             (default); presets have their paper's

    The metric `correct` uses the sample's tolerance or precision, else the tolerance of mode tolerance, else equality.
    """

    shape: ClassVar[str] = "the number"
    own_params: ClassVar[Mapping[str, Any]] = {
        "percent": "refuse",
        "parse": "whole",
        "evaluated": True,
        "regression": {"mode": "mra"},
    }
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "video_r1": {
            "mode": "rounded",
            "accuracy": {"decimals": 2, "same_form": True},
            "regression": {"mode": "regression"},
            "answer_format": "think",
            "format_rule": "tags",
            "weights": {"accuracy": 1.0, "format": 1.0},
            "normalise": False,
        },
        "video_r1_regression": {
            "mode": "regression",
            "regression": {"mode": "regression"},
            "answer_format": "think",
            "format_rule": "tags",
            "weights": {"accuracy": 1.0, "format": 1.0},
            "normalise": False,
        },
        "easyvideo_r1": {
            "request": EXPLAINED,
            "mode": "rounded",
            "accuracy": {"decimals": 4, "same_form": False, "slack": 0.015},
            "regression": {"mode": "mra", "strict": "double"},
            "answers": "native",
            "evaluated": False,
            "format_rule": "easyvideo_r1",
            "weights": {"accuracy": 0.9, "format": 0.1},
            "percent": "fraction",
        },
        "easyvideo_r1_regression": {
            "request": EXPLAINED,
            "mode": "mra",
            "accuracy": {"strict": "double"},
            "regression": {"mode": "mra", "strict": "double"},
            "format_rule": "easyvideo_r1",
            "answers": "native",
            "evaluated": False,
            "weights": {"accuracy": 0.9, "format": 0.1},
            "percent": "fraction",
        },
        "vsi_bench": {"mode": "mra", "parse": "first_token"},
        "mathvista_rule": {"mode": "exact"},
    }
    metric_names: ClassVar[tuple[str, ...]] = ("correct", "mra")

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        for key, known in (("percent", PERCENT), ("parse", _PARSERS)):
            if self.settings[key] not in known:
                raise ConfigError(
                    f"expected numeric.{key} to be one of {', '.join(known)}, found {self.settings[key]!r}"
                )
        if not isinstance(self.settings["evaluated"], bool):
            raise ConfigError(
                f"expected numeric.evaluated true or false, found {self.settings['evaluated']!r}"
            )

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format."""
        rule = self.settings["regression"]
        if not isinstance(rule, Mapping) or "mode" not in rule:
            raise ConfigError(
                f"expected numeric.regression as a mode with its parameters such as {{'mode': 'mra'}}, found {rule!r}"
            )
        return {"accuracy": self._accuracy_part, "format": self.format_factory()}

    def _rule(self, mode: str, **params: Any) -> Part:
        closeness = make_closeness(mode, **params)

        def rule(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
            if mode == "exact":
                return float(predicted.correct)
            return closeness(
                predicted.value, self._gold(sample), predicted.answer, _spell(sample.answer)
            )

        return rule

    def _accuracy_part(self, mode: str, **params: Any) -> Part:
        usual, regression = self._rule(mode, **params), self._rule(**self.settings["regression"])

        def accuracy(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
            rule = regression if sample.params.get("regression") else usual
            return rule(predicted, sample, ctx)

        return accuracy

    def _read(self, text: str, params: Mapping[str, Any], truth: Any) -> NumberParse:
        return _read(text, params, truth, self.settings["percent"])

    def _gold(self, sample: Sample) -> NumberParse:
        return _gold(sample, self.settings["percent"])

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> float | int | str:
        """A finite number, or its text; the sample's precision, tolerance, unit and percent are checked as well."""
        from mmrl.tasks.readers.common import RowError

        precision, tolerance = params.get("precision"), params.get("tolerance", {})
        if precision is not None and (
            type(precision) not in (int, float) or precision % 1 or not 0 <= precision <= 15
        ):
            raise RowError(
                "params.precision as a number of decimals from 0 to 15",
                repr(precision)[:40],
                "correct it",
            )
        bounds = (
            tolerance.values()
            if isinstance(tolerance, Mapping) and set(tolerance) <= {"abs", "rel"}
            else [None]
        )
        if not all(
            isinstance(b, (int, float)) and not isinstance(b, bool) and 0 <= b < math.inf
            for b in bounds
        ):
            raise RowError(
                'params.tolerance as {"abs": number >= 0, "rel": number >= 0}',
                repr(tolerance)[:80],
                "correct it",
            )
        if (
            not isinstance(params.get("unit", ""), str)
            or params.get("percent", "keep") not in PERCENT
        ):
            raise RowError(
                f"params.unit as text and params.percent as one of {', '.join(PERCENT)}",
                f"{params.get('unit')!r} and {params.get('percent')!r}",
                "correct them",
            )
        if not isinstance(value, (int, float, str)) or isinstance(value, bool):
            raise RowError("a number, or its text", repr(value)[:80], "correct 'answer'")
        found = self._read(_spell(value), params, value)
        if found.value is None:
            fix = (
                'declare params.unit "%" or percent: keep'
                if found.reason == "unexpected_percent"
                else "correct 'answer' (a unit behind it belongs into params.unit)"
            )
            raise RowError("one finite number", f"{value!r:.80} ({found.reason})", fix)
        return value

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> NumberParse:
        """The number of the answer. Reasons: those of mmrl.rewards.numeric, not_evaluated (a division for a whole number)."""
        first = self.settings["parse"] == "first_token"
        found = (
            parse_first_token(answer) if first else self._read(answer, sample.params, sample.answer)
        )
        if found.value is None:
            raise AnswerError(found.reason or "not_a_number")
        if (
            self.settings["evaluated"]
            and not first
            and is_division(answer, sample.params.get("unit", ""))
        ):
            gold = self._gold(sample).exact
            if (
                gold is not None
                and gold.denominator == 1
                and not is_division(_spell(sample.answer), sample.params.get("unit", ""))
            ):
                raise AnswerError("not_evaluated")
        return found

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """The one number of a sentence; 50% is 0.5 where the truth is a share, and wherever it is for the bare answer."""
        percent = sample.params.get("percent", self.settings["percent"])
        of_one = percent == "fraction" or _is_share(sample, percent)
        found = one_number(answer, str(sample.params.get("unit", "")), of_one)
        return f"{found[:-1]}e-2" if found is not None and found.endswith("%") else found

    def measure(
        self, value: NumberParse, sample: Sample, ctx: RewardContext
    ) -> Mapping[str, float]:
        """correct (see the class) and mra, the official mean relative accuracy."""
        gold = self._gold(sample)
        assert value.value is not None and gold.value is not None, (
            "check_answer and parse let numbers pass only"
        )
        return {
            "correct": float(self._same(value, gold, sample.params)),
            "mra": mra(value.value, gold.value),
        }

    def _same(self, value: NumberParse, gold: NumberParse, params: Mapping[str, Any]) -> bool:
        tolerance = params.get("tolerance") or (
            self.settings["accuracy"] if self.settings["mode"] == "tolerance" else {}
        )
        if tolerance:
            return within(value, gold, tolerance.get("abs", 0.0), tolerance.get("rel", 0.0))
        if params.get("precision") is not None:
            return rounded_equal(value, gold, int(params["precision"]))
        return value.exact == gold.exact

    def describe(
        self, value: NumberParse | None, sample: Sample, ctx: RewardContext
    ) -> Mapping[str, Any]:
        """pred_text and gold_text."""
        shown = {} if value is None else {"pred_text": f"{value.value:.12g}"}
        return {**shown, "gold_text": _spell(sample.answer)}

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The truth as the file spells it."""
        return _spell(sample.answer)

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """A far number whose accuracy is 0."""
        gold = self._gold(sample).value
        assert gold is not None, "check_answer lets numbers pass only"
        for factor in (10, 1e4, 1e8):
            far = gold + factor * (abs(gold) + 1)
            text = repr(int(far) if "." not in _spell(sample.answer) and abs(far) < 1e15 else far)
            score = self.score(sample, wrap_answer(text, self.answer_format), ctx)
            if score.parsed and score.parts["accuracy"] == 0:
                return text
        return "0"

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """MRA over all rows (a failure is 0), parse_failure_rate, truncated_rate; mathvista_rule with that preset.

        mathvista_rule is the share of answers equal to the truth after rounding to params.precision. The official number
        has GPT extract the answer first, so this one carries another name.
        """
        if not rows:
            return {}
        summary = {"MRA": math.fsum(row.metrics.get("mra", 0.0) for row in rows) / len(rows)}
        if self.settings["preset"] == "mathvista_rule":
            summary["mathvista_rule"] = sum(row.metrics.get("correct", 0.0) for row in rows) / len(
                rows
            )
        return {**summary, **super().summarize(rows)}

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        """MRA by question type for samples with params.suite (VSI-Bench), see mmrl.tasks.metrics.video_suites."""
        from mmrl.tasks.metrics.video_suites import suite_numbers

        return suite_numbers(pairs, "mra")

    def example_data(self, folder: str) -> str:
        """12 scenes of one shape, asked for its width in pixels or as a share of the picture; returns their data.jsonl."""
        from mmrl.tasks.examples import write_rows
        from mmrl.tasks.scenes import example_scenes

        rows = []
        for index, row in enumerate(example_scenes(folder, 12)):
            thing, width = row["params"]["objects"][0], row["params"]["width"]
            pixels = thing["box"][2] - thing["box"][0]
            question, answer, params = [
                (
                    f"How wide is the {thing['shape']} in pixels?",
                    pixels,
                    {"unit": "px", "tolerance": {"abs": 1}},
                ),
                (
                    f"How wide is the {thing['shape']}, as a share of the picture's width?",
                    round(pixels / width, 3),
                    {"precision": 3},
                ),
                (
                    f"How many percent of the picture's width has the {thing['shape']}?",
                    f"{100 * pixels / width:.1f}",
                    {"unit": "%"},
                ),
            ][index % 3]
            rows.append({**row, "question": question, "answer": answer, "params": params})
        return write_rows(folder, rows)
