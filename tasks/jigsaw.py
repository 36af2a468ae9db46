"""Jigsaw: a picture is cut into rows x columns and its pieces are shuffled; the answer says how to put it together again.

    {"id": "7", "image": "7.png", "question": "Solve the jigsaw.", "answer": [2, 1, 4, 3], "params": {"grid": [2, 2]}}

Pieces are counted from 1 in reading order as the picture shows them. answer[k] is the piece that belongs to place k + 1 of
the whole picture, again in reading order: [2, 1, 4, 3] swaps the two columns. Any folder of pictures becomes a set:

    python -m mmrl.tasks.jigsaw runs/jigsaws --images my_pictures --grid 2x2 --seed 0
    mmrl tasks check jigsaw --data runs/jigsaws/data.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError, MMRLError
from mmrl.registry import register
from mmrl.rewards.parsing import MAX_ANSWER_CHARS
from mmrl.rewards.reading.blocks import json_block
from mmrl.rewards.router import Part, PartFactory
from mmrl.task import Template
from mmrl.tasks.base import AnswerError, AnswerTask, Prediction
from mmrl.tasks.examples import write_rows
from mmrl.types import RewardContext, Sample

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Jigsaw", "cut_and_shuffle", "make_jigsaws", "parse_order"]

_LIST = re.compile(r"\[? ?[0-9]{1,3}(?: ?, ?[0-9]{1,3})* ?\]?")
_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_MAX_PIECES = 100
_MODES = ("exact", "pieces")


def parse_order(answer: str, count: int) -> list[int]:
    """The permutation of 1..count an answer text is: `[2, 1, 4, 3]`, or the same without brackets.

    Raises AnswerError: answer_too_long, not_a_list, wrong_count, not_a_permutation (a piece twice, or one that is none).
    """
    if len(answer) > MAX_ANSWER_CHARS:
        raise AnswerError("answer_too_long")
    text = " ".join(answer.split())
    if not _LIST.fullmatch(text) or text.startswith("[") != text.endswith("]"):
        raise AnswerError("not_a_list")
    order = [int(number) for number in text.strip("[] ").split(",")]
    if len(order) != count:
        raise AnswerError("wrong_count")
    if sorted(order) != list(range(1, count + 1)):
        raise AnswerError("not_a_permutation")
    return order


def _accuracy_part(mode: str) -> Part:
    """exact: the whole order is right. pieces: share of pieces in their place (a random order earns 1/n on average)."""
    if mode not in _MODES:
        raise ConfigError(
            f"unknown mode {mode!r} of task jigsaw; expected one of {', '.join(_MODES)}"
        )

    def accuracy(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
        return (
            float(predicted.correct)
            if mode == "exact"
            else _in_place(predicted.value, sample.answer)
        )

    return accuracy


def _in_place(order: Sequence[int], truth: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(order, truth, strict=True)) / len(truth)


@register("jigsaw")
class Jigsaw(AnswerTask):
    """Put the pieces in order. The only mode beside exact (default) is pieces, the share of pieces in their place."""

    headline: ClassVar[str] = "correct"
    ask: ClassVar[str] = (
        "{question} The picture was cut into {rows}{count} pieces that were shuffled. Count the pieces from 1, left to right and "
        "top to bottom, as you see them. List them in the order that restores the picture, left to right and top to bottom."
    )
    shape: ClassVar[str] = "[piece, piece, ...]"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    metric_names: ClassVar[tuple[str, ...]] = ("correct", "pieces")

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format."""
        return {"accuracy": _accuracy_part, "format": self.format_factory()}

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> list[int]:
        """A permutation of 1..n as a list or its text; params.grid = [rows, columns] must have n places."""
        from mmrl.tasks.readers.common import RowError

        grid = params.get("grid")
        if grid is not None and (
            not isinstance(grid, (list, tuple))
            or len(grid) != 2
            or not all(type(v) is int and v > 0 for v in grid)
        ):
            raise RowError(
                "params.grid as [rows, columns]", repr(grid)[:60], "correct or remove it"
            )
        try:
            text = value if isinstance(value, str) else json.dumps(value)
            count = grid[0] * grid[1] if grid is not None else text.count(",") + 1
            if not 2 <= count <= _MAX_PIECES:
                raise AnswerError("wrong_count")
            return parse_order(text, count)
        except (AnswerError, TypeError) as err:
            raise RowError(
                "a permutation of the pieces such as [2, 1, 4, 3], counted from 1",
                f"{value!r:.80} ({err})",
                "correct 'answer' or params.grid",
            ) from err

    def fill_prompt(self, prompt: str, sample: Sample, template: Template) -> str:
        """{count} and {rows} ("2 rows and 2 columns, ") filled in."""
        grid = sample.params.get("grid")
        rows = f"{grid[0]} rows and {grid[1]} columns, " if grid else ""
        prompt = prompt.replace("{rows}", rows).replace("{count}", str(len(sample.answer)))
        return super().fill_prompt(prompt, sample, template)

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> list[int]:
        """The order. Reasons: answer_too_long, not_a_list, wrong_count, not_a_permutation."""
        return parse_order(answer, len(sample.answer))

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """The one list of a text with prose around it."""
        return json_block(answer)

    def measure(
        self, value: Sequence[int], sample: Sample, ctx: RewardContext
    ) -> Mapping[str, float]:
        """correct (all pieces) and pieces (share in their place)."""
        share = _in_place(value, sample.answer)
        return {"correct": float(share == 1), "pieces": share}

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The true order."""
        return str(list(sample.answer))

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The true order turned by one place: no piece where it belongs."""
        return str([*sample.answer[1:], sample.answer[0]])

    def example_data(self, folder: str) -> str:
        """12 jigsaws of generated scenes, 2 x 2 and 2 x 3; returns their data.jsonl."""
        from mmrl.tasks.scenes import make_scenes

        scenes = Path(make_scenes(Path(folder) / "whole", count=12, seed=5, difficulty=2)).parent
        pictures = sorted((scenes / "images").glob("*.png"))
        first = make_jigsaws(folder, pictures[:6], (2, 2), seed=0)
        lines = Path(first).read_text(encoding="utf-8")
        second = make_jigsaws(folder, pictures[6:], (2, 3), seed=1)
        both = lines + Path(second).read_text(encoding="utf-8")
        Path(second).write_text(both, encoding="utf-8")
        return second


