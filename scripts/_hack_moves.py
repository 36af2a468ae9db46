"""Answers that are given without looking: how they are spelled for a question, where a search begins, and how it goes on.

A guess knows the form of the question (the categories and options it names, the clip's length, a first box that it gives) and the
truths of other questions, never the truth of its own; guesses marked `known` also know how many objects there are.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scripts._hack_data import HEIGHT, LABELS, PREDICATES, WIDTH, Asked, spelled

__all__ = ["Guess", "form_of", "kind_of", "loose", "moved", "seeds", "spell", "truth_of"]

Gene = tuple[float, ...]
_MOST_ITEMS = 60
_SIZES = {
    "box": 4,
    "objects": 5,
    "points": 2,
    "point": 2,
    "span": 2,
    "spans": 2,
    "track": 8,
    "tube": 10,
    "grounded": 3,
}
_LISTS = ("objects", "points", "spans")
_TOKENS = re.compile(r"-?\d+(?:\.\d+)?|\w+|\s+|[^\w\s]")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Guess:
    """An answer to every question: items in shares of the picture or the clip, or a text as it stands."""

    family: str
    items: tuple[Gene, ...] = ()
    text: str | None = None
    known: bool = False
    given: bool = False  # the box that the question gives, at every time


def kind_of(task: Any) -> str:
    """What a task's answers are made of: a key of the items' sizes, or 'text'."""
    kinds = {
        "grounding": "box",
        "detection": "objects",
        "tracking": "track",
        "st_grounding": "tube",
        "grounded_qa": "grounded",
    }
    if task.name == "counting":
        return "points" if task.settings["mode"] == "points" else "text"
    if task.name == "gui_grounding":
        return "box" if task.settings["reply"] == "box" else "point"
    if task.name == "temporal_grounding":
        return "spans" if task.times.many else "span"
    return kinds.get(task.name, "text")


# spelled: as the right answer to a question whose truth were the guess, so that every preset gets its own form and frame


def _box(item: Sequence[float]) -> list[float]:
    """Shares of the picture as pixels."""
    return [item[0] * WIDTH, item[1] * HEIGHT, item[2] * WIDTH, item[3] * HEIGHT]


def _line(item: Gene, share: float) -> list[float]:
    """The box at `share` of the way from the first four numbers to the last four."""
    return _box([a + share * (b - a) for a, b in zip(item[:4], item[4:8], strict=True)])


def _track(guess: Guess, one: Asked) -> dict[str, Any]:
    true = one.sample.answer["boxes"]
    keys = list(true)  # the question names the times
    if guess.given and one.sample.params.get("first_box"):
        return {"boxes": dict.fromkeys(keys, true[keys[0]])}
    return {
        "boxes": {
            key: _line(guess.items[0], i / max(1, len(keys) - 1)) for i, key in enumerate(keys)
        }
    }


def _tube(item: Gene, duration: float) -> dict[str, Any]:
    return {
        "time": [item[8] * duration, item[9] * duration],
        "boxes": {
            str(second): _line(item, second / duration) for second in range(int(duration) + 1)
        },
    }


def _count(one: Asked) -> int:
    return one.sample.answer if isinstance(one.sample.answer, int) else len(one.sample.answer)


def truth_of(kind: str, guess: Guess, one: Asked) -> tuple[Any, dict[str, Any]]:
    """(truth, further params) of a question to which the guess is the right answer."""
    items, params = guess.items, one.sample.params
    if guess.known:
        items = tuple(items[i % len(items)] for i in range(_count(one))) if items else ()
    if kind == "objects":
        names = params["categories"]
        return [
            {"bbox": _box(item), "label": names[int(item[4] * len(names)) % len(names)]}
            for item in items
        ], {}
    if kind == "points":
        return len(items), {"points": [[x * WIDTH, y * HEIGHT] for x, y in items]}
    if kind == "point":
        x, y = items[0][0] * WIDTH, items[0][1] * HEIGHT
        return (x - 0.5, y - 0.5, x + 0.5, y + 0.5), {}
    if kind == "track":
        return _track(guess, one), {}
    if kind == "box":
        return tuple(_box(items[0])), {}
    duration = params["duration"]
    if kind == "tube":
        return _tube(items[0], duration), {}
    if kind in ("span", "spans"):
        return [[a * duration, b * duration] for a, b in items], {}
    letter, *span = items[0]
    return {"choice": "ABCD"[int(letter * 4) % 4], "spans": [[v * duration for v in span]]}, {}


def spell(task: Any, kind: str, guess: Guess, one: Asked) -> str:
    """The guess as the answer text to one question."""
    if guess.text is not None:
        return guess.text
    truth, params = truth_of(kind, guess, one)
    return spelled(task, one, truth, **params)


def form_of(kind: str, guess: Guess, one: Asked) -> Hashable:
    """All that `spell` takes from a question: where this is equal, the same guess is the same text."""
    params = one.sample.params
    names = tuple(params["categories"]) if kind == "objects" else ()
    keys = tuple(one.sample.answer["boxes"]) if kind == "track" else ()
    box = (
        tuple(one.sample.answer["boxes"][keys[0]])
        if guess.given and keys and params.get("first_box")
        else ()
    )
    return (
        one.sample.question,
        params.get("duration"),
        names,
        keys,
        box,
        _count(one) if guess.known else 0,
    )


# where a search begins


def _boxes(rng: random.Random) -> Iterator[tuple[str, Gene]]:
    yield "whole picture", (0.0, 0.0, 1.0, 1.0)
    for side in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8):
        yield "centre", (0.5 - side / 2, 0.5 - side / 2, 0.5 + side / 2, 0.5 + side / 2)
    for degenerate in (
        (0.5, 0.5, 0.5, 0.5),
        (0.0, 0.0, 0.0, 0.0),
        (0.0, 0.5, 1.0, 0.5),
        (0.8, 0.8, 0.2, 0.2),
        (-9.0, -9.0, 9.0, 9.0),
        (0.5, 0.5, 0.501, 0.501),
    ):
        yield "degenerate", degenerate
    for _ in range(40):
        x, y, w, h = (rng.random() for _ in range(4))
        yield "random", (x * (1 - w), y * (1 - h), x * (1 - w) + w, y * (1 - h) + h)


def _grid(count: int, size: int, rng: random.Random) -> list[Gene]:
    """Boxes (4 numbers, 5 with a label) or points side by side."""
    side, out = max(1, round(count**0.5)), []
    for i in range(count):
        x, y = (i % side) / side, (i // side % side) / side
        corner = (x, y, x + 1 / side, y + 1 / side)
        out.append(
            (x + 0.5 / side, y + 0.5 / side)
            if size == 2
            else (*corner, *((rng.random(),) if size == 5 else ()))
        )
    return out


def _lists(kind: str, rng: random.Random) -> Iterator[Guess]:
    """Empty, constant, copied, jittered, scattered, degenerate and gridded lists of every length, and of the known length."""
    size = _SIZES[kind]
    yield Guess("nothing")
    for count in (1, 2, 3, 4, 5, 6, 8, 12, 20, 50):
        plain = [tuple(0.5 + (0.15 if i >= 2 and size >= 4 else 0.0) for i in range(size))] * count
        near = [tuple(v + 0.001 * i for v in plain[0]) for i in range(count)]
        flat = [(0.3 + 0.01 * i,) * 4 + (0.1 * i,) for i in range(count)] if size == 5 else near
        loose = [tuple(rng.random() for _ in range(size)) for _ in range(count)]
        families = {
            "copies": plain,
            "copies moved by one": near,
            "degenerate": flat,
            "scattered": _ordered(loose, size),
            "grid": _grid(count, size, rng),
        }
        for family, items in families.items():
            yield Guess(family, tuple(items))
            if count >= 12:
                yield Guess(f"{family}, number known", tuple(items), known=True)


def _ordered(items: Sequence[Gene], size: int) -> list[Gene]:
    """Corners of boxes in their order."""
    if size < 4:
        return list(items)
    return [(min(a, c), min(b, d), max(a, c), max(b, d), *rest) for a, b, c, d, *rest in items]


def loose(kind: str, rng: random.Random) -> Gene:
    """An item anywhere."""
    size = _SIZES[kind]
    return _ordered([tuple(rng.random() for _ in range(size))], size)[0]


def _spans(rng: random.Random) -> Iterator[tuple[str, Gene]]:
    yield "whole clip", (0.0, 1.0)
    for start in (0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75):
        yield "until the end", (start, 1.0)
        yield "beyond the end", (start, 50.0)
        yield "from the start", (0.0, start)
        yield "middle", (start, min(1.0, start + 0.3))
        yield "reversed", (start + 0.3, start)
        yield "no length", (start, start)


def _own(kind: str, one: Asked) -> Gene | None:
    """The truth of another question as an item."""
    truth = one.sample.answer

    def shares(box: Sequence[float]) -> Gene:
        return box[0] / WIDTH, box[1] / HEIGHT, box[2] / WIDTH, box[3] / HEIGHT

    if kind in ("box", "point"):
        box = shares(truth)
        return box if kind == "box" else ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
    if kind in ("span", "spans"):
        return tuple(v / one.sample.params["duration"] for v in truth[0])
    if kind in ("track", "tube"):
        boxes = list(truth["boxes"].values())
        times = [v / one.sample.params["duration"] for v in truth["time"]] if kind == "tube" else []
        return (*shares(boxes[0]), *shares(boxes[-1]), *times)
    if kind == "grounded":
        letter = (ord(truth["choice"]) - ord("A") + 0.5) / 4
        return (letter, *(v / one.sample.params["duration"] for v in truth["spans"][0]))
    return None


def _with_items(kind: str, train: Sequence[Asked], rng: random.Random) -> Iterator[Guess]:
    own = [item for one in train if (item := _own(kind, one)) is not None]
    for item in own:
        yield Guess("another truth", (item,))
    if own:
        columns = list(zip(*own, strict=True))
        yield Guess("mean truth", (tuple(sum(c) / len(c) for c in columns),))
        yield Guess("median truth", (tuple(sorted(c)[len(c) // 2] for c in columns),))
    if kind in ("objects", "points"):
        yield from _lists(kind, rng)
    if kind in ("span", "spans"):
        for family, span in _spans(rng):
            yield Guess(family, (span,))
        for count in (2, 3, 5, 10) if kind == "spans" else ():
            yield Guess("tiles", tuple((i / count, (i + 0.5) / count) for i in range(count)))
    if kind == "grounded":
        for family, span in _spans(rng):
            yield Guess(family, ((rng.random(), *span),))
    for family, box in _boxes(rng) if kind in ("box", "point", "track", "tube") else ():
        if kind in ("box", "point"):
            yield Guess(family, (box if kind == "box" else box[:2],))
        else:
            yield Guess(family, ((*box, *box, *((0.0, 1.0) if kind == "tube" else ())),))
    if kind == "track":
        yield Guess("the box that is given", (own[0],), given=True)


def _graphs(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Graphs that name everything: few to very many objects of every label, in boxes of every size, joined in every way."""
    for count, edges in ((3, 2), (6, 6), (6, 60), (24, 100), (60, 200), (120, 390), (200, 400)):
        boxes = _grid(count, 4, rng) if count % 2 else [loose("box", rng) for _ in range(count)]
        items = [
            {"id": str(i), "label": LABELS[i % len(LABELS)], "bbox": _box(box)}
            for i, box in enumerate(boxes)
        ]
        pairs = [
            [str(rng.randrange(count)), rng.choice(PREDICATES), str(rng.randrange(count))]
            for _ in range(edges)
        ]
        yield {"objects": items, "relations": pairs}


