"""Tiny example clips as folders of numbered PNG frames, drawn with Pillow: no encoder is needed.

A coloured square appears, moves in a straight line and disappears; where it is at each time is exact.

    python -c "from mmrl.tasks.frame_clips import draw_square_clip as d; print(d('runs/clip', 'red', (2, 5), 8.0).box(3))"
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["COLORS", "FPS", "SIZE", "SquareClip", "draw_square_clip"]

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 200, 40),
}
SIZE = (112, 84)
"""Width and height of a frame in pixels."""
FPS = 2.0
"""Frames per second: frame i is shown from i / FPS on."""


@dataclass(frozen=True)
class SquareClip:
    """A drawn clip: its folder, the seconds the square is seen, its path across the picture, the clip's duration."""

    folder: str
    span: tuple[float, float]
    path: tuple[tuple[float, float], tuple[float, float]]
    duration: float
    side: int = 24

    def box(self, second: float) -> list[float]:
        """Where the square is at `second` (x1, y1, x2, y2 in pixels), as if it never disappeared."""
        share = min(1.0, max(0.0, second / self.duration))
        x, y = (a + share * (b - a) for a, b in zip(*self.path, strict=True))
        return [
            float(round(x)),
            float(round(y)),
            float(round(x) + self.side),
            float(round(y) + self.side),
        ]

    @property
    def facts(self) -> dict[str, float | int]:
        """width, height and duration, as rows carry them in params."""
        return {"width": SIZE[0], "height": SIZE[1], "duration": self.duration}


def draw_square_clip(
    folder: str | os.PathLike[str],
    color: str,
    span: tuple[float, float],
    duration: float,
    path: tuple[tuple[float, float], tuple[float, float]] = ((4, 8), (80, 52)),
) -> SquareClip:
    """Write duration * FPS frames 00000001.png ... into `folder`; the square is drawn where start <= time < end."""
    from PIL import Image, ImageDraw

    clip = SquareClip(os.fspath(folder), span, path, duration)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number in range(round(duration * FPS)):
        picture = Image.new("RGB", SIZE, (236, 236, 236))
        second = number / FPS
        if span[0] <= second < span[1]:
            x1, y1, x2, y2 = clip.box(second)
            ImageDraw.Draw(picture).rectangle((x1, y1, x2 - 1, y2 - 1), fill=COLORS[color])
        picture.save(Path(folder) / f"{number + 1:08d}.png")
    return clip
