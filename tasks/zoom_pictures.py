"""Large pictures with marks too fine for a look at the whole: generated questions for the task `zoom`.

    python -m mmrl.tasks.zoom_pictures runs/zoom/train --count 2000 --seed 1         # pictures of 448 pixels
    python -m mmrl.tasks.zoom_pictures runs/zoom/val --count 200 --seed 2
    python -m mmrl.tasks.zoom_pictures runs/large --size 3584 --marks digits         # for released models
    python -m mmrl.tasks.zoom_pictures runs/crowd --kind crowd                       # counting; pictures of 896 pixels
    python -m mmrl.tasks.zoom_pictures runs/text --kind text                         # a word in small print, for the tool read

Signs with coloured frames stand on a graded ground; one colour is asked for. Inside a frame are stripes of two colours that average
to the same grey whichever they are: shown at 112 pixels, where each pixel is the mean of 4 x 4 of 448, it is the same picture
for all answers, bit by bit, so that nothing but looking closer tells them apart. `digits` are small print instead.

The kind `crowd` asks how many small signs of one name are in the frame of one colour, among 320 in 16 crowds, some of which have a
frame. Each crowd has 20 signs, whatever the answer, and all signs are the same grey square at 112 pixels, bit by bit again.
The kind `text` writes words on the signs, in print that a look at the whole blurs; no more is promised of it.

Row i depends on (seed, i) and the settings alone; different seeds share no picture.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import ConfigError, did_you_mean
from mmrl.tasks.examples import write_rows

__all__ = [
    "KINDS",
    "MARKS",
    "SIGNS",
    "STRIPES",
    "WORDS",
    "draw_crowd",
    "draw_signs",
    "make_zoom_pictures",
]

SIGNS = {
    "red": (216, 40, 40),
    "green": (30, 150, 40),
    "blue": (40, 60, 220),
    "yellow": (235, 215, 30),
}
"""Colours of frames."""
STRIPES = {
    "cyan": (64, 232, 232),
    "purple": (232, 64, 232),
    "orange": (232, 148, 64),
    "white": (226, 226, 226),
}
"""Name of the stripes -> their first colour; the second one is what makes both average to `_GREY`."""
WORDS = (
    *("apple", "bread", "chair", "cloud", "grape", "house", "lemon", "music"),
    *("ocean", "paper", "queen", "river", "stone", "sugar", "tiger", "train"),
)
"""What signs of the kind `text` say."""
MARKS = ("stripes", "digits")
KINDS = {"signs": 448, "crowd": 896, "text": 896}
"""Kind of pictures -> side in pixels unless another is asked for."""
_GREY = 148
_UNIT = 448  # lengths below are those of a picture of this size
_SIGN, _FRAME, _STEP = 72, 12, 4  # side of a sign, width of its frame, the grid that it stands on
_CELLS, _PLACES, _CROWD, _SMALL = (
    4,
    6,
    20,
    8,
)  # crowds and places in one, each along a side; signs in one, side of such a sign


def draw_signs(
    rng: np.random.Generator, signs: Sequence[tuple[str, str]], size: int = _UNIT, cells: int = 4
) -> tuple[np.ndarray, list[list[int]]]:
    """A picture, uint8 (size, size, 3), of signs (frame, mark) in different cells of a grid, and their boxes [x1, y1, x2, y2].
    Marks are names of STRIPES, digits or words."""
    scale = size // _UNIT
    picture = _ground(size)
    cell, side = size // cells, _SIGN * scale
    boxes = []
    for place, (frame, mark) in zip(rng.permutation(cells * cells), signs, strict=False):
        room = (cell - side) // (_STEP * scale) + 1
        dx, dy = (int(rng.integers(room)) * _STEP * scale for _ in range(2))
        x, y = int(place % cells) * cell + dx, int(place // cells) * cell + dy
        picture[y : y + side, x : x + side] = SIGNS[frame]
        a = _FRAME * scale
        inside = picture[y + a : y + side - a, x + a : x + side - a]
        inside[:] = (
            _stripes(mark, side - 2 * a, scale) if mark in STRIPES else _print(mark, side - 2 * a)
        )
        boxes.append([x, y, x + side, y + side])
    return picture, boxes


def draw_crowd(
    rng: np.random.Generator,
    frames: Sequence[str],
    crowds: Sequence[Sequence[str]],
    size: int = KINDS["crowd"],
) -> tuple[np.ndarray, list[list[int]]]:
    """A picture, uint8 (size, size, 3), of 16 crowds of 20 small signs each, names of STRIPES; the first ones have the `frames`,
    whose boxes [x1, y1, x2, y2] are returned. What `rng` draws does not depend on the names."""
    scale = size // _UNIT
    picture, boxes = _ground(size), []
    cell, small, step = size // _CELLS, _SMALL * scale, _STEP * scale
    for number, (place, crowd) in enumerate(
        zip(rng.permutation(_CELLS * _CELLS), crowds, strict=True)
    ):
        x, y = int(place % _CELLS) * cell, int(place // _CELLS) * cell
        if number < len(frames):
            box = [x + step, y + step, x + cell - step, y + cell - step]
            ground = picture[y + 2 * step : y + cell - 2 * step, x + 2 * step : x + cell - 2 * step]
            kept = ground.copy()
            picture[box[1] : box[3], box[0] : box[2]] = SIGNS[frames[number]]
            ground[:] = kept
            boxes.append(box)
        places = rng.permutation(_PLACES * _PLACES)[:_CROWD]
        moved = rng.integers(2, size=(_CROWD, 2))
        for mark, at, (dx, dy) in zip(crowd, places, moved, strict=True):
            left = x + (2 + 4 * int(at % _PLACES) + int(dx)) * step
            top = y + (2 + 4 * int(at // _PLACES) + int(dy)) * step
            picture[top : top + small, left : left + small] = _stripes(mark, small, scale)
    return picture, boxes


def _ground(size: int) -> np.ndarray:
    step = _STEP * (size // _UNIT)
    ramp = np.linspace(70, 210, size // step).repeat(step)
    picture = np.empty((size, size, 3), np.uint8)
    picture[:, :, 0], picture[:, :, 1], picture[:, :, 2] = ramp[None, :], 120, ramp[:, None]
    return picture


def _stripes(mark: str, side: int, scale: int) -> np.ndarray:
    first = np.array(STRIPES[mark])
    # two pixels: the same in each patch of a model, so that a small one can learn to read them
    columns = np.arange(side) % (2 * scale) < scale
    return np.where(columns[None, :, None], first, 2 * _GREY - first).astype(np.uint8)


def _print(mark: str, side: int) -> np.ndarray:
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (side, side), (_GREY,) * 3)
    height = side // (3 if len(mark) == 1 else 5)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(height)
    draw.text((side // 2, side // 2), mark, fill=(0, 0, 0), font=font, anchor="mm")
    return np.asarray(picture)


def make_zoom_pictures(
    out_dir: str | os.PathLike[str],
    count: int,
    seed: int,
    *,
    size: int | None = None,
    cells: int = 4,
    signs: int = 2,
    marks: str = "stripes",
    kind: str = "signs",
) -> str:
    """Write `count` rows to `out_dir`/data.jsonl (pictures in `out_dir`/images); returns that path. data.jsonl is written last.
    `size`: pixels of a side, None for what KINDS says; `signs`: how many there are, of the kind `crowd` how many frames.
    Raises ConfigError for impossible numbers."""
    from PIL import Image

    if kind not in KINDS:
        raise ConfigError(
            f"expected a kind of {', '.join(KINDS)}, found {kind!r}.{did_you_mean(kind, KINDS)}"
        )
    size = KINDS[kind] if size is None else size
    if kind != "signs" and (marks != "stripes" or (kind == "crowd" and cells != _CELLS)):
        raise ConfigError(
            f"expected marks for the kind signs alone, and {_CELLS} cells of the kind crowd, found kind={kind!r}, marks={marks!r}, "
            f"cells={cells}"
        )
    if kind == "text" and size < KINDS["text"]:
        raise ConfigError(
            f"expected a size of at least {KINDS['text']} for print that can be read, found {size}"
        )
    if (
        count < 1
        or size < _UNIT
        or size % _UNIT
        or size > 16 * _UNIT
        or cells not in (1, 2, 4)
        or not 1 <= signs <= min(len(SIGNS), cells * cells)
        or marks not in MARKS
    ):
        raise ConfigError(
            f"expected count >= 1, a size of {_UNIT} times 1 to 16, 1, 2 or 4 cells a side, 1 to {len(SIGNS)} signs that fit into "
            f"them and marks of {', '.join(MARKS)}, found count={count}, size={size}, cells={cells}, signs={signs}, marks={marks!r}"
        )
    folder = Path(out_dir)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    options = _options(kind, marks)
    rows: list[dict[str, Any]] = []
    for index in range(count):
        rng = np.random.default_rng([abs(seed), index] + [1] * (seed < 0))
        frames = [str(v) for v in rng.permutation(list(SIGNS))[:signs]]
        if kind == "crowd":
            question, answer, crowds = _counted(rng, frames)
            pixels, boxes = draw_crowd(rng, frames, crowds, size)
        else:
            shown = [(frame, str(rng.choice(options))) for frame in frames]
            pixels, boxes = draw_signs(rng, shown, size, cells)
            question, answer = f"{frames[0]} sign", shown[0][1]
        name = f"images/{seed}-{index:06d}.png"
        Image.fromarray(pixels).save(folder / name, compress_level=1)
        rows.append(
            {
                "id": f"{'zoom' if kind == 'signs' else kind}-{seed}-{index:06d}",
                "image": name,
                "question": question,
                "answer": answer,
                "options": options,
                "region": boxes[0],
            }
        )
    return write_rows(folder, rows)


def _options(kind: str, marks: str) -> list[str]:
    if kind == "text":
        return list(WORDS)
    return list(STRIPES) if kind == "signs" and marks == "stripes" else list("0123456789")


def _counted(rng: np.random.Generator, frames: Sequence[str]) -> tuple[str, str, list[list[str]]]:
    """A question about the first frame, its answer, and the names of the signs of all crowds."""
    asked, number = str(rng.choice(list(STRIPES))), int(rng.integers(10))
    others = [name for name in STRIPES if name != asked]
    first = [asked] * number + [str(v) for v in rng.choice(others, _CROWD - number)]
    crowds = [[str(v) for v in rng.permutation(first)]]
    crowds += rng.choice(list(STRIPES), (_CELLS * _CELLS - 1, _CROWD)).tolist()
    return f"number of {asked} signs in the {frames[0]} frame", str(number), crowds


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mmrl.tasks.zoom_pictures",
        description="Write pictures with marks that a look at the whole does not show.",
    )
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, default="signs")
    parser.add_argument("--size", type=int, help=f"side in pixels, times {_UNIT}")
    parser.add_argument("--cells", type=int, default=4, help="places of signs along a side")
    parser.add_argument("--signs", type=int, default=2, help="signs, of the kind crowd frames")
    parser.add_argument("--marks", choices=MARKS, default="stripes")
    args = parser.parse_args(argv)
    try:
        print(
            make_zoom_pictures(
                args.out,
                args.count,
                args.seed,
                size=args.size,
                cells=args.cells,
                signs=args.signs,
                marks=args.marks,
                kind=args.kind,
            )
        )
    except ConfigError as err:
        parser.error(str(err))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
