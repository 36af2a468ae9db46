"""The truth as training files spell it -> the value a task's `check_answer` takes. Texts are data: nothing is evaluated.

<answer> [{'bbox_2d': [1, 2, 3, 4], 'label': 'cat'}] </answer>  ->  a list for detection
It is here: [1, 2, 3, 4].                                       ->  four numbers for grounding
['dog', "a cat's tail"]                                         ->  a list of texts (MMMU's options)

python -c "from mmrl.tasks.readers.answers import parse_literal; print(parse_literal('[\\'a\\', 1]'))"
"""

from __future__ import annotations

import json
import re
from typing import Any

from mmrl.rewards.parsing import extract_answer, parse_boxes
from mmrl.tasks.readers.common import RowError

__all__ = [
    "answer_in_tags",
    "box_in_text",
    "listed",
    "options_in",
    "parse_literal",
    "read_answer",
    "split_options",
]

_QUADRUPLE = re.compile(r"\[[0-9eE+\-., \t]{1,200}\]")
_NUMBER = re.compile(
    r"[+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,3})?"
)
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\n": ""}
_PAIRS = {"[": "]", "(": ")", "{": "}"}
_MAX_CHARS, _MAX_DEPTH = 200_000, 16
_OPTION = re.compile(r"(?:\(([A-Z])\)|([A-Z])[.:)])\s+(\S.*)")
_HEADING = ("options:", "choices:", "options", "choices")
_STRUCTURED = ("detection", "scene_graph", "gui_action", "jigsaw")


