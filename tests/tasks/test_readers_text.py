"""Question and text formats: layouts read as they are, types routed, options and answers cleaned, bad rows named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from assets.make_task_fixtures import DISC, SIZE, SQUARE, make_all
from mmrl.errors import ConfigError, DataError
from mmrl.registry import task_from_spec
from mmrl.tasks.readers import read_any
from mmrl.tasks.readers.mmmu import read_mmmu
from mmrl.types import Sample


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_all(tmp_path_factory.mktemp("fixtures"))


def _copy(fixtures: dict[str, str], name: str, rows: list[Any], file: str = "changed.json") -> Path:
    """A changed copy of a fixture beside it, so that its pictures are found."""
    path = Path(fixtures[name]).with_name(file)
    path.write_text(json.dumps(rows))
    return path


def _by_id(samples: Any) -> dict[str, Sample]:
    return {s.id: s for s in samples}


# Video-R1 and EasyVideoR1


def test_video_r1_rows_go_to_the_task_of_their_type(fixtures: dict[str, str]) -> None:
    readout = read_any(fixtures["video_r1"], task="mixed", images_only=True)
    found = {s.id: (s.task, s.answer) for s in readout}
    assert found == {
        "1": ("choice", "B"),
        "2": ("numeric", "2"),
        "3": ("ocr", "OPEN 24 HOURS"),
        "4": ("open_text", "A red disc beside a blue square."),
        "5": ("numeric", "24"),
        "6": ("choice", "B"),
    }
    samples = _by_id(readout)
    assert samples["1"].params["options"] == ["blue", "red", "green"]
    assert (
        samples["6"].params["options"] == ["the disc", "the square"]
        and samples["6"].question == "Which shape is blue?"
    )
    assert samples["5"].params["regression"] is True and "regression" not in samples["2"].params
    assert (samples["1"].params["width"], samples["1"].params["height"]) == SIZE and samples[
        "1"
    ].source == "hand-made"
    assert readout.skipped == {"not pictures only: a row with a video": 1}
    with pytest.raises(
        DataError,
        match=r"row 7: expected a video file or a folder of frames, found none at .*videos/1\.mp4",
    ):
        read_any(fixtures["video_r1"])


def test_one_task_refuses_rows_of_others_or_leaves_them_out_and_counts_them(
    fixtures: dict[str, str],
) -> None:
    with pytest.raises(
        DataError,
        match=r"row 2: expected rows of task choice, found a row of type 'numerical' \(task numeric\); "
        r"use task mixed, or set reader\.only_mine=true",
    ):
        read_any(fixtures["video_r1"], task="choice")
    readout = read_any(fixtures["video_r1"], task="choice", only_mine=True, images_only=True)
    assert [s.id for s in readout] == ["1", "6"] and not readout.rejected
    assert readout.skipped == {
        "task numeric": 2,
        "task ocr": 1,
        "task open_text": 1,
        "not pictures only: a row with a video": 1,
    }
    choice = task_from_spec("choice", {"reader": {"only_mine": True, "images_only": True}})
    assert len(list(choice.load(fixtures["video_r1"]))) == 2 and sum(choice.skipped.values()) == 5


def test_an_unknown_type_is_an_error_that_lists_the_known_and_can_be_mapped(
    fixtures: dict[str, str],
) -> None:
    rows = json.loads(Path(fixtures["video_r1"]).read_text())[:4]
    rows[3]["problem_type"] = "free form text"
    path = _copy(fixtures, "video_r1", rows)
    with pytest.raises(
        DataError,
        match=r"row 4: expected one of the problem types multiple choice, numerical, ocr, free form, .* "
        r"found 'free form text'.*Did you mean 'free form'",
    ):
        read_any(path, task="mixed")
    readout = read_any(path, task="mixed", types={"free-form text": "chart", "OCR": "open_text"})
    assert [s.task for s in readout] == ["choice", "numeric", "open_text", "chart"]
    assert read_any(path, task="ocr", only_mine=True).skipped == {
        "task choice": 1,
        "task numeric": 1,
        "problem type 'free form text', which no task takes": 1,
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"solution": "B"}, "one answer, <answer>"),
        ({"solution": "<answer>A</answer><answer>B</answer>"}, "several answers"),
        ({"solution": "<think>{x}</think> placeholder"}, "one answer, <answer>"),
        ({"solution": "<answer> </answer>"}, "an empty answer"),
        ({"solution": None}, "'solution'"),
        ({"options": ["A. blue", 3]}, "options as a list of texts"),
        ({"options": [], "problem": "Which?"}, "'options', or lines"),
        ({"options": ["A. blue"]}, "2 to 26 options"),
        ({"solution": "<answer>E</answer>"}, "one of A. blue; B. red"),
        ({"data_type": "audio"}, "data_type image"),
        ({"path": ""}, "'path' with the row's picture"),
        ({"path": "none.png"}, "readable picture"),
        ({"problem_type": 5}, "problem type as text"),
        ({"problem_type": None}, "none in the row"),
        ({"problem_id": [1]}, "an id that is text"),
        ({"problem_id": "2"}, "unique ids"),
        ({"problem": " "}, "text in 'problem'"),
        ({"problem": "<image><image>x"}, "1 <image> placeholders"),
        ({"problem_type": "spatial grounding"}, "exactly one box"),
    ],
)
def test_a_bad_video_r1_row_is_named_and_recorded(
    fixtures: dict[str, str], change: dict[str, Any], words: str
) -> None:
    rows = json.loads(Path(fixtures["video_r1"]).read_text())[:2]
    path = _copy(
        fixtures, "video_r1", [rows[1], {**rows[0], **change}, {**rows[1], "problem_id": 99}]
    )
    with pytest.raises(DataError) as caught:
        read_any(path, "video_r1", task="mixed")
    assert f"{path}: row 2: expected " in str(caught.value) or "picture" in words
    assert words in str(caught.value) and "; " in str(caught.value)
    readout = read_any(path, "video_r1", task="mixed", on_error="record")
    assert [s.id for s in readout] == ["2", "99"] and [str(r) for r in readout.rejected] == [
        str(caught.value)
    ]


def test_easy_video_r1_types(fixtures: dict[str, str]) -> None:
    samples = _by_id(read_any(fixtures["easy_video_r1"], task="mixed"))
    assert {k: (s.task, s.answer) for k, s in samples.items()} == {
        "b1": ("boolean", True),
        "m1": ("math", r"\frac{3}{2}"),
        "g1": ("grounding", list(map(float, SQUARE))),
    }
    assert samples["b1"].question == "Is the disc red?"


def test_a_byte_order_mark_and_other_encodings(fixtures: dict[str, str]) -> None:
    row = {
        **json.loads(Path(fixtures["video_r1"]).read_text())[1],
        "problem": "  Wie viele Stücke? ",
    }
    path = Path(fixtures["video_r1"]).with_name("encoded.json")
    text = json.dumps([row], ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_any(path, task="numeric").samples[0].question == "Wie viele Stücke?"
    path.write_bytes(text.encode("cp1252"))
    with pytest.raises(
        DataError, match=r"expected text in utf-8, found byte 0xfc.*reader\.encoding=cp1252"
    ):
        read_any(path, task="numeric")
    assert (
        read_any(path, task="numeric", encoding="cp1252").samples[0].question == "Wie viele Stücke?"
    )
    with pytest.raises(ConfigError, match=r"unknown encoding 'klingon'"):
        read_any(path, task="numeric", encoding="klingon")


# EasyR1 and VLM-R1 beyond grounding


def test_typed_easyr1_rows(fixtures: dict[str, str]) -> None:
    samples = read_any(fixtures["easyr1_types"], task="mixed").samples
    assert [(s.task, s.answer) for s in samples] == [
        ("grounding", list(map(float, DISC))),
        ("choice", "A"),
        ("counting", 1),
        ("math", "32"),
    ]
    assert (
        samples[1].params["options"] == ["square", "disc"]
        and samples[3].images == ()
        and "width" not in samples[3].params
    )


def test_untyped_easyr1_rows_are_read_as_the_task_asks(tmp_path: Path) -> None:
    rows = [
        {"problem": "What is 1/2 + 1/4?\n", "answer": "<answer> 3/4 </answer>"},
        {"problem": "Is it?", "answer": " yes"},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert [s.answer for s in read_any(tmp_path / "rows.json", task="open_text")] == ["3/4", "yes"]
    with pytest.raises(
        DataError, match=r"row 1: expected a problem type, because the task is mixed, found none"
    ):
        read_any(tmp_path / "rows.json", task="mixed")
    with pytest.raises(DataError, match=r"row 1: expected at least one picture in 'images'"):
        read_any(tmp_path / "rows.json", task="grounding")
    (tmp_path / "video.json").write_text(json.dumps([{**rows[0], "videos": ["a.mp4"]}]))
    with pytest.raises(
        DataError,
        match=r"row 1: expected 1 <video> placeholders, one per video, found 0 placeholders",
    ):
        read_any(tmp_path / "video.json", task="open_text")
    assert (
        read_any(tmp_path / "video.json", task="open_text", images_only=True).skipped.total() == 1
    )


def test_rows_of_a_parquet_folder_can_be_verified(tmp_path: Path) -> None:
    """A row's own reward settings are checked after reading, also when rows come from several files."""
    schema = pa.schema([("id", pa.string()), ("problem", pa.string()), ("answer", pa.string())])
    for name in "ab":
        pq.write_table(
            pa.Table.from_pylist(
                [{"id": name + str(i), "problem": "x", "answer": "1"} for i in range(3)],
                schema=schema,
            ),
            tmp_path / f"{name}.parquet",
        )
    numeric = task_from_spec("numeric", {})
    assert [s.id for s in numeric.load(str(tmp_path))] == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_vlm_r1_reward_methods_name_the_task(fixtures: dict[str, str]) -> None:
    samples = _by_id(read_any(fixtures["vlm_r1_types"], task="mixed"))
    assert {k: s.task for k, s in samples.items()} == {
        "1": "choice",
        "2": "boolean",
        "3": "detection",
        "4": "grounding",
    }
    assert (
        samples["1"].params["options"] == ["disc", "square"]
        and samples["1"].question == "Which shape is red?"
    )
    assert samples["3"].answer == [
        {"bbox": list(map(float, DISC)), "label": "disc"},
        {"bbox": list(map(float, SQUARE)), "label": "square"},
    ]
    with pytest.raises(
        DataError,
        match=r"row 1: expected rows of task grounding, found a row of type 'mcq' \(task choice\)",
    ):
        read_any(fixtures["vlm_r1_types"], task="grounding")


