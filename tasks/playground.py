"""Generated pictures and questions for a whole family of tasks, so that a mixed run can be tried without any download.

    python -m mmrl.tasks.playground runs/playground --count 200 --seed 0          # one data.jsonl per task

The pictures are those of mmrl.tasks.scenes (coloured shapes on a canvas), the rows mmrl's own JSON Lines: grounding,
detection, counting, classification, choice, boolean, OCR and clicking. Seeded: row i of a set depends on (seed, task,
prefix, i) only.
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import ConfigError, did_you_mean
from mmrl.tasks.examples import write_rows
from mmrl.tasks.scenes import BACKGROUNDS, COLORS, SHAPES, draw_objects

if TYPE_CHECKING:
    from mmrl.tasks.scenes import Picture

__all__ = ["KINDS", "make_playground"]

Kind = tuple[str, str]
_DIGITS = "0123456789"


def _kind(rng: np.random.Generator, without: Sequence[Kind] = ()) -> Kind:
    """A (colour, shape) that is none of `without`."""
    pool = [(c, s) for c in COLORS for s in SHAPES if (c, s) not in without]
    return pool[int(rng.integers(len(pool)))]


def _words(kind: Kind) -> str:
    return " ".join(kind)


def _grounding(
    rng: np.random.Generator, size: int, background: str
) -> tuple[Picture, dict[str, Any]]:
    """One or two objects, one named: its box."""
    first = _kind(rng)
    kinds = [first] if rng.random() < 0.3 else [first, _kind(rng, [first])]
    pixels, boxes = draw_objects(rng, kinds, size, (0.2, 0.44), background)
    return pixels, {"question": _words(first), "answer": boxes[0], "frame": "abs_orig"}


def _detection(
    rng: np.random.Generator, size: int, background: str
) -> tuple[Picture, dict[str, Any]]:
    """One or two objects of the asked kind, sometimes another one: all boxes of that kind, from left to right."""
    kind, count = _kind(rng), 1 + int(rng.random() < 0.6)
    kinds = [kind] * count + [_kind(rng, [kind])] * int(rng.random() < 0.4)
    pixels, boxes = draw_objects(rng, kinds, size, (0.2, 0.36), background)
    found = [{"bbox": box, "label": _words(kind)} for box in sorted(boxes[:count])]
    return pixels, {
        "question": _words(kind),
        "answer": found,
        "frame": "abs_orig",
        "params": {"categories": [_words(kind)]},
    }


def _counting(
    rng: np.random.Generator, size: int, background: str
) -> tuple[Picture, dict[str, Any]]:
    """Up to four objects, the asked shape from zero to four times in any colour: how many."""
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    total = int(rng.integers(1, 5))
    count = int(rng.integers(0, total + 1))
    colors = list(COLORS)
    others = [s for s in SHAPES if s != shape]
    kinds = [
        (
            colors[int(rng.integers(len(colors)))],
            shape if i < count else others[int(rng.integers(len(others)))],
        )
        for i in range(total)
    ]
    pixels, boxes = draw_objects(rng, kinds, size, (0.18, 0.30), background)
    points = [[(b[0] + b[2]) / 2, (b[1] + b[3]) / 2] for b in boxes[:count]]
    return pixels, {
        "question": shape,
        "answer": count,
        "frame": "abs_orig",
        "params": {"points": points},
    }


def _choice(rng: np.random.Generator, size: int, background: str) -> tuple[Picture, dict[str, Any]]:
    """Two objects of different shapes: the colour of one of them, out of three."""
    first = _kind(rng)
    other = _kind(rng, [(c, first[1]) for c in COLORS])
    pixels, _ = draw_objects(rng, [first, other], size, (0.22, 0.44), background)
    wrong = [c for c in COLORS if c != first[0]]
    options = [first[0], *(str(c) for c in rng.choice(wrong, 2, replace=False))]
    order = [int(i) for i in rng.permutation(3)]
    return pixels, {
        "question": f"color of the {first[1]}",
        "answer": "ABC"[order.index(0)],
        "params": {"options": [options[i] for i in order]},
    }


def _classification(
    rng: np.random.Generator, size: int, background: str
) -> tuple[Picture, dict[str, Any]]:
    """One or two objects of different shapes: the colour of one of them, as a word."""
    first = _kind(rng)
    kinds = [first] if rng.random() < 0.3 else [first, _kind(rng, [(c, first[1]) for c in COLORS])]
    pixels, _ = draw_objects(rng, kinds, size, (0.22, 0.44), background)
    return pixels, {
        "question": f"color of the {first[1]}",
        "answer": first[0],
        "params": {"labels": list(COLORS)},
    }


def _boolean(
    rng: np.random.Generator, size: int, background: str
) -> tuple[Picture, dict[str, Any]]:
    """One or two objects: is the asked one there? Half of the time it is."""
    kinds = [_kind(rng)]
    if rng.random() < 0.6:
        kinds.append(_kind(rng, kinds))
    there = bool(rng.random() < 0.5)
    asked = kinds[int(rng.integers(len(kinds)))] if there else _kind(rng, kinds)
    pixels, _ = draw_objects(rng, kinds, size, (0.22, 0.44), background)
    return pixels, {"question": f"is there a {_words(asked)}?", "answer": there}


def _ocr(rng: np.random.Generator, size: int, background: str) -> tuple[Picture, dict[str, Any]]:
    """A large digit: the text."""
    from PIL import Image, ImageDraw, ImageFont

    pixels, _ = draw_objects(rng, [], size, (0.2, 0.4), background)
    picture = Image.fromarray(pixels)
    text = _DIGITS[int(rng.integers(10))]
    color = list(COLORS.values())[int(rng.integers(len(COLORS)))]
    font = ImageFont.load_default(round(size * float(rng.uniform(0.6, 0.9))))
    left, top, right, bottom = font.getbbox(text)
    x = float(rng.uniform(0, max(1.0, size - (right - left)))) - left
    y = float(rng.uniform(0, max(1.0, size - (bottom - top)))) - top
    ImageDraw.Draw(picture).text((x, y), text, font=font, fill=color)
    return np.asarray(picture), {"question": "read", "answer": text}


def _click(rng: np.random.Generator, size: int, background: str) -> tuple[Picture, dict[str, Any]]:
    """Two objects, one named: a point inside it (the box is the truth)."""
    first = _kind(rng)
    pixels, boxes = draw_objects(rng, [first, _kind(rng, [first])], size, (0.22, 0.44), background)
    return pixels, {"question": f"click {_words(first)}", "answer": boxes[0], "frame": "abs_orig"}


KINDS: dict[str, Callable[[np.random.Generator, int, str], tuple[Picture, dict[str, Any]]]] = {
    "grounding": _grounding,
    "detection": _detection,
    "counting": _counting,
    "classification": _classification,
    "choice": _choice,
    "boolean": _boolean,
    "ocr": _ocr,
    "gui_grounding": _click,
}
"""Task name -> drawer of one picture and its question."""


def make_playground(
    out_dir: str | os.PathLike[str],
    task: str,
    count: int,
    seed: int,
    size: int = 112,
    id_prefix: str | None = None,
    background: str = "graded",
) -> str:
    """Write `count` rows of one task to `out_dir`/data.jsonl (pictures in `out_dir`/images); returns that path.

    Sets that differ in seed or id_prefix share no picture by construction of their seeds. data.jsonl is written last.
    Raises ConfigError for an unknown task, background or impossible numbers.
    """
    from PIL import Image

    if task not in KINDS:
        raise ConfigError(
            f"expected one of the tasks {', '.join(KINDS)}, found {task!r}.{did_you_mean(task, KINDS)}"
        )
    if count < 1 or not 56 <= size <= 4096 or background not in BACKGROUNDS:
        raise ConfigError(
            f"expected count >= 1, size in 56..4096 and background in {BACKGROUNDS}, found count={count}, "
            f"size={size} and background={background!r}"
        )
    prefix = f"{task}-{seed}-" if id_prefix is None else id_prefix
    folder = Path(out_dir)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    entries = []
    for index in range(count):
        rng = np.random.default_rng([abs(seed), zlib.crc32(f"{task}/{prefix}".encode()), index])
        pixels, row = KINDS[task](rng, size, background)
        name = f"images/{prefix}{index:06d}.png"
        Image.fromarray(pixels).save(folder / name, compress_level=1, compress_type=3)
        entries.append(
            {"id": f"{prefix}{index:06d}", "task": task, "image": name, "source": task, **row}
        )
    return write_rows(folder, entries)


def main(argv: list[str] | None = None) -> int:
    """Command line: one folder per task below `out`."""
    parser = argparse.ArgumentParser(
        prog="python -m mmrl.tasks.playground", description="Write generated task pictures."
    )
    parser.add_argument("out", help="folder to write; one sub-folder per task")
    parser.add_argument("--count", type=int, default=200, help="rows per task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=112, help="side of the pictures in pixels")
    parser.add_argument("--tasks", default=",".join(KINDS), help="comma-separated")
    parser.add_argument("--background", default="graded", choices=BACKGROUNDS)
    args = parser.parse_args(argv)
    try:
        for task in args.tasks.split(","):
            print(
                make_playground(
                    Path(args.out) / task,
                    task,
                    args.count,
                    args.seed,
                    args.size,
                    background=args.background,
                )
            )
    except ConfigError as err:
        parser.error(str(err))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
