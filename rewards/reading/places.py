"""Boxes and points as released models write them -> JSON in the canonical spelling; the numbers keep the model's frame.

<ref>the dog</ref><box>[[10, 20, 30, 40]]</box>      InternVL           <box>(10,20),(30,40)</box>       Qwen-VL
<|ref|>dog<|/ref|><|det|>[[10, 20, 30, 40]]<|/det|>  DeepSeek-VL2       <ref>dog</ref><box>10 20 30 40</box>  MiniCPM-V
dog(10,20),(30,40)                                   Qwen2-VL without its special tokens
<|begin_of_box|>[10, 20, 30, 40]<|end_of_box|>       GLM-V              [[010,020,030,040]]              CogVLM, CogAgent
<point>500 500</point>   <point>[[500, 500]]</point> UI-TARS, OS-Atlas  (500, 500) in a sentence         SeeClick, UGround
<point x="12.5" y="80.0" alt="dog">dog</point>       Molmo: percent, which become numbers of the declared frame
<points x1="745" y1="312" alt="dog">dog</points>     Qwen2.5-VL, Qwen3-VL: whole numbers, or one over 100, the model's frame

python -c "from mmrl.rewards.reading.places import one_place; print(one_place('Click at (500, 400).'))"
"""

from __future__ import annotations

import json
import re

from mmrl.rewards.reading.blocks import MOST_CHARS, json_block
from mmrl.rewards.reading.words import DOUBTS, Unread

__all__ = ["labelled_boxes", "many_points", "one_box", "one_place", "strip_box_tokens"]

_N = r"\s{0,4}([+-]?[0-9]{1,9}(?:\.[0-9]{1,9})?)\s{0,4}"
_CORNERS = rf"\({_N},{_N}\)\s{{0,4}},?\s{{0,4}}\({_N},{_N}\)"
_FOUR = rf"[\[(]{_N},{_N},{_N},{_N}[\])]"
_TWO = rf"[\[(]{_N},{_N}[\])]"
_SPACED = re.compile(
    rf"<(?:point|bbox|box)>{_N}(?:\s|,){_N}(?:(?:\s|,){_N}(?:\s|,){_N})?</(?:point|bbox|box)>"
)
_NAMED = re.compile(rf"\bx\s?=\s?{_N},\s{{0,4}}y\s?=\s?{_N}")
_GROUP = re.compile(rf"{_CORNERS}|{_FOUR}|{_TWO}")
_BOX_TOKENS = re.compile(r"<\|(?:begin_of_box|end_of_box)\|>")
_SPECIAL = re.compile(
    r"<\|?/?(?:ref|box|det|grounding|quad|object_ref_start|object_ref_end|box_start|box_end)\|?>"
    r"|<\|/(?:ref|det)\|>"
)
_TAGGED = re.compile(
    r"(?:<\|?(?:ref|object_ref_start)\|?>\s*([^<>]{1,200}?)\s*<(?:\|/ref\||/ref|\|object_ref_end\|)>\s*)?"
    r"<\|?(?:box|det|box_start)\|?>([^<>]{1,20000})<(?:\|/det\||/box|/det|\|box_end\|)>"
)
_MOLMO = re.compile(r"<points?\s([^<>]{1,4000})>[^<>]{0,400}</points?>")
_MOLMO_PAIR = re.compile(
    r"""\bx([0-9]{0,3})\s?=\s?["']\s?([0-9.]{1,12})\s?["']\s{1,4}y\1\s?=\s?["']\s?([0-9.]{1,12})\s?["']"""
)
_FOUR_SPACED = re.compile(rf"{_N}\s{_N}\s{_N}\s{_N}")

_MOST_LABEL = 60
_MOST_OF_ONE = 4_000

Extent = tuple[float, float]


def strip_box_tokens(text: str) -> str:
    """`text` without GLM's <|begin_of_box|> and <|end_of_box|>; of a text with one such pair, what stands between them."""
    if "<|" not in text:
        return text.strip()
    if text.count("<|begin_of_box|>") == 1:
        return text.partition("<|begin_of_box|>")[2].partition("<|end_of_box|>")[0].strip()
    return (_BOX_TOKENS.sub(" ", text) if "of_box|>" in text else text).strip()


def _number(text: str) -> float | int:
    return float(text) if "." in text else int(text)


def _numbers(found: re.Match[str]) -> tuple[float | int, ...]:
    return tuple(_number(text) for text in found.groups() if text is not None)


def _groups(text: str) -> tuple[list[tuple[float | int, ...]], str]:
    """Groups of two or four numbers of a text, each once, and the text around them; of several two, and nothing around them."""
    found: dict[tuple[float | int, ...], None] = {}
    for pattern, needed in ((_SPACED, "<"), (_NAMED, "="), (_GROUP, "[(")):
        if not any(mark in text for mark in needed):
            continue  # most texts are in none of the dialects: a look for its mark is cheaper than its pattern
        match = None
        for match in pattern.finditer(text):
            found[_numbers(match)] = None
            if len(found) > 1:
                return list(found), ""
        if match is not None:
            text = pattern.sub(" ", text)
    return list(found), text


