"""Maze: moves are walked; detours solve, walls and edges cost, wandering earns nothing; generated mazes can be solved."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.tasks.base import AnswerError
from mmrl.tasks.maze import (
    MOVES,
    Board,
    Maze,
    draw_maze,
    main,
    make_board,
    make_mazes,
    parse_moves,
    read_board,
)
from mmrl.types import RewardContext, Sample
from tests.kits.clock_kit import takes_less

CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG)
RING = ["#####", "#S..#", "#.#.#", "#..G#", "#####"]  # two ways of four moves
WIDE = ["S...", "....", "...G"]
moves = st.lists(st.sampled_from(sorted(MOVES)), min_size=1, max_size=40)


def _sample(maze: list[str] = RING, answer: list[str] | None = None) -> Sample:
    return Sample(
        "1",
        "maze",
        "s",
        "Find the way.",
        answer or read_board(maze).shortest(),
        params={"maze": maze},
    )


def _score(task: Maze, text: str, maze: list[str] = RING) -> Any:
    return task.score(_sample(maze), f"<answer>{text}</answer>", CTX)


def _board(seed: int, size: int = 4) -> Board:
    return make_board(random.Random(seed), size, 0.15)


def _as_rows(board: Board) -> list[str]:
    rows = [list(row) for row in board.rows]
    rows[board.start[0]][board.start[1]], rows[board.goal[0]][board.goal[1]] = "S", "G"
    return ["".join(row) for row in rows]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 7), st.sampled_from(["solved", "progress"]))
def test_gold_scores_one_and_wrong_zero(seed: int, size: int, mode: str) -> None:
    task, sample = Maze(mode=mode), _sample(_as_rows(_board(seed, size)))
    gold = task.score(sample, task.gold(sample, CTX), CTX)
    assert gold.value == 1 and gold.metrics == {"correct": 1, "optimal": 1, "progress": 1}
    wrong = task.score(sample, task.wrong(sample, CTX), CTX)
    assert wrong.parsed and wrong.parts["accuracy"] == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_the_shortest_way_is_shortest(seed: int) -> None:
    """Compared with a plain relaxation over all cells, which shares no code with the breadth-first search."""
    board = _board(seed, 3)
    free = [
        (r, c)
        for r in range(len(board.rows))
        for c in range(len(board.rows[0]))
        if board.free((r, c))
    ]
    far = {cell: 0 if cell == board.start else 10_000 for cell in free}
    for _ in free:
        for r, c in free:
            far[r, c] = min(
                [far[r, c], *(far.get((r + dr, c + dc), 10_000) + 1 for dr, dc in MOVES.values())]
            )
    assert len(board.shortest()) == far[board.goal] and board.walk(board.shortest()).solved


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 50), moves)
def test_a_walk_solves_exactly_when_it_ends_on_the_goal_without_a_bump(
    seed: int, steps: list[str]
) -> None:
    board = _board(seed, 3)
    (row, column), touched = board.start, False
    for step in steps:
        after = (row + MOVES[step][0], column + MOVES[step][1])
        inside = 0 <= after[0] < len(board.rows) and 0 <= after[1] < len(board.rows[0])
        if inside and board.rows[after[0]][after[1]] == ".":
            row, column = after
        else:
            touched = True
    walk = board.walk(steps)
    assert (walk.end, walk.solved) == ((row, column), (row, column) == board.goal and not touched)
    sample = _sample(_as_rows(board))
    score = Maze(mode="progress").score(sample, f"<answer>{', '.join(steps)}</answer>", CTX)
    assert 0 <= score.parts["accuracy"] <= 1 and (score.parts["accuracy"] == 1) == walk.solved


def test_a_detour_solves_and_only_the_shortest_is_optimal() -> None:
    both = [
        _score(Maze(), text) for text in ("right, right, down, down", "down, down, right, right")
    ]
    assert [score.metrics["optimal"] for score in both] == [1, 1]
    detour = _score(Maze(), "right, left, down, down, right, right")
    assert detour.value == 1 and detour.metrics == {"correct": 1, "optimal": 0, "progress": 1}


def test_walls_and_edges_cost() -> None:
    bump = "up, right, right, down, down"
    assert _score(Maze(), bump).parts["accuracy"] == 0, "a way through a wall is no way"
    assert _score(Maze(mode="progress"), bump).parts["accuracy"] == pytest.approx(0.9)
    assert _score(Maze(mode="progress", accuracy={"bump_cost": 0.5}), bump).parts[
        "accuracy"
    ] == pytest.approx(0.5)
    off = "up, left, right, right, right, down, down"
    assert _score(Maze(mode="progress"), off, WIDE).parts["accuracy"] == pytest.approx(0.8)
    assert _score(Maze(mode="progress"), ", ".join(["up"] * 30)).parts["accuracy"] == 0


def test_progress_is_the_share_of_the_way_and_passing_the_goal_is_not_reaching_it() -> None:
    assert _score(Maze(mode="progress"), "right").parts["accuracy"] == pytest.approx(0.25)
    assert _score(Maze(mode="progress"), "right, right, down").parts["accuracy"] == pytest.approx(
        0.75
    )
    past = _score(Maze(), "right, right, down, down, up")
    assert past.parts["accuracy"] == 0 and past.metrics["progress"] == pytest.approx(0.75)


@pytest.mark.parametrize(
    "text",
    [
        "right, down",
        "RIGHT DOWN",
        '["right", "down"]',
        "right -> down",
        "→ ↓",
        "→↓",
        "right,\ndown.",
        "right; down",
        "['right', 'down']",
    ],
)
def test_spellings_of_moves(text: str) -> None:
    assert parse_moves(text, 10) == ["right", "down"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no_moves"),
        ("[]", "no_moves"),
        (",,,", "no_moves"),
        ("right, jump", "not_a_move"),
        ("go right", "not_a_move"),
        ("r, d", "not_a_move"),
        ("rightdown", "not_a_move"),
        ("right or down", "not_a_move"),
        ("up " * 101, "too_many_moves"),
        ("right, " * 2000, "answer_too_long"),
        ("[" * 4000, "no_moves"),
        ("→" * 4000, "too_many_moves"),
        ("exit()", "not_a_move"),
        ("ｕｐ", "not_a_move"),
        ("😀" * 3000, "not_a_move"),
    ],
)
def test_everything_else_fails_with_its_reason(text: str, reason: str) -> None:
    def read() -> None:
        with pytest.raises(AnswerError, match=reason):
            parse_moves(text, 100)

    takes_less(0.5, read)
    score = _score(Maze(), text)
    assert (score.value, score.parsed, score.reason) == (0, False, reason)
    assert set(score.metrics.values()) == {0}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"params": {}}, "params.maze as rows"),
        ({"params": {"maze": ["#S", "#"]}}, "equal length"),
        ({"params": {"maze": ["S.", ".x"]}}, "made of # . S G"),
        ({"params": {"maze": ["S.", ".."]}}, "one S and one G"),
        ({"params": {"maze": ["S#G"]}}, "a way from S to G"),
        ({"params": {"maze": ["S" + "." * 200 + "G"]}}, "at most 101"),
        ({"answer": ["right"]}, "one solution is"),
        ({"answer": ["up", "right"]}, "one solution is"),
        ({"answer": 5}, "one solution is"),
        ({"answer": "jump"}, "not_a_move"),
    ],
)
def test_unusable_rows_say_what_to_fix(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    file = tmp_path / "data.jsonl"
    base = {"question": "Go.", "answer": "right, right, down, down", "params": {"maze": RING}}
    file.write_text(json.dumps(base) + "\n" + json.dumps({**base, **row}) + "\n")
    with pytest.raises(DataError, match="row 2: expected") as error:
        Maze().load(str(file))
    assert words in str(error.value)


def test_the_picture_shows_the_board() -> None:
    board = read_board(RING)
    picture = draw_maze(board, 8)
    assert picture.size == (40, 40)
    pixels = {
        mark: picture.getpixel((c * 8 + 4, r * 8 + 4))
        for mark, (r, c) in {"start": (1, 1), "goal": (3, 3), "wall": (0, 0), "way": (1, 2)}.items()
    }
    assert pixels == {
        "start": (30, 165, 50),
        "goal": (225, 35, 35),
        "wall": (0, 0, 0),
        "way": (255, 255, 255),
    }


def test_generated_sets_are_seeded_and_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "a"), "--count", "5", "--size", "3", "--seed", "4"]) == 0
    first = list(Maze().load(capsys.readouterr().out.strip()))
    again = list(Maze().load(make_mazes(tmp_path / "b", 3, size=3, seed=4)))
    assert [(s.answer, s.params["maze"]) for s in again] == [
        (s.answer, s.params["maze"]) for s in first[:3]
    ]
    assert Image.open(first[0].images[0]).size == (112, 112)
    assert len({tuple(s.params["maze"]) for s in first}) == 5
    with pytest.raises(SystemExit):
        main([str(tmp_path / "c"), "--size", "1"])
    assert "size in 2..50" in capsys.readouterr().err
    for params, words in (
        ({"mode": "shortest"}, "solved, progress"),
        ({"accuracy": {"bump_cost": 0}}, "above 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            Maze(**params)


def test_a_perfect_maze_has_one_way_and_loops_open_more() -> None:
    def open_cells(loops: float) -> int:
        return sum(row.count(".") for row in make_board(random.Random(1), 6, loops).rows)

    assert open_cells(0) == 2 * 36 - 1, "a spanning tree of 36 rooms has 35 doors"
    assert open_cells(0.5) > open_cells(0)


@pytest.mark.slow
def test_large_mazes_are_scored_in_milliseconds_and_threads_agree() -> None:
    sample = _sample(_as_rows(make_board(random.Random(3), 50, 0.1)))
    task, texts = (
        Maze(mode="progress"),
        [f"<answer>{', '.join(['right', 'down', 'up'] * n)}</answer>" for n in range(1, 30)],
    )
    line = takes_less(0.05 * len(texts), lambda: [task.score(sample, text, CTX) for text in texts])
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda text: task.score(sample, text, CTX), texts)) == line