def test_r1_v_rows_are_vlm_r1_rows(tmp_path: Path, fixtures: dict[str, str]) -> None:
    row = {
        "image": str(Path(fixtures["easy_video_r1"]).with_name("scene.png")),
        "problem": "How many?",
        "solution": "<answer> 3 </answer>",
    }
    (tmp_path / "r1v.json").write_text(json.dumps([row]))
    sample = read_any(tmp_path / "r1v.json", task="numeric").samples[0]
    assert (sample.answer, sample.question) == ("3", "How many?")


# LLaMA-Factory


def test_llama_factory_honours_columns_and_tags(fixtures: dict[str, str]) -> None:
    folder = fixtures["llama_factory"]
    plain = read_any(folder, dataset="hand_made").samples
    assert [(s.question, s.answer, len(s.images)) for s in plain] == [
        ("What is left of the square?", "a red disc", 1),
        ("In this picture and in (image 2) this one, what differs?", "nothing", 2),
    ]
    other = read_any(folder, dataset="hand_made_openai").samples[0]
    assert (other.question, other.answer, other.params["system"]) == (
        "Which colour is the square?",
        "blue",
        "Be short.",
    )
    assert read_any(Path(folder) / "openai.jsonl").samples == [other]
    with pytest.raises(ConfigError, match=r"expected reader.dataset, because .* holds 2 data sets"):
        read_any(folder)
    with pytest.raises(ConfigError, match=r"Did you mean 'hand_made'"):
        read_any(folder, dataset="handmade")


