"""The brackets and commas of a text that are no part of a string: what finds blocks in prose, arguments of a call, items of a list.

A closing bracket counts where it closes the one opened last. A quote begins a string only inside brackets and only where a value
may begin (the dog's box is none), and it ends one only where a value may end ('it's here' is one). One pass, whatever the text.

    python -c "from mmrl.rewards.reading.scanner import marks; print(list(marks('see [1, \\"]\\"]')))"
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["CLOSING", "marks"]

CLOSING = {"[": "]", "{": "}", "(": ")"}
_MARK = re.compile(r"[\[\]{}(),'\"\\]")
_AFTER = ("", ",", ")", "]", "}", ":")


def _begins(text: str, place: int) -> bool:
    """Whether a value may begin at `place`: behind an opening bracket, a comma, a colon, an equals sign, or with the text."""
    while place and text[place - 1].isspace():
        place -= 1
    return not place or text[place - 1] in "[{(,:="


def marks(text: str, opening: str = "[{(", inside: str = "") -> Iterator[tuple[int, str, int]]:
    """(place, bracket or comma, how many brackets are open behind it), strings left out, commas only inside brackets.

    `opening` are the brackets that count; `inside` is the closing bracket of one that was opened before the text begins.
    """
    stack, quote, skipped = [*inside], "", 0
    for found in _MARK.finditer(text):
        place, char = found.start(), found[0]
        if place < skipped:
            continue
        if char == "\\":
            skipped = place + 2 if quote else 0
        elif quote:
            if char == quote and text[place + 1 : place + 2].strip() in _AFTER:
                quote = ""
        elif char in "'\"":
            quote = char if stack and _begins(text, place) else ""
        elif char in opening:
            stack.append(CLOSING[char])
            yield place, char, len(stack)
        elif stack and char == stack[-1]:
            stack.pop()
            yield place, char, len(stack)
        elif stack and char == ",":
            yield place, char, len(stack)
