"""Sentences with times -> spans as the strict parser reads them.

    The event happens in 10.0 - 20.0 seconds.      It starts at 3.2 s and ends at 7.5 s.      between 00:10 and 00:20
    Sure: ```json [{"start": "00:10.0", "end": "00:20.0"}]```

Every number of the text must belong to a span, and nothing may doubt it.

    python -c "from mmrl.rewards.reading.times import spans_in; print(spans_in('in 10.0 - 20.0 seconds.'))"
"""

from __future__ import annotations

import re

from mmrl.rewards.reading.blocks import json_block
from mmrl.rewards.reading.words import DOUBTS, Unread

__all__ = ["spans_in"]

_MOST_CHARS, _MOST_SPANS = 4_000, 100
_TIME = r"((?:[0-9]{1,3}:)?[0-9]{1,3}:[0-9]{2}(?:\.[0-9]{1,9})?|[0-9]{1,9}(?:\.[0-9]{1,9})?)"
_UNIT = r"(?:\s?(?:seconds|second|secs|sec|s)\b)?"
_AT = r"(?:(?:the|at|around|second|seconds|time|timestamp)\s+){0,3}"
_PAIR = re.compile(
    rf"(?<![\w.:]){_TIME}{_UNIT}\s?(?:to\b|and\b|until\b|till\b|through\b|-|\u2013|\u2014|~)\s?{_AT}{_TIME}{_UNIT}(?![\w:])"
    rf"|\b(?:start|begin|starting|beginning)s?\s(?:time\s)?(?:is\s)?(?:at|from|:)?\s?{_AT}{_TIME}{_UNIT}[\s,;.]{{0,3}}"
    rf"(?:(?:and|it|the event)\s){{0,2}}(?:end|finish|stop|ending)(?:s|es)?\s(?:time\s)?(?:is\s)?(?:at|by|:)?\s?{_AT}{_TIME}{_UNIT}"
    rf"(?![\w:])",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[0-9]")


def spans_in(text: str) -> str | None:
    """`10 to 20, 30 to 40`, or the JSON of a text with prose around it; None without any. Raises Unread: several_values (a number
    that belongs to no span), hedged."""
    if len(text) > _MOST_CHARS:
        return None
    if "[" in text or "{" in text:
        return json_block(text)
    found = list(_PAIR.finditer(text))
    if not found or len(found) > _MOST_SPANS:
        return None
    around = _PAIR.sub(" ", text)
    if _NUMBER.search(around):
        raise Unread("several_values")
    if DOUBTS.search(around):
        raise Unread("hedged")
    spans = dict.fromkeys(tuple(group for group in match.groups() if group) for match in found)
    return ", ".join(f"{start} to {end}" for start, end in spans)