def cut_and_shuffle(picture: Image, grid: tuple[int, int], order: Sequence[int]) -> Image:
    """The jigsaw of a picture whose solution is `order` (see the module); edges that do not divide evenly are cut off.

    Place k of the result shows the piece of the whole picture whose place p has order[p] == k + 1. Raises ConfigError
    when the picture has fewer than 8 pixels per piece and side.
    """
    from PIL import Image as pil

    rows, columns = grid
    width, height = picture.width // columns, picture.height // rows
    if min(width, height) < 8:
        raise ConfigError(
            f"expected at least 8 x 8 pixels per piece, found {picture.width} x {picture.height} for {rows} rows "
            f"and {columns} columns; use larger pictures or fewer pieces"
        )
    jigsaw = pil.new("RGB", (width * columns, height * rows))
    for place, piece in enumerate(order):
        x, y = place % columns * width, place // columns * height
        to = piece - 1
        jigsaw.paste(
            picture.crop((x, y, x + width, y + height)),
            (to % columns * width, to // columns * height),
        )
    return jigsaw


def make_jigsaws(
    out_dir: str | os.PathLike[str],
    pictures: Sequence[str | os.PathLike[str]],
    grid: tuple[int, int],
    seed: int,
) -> str:
    """Cut every picture and write `out_dir`/images/*.png and data.jsonl; returns the path of data.jsonl.

    The order of picture i depends on (seed, grid, i) and is never the solved one. Raises ConfigError for an impossible
    grid, DataError without pictures and MediaError for a picture that cannot be read.
    """
    from mmrl.video.media import open_image

    rows, columns = grid
    count = rows * columns
    if rows < 1 or columns < 1 or not 2 <= count <= _MAX_PIECES:
        raise ConfigError(
            f"expected a grid of 2 to {_MAX_PIECES} pieces such as 2x2, found {rows}x{columns}"
        )
    if not pictures:
        raise DataError(f"expected pictures ({', '.join(_ENDINGS)}), found none; check --images")
    folder = Path(out_dir)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    entries = []
    for index, path in enumerate(pictures):
        rng = random.Random(f"jigsaw {seed} {rows}x{columns} {index}")
        order = list(range(1, count + 1))
        while order == sorted(order):
            rng.shuffle(order)
        key = f"jigsaw-{seed}-{rows}x{columns}-{index:06d}"
        cut_and_shuffle(open_image(os.fspath(path)), grid, order).save(
            folder / "images" / f"{key}.png"
        )
        entries.append(
            {
                "id": key,
                "image": f"images/{key}.png",
                "question": "Solve the jigsaw.",
                "answer": order,
                "source": f"jigsaw-{rows}x{columns}",
                "params": {"grid": [rows, columns]},
            }
        )
    return write_rows(folder, entries)


def _grid(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,2})x([0-9]{1,2})", text)
    if not found:
        raise ConfigError(f"expected --grid ROWSxCOLUMNS, found {text!r}; for example 2x2")
    return int(found[1]), int(found[2])


def main(argv: list[str] | None = None) -> int:
    """Command line: cuts every picture below a folder and prints the path of the set's data.jsonl."""
    parser = argparse.ArgumentParser(
        prog="python -m mmrl.tasks.jigsaw", description="Cut pictures into jigsaws."
    )
    parser.add_argument("out", help="folder to write")
    parser.add_argument(
        "--images", required=True, help="folder with pictures, searched with its subfolders"
    )
    parser.add_argument("--grid", default="2x2", help="rows x columns, for example 2x2 or 3x3")
    parser.add_argument("--seed", type=int, default=0, help="seed of the orders")
    parser.add_argument(
        "--count", type=int, default=None, help="take the first COUNT pictures only"
    )
    args = parser.parse_args(argv)
    pictures = sorted(p for p in Path(args.images).rglob("*") if p.suffix.lower() in _ENDINGS)
    try:
        print(make_jigsaws(args.out, pictures[: args.count], _grid(args.grid), args.seed))
    except MMRLError as err:
        parser.error(str(err))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
