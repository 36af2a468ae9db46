"""Generated grounding scenes: coloured shapes, one phrase, exactly one right box. Seeded, fast, no download.

The same parameters give byte-identical files, so a scene set can be rebuilt anywhere instead of being shipped.

    python -m mmrl.tasks.scenes runs/scenes --count 500 --seed 0 --difficulty 1
    python -m mmrl.tasks.scenes runs/mixed --count 500 --seed 1 --mix 0:0.5,1:0.3,3:0.2

Difficulty 0: one object. 1: two objects that differ. 2: three or four objects among grey strokes.
3: a relation, "the red circle left of the blue square", where a second red circle makes the relation necessary.
"""

from __future__ import annotations

import argparse
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import ConfigError, did_you_mean
from mmrl.tasks.examples import write_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    Picture = npt.NDArray[np.uint8]
    Mask = npt.NDArray[np.bool_]

__all__ = [
    "BACKGROUNDS",
    "COLORS",
    "DIFFICULTIES",
    "RELATIONS",
    "SHAPES",
    "Scene",
    "SceneObject",
    "draw_objects",
    "draw_scene",
    "example_scenes",
    "make_scenes",
]

SHAPES = ("circle", "square", "triangle")
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (225, 35, 35),
    "green": (30, 165, 50),
    "blue": (40, 70, 225),
    "yellow": (240, 215, 30),
    "purple": (150, 40, 185),
    "cyan": (40, 200, 215),
}
RELATIONS = ("left of", "right of", "above", "below")
DIFFICULTIES = (0, 1, 2, 3)
BACKGROUNDS = ("grey", "graded")
# side of an object as a share of the picture's side, per difficulty
_SIDES = {0: (0.20, 0.60), 1: (0.20, 0.44), 2: (0.16, 0.32), 3: (0.15, 0.26)}


@dataclass(frozen=True)
class SceneObject:
    """One drawn object; `box` is (x1, y1, x2, y2) in pixels, x2 and y2 exclusive, tight around the drawn pixels."""

    shape: str
    color: str
    box: tuple[int, int, int, int]

    @property
    def kind(self) -> tuple[str, str]:
        """(color, shape), what a phrase names."""
        return self.color, self.shape


@dataclass(frozen=True)
class Scene:
    """A picture (H, W, 3 uint8), its objects, the phrase and the index of the only object the phrase names."""

    pixels: Picture
    objects: tuple[SceneObject, ...]
    target: int
    phrase: str


def shape_mask(shape: str, side: int) -> Mask:
    """Boolean (side, side) mask that touches all four edges of its square, so the box is tight by construction."""
    centres = np.arange(side) + 0.5
    if shape == "circle":
        offset = (centres - side / 2) ** 2
        return np.asarray(offset[:, None] + offset[None, :] <= (side / 2) ** 2)
    if shape == "square":
        return np.ones((side, side), dtype=bool)
    # the tip is one or two pixels wide, the last row is full
    half_width = np.maximum(centres / 2, 0.75)
    half_width[-1] = side / 2
    return np.asarray(np.abs(centres[None, :] - side / 2) <= half_width[:, None])


def _apart(a: tuple[int, int, int, int], b: tuple[int, int, int, int], gap: int = 1) -> bool:
    return a[2] + gap <= b[0] or b[2] + gap <= a[0] or a[3] + gap <= b[1] or b[3] + gap <= a[1]


def _place(
    rng: np.random.Generator, size: int, count: int, sides: tuple[float, float]
) -> list[tuple[int, int, int, int]] | None:
    """`count` square boxes that do not overlap, or None when the dice left no room."""
    low, high = (max(3, round(share * size)) for share in sides)
    boxes: list[tuple[int, int, int, int]] = []
    for _ in range(count):
        for _ in range(20):
            side = int(rng.integers(low, high + 1))
            x, y = (int(v) for v in rng.integers(0, size - side + 1, 2))
            box = (x, y, x + side, y + side)
            if all(_apart(box, other) for other in boxes):
                boxes.append(box)
                break
        else:
            return None
    return boxes


