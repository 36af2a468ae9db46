"""The questions of generated clips: each function draws one clip of a task and says what is true of it.

    python -c "import numpy as np; from mmrl.tasks.clip_questions import *; \
        print(TASKS['track'](np.random.default_rng(0), ClipSettings('track'), 'inside').row)"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.tasks.clip_parts import Actor, ClipSettings, apart, fold, line, seconds_text, squares
from mmrl.tasks.scenes import COLORS, SHAPES, draw_objects

if TYPE_CHECKING:
    from mmrl.tasks.clip_parts import Box, Frames, Spot

__all__ = ["TASKS", "ClipSettings", "Take"]

Kind = tuple[str, str]
Span = tuple[int, int]


@dataclass(frozen=True)
class Take:
    """A drawn clip before it is written: the row's own keys, actors (the one in question last) and the twin's answer."""

    row: dict[str, Any]
    actors: tuple[Actor, ...]
    frames: Frames | None = None
    twin_answer: Any = None


def _pick(rng: np.random.Generator, items: Sequence[Any]) -> Any:
    return items[int(rng.integers(len(items)))]


def _kinds(rng: np.random.Generator, count: int) -> list[Kind]:
    """Different (colour, shape) pairs, the first ones."""
    pool = [(c, s) for c in COLORS for s in SHAPES]
    return [pool[int(i)] for i in rng.permutation(len(pool))[:count]]


def _side(rng: np.random.Generator, s: ClipSettings, low: float = 0.2, high: float = 0.32) -> int:
    return int(rng.integers(round(low * s.size), round(high * s.size) + 1))


def _others(rng: np.random.Generator, s: ClipSettings, low: int, high: int) -> int:
    """Number of distractors: the set's, else a draw from low..high."""
    return int(rng.integers(low, high + 1)) if s.distractors is None else s.distractors


def _choice(question: str, options: Sequence[str], right: int) -> dict[str, Any]:
    return {
        "task": "choice",
        "question": question,
        "answer": "AB"[right],
        "params": {"options": list(options)},
    }


def _held(square: Box, spans: Sequence[Span], s: ClipSettings) -> tuple[Box | None, ...]:
    """A square that stands still and is there in the spans (in steps) only."""
    return tuple(
        square if any(a * s.slot <= k < b * s.slot for a, b in spans) else None
        for k in range(s.frames)
    )


def _cuts(rng: np.random.Generator, s: ClipSettings, spans: int) -> list[Span]:
    """`spans` spans in steps of the grid with gaps between them, never the whole clip."""
    while True:
        cuts = sorted(int(v) for v in rng.permutation(s.slots + 1)[: 2 * spans])
        if cuts != [0, s.slots]:
            return list(zip(cuts[::2], cuts[1::2], strict=True))


def _seconds(spans: Sequence[Span], s: ClipSettings) -> list[list[float]]:
    return [[round(a * s.step_s, 6), round(b * s.step_s, 6)] for a, b in spans]


# ---------------------------------------------------------------- questions about order


def _order(rng: np.random.Generator, s: ClipSettings, kind: str) -> Take:
    """Two shapes; which of them is shown, moves or is large first. Played backwards, it is the other one."""
    if kind == "cycle":
        return _cycle(rng, s)
    names = _kinds(rng, 2)
    if kind == "turn":
        middle = int(rng.integers(1, s.slots))
        first, second = apart(rng, s.size, [_side(rng, s, 0.24, 0.4) for _ in names])
        both: tuple[tuple[Box | None, ...], ...] = (
            _held(first, [(0, middle)], s),
            _held(second, [(middle, s.slots)], s),
        )
        question = "which is first?"
    elif kind == "move":
        both, question = _one_then_other(rng, s), "which moves first?"
    else:
        both, question = _large_in_turn(rng, s), "which is large first?"
    actors = tuple(Actor(c, shape, path) for (c, shape), path in zip(names, both, strict=True))
    order = [int(i) for i in rng.permutation(2)]
    row = _choice(question, [actors[i].words for i in order], order.index(0))
    return Take(row, actors, twin_answer="AB"[order.index(1)])