def _with_text(task: Any, train: Sequence[Asked], rng: random.Random) -> Iterator[Guess]:
    golds = [task.gold_answer(one.sample, one.ctx) for one in train]
    for text, _ in Counter(golds).most_common():
        yield Guess("another truth", text=text)
    for text in {task.wrong_answer(one.sample, one.ctx) for one in train}:
        yield Guess("a wrong answer", text=text)
    for number in (*range(0, 31), *(2**k for k in range(5, 11))):
        yield Guess("a number", text=str(number))
    words = [word for word, _ in Counter(w for text in golds for w in text.split()).most_common()]
    for count in (1, 2, 3, 5, 8, 13, 30, 60, 200):
        yield Guess("commonest words", text=" ".join(words[:count]))
        yield Guess("longest", text=", ".join(rng.choice(words) for _ in range(count)))
    yield Guess("longest", text=max(golds, key=len))
    yield Guess("characters", text="".join(c for c, _ in Counter("".join(golds)).most_common(40)))
    if task.name == "scene_graph":
        for graph in _graphs(rng):
            yield Guess("names everything", text=spelled(task, train[0], graph))


def seeds(task: Any, kind: str, train: Sequence[Asked], rng: random.Random) -> list[Guess]:
    """Where the search begins: every family of guesses."""
    return list(_with_text(task, train, rng) if kind == "text" else _with_items(kind, train, rng))