def _llama(tmp_path: Path, row: dict[str, Any], fixtures: dict[str, str], **entry: Any) -> Path:
    info = {
        "mine": {
            "file_name": "mine.json",
            "formatting": "sharegpt",
            "columns": {"messages": "conversations", "images": "images"},
            **entry,
        }
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "mine.json").write_text(json.dumps([row]))
    (tmp_path / "images").mkdir(exist_ok=True)
    (tmp_path / "images/scene.png").write_bytes(
        (Path(fixtures["llama_factory"]) / "images/scene.png").read_bytes()
    )
    return tmp_path


def test_messages_of_openai_and_ms_swift_need_no_dataset_info(
    tmp_path: Path, fixtures: dict[str, str]
) -> None:
    picture = Path(fixtures["llama_factory"]) / "images/scene.png"
    (tmp_path / "scene.png").write_bytes(picture.read_bytes())
    asked = {"role": "user", "content": "<image>What colour?"}
    parts = [{"type": "image"}, {"type": "text", "text": "What colour?"}]
    for row in (
        {"messages": [asked], "images": ["scene.png"], "solution": "red"},
        {"messages": [{**asked, "content": parts}], "images": ["scene.png"], "solution": "red"},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                asked,
                {"role": "assistant", "content": "red"},
            ],
            "images": ["scene.png"],
        },
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        (sample,) = task_from_spec("open_text", {}).load(str(tmp_path / "rows.jsonl"))
        assert (sample.question, sample.answer, len(sample.images)) == ("What colour?", "red", 1)
    # pictures that a message names itself, at their places
    (tmp_path / "other.png").write_bytes(picture.read_bytes())
    url = {"type": "image_url", "image_url": {"url": "scene.png"}}
    named = {"type": "image", "image": "other.png"}
    like = [{"type": "text", "text": "Is"}, url, {"type": "text", "text": "like"}, named]
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    row = {"messages": [system, {**asked, "content": like}], "solution": "yes"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (sample,) = task_from_spec("open_text", {}).load(str(tmp_path / "rows.jsonl"))
    assert [Path(p).name for p in sample.images] == ["scene.png", "other.png"]
    assert sample.question.split() == ["Is", "(image", "1)", "like", "(image", "2)"]
    assert sample.params["system"] == "Be brief."
    pq.write_table(
        pa.Table.from_pylist([{**row, "messages": [asked], "images": ["scene.png"]}]),
        tmp_path / "rows.parquet",
    )
    (stored,) = task_from_spec("open_text", {}).load(str(tmp_path / "rows.parquet"))
    assert (stored.question, stored.answer, len(stored.images)) == ("What colour?", "yes", 1)
    for content, words in (
        ([url, {"type": "image"}], "1 of 2"),
        ([{"type": "image"}, {"type": "text", "text": "What?"}], "expected 0 <image> placeholders"),
    ):
        row = {"messages": [{**asked, "content": content}], "solution": "yes"}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        with pytest.raises(DataError, match=words):
            task_from_spec("open_text", {}).load(str(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [asked], "images": ["scene.png"]}))
    with pytest.raises(DataError, match=r"one turn of 'user' and one of 'assistant'"):
        task_from_spec("open_text", {}).load(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("tags", [("role", "content"), ("from", "value")])
def test_the_truth_of_messages_is_the_solution_whatever_an_old_answer_says(
    tmp_path: Path, tags: tuple[str, str]
) -> None:
    who, what = tags
    asked = {who: "user" if who == "role" else "human", what: "What colour?"}
    said = {who: "assistant" if who == "role" else "gpt", what: "blue"}
    column = "messages" if who == "role" else "conversations"
    rows = [
        {column: [asked, said], "solution": "red"},
        {column: [asked], "solution": "red"},
        {column: [asked, said], "solution": "<answer>blue</answer>"},
        {column: [asked, said], "solution": None},
        {column: [asked, said]},
        {column: [asked, said], "solution": " "},
        {column: [asked, said], "solution": float("nan")},
        {column: [asked, said], "solution": {"text": "red"}},
        {column: [asked], "solution": 4},
        {column: [asked], "solution": None},
        {column: [asked], "solution": {"text": "red"}},
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    readout = read_any(path, "llama_factory", on_error="record")
    first = "red" if column == "messages" else "blue"
    assert [s.answer for s in readout] == [first, "red", *["blue"] * 6, "4"]
    assert dict(readout.notes) == (
        {
            "truth of 'solution', not what the assistant says": 1,
            "truth of the assistant, 'solution' is no answer of the task": 1,
        }
        if column == "messages"
        else {}
    )
    assert [r.row for r in readout.rejected] == [10, 11]
    # a description says which turn is the truth
    tag = {"role_tag": who, "content_tag": what, "user_tag": asked[who], "assistant_tag": said[who]}
    columns = {"messages": column}
    entry = {"file_name": "rows.json", "formatting": "sharegpt", "columns": columns, "tags": tag}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    path.write_text(json.dumps(rows[:1]))
    assert [s.answer for s in read_any(tmp_path)] == ["blue"]


TURNS = [{"from": "human", "value": "<image>q"}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize(
    ("task", "said", "solution", "truth", "notes"),
    [
        ("numeric", "<answer>4</answer>", "Two plus two is 4.", "4", ["truth of the assistant"]),
        ("numeric", "<answer>5</answer>", 4, "4", ["truth of 'solution'"]),
        ("numeric", "<answer>4</answer>", 4.0, "4", []),
        ("grounding", "[1, 2, 30, 40]", [1, 2, 30, 40], [1, 2, 30, 40], []),
        ("grounding", "here: [9, 9, 30, 40]", "[1, 2, 30, 40]", [1, 2, 30, 40], ["truth of 'so"]),
        ("open_text", "", "red", "red", []),
    ],
)
def test_a_solution_is_the_truth_where_it_is_an_answer_of_the_task(
    tmp_path: Path,
    fixtures: dict[str, str],
    task: str,
    said: str,
    solution: Any,
    truth: Any,
    notes: list[str],
) -> None:
    picture = Path(fixtures["llama_factory"]) / "images/scene.png"
    turns = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": said}]
    row = {"messages": turns, "images": [str(picture)], "solution": solution}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    readout = read_any(path, "llama_factory", task=task)
    assert readout.samples[0].answer == truth
    assert [note[: len(start)] for note, start in zip(readout.notes, notes, strict=True)] == notes
    wrong = [turns[0], {"role": "assistant", "content": "neither"}]
    path.write_text(json.dumps([{**row, "messages": wrong, "solution": "nor this"}]))
    if task != "open_text":
        with pytest.raises(DataError, match="nor this"):
            read_any(path, "llama_factory", task=task)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"conversations": [*TURNS, *TURNS], "images": ["images/scene.png"]},
            "split it into one row per question",
        ),
        (
            {
                "conversations": [{"from": "user", "value": "<image>q"}, TURNS[1]],
                "images": ["images/scene.png"],
            },
            "correct tags.user_tag",
        ),
        (
            {"conversations": [{"role": "human", "value": "q"}], "images": []},
            "correct tags.role_tag",
        ),
        ({"messages": TURNS, "images": ["images/scene.png"]}, "correct columns.messages"),
        (
            {"conversations": TURNS, "images": []},
            "0 <image> placeholders, one per picture, found 1 placeholders and 0 pictures",
        ),
        (
            {"conversations": TURNS, "images": ["images/scene.png"] * 2},
            "found 1 placeholders and 2 pictures",
        ),
        (
            {"conversations": [{"from": "human", "value": "<video>q"}, TURNS[1]]},
            "expected columns.videos in dataset_info.json",
        ),
        (
            {"conversations": [{"from": "human", "value": "<audio>q"}, TURNS[1]]},
            "a row with audios; name its columns, reader.columns",
        ),
        (
            {
                "conversations": [TURNS[0], {"from": "gpt", "value": ""}],
                "images": ["images/scene.png"],
            },
            "text in 'value'",
        ),
    ],
)
def test_bad_llama_factory_rows(
    tmp_path: Path, fixtures: dict[str, str], row: dict[str, Any], words: str
) -> None:
    folder = _llama(tmp_path, row, fixtures)
    with pytest.raises(DataError, match=r"mine\.json: row 1: expected ") as caught:
        read_any(folder)
    assert words in str(caught.value)
    assert len(read_any(folder, on_error="record").rejected) == 1


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"formatting": "alpaca"}, "expected formatting sharegpt, found 'alpaca'"),
        ({"ranking": True}, "preference pairs"),
        ({"file_name": None}, "addresses are not fetched"),
        ({"columns": ["images"]}, "'columns' as an object of names"),
        ({"columns": {"messages": "conversations"}}, "columns.images in dataset_info.json"),
        ({"tags": {"role_tag": 3}}, "'tags'"),
        ({"file_name": "none.json"}, "none to read at"),
    ],
)
def test_bad_dataset_infos(
    tmp_path: Path, fixtures: dict[str, str], entry: dict[str, Any], words: str
) -> None:
    folder = _llama(
        tmp_path, {"conversations": TURNS, "images": ["images/scene.png"]}, fixtures, **entry
    )
    with pytest.raises(DataError) as caught:
        read_any(folder)
    assert words in str(caught.value)