def _one_then_other(
    rng: np.random.Generator, s: ClipSettings
) -> tuple[tuple[Box | None, ...], ...]:
    """Each in its own half of the picture: the first moves up to a frame, the second from there on."""
    middle = int(rng.integers(s.slot, s.frames - s.slot))
    upright, swap = bool(rng.random() < 0.5), int(rng.integers(2))
    found = []
    for number in (0, 1):
        side = _side(rng, s, 0.2, 0.3)
        half = s.size // 2
        across = int(rng.integers(0, half - side)) + half * (number ^ swap)
        moving = _round_trip(
            rng,
            s,
            side,
            float(rng.uniform(0.4, 0.6)),
            (middle + 1) if number == 0 else s.frames - middle,
        )
        still = s.frames - len(moving)
        along = [*moving, *[moving[-1]] * still] if number == 0 else [*[moving[0]] * still, *moving]
        found.append(squares([(across, a) if upright else (a, across) for a in along], side))
    return tuple(found)


def _round_trip(
    rng: np.random.Generator, s: ClipSettings, side: int, share: float, count: int
) -> list[float]:
    """`count` places on an axis, to the right or to the left, of a shape that goes out at one edge and comes in at the other.

    It covers `share` of the way round. The start is drawn evenly from the whole way, so that a single place at a known time
    tells nothing about the direction, or about whether the shape moves.
    """
    way = s.size + side
    start, length = float(rng.uniform(0, way)), share * way * (1 - 2 * int(rng.integers(2)))
    return [(start + length * k / (count - 1)) % way - side for k in range(count)]


def _cycle(rng: np.random.Generator, s: ClipSettings) -> Take:
    """Three shapes in turn, again and again, from any of them on: which follows on one of them?"""
    names, begin = _kinds(rng, 3), int(rng.integers(3))
    places = apart(rng, s.size, [_side(rng, s, 0.24, 0.36) for _ in names])
    actors = [
        Actor(
            *name,
            _held(place, [(i, i + 1) for i in range(s.slots) if (i + begin) % 3 == number], s),
        )
        for number, (name, place) in enumerate(zip(names, places, strict=True))
    ]
    asked, order = int(rng.integers(3)), [int(i) for i in rng.permutation([1, 2])]
    row = _choice(
        f"which is after the {actors[asked].words}?",
        [actors[(asked + i) % 3].words for i in order],
        order.index(1),
    )
    return Take(row, tuple(actors), twin_answer="AB"[order.index(2)])


def _large_in_turn(rng: np.random.Generator, s: ClipSettings) -> tuple[tuple[Box | None, ...], ...]:
    """Both stand still and are small; the first is large for a while, later the second."""
    # 0 <= a <= b <= c: the spans [a, b + 1) and [b + 1, c + 2)
    cuts = sorted(int(v) for v in rng.integers(0, s.slots - 1, 3))
    spans = [(cuts[0], cuts[1] + 1), (cuts[1] + 1, cuts[2] + 2)]
    found = []
    for large, (start, end) in zip(
        apart(rng, s.size, [_side(rng, s, 0.36, 0.44) for _ in spans]), spans, strict=True
    ):
        inset = round((large[2] - large[0]) * 0.27)
        small = (large[0] + inset, large[1] + inset, large[2] - inset, large[3] - inset)
        found.append(
            tuple(large if start * s.slot <= k < end * s.slot else small for k in range(s.frames))
        )
    return tuple(found)


_WAYS = {
    "horizontal": ("left", "right"),
    "vertical": ("up", "down"),
    "orbit": ("clockwise", "counterclockwise"),
}


