"""The page says per data file what the run said when it started: what was left out, adjusted, and could not be read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmrl.config import DataSource
from mmrl.data.sources import load_sources, note_lines, write_rejected, write_skipped
from mmrl.report import build_report

NewRun = Callable[..., Path]


def rows_of(page: Path) -> list[str]:
    """The text of each data file's row."""
    found = re.search(r'<section id="data">.*?</section>', page.read_text(encoding="utf-8"), re.S)
    assert found, "no section on data"
    return [re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", row)) for row in found[0].split("<tr>")[2:]]


def coco(folder: Path) -> Path:
    """Two pictures, one of them turned by its EXIF orientation: a box without height, one beyond the edge, one that is cut."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (60, 80)).save(folder / "1.jpg", exif=exif)
    Image.new("RGB", (80, 60)).save(folder / "2.jpg")
    boxes = [[5, 5, 9, 0], [90, 5, 9, 9], [70, 5, 30, 9], [5, 5, 20, 20]]
    (folder / "instances.json").write_text(
        json.dumps(
            {
                "images": [
                    {"id": n, "file_name": f"{n}.jpg", "width": 80, "height": 60} for n in (1, 2)
                ],
                "annotations": [
                    {"id": k, "image_id": 1, "category_id": 1, "bbox": box}
                    for k, box in enumerate(boxes)
                ],
                "categories": [{"id": 1, "name": "cup"}],
            }
        )
    )
    return folder / "instances.json"


def test_what_a_run_says_of_its_data_when_it_starts_stands_on_its_page(
    new_run: NewRun, tmp_path: Path
) -> None:
    run, train = new_run(), coco(tmp_path)
    rows: list[dict[str, Any]] = [
        {"id": "a", "image": "2.jpg", "question": "the cup", "answer": [1, 2, 30, 40]},
        {"id": "b", "image": "2.jpg", "question": "the cup", "answer": [1, 2, 300, 40]},
    ]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = load_sources(
        [
            DataSource(task="detection", path=str(train)),
            DataSource(task="grounding", path=str(tmp_path / "held.jsonl")),
        ],
        on_error="record",
    )
    write_skipped(sources, run / "skipped.json", held_out=1)
    assert write_rejected(sources, run / "rejected.jsonl") == 1
    (run / "failures.jsonl").write_text(
        '{"step": 3, "source": "instances", "id": "instances-1", "reason": "truncated"}\n'
    )
    training, held_out = rows_of(build_report(run))
    said = [
        part.partition(" x ")
        for line in note_lines(sources)
        for part in line.partition(": ")[2].split(", ")
        if " x " in part
    ]
    assert len(said) == 4
    for count, _, note in said:
        assert f" {count} × {note.split(',')[0]}" in training, (
            "every note, with the count of the start"
        )
    for words in (
        "instances.json",
        "detection",
        "training",
        "2 samples",
        "2 pictures",
        "( skipped.json )",
        "failed while it ran ( failures.jsonl ) 1 draw",
    ):
        assert words in training
    for words in (
        "held.jsonl",
        "held out",
        "1 sample ",
        "could not be read ( rejected.jsonl ) 1 row",
    ):
        assert words in held_out
    assert "failed while it ran" not in held_out and "with these notes" not in held_out


def test_data_that_is_used_as_it_is_says_so_and_text_of_files_does_nothing(new_run: NewRun) -> None:
    run = new_run()
    assert "every row is used as it is" in rows_of(build_report(run))[1]
    record = json.loads((run / "skipped.json").read_text())[0]
    hostile = "<script>alert(1)</script>"
    broken = {
        "path": hostile,
        "task": hostile,
        "by_source": {hostile: 3},
        "kept": "many",
        "notes": {hostile: 2, "none": "x"},
        "skipped": [hostile],
        "rejected": None,
    }
    many = {**record, "notes": {f"kind {n}": n + 1 for n in range(30)}}
    (run / "skipped.json").write_text(json.dumps([broken, many]))
    page = build_report(run)
    assert hostile not in page.read_text(encoding="utf-8")
    first, second = rows_of(page)
    assert "2 × &lt;script&gt;" in first and "0 samples" in first and "none" not in first
    assert "30 × kind 29" in second and "18 further kinds" in second


@pytest.mark.parametrize("text", ["{", '{"path": "a"}', "[1]"])
def test_a_half_written_file_is_said(new_run: NewRun, text: str) -> None:
    run = new_run()
    (run / "skipped.json").write_text(text)
    assert "skipped.json is not a complete list of data files" in build_report(run).read_text(
        encoding="utf-8"
    )
