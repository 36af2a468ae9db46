"""COCO and LVIS files as their own programs read them: which categories an image is judged by, which boxes are its truth.

LVIS' program (lvis-api) was run on assets/fixtures/official/lvis_truth.json (assets.make_official_goldens); pycocotools runs here.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from assets.make_official_goldens import FOLDER, load
from assets.official_image_inputs import LVIS_SIZE
from mmrl.tasks.readers.coco import read_coco
from mmrl.tasks.readers.common import Readout
from mmrl.tasks.readers.lvis import read_lvis


@pytest.fixture(scope="module")
def lvis(tmp_path_factory: pytest.TempPathFactory) -> Readout:
    folder = tmp_path_factory.mktemp("lvis")
    for image in load("lvis_truth")[0]["images"]:
        (folder / "val2017").mkdir(exist_ok=True)
        Image.new("RGB", LVIS_SIZE).save(folder / "val2017" / f"{image['id']:012d}.jpg")
    return read_lvis(FOLDER / "lvis_truth.json", image_root=str(folder))


def corners(x: float, y: float, w: float, h: float) -> list[float]:
    return [x, y, x + w, y + h]


def test_an_lvis_sample_asks_for_what_its_program_counts_in_that_image(lvis: Readout) -> None:
    """It does not count a category of which an image has nothing but boxes without width or height, and is not asked here."""
    given, golden = load("lvis_truth")
    flat = {
        (a["image_id"], a["category_id"]) for a in given["annotations"] if min(a["bbox"][2:]) == 0
    }
    samples = {str(sample.params["image_id"]): sample for sample in lvis}
    assert sorted(samples) == sorted(golden["counted"]) and dict(lvis.skipped) == {
        "no category whose truth is known": 1
    }
    assert len(flat) == 1 and not lvis.rejected
    for image, sample in samples.items():
        assert sample.params["category_ids"] == golden["counted"][image]
        assert not flat & {(int(image), category) for category in sample.params["category_ids"]}
        truths = {int(category) for category in golden["truths"].get(image, {})}
        assert set(sample.params["neg_category_ids"]) == {*sample.params["category_ids"]} - truths
        assert sample.params["not_exhaustive_category_ids"] == golden["not_exhaustive"][image]


def test_the_boxes_of_each_category_are_those_of_lvis_program_in_its_order(lvis: Readout) -> None:
    golden = load("lvis_truth")[1]
    names = {
        int(number): name.replace("_", " ") for number, (name, _) in golden["categories"].items()
    }
    seen = 0
    for sample in lvis:
        truths = golden["truths"].get(str(sample.params["image_id"]), {})
        assert sample.params["categories"] == [
            names[category] for category in sample.params["category_ids"]
        ]
        for category in sample.params["category_ids"]:
            mine = [entry["bbox"] for entry in sample.answer if entry["label"] == names[category]]
            assert mine == [corners(*box) for _, *box in truths.get(str(category), [])]
            seen += len(mine)
    assert (
        seen
        == sum(len(rows) for truths in golden["truths"].values() for rows in truths.values())
        > 40
    )
    assert lvis.notes["annotation left out: a box without width or height"] == 2
    assert lvis.notes["category taken as present: annotated, and listed as absent"] == 1
    assert lvis.notes["neg_category_ids of a category that the file does not have, left out"] == 1


def test_frequencies_are_the_groups_of_lvis_program(lvis: Readout) -> None:
    groups = load("lvis_truth")[1]["frequencies"]
    found = {
        category: often
        for sample in lvis
        for category, often in zip(
            sample.params["category_ids"], sample.params["frequency"], strict=True
        )
    }
    assert found == {category: often for often, group in groups.items() for category in group}


def instances(folder: Path, seed: int) -> Path:
    """12 pictures with objects, crowds (of a category that is there, and of one that is not) and boxes without height."""
    rng = random.Random(seed)
    images, annotations = list[dict[str, Any]](), list[dict[str, Any]]()
    for number in rng.sample(range(1, 500), 12):
        Image.new("RGB", (160, 120)).save(folder / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": 160, "height": 120})
        for _ in range(rng.choice((0, 1, 3, 6))):
            w, h = (
                rng.randint(10, 800) / 10,
                rng.choice((0, rng.randint(10, 600) / 10, rng.randint(10, 600) / 10)),
            )
            box = [round(rng.uniform(0, 160 - w), 2), round(rng.uniform(0, 120 - h), 2), w, h]
            annotations.append(
                {
                    "id": 5000 - len(annotations),
                    "image_id": number,
                    "category_id": rng.choice((1, 3, 90)),
                    "bbox": box,
                    "area": round(0.6 * w * h, 2),
                    "iscrowd": int(rng.random() < 0.25),
                    "segmentation": [],
                }
            )
    names = {1: "cup", 3: "dog", 44: "kite", 90: "toothbrush"}
    (folder / "instances.json").write_text(
        json.dumps(
            {
                "images": images,
                "annotations": annotations,
                "categories": [{"id": number, "name": name} for number, name in names.items()],
            }
        )
    )
    return folder / "instances.json"


@pytest.mark.parametrize("seed", range(4))
def test_objects_and_crowds_are_those_of_pycocotools(tmp_path: Path, seed: int) -> None:
    """COCOeval ignores what is a crowd; what it counts is the answer, but for boxes without height, which are noted as left out."""
    path = instances(tmp_path, seed)
    official = COCO(str(path))
    every = [
        {"image_id": i, "category_id": c, "bbox": [1.0, 1.0, 5.0, 5.0], "score": 0.5}
        for i in official.imgs
        for c in official.cats
    ]
    evaluation = COCOeval(official, official.loadRes(every), "bbox")
    evaluation._prepare()
    readout, left_out = read_coco(path), 0
    assert [s.params["image_id"] for s in readout] == list(official.imgs)
    for sample in readout:
        image = sample.params["image_id"]
        assert sample.params["category_ids"] == list(official.cats)
        assert sample.params["categories"] == [official.cats[c]["name"] for c in official.cats]
        for category in official.cats:
            truths = evaluation._gts[image, category]
            whole = [t for t in truths if t["bbox"][3] > 0]
            left_out += len(truths) - len(whole)
            label = official.cats[category]["name"]
            mine = [entry["bbox"] for entry in sample.answer if entry["label"] == label]
            assert mine == [corners(*t["bbox"]) for t in whole if not t["ignore"]]
            crowd = [
                entry["bbox"] for entry in sample.params.get("crowd", []) if entry["label"] == label
            ]
            assert crowd == [corners(*t["bbox"]) for t in whole if t["ignore"]]
        areas = {
            tuple(corners(*t["bbox"])): t["area"]
            for t in official.loadAnns(official.getAnnIds(imgIds=[image]))
        }
        assert np.allclose(
            sample.params["areas"], [areas[tuple(entry["bbox"])] for entry in sample.answer]
        )
    assert (
        left_out and readout.notes["annotation left out: a box without width or height"] == left_out
    )
    asked = read_coco(path, ask="each", negatives=9)
    for sample in asked:  # a category that is there as a crowd only, or without height only, is neither there nor absent
        ids = official.getAnnIds(
            imgIds=[sample.params["image_id"]], catIds=sample.params["category_ids"]
        )
        assert bool(sample.answer) == bool(ids)
