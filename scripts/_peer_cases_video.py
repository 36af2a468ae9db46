"""Completions for times, tracks and tubes of a video, see scripts._peer_cases."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from scripts._peer_cases import Case, Wrap, around

__all__ = ["glue_cases", "span_cases", "track_cases", "tube_cases"]

_VIDEO = {"width": 1000, "height": 1000, "duration": 60.0}
Boxes = Mapping[str, Sequence[float]]


def span_cases(wrap: Wrap, spell: Callable[[Any, Any], str]) -> Iterator[Case]:
    """One span of a clip of 60 seconds."""
    truth = [[10.0, 30.0]]
    for what, text in around(wrap, spell(10, 30), spell(50, 55)):
        yield Case(what, text, truth, _VIDEO)
    for what, start, end in (
        ("exact", 10, 30),
        ("half of it", 10, 20),
        ("twice as long", 10, 50),
        ("shifted by 5 s", 15, 35),
        ("inside", 15, 25),
        ("around", 5, 40),
        ("beside", 31, 40),
        ("touching", 30, 40),
        ("far beside", 50, 60),
        ("the whole video", 0, 60),
        ("reversed", 30, 10),
        ("no length", 20, 20),
        ("decimals", 10.25, 29.75),
        ("beyond the end", 10, 90),
        ("far beyond the end", 10, 100000),
        ("reversed and shifted", 35, 15),
        ("before the video", -5, 30),
    ):
        yield Case(what, wrap(spell(start, end)), truth, _VIDEO)
    for start, end in ((0.0, 5.0), (42.5, 58.0)):
        for what, a, b in (
            ("exact", start, end),
            ("half of it", start, (start + end) / 2),
            ("a second late", start + 1, end + 1),
        ):
            yield Case(what, wrap(spell(a, b)), [[start, end]], _VIDEO)
    yield Case("one time", wrap(spell(10, 30).replace("30", "").replace(", ]", "]")), truth, _VIDEO)
    yield Case("words", wrap("in the middle"), truth, _VIDEO)


def glue_cases() -> Iterator[Case]:
    """VideoChat-R1: a letter and a glue of spans."""
    params = {**_VIDEO, "options": ["a dog", "a red cat", "two birds", "nothing"]}
    truth = {"choice": "B", "spans": [[5.0, 10.0], [20.0, 30.0]]}

    def text(letter: str, glue: str) -> str:
        return f"<think>I look at it closely.</think><answer>{letter}</answer><glue>{glue}</glue>"

    right = "[(5.0, 10.0), (20.0, 30.0)]"
    for what, whole in (
        ("both right", text("B", right)),
        ("the letter wrong", text("C", right)),
        ("one span of two", text("B", "[(20.0, 30.0)]")),
        ("whole numbers", text("B", "[(5, 10), (20, 30)]")),
        ("shifted", text("B", "[(6, 11), (21, 31)]")),
        ("one long span", text("B", "[(5, 30)]")),
        ("spans that overlap", text("B", "[(5, 8), (7, 10), (20, 30)]")),
        ("the other order", text("B", "[(20, 30), (5, 10)]")),
        ("beside", text("B", "[(40, 50)]")),
        ("both wrong", text("A", "[(40, 50)]")),
        ("no span", text("B", "[]")),
        ("reversed", text("B", "[(10, 5), (20, 30)]")),
        ("lists for tuples", text("B", "[[5, 10], [20, 30]]")),
        ("words for spans", text("B", "at the start")),
        ("beyond the end", text("B", "[(5, 10), (20, 90)]")),
        ("a letter and its text", text("B. a red cat", right)),
        ("a letter in brackets", text("(B)", right)),
        ("The answer is B.", text("The answer is B.", right)),
        ("words for the letter", text("the cat", right)),
        ("an empty letter", text("", right)),
        ("the glue before the answer", f"<think>x</think><glue>{right}</glue><answer>B</answer>"),
        ("no glue", "<think>x</think><answer>B</answer>"),
        ("no answer", f"<think>x</think><glue>{right}</glue>"),
        ("no thoughts", f"<answer>B</answer><glue>{right}</glue>"),
        ("cut in the glue", text("B", right)[:-14]),
        ("cut in the thoughts", "<think>I look at it clo"),
        ("an empty text", ""),
        ("text behind the glue", text("B", right) + " That is all."),
        (
            "line feeds between the blocks",
            f"<think>x</think>\n<answer>B</answer>\n<glue>{right}</glue>",
        ),
        (
            "two answers",
            f"<think>x</think><answer>C</answer><answer>B</answer><glue>{right}</glue>",
        ),
        ("no length", text("B", "[(5, 5), (20, 30)]")),
        ("decimals", text("B", "[(5.25, 9.75), (20.5, 29.5)]")),
        ("a time inside both", text("C", "[(5, 10)]")),
        ("three spans", text("B", "[(5, 10), (20, 30), (40, 60)]")),
    ):
        yield Case(what, whole, truth, params)


def _moved(boxes: Boxes, dx: float) -> dict[str, list[float]]:
    return {key: [box[0] + dx, box[1], box[2] + dx, box[3]] for key, box in boxes.items()}


_BOXES: Boxes = {str(k): [100 + 20 * k, 200, 300 + 20 * k, 400] for k in range(4, 12)}


def _keyed(right: Boxes) -> Iterator[tuple[str, Any]]:
    keys = list(right)
    yield "exact", right
    yield "a tenth beside", _moved(right, 20)
    yield "half beside", _moved(right, 100)
    yield "far beside", _moved(right, 600)
    yield "the first half of the keys", {key: right[key] for key in keys[:4]}
    yield "one key only", {keys[0]: right[keys[0]]}
    yield "one key only, beside", {keys[0]: _moved(right, 50)[keys[0]]}
    yield "four keys beyond", {**right, **{str(k): right[keys[-1]] for k in range(20, 24)}}
    yield "keys that nobody asked for", {str(k): right[keys[0]] for k in range(40, 44)}
    yield "one box of the whole picture each", {key: [0, 0, 1000, 1000] for key in keys}
    yield "corners swapped", {key: [*box[2:], *box[:2]] for key, box in right.items()}
    yield (
        "one box with swapped corners",
        {**right, keys[0]: [*right[keys[0]][2:], *right[keys[0]][:2]]},
    )
    yield "one box of three numbers", {**right, keys[1]: right[keys[1]][:3]}
    yield "one box of words", {**right, keys[1]: "gone"}
    yield "the same box at every key", dict.fromkeys(keys, right[keys[0]])
    yield "keys in another order", {key: right[key] for key in keys[::-1]}
    yield "no boxes", {}


def track_cases(wrap: Wrap, listed: bool = False) -> Iterator[Case]:
    """Boxes at eight seconds; `listed` for a list of boxes in shares of the picture instead of keys."""
    truth = {"boxes": dict(_BOXES)}

    def spell(boxes: Any) -> str:
        return json.dumps({"boxes": boxes})

    def shares(boxes: Any) -> str:
        return json.dumps(
            [
                [round(v / 1000, 4) if isinstance(v, (int, float)) else v for v in box]
                for box in boxes.values()
            ]
        )

    write = shares if listed else spell
    for what, text in around(wrap, write(_BOXES), write(_moved(_BOXES, 600))):
        yield Case(what, text, truth, _VIDEO)
    for what, boxes in _keyed(_BOXES):
        if not (listed and (boxes == {} or what in ("one box of words", "keys in another order"))):
            yield Case(what, wrap(write(boxes)), truth, _VIDEO)
    if not listed:
        yield Case("a bare mapping", wrap(json.dumps(dict(_BOXES))), truth, _VIDEO)
        yield Case("single quotes", wrap(spell(_BOXES).replace('"', "'")), truth, _VIDEO)
        yield Case(
            "numbers with decimals as keys",
            wrap(spell({f"{float(k)}": v for k, v in _BOXES.items()})),
            truth,
            _VIDEO,
        )
    else:
        yield from _listed(wrap, shares, truth)
    yield Case("broken JSON", wrap(write(_BOXES)[:-3]), truth, _VIDEO)


def _listed(wrap: Wrap, write: Callable[[Boxes], str], truth: Any) -> Iterator[Case]:
    """What only a list of boxes in shares of the picture can be."""
    keys = list(_BOXES)
    shrunk = {
        key: [box[0] + 50, box[1] + 50, box[2] - 50, box[3] - 50] for key, box in _BOXES.items()
    }
    for what, answer in (
        ("boxes half as wide and high", write(shrunk)),
        ("boxes in the other order", write({k: _BOXES[k] for k in keys[::-1]})),
        (
            "boxes a second late",
            write(dict(zip(keys, [_BOXES[keys[0]], *(_BOXES[k] for k in keys[:-1])], strict=True))),
        ),
        ("the last box beside", write({**_BOXES, keys[-1]: _moved(_BOXES, 500)[keys[-1]]})),
        ("two digits", json.dumps([[round(v / 1000, 2) for v in box] for box in _BOXES.values()])),
        ("boxes in pixels", json.dumps(list(map(list, _BOXES.values())))),
        ("line feeds between the boxes", write(_BOXES).replace("], ", "],\n")),
        ("tuples", f"[{write(_BOXES)[1:-1].replace('[', '(').replace(']', ')')}]"),
        ("an empty list", "[]"),
    ):
        yield Case(what, wrap(answer), truth, _VIDEO)


def tube_cases(wrap: Wrap) -> Iterator[Case]:
    """A time and the boxes at its seconds."""
    truth = {"time": [4.0, 11.0], "boxes": dict(_BOXES)}

    def spell(time: Any, boxes: Any) -> str:
        return json.dumps({"time": time, "boxes": boxes})

    for what, text in around(wrap, spell([4, 11], _BOXES), spell([50, 55], _moved(_BOXES, 600))):
        yield Case(what, text, truth, _VIDEO)
    for what, boxes in _keyed(_BOXES):
        yield Case(f"boxes: {what}", wrap(spell([4, 11], boxes)), truth, _VIDEO)
    for what, time in (
        ("half of the time", [4, 7.5]),
        ("twice the time", [4, 18]),
        ("beside the time", [20, 30]),
        ("reversed time", [11, 4]),
        ("a time beyond the end", [4, 90]),
        ("no length", [5, 5]),
        ("one time", [4]),
        ("words for the time", "soon"),
    ):
        yield Case(what, wrap(spell(time, _BOXES)), truth, _VIDEO)
    yield Case("no time", wrap(json.dumps({"boxes": dict(_BOXES)})), truth, _VIDEO)
    yield Case("a time only", wrap('{"time": [4, 11]}'), truth, _VIDEO)
    yield Case("broken JSON", wrap(spell([4, 11], _BOXES)[:-3]), truth, _VIDEO)
