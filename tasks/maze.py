"""Mazes: the picture shows walls, a start and a goal; the answer is the list of moves from one to the other.

    {"id": "7", "image": "7.png", "question": "Find the way.", "answer": ["right", "down"],
     "params": {"maze": ["#####", "#S.##", "##G##", "#####"]}}

params.maze holds rows of cells: # wall, . free, S start, G goal. The moves are walked, not compared: any way that ends on
the goal without touching a wall or leaving the board is right, a detour included (`optimal` measures the shortest).

    python -m mmrl.tasks.maze runs/mazes --count 200 --size 4 --seed 0 && mmrl tasks check maze --data runs/mazes/data.jsonl
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import re
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError
from mmrl.registry import register
from mmrl.rewards.parsing import MAX_ANSWER_CHARS
from mmrl.rewards.router import Part, PartFactory
from mmrl.tasks.base import AnswerError, AnswerTask, Prediction
from mmrl.tasks.examples import write_rows
from mmrl.types import RewardContext, Sample

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "MOVES",
    "Board",
    "Maze",
    "Walk",
    "draw_maze",
    "make_board",
    "make_mazes",
    "parse_moves",
    "read_board",
]

Cell = tuple[int, int]
MOVES: Mapping[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
"""(row, column) steps."""
_ARROWS = {"↑": "up", "↓": "down", "←": "left", "→": "right"}
_BACK = {"up": "down", "down": "up", "left": "right", "right": "left"}
_SPLIT = re.compile(r"[\s,;\[\]\"'>-]+")
_MAX_SIDE = 101
_MODES = ("solved", "progress")


class Board(NamedTuple):
    """A maze: rows of '#' and '.', start and goal as (row, column)."""

    rows: tuple[str, ...]
    start: Cell
    goal: Cell

    def free(self, cell: Cell) -> bool:
        """True for a cell on the board that is no wall."""
        return (
            0 <= cell[0] < len(self.rows)
            and 0 <= cell[1] < len(self.rows[0])
            and self.rows[cell[0]][cell[1]] != "#"
        )

    def distances(self) -> Mapping[Cell, int]:
        """Moves to the goal from every cell that reaches it."""
        return _distances(self)

    def shortest(self) -> list[str]:
        """A shortest list of moves; the start must reach the goal."""
        distances, cell, moves = self.distances(), self.start, list[str]()
        while cell != self.goal:
            for name, (dr, dc) in MOVES.items():
                after = (cell[0] + dr, cell[1] + dc)
                if distances.get(after, len(distances)) < distances[cell]:
                    cell, moves = after, [*moves, name]
                    break
        return moves

    def walk(self, moves: Sequence[str]) -> Walk:
        """Follow `moves` from the start. A move into a wall or off the board is a bump and leaves you where you are."""
        cell, bumps = self.start, 0
        for name in moves:
            after = (cell[0] + MOVES[name][0], cell[1] + MOVES[name][1])
            if self.free(after):
                cell = after
            else:
                bumps += 1
        return Walk(cell, bumps, cell == self.goal and not bumps)


@functools.lru_cache(maxsize=512)
def _distances(board: Board) -> Mapping[Cell, int]:
    found, queue = {board.goal: 0}, deque([board.goal])
    while queue:
        cell = queue.popleft()
        for dr, dc in MOVES.values():
            after = (cell[0] + dr, cell[1] + dc)
            if after not in found and board.free(after):
                found[after] = found[cell] + 1
                queue.append(after)
    return found


class Walk(NamedTuple):
    """Where a list of moves ends, how often it met a wall or the edge, and whether it solves the maze."""

    end: Cell
    bumps: int
    solved: bool


def read_board(value: Any) -> Board:
    """params.maze as a Board. Raises RowError."""
    from mmrl.tasks.readers.common import RowError

    rows = value if isinstance(value, (list, tuple)) else []
    if not rows or not all(
        isinstance(r, str) and r and not set(r) - set("#.SG") and len(r) == len(rows[0])
        for r in rows
    ):
        raise RowError(
            "params.maze as rows of equal length made of # . S G",
            repr(value)[:80],
            "correct the maze",
        )
    if max(len(rows), len(rows[0])) > _MAX_SIDE:
        raise RowError(
            f"a maze of at most {_MAX_SIDE} x {_MAX_SIDE} cells",
            f"{len(rows)} x {len(rows[0])}",
            "use a smaller one",
        )
    places = {
        mark: [(r, c) for r, row in enumerate(rows) for c, x in enumerate(row) if x == mark]
        for mark in "SG"
    }
    if [len(cells) for cells in places.values()] != [1, 1]:
        raise RowError(
            "one S and one G in params.maze",
            f"{len(places['S'])} and {len(places['G'])}",
            "correct the maze",
        )
    board = Board(
        tuple(row.replace("S", ".").replace("G", ".") for row in rows),
        places["S"][0],
        places["G"][0],
    )
    if board.start not in board.distances():
        raise RowError("a way from S to G", "none", "correct the maze")
    return board


@functools.lru_cache(maxsize=512)
def _board(rows: tuple[str, ...]) -> Board:
    return read_board(rows)


def _board_of(sample: Sample) -> Board:
    return _board(tuple(sample.params["maze"]))


def parse_moves(answer: str, longest: int) -> list[str]:
    """up, down, left and right (or arrows), separated by commas, spaces, -> or as a JSON list.

    Raises AnswerError: answer_too_long, no_moves, not_a_move, too_many_moves (more than `longest`).
    """
    if len(answer) > MAX_ANSWER_CHARS:
        raise AnswerError("answer_too_long")
    for arrow, name in _ARROWS.items():
        answer = answer.replace(arrow, f" {name} ")
    moves = [word for word in _SPLIT.split(answer.strip().lower().removesuffix(".")) if word]
    if not moves:
        raise AnswerError("no_moves")
    if any(move not in MOVES for move in moves):
        raise AnswerError("not_a_move")
    if len(moves) > longest:
        raise AnswerError("too_many_moves")
    return moves


def _longest(board: Board) -> int:
    """Most moves an answer may have: four times the cells of the board."""
    return 4 * len(board.rows) * len(board.rows[0])


def _progress(board: Board, walk: Walk, bump_cost: float) -> float:
    """Share of the way to the goal that the walk gained, less `bump_cost` per bump; in [0, 1], and 1 only when solved."""
    distances = board.distances()
    gained = (distances[board.start] - distances[walk.end]) / distances[board.start]
    return min(1.0, max(0.0, gained - bump_cost * walk.bumps))


def _accuracy_part(mode: str, bump_cost: float = 0.1) -> Part:
    if mode not in _MODES:
        raise ConfigError(
            f"unknown mode {mode!r} of task maze; expected one of {', '.join(_MODES)}"
        )
    if (
        isinstance(bump_cost, bool)
        or not isinstance(bump_cost, (int, float))
        or not 0 < bump_cost <= 1
    ):
        raise ConfigError(f"expected maze.bump_cost above 0 and at most 1, found {bump_cost!r}")

    def accuracy(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
        if mode == "solved":
            return float(predicted.correct)
        board = _board_of(sample)
        return _progress(board, board.walk(predicted.value), bump_cost)

    return accuracy


@register("maze")
class Maze(AnswerTask):
    """Find the way. Beside the parameters of AnswerTask:

    mode  solved (default): 1 for a list of moves that ends on the goal without a bump. progress: the share of the way to
          the goal that was gained, less `bump_cost` (in `accuracy`, default 0.1) per move into a wall or off the board
    """

    ask: ClassVar[str] = (
        "{question} Start at the green cell and reach the red cell; black cells are walls. Each move goes one cell up, down, left "
        "or right."
    )
    shape: ClassVar[str] = "move, move, ..."
    default_mode: ClassVar[str] = "solved"
    metric_names: ClassVar[tuple[str, ...]] = ("correct", "optimal", "progress")

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format."""
        return {"accuracy": _accuracy_part, "format": self.format_factory()}

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> list[str]:
        """Moves (a list or their text) that solve params.maze."""
        from mmrl.tasks.readers.common import RowError

        board = read_board(params.get("maze"))
        try:
            moves = parse_moves(
                value if isinstance(value, str) else ",".join(value), _longest(board)
            )
            if board.walk(moves).solved:
                return moves
            reason = "they do not end on G, or meet a wall"
        except (AnswerError, TypeError) as err:
            reason = str(err)
        raise RowError(
            'moves from S to G such as ["right", "down"]',
            f"{value!r:.80} ({reason})",
            f"one solution is {', '.join(board.shortest())[:120]}",
        )

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> list[str]:
        """The moves. Reasons: answer_too_long, no_moves, not_a_move, too_many_moves."""
        return parse_moves(answer, _longest(_board_of(sample)))

    def measure(
        self, value: Sequence[str], sample: Sample, ctx: RewardContext
    ) -> Mapping[str, float]:
        """correct (solved), optimal (solved in the fewest moves), progress (with the default bump cost)."""
        board = _board_of(sample)
        walk = board.walk(value)
        best = walk.solved and len(value) == board.distances()[board.start]
        return {
            "correct": float(walk.solved),
            "optimal": float(best),
            "progress": _progress(board, walk, 0.1),
        }

    def describe(
        self, value: Sequence[str] | None, sample: Sample, ctx: RewardContext
    ) -> Mapping[str, Any]:
        """pred_text and gold_text: moves."""
        shown = {} if value is None else {"pred_text": ", ".join(value)}
        return {**shown, "gold_text": ", ".join(sample.answer)}

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The solution of the row."""
        return ", ".join(sample.answer)

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """One step and back again."""
        return f"{sample.answer[0]}, {_BACK[sample.answer[0]]}"

    def example_data(self, folder: str) -> str:
        """12 small mazes; returns their data.jsonl."""
        return make_mazes(folder, 12, size=3, seed=11)


def make_board(rng: random.Random, size: int, loops: float = 0.1) -> Board:
    """A maze of `size` x `size` rooms (2 * size + 1 cells a side): a random spanning tree, then a share `loops` of the inner
    walls opened, so that some mazes have more than one way. Start and goal are rooms far apart."""
    side = 2 * size + 1
    cells = [["#"] * side for _ in range(side)]
    stack = [(rng.randrange(size), rng.randrange(size))]
    seen = set(stack)
    cells[2 * stack[0][0] + 1][2 * stack[0][1] + 1] = "."
    while stack:
        row, column = stack[-1]
        beside = [
            (dr, dc)
            for dr, dc in MOVES.values()
            if (row + dr, column + dc) not in seen
            and 0 <= row + dr < size
            and 0 <= column + dc < size
        ]
        if not beside:
            stack.pop()
            continue
        dr, dc = rng.choice(beside)
        seen.add((row + dr, column + dc))
        stack.append((row + dr, column + dc))
        cells[2 * row + 1 + dr][2 * column + 1 + dc] = cells[2 * (row + dr) + 1][
            2 * (column + dc) + 1
        ] = "."
    for row in range(1, side - 1):
        for column in range(1, side - 1):
            if (row + column) % 2 and cells[row][column] == "#" and rng.random() < loops:
                cells[row][column] = "."
    rows = tuple("".join(row) for row in cells)
    rooms = [(2 * r + 1, 2 * c + 1) for r in range(size) for c in range(size)]
    goal = rng.choice(rooms)
    distances = Board(rows, goal, goal).distances()
    far = [
        room
        for room in rooms
        if distances[room] >= max(distances[r] for r in rooms) * 0.6 and room != goal
    ]
    return Board(rows, rng.choice(far), goal)


def draw_maze(board: Board, cell: int = 16) -> Image:
    """White ways, black walls, a green start and a red goal; `cell` pixels a side each."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (cell * len(board.rows[0]), cell * len(board.rows)), "white")
    draw = ImageDraw.Draw(picture)
    for r, row in enumerate(board.rows):
        for c, mark in enumerate(row):
            colour = {board.start: (30, 165, 50), board.goal: (225, 35, 35)}.get(
                (r, c), (0, 0, 0) if mark == "#" else None
            )
            if colour is not None:
                draw.rectangle(
                    (c * cell, r * cell, (c + 1) * cell - 1, (r + 1) * cell - 1), fill=colour
                )
    return picture


