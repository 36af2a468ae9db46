"""Completions as the peers' own prompts ask for them: tags, keys and order theirs, right, half right, wrong and broken.

A `Case` is one completion with the truth of its row. `what` says what is special about it; `scripts._peer_verdicts` names those
on which mmrl and a peer differ. `scripts.record_peers` runs the peers' code on them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Case",
    "Wrap",
    "around",
    "boxes_cases",
    "counting_cases",
    "detection_cases",
    "graph_cases",
    "lines",
    "tagged",
    "think",
]

Wrap = Callable[[str], str]
Pair = tuple[str, str]  # what, text
Box = Sequence[float]


@dataclass(frozen=True)
class Case:
    """`truth` as mmrl's samples hold it, `params` of the row; `size` of the picture, `resized` as the model saw it."""

    what: str
    text: str
    truth: Any
    params: Mapping[str, Any] = field(default_factory=dict)
    size: tuple[int, int] = (1000, 1000)
    resized: tuple[int, int] = (1000, 1000)
    progress: tuple[int, int] = (100, 100)


def think(answer: str) -> str:
    """<think>..</think> <answer>..</answer>."""
    return f"<think>I look at it closely.</think> <answer>{answer}</answer>"


def lines(answer: str) -> str:
    """The same with every tag on its own line."""
    return f"<think>\nI look at it closely.\n</think>\n<answer>\n{answer}\n</answer>"


def tagged(answer: str) -> str:
    """A few words of reasoning, then <answer>..</answer>."""
    return f"It can be seen in the middle of the video. <answer>{answer}</answer>"


