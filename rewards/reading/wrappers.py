"""What may stand around an answer of any kind without changing it, removed layer by layer.

    ```json [..] ```   ```python ..```     a fence, with the name of any language
    \\boxed{7}   $7$   \\(7\\)   \\[7\\]   \\text{B}      mathematics around the whole
    "7"   '7'   “7”   `7`   **7**   *7*   __7__         quotes and emphasis around the whole
    Answer: 7   Final answer: 7   **Answer:** 7   答案：7  the word in front
    7.   7!   7,   7;   7。                              one closing mark
    spaces of every kind (no-break, ideographic, zero width)

A mark is a wrapper only where both its ends are there and nothing of its kind stands between them: `"a" or "b"` keeps its quotes.
The same table holds for numbers, letters, boxes, points, spans, tracks, actions and short texts.

    python -c "from mmrl.rewards.reading.wrappers import unwrap; print(unwrap('\\\\boxed{\\\\text{B}}'))"
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["unwrap", "unwrap_text"]

_MOST_LAYERS = 8
_SPACE = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_NO_WIDTH = re.compile("[\u200b\u2060\ufeff]")
_PAIRS = (
    ("$$", "$$"),
    ("$", "$"),
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("**", "**"),
    ("__", "__"),
    ("*", "*"),
    ("_", "_"),
    ("`", "`"),
    ('"', '"'),
    ("'", "'"),
    ("\u201c", "\u201d"),
    ("\u2018", "\u2019"),
    ("\u300c", "\u300d"),
)
_OPENING = frozenset(left[0] for left, _ in _PAIRS)
_COMMANDS = ("\\boxed{", "\\fbox{", "\\text{", "\\textbf{", "\\mathrm{", "\\mathbf{")
_LANGUAGE = re.compile(r"```(?:[A-Za-z][\w+#.-]*[ \t]*\r?\n|(?:json|JSON|python|text)\b)?")
_ANSWER = r"(?:the )?(?:final )?answer"
_IN_FRONT = re.compile(
    rf"{_ANSWER} ?[:\uff1a]|(\*\*|__){_ANSWER} ?(?:[:\uff1a]\1|\1 ?[:\uff1a])|\u7b54\u6848 ?[:\uff1a]",
    re.IGNORECASE,
)
_CLOSING = frozenset(".!,;\u3002\uff01\uff0c\uff1b")


def _command(text: str) -> str | None:
    """What stands in \\boxed{...} or its like, when that is the whole text."""
    for name in _COMMANDS:
        if text.startswith(name):
            break
    else:
        return None
    depth = 0
    for place in range(len(name) - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[len(name) : place] if place == len(text) - 1 else None
    return None


def _fenced(text: str) -> str | None:
    """What stands in a fence that is the whole text."""
    if (
        len(text) <= 6
        or not text.startswith("```")
        or not text.endswith("```")
        or "```" in text[3:-3]
    ):
        return None
    found = _LANGUAGE.match(text)
    return text[found.end() if found else 3 : -3] or None


def _paired(text: str) -> str | None:
    """What stands between quotes, dollars or emphasis around the whole text."""
    for left, right in _PAIRS:
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            inside = text[len(left) : -len(right)]
            if (right not in inside and left not in inside) or (
                inside[0] in "[{" and inside[-1] in "]}"
            ):
                return inside  # JSON has quotes of its own
    return None


def _one_layer(text: str) -> str:
    first, last = text[0], text[-1]
    if first == "`" and (inside := _fenced(text)) is not None:
        return inside
    if first == "\\" and (inside := _command(text)) is not None:
        return inside
    if first in _OPENING and (inside := _paired(text)) is not None:
        return inside
    if first in "aAfFtT*_\u7b54" and (found := _IN_FRONT.match(text)) and found.end() < len(text):
        return text[found.end() :]
    if last in _CLOSING and len(text) > 1 and text[-2] not in ".\u2026":  # dots in a row are no end
        return text[:-1]
    return text


def unwrap(text: str) -> str:
    """`text` without the wrappers around the whole of it, at most eight of them; '' for nothing but spaces. Linear time."""
    text = (text if text.isascii() else _SPACE.sub(" ", _NO_WIDTH.sub("", text))).strip()
    for _ in range(_MOST_LAYERS):
        inner = _one_layer(text).strip() if text else text
        if inner == text or not inner:
            break
        text = inner
    return text


def unwrap_text(text: str, truths: Sequence[str]) -> str:
    """`text` for comparison with texts, out of a fence, \\boxed{} and `Answer:`; quotes, emphasis and marks are part of a text.

    It stays as it stands where one of `truths` wears such a wrapper itself.
    """
    inner = _bare_text(text)
    return text if inner == text or any(_bare_text(truth) != truth for truth in truths) else inner


def _bare_text(text: str) -> str:
    for _ in range(_MOST_LAYERS):
        inner = None
        if text[:1] == "`":
            inner = _fenced(text)
        elif text[:1] == "\\":
            inner = _command(text)
        elif text[:1] in ("a", "A", "f", "F", "t", "T", "*", "_", "\u7b54") and (
            found := _IN_FRONT.match(text)
        ):
            inner = text[found.end() :]
        if inner is None or not inner.strip():
            break
        text = inner.strip()
    return text
