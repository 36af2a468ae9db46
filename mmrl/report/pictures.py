"""Pictures for the page: shrunk, encoded into the file itself, with boxes drawn over them in original pixels."""
from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.errors import MediaError
from mmrl.media import open_image
from mmrl.report.rows import boxes_of
from mmrl.report.text import esc

__all__ = ["Pictures", "box_group"]

LONG_SIDE = 480  # pixels: twice the width at which a card shows it


class Pictures:
    """Opens, shrinks and encodes each picture once. Relative paths are looked for in the run's folder, then here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[str, tuple[str, tuple[int, int], str]] = {}

    def get(self, path: str) -> tuple[str, tuple[int, int], str]:
        """(data address, original (width, height), '') or ('', (4, 3), reason) when it cannot be shown."""
        if path not in self._seen:
            self._seen[path] = self._load(path)
        return self._seen[path]

    def _load(self, path: str) -> tuple[str, tuple[int, int], str]:
        inside = self.folder / path
        try:
            picture = open_image(inside if inside.is_file() else path)
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

    def drawing(self, row: Mapping[str, Any], below: str, above: str = "") -> str:
        """The row's first picture with its gold boxes; `below` and `above` are SVG in original pixels around them."""
        images = row.get("images")
        if not isinstance(images, Sequence) or isinstance(images, str) or not images:
            return '<div class="frame none"><span>no picture</span></div>'
        address, (width, height), reason = self.get(str(images[0]))
        if reason:
            return f'<div class="frame none"><span>{esc(reason)}</span></div>'
        more = f'<span class="more">1 of {len(images)} pictures</span>' if len(images) > 1 else ""
        label = esc(f"picture of {row.get('id', '')}")
        return (f'<div class="frame"><svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
                f'<image href="{address}" width="{width}" height="{height}"/>'
                f'{below}{box_group(boxes_of(row, "gold_boxes"), "gold")}{above}</svg>{more}</div>')


def box_group(boxes: Sequence[tuple[float, float, float, float]], kind: str) -> str:
    """SVG rectangles of class `kind` (gold, greedy, sampled), each over a dark halo so that it shows on any picture."""
    out = []
    for x1, y1, x2, y2 in boxes:
        left, top, width, height = min(x1, x2), min(y1, y2), abs(x2 - x1), abs(y2 - y1)
        shape = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}"'
        halo = "" if kind == "sampled" else f'<rect class="halo {kind}-halo" {shape}/>'
        out.append(f'{halo}<rect class="{kind}" {shape}/>')
    return "".join(out)
