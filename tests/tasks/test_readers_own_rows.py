"""Rows of one's own: a key given twice, truths with a per cent sign, truths that no completion can give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmrl.coords import CoordFrame
from mmrl.errors import DataError
from mmrl.registry import task_from_spec
from mmrl.tasks.readers import read_any
from mmrl.types import RewardContext

CTX = RewardContext(1, 1, CoordFrame.REL1000)


def load(
    tmp_path: Path, task: str, *rows: dict[str, Any] | str, on_error: str = "raise", **params: Any
) -> tuple[list[Any], list[Any]]:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (tmp_path / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    made = task_from_spec(task, params)
    made.on_error = on_error
    return list(made.load(str(tmp_path / "data.jsonl"))), list(made.rejected)


@pytest.mark.parametrize(
    ("images", "question", "asked"),
    [
        (1, "<image>\nWhat colour?", "What colour?"),
        (2, "first <image> then <image>", "first (image 1) then (image 2)"),
        (1, "What colour?", "What colour?"),
    ],
)
def test_placeholders_are_the_pictures_places_as_in_every_format(
    tmp_path: Path, images: int, question: str, asked: str
) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    row = {"images": ["a.png"] * images, "question": question, "answer": "red"}
    (sample,), _ = load(tmp_path, "open_text", row)
    assert sample.question == asked
    # the same row in EasyR1's columns, by its reader
    (tmp_path / "peer.json").write_text(
        json.dumps([{"images": ["a.png"] * images, "problem": question, "answer": "red"}])
    )
    if "<image>" in question:
        peer = read_any(tmp_path / "peer.json", task="open_text", check=lambda _, value, *__: value)
        assert peer.samples[0].question == asked
    row["question"] = "<image><image><image>"
    with pytest.raises(DataError, match=f"expected {images} <image> placeholders"):
        load(tmp_path, "open_text", row)


def test_a_mark_is_a_word_where_the_row_shows_nothing_of_its_kind(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    asked = "What does the <video> tag do, and <image> and <audio>?"
    (plain,), _ = load(tmp_path, "open_text", {"question": asked, "answer": "play"})
    assert plain.question == asked
    shown = {"image": "a.png", "question": "<image>What does <video> do?", "answer": "play"}
    (sample,), _ = load(tmp_path, "open_text", shown)
    assert sample.question == "What does <video> do?"


def test_a_saved_data_set_of_the_library_says_what_to_do(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"question": "a", "answer": "b"}])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "several"))
    for folder in ("one", "several"):
        for params in ({}, {"reader": {"columns": {"question": "question", "answer": "answer"}}}):
            task = task_from_spec("open_text", params)
            with pytest.raises(DataError, match=r"save_to_disk wrote in .*to_parquet"):
                task.load(str(tmp_path / folder))


TWICE = [
    '{"question": "a", "answer": 1, "answer": 2}',
    '{"question": "a", "answer": 1, "params": {"unit": "m", "unit": "km"}}',
]


@pytest.mark.parametrize("line", TWICE)
def test_a_key_given_twice_is_an_error_of_its_row(tmp_path: Path, line: str) -> None:
    assert isinstance(json.loads(line), dict), "to Python's json the last one counts"
    good = {"question": "b", "answer": 3}
    with pytest.raises(
        DataError, match=r"data\.jsonl: row 2: expected every key once, found '(answer|unit)' twice"
    ):
        load(tmp_path, "numeric", good, line)
    kept, rejected = load(tmp_path, "numeric", good, line, on_error="record")
    assert [s.answer for s in kept] == [3] and [r.row for r in rejected] == [2]


@pytest.mark.parametrize(
    ("truth", "answer", "value"),
    [
        ("50%", "50%", 1.0),
        ("50%", "50", 1.0),
        ("50 %", "50%", 1.0),
        ("50%", "0.5", 0.0),
        ("50%", "49%", 0.0),
        ("12.5%", "12.5%", 1.0),
        (50, "50%", 0.0),
        ("50", "50%", 0.0),
    ],
)
def test_a_truth_in_per_cent_is_a_truth(
    tmp_path: Path, truth: Any, answer: str, value: float
) -> None:
    (sample,), _ = load(tmp_path, "numeric", {"question": "share?", "answer": truth})
    task = task_from_spec("numeric", {"weights": {"accuracy": 1.0}})
    assert task.score(sample, f"<answer>{answer}</answer>", CTX).value == value
    assert task.score(sample, task.gold(sample, CTX), CTX).value == 1.0
    assert task.score(sample, task.wrong(sample, CTX), CTX).value == 0.0


def test_what_the_settings_say_of_per_cent_counts_more_than_the_truths_spelling(
    tmp_path: Path,
) -> None:
    (sample,), _ = load(
        tmp_path, "numeric", {"question": "share?", "answer": "50%"}, percent="fraction"
    )
    task = task_from_spec("numeric", {"percent": "fraction", "weights": {"accuracy": 1.0}})
    assert [
        task.score(sample, f"<answer>{text}</answer>", CTX).value for text in ("50%", "0.5", "50")
    ] == [1, 1, 0]


TAGS = "<answer>B</answer>"
TRUTHS: dict[str, tuple[Any, dict[str, Any]]] = {
    "open_text": (f"use {TAGS} here", {}),
    "ocr": ("say <think> first", {}),
    "chart": ("a </answer> b", {}),
    "math": (TAGS, {}),
    "classification": ("</think>", {"labels": ["</think>", "b"]}),
    "detection": ([{"bbox": [100, 100, 300, 400], "label": "<answer>"}], {}),
    "gui_action": ({"action": "type", "text": TAGS}, {}),
}


@pytest.mark.parametrize("task", TRUTHS)
def test_truths_that_no_completion_can_give_are_refused_when_they_are_read(
    tmp_path: Path, task: str
) -> None:
    """Wherever the words stand that end or repeat the envelope; the truth itself, written as an answer, scores 0."""
    Image.new("RGB", (640, 480)).save(tmp_path / "a.png")
    truth, params = TRUTHS[task]
    row = {"image": "a.png", "question": "Which?", "answer": truth, "params": params}
    with pytest.raises(DataError, match=r"row 1: expected .* without .*<(answer|think)>"):
        load(tmp_path, task, row)
    with pytest.raises(DataError, match=r"row 1: expected .* without .*<(answer|think)>"):
        load(tmp_path, "mixed", {**row, "task": task})
    kept, rejected = load(tmp_path, task, row, on_error="record")
    assert not kept and len(rejected) == 1
    made = task_from_spec(task, {})
    (lost,) = read_any(tmp_path / "data.jsonl", task=task, check=lambda *a: a[1])
    assert (
        made.score(
            lost, f"<answer>{truth if isinstance(truth, str) else json.dumps(truth)}</answer>", CTX
        ).value
        == 0.0
    )


def test_one_text_of_several_that_can_be_given_is_enough(tmp_path: Path) -> None:
    row = {"question": "Which?", "answer": "b", "params": {"labels": ["<b>", "b"]}}
    (sample,), _ = load(tmp_path, "classification", row)
    made = task_from_spec("classification", {})
    assert made.score(sample, made.gold(sample, CTX), CTX).value == 1.0


def test_without_an_envelope_such_words_are_words_like_others(tmp_path: Path) -> None:
    row = {"question": "Which?", "answer": "<answer>", "params": {"labels": ["<answer>", "b"]}}
    (sample,), _ = load(tmp_path, "classification", row, answer_format="bare")
    made = task_from_spec("classification", {"answer_format": "bare"})
    assert made.score(sample, made.gold(sample, CTX), CTX).parts["accuracy"] == 1.0


def test_a_json_list_of_rows_is_read_as_its_lines_are(tmp_path: Path) -> None:
    """`wrap it in {...}` was the advice for a list that held good rows."""
    rows = [{"question": "q", "answer": "a"}, {"id": "two", "question": "q", "answer": "b"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = [
        (s.id, s.answer) for s in task_from_spec("open_text").load(str(tmp_path / "rows.jsonl"))
    ]
    for text in (json.dumps(rows), json.dumps(rows, indent=1), "\ufeff\n " + json.dumps(rows)):
        (tmp_path / "rows.json").write_text(text, encoding="utf-8")
        assert [
            (s.id, s.answer) for s in task_from_spec("open_text").load(str(tmp_path / "rows.json"))
        ] == wanted


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[{"question": "q", "answer": "a"}, 3]', r"row 2: expected a JSON object, found int 3"),
        (
            '[{"question": "q", "answer": "a", "answer": "b"}]',
            "expected every key once, found 'answer' twice",
        ),
        (
            '[{"question": "q", "answer": "a"}',
            "expected a list of rows as JSON, found .*name it .jsonl",
        ),
    ],
)
def test_a_broken_json_list_is_named(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(DataError, match=told):
        task_from_spec("open_text").load(str(tmp_path / "rows.json"))


def test_rows_in_trls_form_are_told_how_to_map_their_columns(tmp_path: Path) -> None:
    """{"image", "prompt", "solution"} is no VLM-R1 row: it was told to write the words of 'problem'."""
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    row = {"image": "a.png", "prompt": "the cup", "solution": [1, 2, 30, 40]}
    with pytest.raises(DataError, match=r"reader\.columns=\{image"):
        load(tmp_path, "grounding", row)
    columns = {"image": "image", "question": "prompt", "answer": "solution"}
    [sample], _ = load(tmp_path, "grounding", row, reader={"columns": columns})
    assert sample.question == "the cup"
    assert tuple(sample.answer) == (1, 2, 30, 40)