def _direction(rng: np.random.Generator, s: ClipSettings, kind: str) -> Take:
    """One shape moves at constant speed, round and round unless it stays inside; others, if any, move somewhere else."""
    names = _kinds(rng, 1 + _others(rng, s, 0, 0))
    actors = [Actor(*name, _wander(rng, s, _side(rng, s))) for name in names[1:]]
    side = _side(rng, s, 0.22, 0.36)
    room = s.size - side
    if kind == "orbit":  # clockwise as seen: y points down
        turn = np.linspace(0, 2 * np.pi, s.frames + 1)[:-1] + rng.uniform(0, 2 * np.pi)
        radius = rng.uniform(0.7, 1.0) * room / 2
        path: list[Spot] = [
            (room / 2 + radius * float(np.cos(a)), room / 2 + radius * float(np.sin(a)))
            for a in turn
        ]
        right = 0
    else:
        length, across = float(rng.uniform(0.45, 0.9)) * room, float(rng.integers(0, room + 1))
        if kind.endswith("_inside"):
            low, right = float(rng.uniform(0, room - length)), 1
            path = line((low, across), (low + length, across), s.frames)
        else:
            share = float(rng.uniform(0.5, 0.8))
            along = _round_trip(rng, s, side, share, s.frames)
            right = int((along[1] - along[0]) % (s.size + side) < (s.size + side) / 2)
            path = [(a, across) for a in along]
        if kind.startswith("vertical"):
            path = [(y, x) for x, y in path]
    actor = Actor(*names[0], squares(path, side))
    row = _choice(f"{actor.words} moves", _WAYS[kind.partition("_")[0]], right)
    return Take(row, (*actors, actor), twin_answer="BA"[right])


def _ocr(rng: np.random.Generator, s: ClipSettings, kind: str) -> Take:
    """Two or three large digits one after the other; neighbours differ, and backwards it is another text."""
    from PIL import Image, ImageDraw, ImageFont

    count = int(rng.integers(2, 4))
    while True:
        text = "".join(str(d) for d in rng.integers(0, 10, count))
        if text != text[::-1] and all(a != b for a, b in pairwise(text)):
            break
    cuts = [0, *sorted(1 + int(v) for v in rng.permutation(s.slots - 1)[: count - 1]), s.slots]
    canvas, _ = draw_objects(rng, [], s.size, (0.2, 0.4), s.background, s.noise)
    color, pictures = _pick(rng, list(COLORS.values())), []
    for digit in text:
        font, picture = (
            ImageFont.load_default(round(s.size * float(rng.uniform(0.6, 0.9)))),
            Image.fromarray(canvas),
        )
        left, top, right, bottom = font.getbbox(digit)
        x, y = (
            float(rng.uniform(0, max(1.0, s.size - span))) for span in (right - left, bottom - top)
        )
        ImageDraw.Draw(picture).text((x - left, y - top), digit, font=font, fill=color)
        pictures.append(np.asarray(picture))
    shown = [pictures[i] for i in range(count) for _ in range((cuts[i + 1] - cuts[i]) * s.slot)]
    return Take(
        {"task": "ocr", "question": "read", "answer": text, "params": {}},
        (),
        np.stack(shown),
        text[::-1],
    )


# ---------------------------------------------------------------- questions about time and place


def _appear(rng: np.random.Generator, s: ClipSettings, kind: str, spans: int = 1) -> Take:
    """A shape is there in some spans; others, if any, in spans of their own."""
    names = _kinds(rng, 1 + _others(rng, s, 0, 1))
    places = apart(rng, s.size, [_side(rng, s, 0.2, 0.34) for _ in names])
    times = [_cuts(rng, s, spans) for _ in names]
    actors = [
        Actor(*name, _held(place, when, s))
        for name, place, when in zip(names, places, times, strict=True)
    ][::-1]
    return Take(
        {
            "task": "temporal_grounding",
            "question": actors[-1].words,
            "answer": _seconds(times[0], s),
            "params": {},
        },
        tuple(actors),
    )


def _repeat(rng: np.random.Generator, s: ClipSettings, kind: str) -> Take:
    """As appear with two spans, or three where the clip is long enough."""
    return _appear(rng, s, kind, 2 + int(s.slots >= 7 and rng.random() < 0.5))


