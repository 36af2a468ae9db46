"""Pictures for the page: shrunk, encoded into the file itself, with boxes, points and labels drawn over them.

Everything over a picture is SVG in pixels of the original, so that it stays sharp at every size of the page.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.errors import MediaError
from mmrl.report.load import Find, logged_path
from mmrl.report.rows import boxes_of, labels_of, points_of
from mmrl.report.text import esc
from mmrl.video.media import ORIENTATION_PARAM, Orientation, open_image

__all__ = [
    "Pictures",
    "box_group",
    "label_group",
    "orientation_of",
    "overlay",
    "pictures_of",
    "point_group",
]

LONG_SIDE = 480  # pixels: twice the width at which a card shows it
MOST_LABELS = 16  # beyond it words only cover the picture
_ARM = 0.028  # of the picture's long side: half the width of a cross
_LETTER = 0.05  # of the picture's long side: height of a label
Size = tuple[int, int]


class Pictures:
    """Opens, shrinks and encodes each picture once. `find` says where a picture lies; by default relative paths are looked for in
    the run's folder, then here."""

    def __init__(self, folder: Path, find: Find | None = None) -> None:
        self.folder = folder
        self._find = find or (lambda path: logged_path(path, folder))
        self._seen: dict[tuple[str, Orientation], tuple[str, Size, str]] = {}

    def get(self, path: str, orientation: Orientation = "displayed") -> tuple[str, Size, str]:
        """(data address, original (width, height), '') or ('', (4, 3), reason) when it cannot be shown."""
        key = path, orientation
        if key not in self._seen:
            self._seen[key] = self._load(path, orientation)
        return self._seen[key]

    def _load(self, path: str, orientation: Orientation) -> tuple[str, Size, str]:
        try:
            picture = open_image(self._find(path), orientation=orientation)
        except MediaError as error:
            return "", (4, 3), f"the picture cannot be shown ({error.kind}): {Path(path).name}"
        size = picture.size
        picture.thumbnail((LONG_SIDE, LONG_SIDE))
        encoded = io.BytesIO()
        picture.save(encoded, "JPEG", quality=82, optimize=True)
        kind, data = "jpeg", encoded.getvalue()
        if size[0] * size[1] <= 65536:  # small drawings are smaller and sharper as PNG
            encoded = io.BytesIO()
            picture.save(encoded, "PNG", optimize=True)
            if encoded.tell() < 2 * len(data):
                kind, data = "png", encoded.getvalue()
        return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}", size, ""

    def size_of(self, row: Mapping[str, Any]) -> Size:
        """(width, height) of the picture that `drawing` shows for the row."""
        paths, shown = pictures_of(row)
        return self.get(paths[shown], orientation_of(row))[1] if paths else (4, 3)

    def drawing(self, row: Mapping[str, Any], below: str, above: str = "") -> str:
        """The row's picture with its gold answer; `below` and `above` are SVG in original pixels around it.

        Of several pictures it is the one that the answer is about (params.image_index)."""
        paths, shown = pictures_of(row)
        if not paths:
            return '<div class="frame none without"><span>no picture</span></div>'
        address, (width, height), reason = self.get(paths[shown], orientation_of(row))
        if reason:
            return f'<div class="frame none"><span>{esc(reason)}</span></div>'
        more = (
            f'<span class="more">{shown + 1} of {len(paths)} pictures</span>'
            if len(paths) > 1
            else ""
        )
        label = esc(f"picture of {row.get('id', '')}")
        return (
            f'<div class="frame"><svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
            f'<image href="{address}" width="{width}" height="{height}"/>'
            f"{below}{overlay(row, 'gold', 'gold', (width, height))}{above}</svg>{more}</div>"
        )


def pictures_of(row: Mapping[str, Any]) -> tuple[list[str], int]:
    """Paths of the row's pictures and the place of the one its answer is about."""
    images = row.get("images")
    if not isinstance(images, Sequence) or isinstance(images, str) or not images:
        return [], 0
    index = _params(row).get("image_index", 0)
    return [str(p) for p in images], index if isinstance(index, int) and 0 <= index < len(
        images
    ) else 0


def _params(row: Mapping[str, Any]) -> Mapping[str, Any]:
    sample = row.get("sample")
    params = sample.get("params") if isinstance(sample, Mapping) else None
    return params if isinstance(params, Mapping) else {}


def orientation_of(row: Mapping[str, Any]) -> Orientation:
    """Whether the row's pictures are shown as displayed or as stored (EXIF)."""
    return "stored" if _params(row).get(ORIENTATION_PARAM) == "stored" else "displayed"


def overlay(row: Mapping[str, Any], side: str, kind: str, size: Size) -> str:
    """Boxes, points and labels of one side of a row ('pred' or 'gold'), drawn as `kind` (gold, greedy, sampled)."""
    boxes = boxes_of(row, f"{side}_boxes")
    labels = labels_of(row, f"{side}_labels") if kind != "sampled" else []
    words = (
        label_group(boxes, labels, kind, size) if len(labels) == len(boxes) <= MOST_LABELS else ""
    )
    return (
        box_group(boxes, kind) + point_group(points_of(row, f"{side}_points"), kind, size) + words
    )


def box_group(boxes: Sequence[tuple[float, ...]], kind: str) -> str:
    """SVG rectangles of class `kind` (gold, greedy, sampled), each over a dark halo so that it shows on any picture."""
    out = []
    for x1, y1, x2, y2 in boxes:
        left, top, width, height = min(x1, x2), min(y1, y2), abs(x2 - x1), abs(y2 - y1)
        shape = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}"'
        halo = "" if kind == "sampled" else f'<rect class="halo {kind}-halo" {shape}/>'
        out.append(f'{halo}<rect class="{kind}" {shape}/>')
    return "".join(out)


def point_group(points: Sequence[tuple[float, ...]], kind: str, size: Size) -> str:
    """Crosses of class `kind` over a halo: gold upright (+), answers slanting (x), so that both show at one place."""
    arm = _ARM * max(size) * (0.6 if kind == "sampled" else 1.0)
    out = []
    for x, y in points:
        if kind == "gold":
            shape = f"M{x - arm:.1f} {y:.1f}h{2 * arm:.1f}M{x:.1f} {y - arm:.1f}v{2 * arm:.1f}"
        else:
            a = 0.75 * arm
            shape = f"M{x - a:.1f} {y - a:.1f}l{2 * a:.1f} {2 * a:.1f}M{x - a:.1f} {y + a:.1f}l{2 * a:.1f} {-2 * a:.1f}"
        halo = "" if kind == "sampled" else f'<path class="mark halo" d="{shape}"/>'
        out.append(f'{halo}<path class="mark {kind}" d="{shape}"/>')
    return "".join(out)


def label_group(
    boxes: Sequence[tuple[float, ...]], labels: Sequence[str], kind: str, size: Size
) -> str:
    """The boxes' words: those of the truth above the box, those of an answer under it, inside the picture either way."""
    letter, (width, height) = _LETTER * max(size), size
    out = []
    for (x1, y1, x2, y2), label in zip(boxes, labels, strict=True):
        y = min(y1, y2) - 0.3 * letter if kind == "gold" else max(y1, y2) + 0.95 * letter
        y = min(max(y, letter), height - 0.25 * letter)
        x = min(max(0.0, min(x1, x2)), max(0.0, width - 0.64 * letter * min(len(label), 24)))
        out.append(
            f'<text class="word {kind}" x="{x:.1f}" y="{y:.1f}" font-size="{letter:.1f}">{esc(label[:24])}</text>'
        )
    return "".join(out)
