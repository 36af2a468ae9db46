"""Jigsaw: the cut pieces restore the picture by their answer; only a whole permutation is an answer; any folder works."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError, MediaError
from mmrl.task import Template
from mmrl.tasks.base import AnswerError
from mmrl.tasks.jigsaw import Jigsaw, cut_and_shuffle, main, make_jigsaws, parse_order
from mmrl.types import RewardContext, Sample
from tests.kits.clock_kit import takes_less

CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG)
orders = st.integers(2, 9).flatmap(lambda n: st.permutations(range(1, n + 1)))


def _sample(order: list[int], grid: list[int] | None = None) -> Sample:
    return Sample("1", "jigsaw", "s", "Solve it.", order, params={"grid": grid} if grid else {})


def _picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(2, 3), st.data())
def test_the_answer_puts_the_picture_together_again(
    rows: int, columns: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(1, rows * columns + 1)))
    whole = _picture(10 * columns + 1, 9 * rows + 2)
    pixels = np.asarray(cut_and_shuffle(whole, (rows, columns), order))
    height, width = pixels.shape[0] // rows, pixels.shape[1] // columns
    pieces = [
        pixels[r * height : (r + 1) * height, c * width : (c + 1) * width]
        for r in range(rows)
        for c in range(columns)
    ]
    restored = np.vstack(
        [
            np.hstack([pieces[order[r * columns + c] - 1] for c in range(columns)])
            for r in range(rows)
        ]
    )
    assert np.array_equal(restored, np.asarray(whole)[: height * rows, : width * columns])


@settings(max_examples=100, deadline=None)
@given(orders, st.sampled_from(["exact", "pieces"]))
def test_gold_scores_one_and_wrong_zero(order: list[int], mode: str) -> None:
    task, sample = Jigsaw(mode=mode), _sample(order)
    assert task.score(sample, task.gold(sample, CTX), CTX).value == 1
    wrong = task.score(sample, task.wrong(sample, CTX), CTX)
    assert (
        wrong.parsed
        and wrong.parts["accuracy"] == 0
        and wrong.metrics == {"correct": 0, "pieces": 0}
    )


def test_partial_credit_is_the_share_of_pieces_in_place() -> None:
    sample = _sample([2, 1, 4, 3])
    for text, share in (("[2, 1, 4, 3]", 1), ("[2, 1, 3, 4]", 0.5), ("[1, 2, 3, 4]", 0)):
        score = Jigsaw(mode="pieces").score(sample, f"<answer>{text}</answer>", CTX)
        assert score.parts["accuracy"] == score.metrics["pieces"] == share
        assert Jigsaw().score(sample, f"<answer>{text}</answer>", CTX).parts["accuracy"] == float(
            share == 1
        )


@pytest.mark.parametrize("text", ["[2, 1, 4, 3]", "2,1,4,3", " [2,1, 4,3]\n", "[ 2, 1, 4, 3 ]"])
def test_spellings_of_one_order(text: str) -> None:
    assert parse_order(text, 4) == [2, 1, 4, 3]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[2, 1, 4]", "wrong_count"),
        ("[2, 1, 4, 3, 3]", "wrong_count"),
        ("[2, 2, 4, 3]", "not_a_permutation"),
        ("[0, 1, 2, 3]", "not_a_permutation"),
        ("[1, 2, 3, 5]", "not_a_permutation"),
        ("[2, 1, 4, 3", "not_a_list"),
        ("[[2, 1], [4, 3]]", "not_a_list"),
        ("[2, 1, 4, 3] or [1, 2, 3, 4]", "not_a_list"),
        ("the order is 2, 1, 4, 3", "not_a_list"),
        ("", "not_a_list"),
        ("[]", "not_a_list"),
        ("[٢, 1, 4, 3]", "not_a_list"),
        ("[2.0, 1, 4, 3]", "not_a_list"),
        ("1, " * 2000, "answer_too_long"),
        ("[" * 4000, "not_a_list"),
        ("1," * 1999 + "1", "wrong_count"),
        ("exit()", "not_a_list"),
    ],
)
def test_everything_else_fails_with_its_reason(text: str, reason: str) -> None:
    def read() -> None:
        with pytest.raises(AnswerError, match=reason):
            parse_order(text, 4)

    takes_less(0.5, read)
    score = Jigsaw().score(_sample([2, 1, 4, 3]), f"<answer>{text}</answer>", CTX)
    assert (score.value, score.parsed, score.reason) == (0, False, reason)


def test_the_prompt_tells_the_grid() -> None:
    template = Template("t", CoordFrame.ABS_ORIG)
    text = Jigsaw().messages(_sample([2, 1, 4, 3, 6, 5], [2, 3]), template)[-1]["content"][-1][
        "text"
    ]
    assert "2 rows and 3 columns, 6 pieces" in text and "{" not in text
    assert (
        "cut into 4 pieces"
        in Jigsaw().messages(_sample([2, 1, 4, 3]), template)[-1]["content"][-1]["text"]
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"answer": [1, 2, 3]}, "wrong_count"),
        ({"answer": [0, 1, 2, 3]}, "not_a_permutation"),
        ({"answer": None}, "not_a_list"),
        ({"answer": [[1, 2], [3, 4]]}, "not_a_list"),
        ({"answer": [2, 1, 4, 3], "params": {"grid": [2]}}, "params.grid as"),
        ({"answer": [2, 1, 4, 3], "params": {"grid": [0, 4]}}, "params.grid as"),
        ({"answer": [1], "params": {}}, "wrong_count"),
    ],
)
def test_unusable_rows_say_what_to_fix(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"question": "Solve.", "params": {"grid": [2, 2]}, **row}) + "\n")
    with pytest.raises(DataError, match="row 1: expected") as error:
        Jigsaw().load(str(file))
    assert words in str(error.value)


def test_any_folder_of_pictures_becomes_a_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for index, name in enumerate(("a.png", "deep/b.JPG", "c.webp")):
        _picture(40 + index, 50).save(
            tmp_path / "in" / name, format={0: "PNG", 1: "JPEG", 2: "WEBP"}[index]
        )
    (tmp_path / "in" / "notes.txt").write_text("no picture")
    assert (
        main(
            [
                str(tmp_path / "out"),
                "--images",
                str(tmp_path / "in"),
                "--grid",
                "2x3",
                "--seed",
                "3",
            ]
        )
        == 0
    )
    path = capsys.readouterr().out.strip()
    samples = list(Jigsaw().load(path))
    assert [s.params["grid"] for s in samples] == [[2, 3]] * 3
    assert all(
        Image.open(s.images[0]).size[0] % 3 == 0 and s.answer != [1, 2, 3, 4, 5, 6] for s in samples
    )
    first = [(s.answer, Path(s.images[0]).read_bytes()) for s in samples]
    main(
        [
            str(tmp_path / "again"),
            "--images",
            str(tmp_path / "in"),
            "--grid",
            "2x3",
            "--seed",
            "3",
            "--count",
            "2",
        ]
    )
    again = list(Jigsaw().load(capsys.readouterr().out.strip()))
    assert [(s.answer, Path(s.images[0]).read_bytes()) for s in again] == first[:2], (
        "seeded: a longer set begins with the shorter"
    )


def test_impossible_sets_say_what_to_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _picture(20, 20).save(tmp_path / "a.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    for grid, words in (
        ((1, 1), "2 to 100 pieces"),
        ((3, 3), "at least 8 x 8 pixels per piece"),
        ((20, 20), "2 to 100"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_jigsaws(tmp_path / "out", [tmp_path / "a.png"], grid, 0)
    with pytest.raises(DataError, match="check --images"):
        make_jigsaws(tmp_path / "out", [], (2, 2), 0)
    with pytest.raises(MediaError, match="broken"):
        make_jigsaws(tmp_path / "out", [tmp_path / "broken.png"], (2, 2), 0)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "out"), "--images", str(tmp_path), "--grid", "2by2"])
    assert "for example 2x2" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="exact, pieces"):
        Jigsaw(mode="share")


def test_examples_load_and_threads_agree(tmp_path: Path) -> None:
    task = Jigsaw(mode="pieces")
    samples = list(task.load(task.example_data(str(tmp_path))))
    assert {len(s.answer) for s in samples} == {4, 6} and len(samples) == 12
    texts = [
        f"<answer>{tail}</answer>"
        for tail in ("[1, 2, 3, 4]", "[2, 1, 4, 3]", "[4, 3, 2, 1] x", "2,1,3,4")
    ] * 10
    line = [task.score(samples[0], text, CTX) for text in texts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda text: task.score(samples[0], text, CTX), texts)) == line