# PageOCR, OCRBench, MathVista, MMMU


def test_pageocr_keeps_the_page_as_it_stands(fixtures: dict[str, str]) -> None:
    samples = {s.params["language"]: s for s in read_any(fixtures["pageocr"])}
    assert (
        samples["en"].answer == "A SMALL PAGE\nof two lines"
        and samples["cn"].answer == "一二三\n十"
    )
    assert samples["en"].task == "ocr" and samples["en"].source == "en_page_ocr"
    readout = read_any(fixtures["pageocr"], language="cn")
    assert len(readout) == 1 and readout.skipped == {"language en": 1}
    with pytest.raises(ConfigError, match=r"language en or cn"):
        read_any(fixtures["pageocr"], language="de")


def test_ocrbench_under_both_sets_of_names(fixtures: dict[str, str]) -> None:
    modern = read_any(fixtures["ocrbench"]).samples
    original = read_any(Path(fixtures["ocrbench"]).with_name("OCRBench.json")).samples
    for found in (modern, original):
        assert [(s.params["dataset"], s.params["ocrbench_type"]) for s in found] == [
            ("IIIT5K", "Regular Text Recognition"),
            ("HME100k", "Handwritten Mathematical Expression Recognition"),
        ]
        assert [s.answer if isinstance(s.answer, list) else [s.answer] for s in found] == [
            ["OPEN"],
            ["x = 2 y"],
        ]
    wrong: list[Any] = [[], [""], None, [{}]]
    rows = [
        {
            "dataset": "a",
            "question": "q",
            "question_type": "t",
            "answer": answer,
            "image": "images/0.png",
        }
        for answer in wrong
    ]
    path = _copy(fixtures, "ocrbench", rows)
    readout = read_any(path, on_error="record")
    assert not len(readout) and [r.row for r in readout.rejected] == [1, 2, 3, 4]
    assert "'answer' or 'answers'" in readout.rejected[2].reason