def _wander(
    rng: np.random.Generator, s: ClipSettings, side: int, kind: str = "inside"
) -> tuple[Box | None, ...]:
    """A straight path: inside the picture, with bounces off its edges, or out of it."""
    room = s.size - side
    while True:
        a, b = ((float(v[0]), float(v[1])) for v in rng.uniform(0, room, (2, 2)))
        if float(np.hypot(a[0] - b[0], a[1] - b[1])) >= 0.35 * room:
            break
    if kind == "bounce":
        far = (a[0] + 2.5 * (b[0] - a[0]), a[1] + 2.5 * (b[1] - a[1]))
        return squares([(fold(x, room), fold(y, room)) for x, y in line(a, far, s.frames)], side)
    # from a to a place beyond the edge in front of it, reached well before the end
    if kind == "leave":
        angle = float(rng.uniform(0, 2 * np.pi))
        beyond = (
            a[0] + 1.5 * s.size * float(np.cos(angle)),
            a[1] + 1.5 * s.size * float(np.sin(angle)),
        )
        return squares(line(a, beyond, s.frames), side)
    return squares(line(a, b, s.frames), side)


def _boxes(actor: Actor, s: ClipSettings) -> dict[str, list[float]]:
    """{seconds: box} at every step of the grid where it is to be seen."""
    found = {seconds_text(i * s.step_s): actor.box(i * s.slot, s.size) for i in range(s.slots)}
    return {key: box for key, box in found.items() if box is not None}


def _track(rng: np.random.Generator, s: ClipSettings, kind: str) -> Take:
    """A moving shape among others. With `first_box` another may look the same: only the given box tells them apart."""
    names = _kinds(rng, 1 + _others(rng, s, 1, 2))
    if s.first_box and len(names) > 1 and rng.random() < 0.5:
        names[1] = names[0]
    actors = [Actor(*name, _wander(rng, s, _side(rng, s))) for name in names[:0:-1]]
    actor = Actor(*names[0], _wander(rng, s, _side(rng, s), kind))
    boxes = _boxes(actor, s)
    row = {
        "task": "tracking",
        "question": actor.words,
        "answer": {"boxes": boxes},
        "frame": "abs_orig",
        "params": {},
    }
    if s.first_box:
        row["params"] = {"first_box": boxes["0"]}
    return Take(row, (*actors, actor))


def _st(rng: np.random.Generator, s: ClipSettings, kind: str) -> Take:
    """A moving shape that is there in one span; others move all the time."""
    names = _kinds(rng, 1 + _others(rng, s, 0, 1))
    actors = [Actor(*name, _wander(rng, s, _side(rng, s))) for name in names[1:]]
    (span,) = _cuts(rng, s, 1)
    path = _wander(rng, s, _side(rng, s))
    actor = Actor(
        *names[0],
        tuple(p if span[0] * s.slot <= k < span[1] * s.slot else None for k, p in enumerate(path)),
    )
    answer = {"time": _seconds([span], s)[0], "boxes": _boxes(actor, s)}
    return Take(
        {
            "task": "st_grounding",
            "question": actor.words,
            "answer": answer,
            "frame": "abs_orig",
            "params": {},
        },
        (*actors, actor),
    )


def _gqa(rng: np.random.Generator, s: ClipSettings, kind: str) -> Take:
    """Shapes that come and go; the colour of one, and when it is there."""
    shapes = [SHAPES[int(i)] for i in rng.permutation(3)][: 1 + min(2, _others(rng, s, 1, 1))]
    colors = [str(c) for c in rng.permutation(list(COLORS))]
    places = apart(rng, s.size, [_side(rng, s, 0.22, 0.34) for _ in shapes])
    times = [_cuts(rng, s, 1) for _ in shapes]
    actors = [
        Actor(c, shape, _held(place, when, s))
        for c, shape, place, when in zip(colors, shapes, places, times, strict=False)
    ][::-1]
    order = [int(i) for i in rng.permutation(3)]
    row = {
        "task": "grounded_qa",
        "question": f"color of the {shapes[0]}",
        "params": {"options": [colors[i] for i in order]},
        "answer": {"choice": "ABC"[order.index(0)], "spans": _seconds(times[0], s)},
    }
    return Take(row, tuple(actors))


