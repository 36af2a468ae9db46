"""Pictures of a task's truth and of a wrong answer, for `mmrl tasks check`: one look shows a wrong frame or a shift.

The green boxes are not copied from the data: they are the gold answer's text, parsed and converted by the task, so a
mistake anywhere between prompt, coordinate frame and parser moves them off the object.
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

__all__ = ["GOLD_COLOR", "WRONG_COLOR", "boxes_of", "draw_check"]

GOLD_COLOR = (0, 170, 60)
WRONG_COLOR = (245, 130, 0)
_SIDE = 448  # pixels; smaller pictures are enlarged, larger ones shrunk, so that lines and text stay readable


def boxes_of(detail: Mapping[str, Any], name: str) -> list[tuple[float, float, float, float]]:
    """The boxes [x1, y1, x2, y2] under `name` of a Score.detail, in pixels of the original picture; [] without any."""
    found = detail.get(name) or []
    boxes = []
    for box in found if isinstance(found, (list, tuple)) else []:
        if isinstance(box, (list, tuple)) and len(box) == 4 and all(isinstance(v, (int, float)) for v in box):
            boxes.append((float(box[0]), float(box[1]), float(box[2]), float(box[3])))
    return boxes


def _outline(draw: ImageDraw, box: tuple[float, float, float, float], scale: float,
             color: tuple[int, int, int]) -> None:
    x1, x2 = sorted((box[0] * scale, box[2] * scale))
    y1, y2 = sorted((box[1] * scale, box[3] * scale))
    draw.rectangle((x1, y1, x2, y2), outline=color, width=3)


def _lines(sample: Sample, gold: str, wrong: str) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for label, text, color in (("", sample.question, (0, 0, 0)), ("gold: ", gold, GOLD_COLOR),
                               ("wrong: ", wrong, WRONG_COLOR)):
        for line in textwrap.wrap((label + text)[:400], 68)[:4]:
            yield line, color


def draw_check(sample: Sample, gold: str, wrong: str, gold_detail: Mapping[str, Any], wrong_detail: Mapping[str, Any],
               path: Path) -> Image:
    """Write a PNG: the sample's first picture with gold boxes green and wrong ones orange, question and answers below.

    The details are those of the scores of the two answers. Raises MediaError when the picture cannot be read.
    """
    from PIL import Image, ImageDraw, ImageFont

    picture = open_image(sample.images[0])
    scale = _SIDE / max(picture.size)
    picture = picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))))
    lines = list(_lines(sample, gold, wrong))
    font = ImageFont.load_default(13)
    page = Image.new("RGB", (_SIDE + 24, picture.height + 18 * len(lines) + 24), "white")
    draw = ImageDraw.Draw(picture)
    for box in boxes_of(wrong_detail, "pred_boxes"):
        _outline(draw, box, scale, WRONG_COLOR)
    for box in boxes_of(gold_detail, "pred_boxes"):
        _outline(draw, box, scale, GOLD_COLOR)
    page.paste(picture, (12, 8))
    text = ImageDraw.Draw(page)
    for number, (line, color) in enumerate(lines):
        text.text((12, picture.height + 14 + 18 * number), line, fill=color, font=font)
    path.parent.mkdir(parents=True, exist_ok=True)
    page.save(path)
    return page