def test_mathvista_kinds(fixtures: dict[str, str]) -> None:
    samples = _by_id(read_any(fixtures["mathvista"], task="mixed"))
    assert {k: s.task for k, s in samples.items()} == {
        "1": "choice",
        "2": "numeric",
        "3": "numeric",
        "4": "open_text",
    }
    assert samples["1"].answer == "B" and samples["1"].params["options"] == ["B", "A"], (
        "the answer is a text, not a letter"
    )
    assert (
        samples["3"].params["precision"] == 2
        and samples["3"].params["unit"] == "%"
        and "unit" not in samples["2"].params
    )
    rows = list(json.loads(Path(fixtures["mathvista"]).read_text()).values())
    assert read_any(_copy(fixtures, "mathvista", rows), task="mixed").samples[0].answer == "B"
    assert [s.id for s in read_any(fixtures["mathvista"], task="numeric", only_mine=True)] == [
        "2",
        "3",
    ]


@pytest.mark.parametrize(
    ("row", "change", "words"),
    [
        (0, {"answer": "C"}, "an answer that is one of the choices"),
        (0, {"choices": ["A", "A"]}, "2 times in"),
        (0, {"choices": None}, "'choices' as a list"),
        (1, {"answer": ""}, "take testmini"),
        (1, {"question_type": "x"}, "free_form"),
        (1, {"answer_type": "complex"}, "one of the problem types"),
        (2, {"precision": -1}, "number of decimals"),
        (2, {"precision": 1.5}, "number of decimals"),
        (1, {"answer": "two or three"}, "number"),
        (1, {"image": None}, "a path to a picture"),
    ],
)
def test_bad_mathvista_rows(
    fixtures: dict[str, str], row: int, change: dict[str, Any], words: str
) -> None:
    rows = list(json.loads(Path(fixtures["mathvista"]).read_text()).values())
    path = _copy(fixtures, "mathvista", [{**rows[row], **change}])
    with pytest.raises(DataError, match=r"changed\.json: row 1: ") as caught:
        read_any(path, "mathvista", task="mixed")
    assert words in str(caught.value)