class _Literal:
    """One pass over the text of a Python or JSON literal: lists, tuples, dicts, text, numbers, true, false, none."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def _skip(self) -> str:
        while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
            self.at += 1
        return self.text[self.at : self.at + 1]

    def _string(self, quote: str) -> str:
        out: list[str] = []
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            self.at += 1
            if char == quote:
                return "".join(out)
            if char == "\\" and self.at < len(self.text):
                char = self.text[self.at]
                self.at += 1
                digits = {"x": 2, "u": 4, "U": 8}.get(char, 0)
                if digits:
                    out.append(chr(int(self.text[self.at : self.at + digits], 16)))
                    self.at += digits
                    continue
                if char not in _ESCAPES and char not in "\\'\"/":
                    out.append("\\")  # an unknown escape stays as it is written, LaTeX for example
                char = _ESCAPES.get(char, char)
            out.append(char)
        raise ValueError("text without its closing quote")

    def _items(self, close: str, depth: int) -> list[Any]:
        items: list[Any] = []
        self.at += 1
        while True:
            if self._skip() == close:
                self.at += 1
                return items
            items.append(self.value(depth + 1))
            if close == "}":
                if self._skip() != ":":
                    raise ValueError("a key without ':'")
                self.at += 1
                items[-1] = (items[-1], self.value(depth + 1))
            if self._skip() == ",":
                self.at += 1
            elif self._skip() != close:
                raise ValueError(f"expected ',' or '{close}' at character {self.at}")

    def value(self, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        first = self._skip()
        if first in ("'", '"') and first:
            return self._string(first)
        if first in _PAIRS and first:
            items = self._items(_PAIRS[first], depth)
            if first != "{":
                return items
            if not all(isinstance(key, str) for key, _ in items):
                raise ValueError("a key that is no text")
            return dict(items)
        number = _NUMBER.match(self.text, self.at)
        if number:
            self.at = number.end()
            digits = number.group()
            return int(digits) if digits.lstrip("+-").isdigit() else float(digits)
        word = next((w for w in _WORDS if self.text.startswith(w, self.at)), None)
        if word is None:
            raise ValueError(f"expected a value at character {self.at}")
        self.at += len(word)
        return _WORDS[word]


def parse_literal(text: str) -> Any:
    """The value of a JSON or Python literal of lists, dicts, text, numbers, true, false, none; tuples become lists.

    Linear time, bounded depth, nothing of the text is run. Raises ValueError.
    """
    if len(text) > _MAX_CHARS:
        raise ValueError(f"longer than {_MAX_CHARS} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass  # Python's spelling, read below
    reader = _Literal(text)
    try:
        value = reader.value()
    except OverflowError as err:  # chr() of a number beyond Unicode
        raise ValueError(str(err)) from err
    if reader._skip():
        raise ValueError(f"more text behind the value, at character {reader.at}")
    return value


def box_in_text(text: str) -> list[float]:
    """The only box of a reference answer: the whole text, its <answer>, or one [..] in a sentence. Raises RowError."""
    answer = (extract_answer(text).answer or "") if "<answer>" in text else text
    parsed = parse_boxes(answer)
    if len(parsed.boxes) == 1:
        return list(parsed.boxes[0])
    found = [boxes[0] for m in _QUADRUPLE.findall(answer) if (boxes := parse_boxes(m).boxes)]
    if len(found) != 1:
        raise RowError(
            "exactly one box [x1, y1, x2, y2] in the answer text",
            f"{len(found)} in {text[:80]!r}",
            "one object per row",
        )
    return list(found[0])


def answer_in_tags(text: str, required: bool = False) -> str:
    """The text inside <answer>...</answer>, or, unless `required`, all of it when it has no such tags. Raises RowError."""
    answer, reason = text.strip(), "no text"
    if required or "<answer>" in text or "</answer>" in text:
        found = extract_answer(text)
        answer, reason = (found.answer or "").strip(), found.reason or "an empty answer"
    if not answer:
        raise RowError(
            "one answer, <answer>...</answer>" if required else "the text of one answer",
            f"{reason.replace('_', ' ')} in {text[:80]!r}",
            "correct the row's answer",
        )
    return answer


def read_answer(task: str, value: Any) -> Any:
    """What a row's answer means for `task`: boxes from text for grounding, values for structured tasks, else the text.

    <answer> tags are taken off. Values that are no text stay as they are: the task's check judges them. Raises RowError.
    """
    if not isinstance(value, str):
        return value
    if task in ("grounding", "gui_grounding"):
        return box_in_text(value)
    text = answer_in_tags(value)
    if task == "counting" and re.fullmatch(r"[0-9]{1,9}", text):
        return int(text)
    if task not in _STRUCTURED:
        return text
    try:
        found = parse_literal(text)
    except ValueError:
        return text  # the task's check says what it expected
    if task == "detection" and isinstance(found, list):  # Qwen's spelling of a box
        found = [
            {("bbox" if key == "bbox_2d" else key): v for key, v in item.items()}
            if isinstance(item, dict)
            else item
            for item in found
        ]
    return found


def listed(value: Any) -> list[Any]:
    """A column that holds one thing or a list of them, as a list; [] for none."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def options_in(value: Any) -> list[str]:
    """The texts of a row's options without their letters ("A. dog" -> "dog"); [] for none. Raises RowError."""
    from mmrl.rewards.choice import strip_letters

    options = listed(value)
    if not all(isinstance(option, str) and option.strip() for option in options):
        raise RowError("options as a list of texts", repr(value)[:80], 'write ["dog", "cat"]')
    return strip_letters([option.strip() for option in options])


def split_options(question: str) -> tuple[str, list[str]]:
    """(question, options) where the question ends in lines "A. dog", "B. cat", ... in this order; else it and [].

    A line "Options:" or "Choices:" before them is taken off as well. Options keep their letters.
    """
    lines = question.rstrip().splitlines()
    start = len(lines)
    while start and _OPTION.fullmatch(lines[start - 1].strip()):
        start -= 1
    letters = [
        found[1] or found[2] for line in lines[start:] if (found := _OPTION.fullmatch(line.strip()))
    ]
    if len(letters) < 2 or letters != [chr(ord("A") + i) for i in range(len(letters))]:
        return question, []
    head = lines[:start]
    while head and (not head[-1].strip() or head[-1].strip().lower() in _HEADING):
        head.pop()
    text = "\n".join(head).strip()
    return (text, [line.strip() for line in lines[start:]]) if text else (question, [])
