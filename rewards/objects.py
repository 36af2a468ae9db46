"""Answer text -> labelled boxes or points, by the strict rules of mmrl.rewards.parsing, and no more than MAX_OBJECTS of them.

Accepted are lists of objects, nothing beside them:

    [{"bbox_2d": [x1, y1, x2, y2], "label": "cat"}, ...]     also bbox, box; category; single quotes; ```json fences
    <|object_ref_start|>cat<|object_ref_end|><|box_start|>(x1,y1),(x2,y2)<|box_end|> ...
    [[x1, y1, x2, y2], ...] or [x1, y1, x2, y2]              where one label is asked for, which is then implied
    []                                                       nothing is there
    [{"point_2d": [x, y]}, ...]   [[x, y], ...]   [x, y]     points; boxes stand for their centres

An element that cannot be read (a NaN, three numbers, no label) costs itself: the others are kept and it is counted.
An answer that the length limit cut (`cut=True`, never for complete text) keeps its complete objects, found by walking
the braces once, and says so. All of it is linear in the length, and nothing in the text is ever run.

    python -c "from mmrl.rewards.objects import parse_objects; print(parse_objects('[[1, 2, 3, 4]]', label='cat'))"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from mmrl.rewards.parsing import MAX_COORDINATE, Box, load_json, number_list, strip_fence
from mmrl.rewards.reading.scanner import CLOSING, marks

__all__ = [
    "LabelledBox",
    "MAX_OBJECTS",
    "MAX_OBJECT_CHARS",
    "ObjectError",
    "ObjectParse",
    "PointParse",
    "label_of",
    "normalise_label",
    "number_box",
    "parse_objects",
    "parse_points",
]

MAX_OBJECTS = 200
"""More objects than this are a flood, not an answer ('too_many_objects'); readers refuse such truths as well."""
MAX_OBJECT_CHARS = 40_000
"""Longer answers are not parsed ('answer_too_long'): 200 objects of 200 characters."""
MAX_LABEL_CHARS = 200

_BOX_KEYS = ("bbox_2d", "bbox", "box")
_POINT_KEYS = ("point_2d", "point")
_LABEL_KEYS = ("label", "category")
_OPEN, _CLOSE = "<|box_start|>", "<|box_end|>"
_REF_OPEN, _REF_CLOSE = "<|object_ref_start|>", "<|object_ref_end|>"
_NUMBER = r" ?([+-]?[0-9]{1,12}(?:\.[0-9]{1,12})?) ?"
# matched against text whose white space is collapsed, piece by piece: every character can match in one way only
_CORNERS = rf"\({_NUMBER},{_NUMBER}\) ?,? ?\({_NUMBER},{_NUMBER}\)"
_TWO_POINTS = re.compile(_CORNERS)
_SPECIAL = re.compile(
    rf"(?:{re.escape(_REF_OPEN)}([^<]*){re.escape(_REF_CLOSE)} ?)?{re.escape(_OPEN)}([^<]*){re.escape(_CLOSE)}[ ,]?"
)


class ObjectError(ValueError):
    """What is wrong with a text, as one snake_case word in `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LabelledBox(NamedTuple):
    """A label as `normalise_label` writes it, and a box in whatever frame the text uses."""

    label: str
    box: Box


@dataclass(frozen=True)
class ObjectParse:
    """Objects in the order written; none with a `reason` when parsing failed. `truncated`: a cut last one was dropped.
    `unreadable`: how many elements of the list could not be read beside others that could."""

    objects: tuple[LabelledBox, ...]
    reason: str | None = None
    truncated: bool = False
    unreadable: int = 0


@dataclass(frozen=True)
class PointParse:
    """Points (x, y) in the order written; none with a `reason` when parsing failed. `boxes`: they were centres of boxes.
    `unreadable`: as in ObjectParse."""

    points: tuple[tuple[float, float], ...]
    reason: str | None = None
    boxes: bool = False
    unreadable: int = 0


def normalise_label(label: str) -> str:
    """How labels are compared, by rewards and official metrics alike: case, underscores and runs of spaces do not matter."""
    return " ".join(label.replace("_", " ").casefold().split())


def _numbers(values: Any, count: int) -> list[float]:
    values = number_list(values)
    if values is None:
        raise ObjectError("not_a_box")
    if len(values) != count:
        raise ObjectError("wrong_count")
    # False for nan, inf and huge integers
    if not all(-MAX_COORDINATE <= v <= MAX_COORDINATE for v in values):
        raise ObjectError("out_of_range")
    return [float(v) for v in values]


def number_box(values: Any) -> Box:
    """Four finite numbers as a box; raises ObjectError (not_a_box, wrong_count, out_of_range)."""
    x1, y1, x2, y2 = _numbers(values, 4)
    return x1, y1, x2, y2


def label_of(value: Any) -> str:
    """A label with content, normalised; raises ObjectError (no_label)."""
    label = (
        normalise_label(value) if isinstance(value, str) and len(value) <= MAX_LABEL_CHARS else ""
    )
    if not label:
        raise ObjectError("no_label")
    return label


def _one_key(item: dict[str, Any], keys: tuple[str, ...], missing: str) -> Any:
    found = [key for key in keys if key in item]
    if len(found) != 1:
        raise ObjectError("ambiguous_keys" if found else missing)
    return item[found[0]]


def _labelled(item: Any, label: str | None) -> LabelledBox:
    if isinstance(item, dict):
        box = number_box(_one_key(item, _BOX_KEYS, "no_box_key"))
        if label is not None and not any(key in item for key in _LABEL_KEYS):
            return LabelledBox(label, box)
        return LabelledBox(label_of(_one_key(item, _LABEL_KEYS, "no_label")), box)
    box = number_box(item)
    if label is None:
        raise ObjectError("no_label")
    return LabelledBox(label, box)


def _whole_items(text: str) -> Iterator[str]:
    """The complete {...} and [...] elements of a list that lost its end, in one pass over the characters."""
    start = 0
    for place, char, depth in marks(text):
        if not depth:
            return
        if depth == 2 and char in CLOSING:
            start = place
        elif depth == 1 and char != "," and place:
            yield text[start : place + 1]


def _kept(text: str) -> list[Any]:
    """Elements of a cut list; raises ObjectError('truncated') when not one is complete."""
    text = text.removeprefix("```json").removeprefix("```").lstrip()
    items: list[Any] = []
    for piece in _whole_items(text) if text.startswith("[") else ():
        try:
            items.append(load_json(piece))
        except (ValueError, RecursionError):
            raise ObjectError("not_a_box") from None
        if len(items) > MAX_OBJECTS:
            raise ObjectError("too_many_objects")
    if not items:
        raise ObjectError("truncated")
    return items


def _special(text: str) -> list[Any]:
    """Qwen's special tokens: the whole text must be boxes, each with its label unless that is implied; one that is not four
    numbers costs itself."""
    text, place = " ".join(text.split()), 0
    items: list[Any] = []
    while place < len(text):
        found = _SPECIAL.match(text, place)
        if not found:
            raise ObjectError("not_a_box")
        corners = _TWO_POINTS.fullmatch(found[2].strip())
        items.append(
            {
                "bbox_2d": [float(v) for v in corners.groups()] if corners else found[2],
                **({"label": found[1]} if found[1] else {}),
            }
        )
        if len(items) > MAX_OBJECTS:
            raise ObjectError("too_many_objects")
        place = found.end()
    return items


def _items(answer: str, cut: bool) -> tuple[list[Any], bool]:
    """Raw elements of an answer and whether its end was cut off. Raises ObjectError."""
    if len(answer) > MAX_OBJECT_CHARS:
        raise ObjectError("answer_too_long")
    text = strip_fence(answer)
    if text.startswith("<|"):
        return _special(text), False
    if text.startswith("(") and _TWO_POINTS.fullmatch(" ".join(text.split())):
        return _special(f"{_OPEN}{text}{_CLOSE}"), False
    try:
        value = load_json(text, broken_numbers=True)
    except (ValueError, RecursionError):
        if cut:
            return _kept(text), True
        raise ObjectError("not_a_box") from None
    if value is None:  # None, as VLM-R1 asks for, is []
        value = []
    if isinstance(value, dict) and list(value) == ["boxes"] and isinstance(value["boxes"], list):
        value = value["boxes"]
    if isinstance(value, dict) or (
        isinstance(value, list) and value and not isinstance(value[0], (list, dict))
    ):
        value = [value]
    if not isinstance(value, list):
        raise ObjectError("not_a_box")
    if len(value) > MAX_OBJECTS:
        raise ObjectError("too_many_objects")
    return value, False


_Item = TypeVar("_Item")


def _readable(items: Sequence[Any], read: Callable[[Any], _Item]) -> tuple[list[_Item], int]:
    """What `read` makes of the elements it can read, and how many it cannot. Raises its ObjectError where it can read none."""
    found: list[_Item] = []
    first: ObjectError | None = None
    for item in items:
        try:
            found.append(read(item))
        except ObjectError as err:
            first = first or err
    if first is not None and not found:
        raise first
    return found, len(items) - len(found)


def parse_objects(answer: str, label: str | None = None, cut: bool = False) -> ObjectParse:
    """Labelled boxes of an answer text that is nothing else; `[]` is the answer 'none of them'.

    `label` is implied where the text gives none (one category was asked for); without it every object needs its own.
    `cut` says that the length limit ended the text: complete objects are kept and `truncated` is set.
    Reasons: answer_too_long, too_many_objects, not_a_box, no_box_key, ambiguous_keys, no_label, wrong_count,
    out_of_range, truncated (cut before the first object was complete). Never raises on any text.
    """
    try:
        implied = None if label is None else label_of(label)
        items, truncated = _items(answer, cut)
        found, unreadable = _readable(items, lambda item: _labelled(item, implied))
        return ObjectParse(tuple(found), None, truncated, unreadable)
    except ObjectError as err:
        return ObjectParse((), err.reason)


def _centre(item: Any) -> tuple[tuple[float, float], bool]:
    """The point an element stands for, and whether it was a box."""
    if isinstance(item, dict):
        key = next((k for k in (*_POINT_KEYS, *_BOX_KEYS) if k in item), None)
        if key is None:
            raise ObjectError("no_point_key")
        if sum(k in item for k in (*_POINT_KEYS, *_BOX_KEYS)) > 1:
            raise ObjectError("ambiguous_keys")
        return _centre(item[key])
    if isinstance(item, list) and len(item) == 2:
        x, y = _numbers(item, 2)
        return (x, y), False
    x1, y1, x2, y2 = number_box(item)
    return ((x1 + x2) / 2, (y1 + y2) / 2), True


def parse_points(answer: str) -> PointParse:
    """Points of an answer text that is a list of points or of boxes (their centres), not of both; `[]` is none.

    Reasons: those of `parse_objects`, no_point_key, mixed_shapes. Never raises on any text.
    """
    try:
        items, _ = _items(answer, False)
        found, unreadable = _readable(items, _centre)
    except ObjectError as err:
        return PointParse((), err.reason)
    if len({is_box for _, is_box in found}) > 1:
        return PointParse((), "mixed_shapes")
    return PointParse(
        tuple(point for point, _ in found), None, bool(found and found[0][1]), unreadable
    )