# how it goes on


def _moved_items(kind: str, guess: Guess, rng: random.Random) -> Guess:
    items, what = list(guess.items), rng.random()
    size = _SIZES[kind]
    if kind in _LISTS and (what < 0.25 or not items):
        if items and rng.random() < 0.5:
            del items[rng.randrange(len(items))]
        else:
            items.append(rng.choice(items) if items and rng.random() < 0.3 else loose(kind, rng))
        return replace(guess, items=tuple(items[:_MOST_ITEMS]))
    place, scale = rng.randrange(len(items)), rng.choice((0.002, 0.01, 0.03, 0.1))
    if what < 0.35:
        items[place] = loose(kind, rng)
    elif what < 0.6:
        which = rng.randrange(size)
        items[place] = tuple(
            v + (i == which) * rng.gauss(0, 3 * scale) for i, v in enumerate(items[place])
        )
    elif what < 0.65 and kind in ("objects", "points"):
        return replace(
            guess,
            known=not guess.known,
            family=guess.family.removesuffix(", number known")
            + ("" if guess.known else ", number known"),
        )
    else:
        items[place] = tuple(v + rng.gauss(0, scale) for v in items[place])
    return replace(guess, items=tuple(items))


def _number(token: str, others: Sequence[str], rng: random.Random) -> str:
    value = float(token)
    changes: tuple[Callable[[], float], ...] = (
        lambda: value + rng.choice((-1, 1)),
        lambda: value + round(rng.gauss(0, 30)),
        lambda: value * rng.uniform(0.5, 2),
        lambda: float(rng.randrange(1000)),
        lambda: float(rng.choice(others)),
    )
    new = rng.choice(changes)()
    return f"{new:.2f}".rstrip("0").rstrip(".") if "." in token else str(round(new))


