"""Grounding: one phrase, one box. The prompt asks for a box in the template's frame; IoU in original pixels scores it.

Reads mmrl's own JSON Lines, REFER releases (RefCOCO family), VLM-R1 and EasyR1 files (tasks.readers). The metric is
Acc@0.5 = mean(IoU >= 0.5) over all samples, a parse failure counts as 0 (REFER, no +1 in the areas).

    python -m tasks.scenes runs/scenes --count 200 --seed 0 && mmrl tasks check grounding --data runs/scenes/data.jsonl
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from mmrl.coords import CoordFrame, from_orig, to_orig
from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.registry import register
from mmrl.task import Task, Template
from mmrl.types import ImageSize, RewardContext, Sample, Score, StopReason
from rewards.dynamic_iou import make_iou_reward
from rewards.format import check_answer_format, format_reward, wrap_answer
from rewards.iou import box_giou, box_iou, outside_share
from rewards.parsing import Box, extract_answer, parse_boxes
from rewards.router import Part, Rubric

__all__ = ["FRAME_WORDS", "Grounding", "PROMPTS", "Prediction", "format_box"]

FRAME_WORDS: Mapping[CoordFrame, str] = {
    CoordFrame.ABS_ORIG: "in pixels of the image",
    CoordFrame.ABS_RESIZED: "in pixels of the image",
    CoordFrame.REL1000: "scaled to 0-1000 of the image width and height",
    CoordFrame.REL1: "as fractions from 0 to 1 of the image width and height",
}
PROMPTS = {
    "answer": 'Find "{question}" in the image and give its bounding box, coordinates {frame}. '
              "Reply with nothing but <answer>[x1, y1, x2, y2]</answer>.",
    "think": 'Find "{question}" in the image and give its bounding box, coordinates {frame}. First think inside '
             "<think> </think>, then reply with <answer>[x1, y1, x2, y2]</answer>.",
    "bare": 'Find "{question}" in the image and give its bounding box, coordinates {frame}. '
            "Reply with nothing but [x1, y1, x2, y2].",
}
_DEFAULTS: dict[str, Any] = {
    "prompt": None, "answer_format": "answer", "mode": "iou", "iou": {}, "reachable": True,
    "weights": {"accuracy": 0.9, "format": 0.1}, "per_source": {}, "reader": {},
}
_LEVELS = (0.3, 0.5, 0.7, 0.75)
_WITH_THRESHOLD = ("static", "dynamic", "average", "smooth")
_METRICS = ("iou", "giou", *(f"acc@{level:g}" for level in _LEVELS), "outside_image")
_CUT_SHORT = ("empty", "no_answer", "unclosed_answer", "unclosed_think")


def _ticks(box: Sequence[float], frame: CoordFrame) -> list[int]:
    """A box given in `frame` on the grid of its text: units, or thousandths for rel1; at least one tick wide, high."""
    per_unit = 1000 if frame is CoordFrame.REL1 else 1
    x1, y1, x2, y2 = (math.floor(value * per_unit + 0.5) for value in box)
    return [x1, y1, max(x2, x1 + 1), max(y2, y1 + 1)]


def format_box(box: Sequence[float], frame: CoordFrame) -> str:
    """The text of a box given in `frame`: integers, or 3 decimals for rel1, never rounded to zero width or height."""
    ticks = _ticks(box, frame)
    if frame is CoordFrame.REL1:
        return "[" + ", ".join(f"{tick / 1000:.3f}" for tick in ticks) + "]"
    return "[" + ", ".join(str(tick) for tick in ticks) + "]"


def _size(sample: Sample, ctx: RewardContext) -> ImageSize:
    """Sizes of the picture the box belongs to; raises DataError when the frame needs them and they are unknown."""
    index = sample.params.get("image_index", 0)
    if index < len(ctx.images):
        return ctx.images[index]
    width, height = sample.params.get("width"), sample.params.get("height")
    if ctx.frame is CoordFrame.ABS_RESIZED or not width or not height:
        raise DataError(f"expected ctx.images with the sizes of picture {index} of sample {sample.id!r} to read frame "
                        f"{ctx.frame.value}, found {len(ctx.images)} sizes; pass them")
    return ImageSize((width, height), (width, height))


class Prediction(NamedTuple):
    """What the reward parts see: the box in pixels of the original picture, and the whole text."""

    box: Box
    text: str


def _accuracy_part(mode: str, reachable: bool = True, **params: Any) -> Part:
    """IoU reward in original pixels; with `reachable` no threshold exceeds the IoU of the rounded truth."""
    reward = make_iou_reward(mode, **params)

    def accuracy(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
        ceiling = 1.0
        if reachable and mode in _WITH_THRESHOLD:
            ceiling = box_iou(_rounded_truth(sample, ctx), sample.answer)
        return reward(predicted.box, sample.answer, ctx.progress, ceiling)

    return accuracy


def _format_part(answer_format: str) -> Part:
    """1 when the whole text is the envelope that was asked for; only reached when exactly one box was parsed."""
    check_answer_format(answer_format)
    return lambda predicted, sample, ctx: format_reward(predicted.text, answer_format)


def _rounded_truth(sample: Sample, ctx: RewardContext) -> Box:
    """The best box an answer in this frame can spell, in pixels of the original picture."""
    size = _size(sample, ctx)
    ticks = _ticks(from_orig(sample.answer, ctx.frame, size.resized_wh, size.orig_wh), ctx.frame)
    per_unit = 1000 if ctx.frame is CoordFrame.REL1 else 1
    return _to_box(to_orig([tick / per_unit for tick in ticks], ctx.frame, size.resized_wh, size.orig_wh))


def _measure(box: Box, true: Sequence[float], orig_wh: tuple[int, int]) -> dict[str, float]:
    iou = box_iou(box, true)
    values = (iou, box_giou(box, true), *(float(iou >= level) for level in _LEVELS), outside_share(box, *orig_wh))
    return dict(zip(_METRICS, values, strict=True))


def _to_box(values: Sequence[float]) -> Box:
    return values[0], values[1], values[2], values[3]


def _disjoint_box(box: Sequence[float], extent: tuple[float, float], unit: float) -> Box:
    """A box on the `unit` grid beside `box`: the widest free strip of the picture, or outside it if there is none."""
    (x1, y1, x2, y2), (width, height) = box, extent
    x1, y1, x2, y2 = (math.floor(x1 / unit) * unit, math.floor(y1 / unit) * unit,
                      math.ceil(x2 / unit) * unit, math.ceil(y2 / unit) * unit)
    strips: list[Box] = [(0, 0, x1, height), (x2, 0, width, height), (0, 0, width, y1), (0, y2, width, height)]
    best = max(strips, key=lambda s: min(s[2] - s[0], s[3] - s[1]))
    if min(best[2] - best[0], best[3] - best[1]) >= 2 * unit:
        return best
    return x2 + unit, y2 + unit, x2 + 11 * unit, y2 + 11 * unit


@register("grounding")
class Grounding(Task):
    """Find one object. Parameters, all optional:

    prompt         text with {question} and {frame}; default for Qwen-VL in PROMPTS, by answer_format
    answer_format  'answer' (default), 'think' or 'bare'
    mode, iou      IoU mode (iou, giou, static, dynamic, average, smooth) and its parameters, see rewards.dynamic_iou
    reachable      thresholds never exceed the IoU of the truth rounded to the answer's grid (default true)
    weights        {accuracy: 0.9, format: 0.1}, normalised to sum 1
    per_source     {source: {weights: {...}, accuracy: {mode: ..., ...}}}; per sample the same in params.reward
    reader         options of tasks.readers.read_any (image_root, split, frame, on_error, ...)
    """

    headline: ClassVar[str] = "iou"
    part_names: ClassVar[tuple[str, ...]] = ("accuracy", "format")

    def __init__(self, **params: Any) -> None:
        for key in params:
            if key not in _DEFAULTS:
                raise ConfigError(f"unknown parameter {key!r} of task grounding; expected {', '.join(_DEFAULTS)}."
                                  f"{did_you_mean(key, _DEFAULTS)}")
        super().__init__(**params)
        settings = {**_DEFAULTS, **params}
        for key in ("iou", "weights", "per_source", "reader"):
            if not isinstance(settings[key], Mapping):
                raise ConfigError(f"expected grounding.{key} as a mapping, found {settings[key]!r}")
        self.answer_format = check_answer_format(settings["answer_format"])
        self.prompt: str = PROMPTS[self.answer_format] if settings["prompt"] is None else settings["prompt"]
        if not isinstance(self.prompt, str) or "{question}" not in self.prompt:
            raise ConfigError(f"expected a prompt that contains {{question}}, found {self.prompt!r}; "
                              "for example 'Find {question}.'")
        self.reader_options = dict(settings["reader"])
        self.rejected: list[Any] = []
        self.rubric = Rubric(
            {"accuracy": _accuracy_part, "format": _format_part}, settings["weights"],
            {"accuracy": {**settings["iou"], "mode": settings["mode"], "reachable": bool(settings["reachable"])},
             "format": {"answer_format": self.answer_format}},
            settings["per_source"])

    def load(self, path: str) -> Iterable[Sample]:
        """Samples of a data file or folder. With on_error 'record', unusable rows are left in `self.rejected`.

        `reader.on_error` wins over the run's `self.on_error`.
        """
        from tasks.readers import read_any

        readout = read_any(path, **{"on_error": self.on_error, **self.reader_options})
        for sample in readout:
            try:
                self.rubric.check(sample)
            except ConfigError as err:
                raise DataError(f"{path}: sample {sample.id!r}: params.reward: {err}") from err
        self.rejected = readout.rejected
        return readout.samples

    def example_data(self, folder: str) -> str:
        """24 generated scenes of every difficulty; returns their data.jsonl."""
        from tasks.scenes import make_scenes

        return make_scenes(folder, count=24, seed=7, difficulty={0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0})

    def messages(self, sample: Sample, template: Template) -> list[dict[str, Any]]:
        """[system, if the template has one], then the user's turn: pictures first, then the text."""
        text = self.prompt.replace("{frame}", FRAME_WORDS[CoordFrame(template.frame)])
        text = text.replace("{question}", sample.question)  # last, so braces in the question stay as they are
        content: list[dict[str, Any]] = [{"type": "image"} for _ in sample.images]
        user = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
        system = {"role": "system", "content": [{"type": "text", "text": template.system}]}
        return [system, user] if template.system else [user]

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """Weighted accuracy and format; metrics iou, giou (scaled to [0, 1]), acc@0.3 .. acc@0.75, outside_image.

        Exactly one box must parse. Reasons of failure: those of rewards.parsing, several_boxes, truncated (the length
        limit cut the text before its answer was closed), reward_error (sizes or truth unusable).
        """
        extraction = extract_answer(text, self.answer_format)
        reason = extraction.reason
        if reason in _CUT_SHORT and ctx.stop is StopReason.LENGTH:
            reason = "truncated"
        if extraction.answer is None:
            return self._failure(sample, reason or "no_answer")
        parsed = parse_boxes(extraction.answer)
        if parsed.reason and self.answer_format == "bare" and ctx.stop is StopReason.LENGTH:
            return self._failure(sample, "truncated")
        if parsed.reason or len(parsed.boxes) != 1:
            return self._failure(sample, parsed.reason or "several_boxes")
        try:
            size = _size(sample, ctx)
            box = _to_box(to_orig(parsed.boxes[0], ctx.frame, size.resized_wh, size.orig_wh))
            metrics = _measure(box, sample.answer, size.orig_wh)
        except (ValueError, TypeError, ArithmeticError) as err:
            return self._failure(sample, f"reward_error: {err}")
        detail = {"pred_boxes": [list(box)], "gold_boxes": [list(sample.answer)], "frame": CoordFrame.ABS_ORIG.value}
        return self.rubric.score(Prediction(box, text), sample, ctx, metrics=metrics, detail=detail)

    def _failure(self, sample: Sample, reason: str) -> Score:
        gold = [list(sample.answer)] if isinstance(sample.answer, (list, tuple)) else []
        detail = {"pred_boxes": [], "gold_boxes": gold, "frame": CoordFrame.ABS_ORIG.value}
        return self.rubric.failure(reason, sample, metrics=dict.fromkeys(_METRICS, 0.0), detail=detail)

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        """The truth in ctx.frame: integers, or 3 decimals for rel1, in the envelope of `answer_format`."""
        size = _size(sample, ctx)
        box = from_orig(sample.answer, ctx.frame, size.resized_wh, size.orig_wh)
        return wrap_answer(format_box(box, ctx.frame), self.answer_format)

    def wrong(self, sample: Sample, ctx: RewardContext) -> str:
        """A well-formed box beside the object; where even that earns something (giou), a box without area."""
        size = _size(sample, ctx)
        box = from_orig(sample.answer, ctx.frame, size.resized_wh, size.orig_wh)
        unit = 0.001 if ctx.frame is CoordFrame.REL1 else 1.0
        beside = _disjoint_box(box, ctx.frame.extent(size.resized_wh, size.orig_wh), unit)
        text = wrap_answer(format_box(beside, ctx.frame), self.answer_format)
        if self.score(sample, text, ctx).parts["accuracy"] > 0:
            return wrap_answer("[0, 0, 0, 0]", self.answer_format)
        return text

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """Acc@0.3/0.5/0.7/0.75 (IoU >= level), mIoU, parse_failure_rate, truncated_rate: shares of all rows."""
        if not rows:
            return {}
        ious = [row.metrics.get("iou", 0.0) for row in rows]
        summary = {f"Acc@{level:g}": sum(iou >= level for iou in ious) / len(rows) for level in _LEVELS}
        summary["mIoU"] = math.fsum(ious) / len(rows)
        summary["parse_failure_rate"] = sum(not row.parsed for row in rows) / len(rows)
        summary["truncated_rate"] = sum(row.reason == "truncated" for row in rows) / len(rows)
        return summary
