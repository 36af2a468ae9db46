"""Grounding: one phrase, one box. The prompt asks for a box in the template's frame; IoU in original pixels scores it.

Reads mmrl's own JSON Lines, REFER releases (RefCOCO family), VLM-R1 and EasyR1 files (tasks.readers). The metric is
Acc@0.5 = mean(IoU >= 0.5) over all samples, a parse failure counts as 0 (REFER, no +1 in the areas).

    python -m tasks.scenes runs/scenes --count 200 --seed 0 && mmrl tasks check grounding --data runs/scenes/data.jsonl
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

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

__all__ = ["FRAME_WORDS", "Grounding", "PROMPTS", "format_box"]

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


def format_box(box: Sequence[float], frame: CoordFrame) -> str:
    """The text of a box given in `frame`: integers, or 3 decimals for rel1, never rounded to zero width or height."""
    unit = 0.001 if frame is CoordFrame.REL1 else 1.0
    ticks = [math.floor(value / unit + 0.5) for value in box]
    ticks[2:] = [max(ticks[2], ticks[0] + 1), max(ticks[3], ticks[1] + 1)]
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


def _accuracy_part(mode: str, reachable: bool = True, **params: Any) -> Part:
    """IoU reward of a predicted box in original pixels; with `reachable` no threshold exceeds the rounded truth's IoU."""
    reward = make_iou_reward(mode, **params)

    def accuracy(predicted: Box, sample: Sample, ctx: RewardContext) -> float:
        ceiling = 1.0
        if reachable and ctx.frame is not CoordFrame.ABS_ORIG and mode in ("static", "dynamic", "average", "smooth"):
            ceiling = box_iou(_rounded_truth(sample, ctx), sample.answer)
        return reward(predicted, sample.answer, ctx.progress, ceiling)

    return accuracy


def _rounded_truth(sample: Sample, ctx: RewardContext) -> Box:
    size = _size(sample, ctx)
    text = format_box(from_orig(sample.answer, ctx.frame, size.resized_wh, size.orig_wh), ctx.frame)
    return _to_box(to_orig(parse_boxes(text).boxes[0], ctx.frame, size.resized_wh, size.orig_wh))


def _to_box(values: Sequence[float]) -> Box:
    return values[0], values[1], values[2], values[3]


def _disjoint_box(box: Sequence[float], extent: tuple[float, float], unit: float) -> Box:
    """A box on the `unit` grid beside `box`, in the widest free strip of the picture, or outside it if there is none."""
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
        self._mode: str = settings["mode"]
        self.rubric = Rubric(
            {"accuracy": _accuracy_part, "format": self._format_part}, settings["weights"],
            {"accuracy": {"mode": self._mode, "reachable": bool(settings["reachable"]), **settings["iou"]}},
            settings["per_source"])

    def _format_part(self) -> Part:
        # the prediction of the format part is the text, which `score` passes beside the box
        return lambda predicted, sample, ctx: predicted.format

    def load(self, path: str) -> Iterable[Sample]:
        """Samples of a data file or folder; rejected rows (reader.on_error = 'record') are left in `self.rejected`."""
        from tasks.readers import read_any

        readout = read_any(path, **self.reader_options)
        for sample in readout:
            try:
                self.rubric.check(sample)
            except ConfigError as err:
                raise DataError(f"{path}: sample {sample.id!r}: params.reward: {err}") from err
        self.rejected = readout.rejected
        return readout.samples

    def messages(self, sample: Sample, template: Template) -> list[dict[str, Any]]:
        """[system, if the template has one], then the user's turn: pictures first, then the text."""
        text = self.prompt.replace("{frame}", FRAME_WORDS[CoordFrame(template.frame)])
        text = text.replace("{question}", sample.question)  # last, so braces in the question stay as they are
        content: list[dict[str, Any]] = [{"type": "image"} for _ in sample.images]
        user = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
        system = {"role": "system", "content": [{"type": "text", "text": template.system}]}
        return [system, user] if template.system else [user]
