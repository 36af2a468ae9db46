"""Grounded video QA: the letter of the right option, and the time in the video that shows it (NExT-GQA).

A row's answer is {"choice": "B", "spans": [[start, end], ...]}, params.options the options without letters, times in seconds of
the shown part. The answer text is {"answer": "B", "time": [start, end]}; times as in mmrl.tasks.temporal_grounding.

    mean   share * right + (1 - share) * IoU (default, share 0.5)
    gated  right * IoU: both or nothing

IoU is that of the one span with its best true one, or with `spans: many` that of the merged unions.

The reward takes IoU, not IoP: a tiny span inside the truth has IoP 1. Metrics, each over all questions: correct, iop, iou,
iop@0.3 / 0.5, iou@0.3 / 0.5 of the first predicted span (best over the true ones), acc_gqa = correct and IoP >= 0.5.

    mmrl tasks check grounded_qa
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, did_you_mean
from mmrl.registry import register
from mmrl.rewards.choice import LETTERS, parse_choice
from mmrl.rewards.format_rules import glue_spans
from mmrl.rewards.parsing import MAX_ANSWER_CHARS, Extraction, strip_fence
from mmrl.rewards.reading import Unread
from mmrl.rewards.reading.blocks import json_block
from mmrl.rewards.reading.choices import one_letter
from mmrl.rewards.router import Part, PartFactory
from mmrl.rewards.temporal import span_iop, span_iou, union_iou
from mmrl.rewards.text import check_number
from mmrl.rewards.times import SPAN_KEYS, Span, read_json, spans_of
from mmrl.task import Template
from mmrl.tasks.base import AnswerError, AnswerTask, Prediction
from mmrl.tasks.choice import options_of, read_letter, sample_options
from mmrl.tasks.spans import (
    TimeFormat,
    beside_spans,
    check_spans,
    clip_pair,
    duration_of,
    need_duration,
    spell_seconds,
    true_spans,
)
from mmrl.types import RewardContext, Sample, Score

__all__ = ["Grounded", "GroundedQA"]

_MODES = ("mean", "gated")
_CHOICE_KEYS = ("answer", "choice", "option")


_SPELLINGS = ("json", "glue")
_NO_SPAN: Span = (0.0, 0.0)
_GLUE = re.compile(r"<glue>([^<]*)</glue>")
_ASK_GLUE = (
    "{question}\n{options}\nThe video is {duration} seconds long. First think inside <think> </think>, then give the "
    "letter of the right option inside <answer> </answer> and, behind it, the times that show it {times} as "
    "<glue>[(start, end), ...]</glue>."
)


class Grounded(NamedTuple):
    """The chosen letter, and spans in seconds as they were written."""

    letter: str
    spans: list[Span]


def _accuracy_part(mode: str, share: float = 0.5, clip: bool = False, many: bool = False) -> Part:
    if mode not in _MODES:
        raise ConfigError(
            f"unknown accuracy mode {mode!r}; expected {', '.join(_MODES)}.{did_you_mean(str(mode), _MODES)}"
        )
    weight, both = check_number("share", share, 0, 1), clip_pair(clip)

    def accuracy(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
        right = float(predicted.value.letter == sample.answer["choice"])
        spans, truths = both(predicted.value.spans, sample, ctx)
        iou = (
            union_iou(spans, truths) if many else max(span_iou(spans[0], truth) for truth in truths)
        )
        return right * iou if mode == "gated" else min(1.0, weight * right + (1 - weight) * iou)

    return accuracy


@register("grounded_qa")
class GroundedQA(AnswerTask):
    """A choice and when it is seen. Beside the parameters of AnswerTask:

    mode        mean (default; `accuracy: {share: 0.5}`, the share of the choice) or gated; `accuracy: {clip: true}` clips
                both sides to the shown part before the reward (default false), metrics see what was said
    spelling    json (default), or glue: VideoChat-R1's <answer>B</answer><glue>[(s1, e1), ...]</glue>, whose halves are judged
                apart: what cannot be read of one is wrong and leaves the other as it is
    time_frame  seconds (default) or rel1; spans: many or one (default): see mmrl.tasks.temporal_grounding
    """

    ask: ClassVar[str] = (
        "{question}\n{options}\nThe video is {duration} seconds long. Answer with the letter of the right option "
        "and with the time that shows it, {times}."
    )
    shape: ClassVar[str] = '{"answer": "the letter", "time": [start, end]}'
    default_mode: ClassVar[str] = "mean"
    own_params: ClassVar[Mapping[str, Any]] = {
        "time_frame": "seconds",
        "spans": "one",
        "spelling": "json",
    }
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # gqa_reward + gqa_iou + gqa_format, each 0 to 1; its "glue" holds several spans
        "videochat_r1": {
            "spans": "many",
            "spelling": "glue",
            "answer_format": "think",
            "answers": "native",
            "format_rule": "videochat_r1_glue",
            "prompt": _ASK_GLUE,
            "weights": {"accuracy": 2.0, "format": 1.0},
            "normalise": False,
        },
    }
    metric_names: ClassVar[tuple[str, ...]] = (
        "correct",
        "iop",
        "iop@0.3",
        "iop@0.5",
        "iou",
        "iou@0.3",
        "iou@0.5",
        "acc_gqa",
    )
    headline: ClassVar[str] = "acc_gqa"

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        if self.settings["spelling"] not in _SPELLINGS:
            raise ConfigError(
                f"unknown spelling {self.settings['spelling']!r} of grounded_qa; expected {', '.join(_SPELLINGS)}."
                f"{did_you_mean(str(self.settings['spelling']), _SPELLINGS)}"
            )
        if self.settings["prompt"] is None:
            shape = (
                self.shape.replace("[start, end]", "[[start, end], ...]")
                if self.times.many
                else self.shape
            )
            self.prompt = f"{self.ask} {self.request}".replace("{shape}", shape)

    @functools.cached_property
    def times(self) -> TimeFormat:
        """How answers spell times."""
        return TimeFormat(
            "list", self.settings["time_frame"], self.settings["spans"], "grounded_qa"
        )

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format."""
        return {
            "accuracy": functools.partial(_accuracy_part, many=self.times.many),
            "format": self.format_factory(),
        }

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> dict[str, Any]:
        """{"choice": letter, "spans": [[start, end], ...] in seconds}."""
        from mmrl.tasks.readers.common import RowError

        if not isinstance(value, Mapping) or not {"choice", "spans"} <= set(value):
            raise RowError(
                '{"choice": "B", "spans": [[start, end], ...]}', repr(value)[:80], "fix the row"
            )
        if not options_of(params):
            raise RowError(
                "params.options with the options", "none", 'write ["dog", "cat"], without letters'
            )
        return {
            "choice": read_letter(value["choice"], params),
            "spans": check_spans(value["spans"], params),
        }

    def fill_prompt(self, prompt: str, sample: Sample, template: Template) -> str:
        """As the base, with {options} (lines "A. dog"), {duration} and {times}; braces in questions and options stay."""
        lines = "\n".join(
            f"{letter}. {text}"
            for letter, text in zip(LETTERS, sample_options(sample), strict=False)
        )
        prompt = prompt.replace("{duration}", spell_seconds(need_duration(sample), 2)).replace(
            "{times}", self.times.words
        )
        if "{options}" not in prompt:
            prompt = prompt.replace("{question}", "{question}\n{options}")
        head, _, tail = prompt.partition("{options}")
        return f"{super().fill_prompt(head, sample, template)}{lines}{super().fill_prompt(tail, sample, template)}"

    def extract(self, text: str) -> Extraction:
        """As the base; with spelling glue the answer and its one glue, divided by a line feed."""
        found = super().extract(text)
        if self.settings["spelling"] != "glue" or found.answer is None:
            return found
        blocks = _GLUE.findall(text.rpartition("</think>")[2])
        return Extraction(
            f"{found.answer}\n{' '.join(blocks[0].split()) if len(blocks) == 1 else ''}",
            found.reason,
        )

    def _parse_glue(self, answer: str, sample: Sample, ctx: RewardContext) -> Grounded:
        said, _, glue = answer.rpartition("\n")
        options = sample_options(sample)
        found = parse_choice(said, options, len(options))
        if found.option is None and self.answers != "strict":
            with contextlib.suppress(Unread):
                found = parse_choice(
                    one_letter(said, options, len(options)) or said, options, len(options)
                )
        spans = glue_spans(glue) or [_NO_SPAN]
        if found.option is None and spans == [_NO_SPAN]:
            raise AnswerError(found.reason or "not_a_choice")
        return Grounded("" if found.option is None else LETTERS[found.option], spans)

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> Grounded:
        """Letter and spans. Reasons: answer_too_long, not_an_object, no_choice, ambiguous_keys, those of mmrl.rewards.choice and of
        mmrl.rewards.times."""
        if len(answer) > MAX_ANSWER_CHARS:
            raise AnswerError("answer_too_long")
        if self.settings["spelling"] == "glue":
            return self._parse_glue(answer, sample, ctx)
        try:
            value = read_json(strip_fence(answer))
        except (ValueError, RecursionError) as err:
            raise AnswerError(
                "ambiguous_keys" if str(err) == "duplicate keys" else "not_an_object"
            ) from None
        if not isinstance(value, dict):
            raise AnswerError("not_an_object")
        keys = [key for key in _CHOICE_KEYS if key in value]
        if len(keys) != 1 or not isinstance(value[keys[0]], str):
            raise AnswerError("ambiguous_keys" if len(keys) > 1 else "no_choice")
        options = sample_options(sample)
        found = parse_choice(value[keys[0]], options, len(options))
        if found.option is None:
            raise AnswerError(found.reason or "not_a_choice")
        times = {
            key: value[key]
            for key in (*SPAN_KEYS, "start", "end", "start_time", "end_time")
            if key in value
        }
        return Grounded(LETTERS[found.option], self.times.seconds(spans_of(times), sample, ctx))

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """The one JSON object of a text with prose around it."""
        return json_block(answer)

    def measure(self, value: Grounded, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """See the module; a span without length, or one that ends before it starts, has IoP and IoU 0."""
        truths, first = true_spans(sample), value.spans[0]
        right = value.letter == sample.answer["choice"]
        iop, iou = (max(rule(first, truth) for truth in truths) for rule in (span_iop, span_iou))
        values = (
            right,
            iop,
            iop >= 0.3,
            iop >= 0.5,
            iou,
            iou >= 0.3,
            iou >= 0.5,
            right and iop >= 0.5,
        )
        return dict(zip(self.metric_names, map(float, values), strict=True))

    def describe(
        self, value: Grounded | None, sample: Sample, ctx: RewardContext
    ) -> Mapping[str, Any]:
        """pred_text and gold_text (letter and option), pred_spans and gold_spans in seconds, and the duration."""
        options = sample_options(sample)

        def show(letter: str) -> str:
            return f"{letter}. {options[LETTERS.index(letter)]}" if letter else ""

        shown = {} if value is None else {"pred_text": show(value.letter)}
        return {
            **shown,
            "gold_text": show(sample.answer["choice"]),
            "pred_spans": [list(s) for s in value.spans] if value else [],
            "gold_spans": [list(s) for s in true_spans(sample)],
            "duration": duration_of(sample, ctx),
        }

    def _spell(
        self, letter: str, spans: Sequence[Sequence[float]], sample: Sample, ctx: RewardContext
    ) -> str:
        times = self.times.write(spans, duration_of(sample, ctx))
        if self.settings["spelling"] == "glue":
            return f"{letter}</answer><glue>{'[' + times[1:-1].replace('[', '(').replace(']', ')') + ']'}</glue>"
        return f'{{"answer": "{letter}", "time": {times}}}'

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        """As the base; the glue stands behind the answer's block."""
        return super().gold(sample, ctx).replace("</glue></answer>", "</glue>")

    def wrong(self, sample: Sample, ctx: RewardContext) -> str:
        """As the base; the glue stands behind the answer's block."""
        return super().wrong(sample, ctx).replace("</glue></answer>", "</glue>")

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The right letter and the true spans; where one span is asked for and there are several, the longest."""
        spans = true_spans(sample)
        if not self.times.many:
            spans = [max(spans, key=lambda span: span[1] - span[0])]
        return self._spell(sample.answer["choice"], spans, sample, ctx)

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The next letter, and a span that misses every true one."""
        letter = LETTERS[(LETTERS.index(sample.answer["choice"]) + 1) % len(sample_options(sample))]
        return self._spell(
            letter, [beside_spans(true_spans(sample), duration_of(sample, ctx))], sample, ctx
        )

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        """NExT-GQA's numbers and its two prediction files."""
        from mmrl.tasks.metrics.nextgqa import nextgqa_benchmark

        return nextgqa_benchmark(pairs, folder)

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """Acc, mIoP, IoP@0.3, IoP@0.5, mIoU, IoU@0.3, IoU@0.5, Acc@GQA, parse_failure_rate, truncated_rate: over all rows."""
        if not rows:
            return {}
        names = ("Acc", "mIoP", "IoP@0.3", "IoP@0.5", "mIoU", "IoU@0.3", "IoU@0.5", "Acc@GQA")
        means = {
            name: math.fsum(row.metrics.get(key, 0.0) for row in rows) / len(rows)
            for name, key in zip(names, self.metric_names, strict=True)
        }
        return {**means, **super().summarize(rows)}

    def example_data(self, folder: str) -> str:
        """8 clips (folders of frames) in which a square appears, asked for its colour; returns their data.jsonl."""
        from mmrl.tasks.examples import write_rows
        from mmrl.tasks.frame_clips import COLORS, draw_square_clip

        rows, colors = [], list(COLORS)
        for index in range(8):
            start, right = 1.0 + 0.5 * (index % 4), index % len(colors)
            clip = draw_square_clip(
                Path(folder) / f"clips/{index:03d}", colors[right], (start, start + 2.5), 7.0
            )
            rows.append(
                {
                    "id": f"{index:03d}",
                    "video": f"clips/{index:03d}",
                    "question": "Which colour has the square?",
                    "answer": {"choice": LETTERS[right], "spans": [list(clip.span)]},
                    "params": {**clip.facts, "options": colors},
                }
            )
        return write_rows(folder, rows)
