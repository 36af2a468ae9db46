"""Example data of tasks: rows and pictures of text; scenes are drawn by mmrl.tasks.scenes. No system font, no download."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_text", "write_rows"]


def write_rows(folder: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as data.jsonl in `folder`; returns its path. The file appears when it is complete: its existence says so."""
    path = Path(folder) / "data.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name("data.jsonl.partial")
    partial.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    os.replace(partial, path)
    return str(path)


def draw_text(
    path: Path, lines: Sequence[str], size: tuple[int, int] = (224, 112), height: int = 20
) -> None:
    """A PNG with black lines of text on white, in Pillow's own font (no system font is needed)."""
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", size, (255, 255, 255))
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(height)
    for number, line in enumerate(lines):
        draw.text((8, 8 + number * (height + 6)), line, fill=(0, 0, 0), font=font)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)