def around(wrap: Wrap, right: str, wrong: str) -> Iterator[Pair]:
    """What can go wrong with the envelope, around a right answer."""
    whole = wrap(right)
    head, _, tail = whole.rpartition("</answer>")
    yield "the right answer", whole
    if "<answer>" not in whole:  # the prompt asks for the answer and nothing else
        yield "cut in the answer", whole[: len(whole) * 2 // 3]
        yield "words for an answer", "I cannot tell."
        yield "text behind the answer", f"{whole} That is all."
        yield "words around the answer", f"The answer is {whole}."
        yield "a wrong answer", wrong
        yield "an empty text", ""
        return
    yield "no thoughts", f"<answer>{right}</answer>"
    yield "no tags", right
    yield "cut in the answer", head[:-3] if len(right) > 8 else head
    yield "cut in the thoughts", "<think>I look at it clo"
    yield "an empty answer", wrap("")
    yield "words for an answer", wrap("I cannot tell.")
    yield "text behind the answer", f"{whole} That is all."
    yield "two answers, wrong then right", f"{wrap(wrong)}\n<answer>{right}</answer>"
    yield "two answers, right then wrong", f"{whole}\n<answer>{wrong}</answer>"
    yield "white space inside the answer", wrap(f"  {right} \n")
    yield "the answer in the thoughts only", f"<think>{right}</think>"
    yield (
        "no closing tag of the thoughts",
        f"<think>I look at it closely. <answer>{right}</answer>{tail}",
    )
    yield "an empty text", ""


def _near(box: Box, dx: float, dy: float = 0.0, grow: float = 0.0) -> list[int]:
    x1, y1, x2, y2 = box
    return [round(x1 + dx), round(y1 + dy), round(x2 + dx + grow), round(y2 + dy + grow)]


def boxes_cases(
    wrap: Wrap,
    spell: Callable[[Sequence[float]], str],
    several: Callable[[Sequence[Box]], str],
    truths: Sequence[Box] = ((100, 200, 500, 600), (20, 30, 120, 90), (300, 0, 1000, 1000)),
    **about: Any,
) -> Iterator[Case]:
    """One box: exact, near, half, wrong, swapped, degenerate, too many."""
    first = truths[0]
    right, wrong = spell(list(first)), spell([700, 700, 900, 900])
    for what, text in around(wrap, right, wrong):
        yield Case(what, text, list(first), **about)
    for box in truths:
        x1, y1, x2, y2 = box
        width = x2 - x1
        for what, answer in (
            ("exact", list(box)),
            ("a little beside", _near(box, 2, 1)),
            ("a tenth beside", _near(box, width / 10)),
            ("half of it", [x1, y1, round(x1 + width / 2), y2]),
            ("a quarter beside", _near(box, width / 4)),
            ("far beside", [x2 + 60 if x2 < 900 else 0, 0, x2 + 90 if x2 < 900 else 40, 40]),
            ("the whole picture", [0, 0, 1000, 1000]),
            ("corners swapped", [x2, y2, x1, y1]),
            ("left and right swapped", [x2, y1, x1, y2]),
            ("no area", [x1, y1, x1, y2]),
        ):
            yield Case(what, wrap(spell(answer)), list(box), **about)
    yield Case("decimals", wrap(spell([100.5, 200.5, 500.5, 600.5])), list(first), **about)
    yield Case("three numbers", wrap(spell([100, 200, 500])), list(first), **about)
    yield Case("five numbers", wrap(spell([100, 200, 500, 600, 700])), list(first), **about)
    yield Case("negative numbers", wrap(spell([-10, 200, 500, 600])), list(first), **about)
    yield Case("a second box", wrap(several([first, (700, 700, 900, 900)])), list(first), **about)
    yield Case("the same box twice", wrap(several([first, first])), list(first), **about)
    yield Case("broken JSON", wrap(right[:-2]), list(first), **about)


def objects(items: Sequence[tuple[str, Sequence[float]]], quote: str = '"') -> str:
    """[{"bbox_2d": .., "label": ..}, ...] in single or double quotes."""
    text = json.dumps([{"bbox_2d": list(box), "label": label} for label, box in items])
    return text.replace('"', quote)


_CAT, _DOG, _CAT2 = (
    ("cat", (100, 100, 300, 300)),
    ("dog", (400, 400, 700, 800)),
    ("cat", (600, 50, 900, 250)),
)


def _moved(item: tuple[str, Box], dx: float) -> tuple[str, list[int]]:
    return item[0], _near(item[1], dx)


def _answers(truth: Sequence[tuple[str, Box]]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Lists of objects as answers to `truth`, which has at least two."""
    all_of = list(truth)
    yield "exact", all_of
    yield "in another order", all_of[::-1]
    yield "all a little beside", [_moved(item, 4) for item in all_of]
    yield "all a tenth beside", [_moved(item, 20) for item in all_of]
    yield "one missing", all_of[:-1]
    yield "one wrong label", [("sofa", all_of[0][1]), *all_of[1:]]
    yield "labels exchanged", [("dog" if label == "cat" else "cat", box) for label, box in all_of]
    yield "one extra object", [*all_of, ("sofa", (10, 800, 90, 990))]
    yield "one extra object of a true label", [*all_of, ("cat", (10, 800, 90, 990))]
    yield (
        "three extra objects",
        [*all_of, *(("cat", (10 + 30 * k, 800, 30 + 30 * k, 990)) for k in range(3))],
    )
    yield "an extra object first", [("cat", (10, 800, 90, 990)), *all_of]
    yield "a copy of one", [*all_of, all_of[0]]
    yield "a near copy of one", [*all_of, _moved(all_of[0], 3)]
    yield (
        "one with swapped corners",
        [(all_of[0][0], [*all_of[0][1][2:], *all_of[0][1][:2]]), *all_of[1:]],
    )
    yield "one without area", [*all_of[:-1], (all_of[-1][0], [5, 5, 5, 5])]
    yield "an extra one without area", [*all_of, ("cat", [5, 5, 5, 5])]
    yield "labels in capitals", [(label.upper(), box) for label, box in all_of]
    yield "only wrong ones", [("dog", (0, 900, 50, 990)), ("cat", (900, 900, 990, 990))]
    yield "all far too large", [(label, (0, 0, 1000, 1000)) for label, _ in all_of]


def detection_cases(
    wrap: Wrap, spell: Callable[[Sequence[tuple[str, Any]]], str], empty: str, **about: Any
) -> Iterator[Case]:
    """Lists of labelled boxes; `empty` is how the prompt wants 'nothing there'."""
    truths = {"two": [_CAT, _DOG], "three": [_CAT, _DOG, _CAT2]}

    def rows(truth: Sequence[tuple[str, Box]]) -> list[dict[str, Any]]:
        return [{"bbox": list(box), "label": label} for label, box in truth]

    for truth in truths.values():
        for what, answer in _answers(truth):
            yield Case(what, wrap(spell(answer)), rows(truth), **about)
    two = truths["two"]
    for what, text in around(wrap, spell(two), spell([("cat", (900, 900, 990, 990))])):
        yield Case(what, text, rows(two), **about)
    yield Case("nothing found", wrap(empty), rows(two), **about)
    yield Case(
        "an object without a label",
        wrap(spell([_CAT]).replace('"label"', '"name"').replace("'label'", "'name'")),
        rows(two),
        **about,
    )
    yield Case(
        "a confidence in each object",
        wrap(
            spell(two).replace("}", ', "confidence": 0.9}')
            if '"' in spell(two)
            else spell(two).replace("}", ", 'confidence': 0.9}")
        ),
        rows(two),
        **about,
    )
    yield Case(
        "broken JSON",
        wrap(spell(two).replace("}]", "}").replace("}\n```", "\n```")),
        rows(two),
        **about,
    )


_CROWD = [(90 + 160 * (k % 6), 120 + 300 * (k // 6)) for k in range(14)]
_POINTS = {"one": [(500, 400)], "three": [(150, 200), (520, 480), (800, 310)], "a crowd": _CROWD}


def _around_points(points: Sequence[Sequence[float]], half: int = 20) -> list[list[int]]:
    return [[round(x - half), round(y - half), round(x + half), round(y + half)] for x, y in points]


def _counts(boxes: Sequence[Box]) -> Iterator[tuple[str, list[list[int]]]]:
    """Boxes as answers to points at the centres of `boxes`."""
    exact = _around_points([((b[0] + b[2]) / 2, (b[1] + b[3]) / 2) for b in boxes])
    size, extra = len(exact), [900, 900, 950, 950]
    yield "exact", exact
    yield "in another order", exact[::-1]
    yield (
        "of any size",
        [[b[0] - 5 * k, b[1] - 5, b[2] + 5 * k, b[3] + 5] for k, b in enumerate(exact)],
    )
    yield "a little beside", [_near(b, 4, -3) for b in exact]
    yield "a tenth beside", [_near(b, 100) for b in exact]
    yield "far beside", [_near(b, 30, 400) for b in exact]
    yield "the first only", exact[:1]
    yield "half of them", exact[: (size + 1) // 2]
    yield "one extra", [*exact, extra]
    yield "twice as many", [*exact, *(_near(extra, -3 * k, -7 * k) for k in range(size))]
    yield "a copy of one", [*exact, exact[0]]
    yield "the first as often as there are", [exact[0]] * size
    yield "the middle as often as there are", [[480, 480, 520, 520]] * size
    yield (
        "as many anywhere",
        [_near([500, 500, 540, 540], 37 * k % 400, -23 * k % 400) for k in range(size)],
    )
    yield "corners swapped", [[b[2], b[3], b[0], b[1]] for b in exact]
    yield "without area", [[b[0] + 20, b[1] + 20, b[0] + 20, b[1] + 20] for b in exact]
    yield "the whole picture", [[0, 0, 1000, 1000]]


def counting_cases(spell: Callable[[Sequence[Sequence[float]]], str]) -> Iterator[Case]:
    """Boxes in answer to true points, `spell` being PR1's form: one name and the boxes behind it."""
    for points in _POINTS.values():
        boxes, params = _around_points(points), {"points": [list(p) for p in points]}
        for what, answer in _counts(boxes):
            yield Case(what, spell(answer), len(points), params)
    points, boxes = _POINTS["three"], _around_points(_POINTS["three"])
    whole, params = spell(boxes), {"points": [list(p) for p in points]}
    for what, text in around(lambda answer: answer, whole, spell([[0, 0, 20, 20]])):
        yield Case(what, text, 3, params)
    name, box = whole.partition("<|box_start|>")[0], "<|box_start|>({},{}),({},{})<|box_end|>"
    for what, text in (
        ("decimals", spell([[v + 0.5 for v in b] for b in boxes])),
        ("outside of the picture", spell([*boxes, [900, 900, 1900, 1900]])),
        ("one box of three numbers", whole.replace("(540,500)", "(540)")),
        ("one box of words", whole.replace("(540,500)", "here")),
        ("only boxes of words", f"{name}<|box_start|>here<|box_end|><|im_end|>"),
        ("no end token", whole.replace("<|im_end|>", "")),
        ("a name for each box", "".join(spell([b]) for b in boxes)),
        (
            "a name for each box, one end",
            "".join(spell([b]).replace("<|im_end|>", "") for b in boxes) + "<|im_end|>",
        ),
        ("a line for each box", name + "\n".join(box.format(*b) for b in boxes) + "<|im_end|>"),
        ("no name", whole.removeprefix(name)),
        ("a list of boxes", json.dumps(boxes)),
        ("a list of points", json.dumps(points)),
        ("the number", "3"),
        ("nothing found", "[]"),
        ("the tokens lost", re.sub(r"<[^>]*>", "", whole)),
    ):
        yield Case(what, text, 3, params)
    yield Case("none there, nothing found", "[]", 0, {"points": []})
    yield Case("none there, one found", spell(boxes[:1]), 0, {"points": []})


def graph_cases(wrap: Wrap) -> Iterator[Case]:
    """Scene graphs in R1-SGG's own format."""
    objs = [
        ("person.1", (100, 100, 300, 700)),
        ("bike.2", (150, 400, 500, 800)),
        ("tree.3", (600, 50, 800, 700)),
    ]
    rels = [("person.1", "riding", "bike.2"), ("bike.2", "near", "tree.3")]

    def spell(
        nodes: Sequence[tuple[str, Any]],
        edges: Sequence[tuple[str, str, str]],
        key: str = "relationships",
    ) -> str:
        return json.dumps(
            {
                "objects": [{"id": i, "bbox": list(box)} for i, box in nodes],
                key: [{"subject": s, "predicate": p, "object": o} for s, p, o in edges],
            }
        )

    truth = {
        "objects": [{"id": i, "label": i.partition(".")[0], "bbox": list(box)} for i, box in objs],
        "relations": [list(rel) for rel in rels],
    }
    for what, text in around(wrap, spell(objs, rels), spell([("car.1", (0, 900, 50, 990))], [])):
        yield Case(what, text, truth)
    swapped = [(objs[0][0], (300, 700, 100, 100)), *objs[1:]]
    for what, nodes, edges in (
        (
            "other order and numbers",
            [("tree.1", objs[2][1]), ("bike.7", objs[1][1]), ("person.4", objs[0][1])],
            [("bike.7", "near", "tree.1"), ("person.4", "riding", "bike.7")],
        ),
        ("boxes a little beside", [(i, _near(box, 5)) for i, box in objs], rels),
        ("boxes half beside", [(i, _near(box, 100)) for i, box in objs], rels),
        ("one predicate wrong", objs, [rels[0], ("bike.2", "on", "tree.3")]),
        ("one relation missing", objs, rels[:1]),
        ("no relations", objs, []),
        ("a relation turned round", objs, [("bike.2", "riding", "person.1"), rels[1]]),
        ("one object missing", objs[:2], rels[:1]),
        (
            "one label wrong",
            [("dog.1", objs[0][1]), *objs[1:]],
            [("dog.1", "riding", "bike.2"), rels[1]],
        ),
        ("one extra object", [*objs, ("dog.4", (10, 900, 60, 990))], rels),
        (
            "six extra objects",
            [*objs, *((f"dog.{k}", (10 * k, 900, 10 * k + 9, 990)) for k in range(4, 10))],
            rels,
        ),
        ("an extra relation", objs, [*rels, ("person.1", "near", "tree.3")]),
        (
            "every relation",
            objs,
            [(a, p, b) for a, _ in objs for b, _ in objs if a != b for p in ("riding", "near")],
        ),
        ("a relation of an unknown object", objs, [*rels, ("person.1", "near", "car.9")]),
        ("corners swapped", swapped, rels),
        (
            "capitals",
            [(i.capitalize(), box) for i, box in objs],
            [(s.capitalize(), p.upper(), o.capitalize()) for s, p, o in rels],
        ),
        ("only one object, wrong", [("car.1", (0, 900, 50, 990))], []),
    ):
        yield Case(what, wrap(spell(nodes, edges)), truth)
    yield Case("in a json fence", wrap(f"```json\n{spell(objs, rels)}\n```"), truth)
    yield Case("broken JSON", wrap(spell(objs, rels)[:-2]), truth)
    yield Case("another key for the relations", wrap(spell(objs, rels, "relations")), truth)