def _collide(rng: np.random.Generator, s: ClipSettings, kind: str) -> Take:
    """How often a shape hits a wall, or when two shapes touch."""
    return _walls(rng, s) if kind == "walls" else _touch(rng, s)


def _walls(rng: np.random.Generator, s: ClipSettings) -> Take:
    """To and fro between two edges: it touches one in the frames in which it turns back (params.events: their seconds)."""
    side = _side(rng, s)
    room, upright = s.size - side, bool(rng.random() < 0.5)
    count = int(rng.integers(0, min(3, (s.frames - 1) // 2) + 1))
    while True:
        turns = sorted(1 + int(v) for v in rng.permutation(s.frames - 2)[:count])
        if all(b - a >= 2 for a, b in pairwise(turns)):
            break
    first, (start, end) = int(rng.integers(2)), (float(v) for v in rng.uniform(0.15, 0.85, 2))
    if count == 0:
        start, end = (float(rng.uniform(0.15, 0.3)), float(rng.uniform(0.7, 0.85)))[
            :: 1 - 2 * first
        ]
    knots, places = (
        [0, *turns, s.frames - 1],
        [start, *[(first + i) % 2 for i in range(count)], end],
    )
    along = np.interp(np.arange(s.frames), knots, places) * room
    # clear of the other two edges
    across = float(rng.integers(round(0.1 * room), round(0.9 * room) + 1))
    actor = Actor(
        *_kinds(rng, 1)[0],
        squares([(across, float(a)) if upright else (float(a), across) for a in along], side),
    )
    row = {
        "task": "numeric",
        "question": f"hits of the {actor.words}",
        "answer": count,
        "params": {"events": [round(t / s.fps, 6) for t in turns]},
    }
    return Take(row, (actor,))


def _touch(rng: np.random.Generator, s: ClipSettings) -> Take:
    """Two shapes move towards each other, stay together for a span, and part again."""
    names = [
        (c, ("circle", "square")[int(rng.integers(2))]) for c in rng.permutation(list(COLORS))[:2]
    ]
    side, upright = _side(rng, s, 0.2, 0.28), bool(rng.random() < 0.5)
    (span,) = _cuts(rng, s, 1)
    start, end = span[0] * s.slot, span[1] * s.slot
    widest, narrowest = (s.size - 2 * side) * float(rng.uniform(0.7, 1.0)), 0.14 * s.size
    gaps = [-side / 4] * s.frames  # they overlap by a quarter while together
    # from the outer frame to the one next to the meeting
    for numbers in (range(start), range(s.frames - 1, end - 1, -1)):
        for k, gap in zip(
            numbers,
            line((widest, 0), (narrowest, 0), max(2, len(numbers)))[-len(numbers) :],
            strict=False,
        ):
            gaps[k] = gap[0]
    middle, across = s.size / 2, float(rng.integers(0, s.size - side + 1))
    actors = []
    for name, sign in zip(names, (-1, 1), strict=True):
        along = [
            min(max(middle + sign * (g + side) / 2 - side / 2, 0.0), float(s.size - side))
            for g in gaps
        ]
        actors.append(
            Actor(
                str(name[0]),
                name[1],
                squares([(across, a) if upright else (a, across) for a in along], side),
            )
        )
    return Take(
        {
            "task": "temporal_grounding",
            "question": f"{actors[0].words} and {actors[1].words} touch",
            "answer": _seconds([span], s),
            "params": {},
        },
        tuple(actors),
    )


TASKS: dict[str, Callable[[np.random.Generator, ClipSettings, str], Take]] = {
    "order": _order,
    "direction": _direction,
    "appear": _appear,
    "repeat": _repeat,
    "track": _track,
    "collide": _collide,
    "st": _st,
    "gqa": _gqa,
    "ocr": _ocr,
}
"""Task -> drawer of one clip and its question."""
