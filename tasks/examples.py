"""What example data of tasks are made of: rows, scenes and pictures of text. No system font, no download."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_text", "example_scenes", "write_rows"]


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


def example_scenes(
    folder: str, count: int, difficulty: int = 0, seed: int = 7
) -> list[dict[str, Any]]:
    """Draw `count` scenes (mmrl.tasks.scenes) and return {"id", "image", "params": {"objects": ...}} of each."""
    from mmrl.tasks.scenes import make_scenes

    lines = (
        Path(make_scenes(folder, count=count, seed=seed, difficulty=difficulty))
        .read_text()
        .splitlines()
    )
    return [{key: row[key] for key in ("id", "image", "params")} for row in map(json.loads, lines)]


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
