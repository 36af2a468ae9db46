"""Pictures of a task's truth and of a wrong answer, for `mmrl tasks check`: one look shows a wrong frame, a shift or a wrong time.

The green boxes and points are not copied from the data: they are the gold answer's text, parsed and converted by the
task, so a mistake anywhere between prompt, coordinate frame and parser moves them off the object. Tasks whose answer is a
text have it below the picture; a sample without pictures is a card of text. Of a clip eight frames are shown with the boxes
that belong to their seconds, and spans as bars on a time axis.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import MediaError
from mmrl.report.charts import nice_ticks
from mmrl.report.rows import seconds, spans_of, track_of
from mmrl.report.stills import Stills, boxes_at, clip_of, read_stills
from mmrl.types import Sample, VideoSize
from mmrl.video.media import open_image, orientation_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

__all__ = ["GOLD_COLOR", "WRONG_COLOR", "boxes_of", "draw_check", "points_of"]

GOLD_COLOR = (0, 170, 60)
WRONG_COLOR = (245, 130, 0)
_SIDE = 448  # pixels; smaller pictures are enlarged, larger ones shrunk, so that lines and text stay readable
# pixels of a clip's frame, frames in a row, between them, of a label's height
_STILL, _COLUMNS, _GAP, _LABEL = 208, 4, 6, 20


def _numbers_of(detail: Mapping[str, Any], name: str, length: int) -> list[tuple[float, ...]]:
    found = detail.get(name) or []
    return [
        tuple(float(v) for v in item)
        for item in (found if isinstance(found, (list, tuple)) else [])
        if isinstance(item, (list, tuple))
        and len(item) == length
        and all(isinstance(v, (int, float)) for v in item)
    ]


def boxes_of(detail: Mapping[str, Any], name: str) -> list[tuple[float, ...]]:
    """The boxes [x1, y1, x2, y2] under `name` of a Score.detail, in pixels of the original picture; [] without any."""
    return _numbers_of(detail, name, 4)


def points_of(detail: Mapping[str, Any], name: str) -> list[tuple[float, ...]]:
    """The points [x, y] under `name` of a Score.detail, in pixels of the original picture; [] without any."""
    return _numbers_of(detail, name, 2)


def _draw_box(
    draw: ImageDraw, box: Sequence[float], scale: float, color: tuple[int, int, int]
) -> None:
    x1, y1, x2, y2 = box
    left, right = sorted((x1 * scale, x2 * scale))
    top, bottom = sorted((y1 * scale, y2 * scale))
    draw.rectangle((left - 1, top - 1, right + 1, bottom + 1), outline=(255, 255, 255), width=5)
    draw.rectangle((left, top, right, bottom), outline=color, width=3)


def _draw_answer(
    draw: ImageDraw, detail: Mapping[str, Any], scale: float, color: tuple[int, int, int], font: Any
) -> None:
    """The boxes with their labels and the points of one answer."""
    boxes, labels = boxes_of(detail, "pred_boxes"), detail.get("pred_labels")
    for box in boxes:
        _draw_box(draw, box, scale, color)
    if isinstance(labels, (list, tuple)) and len(labels) == len(boxes):
        for box, label in zip(boxes, labels, strict=True):
            place = (min(box[0], box[2]) * scale + 4, min(box[1], box[3]) * scale + 2)
            draw.text(
                place, str(label)[:40], fill=color, font=font, stroke_width=2, stroke_fill="white"
            )
    for x, y in points_of(detail, "pred_points"):
        for width, tint in ((7, (255, 255, 255)), (3, color)):
            for dx, dy in ((9, 0), (0, 9)):
                draw.line(
                    (x * scale - dx, y * scale - dy, x * scale + dx, y * scale + dy),
                    fill=tint,
                    width=width,
                )


def _lines(
    sample: Sample, gold: str, wrong: str, columns: int
) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for label, text, color in (
        ("", sample.question, (0, 0, 0)),
        ("gold: ", gold, GOLD_COLOR),
        ("wrong: ", wrong, WRONG_COLOR),
    ):
        for line in textwrap.wrap((label + text)[:400], columns)[:4]:
            yield line, color


def _picture(sample: Sample) -> tuple[Image | None, float]:
    """The picture the answer is about (params.image_index), resized, and by how much; None without pictures."""
    if not sample.images:
        return None, 1.0
    index = sample.params.get("image_index", 0)
    path = sample.images[index if isinstance(index, int) and 0 <= index < len(sample.images) else 0]
    picture = open_image(path, orientation=orientation_of(sample))
    scale = _SIDE / max(picture.size)
    return picture.resize(
        (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    ), scale


def _stills(
    sample: Sample, gold: Mapping[str, Any], wrong: Mapping[str, Any], videos: Sequence[VideoSize]
) -> Stills:
    """Frames of the sample's clip. Raises MediaError, also for what a decoder raises of its own."""
    sizes = [{"duration_s": v.duration_s, "timestamps_s": list(v.timestamps_s)} for v in videos]
    clip = clip_of(
        {
            "videos": list(sample.videos),
            "video_sizes": sizes,
            "sample": {"params": dict(sample.params)},
        }
    )
    assert clip is not None
    keys = [
        key
        for detail in (gold, wrong)
        for key in track_of({"score": {"detail": detail}}, "pred_tracks") or {}
    ]
    try:
        return read_stills(clip, keys=keys, long_side=_STILL)
    except (ImportError, ValueError, OSError) as error:
        kind = getattr(error, "kind", "unsupported")
        raise MediaError(f"{clip.path}: {error}", kind=kind, path=clip.path) from error


