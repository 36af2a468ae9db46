"""Grounding: one phrase, one box. The prompt asks for a box in the template's frame; IoU in original pixels scores it.

Reads mmrl's own JSON Lines, REFER releases (RefCOCO family), VLM-R1 and EasyR1 files (mmrl.tasks.readers). The metric is
Acc@0.5 = mean(IoU >= 0.5) over all samples, a parse failure counts as 0 (REFER, no +1 in the areas). With several
pictures the box belongs to picture params.image_index (counted from 0).

    python -m mmrl.tasks.scenes runs/scenes --count 200 --seed 0 && mmrl tasks check grounding --data runs/scenes/data.jsonl
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, did_you_mean
from mmrl.registry import register
from mmrl.rewards.dynamic_iou import make_iou_reward
from mmrl.rewards.format import wrap_answer
from mmrl.rewards.iou import box_giou, box_iou, outside_share
from mmrl.rewards.parsing import Box, parse_boxes
from mmrl.rewards.reading.places import one_box
from mmrl.rewards.router import Part, PartFactory
from mmrl.tasks.base import (
    EXPLAINED,
    FRAME_WORDS,
    AnswerError,
    AnswerTask,
    Prediction,
    picture_size,
)
from mmrl.tasks.boxes import beside, box_to_orig, format_box, from_picture, grid_step, rounded_box
from mmrl.tasks.truths import of_sample
from mmrl.types import ImageSize, RewardContext, Sample, Score

__all__ = ["FRAME_WORDS", "Grounding", "SPELLINGS", "format_box"]

SPELLINGS: Mapping[str, str] = {
    "list": "[x1, y1, x2, y2]",
    "bbox_2d": '{"bbox_2d": [x1, y1, x2, y2]}',
    "boxes": '{"boxes": [x1, y1, x2, y2]}',
    "labelled": '[{"bbox_2d": [x1, y1, x2, y2], "label": "name"}]',
    "tokens": "<|object_ref_start|>name<|object_ref_end|><|box_start|>(x1,y1),(x2,y2)<|box_end|>",
}
"""How the prompt asks for the box; every spelling is read, whichever was asked for."""
_LEVELS = (0.3, 0.5, 0.7, 0.75)
_BINARY = ("static", "dynamic", "average")
_WITH_THRESHOLD = (*_BINARY, "smooth")


def _size(sample: Sample, ctx: RewardContext) -> ImageSize:
    return picture_size(sample, ctx, sample.params.get("image_index", 0))


@of_sample
def _ceiling(sample: Sample, frame: CoordFrame, size: ImageSize) -> float:
    """The best IoU that an answer on the grid of `frame` can have."""
    return box_iou(rounded_box(sample.answer, frame, size), sample.answer) - 1e-9  # the last bits


def _accuracy_part(
    mode: str, reachable: bool = True, completeness: float = 0.0, **params: Any
) -> Part:
    """IoU reward in original pixels; with `reachable` no threshold exceeds the IoU of the rounded truth.

    completeness c (for modes with thresholds that can be `binary`): (1 - c) * the reward + c where the threshold is reached,
    which is V-Triune's detection verifier for one box.
    """
    if (
        isinstance(completeness, bool)
        or not isinstance(completeness, (int, float))
        or not 0 <= completeness <= 1
    ):
        raise ConfigError(f"expected completeness to be a number in [0, 1], found {completeness!r}")
    if completeness and mode not in _BINARY:
        raise ConfigError(
            f"expected completeness with mode {', '.join(_BINARY)}, found mode {mode!r}; leave it out"
        )
    reward = make_iou_reward(mode, **params)
    reached = make_iou_reward(mode, **{**params, "binary": True}) if completeness else reward

    def accuracy(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
        ceiling = (
            _ceiling(sample, ctx.frame, _size(sample, ctx))
            if reachable and mode in _WITH_THRESHOLD
            else 1.0
        )
        if not completeness:
            return reward(predicted.value, sample.answer, ctx.progress, ceiling)
        iou, progress = box_iou(predicted.value, sample.answer), ctx.progress
        return (1 - completeness) * reward.of_iou(
            iou, progress, ceiling
        ) + completeness * reached.of_iou(iou, progress, ceiling)

    return accuracy


@register("grounding")
class Grounding(AnswerTask):
    """Find one object. Beside the parameters of AnswerTask:

    mode       iou (default), giou, static, dynamic, average or smooth; their parameters in `accuracy` (or `iou`), see
               mmrl.rewards.dynamic_iou; beside them completeness c for static, dynamic and average: (1 - c) * the reward + c
               where the IoU reaches the threshold
    reachable  thresholds never exceed the IoU of the truth rounded to the answer's grid (default true)
    spelling   how the prompt asks for the box: list (default), bbox_2d, boxes, labelled or tokens, see SPELLINGS
    """

    headline: ClassVar[str] = "iou"
    ask: ClassVar[str] = (
        'Find "{question}" in the image and give its bounding box, coordinates {frame}.'
    )
    shape: ClassVar[str] = "[x1, y1, x2, y2]"
    default_mode: ClassVar[str] = "iou"
    own_params: ClassVar[Mapping[str, Any]] = {"iou": {}, "reachable": True, "spelling": "list"}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # its detection verifier, which judges grounding as well: 0.7 * IoU + 0.3 * completeness
        "v_triune": {
            "mode": "dynamic",
            "accuracy": {"completeness": 0.3},
            "answer_format": "think_lines",
            "spelling": "labelled",
            "format_rule": "v_triune_boxes",
            "frame": "rel1000",
            "weights": {"accuracy": 1.0, "format": 0.1},
        },
        # PR1's grounding recipe: IoU^2 and the form of Qwen2-VL's special tokens, added up
        "perception_r1": {
            "mode": "iou",
            "accuracy": {"power": 2.0},
            "answer_format": "bare",
            "spelling": "tokens",
            "answers": "native",
            "format_rule": "perception_r1",
            "frame": "rel1000",
            "weights": {"accuracy": 1.0, "format": 1.0},
            "normalise": False,
        },
        "vlm_r1": {
            "mode": "iou",
            "answer_format": "think",
            "spelling": "bbox_2d",
            "format_rule": "vlm_r1_rec",
            "frame": "abs_resized",
            "weights": {"accuracy": 1.0, "format": 1.0},
            "normalise": False,
        },
        "easyvideo_r1": {
            "request": EXPLAINED,
            "mode": "iou",
            "spelling": "boxes",
            "answers": "native",
            "format_rule": "easyvideo_r1",
            "weights": {"accuracy": 0.9, "format": 0.1},
        },
    }
    metric_names: ClassVar[tuple[str, ...]] = (
        "iou",
        "giou",
        *(f"acc@{level:g}" for level in _LEVELS),
        "outside_image",
        "correct",
    )

    def __init__(self, **params: Any) -> None:
        iou = params.get("iou", {})
        if isinstance(iou, Mapping) and iou and "accuracy" not in params:
            params = {**params, "accuracy": dict(iou)}
        super().__init__(**params)
        spelling = self.settings["spelling"]
        if spelling not in SPELLINGS:
            raise ConfigError(
                f"unknown spelling {spelling!r} of grounding; expected {', '.join(SPELLINGS)}."
                f"{did_you_mean(str(spelling), SPELLINGS)}"
            )
        if self.settings["prompt"] is None:
            self.prompt = self.prompt.replace(self.shape, SPELLINGS[spelling])

    def _accuracy_settings(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            **settings["accuracy"],
            "mode": settings["mode"],
            "reachable": bool(settings["reachable"]),
        }

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format."""
        return {"accuracy": _accuracy_part, "format": self.format_factory()}

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> list[float]:
        """One box of the picture params.image_index."""
        from mmrl.tasks.readers.common import check_answer_box

        return check_answer_box(self.name, value, frame, sizes, params)

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> Box:
        """Exactly one box, in pixels of the original picture. Reasons: those of mmrl.rewards.parsing, several_boxes."""
        parsed = parse_boxes(answer)
        if parsed.reason or len(parsed.boxes) != 1:
            raise AnswerError(parsed.reason or "several_boxes")
        return box_to_orig(parsed.boxes[0], ctx.frame, _size(sample, ctx))

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """The one box of a released model, see mmrl.rewards.reading.places."""
        return one_box(answer)

    def measure(self, value: Box, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """iou, giou (scaled to [0, 1]), acc@0.3 .. acc@0.75, outside_image, correct (IoU >= 0.5)."""
        iou = box_iou(value, sample.answer)
        values = (
            iou,
            box_giou(value, sample.answer),
            *(float(iou >= level) for level in _LEVELS),
            outside_share(value, *_size(sample, ctx).orig_wh),
            float(iou >= 0.5),
        )
        return dict(zip(self.metric_names, values, strict=True))

    def describe(self, value: Box | None, sample: Sample, ctx: RewardContext) -> Mapping[str, Any]:
        """pred_boxes and gold_boxes in pixels of the original picture."""
        gold = [list(sample.answer)] if isinstance(sample.answer, (list, tuple)) else []
        return {
            "pred_boxes": [] if value is None else [list(value)],
            "gold_boxes": gold,
            "frame": CoordFrame.ABS_ORIG.value,
        }

    def example_data(self, folder: str) -> str:
        """24 generated scenes of every difficulty; returns their data.jsonl."""
        from mmrl.tasks.scenes import make_scenes

        return make_scenes(folder, count=24, seed=7, difficulty={0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0})

    def spell(self, numbers: str, name: str) -> str:
        """A box '[x1, y1, x2, y2]' in the spelling asked for; `name` is what it is called where that has a place."""
        spelling = self.settings["spelling"]
        if spelling == "tokens":
            x1, y1, x2, y2 = numbers.strip("[]").split(", ")
            name = " ".join(name.replace("<", " ").split())
            return f"<|object_ref_start|>{name}<|object_ref_end|><|box_start|>({x1},{y1}),({x2},{y2})<|box_end|>"
        if spelling == "labelled":
            return f'[{{"bbox_2d": {numbers}, "label": {json.dumps(name, ensure_ascii=False)}}}]'
        return numbers if spelling == "list" else f'{{"{spelling}": {numbers}}}'

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The truth in ctx.frame: integers, or 3 decimals for rel1."""
        return self.spell(
            format_box(from_picture(sample.answer, ctx.frame, _size(sample, ctx)), ctx.frame),
            sample.question,
        )

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """A well-formed box beside the object; where even that earns something (giou), a box without area."""
        size = _size(sample, ctx)
        box = from_picture(sample.answer, ctx.frame, size)
        numbers = format_box(
            beside(box, ctx.frame.extent(size.resized_wh, size.orig_wh), grid_step(ctx.frame)),
            ctx.frame,
        )
        text = self.spell(numbers, sample.question)
        earned = self.score(sample, wrap_answer(text, self.answer_format), ctx).parts["accuracy"]
        return self.spell("[0, 0, 0, 0]", sample.question) if earned > 0 else text

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """Acc@0.3/0.5/0.7/0.75 (IoU >= level), mIoU, parse_failure_rate, truncated_rate: shares of all rows."""
        if not rows:
            return {}
        ious = [row.metrics.get("iou", 0.0) for row in rows]
        summary = {
            f"Acc@{level:g}": sum(iou >= level for iou in ious) / len(rows) for level in _LEVELS
        }
        return {**summary, "mIoU": math.fsum(ious) / len(rows), **super().summarize(rows)}