def test_mmmu_options_are_parsed_and_placeholders_numbered(fixtures: dict[str, str]) -> None:
    samples = read_any(fixtures["mmmu"], task="mixed").samples
    assert [(s.task, s.answer, s.source) for s in samples] == [
        ("choice", "A", "MMMU/Accounting"),
        ("choice", "B", "MMMU/Accounting"),
        ("open_text", ["blue", "dark blue"], "MMMU/Accounting"),
    ]
    assert (
        samples[0].params["options"] == ["a disc", "the square's edge"]
        and len(samples[0].images) == 2
    )
    assert samples[1].params["options"] == ["(image 1)", "(image 2)", "none, \\alpha"]
    assert samples[1].question == "Which picture of (image 1) and another shows buttons?"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"options": "__import__('os').system('true')"}, "'options' as a list"),
        ({"options": "[open('x')]"}, "expected a value"),
        ({"options": "['a', 'b'"}, "the text of one"),
        ({"options": "['a']"}, "2 to 26 options"),
        ({"answer": "?"}, "reader.split=validation"),
        ({"question": "<image 3> what?"}, "a picture in 'image_3'"),
        ({"question_type": "essay"}, "one of the problem types"),
        ({"answer": "Z"}, "one of A. a"),
    ],
)
def test_bad_mmmu_rows(
    tmp_path: Path, fixtures: dict[str, str], change: dict[str, Any], words: str
) -> None:
    image = str(Path(fixtures["easy_video_r1"]).with_name("scene.png"))
    row = {
        "id": "validation_X_1",
        "question": "<image 1> what?",
        "options": "['a', 'b']",
        "answer": "A",
        "question_type": "multiple-choice",
        "image_1": image,
    }
    (tmp_path / "rows.json").write_text(
        json.dumps([row, {**row, "id": "validation_X_2", **change}])
    )
    with pytest.raises(DataError, match=r"rows\.json: row 2: ") as caught:
        read_any(tmp_path / "rows.json", task="mixed")
    assert words in str(caught.value)
    readout = read_any(tmp_path / "rows.json", task="mixed", on_error="record")
    assert [s.question for s in readout] == ["what?"] and len(readout.rejected) == 1


