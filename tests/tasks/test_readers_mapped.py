"""Any columns, in the layouts people have, and data sets of the hub that `datasets` itself has loaded."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmrl.config import DataSource
from mmrl.data.sources import load_sources
from mmrl.errors import ConfigError, DataError
from mmrl.tasks.readers import read_any
from mmrl.tasks.readers.hub import hub_file, is_hub_name

SIZE, BOX = (64, 48), [4, 6, 40, 30]


def png(shade: int = 90) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", SIZE, (shade, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "a.png").write_bytes(png())
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


QUESTION = "Where is the cup?"
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    # https://github.com/haotian-liu/LLaVA/blob/main/docs/Finetune_Custom_Data.md
    "llava": (
        "llava.json",
        {
            "id": "997bb945",
            "image": "a.png",
            "conversations": [
                {"from": "human", "value": f"<image>\n{QUESTION}"},
                {"from": "gpt", "value": str(BOX)},
            ],
        },
        {
            "id": "id",
            "image": "image",
            "question": "conversations.0.value",
            "answer": "conversations.-1.value",
        },
    ),
    # ms-swift's GRPO data: messages, images, and a column of its own for the truth
    "ms_swift": (
        "swift.jsonl",
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "<image>" + QUESTION},
            ],
            "images": ["a.png"],
            "solution": str(BOX),
        },
        {"image": "images", "question": "messages.-1.content", "answer": "solution"},
    ),
    # LLaMA-Factory sharegpt with other column names
    "llama_factory": (
        "sharegpt.json",
        {
            "dialog": [
                {"role": "user", "content": "<image>" + QUESTION},
                {"role": "assistant", "content": f"It is at {BOX}."},
            ],
            "pics": ["a.png"],
        },
        {"image": "pics", "question": "dialog.0.content", "answer": "dialog.1.content"},
    ),
    # EasyR1: parquet with the bytes of the pictures
    "easyr1": (
        "train.parquet",
        {
            "images": [{"bytes": png(), "path": None}],
            "problem": "<image>" + QUESTION,
            "answer": str(BOX),
        },
        {"image": "images", "question": "problem", "answer": "answer"},
    ),
    # TRL: conversational prompts whose content is a list of parts, one picture in its own column
    "trl": (
        "trl.jsonl",
        {
            "prompt": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
            ],
            "image": "a.png",
            "solution": BOX,
        },
        {"image": "image", "question": "prompt.0.content", "answer": "solution"},
    ),
    "dotted": (
        "rows.jsonl",
        {"img.file": "a.png", "meta": {"q": QUESTION}, "box.px": BOX},
        {"image": "img.file", "question": "meta.q", "answer": "box.px"},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_the_same_sample(tmp_path: Path, layout: str) -> None:
    name, row, columns = LAYOUTS[layout]
    path = write(tmp_path / name, [row])
    (loaded,) = load_sources(
        [DataSource(task="grounding", path=str(path), params={"reader": {"columns": columns}})]
    )
    (sample,) = loaded.samples
    assert (sample.question, sample.answer, sample.task) == (QUESTION, BOX, "grounding")
    assert (sample.params["width"], sample.params["height"]) == SIZE and len(sample.images) == 1
    assert sample.id == row.get("id", f"{path.stem}-1") and Path(sample.images[0]).is_file()


def test_other_fields_go_where_tasks_look_for_them(tmp_path: Path) -> None:
    rows = [
        {
            "kind": "choice",
            "q": "Which?",
            "a": "B",
            "opts": ["A. cup", "B. fork"],
            "set": "kitchen",
        },
        {
            "kind": "numeric",
            "q": "How wide?",
            "a": "12 px",
            "opts": None,
            "set": "kitchen",
            "u": "px",
        },
        {"kind": "tracking?", "q": "x", "a": "1", "opts": None, "set": None, "u": None},
    ]
    columns = {
        "question": "q",
        "answer": "a",
        "options": "opts",
        "task": "kind",
        "source": "set",
        "params.unit": "u",
    }
    readout = read_any(
        write(tmp_path / "rows.jsonl", rows), task="mixed", columns=columns, on_error="record"
    )
    assert [r.row for r in readout.rejected] == [1, 3], (
        "the first has no column u, the last no known task"
    )
    assert "'u'" in readout.rejected[0].reason and "tracking?" in readout.rejected[1].reason
    (numeric,) = readout.samples
    assert (numeric.task, numeric.source, numeric.params["unit"], numeric.answer) == (
        "numeric",
        "kitchen",
        "px",
        "12 px",
    )
    del columns["params.unit"]
    choice = read_any(
        tmp_path / "rows.jsonl", task="mixed", columns=columns, on_error="record"
    ).samples[0]
    assert choice.params["options"] == ["cup", "fork"] and choice.answer == "B"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"question": "q"}, "columns with answer"),
        ({"qestion": "q", "answer": "a"}, "unknown field 'qestion'.*Did you mean 'question'"),
        ({}, "as a mapping"),
        (["q"], "as a mapping"),
        ({"question": "q", "answer": 3}, "as a mapping"),
        (
            {"question": "q", "answer": "a", "params.video": "v", "params.video.end": "e"},
            "found 'params.video' and 'params.video.end'; map one of them",
        ),
        ({"question": "q", "answer": "a", "params.": "v"}, "found 'params.'; name what is meant"),
    ],
)
def test_a_wrong_mapping_is_the_users_error(tmp_path: Path, columns: Any, words: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"q": "x", "a": "y"}])
    with pytest.raises(ConfigError, match=words):
        read_any(path, task="ocr", columns=columns)


CLIP = Path(__file__).parents[2] / "assets/fixtures/video_rows/videos/1.mp4"


@pytest.mark.parametrize(
    "part",
    [
        {"params.video": "part"},
        {"params.video.start": "t0", "params.video.end": "t1"},
        {"params.video.start": "part.start", "params.video.end": "t1"},
        {"video": "clip"},
    ],
)
def test_the_prompt_knows_the_part_of_a_clip_that_is_shown(tmp_path: Path, part: Any) -> None:
    row = {
        "file": str(CLIP),
        "clip": {"video": str(CLIP), "video_start": 1.0, "video_end": 2.5},
        "part": {"start": 1.0, "end": 2.5},
        "t0": 1.0,
        "t1": 2.5,
        "q": "a red square",
        "a": [0.5, 1.5],
    }
    columns = {"video": "file", "question": "q", "answer": "a", **part}
    path = write(tmp_path / "rows.jsonl", [row])
    reader = {"columns": columns, "video": {"fps": 4}}
    source = DataSource(task="temporal_grounding", path=str(path), params={"reader": reader})
    (sample,) = load_sources([source])[0].samples
    assert sample.params["video"] == {"fps": 4, "start": 1.0, "end": 2.5}
    assert (sample.params["duration"], set(sample.params)) == (
        1.5,
        {"video", "width", "height", "duration"},
    )
    write(path, [{**row, "a": [1.6, 2.4]}])
    with pytest.raises(DataError, match=r"row 1: expected a span inside the video of 1\.5 s"):
        read_any(path, task="temporal_grounding", **reader)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"file": None}, "a video, because params.video says how it is shown"),
        ({"part": [1, 2]}, "params.video as an object"),
        ({"part": {"video_start": 1}}, "unknown key 'video_start' in params.video"),
        ({"part": {"path": "x"}}, "unknown key 'path' in params.video"),
        (
            {"file": {"path": str(CLIP), "start": 2}},
            "one 'start' of the row's videos, found 2 and 1",
        ),
    ],
)
def test_a_part_that_cannot_be_shown_is_an_error_of_its_row(
    tmp_path: Path, row: dict[str, Any], words: str
) -> None:
    good = {"file": str(CLIP), "part": {"start": 1}, "q": "q", "a": "red"}
    path = write(tmp_path / "rows.jsonl", [good, {**good, **row}])
    columns = {"video": "file", "question": "q", "answer": "a", "params.video": "part"}
    with pytest.raises(DataError, match=r"row 2: ") as caught:
        read_any(path, task="open_text", columns=columns)
    assert words in str(caught.value)
    # rows without a video or a part of it, in a file of such
    for nothing in (None, 0.0, float("nan")):
        none = {"start": nothing, "end": nothing}
        write(path, [{**good, "part": None}, {**good, "file": None, "part": none}])
        whole, text = read_any(path, task="open_text", columns=columns)
        assert whole.params["duration"] == 3.0 and dict(text.params) == {}


def test_parts_of_parameters_are_one_object(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"q": "How wide?", "a": "12", "w": 2.0, "u": "px"}])
    columns = {
        "question": "q",
        "answer": "a",
        "params.reward.weights.accuracy": "w",
        "params.unit": "u",
    }
    (sample,) = read_any(path, task="numeric", columns=columns)
    assert dict(sample.params) == {"reward": {"weights": {"accuracy": 2.0}}, "unit": "px"}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_an_unknown_column_names_those_there_are(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [{"prompt": "Read it.", "label": "abc"}])
    told = r"row 1: expected a column 'promt' for question, found columns prompt, label.*Did you mean 'prompt'"
    with pytest.raises(DataError, match=told):
        read_any(path, task="ocr", columns={"question": "promt", "answer": "label"})
    for where in ("prompt.0.value", "prompt.0", "conversations.4.value"):
        with pytest.raises(DataError, match="row 1: expected a column"):
            read_any(path, task="ocr", columns={"question": where, "answer": "label"})


# the hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A data set in the hub's layout that `datasets` finds under its name, and a cache of its own."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    for split, count in (("train", 3), ("test", 1)):
        rows = [
            {
                "picture": {"bytes": png(40 * n), "path": f"{n}.png"},
                "prompt": QUESTION,
                "truth": str(BOX),
            }
            for n in range(count)
        ]
        text = datasets.Value("string")
        features = datasets.Features({"picture": datasets.Image(), "prompt": text, "truth": text})
        place = tmp_path / "someone" / "cups" / "data" / f"{split}-00000-of-00001.parquet"
        place.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows, features=features).to_parquet(str(place))
    return datasets


COLUMNS = {"image": "picture", "question": "prompt", "answer": "truth"}


def test_a_hub_data_set_is_what_datasets_loads(hub: Any, tmp_path: Path) -> None:
    source = DataSource(
        task="grounding", path="hf://someone/cups:train", params={"reader": {"columns": COLUMNS}}
    )
    (loaded,) = load_sources([source])
    theirs = hub.load_dataset("someone/cups", split="train")
    assert len(loaded.samples) == len(theirs) == 3
    for ours, row in zip(loaded.samples, theirs, strict=True):
        assert ours.question == row["prompt"] and ours.answer == json.loads(row["truth"])
        with Image.open(ours.images[0]) as picture:
            assert list(picture.convert("RGB").tobytes()) == list(
                row["picture"].convert("RGB").tobytes()
            )
    assert [s.id for s in loaded.samples] == ["cups-train-1", "cups-train-2", "cups-train-3"]
    assert hub_file("hf:/someone/cups") == hub_file("hf://someone/cups:train"), (
        "the same file, once"
    )
    (held,) = read_any("hf://someone/cups:test", task="grounding", columns=COLUMNS)
    assert held.id == "cups-test-1"


def test_names_splits_and_networks_that_are_not_there_are_said(hub: Any) -> None:
    assert is_hub_name(Path("hf://a/b")) and not is_hub_name("data/hf.jsonl")
    for name in ("hf://cups", "hf://a/b/c/d", "hf://a b/c"):
        with pytest.raises(DataError, match=r"expected hf://owner/name"):
            read_any(name, task="grounding", columns=COLUMNS)
    with pytest.raises(DataError, match=r"hf://someone/cups:tests: expected .*Did you mean 'test'"):
        read_any("hf://someone/cups:tests", task="grounding", columns=COLUMNS)


@pytest.mark.slow  # datasets asks several times
def test_a_data_set_that_is_not_there_names_the_network(hub: Any) -> None:
    with pytest.raises(
        DataError,
        match=r"hf://nobody/nothing:train: expected a data set of the hub.*check the name.*network",
    ):
        # the tests have no network
        load_sources([DataSource(task="grounding", path="hf://nobody/nothing")])


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("talk.5.value", r"'talk' is a list of 1; correct reader.columns.question\.$"),
        ("talk.0.text", "'talk.0' is an object with from, value; correct"),
        ("label.x", "'label' is str 'abc'; correct"),
        ("tlak.0.value", r"question\. Did you mean 'talk'"),
    ],
)
def test_a_path_that_leaves_the_row_says_where(tmp_path: Path, path: str, told: str) -> None:
    rows = write(
        tmp_path / "rows.parquet",
        [{"talk": [{"from": "human", "value": "Read it."}], "label": "abc"}],
    )
    with pytest.raises(
        DataError,
        match=f"row 1: expected a column '{path}' for question, found columns talk, label.*{told}",
    ):
        read_any(rows, task="ocr", columns={"question": path, "answer": "label"})


@pytest.mark.parametrize(
    "row",
    [
        {"img": b"x", "conversations": [{"from": "human", "value": "q"}]},
        {"image": b"x", "question": "q", "solution": "[1, 2, 3, 4]"},
        {"image": b"x", "question": "q", "answer": [1, 2, 3, 4]},
        {"qid": 1, "query": "q", "vid": "v"},
    ],
)
def test_parquet_of_nobodys_format_is_told_how_to_be_mapped(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    """Columns of a JSON format in a parquet file went to that format's reader, which showed the file's bytes as a broken line."""
    path = write(tmp_path / "rows.parquet", [row])
    told = rf"found {', '.join(row)}; .*map the columns that there are: reader\.columns=\{{image: "
    with pytest.raises(DataError, match=told) as err:
        read_any(path, task="grounding")
    assert "PAR1" not in str(err.value)
    lines = write(tmp_path / "rows.jsonl", [{"img": "a.png", "prompt": "q", "answer": "a"}])
    with pytest.raises(
        DataError, match=r"found 'img'; move extra fields into 'params', or map the columns"
    ):
        read_any(lines, task="ocr")