def _is_clear(
    relation: str, box: tuple[int, int, int, int], anchor: tuple[int, int, int, int]
) -> bool | None:
    """True when `box` lies wholly on that side of the anchor, False when its centre lies clearly beyond the anchor's
    centre on the opposite side, None when a person might hesitate."""
    axis = 0 if relation in ("left of", "right of") else 1
    if relation in ("left of", "above"):
        low, high, anchor_low = box[axis], box[axis + 2], anchor[axis]
        anchor_mid = (anchor[axis] + anchor[axis + 2]) / 2
        return True if high <= anchor_low else (False if low >= anchor_mid else None)
    low, high, anchor_high = box[axis], box[axis + 2], anchor[axis + 2]
    anchor_mid = (anchor[axis] + anchor[axis + 2]) / 2
    return True if low >= anchor_high else (False if high <= anchor_mid else None)


def _other_kinds(
    rng: np.random.Generator, kind: tuple[str, str], count: int
) -> list[tuple[str, str]]:
    """Kinds that are not `kind`; half of the time one shares its colour or shape, so that both words matter."""
    kinds = [(c, s) for c in COLORS for s in SHAPES if (c, s) != kind]
    near = [k for k in kinds if k[0] == kind[0] or k[1] == kind[1]]
    pick: list[tuple[str, str]] = []
    for _ in range(count):
        pool = near if rng.random() < 0.5 else kinds
        pick.append(pool[int(rng.integers(len(pool)))])
    return pick


def _random_kind(rng: np.random.Generator) -> tuple[str, str]:
    return tuple(COLORS)[int(rng.integers(len(COLORS)))], SHAPES[int(rng.integers(len(SHAPES)))]


def _compose_named(
    rng: np.random.Generator, size: int, difficulty: int
) -> tuple[list[SceneObject], str]:
    """Objects with the target first, and its phrase 'red circle': no other object has its colour and shape."""
    count = {0: 1, 1: 2, 2: int(rng.integers(3, 5))}[difficulty]
    kind = _random_kind(rng)
    kinds = [kind, *_other_kinds(rng, kind, count - 1)]
    while (boxes := _place(rng, size, count, _SIDES[difficulty])) is None:
        continue
    return [
        SceneObject(s, c, b) for (c, s), b in zip(kinds, boxes, strict=True)
    ], f"{kind[0]} {kind[1]}"


def _compose_relation(rng: np.random.Generator, size: int) -> tuple[list[SceneObject], str]:
    """Target first, anchor second, then a twin of the target on the other side of the anchor (and perhaps more)."""
    kind = _random_kind(rng)
    anchor_kind = _other_kinds(rng, kind, 1)[0]
    relation = RELATIONS[int(rng.integers(len(RELATIONS)))]
    twins = 1 + int(rng.random() < 0.3)
    extra = [k for k in _other_kinds(rng, kind, 1) if k != anchor_kind and rng.random() < 0.4]
    kinds = [kind, anchor_kind, *[kind] * twins, *extra]
    while True:
        boxes = _place(rng, size, len(kinds), _SIDES[3])
        if boxes is None or _is_clear(relation, boxes[0], boxes[1]) is not True:
            continue
        if all(_is_clear(relation, b, boxes[1]) is False for b in boxes[2 : 2 + twins]):
            break
    phrase = f"the {kind[0]} {kind[1]} {relation} the {anchor_kind[0]} {anchor_kind[1]}"
    return [SceneObject(s, c, b) for (c, s), b in zip(kinds, boxes, strict=True)], phrase


def _background(rng: np.random.Generator, size: int, noise: int, strokes: int) -> Picture:
    """Grey gradient with noise and, as clutter, `strokes` short grey lines. Never as saturated as an object."""
    start, slope_x, slope_y = rng.uniform(100, 180), rng.uniform(-40, 40), rng.uniform(-40, 40)
    ramp = np.linspace(-0.5, 0.5, size)
    grey = start + slope_x * ramp[None, :] + slope_y * ramp[:, None]
    for _ in range(strokes):
        x, y = rng.uniform(0, size, 2)
        angle, length = rng.uniform(0, np.pi), rng.uniform(0.04, 0.12) * size
        t = np.linspace(0, length, max(2, int(2 * length)))
        columns = np.clip(x + t * np.cos(angle), 0, size - 1).astype(int)
        rows = np.clip(y + t * np.sin(angle), 0, size - 1).astype(int)
        grey[rows, columns] = rng.uniform(50, 110)
    speckle = rng.integers(0, 2 * noise + 1, (size, size, 3), dtype=np.uint8)
    # 20..250 by the ranges above: nothing wraps around
    return (grey - noise).astype(np.uint8)[:, :, None] + speckle


