"""Counting: how many there are, as a number or as the points (or boxes) that were counted.

A row's answer is the number; params.points may hold where the objects are, in pixels of the original picture. The answer
text is a number in digits or words, or a list of points or boxes, whose length is the count. Exact match is the default
reward and metric; `close` = min / max is published beside it, and the mean absolute error in the summary. Where mode
'points' holds (for the task, a source or a sample), the prompt asks for the points (or for boxes, whose centres count), and a
row needs its own.

    mmrl tasks check counting --data my.jsonl
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mmrl.coords import CoordFrame, to_orig
from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.registry import register
from mmrl.rewards.counting import closeness, make_counting_reward, parse_count
from mmrl.rewards.format_rules import make_format_rule
from mmrl.rewards.objects import MAX_OBJECTS, parse_points
from mmrl.rewards.reading.numbers import none_of_them, one_number
from mmrl.rewards.reading.places import many_points
from mmrl.rewards.router import SAMPLE_KEY, Part, PartFactory, Rubric
from mmrl.task import Template
from mmrl.tasks.base import AnswerError, AnswerTask, Prediction, picture_size
from mmrl.tasks.boxes import format_point, from_picture, grid_step
from mmrl.types import ImageSize, RewardContext, Sample, Score

__all__ = ["SPELLINGS", "Counted", "Counting"]

Point = tuple[float, float]

SPELLINGS: Mapping[str, tuple[str, str]] = {
    "points": (
        "Point at every one of these in the image: {question}. Give one point each, coordinates {frame}.",
        "[[x, y], ...], or [] if there is none",
    ),
    "tokens": (
        "Output all the bounding boxes of the {question}, coordinates {frame}.",
        "<|object_ref_start|>name<|object_ref_end|><|box_start|>(x1,y1),(x2,y2)<|box_end|>, further boxes directly behind "
        "the first, or [] if there is none",
    ),
}
"""How mode 'points' asks: what for, and in which shape. Every spelling is read, whichever was asked for."""


class Counted(NamedTuple):
    """The count, and where the objects are (pixels of the original picture) when the answer was a list."""

    number: int
    points: tuple[Point, ...] | None


def _size(sample: Sample, ctx: RewardContext) -> ImageSize:
    return picture_size(sample, ctx, sample.params.get("image_index", 0))


def _thousandths(points: Sequence[Sequence[float]], size: ImageSize) -> list[tuple[float, ...]]:
    return [from_picture(point, CoordFrame.REL1000, size) for point in points]


def _accuracy_part(mode: str, form: str | None = None, **params: Any) -> Part:
    """A rule of mmrl.rewards.counting; points are compared in thousandths of the picture's sides.

    `form` is a rule of mmrl.rewards.format_rules that a text must keep to be paid at all.
    """
    reward = make_counting_reward(mode, **params)
    keeps = None if form is None else make_format_rule(form, "bare", "counting")

    def accuracy(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
        value: Counted = predicted.value
        if keeps is not None and keeps(predicted.text) < 1:
            return 0.0
        if mode != "points":
            return reward(value.number, sample.answer)
        size, true = _size(sample, ctx), sample.params.get("points")
        return reward(
            value.number,
            sample.answer,
            None if value.points is None else _thousandths(value.points, size),
            None if true is None else _thousandths(true, size),
        )

    return accuracy


def _box_tokens(
    name: str, points: Sequence[Sequence[float]], frame: CoordFrame, extent: tuple[float, float]
) -> str:
    """Points given in `frame` as a name and boxes around them in Qwen2-VL's special tokens: one step to each side, none at an
    edge, so that the centre is the point."""
    boxes, step, digits = [], grid_step(frame), 3 if frame is CoordFrame.REL1 else 0
    for point in points:
        centre = json.loads(format_point(point, frame))
        reach = [
            step if step <= value <= side - step else 0
            for value, side in zip(centre, extent, strict=True)
        ]
        low, high = (
            ",".join(f"{v + sign * r:.{digits}f}" for v, r in zip(centre, reach, strict=True))
            for sign in (-1, 1)
        )
        boxes.append(f"<|box_start|>({low}),({high})<|box_end|>")
    return (
        f"<|object_ref_start|>{' '.join(name.replace('<', ' ').split())}<|object_ref_end|>{''.join(boxes)}"
        if boxes
        else "[]"
    )


def _mode_of(settings: Mapping[str, Any], sample: Sample) -> str:
    """The mode that holds for a sample, layers as in mmrl.rewards.router."""
    mode = str(settings["mode"])
    for layer in (settings["per_source"].get(sample.source), sample.params.get(SAMPLE_KEY)):
        mode = str(((layer or {}).get("accuracy") or {}).get("mode", mode))
    return mode


class _PointsRubric(Rubric):
    """A rubric that also refuses samples without points where mode 'points' holds for them."""

    def __init__(self, rubric: Rubric, settings: Mapping[str, Any]) -> None:
        self.__dict__.update(rubric.__dict__)
        self._settings = settings

    def check(self, sample: Sample) -> None:
        """As Rubric; raises DataError for a sample whose points are missing."""
        super().check(sample)
        if _mode_of(self._settings, sample) == "points" and sample.params.get("points") is None:
            raise DataError(
                "expected params.points for mode 'points', found none; add [[x, y], ...] in pixels of the original "
                "picture, or choose mode 'exact' for this source or row"
            )


@register("counting")
class Counting(AnswerTask):
    """Count objects. Beside the parameters of AnswerTask:

    mode   exact (default), smooth, relative or points; their parameters in `accuracy`, see mmrl.rewards.counting.
           points needs params.points in the row, asks for the points themselves and pays the F1 of those that lie on an object
           (`accuracy: {rule: published}`: Perception-R1's formula, which pays for the right number of points anywhere; `form`: a
           rule of mmrl.rewards.format_rules without which nothing is paid, as there);
           like every parameter of the reward it may be set per source and per sample.
    spelling  how mode points asks: points (default), a list of them, or tokens, a box per object in Qwen2-VL's special tokens
           whose centre is the point
    """

    headline: ClassVar[str] = "correct"
    ask: ClassVar[str] = "How many {question} are in the image?"
    shape: ClassVar[str] = "the number"
    default_mode: ClassVar[str] = "exact"
    own_params: ClassVar[Mapping[str, Any]] = {"spelling": "points"}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # PR1's counting recipe: boxes are asked for and judged by their centres; the form is no part of the sum but its condition
        "perception_r1": {
            "mode": "points",
            "accuracy": {"rule": "published", "form": "perception_r1_counting"},
            "answer_format": "bare",
            "spelling": "tokens",
            "format_rule": "perception_r1_counting",
            "frame": "rel1000",
            "weights": {"accuracy": 1.0, "format": 0.0},
        },
    }
    metric_names: ClassVar[tuple[str, ...]] = ("correct", "close")

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        spelling = self.settings["spelling"]
        if spelling not in SPELLINGS:
            raise ConfigError(
                f"unknown spelling {spelling!r} of counting; expected {', '.join(SPELLINGS)}."
                f"{did_you_mean(str(spelling), SPELLINGS)}"
            )
        ask, shape = SPELLINGS[spelling]
        self._asks_for_points = f"{ask} {self.request}".replace("{shape}", shape)
        if self.settings["prompt"] is None and self.settings["mode"] == "points":
            self.prompt = self._asks_for_points

    def _build_rubric(self, settings: Mapping[str, Any]) -> Rubric:
        return _PointsRubric(super()._build_rubric(settings), settings)

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format."""
        return {"accuracy": _accuracy_part, "format": self.format_factory()}

    def fill_prompt(self, prompt: str, sample: Sample, template: Template) -> str:
        """As the base; without a prompt of the user's own, asks for what the sample's mode pays."""
        if self.settings["prompt"] is None:
            points = _mode_of(self.settings, sample) == "points"
            prompt = (
                self._asks_for_points
                if points
                else (f"{self.ask} {self.request}".replace("{shape}", self.shape))
            )
        return super().fill_prompt(prompt, sample, template)

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> int:
        """A number >= 0 with, if params.points are there, as many points inside the picture."""
        from mmrl.tasks.readers.common import RowError

        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        if type(whole) is not int or not 0 <= whole <= 1_000_000:
            raise RowError(
                "a whole number >= 0 as 'answer'",
                repr(value)[:80],
                "write how many there are, for example 3",
            )
        points = params.get("points")
        if points is not None:
            _check_points(points, whole, frame, sizes, params)
        return whole

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> Counted:
        """The count. Reasons: those of mmrl.rewards.counting.parse_count, not_only_a_number (words beside it), or those of
        mmrl.rewards.objects.parse_points for a list.

        Equal points count once, so that repeating one cannot fill up the number (mode 'points' has its own rule for that).
        """
        if "<point" in answer:  # tags of a released model, full of numbers: see `native`
            raise AnswerError("not_a_number")
        if not answer.startswith(("[", "{", "(", "<|", "```")):
            number = parse_count(answer)
            if number.count is None:
                raise AnswerError(number.reason or "not_a_number")
            if not number.alone:  # a sentence, see `native`
                raise AnswerError("not_only_a_number")
            return Counted(number.count, None)
        parsed = parse_points(answer)
        if parsed.reason:
            raise AnswerError(parsed.reason)
        size = _size(sample, ctx)
        points = [
            to_orig(point, ctx.frame, size.resized_wh, size.orig_wh) for point in parsed.points
        ]
        places = tuple((x, y) for x, y in points)
        return Counted(
            len(places) if _mode_of(self.settings, sample) == "points" else len(set(places)), places
        )

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """A sentence with one number or with `no`, or the points of a released model."""
        if none_of_them(answer):
            return "0"
        number = parse_count(answer)
        if number.count is not None and "<point" not in answer:
            return str(number.count)
        size = _size(sample, ctx)
        points = (
            many_points(answer, ctx.frame.extent(size.resized_wh, size.orig_wh))
            if answer[:200].count("<")
            else None
        )
        return points if points is not None else one_number(answer)

    def measure(self, value: Counted, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """correct (exact match) and close (min / max)."""
        return {
            "correct": float(value.number == sample.answer),
            "close": closeness(value.number, sample.answer),
        }

    def describe(
        self, value: Counted | None, sample: Sample, ctx: RewardContext
    ) -> Mapping[str, Any]:
        """Counts as numbers and texts, and points in pixels of the original picture."""
        detail: dict[str, Any] = {"gold_count": sample.answer, "gold_text": str(sample.answer)}
        if sample.params.get("points"):
            detail["gold_points"] = [list(point) for point in sample.params["points"]]
        if value is not None:
            detail |= {"pred_count": value.number, "pred_text": str(value.number)}
            if value.points is not None:
                detail["pred_points"] = [list(point) for point in value.points]
        return detail

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The number; in mode 'points' the true points in ctx.frame."""
        if _mode_of(self.settings, sample) != "points":
            return str(sample.answer)
        size = _size(sample, ctx)
        return self._spell(
            [from_picture(p, ctx.frame, size) for p in sample.params["points"]], sample, ctx
        )

    def _spell(self, points: Sequence[Sequence[float]], sample: Sample, ctx: RewardContext) -> str:
        """Points given in ctx.frame as the prompt asks for them."""
        if self.settings["spelling"] == "tokens":
            size = _size(sample, ctx)
            return _box_tokens(
                sample.question, points, ctx.frame, ctx.frame.extent(size.resized_wh, size.orig_wh)
            )
        return "[" + ", ".join(format_point(p, ctx.frame) for p in points) + "]"

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """0, or 1 where 0 is right: nothing is nearer than that in any mode."""
        wrong = 0 if sample.answer else 1
        if _mode_of(self.settings, sample) != "points":
            return str(wrong)
        return self._spell([(0, 0)] * wrong, sample, ctx)

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """MAE (a failure counts as the answer 0), MAE_parsed (over the answers that could be read), and the base's rates."""
        known = [
            (row.detail["gold_count"], row.detail.get("pred_count"))
            for row in rows
            if "gold_count" in row.detail
        ]
        errors = [abs(gold - (predicted or 0)) for gold, predicted in known]
        parsed = [abs(gold - predicted) for gold, predicted in known if predicted is not None]
        summary = {"MAE": math.fsum(errors) / len(errors)} if errors else {}
        if parsed:
            summary["MAE_parsed"] = math.fsum(parsed) / len(parsed)
        return {**summary, **super().summarize(rows)}

    def example_data(self, folder: str) -> str:
        """24 generated scenes that ask for shapes or colours, some of them absent; returns their file."""
        from mmrl.tasks.scenes import COLORS, SHAPES, make_scenes

        scenes = Path(make_scenes(folder, count=24, seed=13, difficulty={1: 1.0, 2: 1.0, 3: 1.0}))
        path, lines = scenes.with_name("counting.jsonl"), []
        for number, line in enumerate(scenes.read_text(encoding="utf-8").splitlines()):
            row = json.loads(line)
            key, names = ("shape", SHAPES) if number % 2 else ("color", tuple(COLORS))
            name = names[number // 2 % len(names)]
            boxes = [o["box"] for o in row["params"]["objects"] if o[key] == name]
            points = [[(b[0] + b[2]) / 2, (b[1] + b[3]) / 2] for b in boxes]
            lines.append(
                json.dumps(
                    {
                        "id": row["id"],
                        "image": row["image"],
                        "question": f"{name}s" if key == "shape" else f"{name} shapes",
                        "answer": len(points),
                        "source": "scenes-counting",
                        "params": {"points": points},
                    }
                )
                + "\n"
            )
        path.write_text("".join(lines), encoding="utf-8")
        return str(path)


def _check_points(
    points: Any,
    count: int,
    frame: CoordFrame,
    sizes: Sequence[tuple[int, int]],
    params: Mapping[str, Any],
) -> None:
    from mmrl.tasks.readers.common import GeometryError, RowError

    if frame is not CoordFrame.ABS_ORIG:
        raise RowError(
            "params.points in pixels of the original picture",
            f"frame {frame.value}",
            "convert the points and declare frame abs_orig",
        )
    if not isinstance(points, list) or not all(
        isinstance(p, list) and len(p) == 2 and all(type(v) in (int, float) for v in p)
        for p in points
    ):
        raise RowError(
            "params.points as [[x, y], ...]", repr(points)[:80], "write pairs of numbers"
        )
    if len(points) != count or len(points) > MAX_OBJECTS:
        raise RowError(
            f"as many points as the answer says, {count}, at most {MAX_OBJECTS}",
            str(len(points)),
            "fix one of them or leave params.points out",
        )
    index = params.get("image_index", 0)
    width, height = (
        sizes[index] if isinstance(index, int) and 0 <= index < len(sizes) else (math.inf, math.inf)
    )
    for x, y in points:
        if not (-1 <= x <= width + 1 and -1 <= y <= height + 1):  # also False for nan
            raise GeometryError(
                f"points inside the picture of {width} x {height}",
                f"[{x}, {y}]",
                "are they shares or thousandths? write pixels of the original picture",
            )
