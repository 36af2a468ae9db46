"""Tracking: one object, its box at each time that is asked for. Every number divides by the times asked: a missing box is 0.

A row's answer is {"boxes": {"0": [x1, y1, x2, y2], "1": [...]}}: seconds of the shown part as text (frame numbers where
params.keys is "frames"), boxes in the row's frame. params.first_box gives the first box away in the prompt: true for the
truth's own, or a box in pixels of the displayed frame. That frame then earns nothing (`count_first`), because it is copied.

Metrics over the true frames: iou (mean), auc (area under the success curve), sr@0.5, sr@0.75 (IoU above the level, as GOT-10k),
each also as <name>_after_first without the first frame, and viou, which counts boxes outside the track's time as errors.
`iou_after_first` is GOT-10k's AO only where every frame of the sequence was asked for; `benchmark` says so.

    mmrl tasks check tracking
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mmrl.coords import CoordFrame, from_orig
from mmrl.errors import ConfigError, did_you_mean
from mmrl.registry import register
from mmrl.rewards.parsing import Box
from mmrl.rewards.reading.tracks import track_in
from mmrl.rewards.router import Part, PartFactory
from mmrl.rewards.tracks import (
    MAX_BOXES,
    OVER,
    mean,
    mean_iou,
    parse_track,
    success,
    success_area,
    track_ious,
    track_key,
    track_viou,
)
from mmrl.task import Template
from mmrl.tasks.base import EXPLAINED, FRAME_WORDS, AnswerError, AnswerTask, Prediction
from mmrl.tasks.boxes import beside, box_to_orig, format_box, from_picture, grid_step
from mmrl.tasks.spans import clip_size, need_duration, spell_seconds
from mmrl.tasks.temporal_grounding import named_parts, structure_part
from mmrl.tasks.truths import of_sample
from mmrl.types import RewardContext, Sample, Score

__all__ = [
    "Track",
    "Tracking",
    "boxes_text",
    "boxes_to_pixels",
    "check_boxes",
    "check_over",
    "key_share",
    "tracks_by_second",
    "true_boxes",
    "wrong_boxes",
]

_SHAPES = {"keyed": '{"boxes": {"time": [x1, y1, x2, y2], ...}}', "list": "[[x1, y1, x2, y2], ...]"}
_MODES = ("mean", "viou")
Boxes = dict[float, Box]


class Track(NamedTuple):
    """Predicted boxes by key, in pixels of the displayed frame."""

    boxes: Boxes
    unreadable: int = 0


# shared with spatio-temporal grounding


def check_boxes(
    value: Any, frame: CoordFrame, size: tuple[int, int], params: Mapping[str, Any]
) -> dict[str, list[float]]:
    """{seconds as text: box} of a file as pixels, in order of time. Raises RowError for anything that no answer could match:
    keys that are no times, repeated or outside the video, no boxes, more than an answer may hold."""
    from mmrl.tasks.readers.common import RowError, check_box

    if not isinstance(value, Mapping) or not value:
        raise RowError(
            'boxes as {"0": [x1, y1, x2, y2], ...}',
            repr(value)[:80],
            "write at least one time with its box",
        )
    if len(value) > MAX_BOXES:
        raise RowError(f"at most {MAX_BOXES} boxes", str(len(value)), "ask for fewer times")
    duration = params.get("duration") if params.get("keys", "seconds") == "seconds" else None
    boxes: dict[float, list[float]] = {}
    for text, box in value.items():
        key = track_key(text)
        if key is None:
            raise RowError(
                "a time in seconds as key of a box", repr(text)[:40], 'write "18" or "2.5"'
            )
        if key in boxes:
            raise RowError("different times", f"{text!r} twice", "remove one of the boxes")
        # truths name whole seconds, the last may be rounded up
        if duration is not None and key > duration + 1:
            raise RowError(
                f"times inside the video of {duration} s",
                repr(text),
                "are the keys frame numbers? set params.keys",
            )
        boxes[key] = list(check_box(box, frame, size))
    return {spell_seconds(key): boxes[key] for key in sorted(boxes)}


@of_sample
def true_boxes(sample: Sample) -> Mapping[float, Box]:
    """The true boxes by key, in order of time."""
    # keys as check_boxes writes them
    found = {round(float(text), 3): tuple(box) for text, box in sample.answer["boxes"].items()}
    return {key: found[key] for key in sorted(found)}


def boxes_to_pixels(
    boxes: Mapping[float, Sequence[float]], sample: Sample, ctx: RewardContext
) -> Boxes:
    """Boxes in ctx.frame as pixels of the displayed frame."""
    # one scale for the whole track
    _, _, sx, sy = box_to_orig((0, 0, 1, 1), ctx.frame, clip_size(sample, ctx))
    return {key: (x1 * sx, y1 * sy, x2 * sx, y2 * sy) for key, (x1, y1, x2, y2) in boxes.items()}


def boxes_text(boxes: Mapping[float, Sequence[float]], frame: CoordFrame) -> str:
    """{"0": [x1, y1, x2, y2], ...} of boxes given in `frame`."""
    return (
        "{"
        + ", ".join(
            f'"{spell_seconds(key)}": {format_box(box, frame)}' for key, box in boxes.items()
        )
        + "}"
    )


def wrong_boxes(sample: Sample, ctx: RewardContext) -> Boxes:
    """At each true key a box that misses the true one, in ctx.frame."""
    size = clip_size(sample, ctx)
    extent = ctx.frame.extent(size.resized_wh, size.orig_wh)
    return {
        key: beside(from_picture(box, ctx.frame, size), extent, grid_step(ctx.frame))
        for key, box in true_boxes(sample).items()
    }


def key_share(value: Any, predicted: Prediction, sample: Sample) -> float:
    """OneThinker's structure term over 0.5: half for valid boxes, half for the share of true keys that are there."""
    if not isinstance(value.get("boxes"), dict):
        return 0.0
    truth = true_boxes(sample)
    return 0.5 + 0.5 * sum(key in predicted.value.boxes for key in truth) / len(truth)


