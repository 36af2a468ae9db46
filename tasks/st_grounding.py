"""Spatio-temporal grounding: when does it happen, and where is it at each second of that time?

A row's answer is {"time": [start, end], "boxes": {"18": [x1, y1, x2, y2], ...}}: seconds of the shown part, boxes in the row's
frame (answers: in the template's). params.step says how far apart the boxes are (default 1 second).

    mean   time_weight * tIoU + (1 - time_weight) * mean IoU over the TRUE keys, a missing box is 0 (default, time_weight 0.5)
    viou   VidSTG's and HC-STVG's: the IoUs at true keys inside the predicted time, over the union of both times; boxes
           outside the predicted time do not count (mmrl.rewards.tracks.tube_viou)

EasyVideoR1 and OneThinker average over the keys both sides share, so that one easy second maximises it; their presets keep
their weights, with the true keys as denominator. Metrics: tiou, iou, viou, viou@0.3, viou@0.5; a failure counts as 0.

    mmrl tasks check st_grounding
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, did_you_mean
from mmrl.registry import register
from mmrl.rewards.parsing import load_json, strip_fence
from mmrl.rewards.reading.tracks import track_in
from mmrl.rewards.router import Part, PartFactory
from mmrl.rewards.temporal import span_iou
from mmrl.rewards.text import check_number
from mmrl.rewards.times import Span, spans_of
from mmrl.rewards.tracks import TrackParse, mean, mean_iou, parse_track, track_ious, tube_viou
from mmrl.task import Template
from mmrl.tasks.base import EXPLAINED, AnswerError, AnswerTask, Prediction
from mmrl.tasks.boxes import from_picture
from mmrl.tasks.spans import (
    beside_spans,
    check_spans,
    clip_pair,
    clip_size,
    duration_of,
    need_duration,
    spell_seconds,
)
from mmrl.tasks.temporal_grounding import named_parts, structure_part
from mmrl.tasks.tracking import (
    Boxes,
    boxes_text,
    boxes_to_pixels,
    check_boxes,
    check_over,
    key_share,
    tracks_by_second,
    true_boxes,
    wrong_boxes,
)
from mmrl.types import RewardContext, Sample, Score

__all__ = ["SpatioTemporalGrounding", "Tube"]

_MODES = ("mean", "viou")
_NO_SPAN: Span = (0.0, 0.0)


class Tube(NamedTuple):
    """A span in seconds as it was written, and boxes by second in pixels of the displayed frame."""

    span: Span
    boxes: Boxes
    unreadable: int = 0


def _true_span(sample: Sample) -> Span:
    start, end = sample.answer["time"]
    return start, end


def _viou(boxes: Boxes, span: Sequence[float], true_span: Sequence[float], sample: Sample) -> float:
    return min(
        1.0, tube_viou(boxes, span, true_boxes(sample), true_span, sample.params.get("step", 1))
    )


def _accuracy_part(
    mode: str, time_weight: float = 0.5, clip: bool = False, over: str = "truth"
) -> Part:
    check_over(over)
    if mode not in _MODES:
        raise ConfigError(
            f"unknown accuracy mode {mode!r}; expected {', '.join(_MODES)}.{did_you_mean(str(mode), _MODES)}"
        )
    share, both = check_number("time_weight", time_weight, 0, 1), clip_pair(clip)

    def accuracy(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
        tube = predicted.value
        (span,), (truth,) = both([tube.span], sample, ctx)
        if mode == "viou":
            return _viou(tube.boxes, span, truth, sample)
        boxes = mean_iou(tube.boxes, true_boxes(sample), over)
        return min(1.0, share * span_iou(span, truth) + (1 - share) * boxes)

    return accuracy


def _structure(value: Any, predicted: Prediction, sample: Sample) -> float:
    time, share = value.get("time"), key_share(value, predicted, sample)
    # the keys are paid all the same
    return share if isinstance(time, list) and len(time) == 2 else max(0.0, share - 0.5)


@register("st_grounding")
class SpatioTemporalGrounding(AnswerTask):
    """When and where. Beside the parameters of AnswerTask:

    mode  mean (default; `accuracy: {time_weight: 0.5}`; over: shared averages the boxes as published) or viou, see the module;
          `accuracy: {clip: true}` clips both times to the shown part before the reward (default false), metrics see what was said
    """

    headline: ClassVar[str] = "viou"
    ask: ClassVar[str] = (
        'Find in the video: "{question}". The video is {duration} seconds long. Give the time from start to '
        "end in seconds, and the bounding box at every {step} from start to end, coordinates {frame}."
    )
    shape: ClassVar[str] = '{"time": [start, end], "boxes": {"second": [x1, y1, x2, y2], ...}}'
    default_mode: ClassVar[str] = "mean"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "easyvideo_r1": {
            "request": EXPLAINED,
            "answers": "native",
            "format_rule": "easyvideo_r1",
            "weights": {"accuracy": 0.9, "format": 0.1},
        },
        "onethinker": {
            "answer_format": "think",
            "answers": "native",
            "format_rule": "tags",
            "normalise": False,
            "weights": {"accuracy": 0.9, "format": 0.1, "structure": 1.0},
        },
    }
    metric_names: ClassVar[tuple[str, ...]] = (
        "tiou",
        "iou",
        "viou",
        "viou@0.3",
        "viou@0.5",
        "correct",
        "unreadable",
    )

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format; structure where a weight names it."""
        parts: dict[str, PartFactory] = {
            "accuracy": _accuracy_part,
            "format": self.format_factory(),
        }
        if "structure" in named_parts(self.settings):
            parts["structure"] = structure_part(self.answer_format, _structure)
        return parts

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> dict[str, Any]:
        """{"time": [start, end] in seconds, "boxes": {seconds as text: box in pixels}}; boxes at most a second beside the time."""
        from mmrl.tasks.readers.common import RowError

        if not isinstance(value, Mapping) or not {"time", "boxes"} <= set(value) or not sizes:
            raise RowError(
                '{"time": [start, end], "boxes": {"18": [x1, y1, x2, y2], ...}} and a video',
                repr(value)[:80],
                "fix the row",
            )
        step = params.get("step", 1)
        if type(step) not in (int, float) or not 0 < step < math.inf:
            raise RowError(
                "params.step in seconds, above 0", repr(step)[:40], "correct or remove it"
            )
        spans = check_spans(value["time"], params)
        if len(spans) != 1:
            raise RowError("one span as time", f"{len(spans)}", "write one row per span")
        boxes = check_boxes(value["boxes"], frame, sizes[0], params)
        if min(map(float, boxes)) < spans[0][0] - max(1.0, step) or max(map(float, boxes)) > spans[
            0
        ][1] + max(1.0, step):
            raise RowError(
                "boxes inside the time",
                f"times {', '.join(boxes)[:60]} for {spans[0]}",
                "are the keys seconds?",
            )
        return {"time": spans[0], "boxes": boxes}

    def fill_prompt(self, prompt: str, sample: Sample, template: Template) -> str:
        """As the base, with {duration} and {step}."""
        step = sample.params.get("step", 1)
        prompt = prompt.replace(
            "{step}", "whole second" if step == 1 else f"multiple of {spell_seconds(step)} seconds"
        )
        prompt = prompt.replace("{duration}", spell_seconds(need_duration(sample), 2))
        return super().fill_prompt(prompt, sample, template)

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> Tube:
        """Span and boxes. Reasons: those of mmrl.rewards.tracks and mmrl.rewards.times; no_time, several_spans, not_keyed."""
        parsed = parse_track(answer)
        # as in the papers, each half is judged apart
        if self.pays_unread and parsed.reason in (None, "no_boxes"):
            return self._halves(parsed, answer, sample, ctx)
        if parsed.reason:
            raise AnswerError(parsed.reason)
        if parsed.time is None:
            raise AnswerError("no_time")
        if parsed.time.reason or len(parsed.time.spans) != 1:
            raise AnswerError(parsed.time.reason or "several_spans")
        if parsed.listed:
            raise AnswerError("not_keyed")
        return Tube(
            parsed.time.spans[0], boxes_to_pixels(parsed.boxes, sample, ctx), parsed.unreadable
        )

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """The track of a released model, see mmrl.rewards.reading.tracks."""
        return track_in(answer)

    def _halves(self, parsed: TrackParse, answer: str, sample: Sample, ctx: RewardContext) -> Tube:
        time = parsed.time
        if parsed.reason is not None:
            value = load_json(strip_fence(answer))
            time = spans_of(value["time"]) if isinstance(value, dict) and "time" in value else None
        if parsed.listed or (time is not None and len(time.spans) > 1):
            raise AnswerError("not_keyed" if parsed.listed else "several_spans")
        span = time.spans[0] if time is not None and time.spans else _NO_SPAN
        if span == _NO_SPAN and not parsed.boxes:
            raise AnswerError(parsed.reason or "no_time")
        return Tube(span, boxes_to_pixels(parsed.boxes, sample, ctx))

    def measure(self, value: Tube, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """tiou, iou (mean over the true keys, whatever the predicted time), viou, viou@0.3, viou@0.5 (above the level),
        correct (viou >= 0.5), unreadable (boxes of the answer that could not be read)."""
        truth = _true_span(sample)
        viou, boxes = (
            _viou(value.boxes, value.span, truth, sample),
            mean(track_ious(value.boxes, true_boxes(sample))),
        )
        values = (
            span_iou(value.span, truth),
            boxes,
            viou,
            float(viou > 0.3),
            float(viou > 0.5),
            float(viou >= 0.5),
            float(value.unreadable),
        )
        return dict(zip(self.metric_names, values, strict=True))

    def describe(self, value: Tube | None, sample: Sample, ctx: RewardContext) -> Mapping[str, Any]:
        """pred_spans, gold_spans in seconds; pred_tracks, gold_tracks ({seconds as text: box in pixels of the displayed frame})."""
        return {
            "pred_spans": [] if value is None else [list(value.span)],
            "gold_spans": [list(_true_span(sample))],
            "pred_tracks": {} if value is None else tracks_by_second(value.boxes, sample, ctx),
            "gold_tracks": tracks_by_second(true_boxes(sample), sample, ctx),
            "frame": CoordFrame.ABS_ORIG.value,
            "duration": duration_of(sample, ctx),
        }

    def _spell(
        self, span: Sequence[float], boxes: Mapping[float, Sequence[float]], ctx: RewardContext
    ) -> str:
        times = ", ".join(spell_seconds(time) for time in span)
        return f'{{"time": [{times}], "boxes": {boxes_text(boxes, ctx.frame)}}}'

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The truth, boxes in ctx.frame."""
        size = clip_size(sample, ctx)
        boxes = {key: from_picture(box, ctx.frame, size) for key, box in true_boxes(sample).items()}
        return self._spell(_true_span(sample), boxes, ctx)

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """A time that misses the true one, and boxes beside the object."""
        return self._spell(
            beside_spans([_true_span(sample)], duration_of(sample, ctx)),
            wrong_boxes(sample, ctx),
            ctx,
        )

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        """m_tIoU, m_vIoU, vIoU@0.3, vIoU@0.5 (VidSTG, HC-STVG) and st_grounding.jsonl with every tube."""
        from mmrl.tasks.metrics.tracking import tube_benchmark

        return tube_benchmark(pairs, folder)

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """m_tIoU, m_vIoU, vIoU@0.3, vIoU@0.5, parse_failure_rate, truncated_rate: over all rows."""
        if not rows:
            return {}
        names = {"m_tIoU": "tiou", "m_vIoU": "viou", "vIoU@0.3": "viou@0.3", "vIoU@0.5": "viou@0.5"}
        means = {
            name: math.fsum(row.metrics.get(key, 0.0) for row in rows) / len(rows)
            for name, key in names.items()
        }
        return {**means, **super().summarize(rows)}

    def example_data(self, folder: str) -> str:
        """8 clips (folders of frames) in which a moving square appears and disappears; returns their data.jsonl."""
        from mmrl.tasks.examples import write_rows
        from mmrl.tasks.frame_clips import COLORS, draw_square_clip

        rows = []
        for index in range(8):
            color, start = list(COLORS)[index % len(COLORS)], 1 + index % 3
            path = ((70, 4 + index), (6, 50))
            clip = draw_square_clip(
                Path(folder) / f"clips/{index:03d}", color, (start, start + 4), 8.0, path
            )
            boxes = {str(second): clip.box(second) for second in range(start, start + 4)}
            rows.append(
                {
                    "id": f"{index:03d}",
                    "video": f"clips/{index:03d}",
                    "question": f"the {color} square",
                    "answer": {"time": list(clip.span), "boxes": boxes},
                    "params": clip.facts,
                }
            )
        return write_rows(folder, rows)
