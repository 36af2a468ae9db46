"""`mmrl tasks check --all`: every error of every row and pixel in one round, by kind, whatever the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from mmrl.cli.main import app
from mmrl.config import DataSource
from mmrl.data.sources import load_sources
from mmrl.diagnostics.check_rows import check_rows
from mmrl.errors import ConfigError, DataError
from tests.kits.engine_kit import picture, read_jsonl, tiny_folder


def pictures(folder: Path) -> None:
    Image.open(picture((112, 84))).save(folder / "good.png")
    (folder / "cut.png").write_bytes((folder / "good.png").read_bytes()[:-900])


def rows(folder: Path) -> Path:
    """260 good rows; behind the 200th one of each: pixels that end early (twice), a box outside, no answer, half a character."""
    pictures(folder)
    good = [
        {"id": f"g{n}", "image": "good.png", "question": "the cup", "answer": [1, 2, 30, 40]}
        for n in range(230)
    ]
    bad: list[dict[str, Any]] = [
        {**good[0], "id": "cut1", "image": "cut.png"},
        {**good[0], "id": "out1", "answer": [1, 2, 300, 40]},
        {**good[0], "id": "out2", "answer": [1, 2, 40, 400]},
        {**good[0], "id": "half", "question": "a \ud800"},
        {**good[0], "id": "cut2", "image": "cut.png"},
        {"id": "none", "image": "good.png", "question": "the cup"},
    ]
    (folder / "data.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*good, *bad, {**good[0], "id": "last"}])
    )
    return folder / "data.jsonl"


def test_every_error_is_found_in_one_round_and_counted_by_kind(tmp_path: Path) -> None:
    path = rows(tmp_path)
    done = CliRunner().invoke(
        app,
        [
            "tasks",
            "check",
            "grounding",
            "--all",
            "--data",
            str(path),
            "--model",
            tiny_folder(),
            "--out",
            str(tmp_path / "out"),
        ],
    )
    assert done.exit_code == 1, done.output
    errors = read_jsonl(tmp_path / "out" / "errors.jsonl")
    assert [(e["row"], e["id"]) for e in errors] == [
        (232, None),
        (233, None),
        (236, None),
        (231, "cut1"),
        (234, "half"),
        (235, "cut2"),
    ]
    lines = path.read_text().splitlines()
    for error in errors[3:]:  # what an editor shows at that line is the row
        assert (
            error["file"] == str(path) and json.loads(lines[error["row"] - 1])["id"] == error["id"]
        )
    kinds = sorted({e["kind"] for e in errors})
    assert kinds == [
        "'answer' with the truth of task grounding",
        "a box inside the picture",
        "media: truncated",
        "text",
    ]
    words = " ".join(done.output.split())
    assert (
        "234 usable rows of task grounding, 6 errors" in words
        and "2 x media: truncated row 231 cut1, row 235 cut2" in words
    )
    assert "2 x a box inside the picture row 232, row 233" in words


def test_coco_and_parquet_too_and_a_clean_set_is_status_0(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pictures(tmp_path)
    names = ("good.png", "cut.png", "gone.png")
    images = [
        {"id": n, "file_name": name, "width": 112, "height": 84} for n, name in enumerate(names)
    ]
    boxes = [
        {"id": n, "image_id": n, "category_id": 1, "bbox": [1, 2, 3, h], "iscrowd": 0}
        for n, h in enumerate((0, 9, 9))
    ]
    (tmp_path / "instances.json").write_text(
        json.dumps(
            {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cup"}]}
        )
    )
    found = check_rows(
        "detection", tmp_path / "instances.json", model=tiny_folder(), out=tmp_path / "coco"
    )
    assert [(e["row"], e["id"]) for e in found.errors] == [
        (3, None),
        (2, "instances-1"),
    ] and found.samples == 2
    assert found.notes == {"annotation left out: a box without width or height": 1}
    for name, status in (("good.png", 0), ("cut.png", 1)):
        pq.write_table(
            pa.Table.from_pylist(
                [{"pic": {"bytes": (tmp_path / name).read_bytes()}, "q": "Read it.", "a": "abc"}]
            ),
            tmp_path / "t.parquet",
        )
        done = CliRunner().invoke(
            app,
            [
                "tasks",
                "check",
                "ocr",
                "--all",
                "--data",
                str(tmp_path / "t.parquet"),
                "--model",
                tiny_folder(),
                "--out",
                str(tmp_path / "pq"),
                "--param",
                "reader={columns: {image: pic, question: q, answer: a}}",
            ],
        )
        assert done.exit_code == status, done.output


@pytest.mark.slow
def test_several_files_and_views_name_the_file_and_row_they_come_from(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pictures(tmp_path)
    (tmp_path / "parts").mkdir()
    for part, names in enumerate((("good.png", "good.png"), ("good.png", "cut.png"))):
        rows = [
            {"pic": {"bytes": (tmp_path / name).read_bytes()}, "q": "Read it.", "a": "abc"}
            for name in names
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "parts" / f"part-{part}.parquet")
    reader = {"columns": {"image": "pic", "question": "q", "answer": "a"}}
    (error,) = check_rows(
        "ocr",
        tmp_path / "parts",
        model=tiny_folder(),
        out=tmp_path / "out",
        params={"reader": reader},
    ).errors
    assert (Path(error["file"]).name, error["row"]) == ("part-1.parquet", 2) and Path(
        error["file"]
    ).is_file()
    own = tmp_path / "spatial.jsonl"
    own.write_text(
        "".join(
            json.dumps(
                {
                    "id": name,
                    "image": name,
                    "question": "Where is the cup?",
                    "answer": "left",
                    "params": {"relations": ["left", "right"]},
                }
            )
            + "\n"
            for name in ("good.png", "cut.png")
        )
    )
    found = check_rows(
        "spatial",
        own,
        model=tiny_folder(),
        out=tmp_path / "own",
        params={"mirror": True, "mirror_folder": str(tmp_path / "mirrored")},
    )
    assert found.errors and {(e["file"], e["row"]) for e in found.errors} == {(str(own), 2)}


@pytest.mark.slow  # datasets builds its cache
def test_data_of_the_hub_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set in the hub's layout, found by `datasets` itself; the command line takes its name for a file."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path)
    rows = [
        {
            "picture": {"bytes": (tmp_path / name).read_bytes(), "path": None},
            "prompt": "the cup",
            "truth": truth,
        }
        for name, truth in (
            ("good.png", "[1, 2, 30, 40]"),
            ("cut.png", "[1, 2, 30, 40]"),
            ("good.png", "[1, 2, 300, 40]"),
        )
    ]
    text = datasets.Value("string")
    place = tmp_path / "someone" / "cups" / "data" / "train-00000-of-00001.parquet"
    place.parent.mkdir(parents=True)
    datasets.Dataset.from_list(
        rows,
        features=datasets.Features({"picture": datasets.Image(), "prompt": text, "truth": text}),
    ).to_parquet(str(place))
    done = CliRunner().invoke(
        app,
        [
            "tasks",
            "check",
            "grounding",
            "--all",
            "--data",
            "hf://someone/cups:train",
            "--model",
            tiny_folder(),
            "--out",
            str(tmp_path / "out"),
            "--param",
            "reader={columns: {image: picture, question: prompt, answer: truth}}",
        ],
    )
    assert done.exit_code == 1, done.output
    assert "hf://someone/cups:train: 2 usable rows of task grounding, 2 errors" in " ".join(
        done.output.split()
    )
    errors = read_jsonl(tmp_path / "out" / "errors.jsonl")
    theirs = datasets.load_dataset("someone/cups", split="train")
    assert [(e["kind"], e["row"]) for e in errors] == [
        ("a box inside the picture", 3),
        ("media: truncated", 2),
    ]
    for error in errors:  # the file that is named holds that row
        again = datasets.Dataset.from_parquet(error["file"], cache_dir=str(tmp_path / "again"))
        assert (
            again["truth"][error["row"] - 1]
            == theirs["truth"][error["row"] - 1]
            == rows[error["row"] - 1]["truth"]
        )


def test_a_run_that_raises_at_the_first_error_says_how_to_see_all(tmp_path: Path) -> None:
    path = rows(tmp_path)
    with pytest.raises(
        DataError, match=r"row 232: .*mmrl tasks check grounding --all --data .*data\.jsonl"
    ):
        load_sources([DataSource(task="grounding", path=str(path))])
    with pytest.raises(ConfigError, match="--data FILE"):
        check_rows("grounding", model=tiny_folder(), out=tmp_path / "out")