def test_the_splits_of_mmmu_are_kept_apart_by_id_and_by_file(
    tmp_path: Path, fixtures: dict[str, str]
) -> None:
    image = str(Path(fixtures["easy_video_r1"]).with_name("scene.png"))
    row = {
        "question": "<image 1> what?",
        "options": "['a', 'b']",
        "answer": "A",
        "question_type": "multiple-choice",
        "image_1": image,
    }
    rows = [
        {**row, "id": f"{split}_Art_{n}", "answer": "?" if split == "test" else "A"}
        for split, count in (("dev", 1), ("validation", 2), ("test", 3))
        for n in range(count)
    ]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    kept = read_mmmu(file, split="validation")
    assert [s.id for s in kept] == ["validation_Art_0", "validation_Art_1"] and {
        s.source for s in kept
    } == {"MMMU/Art"}
    assert dict(kept.skipped) == {"split dev": 1, "split test": 3}
    assert [s.id for s in read_mmmu(file, split="dev")] == ["dev_Art_0"]
    for split in (None, "test"):
        with pytest.raises(
            DataError, match=r"row 4: .*'\?'.*not published.*reader\.split=validation"
        ):
            read_mmmu(file, split=split)
    with pytest.raises(
        ConfigError, match="unknown split 'val'; expected one of dev, validation, test"
    ):
        read_mmmu(file, split="val")
    file.write_text(json.dumps([{**row, "id": "Art_1"}]))
    assert len(read_mmmu(file)) == 1, "without a split the id is free"
    with pytest.raises(
        DataError, match=r"row 1: .*validation_Accounting_1.*'Art_1'.*leave reader\.split out"
    ):
        read_mmmu(file, split="validation")
    folder = tmp_path / "MMMU" / "Accounting"
    shutil.copytree(Path(fixtures["mmmu"]).parent, folder)
    (folder / "test-00000-of-00001.parquet").write_bytes(b"never opened")
    assert len(read_any(tmp_path / "MMMU", "mmmu", task="mixed", split="validation")) == 3
