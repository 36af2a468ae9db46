"""Filmstrips of played episodes, for `mmrl env check`: what was shown before each turn, what the turn did on it, what it said and
earned. One PNG per episode; a turn without a picture is a card of words."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.diagnostics._environment_play import Played
from mmrl.environment import Mark, Observation
from mmrl.errors import MediaError
from mmrl.video.media import open_image, orientation_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

__all__ = ["draw_played"]

_MARK = (230, 30, 90)
_SIDE, _GAP, _COLUMNS = 240, 8, 5  # pixels of a picture's place, between two, in a row
_LINE, _CAPTION = 14, 4  # pixels of a line of text, lines below a picture
_MOST_TURNS, _MOST_PICTURES = 15, 16


@dataclass
class _Panel:
    """One turn: the picture that it acted on (or the words it was shown), its marks, its text and what it led to."""

    picture: Image | None
    words: str
    marks: list[Mark]
    said: str
    led_to: str


def draw_played(played: Sequence[Played], folder: Path) -> list[str]:
    """Write FOLDER/PLAYER_NN.png of each episode (of the junk player none) and return their paths."""
    paths: list[str] = []
    for number, p in enumerate(played):
        if p.player != "junk" and isinstance(p.first, Observation) and len(paths) < _MOST_PICTURES:
            target = folder / f"{p.player}_{number:02d}.png"
            _strip(
                p, [panel for panel, _ in zip(_panels(p), range(_MOST_TURNS), strict=False)]
            ).save(target)
            paths.append(str(target))
    return paths


def _words(observation: Observation) -> str:
    """The texts of the messages, without the system's."""
    out = []
    for message in observation.messages:
        content = message.get("content", "")
        items = [{"text": content}] if isinstance(content, str) else content
        if message.get("role") != "system":
            out += [str(item.get("text", "")) for item in items if isinstance(item, dict)]
    return " ".join(filter(None, out))


def _opened(image: Any, played: Played) -> Image | None:
    from PIL import Image

    try:
        if isinstance(image, (str, os.PathLike)):
            path = os.fspath(image)
            return open_image(path, orientation=orientation_of(played.sample)).convert("RGB")
        return Image.fromarray(np.asarray(image))
    except (MediaError, TypeError, ValueError):  # a finding already
        return None


def _panels(played: Played) -> Iterator[_Panel]:
    """A panel per turn, and one of the last observation where nobody answered it."""
    shown, seen = played.first, list(played.first.images)
    for step in played.steps:
        outcome = step.outcome
        marks = list(outcome.marks) if outcome is not None else []
        place = marks[0].image if marks else -1
        at = [m for m in marks if m.image == place]
        usable = bool(seen) and -len(seen) <= place < len(seen) and (bool(marks) or shown.images)
        picture = _opened(seen[place], played) if usable else None
        led = "raised an error" if outcome is None else f"reward {outcome.reward:g}"
        if outcome is not None and outcome.ended:
            led += ", the end" if outcome.terminated else ", cut off"
        yield _Panel(picture, _words(shown), at, step.text, led)
        if outcome is None or not isinstance(outcome.observation, Observation):
            return
        shown = outcome.observation
        seen += list(shown.images)
    picture = _opened(seen[-1], played) if shown.images else None
    yield _Panel(picture, _words(shown), [], "", "no further turn")


def _strip(played: Played, panels: Sequence[_Panel]) -> Image:
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(11)
    rows = -(-len(panels) // _COLUMNS)
    height = _SIDE + _LINE * _CAPTION + _GAP
    width = min(len(panels), _COLUMNS) * (_SIDE + _GAP) + _GAP
    strip = Image.new("RGB", (max(width, 3 * _SIDE), rows * height + 3 * _LINE), "white")
    draw = ImageDraw.Draw(strip)
    title = f"{played.player} player, sample {played.sample.id}: {_summary(played)}"
    for line, text in enumerate([title, *textwrap.wrap(_words(played.first), 110)[:1]]):
        draw.text((_GAP, 4 + line * _LINE), text[:140], fill="black", font=font)
    for number, panel in enumerate(panels):
        left = _GAP + number % _COLUMNS * (_SIDE + _GAP)
        top = 3 * _LINE + number // _COLUMNS * height
        _draw_panel(strip, draw, panel, (left, top), font)
    return strip


def _summary(played: Played) -> str:
    if played.failure is not None:
        return f"failed, {type(played.failure).__name__}: {played.failure}"
    rollout = played.rollout
    assert rollout is not None
    info = ", ".join(f"{k} {v:g}" for k, v in rollout.info.items())
    return f"{len(played.steps)} turns, reward {rollout.reward:g}" + (f"; {info}" if info else "")


def _draw_panel(
    strip: Image, draw: ImageDraw, panel: _Panel, place: tuple[int, int], font: Any
) -> None:
    left, top = place
    if panel.picture is None:
        draw.rectangle((left, top, left + _SIDE - 1, top + _SIDE - 1), fill=(244, 244, 240))
        for line, text in enumerate(textwrap.wrap(panel.words or "(no words)", 38)[:16]):
            draw.text((left + 6, top + 6 + line * _LINE), text, fill="black", font=font)
    else:
        scale = _SIDE / max(panel.picture.size)
        width, height = panel.picture.size
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        strip.paste(panel.picture.resize(size), place)
        draw.rectangle((left, top, left + size[0] - 1, top + size[1] - 1), outline=(190, 190, 190))
        for mark in panel.marks:
            _draw_mark(draw, mark, place, scale)
    said = [*textwrap.wrap(panel.said.replace("\n", " "), 38)[: _CAPTION - 1], panel.led_to]
    for line, text in enumerate(said):
        colour = (110, 110, 110) if line == len(said) - 1 else (0, 0, 0)
        draw.text((left, top + _SIDE + 2 + line * _LINE), text, fill=colour, font=font)


def _draw_mark(draw: ImageDraw, mark: Mark, place: tuple[int, int], scale: float) -> None:
    at = [v * scale + place[i % 2] for i, v in enumerate(mark.at)]
    if mark.kind == "box":
        (x1, x2), (y1, y2) = sorted(at[::2]), sorted(at[1::2])
        draw.rectangle((x1, y1, x2, y2), outline="white", width=4)
        draw.rectangle(
            (x1 + 1, y1 + 1, x2 - 1, y2 - 1) if x2 - x1 > 4 < y2 - y1 else (x1, y1, x2, y2),
            outline=_MARK,
            width=2,
        )
        return
    if mark.kind == "drag":
        draw.line(at, fill="white", width=4)
        draw.line(at, fill=_MARK, width=2)
    x, y = at[-2:]
    draw.ellipse((x - 7, y - 7, x + 7, y + 7), outline="white", width=4)
    draw.ellipse((x - 6, y - 6, x + 6, y + 6), outline=_MARK, width=2)
    draw.ellipse((x - 1, y - 1, x + 1, y + 1), fill=_MARK)