def _graded(rng: np.random.Generator, size: int, noise: int) -> Picture:
    """A canvas whose red grows to the right and blue downwards, with noise: every patch shows where it is.

    Qwen2-VL's vision tower has rotary (relative) positions only; a tiny model learns boxes about twice as fast here.
    """
    ramp = np.linspace(100, 190, size)
    canvas = np.empty((size, size, 3))
    canvas[:, :, 0], canvas[:, :, 1], canvas[:, :, 2] = ramp[None, :], 140, ramp[:, None]
    speckle = rng.integers(0, 2 * noise + 1, (size, size, 3), dtype=np.uint8)
    return (canvas - noise).astype(np.uint8) + speckle


def draw_scene(
    rng: np.random.Generator,
    size: int = 112,
    difficulty: int = 0,
    noise: int = 8,
    background: str = "grey",
) -> Scene:
    """One scene of `size` x `size` pixels. The order of objects is shuffled, so position in the list tells nothing."""
    objects, phrase = (
        _compose_relation(rng, size) if difficulty == 3 else _compose_named(rng, size, difficulty)
    )
    strokes = int(rng.integers(6, 14)) if difficulty == 2 else 0
    pixels = (
        _graded(rng, size, noise)
        if background == "graded"
        else _background(rng, size, noise, strokes)
    )
    for thing in objects:
        x1, y1, x2, y2 = thing.box
        pixels[y1:y2, x1:x2][shape_mask(thing.shape, x2 - x1)] = COLORS[thing.color]
    order = [int(i) for i in rng.permutation(len(objects))]
    return Scene(pixels, tuple(objects[i] for i in order), order.index(0), phrase)


def draw_objects(
    rng: np.random.Generator,
    kinds: Sequence[tuple[str, str]],
    size: int,
    sides: tuple[float, float],
    background: str = "grey",
    noise: int = 8,
) -> tuple[Picture, list[list[int]]]:
    """A canvas with one object per (colour, shape) of `kinds`, none overlapping, sides as shares of the picture's.

    Returns the pixels (H, W, 3 uint8) and the boxes [x1, y1, x2, y2] in the order of `kinds`.
    """
    pixels = (
        _graded(rng, size, noise) if background == "graded" else _background(rng, size, noise, 0)
    )
    while (boxes := _place(rng, size, len(kinds), sides)) is None:
        continue
    for (color, shape), (x1, y1, x2, y2) in zip(kinds, boxes, strict=True):
        pixels[y1:y2, x1:x2][shape_mask(shape, x2 - x1)] = COLORS[color]
    return pixels, [list(box) for box in boxes]


def _difficulty_mix(difficulty: int | Mapping[int, float]) -> tuple[list[int], list[float]]:
    mix = {difficulty: 1.0} if isinstance(difficulty, int) else dict(difficulty)
    unknown = [d for d in mix if d not in DIFFICULTIES]
    if unknown or not mix or min(mix.values()) < 0 or sum(mix.values()) <= 0:
        raise ConfigError(
            f"expected difficulty in {DIFFICULTIES}, or a mapping of them to weights >= 0, found "
            f"{difficulty!r}; for example difficulty=1 or difficulty={{0: 0.5, 1: 0.5}}"
        )
    total = sum(mix.values())
    return sorted(mix), [mix[d] / total for d in sorted(mix)]