def tracks_by_second(
    boxes: Mapping[float, Sequence[float]], sample: Sample, ctx: RewardContext
) -> dict[str, list[float]]:
    """For people: {seconds as text: box}; frame numbers become the seconds of shown frames where those are known."""
    stamps = (
        ctx.videos[0].timestamps_s if ctx.videos and sample.params.get("keys") == "frames" else ()
    )
    return {
        spell_seconds(stamps[int(key)] if key < len(stamps) else key): list(box)
        for key, box in boxes.items()
    }


# the task


def _given(sample: Sample) -> Box | None:
    """The first box of the prompt in pixels, None when the prompt has none."""
    first = sample.params.get("first_box")
    if first is None or first is False:
        return None
    x1, y1, x2, y2 = next(iter(true_boxes(sample).values())) if first is True else first
    return x1, y1, x2, y2


@of_sample
def _judged(sample: Sample, count_first: bool) -> Mapping[float, Box]:
    """The true boxes that earn: all, or all but the given first one (unless it is the only one)."""
    truth = true_boxes(sample)
    if count_first or _given(sample) is None or len(truth) == 1:
        return truth
    return dict(list(truth.items())[1:])


def check_over(value: Any) -> str:
    """One of mmrl.rewards.tracks.OVER; raises ConfigError for anything else."""
    if value not in OVER:
        raise ConfigError(
            f"expected over as one of {', '.join(OVER)}, found {value!r}.{did_you_mean(str(value), OVER)}"
        )
    return str(value)


