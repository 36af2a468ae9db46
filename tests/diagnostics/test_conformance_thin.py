"""Boxes thinner than the grid that answers are written on: right data, said and counted, unless nearly all are so.

COCO has annotations of a fraction of a pixel. Which of them the grid cannot spell is asked of pycocotools' IoU, not of mmrl's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pycocotools import mask

from mmrl.coords import CoordFrame
from mmrl.diagnostics.conformance import Conformance, check_task
from mmrl.tasks.boxes import rounded_box
from mmrl.types import ImageSize
from tests.kits.engine_kit import tiny_folder

pytestmark = pytest.mark.slow  # each starts a reward worker
SIZE = (448, 336)
THIN, LOW, PLAIN = [20.3, 30, 0.1, 120], [40, 50.1, 200, 0.3], [100.4, 60.2, 90.3, 80.9]


def write(folder: Path, boxes: Sequence[list[float]]) -> Path:
    for number in range(len(boxes)):
        Image.new("RGB", SIZE).save(folder / f"{number}.png")
    (folder / "instances.json").write_text(
        json.dumps(
            {
                "images": [
                    {"id": n, "file_name": f"{n}.png", "width": SIZE[0], "height": SIZE[1]}
                    for n in range(len(boxes))
                ],
                "annotations": [
                    {
                        "id": n,
                        "image_id": n,
                        "category_id": 1,
                        "bbox": box,
                        "area": box[2] * box[3],
                        "iscrowd": 0,
                    }
                    for n, box in enumerate(boxes)
                ],
                "categories": [{"id": 1, "name": "rope"}],
            }
        )
    )
    return folder / "instances.json"


def failed(result: Conformance) -> list[str]:
    return [f"{f.check}: {' '.join(f.problems)}" for f in result.findings if not f.ok]


def spelled(box: list[float], frame: CoordFrame) -> float:
    """pycocotools' IoU of a box [x, y, w, h] with the best one that an answer in `frame` can spell."""
    x1, y1, x2, y2 = rounded_box(
        [box[0], box[1], box[0] + box[2], box[1] + box[3]], frame, ImageSize(SIZE, SIZE)
    )
    return float(mask.iou([[x1, y1, x2 - x1, y2 - y1]], [box], [0])[0, 0])


def thin_notes(result: Conformance) -> dict[str, int]:
    return {
        words: count
        for words, count in result.notes.items()
        if words.startswith("truth too thin for the grid of ")
    }


def test_thin_boxes_among_others_are_a_note_with_their_number(tmp_path: Path) -> None:
    boxes = [PLAIN, THIN, [10, 10, 60, 60], LOW, [200.7, 100.2, 30, 30]]
    result = check_task(
        "detection", write(tmp_path, boxes), model=tiny_folder(), out=tmp_path / "out"
    )
    assert result.ok, failed(result)
    ((words, count),) = thin_notes(result).items()
    told = words.removeprefix("truth too thin for the grid of ").partition(":")[0].split(", ")
    assert (
        count == sum(any(spelled(box, frame) < 0.5 for frame in CoordFrame) for box in boxes) == 2
    )
    assert set(told) == {
        frame.value for frame in CoordFrame if any(spelled(box, frame) < 0.5 for box in boxes)
    }
    assert min(result.lowest_gold.values()) < 0.5, "what such a truth can earn is still shown"


def test_without_thin_boxes_there_is_no_note(tmp_path: Path) -> None:
    result = check_task(
        "detection",
        write(tmp_path, [PLAIN, [10, 10, 60, 60]]),
        model=tiny_folder(),
        out=tmp_path / "out",
    )
    assert result.ok and not thin_notes(result) and min(result.lowest_gold.values()) > 0.5


def test_data_of_nothing_but_thin_boxes_is_doubted(tmp_path: Path) -> None:
    """Shares of the picture that are declared to be pixels are boxes of less than a pixel, every one of them."""
    result = check_task(
        "detection", write(tmp_path, [THIN, LOW, PLAIN]), model=tiny_folder(), out=tmp_path / "out"
    )
    assert len(failed(result)) == 1 and "gold scores 1" in failed(result)[0]
    assert (
        "of 2 of 3 samples are thinner than the grid" in failed(result)[0]
        and "declared right?" in failed(result)[0]
    )


def test_a_threshold_out_of_reach_is_no_thin_box(tmp_path: Path) -> None:
    params = {
        "mode": "static",
        "accuracy": {"threshold": 0.999},
        "reachable": False,
        "reader": {"types": {"detection": "grounding"}},
    }
    result = check_task(
        "grounding",
        write(tmp_path, [PLAIN, [100.4, 60.2, 30.3, 40.9]]),
        model=tiny_folder(),
        out=tmp_path / "out",
        params=params,
    )
    assert any("gold scores 1" in line for line in failed(result)) and not thin_notes(result)


@pytest.mark.parametrize("preset", [None, "gui_g2"])
def test_a_thin_element_is_clicked_with_decimals_and_boxed_with_a_note(
    tmp_path: Path, preset: str | None
) -> None:
    element = [100.6, 50, 100.8, 90]
    Image.new("RGB", SIZE).save(tmp_path / "a.png")
    rows: list[dict[str, Any]] = [
        {"id": str(n), "image": "a.png", "question": "the line", "answer": box}
        for n, box in enumerate((element, [10, 20, 60, 80], [200, 20, 260, 80]))
    ]
    (tmp_path / "gui.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = check_task(
        "gui_grounding",
        tmp_path / "gui.jsonl",
        model=tiny_folder(),
        out=tmp_path / "out",
        params={"preset": preset},
    )
    assert result.ok, failed(result)
    assert list(thin_notes(result).values()) == ([1] if preset else [])