def make_mazes(
    out_dir: str | os.PathLike[str],
    count: int,
    size: int = 4,
    seed: int = 0,
    loops: float = 0.1,
    cell: int = 16,
) -> str:
    """Write `count` mazes to `out_dir`/images/*.png and data.jsonl; returns the path of data.jsonl.

    Maze i depends on (seed, size, loops, i) only. Raises ConfigError for impossible parameters.
    """
    if count < 1 or not 2 <= size <= 50 or not 0 <= loops <= 1 or not 4 <= cell <= 64:
        raise ConfigError(
            f"expected count >= 1, size in 2..50, loops in 0..1 and cell in 4..64, found count={count}, "
            f"size={size}, loops={loops} and cell={cell}"
        )
    folder = Path(out_dir)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    entries = []
    for index in range(count):
        board = make_board(random.Random(f"maze {seed} {size} {loops} {index}"), size, loops)
        key = f"maze-{seed}-{size}-{index:06d}"
        draw_maze(board, cell).save(folder / "images" / f"{key}.png")
        rows = [list(row) for row in board.rows]
        for mark, (r, c) in (("S", board.start), ("G", board.goal)):
            rows[r][c] = mark
        entries.append(
            {
                "id": key,
                "image": f"images/{key}.png",
                "question": "Find the way through the maze.",
                "answer": board.shortest(),
                "source": f"maze-{size}",
                "params": {"maze": ["".join(row) for row in rows]},
            }
        )
    return write_rows(folder, entries)


def main(argv: list[str] | None = None) -> int:
    """Command line: writes a set and prints the path of its data.jsonl."""
    parser = argparse.ArgumentParser(
        prog="python -m mmrl.tasks.maze", description="Write generated mazes."
    )
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--count", type=int, default=200, help="number of mazes")
    parser.add_argument(
        "--size",
        type=int,
        default=4,
        help="rooms per side; the picture has 2 * size + 1 cells per side",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the set")
    parser.add_argument(
        "--loops",
        type=float,
        default=0.1,
        help="share of inner walls opened, 0 for exactly one way",
    )
    parser.add_argument("--cell", type=int, default=16, help="pixels per cell")
    args = parser.parse_args(argv)
    try:
        print(make_mazes(args.out, args.count, args.size, args.seed, args.loops, args.cell))
    except ConfigError as err:
        parser.error(str(err))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
