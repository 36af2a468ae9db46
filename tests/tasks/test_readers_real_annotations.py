"""COCO-like releases as they are: what is no object is left out of its picture and counted, never the picture or the run.

pycocotools reads the same files beside us. The zero-height annotation is the one of instances_train2017.json (cocoapi #355);
which boxes count at all is mmdetection's rule (mmdet/datasets/coco.py: a box must share some area with its picture).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pycocotools.coco import COCO

from mmrl.config import DataSource
from mmrl.data.sources import load_sources, note_lines, write_skipped
from mmrl.errors import ConfigError, DataError
from mmrl.rewards.objects import MAX_OBJECTS
from mmrl.tasks.readers.coco import read_coco
from mmrl.tasks.readers.lvis import read_lvis

OF_TRAIN2017 = {
    "segmentation": [[296.65, 388.33, 296.65, 388.33, 297.68, 388.33, 297.68, 388.33]],
    "area": 0.0,
    "iscrowd": 0,
    "image_id": 200365,
    "bbox": [296.65, 388.33, 1.03, 0.0],
    "category_id": 58,
    "id": 918,
}
CATEGORIES = [
    {"id": 58, "name": "hot dog", "frequency": "f"},
    {"id": 62, "name": "chair", "frequency": "c"},
    {"id": 90, "name": "toothbrush", "frequency": "r"},
]
SIZE = (640, 480)


def annotation(
    number: int, box: list[float], category: int = 62, image: int = 200365, **more: Any
) -> dict[str, Any]:
    area = abs(box[2] * box[3])
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "bbox": box,
        "area": area,
        "iscrowd": 0,
        **more,
    }


def write(
    folder: Path,
    annotations: list[dict[str, Any]],
    name: str = "instances_train2017.json",
    **image: Any,
) -> Path:
    images = []
    for number in sorted({200365, *(entry["image_id"] for entry in annotations)}):
        images.append(
            {
                "id": number,
                "file_name": f"{number:012}.jpg",
                "width": SIZE[0],
                "height": SIZE[1],
                **image,
            }
        )
        if not (folder / f"{number:012}.jpg").exists():
            Image.new("RGB", SIZE, (90, 120, 150)).save(folder / f"{number:012}.jpg")
    (folder / name).write_text(
        json.dumps({"images": images, "annotations": annotations, "categories": CATEGORIES})
    )
    return folder / name


def shares_area(entry: dict[str, Any]) -> bool:
    """mmdetection's rule, without its minimum of one pixel per side, which pycocotools does not know."""
    x, y, w, h = entry["bbox"]
    return w > 0 and h > 0 and min(x + w, SIZE[0]) > max(x, 0) and min(y + h, SIZE[1]) > max(y, 0)


def test_the_zero_height_box_of_train2017_costs_itself_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path,
        [OF_TRAIN2017, annotation(1, [10, 20, 100, 50], 58), annotation(2, [200, 20.5, 30, 40])],
    )
    (sample,) = read_coco(path).samples
    official = COCO(str(path))
    kept = [
        entry
        for entry in official.loadAnns(official.getAnnIds(imgIds=[200365]))
        if shares_area(entry)
    ]
    assert len(kept) == 2 and len(sample.answer) == 2
    for ours, theirs in zip(sample.answer, kept, strict=True):
        x, y, w, h = theirs["bbox"]
        assert (
            ours["bbox"] == [x, y, x + w, y + h]
            and ours["label"] == official.cats[theirs["category_id"]]["name"]
        )
    assert sample.params["adjusted"] == ["annotation left out: a box without width or height"]


