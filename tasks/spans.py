"""Times and spans as tasks ask for them, read them and write them; sizes and duration of the clip a sample is about.

All times of samples are seconds from the beginning of the shown part. How an answer spells them is a TimeFormat:

    spelling    list [2.5, 7] (default), to `2.5 to 7`, json {"time": [2.5, 7]}, start_end {"start_time": "2.5", ...},
                clock ["00:02.50", "00:07.00"]; it decides what is asked for, every spelling of mmrl.rewards.times is read
    time_frame  seconds (default), or rel1: numbers are shares of the duration. Declared, never guessed
    spans       many (default): a list of spans; one: exactly one, several are a failure

    python -c "from mmrl.tasks.spans import TimeFormat; print(TimeFormat('to', 'seconds', 'one').write([(2.5, 7)], 10))"
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.rewards.temporal import clip_spans, merged
from mmrl.rewards.times import Span, SpanParse
from mmrl.tasks.levels import AnswerError
from mmrl.types import ImageSize, RewardContext, Sample

__all__ = [
    "SPELLINGS",
    "TIMED",
    "TIME_WORDS",
    "ClipPair",
    "TimeFormat",
    "beside_spans",
    "check_spans",
    "clip_pair",
    "clip_size",
    "duration_of",
    "need_duration",
    "note_outside",
    "outside_clip",
    "spell_seconds",
    "true_spans",
    "video_id",
]

_TIMES = {
    "seconds": "in seconds",
    "rel1": "as fractions from 0 to 1 of the video's duration",
    "clock": "as mm:ss.ff",
}
TIMED = ("temporal_grounding", "grounded_qa", "st_grounding")
"""Tasks whose truths hold spans of time."""
TIME_WORDS: Mapping[str, str] = _TIMES
"""How times are asked for."""
SPELLINGS: Mapping[str, tuple[str, str]] = {
    "list": ("[start, end]", "[[start, end], ...]"),
    "to": ("start to end", "start to end, start to end, ..."),
    "json": ('{"time": [start, end]}', '{"time": [[start, end], ...]}'),
    "start_end": (
        '{"start_time": "start", "end_time": "end"}',
        '[{"start_time": "start", "end_time": "end"}, ...]',
    ),
    "clock": ('["mm:ss.ff", "mm:ss.ff"]', '[["mm:ss.ff", "mm:ss.ff"], ...]'),
}
"""Spelling -> what is asked for: one span, many spans."""


# the clip


def duration_of(sample: Sample, ctx: RewardContext | None = None) -> float | None:
    """Seconds of the shown part: the clip's as it was read, else params.duration; None when neither is known."""
    if ctx is not None and ctx.videos:
        return ctx.videos[0].duration_s
    duration = sample.params.get("duration")
    known = (
        isinstance(duration, (int, float))
        and not isinstance(duration, bool)
        and 0 < duration < math.inf
    )
    return float(duration) if known else None  # type: ignore[arg-type]


def need_duration(sample: Sample, ctx: RewardContext | None = None) -> float:
    """`duration_of`, or DataError."""
    duration = duration_of(sample, ctx)
    if duration is None:
        raise DataError(
            f"expected params.duration (seconds of the shown part) in sample {sample.id!r}, found "
            f"{sample.params.get('duration')!r}; add it"
        )
    return duration


def clip_size(sample: Sample, ctx: RewardContext) -> ImageSize:
    """Pixels of a displayed frame, before and after the processor's resize; raises DataError when the frame needs them and
    they are unknown."""
    if ctx.videos:
        return ImageSize(ctx.videos[0].orig_wh, ctx.videos[0].resized_wh)
    width, height = sample.params.get("width"), sample.params.get("height")
    if ctx.frame is CoordFrame.ABS_RESIZED or not width or not height:
        raise DataError(
            f"expected ctx.videos with the size of the clip of sample {sample.id!r} to read frame "
            f"{ctx.frame.value}, found none; pass it"
        )
    return ImageSize((width, height), (width, height))