def make_scenes(
    out_dir: str | os.PathLike[str],
    count: int,
    seed: int,
    size: int = 112,
    difficulty: int | Mapping[int, float] = 0,
    id_prefix: str | None = None,
    noise: int = 8,
    background: str = "grey",
) -> str:
    """Write `count` scenes to `out_dir`/images/*.png and return the path of `out_dir`/data.jsonl.

    `difficulty` is 0..3 or a mapping {difficulty: weight} that mixes several in one set. `id_prefix` (default
    'scene-<seed>-') starts every id and seeds the pictures together with `seed`: sets that differ in either share none.
    Scene i depends on (seed, id_prefix, i) only, so a longer set begins with the shorter one. data.jsonl is written
    last: its existence means that the set is complete. Raises ConfigError for impossible parameters.
    """
    from PIL import Image

    if count < 1 or not 32 <= size <= 4096 or not 0 <= noise <= 30:
        raise ConfigError(
            f"expected count >= 1, size in 32..4096 and noise in 0..30, found count={count}, size={size} "
            f"and noise={noise}"
        )
    if background not in BACKGROUNDS:
        raise ConfigError(
            f"expected background in {BACKGROUNDS}, found {background!r}."
            f"{did_you_mean(background, BACKGROUNDS)}"
        )
    levels, shares = _difficulty_mix(difficulty)
    prefix = f"scene-{seed}-" if id_prefix is None else id_prefix
    if not prefix or any(c in prefix for c in "/\\\0"):
        raise ConfigError(
            f"expected an id_prefix usable in file names, found {prefix!r}; for example 'train-'"
        )
    folder = Path(out_dir)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    for index in range(count):
        rng = np.random.default_rng([abs(seed), int(seed < 0), zlib.crc32(prefix.encode()), index])
        level = levels[int(rng.choice(len(levels), p=shares))]
        scene = draw_scene(rng, size, level, noise, background)
        name = f"images/{prefix}{index:06d}.png"
        # run lengths: fast
        Image.fromarray(scene.pixels).save(folder / name, compress_level=1, compress_type=3)
        objects = [{"shape": o.shape, "color": o.color, "box": list(o.box)} for o in scene.objects]
        row: dict[str, Any] = {
            "id": f"{prefix}{index:06d}",
            "image": name,
            "question": scene.phrase,
            "answer": list(scene.objects[scene.target].box),
            "frame": "abs_orig",
            "source": f"scenes-{level}",
            "params": {"width": size, "height": size, "difficulty": level, "objects": objects},
        }
        entries.append(row)
    return write_rows(folder, entries)


def example_scenes(
    folder: str, count: int, difficulty: int = 0, seed: int = 7
) -> list[dict[str, Any]]:
    """Draw `count` scenes and return {"id", "image", "params": {"objects": ...}} of each, for a task's example data."""
    data = Path(make_scenes(folder, count=count, seed=seed, difficulty=difficulty))
    rows = map(json.loads, data.read_text(encoding="utf-8").splitlines())
    return [{key: row[key] for key in ("id", "image", "params")} for row in rows]


def _parse_mix(text: str) -> dict[int, float]:
    try:
        return {int(k): float(v) for k, v in (item.split(":") for item in text.split(","))}
    except ValueError as err:
        raise ConfigError(
            f"expected --mix DIFFICULTY:WEIGHT,..., found {text!r}; for example 0:0.5,1:0.5"
        ) from err


def main(argv: list[str] | None = None) -> int:
    """Command line: writes a set and prints the path of its data.jsonl."""
    parser = argparse.ArgumentParser(
        prog="python -m mmrl.tasks.scenes", description="Write generated grounding scenes."
    )
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--count", type=int, default=500, help="number of scenes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the set")
    parser.add_argument("--size", type=int, default=112, help="side of the pictures in pixels")
    parser.add_argument(
        "--difficulty", type=int, default=0, choices=DIFFICULTIES, help="difficulty of all scenes"
    )
    parser.add_argument(
        "--mix", default="", help="difficulties with weights instead, for example 0:0.5,1:0.5"
    )
    parser.add_argument(
        "--id-prefix", default=None, help="start of every id, default scene-<seed>-"
    )
    parser.add_argument(
        "--background", default="grey", choices=BACKGROUNDS, help="grey, or graded by position"
    )
    parser.add_argument(
        "--noise", type=int, default=8, help="amplitude of the background noise, 0..30"
    )
    args = parser.parse_args(argv)
    try:
        mix: int | dict[int, float] = _parse_mix(args.mix) if args.mix else args.difficulty
        path = make_scenes(
            args.out,
            args.count,
            args.seed,
            args.size,
            mix,
            args.id_prefix,
            args.noise,
            args.background,
        )
    except ConfigError as err:
        parser.error(str(err))
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
