"""Pictures of a task's truth and of a wrong answer, for `mmrl tasks check`: one look shows a wrong frame or a shift.

The green boxes and points are not copied from the data: they are the gold answer's text, parsed and converted by the
task, so a mistake anywhere between prompt, coordinate frame and parser moves them off the object. Tasks whose answer is a
text have it below the picture; a sample without pictures is a card of text.
"""
from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.media import open_image
from mmrl.types import Sample

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

__all__ = ["GOLD_COLOR", "WRONG_COLOR", "boxes_of", "draw_check", "points_of"]

GOLD_COLOR = (0, 170, 60)
WRONG_COLOR = (245, 130, 0)
_SIDE = 448  # pixels; smaller pictures are enlarged, larger ones shrunk, so that lines and text stay readable


def _numbers_of(detail: Mapping[str, Any], name: str, length: int) -> list[tuple[float, ...]]:
    found = detail.get(name) or []
    return [tuple(float(v) for v in item) for item in (found if isinstance(found, (list, tuple)) else [])
            if isinstance(item, (list, tuple)) and len(item) == length and all(isinstance(v, (int, float)) for v in item)]


def boxes_of(detail: Mapping[str, Any], name: str) -> list[tuple[float, ...]]:
    """The boxes [x1, y1, x2, y2] under `name` of a Score.detail, in pixels of the original picture; [] without any."""
    return _numbers_of(detail, name, 4)


def points_of(detail: Mapping[str, Any], name: str) -> list[tuple[float, ...]]:
    """The points [x, y] under `name` of a Score.detail, in pixels of the original picture; [] without any."""
    return _numbers_of(detail, name, 2)


def _draw_answer(draw: ImageDraw, detail: Mapping[str, Any], scale: float, color: tuple[int, int, int], font: Any) -> None:
    """The boxes with their labels and the points of one answer."""
    boxes, labels = boxes_of(detail, "pred_boxes"), detail.get("pred_labels")
    for x1, y1, x2, y2 in boxes:
        left, right = sorted((x1 * scale, x2 * scale))
        top, bottom = sorted((y1 * scale, y2 * scale))
        draw.rectangle((left - 1, top - 1, right + 1, bottom + 1), outline=(255, 255, 255), width=5)
        draw.rectangle((left, top, right, bottom), outline=color, width=3)
    if isinstance(labels, (list, tuple)) and len(labels) == len(boxes):
        for box, label in zip(boxes, labels, strict=True):
            place = (min(box[0], box[2]) * scale + 4, min(box[1], box[3]) * scale + 2)
            draw.text(place, str(label)[:40], fill=color, font=font, stroke_width=2, stroke_fill="white")
    for x, y in points_of(detail, "pred_points"):
        for width, tint in ((7, (255, 255, 255)), (3, color)):
            for dx, dy in ((9, 0), (0, 9)):
                draw.line((x * scale - dx, y * scale - dy, x * scale + dx, y * scale + dy), fill=tint, width=width)


def _lines(sample: Sample, gold: str, wrong: str) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for label, text, color in (("", sample.question, (0, 0, 0)), ("gold: ", gold, GOLD_COLOR),
                               ("wrong: ", wrong, WRONG_COLOR)):
        for line in textwrap.wrap((label + text)[:400], 68)[:4]:
            yield line, color


def _picture(sample: Sample) -> tuple[Image | None, float]:
    """The picture the answer is about (params.image_index), resized, and by how much; None without pictures."""
    if not sample.images:
        return None, 1.0
    index = sample.params.get("image_index", 0)
    picture = open_image(sample.images[index if isinstance(index, int) and 0 <= index < len(sample.images) else 0])
    scale = _SIDE / max(picture.size)
    return picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))), scale


def draw_check(sample: Sample, gold: str, wrong: str, gold_detail: Mapping[str, Any], wrong_detail: Mapping[str, Any],
               path: Path) -> Image:
    """Write a PNG: the sample's picture with gold boxes and points green and wrong ones orange, question and answers below.

    The details are those of the scores of the two answers. Raises MediaError when the picture cannot be read.
    """
    from PIL import Image, ImageDraw, ImageFont

    picture, scale = _picture(sample)
    lines = list(_lines(sample, gold, wrong))
    font = ImageFont.load_default(13)
    height = picture.height if picture is not None else 0
    page = Image.new("RGB", (_SIDE + 24, height + 18 * len(lines) + 24), "white")
    if picture is not None:
        draw = ImageDraw.Draw(picture)
        _draw_answer(draw, wrong_detail, scale, WRONG_COLOR, font)
        _draw_answer(draw, gold_detail, scale, GOLD_COLOR, font)
        page.paste(picture, (12, 8))
    text = ImageDraw.Draw(page)
    for number, (line, color) in enumerate(lines):
        text.text((12, height + 14 + 18 * number), line, fill=color, font=font)
    path.parent.mkdir(parents=True, exist_ok=True)
    page.save(path)
    return page
