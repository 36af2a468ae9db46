"""Detection: all objects of the asked categories, each a box with its label; closed or open vocabulary.

A row's answer is [{"bbox": [x1, y1, x2, y2], "label": "cat"}, ...], [] where nothing is there. params.categories lists
what was asked for; with one category the answer is a bare list of boxes and the label is implied, without categories
(open vocabulary) every object names its own. The default reward is a soft F1 (mmrl.rewards.detection), the metrics are F1,
precision and recall at IoU 0.5, which depend neither on the order of boxes nor on scores that a language model has not.

    mmrl tasks check detection --data my.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, did_you_mean
from mmrl.registry import register
from mmrl.rewards.detection import Comparison, compare, detection_metrics, make_detection_reward
from mmrl.rewards.iou import box_iou
from mmrl.rewards.objects import MAX_OBJECTS, LabelledBox, normalise_label, parse_objects
from mmrl.rewards.parsing import Box, extract_answer
from mmrl.rewards.reading.places import labelled_boxes
from mmrl.rewards.router import Part, PartFactory
from mmrl.task import Template
from mmrl.tasks.base import AnswerError, AnswerTask, Prediction, picture_size
from mmrl.tasks.boxes import beside, box_to_orig, format_box, from_picture, grid_step, rounded_box
from mmrl.tasks.truths import of_sample
from mmrl.types import ImageSize, RewardContext, Sample, Score, StopReason

__all__ = ["Detected", "Detection", "check_objects", "hull"]

_BOXES, _OBJECTS = "[[x1, y1, x2, y2], ...]", '[{"bbox_2d": [x1, y1, x2, y2], "label": "..."}, ...]'


_VLM_R1: Mapping[str, Any] = {
    "answer_format": "think",
    "spelling": "fenced",
    "format_rule": "tags",
    "frame": "abs_orig",
    "weights": {"accuracy": 1.0, "format": 1.0},
    "normalise": False,
}
SPELLINGS = ("auto", "labelled", "fenced")


class Detected(NamedTuple):
    """Predicted objects in pixels of the original picture, and how they compare with the truth."""

    objects: tuple[LabelledBox, ...]
    pair: Comparison
    truncated: bool
    unreadable: int = 0


def _size(sample: Sample, ctx: RewardContext) -> ImageSize:
    return picture_size(sample, ctx, sample.params.get("image_index", 0))


@of_sample
def _truth(sample: Sample) -> Sequence[tuple[str, Box]]:
    return [(item["label"], tuple(item["bbox"])) for item in sample.answer]


def _only_category(sample: Sample) -> str | None:
    """The one category that was asked for, or None."""
    categories = sample.params.get("categories")
    return normalise_label(categories[0]) if categories and len(categories) == 1 else None


def hull(boxes: Sequence[Sequence[float]]) -> Box:
    """The smallest box around `boxes` (at least one)."""
    return (
        min(b[0] for b in boxes),
        min(b[1] for b in boxes),
        max(b[2] for b in boxes),
        max(b[3] for b in boxes),
    )


@of_sample
def _ceilings(sample: Sample, frame: CoordFrame, size: ImageSize) -> list[float]:
    """The best IoU with each truth that an answer on the grid of `frame` can have."""
    return [box_iou(rounded_box(box, frame, size), box) for _, box in _truth(sample)]


def _accuracy_part(mode: str, reachable: bool = True, **params: Any) -> Part:
    """A rule of mmrl.rewards.detection; with `reachable` no threshold exceeds the IoU of the rounded truth."""
    reward = make_detection_reward(mode, **params)

    def accuracy(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
        size = _size(sample, ctx)
        ceilings = None
        if reachable and reward.thresholds:
            ceilings = _ceilings(sample, ctx.frame, size)
        return reward.of(predicted.value.pair, ctx.progress, ceilings=ceilings, size=size.orig_wh)

    accuracy.low, accuracy.high = reward.low, reward.high  # type: ignore[attr-defined]
    return accuracy


def _check_categories(params: Mapping[str, Any]) -> set[str] | None:
    from mmrl.tasks.readers.common import RowError

    categories = params.get("categories")
    if categories is None:
        return None
    if (
        not isinstance(categories, list)
        or not categories
        or not all(isinstance(c, str) and c.strip() for c in categories)
    ):
        raise RowError(
            "params.categories as a list of names",
            repr(categories)[:80],
            'write ["cat", "dog"], or leave it out for an open vocabulary',
        )
    names = {normalise_label(c) for c in categories}
    if len(names) < len(categories):
        raise RowError(
            "different names in params.categories",
            repr(categories)[:80],
            "remove the repeated ones",
        )
    return names


def check_objects(
    value: Any, frame: CoordFrame, orig_wh: tuple[int, int], label: str | None = None
) -> list[dict[str, Any]]:
    """[{"bbox" or "bbox_2d", "label"}, ...] of a file, or bare boxes where one `label` is implied, in original pixels.

    Raises RowError for anything else and for more objects than an answer may hold.
    """
    from mmrl.tasks.readers.common import RowError, check_box, text_of

    if not isinstance(value, list) or not all(
        isinstance(item, dict) or (label and isinstance(item, list)) for item in value
    ):
        raise RowError(
            'a list of objects {"bbox": [x1, y1, x2, y2], "label": "cat"}',
            repr(value)[:80],
            "write one object per box, [] where nothing is there",
        )
    if len(value) > MAX_OBJECTS:
        raise RowError(
            f"at most {MAX_OBJECTS} objects",
            str(len(value)),
            "leave the row out: no answer may be that long",
        )
    objects = []
    for item in value:
        if isinstance(item, list):
            item = {"bbox": item, "label": label}
        keys = [key for key in ("bbox", "bbox_2d") if key in item]
        if len(keys) != 1:
            raise RowError(
                "one key 'bbox' per object", repr(sorted(item))[:80], "name the box 'bbox'"
            )
        name = text_of(item.get("label", label), "label")
        if not normalise_label(name):
            raise RowError("a label with letters", repr(name)[:80], "name the object")
        objects.append({"bbox": list(check_box(item[keys[0]], frame, orig_wh)), "label": name})
    return objects


@register("detection")
class Detection(AnswerTask):
    """Find all objects. Beside the parameters of AnswerTask:

    mode            f1 (default), v_triune, vlm_r1_map, vlm_r1_map50, od_length, weighted_sum or perception_r1; their
                    parameters in `accuracy`, see mmrl.rewards.detection
    reachable       thresholds never exceed the IoU of the truth rounded to the answer's grid (default true)
    keep_truncated  an answer cut by the length limit keeps its complete objects (default true); it gets no format reward
                    and counts in truncated_rate. With false it is a failure.
    spelling        what the prompt asks for: auto (default: bare boxes where one category is asked for), labelled (always
                    objects with labels), or fenced (these in a ```json block, None where nothing is there: VLM-R1)
    """

    headline: ClassVar[str] = "f1@0.5"
    ask: ClassVar[str] = (
        "Locate every instance of: {question}. Give the bounding boxes, coordinates {frame}."
    )
    shape: ClassVar[str] = _OBJECTS  # bare boxes where one category is asked for
    default_mode: ClassVar[str] = "f1"
    own_params: ClassVar[Mapping[str, Any]] = {
        "reachable": True,
        "keep_truncated": True,
        "spelling": "auto",
    }
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "v_triune": {
            "mode": "v_triune",
            "answer_format": "think_lines",
            "spelling": "labelled",
            "format_rule": "v_triune_boxes",
            "frame": "rel1000",
            "weights": {"accuracy": 1.0, "format": 0.1},
        },
        # odLength as published: COCO's AP in the order written; the answer is compared with the file's pixels as it is
        "vlm_r1": {"mode": "od_length", "accuracy": {"rule": "coco"}, **_VLM_R1},
        "vlm_r1_weighted_sum": {"mode": "weighted_sum", **_VLM_R1},
        "perception_r1": {
            "mode": "perception_r1",
            "answer_format": "bare",
            "weights": {"accuracy": 1.0},
            "normalise": False,
        },
    }
    metric_names: ClassVar[tuple[str, ...]] = (
        "f1@0.5",
        "precision@0.5",
        "recall@0.5",
        "mean_iou",
        "count_ok",
        "correct",
        "unreadable",
    )

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        spelling = self.settings["spelling"]
        if spelling not in SPELLINGS:
            raise ConfigError(
                f"unknown spelling {spelling!r} of detection; expected {', '.join(SPELLINGS)}."
                f"{did_you_mean(str(spelling), SPELLINGS)}"
            )
        if self.settings["prompt"] is None:
            self.prompt = f"{self.ask} {self.request}"  # {shape} is known when the sample is

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
    ) -> list[dict[str, Any]]:
        """Objects of the picture params.image_index; labels must be among params.categories if those are given."""
        from mmrl.tasks.readers.common import RowError

        index, names = params.get("image_index", 0), _check_categories(params)
        if not isinstance(index, int) or not 0 <= index < len(sizes):
            raise RowError(
                f"image_index from 0 to {len(sizes) - 1}", repr(index)[:40], "count pictures from 0"
            )
        only = params["categories"][0] if names and len(names) == 1 else None
        objects = check_objects(value, frame, sizes[index], only)
        for item in objects:
            if names is not None and normalise_label(item["label"]) not in names:
                raise RowError(
                    f"labels among params.categories ({', '.join(sorted(names))[:200]})",
                    repr(item["label"])[:80],
                    "add the category or fix the label." + did_you_mean(item["label"], names),
                )
        return objects

    def fill_prompt(self, prompt: str, sample: Sample, template: Template) -> str:
        """As the base, with {shape} (bare boxes when one category is asked for) and {categories}."""
        shape = (_BOXES if self._bare_boxes(sample) else _OBJECTS) + ", or [] if there is none"
        if self.settings["spelling"] == "fenced":
            shape = f"```json\n{_OBJECTS}\n```, or None if there is none"
        names = ", ".join(sample.params.get("categories") or ["any object"])
        return super().fill_prompt(
            prompt.replace("{shape}", shape).replace("{categories}", names), sample, template
        )

    def _bare_boxes(self, sample: Sample) -> bool:
        """Whether the label is implied in what the prompt asks for."""
        return self.settings["spelling"] == "auto" and _only_category(sample) is not None

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """As the base; an answer cut by the length limit is closed behind its last complete object (reason 'truncated')."""
        closed = text
        if (
            ctx.stop is StopReason.LENGTH
            and self.settings["keep_truncated"]
            and self.answer_format != "bare"
        ):
            closed = self._close(text, _only_category(sample))
        score = super().score(sample, closed, ctx)
        cut = score.parsed and (closed is not text or bool(score.detail.get("truncated")))
        return replace(score, reason="truncated") if cut else score

    def _close(self, text: str, label: str | None) -> str:
        """`text` with its cut list ended behind the last complete object, or `text` itself where there is none.

        A mark behind the answer keeps the format reward at 0.
        """
        if extract_answer(text, self.answer_format).reason != "unclosed_answer":
            return text
        head, _, tail = text.rpartition("<answer>")
        parsed = parse_objects(tail, label, cut=True)
        if not parsed.truncated:
            return text
        kept = [{"bbox_2d": list(box), "label": name} for name, box in parsed.objects]
        return f"{head}<answer>{json.dumps(kept)}</answer> (cut)"

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> Detected:
        """All objects, boxes in pixels of the original picture. Reasons: those of mmrl.rewards.objects.parse_objects."""
        cut = (
            self.answer_format == "bare"
            and ctx.stop is StopReason.LENGTH
            and self.settings["keep_truncated"]
        )
        fenced = self.settings["spelling"] == "fenced"
        if fenced and answer.strip() == "None":
            answer = "[]"
        parsed = parse_objects(answer, _only_category(sample), cut)
        if parsed.reason:
            raise AnswerError(parsed.reason)
        size = _size(sample, ctx)
        objects = tuple(
            LabelledBox(name, box_to_orig(box, ctx.frame, size)) for name, box in parsed.objects
        )
        return Detected(
            objects, compare(objects, _truth(sample)), parsed.truncated, parsed.unreadable
        )

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """The boxes of a released model, see mmrl.rewards.reading.places."""
        return labelled_boxes(answer)

    def measure(self, value: Detected, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """f1, precision, recall at IoU 0.5, mean_iou over the true boxes, count_ok, correct (f1 == 1); unreadable: how many
        elements of the list could not be read."""
        return {**detection_metrics(value.pair), "unreadable": float(value.unreadable)}

    def describe(
        self, value: Detected | None, sample: Sample, ctx: RewardContext
    ) -> Mapping[str, Any]:
        """pred_boxes, pred_labels, gold_boxes, gold_labels; boxes in pixels of the original picture."""
        truth = _truth(sample)
        objects = () if value is None else value.objects
        return {
            "pred_boxes": [list(box) for _, box in objects],
            "pred_labels": [label for label, _ in objects],
            "gold_boxes": [list(box) for _, box in truth],
            "gold_labels": [normalise_label(label) for label, _ in truth],
            "frame": CoordFrame.ABS_ORIG.value,
            **({"truncated": True} if value is not None and value.truncated else {}),
        }

    def _spell(
        self, objects: Sequence[tuple[str, Sequence[float]]], sample: Sample, ctx: RewardContext
    ) -> str:
        """Objects with boxes in ctx.frame as answer text."""
        if self._bare_boxes(sample):
            return "[" + ", ".join(format_box(box, ctx.frame) for _, box in objects) + "]"
        text = (
            "["
            + ", ".join(
                f'{{"bbox_2d": {format_box(box, ctx.frame)}, "label": {json.dumps(label, ensure_ascii=False)}}}'
                for label, box in objects
            )
            + "]"
        )
        if self.settings["spelling"] != "fenced":
            return text
        return f"```json\n{text}\n```" if objects else "None"

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The truth in ctx.frame: bare boxes when one category was asked for, else objects with labels; [] for nothing."""
        size = _size(sample, ctx)
        return self._spell(
            [(label, from_picture(box, ctx.frame, size)) for label, box in _truth(sample)],
            sample,
            ctx,
        )

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """One box that misses every object."""
        size, truth = _size(sample, ctx), _truth(sample)
        extent = ctx.frame.extent(size.resized_wh, size.orig_wh)
        label = truth[0][0] if truth else (sample.params.get("categories") or ["object"])[0]
        if not truth:
            return self._spell([(label, (0.0, 0.0, extent[0] / 2, extent[1] / 2))], sample, ctx)
        around = from_picture(hull([box for _, box in truth]), ctx.frame, size)
        return self._spell([(label, beside(around, extent, grid_step(ctx.frame)))], sample, ctx)

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        """COCO numbers by pycocotools and the submission files, from the boxes and labels in each score's detail."""
        from mmrl.tasks.metrics import detection_benchmark

        return dict(detection_benchmark(pairs, folder))

    def example_data(self, folder: str) -> str:
        """24 generated scenes: one category (sometimes absent), several, and an open vocabulary; returns their file."""
        from mmrl.tasks.scenes import make_scenes

        scenes = Path(make_scenes(folder, count=24, seed=11, difficulty={1: 1.0, 2: 1.0, 3: 1.0}))
        path = scenes.with_name("detection.jsonl")
        rows = [json.loads(line) for line in scenes.read_text(encoding="utf-8").splitlines()]
        path.write_text(
            "".join(json.dumps(_example(row, i)) + "\n" for i, row in enumerate(rows)),
            encoding="utf-8",
        )
        return str(path)


def _example(row: dict[str, Any], number: int) -> dict[str, Any]:
    """A grounding scene as a detection row; `number` decides what is asked for."""
    shapes = ["circle", "square", "triangle"]
    by_shape, params = number % 3 != 2, {}
    if by_shape:
        wanted = [shapes[number // 3 % 3]] if number % 3 == 0 else shapes
        params, question = {"categories": wanted}, ", ".join(wanted)
    else:
        wanted, question = shapes, "colored shape"
    answer = [
        {"bbox": o["box"], "label": o["shape"] if by_shape else f"{o['color']} {o['shape']}"}
        for o in row["params"]["objects"]
        if o["shape"] in wanted
    ]
    return {
        "id": row["id"],
        "image": row["image"],
        "question": question,
        "answer": answer,
        "frame": "abs_orig",
        "source": "scenes-detection",
        "params": params,
    }