def test_it_is_counted_in_the_record_of_the_run_and_said_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        [
            OF_TRAIN2017,
            annotation(1, [10, 20, 100, 50], 58),
            annotation(2, [0, 0, 9, 9], image=7),
            annotation(3, [600, 400, 100, 20], image=7),
            annotation(4, [-50, 20, 40, 9], image=7),
        ],
    )
    sources = load_sources(
        [DataSource(task="detection", path=str(tmp_path / "instances_train2017.json"))]
    )
    assert len(sources[0].samples) == 2 and not sources[0].rejected
    assert write_skipped(sources, tmp_path / "skipped.json") == {}
    (record,) = json.loads((tmp_path / "skipped.json").read_text())
    assert record["notes"] == {
        "annotation left out: a box without width or height": 1,
        "annotation left out: a box outside the picture": 1,
        "annotation cut at the edge of its picture": 1,
    }
    (line,) = note_lines(sources)
    assert line.startswith(f"{tmp_path / 'instances_train2017.json'}: 1 x annotation ")


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ([600, 400, 100, 20], [600, 400, 640, 420]),
        ([-30, -20, 60, 50], [0, 0, 30, 30]),
        ([-5, 10, 700, 20], [0, 10, 640, 30]),
        ([-0.5, 10, 20, 20], [-0.5, 10, 19.5, 30]),
        ([630, 470, 11, 11], [630, 470, 641, 481]),  # up to a pixel is rounding, and stays
        ([640, 10, 20, 20], None),
        ([-20, 10, 20, 20], None),
        ([10, 20, -5, 40], None),
        ([700, 500, 20, 20], None),
    ],
)
def test_boxes_across_the_edge_are_cut_and_those_beyond_it_left_out(
    tmp_path: Path, box: list[float], expected: list[float] | None
) -> None:
    path = write(tmp_path, [annotation(1, box), annotation(2, [0, 0, 50, 50], 58)])
    (sample,) = read_coco(path).samples
    assert [o["bbox"] for o in sample.answer if o["label"] == "chair"] == (
        [expected] if expected else []
    )
    changed = expected != [box[0], box[1], box[0] + box[2], box[1] + box[3]]
    assert len(sample.params.get("adjusted", [])) == changed
    assert (expected is not None) == shares_area({"bbox": box})


def test_without_a_stated_size_a_box_beyond_the_picture_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, [annotation(1, [600, 400, 100, 20])])
    content = json.loads(path.read_text())
    del content["images"][0]["height"]
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"annotations\[0\] \(id 1\): .*inside the picture"):
        read_coco(path)


def test_a_category_of_left_out_annotations_is_no_negative(tmp_path: Path) -> None:
    """Something may be there that the file does not say: neither a question with an answer nor one with []."""
    path = write(tmp_path, [OF_TRAIN2017, annotation(1, [10, 20, 100, 50])])
    (sample,) = read_coco(path, ask="present", negatives=5).samples
    assert sample.params["categories"] == ["chair", "toothbrush"]
    assert [s.question for s in read_coco(path, ask="each", negatives=5).samples] == [
        "chair",
        "toothbrush",
    ]


def lvis(folder: Path, annotations: list[dict[str, Any]], **image: Any) -> Path:
    lists = {"neg_category_ids": [], "not_exhaustive_category_ids": [], **image}
    return write(folder, annotations, "lvis_v1_train.json", **lists)


def test_more_objects_than_an_answer_may_hold_cost_their_category_only(tmp_path: Path) -> None:
    crowdy = [annotation(n, [n, n / 2, 20, 20], 62) for n in range(1, 251)]
    few = [annotation(1000 + n, [9 * n, 30, 20, 20], 58) for n in range(3)]
    path = lvis(tmp_path, [*crowdy, *few], neg_category_ids=[90])
    (sample,) = read_lvis(path).samples
    assert sample.params["categories"] == ["hot dog", "toothbrush"] and len(sample.answer) == 3
    assert (
        sample.params["frequency"] == ["f", "r"]
        and "category not asked for" in sample.params["adjusted"][0]
    )
    each = read_lvis(path, ask="each")
    assert [s.question for s in each.samples] == ["hot dog", "toothbrush"]
    (whole,) = read_coco(write(tmp_path, [*crowdy[: MAX_OBJECTS - 3], *few])).samples
    assert len(whole.answer) == MAX_OBJECTS and "adjusted" not in whole.params
    alone = read_lvis(lvis(tmp_path, crowdy))
    assert not alone.samples and dict(alone.skipped) == {
        f"every category has more than {MAX_OBJECTS} objects": 1
    }


