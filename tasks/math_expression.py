r"""Mathematics: the answer is an expression, compared by meaning (math-verify), not by spelling.

    {"id": "7", "image": "7.png", "question": "What is the length of AB?", "answer": "\\frac{3}{4}\\sqrt{2}"}

The answer is LaTeX or plain text, inside \boxed{} or not; several boxes are a failure. Anything sympy has to look at runs
in a process with a deadline (mmrl.rewards.verifier_pool), so a hostile expression costs a recorded 0 (`verifier_timeout`),
never a hang; a verifier that crashes is a reward error, not a wrong answer. Where the truth is a number, the answer must
be a value: "3/4 + 1/2" is `not_evaluated`, and so is "10/2" for 5.

    mmrl tasks check math --data my.jsonl
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, RewardError, need_package
from mmrl.registry import register
from mmrl.rewards.math_expression import MathVerdict, parse_expression, verify_expression
from mmrl.rewards.router import Part, PartFactory
from mmrl.tasks.base import EXPLAINED, AnswerError, AnswerTask, Prediction
from mmrl.types import RewardContext, Sample, Score

__all__ = ["Math"]

_EXAMPLES = (  # expression drawn, truth
    ("3/4 + 1/2", r"\frac{5}{4}"),
    ("(x + 1)(x - 1)", "x^2 - 1"),
    ("sqrt(18)", r"3\sqrt{2}"),
    ("17 * 6", "102"),
    ("2x + 3x", "5x"),
    ("7 - 12", "-5"),
    ("1 : 8", "0.125"),
    ("solve x^2 = 9", r"\{-3, 3\}"),
    ("area, r = 2", r"4\pi"),
    ("10^6 / 10^2", "10000"),
    ("(a + b)^2", "a^2 + 2ab + b^2"),
    ("15 % of 60", "9"),
)


def _accuracy_part(mode: str) -> Part:
    if mode != "exact":
        raise ConfigError(f"unknown mode {mode!r} of task math; expected exact (equal in meaning)")
    return _accuracy


def _accuracy(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
    return float(predicted.correct)


@register("math")
class Math(AnswerTask):
    r"""One mathematical expression. Beside the parameters of AnswerTask (the only mode is exact, equal in meaning):

    boxed       the expression must stand in \boxed{} (default false: it may)
    evaluated   a truth that is a number asks for a value, not for something to compute (default true)
    deadline_s  seconds an expression may take (default 2); one that misses it is tried once more, in a fresh process
    """

    shape: ClassVar[str] = "the expression"
    own_params: ClassVar[Mapping[str, Any]] = {"boxed": False, "evaluated": True, "deadline_s": 2.0}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "v_triune": {
            "boxed": True,
            "evaluated": False,
            "answer_format": "think_lines",
            "format_rule": "v_triune_tags",
            "weights": {"accuracy": 1.0, "format": 0.1},
        },
        "r1_v": {
            "evaluated": False,
            "answer_format": "think",
            "answers": "native",
            "format_rule": "tags",
            "weights": {"accuracy": 1.0, "format": 1.0},
            "normalise": False,
        },
        "easyvideo_r1": {
            "request": EXPLAINED,
            "evaluated": False,
            "answers": "native",
            "format_rule": "easyvideo_r1",
            "weights": {"accuracy": 0.9, "format": 0.1},
        },
    }
    metric_names: ClassVar[tuple[str, ...]] = ("correct",)

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        need_package("math_verify", "task math", "math")
        for key in ("boxed", "evaluated"):
            if not isinstance(self.settings[key], bool):
                raise ConfigError(
                    f"expected math.{key} true or false, found {self.settings[key]!r}"
                )
        deadline = self.settings["deadline_s"]
        if (
            isinstance(deadline, bool)
            or not isinstance(deadline, (int, float))
            or not 0 < deadline <= 60
        ):
            raise ConfigError(
                f"expected math.deadline_s above 0 and at most 60, found {deadline!r}"
            )
        if self.settings["boxed"] and "prompt" not in params:
            self.prompt = self.prompt.replace(self.shape, r"\boxed{the expression}")

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format."""
        return {"accuracy": _accuracy_part, "format": self.format_factory()}

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> str:
        """The expression as text, out of its box and dollars; numbers become text."""
        from mmrl.tasks.readers.common import RowError

        text = repr(value) if type(value) in (int, float) else value
        found = parse_expression(text) if isinstance(text, str) else None
        if found is None or found.text is None:
            raise RowError(
                "one mathematical expression as text",
                f"{value!r:.80} ({found.reason if found else 'no text'})",
                "correct 'answer'; with several \\boxed{} keep the final one",
            )
        return found.text

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> MathVerdict:
        """The verdict on the answer. Reasons: those of parse_expression and verify_expression."""
        found = parse_expression(answer, self.settings["boxed"])
        if found.text is None:
            raise AnswerError(found.reason or "not_an_expression")
        try:
            verdict = verify_expression(
                sample.answer,
                found.text,
                evaluated=self.settings["evaluated"],
                deadline_s=self.settings["deadline_s"],
            )
        except RewardError as err:
            # the machine's fault, not the text's: recorded as reward_error and counted
            raise ValueError(str(err)) from err
        if verdict.correct is None:
            raise AnswerError(verdict.reason or "not_an_expression")
        return verdict

    def measure(
        self, value: MathVerdict, sample: Sample, ctx: RewardContext
    ) -> Mapping[str, float]:
        """correct: 1 when the answer means the truth."""
        return {"correct": float(bool(value.correct))}

    def describe(
        self, value: MathVerdict | None, sample: Sample, ctx: RewardContext
    ) -> Mapping[str, Any]:
        """gold_text; pred_text ('right' or 'wrong': the text itself is in the log); unverifiable when sympy cannot read the
        truth, which then only its own spelling meets."""
        if value is None:
            return {"gold_text": str(sample.answer)}
        return {
            "pred_text": "right" if value.correct else "wrong",
            "gold_text": str(sample.answer),
            "unverifiable": not value.gold_parsed,
        }

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The truth as LaTeX, boxed when that is asked for."""
        return rf"\boxed{{{sample.answer}}}" if self.settings["boxed"] else str(sample.answer)

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """A number that is not the truth."""
        for text in ("987654321", "-0.123456"):
            if (
                verify_expression(
                    sample.answer, text, deadline_s=self.settings["deadline_s"]
                ).correct
                is False
            ):
                break
        return rf"\boxed{{{text}}}" if self.settings["boxed"] else text

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """timeout_rate (answers that missed the deadline), unverifiable_rate, parse_failure_rate, truncated_rate."""
        if not rows:
            return {}
        return {
            "timeout_rate": sum(row.reason == "verifier_timeout" for row in rows) / len(rows),
            "unverifiable_rate": sum(bool(row.detail.get("unverifiable")) for row in rows)
            / len(rows),
            **super().summarize(rows),
        }

    def example_data(self, folder: str) -> str:
        """12 pictures of an expression; returns their data.jsonl."""
        from PIL import Image, ImageDraw, ImageFont

        from mmrl.tasks.examples import write_rows

        (Path(folder) / "images").mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        for index, (drawn, truth) in enumerate(_EXAMPLES):
            picture = Image.new("RGB", (168, 56), "white")
            ImageDraw.Draw(picture).text(
                (8, 16), drawn, fill="black", font=ImageFont.load_default(18)
            )
            picture.save(Path(folder) / "images" / f"math-{index}.png")
            rows.append(
                {
                    "id": f"math-{index}",
                    "image": f"images/math-{index}.png",
                    "answer": truth,
                    "question": "Simplify or compute what the picture shows.",
                }
            )
        return write_rows(folder, rows)