def _accuracy_part(mode: str, count_first: bool = False, over: str = "truth") -> Part:
    """mean: mean IoU over the true frames (or `over` the shared ones). viou: boxes outside the track's time are errors too."""
    check_over(over)
    if mode not in _MODES:
        raise ConfigError(
            f"unknown accuracy mode {mode!r}; expected {', '.join(_MODES)}.{did_you_mean(str(mode), _MODES)}"
        )

    def accuracy(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
        truth, boxes = _judged(sample, count_first), predicted.value.boxes
        if mode == "mean":
            return mean_iou(boxes, truth, over)
        keys = true_boxes(sample)
        return min(1.0, track_viou(boxes, truth, (min(keys), max(keys))))

    return accuracy


@register("tracking")
class Tracking(AnswerTask):
    """Follow one object. Beside the parameters of AnswerTask:

    mode         mean (default): mean IoU over the true frames; viou: boxes outside the track's time count as errors too.
                 `accuracy: {over: shared}` gives EasyVideoR1's published mean, over the frames both sides have
    count_first  the first frame counts although its box stands in the prompt (default false; VideoChat-R1 counts it)
    spelling     keyed (default), or list: one box per time asked, in their order, exactly as many
    """

    headline: ClassVar[str] = "iou_after_first"
    ask: ClassVar[str] = (
        "Track {question} in the video, which is {duration} seconds long. {first}Give its bounding box at each "
        "of these {keys}, coordinates {frame}: {asked}."
    )
    shape: ClassVar[str] = _SHAPES["keyed"]
    default_mode: ClassVar[str] = "mean"
    own_params: ClassVar[Mapping[str, Any]] = {"count_first": False, "spelling": "keyed"}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "easyvideo_r1": {
            "request": EXPLAINED,
            "count_first": True,
            "answers": "native",
            "format_rule": "easyvideo_r1",
            "weights": {"accuracy": 0.9, "format": 0.1},
        },
        "onethinker": {
            "count_first": True,
            "answer_format": "think",
            "answers": "native",
            "format_rule": "tags",
            "normalise": False,
            "weights": {"accuracy": 0.9, "format": 0.1, "structure": 1.0},
        },
        "videochat_r1": {
            "count_first": True,
            "spelling": "list",
            "answer_format": "think",
            "format_rule": "videochat_r1_boxes",
            "frame": "rel1",
            "normalise": False,
            "weights": {"accuracy": 1.0, "format": 1.0},
        },
    }
    metric_names: ClassVar[tuple[str, ...]] = (
        "iou",
        "auc",
        "sr@0.5",
        "sr@0.75",
        "iou_after_first",
        "auc_after_first",
        "sr@0.5_after_first",
        "sr@0.75_after_first",
        "viou",
        "correct",
        "unreadable",
    )

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        if not isinstance(self.settings["count_first"], bool):
            raise ConfigError(
                f"expected tracking.count_first true or false, found {self.settings['count_first']!r}"
            )
        spelling = self.settings["spelling"]
        if spelling not in _SHAPES:
            raise ConfigError(
                f"unknown tracking.spelling {spelling!r}; expected one of {', '.join(_SHAPES)}."
                f"{did_you_mean(str(spelling), _SHAPES)}"
            )
        if self.settings["prompt"] is None:
            self.prompt = f"{self.ask} {self.request}".replace("{shape}", _SHAPES[spelling])

    def _accuracy_settings(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            **settings["accuracy"],
            "mode": settings["mode"],
            "count_first": settings["count_first"],
        }

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format; structure where a weight names it."""
        parts: dict[str, PartFactory] = {
            "accuracy": _accuracy_part,
            "format": self.format_factory(),
        }
        if "structure" in named_parts(self.settings):
            parts["structure"] = structure_part(self.answer_format, key_share)
        return parts

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> dict[str, Any]:
        """{"boxes": {key: box in pixels}}, in order of time."""
        from mmrl.tasks.readers.common import RowError, check_box

        if not isinstance(value, Mapping) or "boxes" not in value or not sizes:
            raise RowError(
                '{"boxes": {"0": [x1, y1, x2, y2], ...}} and a video',
                repr(value)[:80],
                "fix the row",
            )
        if params.get("keys", "seconds") not in ("seconds", "frames"):
            raise RowError(
                "params.keys 'seconds' or 'frames'",
                repr(params["keys"])[:40],
                "correct or remove it",
            )
        first = params.get("first_box")
        if first is not None and not isinstance(first, bool):
            check_box(first, CoordFrame.ABS_ORIG, sizes[0])
        return {"boxes": check_boxes(value["boxes"], frame, sizes[0], params)}

    def fill_prompt(self, prompt: str, sample: Sample, template: Template) -> str:
        """As the base, with {duration}, {keys} (what the times are), {asked} (the times) and {first} (the given first box)."""
        asked = list(true_boxes(sample))
        frames = sample.params.get("keys") == "frames"
        words = {
            "{asked}": ", ".join(map(spell_seconds, asked)),
            "{first}": self._first(sample, template, asked[0]),
            "{keys}": "frame numbers" if frames else "times in seconds",
            "{duration}": spell_seconds(need_duration(sample), 2),
        }
        for name, text in words.items():
            prompt = prompt.replace(name, text)
        return super().fill_prompt(prompt, sample, template)

    def _first(self, sample: Sample, template: Template, key: float) -> str:
        box, frame = _given(sample), CoordFrame(template.frame)
        if box is None:
            return ""
        unit = "frame {}" if sample.params.get("keys") == "frames" else "{} seconds"
        # pixels of the resized frame are not known when the prompt is written: that frame's box is told in shares
        told = CoordFrame.REL1 if frame is CoordFrame.ABS_RESIZED else frame
        size = sample.params["width"], sample.params["height"]
        text = format_box(from_orig(box, told, size, size), told)
        words = f", {FRAME_WORDS[told]}" if told is not frame else ""
        return f"At {unit.format(spell_seconds(key))} its box is {text}{words}. "

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> Track:
        """Boxes by key in pixels. Reasons: those of mmrl.rewards.tracks; wrong_count (list), not_keyed, not_listed."""
        parsed = parse_track(answer)
        if parsed.reason:
            raise AnswerError(parsed.reason)
        boxes: Mapping[float, Box] = parsed.boxes
        if self.settings["spelling"] == "list":
            asked = list(true_boxes(sample))
            if not parsed.listed:
                raise AnswerError("not_listed")
            if len(parsed.listed) != len(asked):
                raise AnswerError("wrong_count")
            boxes = {
                key: box for key, box in zip(asked, parsed.listed, strict=True) if box is not None
            }
        elif parsed.listed:
            raise AnswerError("not_keyed")
        if not boxes:
            raise AnswerError("no_boxes")
        return Track(boxes_to_pixels(boxes, sample, ctx), parsed.unreadable)

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """The track of a released model, see mmrl.rewards.reading.tracks."""
        return track_in(answer)

    def _failure(self, sample: Sample, reason: str, ctx: RewardContext, text: str = "") -> Score:
        """As the base; a list of the wrong length has not the form that was asked for."""
        short = reason == "wrong_count" and self.settings["spelling"] == "list"
        return super()._failure(sample, reason, ctx, "" if short else text)

    def measure(self, value: Track, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """iou, auc, sr@0.5, sr@0.75 with and without a given first frame, viou, correct (iou_after_first >= 0.5);
        unreadable: boxes of the answer that could not be read."""
        truth = true_boxes(sample)
        ious = track_ious(value.boxes, truth)
        values = [mean(ious), success_area(ious), success(ious, 0.5), success(ious, 0.75)]
        if len(_judged(sample, False)) < len(truth):  # all but the given first box
            later = ious[1:]
            values += [mean(later), success_area(later), success(later, 0.5), success(later, 0.75)]
        else:
            values *= 2
        values += [track_viou(value.boxes, truth), float(values[4] >= 0.5), float(value.unreadable)]
        return dict(zip(self.metric_names, values, strict=True))

    def describe(
        self, value: Track | None, sample: Sample, ctx: RewardContext
    ) -> Mapping[str, Any]:
        """pred_tracks and gold_tracks ({seconds as text: box in pixels of the displayed frame}); pred_boxes_by_key under the keys
        as asked for, for submission files."""
        boxes = {} if value is None else value.boxes
        return {
            "pred_tracks": tracks_by_second(boxes, sample, ctx),
            "gold_tracks": tracks_by_second(true_boxes(sample), sample, ctx),
            "pred_boxes_by_key": {spell_seconds(key): list(box) for key, box in boxes.items()},
            "frame": CoordFrame.ABS_ORIG.value,
        }

    def _spell(self, boxes: Mapping[float, Sequence[float]], ctx: RewardContext) -> str:
        if self.settings["spelling"] == "list":
            return "[" + ", ".join(format_box(box, ctx.frame) for box in boxes.values()) + "]"
        return f'{{"boxes": {boxes_text(boxes, ctx.frame)}}}'

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The true boxes in ctx.frame."""
        size = clip_size(sample, ctx)
        return self._spell(
            {key: from_picture(box, ctx.frame, size) for key, box in true_boxes(sample).items()},
            ctx,
        )

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """At every time a box beside the object."""
        return self._spell(wrong_boxes(sample, ctx), ctx)

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        """GOT-10k's AO, SR and result files for whole sequences, else the mean IoU of what was asked."""
        from mmrl.tasks.metrics.tracking import tracking_benchmark

        return tracking_benchmark(pairs, folder)

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """Means over all rows of the metrics, with and without the first frame, parse_failure_rate, truncated_rate."""
        if not rows:
            return {}
        names = {"mIoU": "iou", "mIoU_after_first": "iou_after_first", "vIoU": "viou"}
        means = {
            name: math.fsum(row.metrics.get(key, 0.0) for row in rows) / len(rows)
            for name, key in names.items()
        }
        return {**means, **super().summarize(rows)}

    def example_data(self, folder: str) -> str:
        """9 clips (folders of frames) of a moving square, the first box given in every other row; returns their data.jsonl."""
        from mmrl.tasks.examples import write_rows
        from mmrl.tasks.frame_clips import COLORS, draw_square_clip

        rows = []
        for index in range(9):
            color, path = list(COLORS)[index % len(COLORS)], ((4 + index, 50), (80 - 2 * index, 6))
            clip = draw_square_clip(Path(folder) / f"clips/{index:03d}", color, (0, 6), 6.0, path)
            rows.append(
                {
                    "id": f"{index:03d}",
                    "video": f"clips/{index:03d}",
                    "question": f"the {color} square",
                    "answer": {"boxes": {str(second): clip.box(second) for second in range(6)}},
                    "params": {**clip.facts, **({"first_box": True} if index % 2 else {})},
                }
            )
        return write_rows(folder, rows)