def test_an_lvis_category_both_annotated_and_listed_as_absent_is_present(tmp_path: Path) -> None:
    path = lvis(tmp_path, [annotation(1, [10, 20, 30, 40])], neg_category_ids=[62, 58, 77])
    readout = read_lvis(path)
    (sample,) = readout.samples
    assert sample.params["categories"] == ["hot dog", "chair"] and [
        o["label"] for o in sample.answer
    ] == ["chair"]
    assert sample.params["neg_category_ids"] == [58]
    assert sum(readout.notes.values()) == 2 and any(
        "annotated, and listed as absent" in note for note in readout.notes
    )


def test_objects365_pictures_are_found_in_their_patch_and_the_three_without_one_counted(
    tmp_path: Path,
) -> None:
    both = [annotation(n, [10, 20, 30, 40], 58, n) for n in (1, 2)]
    path = write(tmp_path, both, "zhiyuan_objv2_train.json")
    content = json.loads(path.read_text())
    (tmp_path / "patch8").mkdir()
    (tmp_path / f"{1:012}.jpg").rename(tmp_path / "patch8" / "objects365_v1_00420917.jpg")
    content["images"][0]["file_name"] = "images/v1/patch8/objects365_v1_00420917.jpg"
    content["images"][1]["file_name"] = "images/v2/patch16/objects365_v2_00908726.jpg"
    path.write_text(json.dumps(content))
    readout = read_coco(path, image_root=str(tmp_path))
    assert [Path(s.images[0]).parent.name for s in readout] == ["patch8", tmp_path.name]
    assert dict(readout.skipped) == {"picture that the release of Objects365 does not have": 1}


def test_coco_becomes_grounding_where_one_object_answers_the_question(tmp_path: Path) -> None:
    crowd = annotation(5, [300, 300, 90, 90], 90, iscrowd=1)
    path = write(
        tmp_path,
        [
            annotation(1, [10, 20, 30, 40], 58),
            annotation(2, [100, 20, 30, 40]),
            annotation(3, [200, 20, 30, 40]),
            annotation(4, [10, 200, 30, 40], 90),
            crowd,
            annotation(6, [1, 2, 30, 40], 62, 8),
            {**OF_TRAIN2017, "image_id": 8},
            annotation(7, [9, 9, 9, 9], 58, 8),
            annotation(8, [9, 9, 0, 9], 62, 9),
        ],
    )
    with pytest.raises(
        ConfigError,
        match=r"holds task detection, found task grounding.*types=\{'detection': 'grounding'\}",
    ):
        read_coco(path, task="grounding")
    readout = read_coco(path, task="grounding", types={"detection": "grounding"})
    official = COCO(str(path))
    assert {(s.params["image_id"], s.question): s.answer for s in readout} == {
        (200365, "hot dog"): [10, 20, 40, 60],
        (8, "chair"): [1, 2, 31, 42],
    }
    for sample in readout:  # by pycocotools the one object of its category, and no crowd of it
        ids = official.getAnnIds(
            imgIds=[sample.params["image_id"]], catIds=[sample.params["category_id"]]
        )
        assert len(ids) == 1 and official.anns[ids[0]]["iscrowd"] == 0
    assert dict(readout.skipped) == {
        "category of several objects or a crowd in its picture": 3,
        "picture without a category of exactly one object": 1,
    }
    two = [annotation(1, [10, 20, 30, 40], 58), annotation(2, [9, 9, 9, 9])]
    half_known = lvis(tmp_path, two, not_exhaustive_category_ids=[62])
    assert [
        s.question
        for s in read_lvis(half_known, task="grounding", types={"detection": "grounding"})
    ] == ["hot dog"]
