"""Model text -> times and spans of a video, by strict rules that cannot be gamed and that fail with a named reason.

A time is a number (`12.5`, also `12.5s`, `12.5 seconds`) or a clock reading `mm:ss.ff`, `hh:mm:ss.ff` (Qwen3-VL). A span is
two times, in one of these spellings and nothing beside them:

    [2.5, 7]    2.5 to 7    00:02.50 - 00:07.00    [[1, 2], [4, 6]]    1 to 2, 4 to 6    [(1, 2), (4, 6)]
    {"time": [2.5, 7]}    {"start_time": "2.5", "end_time": "7"}    [{"start": 1, "end": 2}, {"start": 4, "end": 6}]

A minus is read in every spelling (`-3 to 5` is `[-3, 5]`): times outside the video and spans that end before they start are what
was said, and rewards and metrics judge them. For keys of tracks a negative time is no time.

What a number means (seconds, or a share of the duration) is declared by the task, never guessed; clock readings are always
seconds. Model text is data: JSON, never eval. Every step is linear in the length.

    python -c "from mmrl.rewards.times import parse_spans; print(parse_spans('00:02.50 to 00:07.00'))"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mmrl.rewards.parsing import MAX_ANSWER_CHARS, load_json, strip_fence

__all__ = [
    "MAX_SPANS",
    "MAX_TIME",
    "SPAN_KEYS",
    "Span",
    "SpanParse",
    "parse_spans",
    "parse_time",
    "read_json",
    "spans_of",
]

Span = tuple[float, float]

MAX_SPANS = 100
"""An answer with more spans is refused ('too_many_spans')."""
MAX_TIME = 1e7
"""Larger magnitudes are refused ('out_of_range'): 115 days."""
SPAN_KEYS = (
    "time",
    "times",
    "span",
    "spans",
    "timestamp",
    "timestamps",
    "window",
    "windows",
    "segment",
    "segments",
)
_ENDS = (("start", "end"), ("start_time", "end_time"))

_CLOCK = r"(?:[0-9]{1,3}:)?[0-9]{1,3}:[0-9]{2}(?:\.[0-9]{1,9})?"
_VALUE, _UNIT = (
    rf"(?:{_CLOCK}|[0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)",
    r"(?: ?(?:seconds|second|secs|sec|s)\b)?",
)
_SIGNED = rf"(-?{_VALUE}){_UNIT}"
_TIME, _SIGNED_TIME = re.compile(rf"({_VALUE}){_UNIT}"), re.compile(_SIGNED)
_PAIR = re.compile(
    rf"(?:from )?{_SIGNED} ?(?:to\b|and\b|until\b|-|\u2013|\u2014) ?{_SIGNED}", re.IGNORECASE
)
_BETWEEN = re.compile(r" ?[,;] ?")
_BARE_CLOCK = re.compile(rf"""(?<![\w"':.])(-?{_CLOCK})(?![\w"':.])""")


@dataclass(frozen=True)
class SpanParse:
    """Spans as written (order and extent are not judged here); empty with the `reason` when parsing failed. `clock` is True
    when a time was a clock reading and therefore seconds."""

    spans: tuple[Span, ...]
    reason: str | None = None
    clock: bool = False


class _Unreadable(ValueError):
    """Carries the reason."""


def parse_time(text: str) -> float | None:
    """Seconds (or the bare number) of one time text; None for anything else. '01:75' is no clock reading, '-3' no time."""
    return _read(_TIME, text)


def _read(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.fullmatch(" ".join(text.split()).lower()) if len(text) <= 64 else None
    return _seconds(found[1]) if found else None


def _seconds(text: str) -> float | None:
    """A matched time: seconds below 60 behind a colon, minutes below 60 behind another. A minus is that of the whole."""
    fields = [float(field) for field in text.removeprefix("-").split(":")]
    if any(value >= 60 for value in fields[1:]):
        return None
    total = 0.0
    for value in fields:
        total = 60 * total + value
    return -total if text.startswith("-") else total


def _time_of(value: Any) -> tuple[float, bool]:
    """(time, is it a clock reading) of a JSON value. Raises _Unreadable."""
    if isinstance(value, str):
        seconds = _read(_SIGNED_TIME, value)
        if seconds is None:
            raise _Unreadable("not_a_time")
        value, clock = seconds, ":" in value
    elif type(value) in (int, float):
        clock = False
    else:
        raise _Unreadable("not_a_time")
    if not -MAX_TIME <= value <= MAX_TIME:  # also for infinity and huge integers
        raise _Unreadable("out_of_range")
    return float(value), clock


def _pair(values: list[Any]) -> tuple[Span, bool]:
    if len(values) != 2:
        raise _Unreadable("wrong_count")
    (start, first), (end, second) = _time_of(values[0]), _time_of(values[1])
    return (start, end), first or second


def _find(value: Any, depth: int = 0) -> list[tuple[Span, bool]]:
    """All spans of a JSON value. Raises _Unreadable."""
    if isinstance(value, dict):
        ends = [pair for pair in _ENDS if any(key in value for key in pair)]
        keys = [key for key in SPAN_KEYS if key in value]
        if len(ends) + len(keys) != 1:
            raise _Unreadable("ambiguous_keys" if ends or keys else "no_time_key")
        if keys:
            return _find(value[keys[0]], depth)
        if not all(key in value for key in ends[0]):
            raise _Unreadable("wrong_count")
        return [_pair([value[key] for key in ends[0]])]
    if not isinstance(value, list):
        raise _Unreadable("not_spans")
    if not value:
        raise _Unreadable("no_span")
    if not any(isinstance(item, (list, dict)) for item in value):
        return [_pair(value)]
    if depth or len(value) > MAX_SPANS:
        raise _Unreadable("too_many_spans" if not depth else "not_spans")
    return [span for item in value for span in _find_one(item)]


def _find_one(item: Any) -> list[tuple[Span, bool]]:
    if not isinstance(item, (list, dict)):
        raise _Unreadable("not_spans")
    return _find(item, 1)


def spans_of(value: Any) -> SpanParse:
    """The spans of a JSON value. Reasons: not_spans, no_span, not_a_time, wrong_count, no_time_key, ambiguous_keys,
    too_many_spans, out_of_range."""
    try:
        found = _find(value)
    except _Unreadable as err:
        return SpanParse((), str(err))
    return SpanParse(tuple(span for span, _ in found), None, any(clock for _, clock in found))


def _from_words(text: str) -> SpanParse | None:
    """`2.5 to 7, 9 to 12`; None when the text is not made of such pairs."""
    spans: list[Span] = []
    place, clock = 0, False
    while True:
        found = _PAIR.match(text, place)
        if not found or len(spans) >= MAX_SPANS:
            return SpanParse((), "too_many_spans") if found else None
        start, end = _seconds(found[1]), _seconds(found[2])
        if start is None or end is None:
            return SpanParse((), "not_a_time")
        if max(abs(start), abs(end)) > MAX_TIME:
            return SpanParse((), "out_of_range")
        spans.append((start, end))
        clock = clock or ":" in found[0]
        place = found.end()
        if place == len(text):
            return SpanParse(tuple(spans), None, clock)
        between = _BETWEEN.match(text, place)
        if not between:
            return None
        place = between.end()


def read_json(text: str, broken_numbers: bool = False) -> Any:
    """JSON, or Python's spelling of it, in which clock readings may stand without quotes. Raises ValueError, RecursionError."""
    try:
        return load_json(text, broken_numbers)
    except ValueError:
        quoted = _BARE_CLOCK.sub(r'"\1"', text)
        if quoted == text:
            raise
        return load_json(quoted, broken_numbers)


def parse_spans(answer: str) -> SpanParse:
    """All spans of an answer text; the text must be spans and nothing else.

    Reasons: answer_too_long, those of `spans_of`, not_finite. Never raises on any text.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return SpanParse((), "answer_too_long")
    text = strip_fence(answer)
    words = " ".join(text.removesuffix(".").split())
    spoken = (
        _from_words(words)
        if words[:1].isdigit() or words[:1] == "-" or words[:5].lower() == "from "
        else None
    )
    if spoken is not None:
        return spoken
    try:
        value = read_json(text)
    except (ValueError, RecursionError) as err:
        known = {"not a number": "not_finite", "duplicate keys": "ambiguous_keys"}
        return SpanParse(
            (),
            next(
                (reason for start, reason in known.items() if str(err).startswith(start)),
                "not_spans",
            ),
        )
    return spans_of(value)
