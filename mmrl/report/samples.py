"""A few answers of an evaluation as plain rows with a drawn picture each, for trackers: the report draws SVG, they take pixels.

for row in shown_samples(evaluation.predictions, 8):
    picture = drawn(row, folder)                     # PIL image or None
    cells = [row["source"], row["id"], *cells_of(row)]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from mmrl.errors import MMRLError
from mmrl.files import printable
from mmrl.report.clips import episode_clip
from mmrl.report.load import logged_path
from mmrl.report.pictures import orientation_of, pictures_of
from mmrl.report.rows import (
    boxes_of,
    headline_of,
    metric_of,
    points_of,
    score_of,
    task_of,
    text_of,
    unit_of,
)
from mmrl.report.stills import ClipRef, clip_of, read_stills
from mmrl.video.media import open_image

__all__ = ["COLUMNS", "cells_of", "drawn", "shown_samples"]

Row = Mapping[str, Any]

COLUMNS = (
    "source",
    "id",
    "task",
    "mode",
    "question",
    "answer",
    "gold",
    "reward",
    "headline",
    "value",
    "reason",
)
"""What `cells_of` gives; `value` is the metric that `headline` names."""

_LONG_SIDE = 512  # pixels
_FRAMES = 4  # of a clip or an episode, side by side
_MOST_TEXT = 2000  # letters of a cell
_MOST_SHAPES = 64  # boxes or points of an answer: beyond it they only cover the picture
_COLORS = {"gold": (22, 163, 74), "pred": (234, 88, 12)}


def shown_samples(predictions: Iterable[Row], count: int) -> list[Row]:
    """One row each of `count` prompts, dealt over the sources in turn: the greedy answer where there is one, else the first
    sampled one. The same prompts at every evaluation, so that a table can be read from step to step."""
    first: dict[tuple[str, str], Row] = {}
    for row in predictions:
        known = first.setdefault(unit_of(row), row)
        if row.get("mode") == "greedy" != known.get("mode"):
            first[unit_of(row)] = row
    by_source: dict[str, list[Row]] = {}
    for (source, _), row in first.items():
        by_source.setdefault(source, []).append(row)
    turns = zip_longest(*(rows[:count] for rows in by_source.values()))
    return [row for turn in turns for row in turn if row is not None][:count]


def cells_of(row: Row) -> list[str | float]:
    """The values of COLUMNS for a row of predictions.jsonl."""
    headline = headline_of(row)
    cells = [
        *unit_of(row),
        task_of(row),
        row.get("mode", ""),
        row.get("question", ""),
        row.get("text", ""),
        _gold(row),
        metric_of(row, "reward"),
        headline,
        metric_of(row, headline),
        score_of(row).get("reason") or "",
    ]
    return [
        cell if isinstance(cell, float) else printable(str(cell)[:_MOST_TEXT]) for cell in cells
    ]


def _gold(row: Row) -> str:
    sample = row.get("sample")
    answer = sample.get("answer") if isinstance(sample, Mapping) else None
    drawn = boxes_of(row, "gold_boxes") or points_of(row, "gold_points") or ""
    return text_of(row, "gold_text") or str(drawn or ("" if answer is None else answer))


def drawn(row: Row, folder: Path, videos: Path | None = None) -> Image.Image | None:
    """What the row's prompt showed, with the gold answer (green) and the model's (orange) over it, at most 512 pixels long: the
    picture that the answer is about, else frames of the clip, or of the episode's film in `videos`, side by side.

    None without either, or where it cannot be read: predictions.jsonl has the rest."""
    try:
        paths, shown = pictures_of(row)
        if paths:
            picture = open_image(logged_path(paths[shown], folder), orientation=orientation_of(row))
            return _marked(picture, row)
        clip = clip_of(row)
        film = None if videos is None else episode_clip(row, videos, videos)
        if clip is None and film is not None:
            clip = ClipRef(str(film))
        return None if clip is None else _strip(clip, folder)
    except (MMRLError, OSError, ValueError, ImportError):
        return None


def _marked(picture: Image.Image, row: Row) -> Image.Image:
    scale = min(1.0, _LONG_SIDE / max(picture.size))
    small = picture.convert("RGB").resize(
        (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    )
    pen = ImageDraw.Draw(small)
    for side, color in _COLORS.items():
        for x1, y1, x2, y2 in boxes_of(row, f"{side}_boxes")[:_MOST_SHAPES]:
            corners = [min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)]
            pen.rectangle([scale * c for c in corners], outline=color, width=2)
        for x, y in points_of(row, f"{side}_points")[:_MOST_SHAPES]:
            pen.circle((scale * x, scale * y), 5, outline=color, width=2)
    return small


def _strip(clip: ClipRef, folder: Path) -> Image.Image:
    frames = [
        Image.fromarray(frame)
        for frame in read_stills(clip, folder, limit=_FRAMES, long_side=_LONG_SIDE // 2).frames
    ]
    strip = Image.new("RGB", (sum(f.width for f in frames), max(f.height for f in frames)))
    left = 0
    for frame in frames:
        strip.paste(frame, (left, 0))
        left += frame.width
    return strip
