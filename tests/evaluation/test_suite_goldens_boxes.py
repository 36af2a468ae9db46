"""Whole suites of boxes from replies to numbers and results files, by pycocotools, LVIS' and OVDEval's programs.

See tests/evaluation/test_suite_goldens.py. Replies hold boxes beyond the picture, swapped corners, lines, boxes of the wrong frame,
duplicates, other names and names that do not exist; some are cut short, fenced, in words or empty.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts._suite_boxes import OVDEVAL, coco_file, lvis_file, ovdeval_file
from tests.evaluation.suite_kit import Outcome, evaluate_suite, golden, put, put_picture

pytestmark = pytest.mark.slow


def written(outcome: Outcome, name: str) -> list[dict[str, Any]]:
    """A results file of the evaluation."""
    [path] = (outcome.folder / "submissions").rglob(name)
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def same_file(mine: Sequence[Mapping[str, Any]], official: Sequence[Mapping[str, Any]]) -> None:
    """The same boxes in the same order."""

    def flat(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
        return [
            (row["image_id"], row["category_id"], row["score"], *(round(v, 6) for v in row["bbox"]))
            for row in rows
        ]

    assert flat(mine) == flat(official) and len(mine) > 40


def same_numbers(
    mine: Mapping[str, float], official: Mapping[str, float], names: Mapping[str, str]
) -> None:
    """Numbers without anything to count are -1 there and left out here."""
    wanted = {
        ours: pytest.approx(official[theirs], abs=1e-6)
        for ours, theirs in names.items()
        if official[theirs] > -1
    }
    assert {name: mine.get(name) for name in wanted} == wanted and len(wanted) >= len(names) - 1


COCO = {name: name for name in ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR100")}


def by_picture(rows: Sequence[Mapping[str, Any]], replies: Sequence[str]) -> Any:
    """Sample -> the reply about its picture."""
    said = {
        (row.get("subset"), row["image"]["id"]): reply
        for row, reply in zip(rows, replies, strict=True)
    }
    return lambda sample: said[sample.source.partition("/")[2] or None, sample.params["image_id"]]


@pytest.mark.parametrize(
    ("suite", "file", "pictures"),
    [
        ("coco_val2017", "coco/annotations/instances_val2017.json", "coco/val2017"),
        ("odinw", "odinw/_annotations.coco.json", "odinw"),
    ],
)
def test_coco_and_odinw(suite: str, file: str, pictures: str, tmp_path: Path) -> None:
    """COCOeval on the annotations as they lie there and on what the replies hold."""
    found = golden("coco")
    put(tmp_path / file, coco_file(found.rows))
    for row in found.rows:
        put_picture(
            tmp_path / pictures / row["image"]["file_name"],
            (row["image"]["width"], row["image"]["height"]),
        )
    outcome = evaluate_suite(
        suite, tmp_path, by_picture(found.rows, found.replies), tmp_path / "out"
    )
    [numbers] = outcome.results["benchmark"].values()
    same_numbers(numbers, found.official["numbers"], COCO)
    assert outcome.line.value == numbers["AP"] and outcome.line.n == len(found.rows)
    same_file(written(outcome, "coco_results.json"), found.official["results"])


def test_annotations_count_as_the_file_has_them(tmp_path: Path) -> None:
    """Boxes beyond the picture are cut for prompts and rewards, those without height or wholly outside are no objects there.
    COCOeval compares with the first as they are, and counts the others as missed."""
    found = golden("coco_edges")
    put(tmp_path / "odinw" / "_annotations.coco.json", coco_file(found.rows))
    for row in found.rows:
        put_picture(
            tmp_path / "odinw" / row["image"]["file_name"],
            (row["image"]["width"], row["image"]["height"]),
        )
    outcome = evaluate_suite(
        "odinw", tmp_path, by_picture(found.rows, found.replies), tmp_path / "out"
    )
    [numbers] = outcome.results["benchmark"].values()
    same_numbers(numbers, found.official["numbers"], COCO)
    [notes] = [data["notes"] for data in outcome.results["protocol"]["data"]]
    assert {
        "annotation cut at the edge of its picture",
        "annotation left out: a box outside the picture",
        "annotation left out: a box without width or height",
    } <= set(notes)


def test_lvis(tmp_path: Path) -> None:
    """Federated AP, by frequency and size, on the annotations as they lie there."""
    found = golden("lvis")
    put(tmp_path / "lvis" / "lvis_v1_minival.json", lvis_file(found.rows))
    for row in found.rows:
        size = (row["image"]["width"], row["image"]["height"])
        put_picture(tmp_path / "coco" / "val2017" / f"{row['image']['id']:012}.jpg", size)
    outcome = evaluate_suite(
        "lvis_minival", tmp_path, by_picture(found.rows, found.replies), tmp_path / "out"
    )
    [numbers] = outcome.results["benchmark"].values()
    names = {
        name: name for name in ("AP", "AP50", "AP75", "APs", "APm", "APl", "APr", "APc", "APf")
    }
    same_numbers(numbers, found.official["numbers"], {**names, "AR300": "AR@300"})
    assert outcome.line.value == numbers["AP"] and outcome.line.n == len(found.rows)
    same_file(written(outcome, "lvis_results.json"), found.official["results"])


def test_ovdeval(tmp_path: Path) -> None:
    """NMS-AP of each subset, and their mean, which is the suite's number."""
    found = golden("ovdeval")
    for subset in OVDEVAL:
        put(tmp_path / "ovdeval" / f"{subset}.json", ovdeval_file(found.rows, subset))
    for row in found.rows:
        size = (row["image"]["width"], row["image"]["height"])
        put_picture(tmp_path / "ovdeval" / row["subset"] / row["image"]["file_name"], size)
    outcome = evaluate_suite(
        "ovdeval", tmp_path, by_picture(found.rows, found.replies), tmp_path / "out"
    )
    [numbers] = outcome.results["benchmark"].values()
    for subset in OVDEVAL:
        mine = {
            name.rpartition("/")[2]: value
            for name, value in numbers.items()
            if name.startswith(f"ovdeval/{subset}/")
        }
        same_numbers(
            mine,
            found.official["numbers"][subset],
            {"NMS-AP": "AP", "NMS-AP50": "AP50", "NMS-AP75": "AP75"},
        )
        same_file(
            written(outcome, f"ovdeval_results.ovdeval_{subset}.json"),
            found.official["results"][subset],
        )
    assert outcome.line.value == pytest.approx(
        sum(found.official["numbers"][subset]["AP"] for subset in OVDEVAL) / len(OVDEVAL), abs=1e-6
    )
