"""What generated clips are made of: their settings, shapes with a place in every frame, paths, and a sheet for people.

python -c "from mmrl.tasks.clip_parts import line; print(line((0, 10), (70, 10), 8))"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import ConfigError, did_you_mean
from mmrl.tasks.scenes import BACKGROUNDS, COLORS, shape_mask

if TYPE_CHECKING:
    import numpy.typing as npt

    Frames = npt.NDArray[np.uint8]  # (T, H, W, 3)

__all__ = [
    "DEFAULT_KINDS",
    "KINDS",
    "TWINS",
    "Actor",
    "Box",
    "ClipSettings",
    "Spot",
    "apart",
    "draw_actors",
    "draw_sheet",
    "fold",
    "line",
    "seconds_text",
    "squares",
]

# T frames, H height, W width

Box = tuple[int, int, int, int]
Spot = tuple[float, float]

KINDS: dict[str, tuple[str, ...]] = {
    "order": ("move", "cycle", "turn", "grow"),
    "direction": ("horizontal", "vertical", "orbit", "horizontal_inside", "vertical_inside"),
    "appear": ("span",),
    "repeat": ("spans",),
    "track": ("inside", "bounce", "leave"),
    "collide": ("walls", "touch"),
    "st": ("move",),
    "gqa": ("color",),
    "ocr": ("digits",),
}
"""Task of this module -> kinds of clips it can draw; see DEFAULT_KINDS for those it draws unless told."""
DEFAULT_KINDS: dict[str, tuple[str, ...]] = {
    **KINDS,
    "order": ("move", "cycle"),
    "direction": ("horizontal", "vertical"),
    "track": ("inside",),
    "collide": ("walls",),
}
TWINS = ("order", "direction", "ocr")
"""Tasks whose rows come in pairs, one clip being the other played backwards."""


@dataclass(frozen=True)
class ClipSettings:
    """What a set of clips looks like; make_clips documents the fields. Raises ConfigError for impossible ones."""

    task: str
    size: int = 112
    fps: float = 4
    seconds: float = 2.0
    kinds: tuple[str, ...] = ()
    grid: float | None = None
    distractors: int | None = None
    first_box: bool = False
    background: str = "graded"
    noise: int = 4

    def __post_init__(self) -> None:
        if self.task not in KINDS:
            raise ConfigError(
                f"expected one of the tasks {', '.join(KINDS)}, found {self.task!r}."
                f"{did_you_mean(self.task, KINDS)}"
            )
        known = KINDS[self.task]
        for kind in self.kinds:
            if kind not in known:
                raise ConfigError(
                    f"expected kinds of {self.task} among {', '.join(known)}, found {kind!r}."
                    f"{did_you_mean(kind, known)}"
                )
        if (
            not 48 <= self.size <= 2048
            or self.size % 2
            or not 0 <= self.noise <= 30
            or self.background not in BACKGROUNDS
        ):
            raise ConfigError(
                f"expected an even size in 48..2048, noise in 0..30 and background in {BACKGROUNDS}, found "
                f"{self.size}, {self.noise} and {self.background!r}"
            )
        if self.distractors is not None and (
            type(self.distractors) is not int or not 0 <= self.distractors <= 3
        ):
            raise ConfigError(
                f"expected 0 to 3 distractors, found {self.distractors!r}; None draws them per clip"
            )
        if self.first_box and self.task != "track":
            raise ConfigError(
                f"expected first_box with task track only, found it with {self.task}; leave it out"
            )
        if not 0 < self.fps <= 120 or not 0 < self.seconds <= 3600:
            raise ConfigError(
                f"expected fps in 0..120 and seconds in 0..3600, found {self.fps!r} and {self.seconds!r}"
            )
        frames, step = self.seconds * self.fps, self.step_s * self.fps
        if (
            abs(frames - round(frames)) > 1e-6
            or abs(step - round(step)) > 1e-6
            or round(step) < 1
            or round(frames) % round(step)
        ):
            raise ConfigError(
                f"expected a clip of whole frames and whole steps of its time grid, found {self.seconds:g} s at "
                f"{self.fps:g} fps with a grid of {self.step_s:g} s; for example 2 s, 4 fps, 0.5 s"
            )
        if self.slots < 4:
            raise ConfigError(
                f"expected at least 4 steps of the time grid, found {self.slots} ({self.seconds:g} s / "
                f"{self.step_s:g} s); make the clip longer or the grid finer"
            )

    @property
    def step_s(self) -> float:
        """Seconds of one step of the time grid: every event happens on it. Default two frames."""
        return 2 / self.fps if self.grid is None else self.grid

    @property
    def frames(self) -> int:
        """Frames of a clip."""
        return round(self.seconds * self.fps)

    @property
    def slot(self) -> int:
        """Frames of one step."""
        return round(self.step_s * self.fps)

    @property
    def slots(self) -> int:
        """Steps of a clip."""
        return self.frames // self.slot


@dataclass(frozen=True)
class Actor:
    """One shape in a clip: its drawn square (x1, y1, x2, y2) per frame, which may stick out of the picture; None = absent."""

    color: str
    shape: str
    squares: tuple[Box | None, ...]

    @property
    def words(self) -> str:
        """'red circle', what a question calls it."""
        return f"{self.color} {self.shape}"

    def reversed(self) -> Actor:
        """The same shape in the clip played backwards."""
        return replace(self, squares=self.squares[::-1])

    def box(self, number: int, size: int) -> list[float] | None:
        """Tight box [x1, y1, x2, y2] of the pixels drawn in frame `number`, clipped to the picture; None when there are none."""
        square = self.squares[number]
        if square is None:
            return None
        x1, y1, x2, _ = square
        left, top = max(0, -x1), max(0, -y1)
        part = shape_mask(self.shape, x2 - x1)[top : max(0, size - y1), left : max(0, size - x1)]
        rows, columns = np.flatnonzero(part.any(1)), np.flatnonzero(part.any(0))
        if not len(rows):
            return None
        x, y = x1 + left, y1 + top
        return [
            float(x + columns[0]),
            float(y + rows[0]),
            float(x + columns[-1] + 1),
            float(y + rows[-1] + 1),
        ]


def draw_actors(canvas: npt.NDArray[np.uint8], actors: Sequence[Actor], count: int) -> Frames:
    """`count` frames of the actors on one canvas (H, W, 3); later actors lie on top of earlier ones."""
    frames = np.repeat(canvas[None], count, 0)
    size = canvas.shape[0]
    for actor in actors:
        for number, square in enumerate(actor.squares):
            if square is None:
                continue
            x1, y1, x2, _ = square
            left, top = max(0, -x1), max(0, -y1)
            part = shape_mask(actor.shape, x2 - x1)[
                top : max(0, size - y1), left : max(0, size - x1)
            ]
            patch = frames[
                number, y1 + top : y1 + top + part.shape[0], x1 + left : x1 + left + part.shape[1]
            ]
            patch[part] = COLORS[actor.color]
    return frames


def apart(rng: np.random.Generator, size: int, sides: Sequence[int]) -> list[Box]:
    """Squares with these sides at random places that do not overlap. The sides must leave room (a third of the width each)."""
    while True:
        boxes: list[Box] = []
        for side in sides:
            x, y = (int(v) for v in rng.integers(0, size - side + 1, 2))
            if all(x + side < b[0] or b[2] < x or y + side < b[1] or b[3] < y for b in boxes):
                boxes.append((x, y, x + side, y + side))
        if len(boxes) == len(sides):
            return boxes


def line(start: Spot, end: Spot, count: int) -> list[Spot]:
    """`count` places at constant speed from start to end, both included."""
    if count == 1:
        return [start]
    return [
        (
            start[0] + (end[0] - start[0]) * k / (count - 1),
            start[1] + (end[1] - start[1]) * k / (count - 1),
        )
        for k in range(count)
    ]


def fold(value: float, room: float) -> float:
    """A place on [0, room] of something that moves straight on and bounces off both ends."""
    value %= 2 * room
    return 2 * room - value if value > room else value


def squares(path: Sequence[Spot | None], side: int) -> tuple[Box | None, ...]:
    """Squares of one side with their top left corners on the path, rounded to pixels."""
    corners = [None if p is None else (round(p[0]), round(p[1])) for p in path]
    return tuple(None if c is None else (c[0], c[1], c[0] + side, c[1] + side) for c in corners)


def seconds_text(value: float) -> str:
    """'0', '0.5', '1.25': the key of a box in an answer."""
    return f"{value:.6g}"


def draw_sheet(
    path: str,
    clips: Sequence[tuple[Frames, Mapping[str, Any]]],
    spans_of: Callable[[Mapping[str, Any]], Any],
    boxes_of: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    scale: int = 1,
) -> None:
    """A PNG with one filmstrip per clip: question and truth above, true boxes in white, true spans as a green bar below."""
    from PIL import Image, ImageDraw, ImageFont

    if not clips:
        raise ValueError("expected at least one clip, found none")
    count, side = len(clips[0][0]), clips[0][0].shape[1] * scale
    high, gap = side + 34, 4
    sheet = Image.new("RGB", (count * (side + gap) + gap, len(clips) * high + gap), (24, 24, 24))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for number, (frames, row) in enumerate(clips):
        top = number * high + 22
        options = ", ".join(
            f"{a}. {o}" for a, o in zip("ABCDEF", row["params"].get("options", []), strict=False)
        )
        title = f"{row['id']} [{row['params']['kind']}]  {row['question']}  {options}  ->  {row['answer']}"
        draw.text((gap, top - 19), title[: count * side // 7], font=font, fill=(235, 235, 235))
        fps, boxes = row["params"]["fps"], boxes_of(row)
        for k, picture in enumerate(frames):
            left = gap + k * (side + gap)
            sheet.paste(
                Image.fromarray(picture).resize((side, side), Image.Resampling.NEAREST), (left, top)
            )
            box = boxes.get(seconds_text(k / fps))
            if box is not None:
                x1, y1, x2, y2 = (v * scale for v in box)
                draw.rectangle(
                    (left + x1, top + y1, left + x2 - 1, top + y2 - 1),
                    outline=(255, 255, 255),
                    width=2,
                )
            if any(start <= k / fps < end for start, end in spans_of(row)):
                draw.rectangle(
                    (left, top + side + 2, left + side + gap - 1, top + side + 7),
                    fill=(60, 220, 90),
                )
    sheet.save(path)
