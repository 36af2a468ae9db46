"""Temporal grounding: when does it happen? One span of seconds, or several, scored by temporal IoU.

A row's answer is [[start, end], ...] in seconds from the beginning of the shown part; params.duration is its length:

    {"id": "7", "video": "7.mp4", "question": "a person opens the door", "answer": [[2.5, 7]], "params": {"duration": 30.2}}

Metrics per sample: iou (merged unions), r1@0.3 / 0.5 / 0.7 (the first predicted span against its best true one, >=), of all
samples R1@0.3 / 0.5 / 0.7 and mIoU; a failure counts as 0, a span that ends before it starts too, and nothing is clipped.
`benchmark` writes official files, see mmrl.tasks.metrics.temporal and mmrl.tasks.metrics.qvhighlights. Timestamps anchored
reasoning is the reward part `anchors` (mmrl.rewards.anchored):

    answer_format: think, weights: {accuracy: 0.8, format: 0.1, anchors: 0.1}, anchors: {least: 2, most: 4}

    mmrl tasks check temporal_grounding
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError
from mmrl.registry import register
from mmrl.rewards.anchored import anchored_value, check_anchor_numbers, read_anchors
from mmrl.rewards.format import format_reward, wrap_answer
from mmrl.rewards.lengths import FormPart
from mmrl.rewards.parsing import load_json
from mmrl.rewards.reading.times import spans_in
from mmrl.rewards.router import Part, PartFactory
from mmrl.rewards.temporal import make_span_reward, span_iou, union_iou
from mmrl.rewards.text import check_names
from mmrl.rewards.times import Span, parse_spans
from mmrl.task import Template
from mmrl.tasks.base import EXPLAINED, AnswerError, AnswerTask, Prediction
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

__all__ = ["LEVELS", "TemporalGrounding", "anchors_part", "named_parts", "structure_part"]

LEVELS = (0.3, 0.5, 0.7)
_ANCHORS_ASK = (
    "While you think, write each estimate as <timestamp>start to end</timestamp>: at least {least}, at most {most}, "
    "each nearer to the truth than the one before. "
)


def _accuracy_part(mode: str, clip: bool = False, **params: Any) -> Part:
    reward, both = make_span_reward(mode, **params), clip_pair(clip)
    return lambda predicted, sample, ctx: reward(*both(predicted.value, sample, ctx))


def anchors_part(times: TimeFormat, least: int = 2, most: int = 4, early: float = 0.5) -> Part:
    """Timestamps anchored reasoning, see mmrl.rewards.anchored; IoUs are those of merged unions, times are read as in answers and
    never clipped."""
    check_anchor_numbers(least, most, early)

    def part(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
        anchors = read_anchors(predicted.text, most)
        if anchors is None or not least <= len(anchors) <= most:
            return 0.0
        try:
            ious = [
                union_iou(times.seconds(anchor, sample, ctx), true_spans(sample))
                for anchor in anchors
            ]
        except AnswerError:
            return 0.0
        return anchored_value(ious, union_iou(predicted.value, true_spans(sample)), early)

    return part


def named_parts(settings: Mapping[str, Any]) -> set[str]:
    """Parts that a weight names, in the task's settings or those of a source."""
    layers = [
        settings,
        *(layer for layer in settings["per_source"].values() if isinstance(layer, Mapping)),
    ]
    return {
        name
        for layer in layers
        if isinstance(layer.get("weights"), Mapping)
        for name in layer["weights"]
    }