def video_id(sample: Sample) -> str:
    """params.vid or params.video_id, else the clip's file name without its ending, else the sample's id."""
    known = sample.params.get("vid", sample.params.get("video_id"))
    if known is not None:
        return str(known)
    return PurePath(sample.videos[0]).stem if sample.videos else sample.id


# truths


def check_spans(value: Any, params: Mapping[str, Any]) -> list[list[float]]:
    """The true spans of a row, [[start, end], ...] in seconds; one bare [start, end] too. They stay as they are: Charades-STA
    has ends up to 1.5 s behind the video's end, NExT-GQA starts before 0, and the official numbers use them so (`outside_clip`
    counts them). Raises RowError for anything else, for a start that is not before the end, and for a span wholly outside the
    video."""
    from mmrl.tasks.readers.common import RowError

    if (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(type(v) in (int, float) for v in value)
    ):
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        raise RowError(
            "spans as [[start, end], ...] in seconds", repr(value)[:80], "write at least one span"
        )
    duration = params.get("duration")
    spans: list[list[float]] = []
    for pair in value:
        if (
            not isinstance(pair, (list, tuple))
            or len(pair) != 2
            or not all(type(v) in (int, float) and math.isfinite(v) for v in pair)
        ):
            raise RowError(
                "a span as two numbers [start, end]", repr(pair)[:80], "write seconds, not text"
            )
        start, end = pair
        if start >= end:
            raise RowError(
                "a span with start before end", repr(list(pair)), "correct or remove the row"
            )
        if end <= 0 or (duration is not None and start >= duration):
            raise RowError(
                f"a span inside the video of {duration} s",
                repr(list(pair)),
                "are the times those of the shown part? correct or remove the row",
            )
        spans.append([start, end])
    return spans


def outside_clip(spans: Sequence[Sequence[float]], duration: float | None) -> bool:
    """True when a time lies before 0 or behind the duration (None: unknown, only before 0)."""
    most = math.inf if duration is None else duration
    return any(not 0 <= time <= most for span in spans for time in span)


def true_spans(sample: Sample) -> list[Span]:
    """The spans of a temporal truth: a list of spans, or the spans or time of an object."""
    answer = sample.answer
    if isinstance(answer, Mapping):
        answer = answer["spans"] if "spans" in answer else [answer["time"]]
    return [(float(start), float(end)) for start, end in answer]


ClipPair = Callable[
    [Sequence[Sequence[float]], Sample, RewardContext], tuple[Sequence[Sequence[float]], list[Span]]
]
"""(predicted spans, sample, ctx) -> (predicted, true spans) as a reward compares them."""


def clip_pair(clip: Any) -> ClipPair:
    """The setting `clip` of a reward: false, both sides as they are; true, both clipped to the shown part first, so that time
    outside it counts neither way. Raises ConfigError for anything else."""
    if not isinstance(clip, bool):
        raise ConfigError(
            f"expected accuracy.clip true or false, found {clip!r}; true clips times to the shown part before the "
            "reward, metrics never do"
        )

    def pair(
        spans: Sequence[Sequence[float]], sample: Sample, ctx: RewardContext
    ) -> tuple[Sequence[Sequence[float]], list[Span]]:
        truths = true_spans(sample)
        if not clip:
            return spans, truths
        duration = duration_of(sample, ctx)
        return clip_spans(spans, duration), clip_spans(truths, duration)

    return pair


def beside_spans(spans: Sequence[Sequence[float]], duration: float | None) -> Span:
    """A span that meets none of `spans`: the middle of the longest gap, or one without length where there is none."""
    union = merged(spans)
    edges = [
        0.0,
        *(time for span in union for time in span),
        duration if duration is not None else union[-1][1] + 10.0,
    ]
    start, end = max(zip(edges[::2], edges[1::2], strict=True), key=lambda gap: gap[1] - gap[0])
    quarter = (end - start) / 4
    return (start + quarter, end - quarter) if end - start > 0.2 else (0.0, 0.0)


# text