def _moved_text(guess: Guess, others: Sequence[str], rng: random.Random) -> Guess:
    """One to three changes of the words and numbers of a text; `others` are further texts to take words from."""
    tokens = _TOKENS.findall(guess.text or "")
    for _ in range(rng.choice((1, 1, 2, 3))):
        pool = _TOKENS.findall(rng.choice(others))
        words = [i for i, t in enumerate(tokens) if t[0].isalnum() or (t[0] == "-" and len(t) > 1)]
        if not tokens or not words or not pool:
            return replace(guess, text=rng.choice(others))
        place, what = rng.choice(words), rng.random()
        if _NUMBER.fullmatch(tokens[place]) and what < 0.6:
            numbers = [t for t in pool if _NUMBER.fullmatch(t)]
            tokens[place] = _number(tokens[place], numbers or ["1"], rng)
        elif what < 0.6:
            tokens[place] = rng.choice([t for t in pool if t[0].isalnum()] or ["a"])
        elif what < 0.7:
            del tokens[place]
        elif what < 0.85:
            end = min(len(tokens), place + rng.randrange(1, 8))
            tokens[end:end] = [tokens[place - 1] if place else " ", *tokens[place:end]]
        else:
            start = rng.randrange(len(pool))
            tokens[place : place + rng.randrange(2)] = pool[start : start + rng.randrange(1, 8)]
    return replace(guess, text="".join(tokens)[:4000])


def moved(kind: str, guess: Guess, others: Sequence[str], rng: random.Random) -> Guess:
    """A neighbour of a guess; `others`: texts whose words and numbers may be used."""
    return _moved_text(guess, others, rng) if kind == "text" else _moved_items(kind, guess, rng)
