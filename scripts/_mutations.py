"""Text mutations for the reward fuzzer: what models write when they go wrong, and what people write to break parsers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["GARBAGE", "JUNK", "answer_of", "flooded", "mutate", "with_answer"]

_ALPHABET = [
    *"0123456789.,-+eE[](){}<>/\\\"'`:;|*#%$ \n\t_abcXYZ",
    "<answer>",
    "</answer>",
    "<think>",
    "</think>",
    "<|im_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "```json\n",
    "```",
    "\\boxed{",
    "nan",
    "Infinity",
    "1e999",
    "null",
    "True",
    "٣",
    "²",
    "½",
    "\u200b",
    "\u202e",
    "\x00",
    "🙂",
    "é",
    "中",
    "__import__('os')",
    "bbox_2d",
    "label",
    "yes",
    "no",
    "A",
    "B",
]
_NUMBERS = [
    "0",
    "-1",
    "1e9",
    "999999999999",
    "NaN",
    "0.5",
    "-0.0",
    "1e-320",
    "3.14159",
    "007",
    "１２",
]
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_ANSWER = re.compile(r"(<answer>)(.*?)(</answer>)", re.DOTALL)

GARBAGE = (
    "\u2603\u2603\u2603",
    " zzz qqq zzz",
    "\n\nI am quite sure of this.",
    " " + "\u2603" * 500,
    "\n#####\n",
    " [[[[",
    " }{ ",
)
"""Text that is part of no right answer and closes no tag, to stand behind an answer."""
JUNK = ("\u2603\u2603\u2603", "\u2603" * 40, "\u00a7\u00a7")
"""The same to stand inside an answer: no character of it is in any truth, not even a space, so that nothing may match."""


def _behind_thoughts(text: str) -> int:
    return max(0, text.find("</think>"))


def answer_of(text: str) -> str:
    """The text inside the first answer block behind the thoughts, or the whole text."""
    found = _ANSWER.search(text, _behind_thoughts(text))
    return found[2] if found else text


def with_answer(text: str, answer: str) -> str:
    """`text` with another answer inside its envelope."""
    found = _ANSWER.search(text, _behind_thoughts(text))
    return text[: found.start(2)] + answer + text[found.end(2) :] if found else answer


def flooded(answer: str, rng: random.Random, copies: int) -> list[str]:
    """A list answer with every element repeated, with one element repeated, and with near copies of its numbers."""
    try:
        value: Any = json.loads(answer)
    except (ValueError, RecursionError):
        return []
    if not isinstance(value, list) or not value:
        return []
    items = value if isinstance(value[0], (list, dict)) else [value]

    def near(item: Any) -> Any:
        if isinstance(item, dict):
            return {k: near(v) for k, v in item.items()}
        if isinstance(item, list):
            return [near(v) for v in item]
        return (
            item + rng.randint(-3, 3)
            if isinstance(item, int) and not isinstance(item, bool)
            else item
        )

    try:
        return [
            json.dumps(items + items),
            json.dumps(items + [items[0]] * copies),
            json.dumps(items + [near(rng.choice(items)) for _ in range(copies)]),
        ]
    except RecursionError:  # nested as deep as a parser allows: no list of answers
        return []


def _span(text: str, rng: random.Random) -> tuple[int, int]:
    a = rng.randrange(len(text) + 1)
    return a, min(len(text), a + rng.randrange(1, 12))


def _drop(text: str, rng: random.Random, others: Sequence[str]) -> str:
    a, b = _span(text, rng)
    return text[:a] + text[b:]


def _double(text: str, rng: random.Random, others: Sequence[str]) -> str:
    a, b = _span(text, rng)
    return text[:b] + text[a:]


def _insert(text: str, rng: random.Random, others: Sequence[str]) -> str:
    a = rng.randrange(len(text) + 1)
    return text[:a] + "".join(rng.choice(_ALPHABET) for _ in range(rng.randrange(1, 5))) + text[a:]


def _number(text: str, rng: random.Random, others: Sequence[str]) -> str:
    found = list(_NUMBER.finditer(text))
    if not found:
        return text
    spot = rng.choice(found)
    new = rng.choice(_NUMBERS) if rng.random() < 0.3 else str(rng.randrange(0, 1200))
    return text[: spot.start()] + new + text[spot.end() :]


def _nudge(text: str, rng: random.Random, others: Sequence[str]) -> str:
    return _NUMBER.sub(
        lambda m: f"{float(m[0]) + rng.randint(-9, 9):g}" if len(m[0]) < 8 else m[0], text
    )


def _cut(text: str, rng: random.Random, others: Sequence[str]) -> str:
    return text[: rng.randrange(len(text) + 1)]


def _splice(text: str, rng: random.Random, others: Sequence[str]) -> str:
    other = rng.choice(others)
    return text[: rng.randrange(len(text) + 1)] + other[rng.randrange(len(other) + 1) :]


def _case(text: str, rng: random.Random, others: Sequence[str]) -> str:
    return text.upper() if rng.random() < 0.5 else text.title()


def _repeat(text: str, rng: random.Random, others: Sequence[str]) -> str:
    return text * rng.randrange(2, 40)


def _deep(text: str, rng: random.Random, others: Sequence[str]) -> str:
    depth = rng.randrange(2, 300)
    return with_answer(
        text, "[" * depth + answer_of(text) + "]" * (depth if rng.random() < 0.5 else 0)
    )


def _think(text: str, rng: random.Random, others: Sequence[str]) -> str:
    return f"<think>{rng.choice(others)}</think>{text}"


def _accents(text: str, rng: random.Random, others: Sequence[str]) -> str:
    a = rng.randrange(len(text) + 1)
    return text[:a] + "\u0301\u0323" * rng.choice((2, 20, 4000)) + text[a:]


def _quote(text: str, rng: random.Random, others: Sequence[str]) -> str:
    return text.replace('"', "'") if '"' in text else with_answer(text, f'"{answer_of(text)}"')


_MUTATIONS: tuple[Callable[[str, random.Random, Sequence[str]], str], ...] = (
    _drop,
    _double,
    _insert,
    _insert,
    _number,
    _number,
    _nudge,
    _nudge,
    _cut,
    _splice,
    _case,
    _repeat,
    _deep,
    _think,
    _quote,
    _accents,
)


def mutate(text: str, rng: random.Random, others: Sequence[str]) -> str:
    """`text` after one to four random mutations; `others` are further completions to splice with."""
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        text = rng.choice(_MUTATIONS)(text, rng, others)
        if len(text) > 20_000:
            text = text[:20_000]
    return text