def structure_part(
    answer_format: str, share: Callable[[Any, Prediction, Sample], float]
) -> PartFactory:
    """Factory of OneThinker's structure reward in [0, 0.5]: `share(JSON value, prediction, sample)` of it, nothing where the
    envelope is wrong or the answer is no JSON object."""

    def rule(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
        try:
            value = load_json(predicted.answer)
        except (ValueError, RecursionError):
            return 0.0
        if not isinstance(value, dict) or not format_reward(predicted.text, answer_format):
            return 0.0
        return 0.5 * share(value, predicted, sample)

    def factory() -> Part:
        return FormPart(rule, 0.0, 0.5)

    return factory


def _has_time(value: Any, predicted: Prediction, sample: Sample) -> float:
    time = value.get("time")
    return float(
        isinstance(time, list) and len(time) == 2 and all(type(v) in (int, float) for v in time)
    )


@register("temporal_grounding")
class TemporalGrounding(AnswerTask):
    """Say when it happens. Beside the parameters of AnswerTask:

    mode        union (default), matched or near, see mmrl.rewards.temporal; `accuracy: {clip: true}` clips both sides to the shown
                part before the reward (default false: an end behind the video's end costs), metrics see what was said
    spelling    list (default), to, json, start_end or clock: what is asked for, see mmrl.tasks.spans
    time_frame  seconds (default) or rel1 (shares of the duration): what numbers mean
    spans       many (default), or one: several spans are a failure and rows with several are refused
    anchors     {least: 2, most: 4, early: 0.5} for the part `anchors`, which needs a weight and answer_format think
    """

    headline: ClassVar[str] = "iou"
    ask: ClassVar[str] = (
        'When does this happen in the video: "{question}"? The video is {duration} seconds long. '
        "Give the times {times}."
    )
    shape: ClassVar[str] = "[[start, end], ...]"
    default_mode: ClassVar[str] = "union"
    own_params: ClassVar[Mapping[str, Any]] = {
        "spelling": "list",
        "time_frame": "seconds",
        "spans": "many",
        "anchors": {},
    }
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "easyvideo_r1": {
            "request": EXPLAINED,
            "spelling": "json",
            "spans": "one",
            "answers": "native",
            "format_rule": "easyvideo_r1",
            "weights": {"accuracy": 0.9, "format": 0.1},
        },
        "temporal_r1": {
            "spelling": "start_end",
            "spans": "one",
            "answer_format": "think",
            "format_rule": "temporal_r1",
            "weights": {"accuracy": 0.5, "format": 0.5},
        },
        "videochat_r1": {
            "spelling": "to",
            "spans": "one",
            "answer_format": "think",
            "format_rule": "tags",
            "weights": {"accuracy": 1.0, "format": 1.0},
            "normalise": False,
        },
        "onethinker": {
            "spelling": "json",
            "spans": "one",
            "answer_format": "think",
            "answers": "native",
            "format_rule": "tags",
            "normalise": False,
            "weights": {"accuracy": 0.9, "format": 0.1, "structure": 1.0},
        },
    }
    metric_names: ClassVar[tuple[str, ...]] = (
        "iou",
        *(f"r1@{level:g}" for level in LEVELS),
        "correct",
    )

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        settings = self.settings
        if settings["prompt"] is None:
            ask = f"{self.ask} {_ANCHORS_ASK.strip()}" if "anchors" in self.part_names else self.ask
            self.prompt = f"{ask} {self.request}".replace("{shape}", self.times.shape)

    @functools.cached_property
    def times(self) -> TimeFormat:
        """How answers spell times."""
        return TimeFormat(
            self.settings["spelling"],
            self.settings["time_frame"],
            self.settings["spans"],
            "temporal_grounding",
        )

    @functools.cached_property
    def _anchors(self) -> dict[str, Any]:
        given = self.settings["anchors"]
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"expected temporal_grounding.anchors as a mapping, found {given!r}; for example {{'least': 2}}"
            )
        factory = functools.partial(anchors_part, self.times)
        check_names("part 'anchors'", factory, given)
        return {"least": 2, "most": 4, "early": 0.5, **given}

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format; anchors and structure where a weight names them."""
        self.times  # noqa: B018 - refuses unknown names before anything else
        parts: dict[str, PartFactory] = {
            "accuracy": _accuracy_part,
            "format": self.format_factory(),
        }
        named = named_parts(self.settings)
        if "anchors" in named:
            if self.answer_format != "think":
                raise ConfigError(
                    "expected answer_format think with the part 'anchors', which stands in the thoughts, found "
                    f"{self.answer_format!r}; set answer_format: think"
                )
            parts["anchors"] = functools.partial(anchors_part, self.times, **self._anchors)
        elif self.settings["anchors"]:
            raise ConfigError(
                "settings for part 'anchors', which has no weight; give it a weight first, for example "
                "weights: {accuracy: 0.8, format: 0.1, anchors: 0.1}"
            )
        if "structure" in named:
            parts["structure"] = structure_part(self.answer_format, _has_time)
        return parts

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> list[list[float]]:
        """[[start, end], ...] in seconds as the row has them, see mmrl.tasks.spans.check_spans."""
        from mmrl.tasks.readers.common import RowError

        spans = check_spans(value, params)
        if len(spans) > 1 and not self.times.many:
            raise RowError(
                "one span, as spans: one says",
                f"{len(spans)}",
                "set spans: many, or leave the row out",
            )
        return spans

    def fill_prompt(self, prompt: str, sample: Sample, template: Template) -> str:
        """As the base, with {duration}, {times} and the numbers of anchors."""
        words = {
            "{duration}": spell_seconds(need_duration(sample), 2),
            "{times}": self.times.words,
            **{f"{{{name}}}": str(value) for name, value in self._anchors.items()},
        }
        for name, text in words.items():
            prompt = prompt.replace(name, text)
        return super().fill_prompt(prompt, sample, template)

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> list[Span]:
        """Spans in seconds as they were written. Reasons: those of mmrl.rewards.times and mmrl.tasks.spans.TimeFormat."""
        return self.times.seconds(parse_spans(answer), sample, ctx)

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """The spans of a sentence, see mmrl.rewards.reading.times."""
        return spans_in(answer)

    def measure(self, value: list[Span], sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """iou of the unions, r1@0.3 .. 0.7 of the first span, correct (iou >= 0.5)."""
        truths = true_spans(sample)
        iou, first = union_iou(value, truths), max(span_iou(value[0], truth) for truth in truths)
        return dict(
            zip(
                self.metric_names,
                (iou, *(float(first >= level) for level in LEVELS), float(iou >= 0.5)),
                strict=True,
            )
        )

    def describe(
        self, value: list[Span] | None, sample: Sample, ctx: RewardContext
    ) -> Mapping[str, Any]:
        """pred_spans and gold_spans in seconds, and the duration."""
        return {
            "pred_spans": [list(span) for span in value or ()],
            "gold_spans": [list(span) for span in true_spans(sample)],
            "duration": duration_of(sample, ctx),
        }

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The true spans in the spelling asked for."""
        return self.times.write(true_spans(sample), duration_of(sample, ctx))

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """A span that misses every true one; where even that earns something (near), one without length."""
        duration = duration_of(sample, ctx)
        span = beside_spans(true_spans(sample), duration)
        text = self.times.write([span], duration)
        earned = self.score(sample, wrap_answer(text, self.answer_format), ctx).parts["accuracy"]
        return self.times.write([(0.0, 0.0)], duration) if earned > 0 else text

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        """As the base; with the part `anchors` the thoughts hold as many exact anchors as are asked for."""
        if "anchors" not in self.part_names:
            return super().gold(sample, ctx)
        text = self.gold_answer(sample, ctx)
        anchor = f"<timestamp>{text}</timestamp>"
        return wrap_answer(
            text,
            self.answer_format,
            thought=f"I look for it: {', '.join([anchor] * self._anchors['least'])}.",
        )

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        """QVHighlights' numbers and submission for samples with params.qid, else R1 and mIoU with prediction files."""
        from mmrl.tasks.metrics.qvhighlights import qvhighlights_benchmark
        from mmrl.tasks.metrics.temporal import temporal_benchmark

        groups = {
            "qvhighlights": [p for p in pairs if "qid" in p[0].params],
            "temporal": [p for p in pairs if "qid" not in p[0].params],
        }
        scorers = {"qvhighlights": qvhighlights_benchmark, "temporal": temporal_benchmark}
        numbers = {name: scorers[name](group, folder) for name, group in groups.items() if group}
        if len(numbers) <= 1:
            return next(iter(numbers.values()), {})
        return {
            f"{name}/{key}": value
            for name, group in numbers.items()
            for key, value in group.items()
        }

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """R1@0.3 / 0.5 / 0.7, mIoU, parse_failure_rate, truncated_rate: shares of all rows."""
        if not rows:
            return {}
        shares = {
            f"R1@{level:g}": math.fsum(row.metrics.get(f"r1@{level:g}", 0.0) for row in rows)
            / len(rows)
            for level in LEVELS
        }
        return {
            **shares,
            "mIoU": math.fsum(row.metrics.get("iou", 0.0) for row in rows) / len(rows),
            **super().summarize(rows),
        }

    def example_data(self, folder: str) -> str:
        """12 clips (folders of frames) in which a square appears and disappears; returns their data.jsonl."""
        from mmrl.tasks.examples import write_rows
        from mmrl.tasks.frame_clips import COLORS, draw_square_clip

        rows = []
        for index in range(12):
            color = list(COLORS)[index % len(COLORS)]
            start, length = 1.0 + 0.5 * (index % 5), 1.5 + 0.5 * (index % 3)
            clip = draw_square_clip(
                Path(folder) / f"clips/{index:03d}", color, (start, start + length), 8.0
            )
            rows.append(
                {
                    "id": f"{index:03d}",
                    "video": f"clips/{index:03d}",
                    "question": f"a {color} square is visible",
                    "answer": [list(clip.span)],
                    "params": clip.facts,
                }
            )
        return write_rows(folder, rows)
