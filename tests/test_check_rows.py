"""`mmrl tasks check --all`: every error of every row and pixel in one round, by kind, whatever the format."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from mmrl.check_rows import check_rows
from mmrl.cli.main import app
from mmrl.config import DataSource
from mmrl.data import load_sources
from mmrl.errors import ConfigError, DataError
from tests.engine_kit import picture, read_jsonl, tiny_folder


def pictures(folder: Path) -> None:
    Image.open(picture((112, 84))).save(folder / "good.png")
    (folder / "cut.png").write_bytes((folder / "good.png").read_bytes()[:-900])


def rows(folder: Path) -> Path:
    """260 good rows; behind the 200th one of each: pixels that end early (twice), a box outside, no answer, half a character."""
    pictures(folder)
    good = [{"id": f"g{n}", "image": "good.png", "question": "the cup", "answer": [1, 2, 30, 40]} for n in range(230)]
    bad: list[dict[str, Any]] = [
        {**good[0], "id": "cut1", "image": "cut.png"}, {**good[0], "id": "out1", "answer": [1, 2, 300, 40]},
        {**good[0], "id": "out2", "answer": [1, 2, 40, 400]}, {**good[0], "id": "half", "question": "a \ud800"},
        {**good[0], "id": "cut2", "image": "cut.png"}, {"id": "none", "image": "good.png", "question": "the cup"}]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*good, *bad, {**good[0], "id": "last"}]))
    return folder / "data.jsonl"


def test_every_error_is_found_in_one_round_and_counted_by_kind(tmp_path: Path) -> None:
    path = rows(tmp_path)
    done = CliRunner().invoke(app, ["tasks", "check", "grounding", "--all", "--data", str(path), "--model", tiny_folder(), "--out",
                                    str(tmp_path / "out")])
    assert done.exit_code == 1, done.output
    errors = read_jsonl(tmp_path / "out" / "errors.jsonl")
    assert [(e["row"], e["id"]) for e in errors] == [(232, None), (233, None), (236, None), (None, "cut1"), (None, "half"),
                                                     (None, "cut2")]
    kinds = sorted({e["kind"] for e in errors})
    assert kinds == ["'answer' with the truth of task grounding", "a box inside the picture", "media: truncated", "text"]
    words = " ".join(done.output.split())
    assert "234 usable rows of task grounding, 6 errors" in words and "2 x media: truncated cut1, cut2" in words
    assert "2 x a box inside the picture row 232, row 233" in words


def test_coco_and_parquet_too_and_a_clean_set_is_status_0(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pictures(tmp_path)
    names = ("good.png", "cut.png", "gone.png")
    images = [{"id": n, "file_name": name, "width": 112, "height": 84} for n, name in enumerate(names)]
    boxes = [{"id": n, "image_id": n, "category_id": 1, "bbox": [1, 2, 3, h], "iscrowd": 0} for n, h in enumerate((0, 9, 9))]
    (tmp_path / "instances.json").write_text(json.dumps({
        "images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cup"}]}))
    found = check_rows("detection", tmp_path / "instances.json", model=tiny_folder(), out=tmp_path / "coco")
    assert [(e["row"], e["id"]) for e in found.errors] == [(3, None), (None, "instances-1")] and found.samples == 2
    assert found.notes == {"annotation left out: a box without width or height": 1}
    for name, status in (("good.png", 0), ("cut.png", 1)):
        pq.write_table(pa.Table.from_pylist([{"pic": {"bytes": (tmp_path / name).read_bytes()}, "q": "Read it.", "a": "abc"}]),
                       tmp_path / "t.parquet")
        done = CliRunner().invoke(app, [
            "tasks", "check", "ocr", "--all", "--data", str(tmp_path / "t.parquet"), "--model", tiny_folder(), "--out",
            str(tmp_path / "pq"), "--param", "reader={columns: {image: pic, question: q, answer: a}}"])
        assert done.exit_code == status, done.output


def test_a_run_that_raises_at_the_first_error_says_how_to_see_all(tmp_path: Path) -> None:
    path = rows(tmp_path)
    with pytest.raises(DataError, match=r"row 232: .*mmrl tasks check grounding --all --data .*data\.jsonl"):
        load_sources([DataSource(task="grounding", path=str(path))])
    with pytest.raises(ConfigError, match="--data FILE"):
        check_rows("grounding", model=tiny_folder(), out=tmp_path / "out")
