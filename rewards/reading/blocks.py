"""Where the one JSON value of a text stands: in its only fence, or between brackets in prose.

    Sure! ```json [{"bbox_2d": [1, 2, 3, 4]}] ```        The cat is at [1, 2, 3, 4].

Two values beside each other are several answers. Every scan is one pass over the characters.

    python -c "from mmrl.rewards.reading.blocks import json_block; print(json_block('The box is [1, 2, 3, 4].'))"
"""

from __future__ import annotations

import re

from mmrl.rewards.reading.scanner import marks
from mmrl.rewards.reading.words import DOUBTS, Unread

__all__ = ["blocks", "json_block"]

MOST_CHARS = 40_000
_FENCED = re.compile(
    r"```(?:[A-Za-z][\w+#.-]*[ \t]*\r?\n|(?:json|JSON|python)\b)?((?:[^`]|`(?!``))*)```"
)


def blocks(text: str) -> list[tuple[int, int]]:
    """(start, end) of the outermost [...] and {...} of a text, strings inside them respected; an unclosed one is left out."""
    if "[" not in text and "{" not in text:
        return []
    found: list[tuple[int, int]] = []
    start = 0
    for place, char, depth in marks(text, "[{"):
        if not depth:
            found.append((start, place + 1))
        elif depth == 1 and char in "[{":
            start = place
    return found


def json_block(text: str) -> str | None:
    """The one JSON value of a text with prose around it; None for a text without any. Raises Unread: several_values, hedged."""
    if len(text) > MOST_CHARS:
        return None
    fences = list(_FENCED.finditer(text)) if "```" in text else []
    if fences:
        if len(fences) > 1:
            raise Unread("several_values")
        inside, around = (
            fences[0][1].strip(),
            text[: fences[0].start()] + " " + text[fences[0].end() :],
        )
        if blocks(around):
            raise Unread("several_values")
    else:
        places = blocks(text)
        if not places:
            return None
        if len({text[start:end] for start, end in places}) > 1:
            raise Unread("several_values")
        start, end = places[0]
        inside, around = text[start:end], text[:start] + " " + text[places[-1][1] :]
    if DOUBTS.search(around):
        raise Unread("hedged")
    return inside