@functools.lru_cache(maxsize=4096)  # the times of a track are asked for in every answer to it
def spell_seconds(value: float, decimals: int = 3) -> str:
    """A time with as many decimals as it needs: 18, 2.5, 0.333. Never '-0'."""
    text = f"{value:.{decimals}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text


def _clock(seconds: float) -> str:
    hundredths = math.floor(abs(seconds) * 100 + 0.5)
    minutes, rest = divmod(hundredths, 6000)
    return (
        f"{'-' if seconds < 0 < hundredths else ''}{minutes:02d}:{rest // 100:02d}.{rest % 100:02d}"
    )


def note_outside(samples: Iterable[Sample]) -> Counter[str]:
    """How many samples with true spans have one that reaches out of the clip, for the notes of a reader; such truths stay as
    they are."""
    count = sum(
        outside_clip(true_spans(sample), duration_of(sample))
        for sample in samples
        if sample.task in TIMED
    )
    return Counter({"true time reaches out of its clip, kept": count} if count else {})


class TimeFormat:
    """How a task's answers spell spans. Raises ConfigError for unknown names and for clock readings as shares."""

    def __init__(self, spelling: Any, time_frame: Any, spans: Any, name: str = "task") -> None:
        for key, value, known in (
            ("spelling", spelling, tuple(SPELLINGS)),
            ("time_frame", time_frame, ("seconds", "rel1")),
            ("spans", spans, ("many", "one")),
        ):
            if value not in known:
                raise ConfigError(
                    f"unknown {name}.{key} {value!r}; expected one of {', '.join(known)}."
                    f"{did_you_mean(str(value), known)}"
                )
        if spelling == "clock" and time_frame == "rel1":
            raise ConfigError(
                f"expected {name}.time_frame seconds with spelling clock, found rel1; clock readings are seconds"
            )
        self.spelling, self.time_frame, self.many = str(spelling), str(time_frame), spans == "many"

    @property
    def shape(self) -> str:
        """What is asked for."""
        return SPELLINGS[self.spelling][self.many]

    @property
    def words(self) -> str:
        """'in seconds' and the like."""
        return _TIMES["clock" if self.spelling == "clock" else self.time_frame]

    def seconds(self, parsed: SpanParse, sample: Sample, ctx: RewardContext) -> list[Span]:
        """Parsed spans in seconds, otherwise as they were written: not sorted, not clipped. Raises AnswerError: the parser's
        reason, several_spans (one was asked for), not_in_frame (a clock reading where shares were asked for)."""
        if parsed.reason:
            raise AnswerError(parsed.reason)
        if not self.many and len(parsed.spans) > 1:
            raise AnswerError("several_spans")
        if self.time_frame == "seconds":
            return list(parsed.spans)
        if parsed.clock:
            raise AnswerError("not_in_frame")
        duration = need_duration(sample, ctx)
        return [(start * duration, end * duration) for start, end in parsed.spans]

    def write(self, spans: Sequence[Sequence[float]], duration: float | None) -> str:
        """Spans in seconds as answer text: to milliseconds, hundredths (clock) or 5 decimals (rel1)."""
        pairs = [[self.time(value, duration) for value in span] for span in spans]
        if self.spelling == "to":
            return ", ".join(f"{start} to {end}" for start, end in pairs)
        if self.spelling == "start_end":
            objects = [json.dumps({"start_time": start, "end_time": end}) for start, end in pairs]
            return "[" + ", ".join(objects) + "]" if self.many else objects[0]
        quote = '"' if self.spelling == "clock" else ""
        lists = [f"[{quote}{start}{quote}, {quote}{end}{quote}]" for start, end in pairs]
        text = "[" + ", ".join(lists) + "]" if self.many else lists[0]
        return f'{{"time": {text}}}' if self.spelling == "json" else text

    def time(self, seconds: float, duration: float | None) -> str:
        """One time as text."""
        if self.spelling == "clock":
            return _clock(seconds)
        if self.time_frame == "rel1":
            if duration is None:
                raise DataError(
                    "expected the duration to write shares of it, found none; add params.duration"
                )
            return spell_seconds(seconds / duration, 5)
        return spell_seconds(seconds)