def _percent(text: str, extent: Extent | None) -> list[list[float]] | None:
    """Points of Molmo's tags in the declared frame; None for a text without them. Raises Unread where its extent is unknown.

    Molmo writes percent with a decimal place ("10.0"), and calls a number over 100 invalid
    (https://huggingface.co/allenai/Molmo-7B-O-0924/discussions/1); Qwen writes whole numbers of its own frame in the same tags.
    """
    tags = list(_MOLMO.finditer(text))
    if not tags:
        return None
    if len(tags) > 1 and text.count("<points"):
        raise Unread("several_points")  # two lists
    pairs = [pair for tag in tags for pair in _MOLMO_PAIR.finditer(tag[1])]
    try:
        points = [[float(pair[2]), float(pair[3])] for pair in pairs]
    except ValueError:
        return []
    whole = not any("." in number for pair in pairs for number in pair.groups()[1:])
    if any(value > 100 for point in points for value in point):
        return points
    if whole and extent != (1.0, 1.0):  # a frame of 0..1 has hardly a whole number
        return points
    if extent is None:
        raise Unread("unknown_size")
    return [[round(x / 100 * extent[0], 4), round(y / 100 * extent[1], 4)] for x, y in points]


def one_place(text: str, extent: Extent | None = None) -> str | None:
    """The one point or box of a text as [x, y] or [x1, y1, x2, y2]; None without any. Raises Unread: several_points, hedged,
    unknown_size (a point in percent, and no size of the frame)."""
    if len(text) > _MOST_OF_ONE:
        return None
    molmo = _percent(text, extent)
    if molmo is not None:
        if len(molmo) > 1:
            raise Unread("several_points")
        return json.dumps(molmo[0]) if molmo else None
    text = strip_box_tokens(text)
    groups, around = _groups(_SPECIAL.sub("", text))
    if len(groups) > 1:
        raise Unread("several_points")
    if not groups:
        return None
    if DOUBTS.search(around):
        raise Unread("hedged")
    return json.dumps(list(groups[0]))


def one_box(text: str) -> str | None:
    """The one box of a text, as JSON; None without any. Raises Unread: several_boxes, hedged."""
    if len(text) > _MOST_OF_ONE:
        return None
    text = strip_box_tokens(text)
    if "<" not in text and ("{" in text or "```" in text):
        return _block(text)
    bare = _SPECIAL.sub(" ", text)
    groups, around = _groups(bare)
    if not groups:
        # each box once: a second one is another answer, not a remark about the first
        groups = list({_numbers(found): None for found in _FOUR_SPACED.finditer(around)})
        around = _FOUR_SPACED.sub("", around)
    boxes = [group for group in groups if len(group) == 4]
    if len(groups) > 1:
        raise Unread("several_boxes")
    if not boxes:
        return None
    if DOUBTS.search(around):
        raise Unread("hedged")
    return json.dumps(list(boxes[0]))


def _block(text: str) -> str | None:
    try:
        return json_block(text)
    except Unread as err:
        raise Unread("several_boxes" if err.reason == "several_values" else err.reason) from None


def labelled_boxes(text: str) -> str | None:
    """All boxes of a text as a JSON list of objects, with labels where tags name them; None without any. Raises Unread."""
    if len(text) > MOST_CHARS:
        return None
    text = strip_box_tokens(text)
    objects: list[dict[str, object]] = []
    for tag in _TAGGED.finditer(text):
        label = {"label": tag[1]} if tag[1] else {}
        inner = [group for group in _all_fours(tag[2])]
        objects += [{"bbox_2d": list(group), **label} for group in inner]
    if objects:
        return json.dumps(objects)
    if "{" in text or "```" in text:
        return _block(text)
    if "[" in text:
        block = _block(text)
        fours = _all_fours(block) if block is not None else []
        return json.dumps([list(group) for group in fours]) if fours else block
    place = 0
    for found in re.finditer(_CORNERS, text):
        name = text[place : found.start()].strip(" .,;:\n")
        if len(name) > _MOST_LABEL or DOUBTS.search(name):
            raise Unread("hedged")
        objects.append({"bbox_2d": list(_numbers(found)), **({"label": name} if name else {})})
        place = found.end()
    return json.dumps(objects) if objects else None


def _all_fours(text: str) -> list[tuple[float | int, ...]]:
    groups = [_numbers(found) for found in re.finditer(rf"{_CORNERS}|{_FOUR}", text)]
    if groups:
        return groups
    spaced = _FOUR_SPACED.fullmatch(text.strip(" []"))
    return [_numbers(spaced)] if spaced else []


def many_points(text: str, extent: Extent | None = None) -> str | None:
    """The points (or boxes) of a text as a JSON list; None without any. Raises Unread."""
    if len(text) > MOST_CHARS:
        return None
    molmo = _percent(text, extent)
    if molmo is not None:
        return json.dumps(molmo)
    text = strip_box_tokens(text)
    if "<" in text:
        found = labelled_boxes(text)
        if found is not None:
            return found
        return (
            json.dumps([list(_numbers(m)) for m in _SPACED.finditer(text)])
            if _SPACED.search(text)
            else None
        )
    return json_block(text)