def _filmstrip(
    stills: Stills, gold: Mapping[str, Any], wrong: Mapping[str, Any], font: Any
) -> Image:
    """Frames with the boxes at their seconds, and below them the spans of both answers over time."""
    from PIL import Image, ImageDraw

    scale = _STILL / max(stills.size)
    width, height = (max(1, round(v * scale)) for v in stills.size)
    rows = -(-len(stills.frames) // _COLUMNS)
    strip = Image.new("RGB", (_COLUMNS * (_STILL + _GAP), rows * (height + _LABEL) + 70), "white")
    shown = [
        (answer, {"score": {"detail": answer}}, color)
        for answer, color in ((wrong, WRONG_COLOR), (gold, GOLD_COLOR))
    ]
    boxes = [
        (boxes_at(track_of(row, "pred_tracks") or {}, stills.seconds, stills.reach), color)
        for _, row, color in shown
    ]
    for place, (second, rgb_HWC) in enumerate(zip(stills.seconds, stills.frames, strict=True)):
        frame = Image.fromarray(rgb_HWC).resize((width, height))
        draw = ImageDraw.Draw(frame)
        for found, color in boxes:
            if (box := found[place]) is not None:
                _draw_box(draw, box, scale, color)
        if len(stills.frames) == 1:
            for answer, _, color in shown:
                _draw_answer(draw, answer, scale, color, font)
        left, top = place % _COLUMNS * (_STILL + _GAP), place // _COLUMNS * (height + _LABEL)
        strip.paste(frame, (left, top))
        ImageDraw.Draw(strip).text(
            (left + width / 2, top + height + 2), f"{seconds(second)} s", "black", font, anchor="ma"
        )
    spans = [(spans_of(row, "pred_spans"), color) for _, row, color in reversed(shown)]
    if all(found is None for found, _ in spans):
        return strip.crop((0, 0, strip.width, strip.height - 70))
    _time_axis(
        ImageDraw.Draw(strip), spans, stills.duration, strip.width - _GAP, strip.height - 62, font
    )
    return strip


def _time_axis(
    draw: ImageDraw,
    spans: Sequence[tuple[Sequence[tuple[float, float]] | None, tuple[int, int, int]]],
    duration: float,
    width: int,
    top: int,
    font: Any,
) -> None:
    """Bars of each answer on a line of its own, and seconds below."""

    def at(second: float) -> float:
        return 1 + (width - 3) * min(1.0, max(0.0, second / duration))

    for number, (found, color) in enumerate(spans):
        y = top + 16 * number
        draw.rectangle((0, y, width - 1, y + 12), fill=(240, 240, 236))
        for start, end in found or ():
            draw.rectangle((at(start), y, max(at(start) + 1, at(end)), y + 12), fill=color)
    y = top + 16 * len(spans)
    draw.line((0, y, width - 1, y), fill=(120, 120, 120))
    for tick in [t for t in nice_ticks(0.0, duration, 8) if t < 0.93 * duration] + [duration]:
        draw.line((at(tick), y, at(tick), y + 4), fill=(120, 120, 120))
        anchor = "la" if tick == 0 else "ra" if tick == duration else "ma"
        draw.text(
            (at(tick), y + 6),
            f"{seconds(tick)}{' s' if tick == duration else ''}",
            "black",
            font,
            anchor=anchor,
        )


def draw_check(
    sample: Sample,
    gold: str,
    wrong: str,
    gold_detail: Mapping[str, Any],
    wrong_detail: Mapping[str, Any],
    path: Path,
    videos: Sequence[VideoSize] = (),
) -> Image:
    """Write a PNG: the sample's picture (or frames of its clip) with gold boxes, points and spans green and wrong ones orange,
    question and answers below.

    The details are those of the scores of the two answers. `videos` (of the context) tell which frames the policy sees; without
    them frames are spread evenly. Raises MediaError when picture or clip cannot be read.
    """
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(13)
    if sample.videos:
        stills = _stills(sample, gold_detail, wrong_detail, videos)
        picture: Image.Image | None = _filmstrip(stills, gold_detail, wrong_detail, font)
    else:
        picture, scale = _picture(sample)
        if picture is not None:
            draw = ImageDraw.Draw(picture)
            _draw_answer(draw, wrong_detail, scale, WRONG_COLOR, font)
            _draw_answer(draw, gold_detail, scale, GOLD_COLOR, font)
    lines = list(_lines(sample, gold, wrong, 68 if not sample.videos else 124))
    height, width = (
        (picture.height, max(_SIDE, picture.width)) if picture is not None else (0, _SIDE)
    )
    page = Image.new("RGB", (width + 24, height + 18 * len(lines) + 24), "white")
    if picture is not None:
        page.paste(picture, (12, 8))
    text = ImageDraw.Draw(page)
    for number, (line, color) in enumerate(lines):
        text.text((12, height + 14 + 18 * number), line, fill=color, font=font)
    path.parent.mkdir(parents=True, exist_ok=True)
    page.save(path)
    return page
