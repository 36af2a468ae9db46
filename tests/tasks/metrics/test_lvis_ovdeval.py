"""LVIS against an independent reading of its federated rules; NMS-AP against its definition, with its tie rule."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assets.make_detection_fixtures import make_lvis, make_ovdeval
from mmrl.errors import ConfigError, DataError
from mmrl.rewards.iou import box_iou
from mmrl.tasks.metrics import detection_benchmark
from mmrl.tasks.metrics.boxes import gather, order_free
from mmrl.tasks.metrics.lvis import MAX_DETECTIONS, lvis_ap, lvis_benchmark
from mmrl.tasks.metrics.ovdeval import TIE_RULE, nms_by_truth, ovdeval_benchmark
from mmrl.tasks.readers.lvis import read_lvis
from mmrl.tasks.readers.ovdeval import read_ovdeval
from mmrl.types import Sample, Score

NAMES = ["person", "dog", "kite", "cup"]
OFTEN = ["f", "c", "r", "r"]


def _plain_check(task: str, value: Any, frame: Any, sizes: Any, params: Any) -> Any:
    return value


def answered(
    sample: Sample, found: Sequence[tuple[str, Sequence[float]]] | None = None
) -> tuple[Sample, Score]:
    """The sample with the predictions `found`, by default its own truth."""
    if found is None:
        found = [(entry["label"], entry["bbox"]) for entry in sample.answer]
    return sample, Score(
        1.0,
        True,
        detail={"pred_boxes": [list(b) for _, b in found], "pred_labels": [n for n, _ in found]},
    )


def federated(seed: int, ask_all: bool = True, count: int = 12) -> list[tuple[Sample, Score]]:
    rng = random.Random(seed)
    pairs = []
    for image in range(1, count + 1):
        there = rng.sample(range(4), rng.randrange(0, 3))
        absent = [i for i in range(4) if i not in there and rng.random() < 0.5]
        answer, found = [], []
        for category in there:
            for _ in range(rng.randrange(1, 4)):
                x, y, w, h = (rng.uniform(5, 200) for _ in range(4))
                answer.append({"bbox": [x, y, x + w, y + h], "label": NAMES[category]})
                if rng.random() < 0.8:
                    shift = rng.gauss(0, 0.15) * w
                    found.append((NAMES[category], [x + shift, y, x + w + shift, y + h]))
        for _ in range(rng.randrange(0, 5)):
            x, y, w, h = (rng.uniform(5, 200) for _ in range(4))
            found.append((rng.choice(NAMES), [x, y, x + w, y + h]))
        rng.shuffle(found)
        sample = Sample(
            str(image),
            "detection",
            "lvis",
            "q",
            answer,
            params={
                "image_id": image,
                "categories": NAMES,
                "category_ids": [1, 2, 3, 4],
                "frequency": OFTEN,
                "neg_category_ids": [i + 1 for i in absent],
                "not_exhaustive_category_ids": [i + 1 for i in there if rng.random() < 0.4],
            },
        )
        pairs.append(answered(sample, found))
    return pairs


def _image_marks(
    truth: list[Mapping[str, Any]], found: list[Mapping[str, Any]], threshold: float, partial: bool
) -> list[bool | None]:
    """Per detection: right, wrong or (None) ignored. Each takes the free object with the highest IoU >= threshold."""

    def corners(entry: Mapping[str, Any]) -> tuple[float, float, float, float]:
        x, y, w, h = entry["bbox"]
        return x, y, x + w, y + h

    free, marks = list(range(len(truth))), []
    for detection in found:
        best = max(free, key=lambda j: box_iou(corners(truth[j]), corners(detection)), default=None)
        if best is not None and box_iou(corners(truth[best]), corners(detection)) >= min(
            threshold, 1 - 1e-10
        ):
            free.remove(best)
            marks.append(True)
        else:
            marks.append(None if partial else False)
    return marks


def reference_lvis(
    truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """AP, AP50, AR and AP by frequency straight from LVIS's published rules, for scores that are all equal."""
    precision: dict[int, list[float]] = {}
    recall: dict[int, list[float]] = {}
    for category in truth["categories"]:
        number = category["id"]
        for threshold in np.linspace(0.5, 0.95, 10):
            marks: list[bool | None] = []
            objects = 0
            for image in truth["images"]:
                gold = [
                    a
                    for a in truth["annotations"]
                    if (a["image_id"], a["category_id"]) == (image["id"], number)
                ]
                objects += len(gold)
                if not gold and number not in image["neg_category_ids"]:
                    continue
                found = [
                    r for r in results if (r["image_id"], r["category_id"]) == (image["id"], number)
                ]
                marks += _image_marks(
                    gold, found, threshold, number in image["not_exhaustive_category_ids"]
                )
            if not objects:
                continue
            counted = [mark for mark in marks if mark is not None]
            hits = np.cumsum(counted)
            shares = hits / (np.arange(len(counted)) + 1)
            reached = hits / objects
            best = [
                max((s for s, r in zip(shares, reached, strict=True) if r >= level), default=0.0)
                for level in np.linspace(0, 1, 101)
            ]
            precision.setdefault(number, []).append(float(np.mean(best)))
            recall.setdefault(number, []).append(float(reached[-1]) if len(counted) else 0.0)
    groups = {
        f"AP{often}": [
            c["id"] for c in truth["categories"] if c["frequency"] == often and c["id"] in precision
        ]
        for often in "rcf"
    }
    return {
        "AP": float(np.mean(list(precision.values()))),
        "AP50": float(np.mean([p[0] for p in precision.values()])),
        "AR300": float(np.mean(list(recall.values()))),
        **{
            name: float(np.mean([precision[n] for n in numbers]))
            for name, numbers in groups.items()
            if numbers
        },
    }


@pytest.mark.parametrize("seed", range(6))
def test_lvis_numbers_are_those_of_its_published_rules(seed: int, tmp_path: Path) -> None:
    pairs = federated(seed)
    evaluation = gather(pairs)
    expected = reference_lvis(evaluation.truth(), evaluation.results())
    found = lvis_benchmark(pairs, tmp_path)
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert 0.02 < expected["AP"] < 0.98
    assert {
        entry["category_id"] for entry in json.loads((tmp_path / "lvis_results.json").read_text())
    } <= {1, 2, 3, 4}


OFFICIAL = {
    0: {
        "AP": 0.58878444,
        "AP50": 0.8124524,
        "AP75": 0.65052274,
        "APs": 0.8,
        "APm": 0.63842733,
        "APl": 0.47189769,
        "APr": 0.85,
        "APc": 0.21116735,
        "APf": 0.4439704,
        "AR300": 0.67003205,
    },
    1: {
        "AP": 0.27466172,
        "AP50": 0.45742574,
        "AP75": 0.29818482,
        "APm": 0.30527228,
        "APl": 0.40482673,
        "APr": 0.31087459,
        "APc": 0.36039604,
        "APf": 0.11650165,
        "AR300": 0.43303571,
    },
    2: {
        "AP": 0.25932441,
        "AP50": 0.42365237,
        "AP75": 0.2380363,
        "APs": 0.41666667,
        "APm": 0.44492574,
        "APl": 0.20507151,
        "APr": 0.23250825,
        "APc": 0.22722772,
        "APf": 0.34505343,
        "AR300": 0.45916667,
    },
}
"""What LVISEval of the package lvis 0.5.3 gives for gather(federated(seed)).truth() and .results(), 'bbox'."""


@pytest.mark.parametrize("seed", list(OFFICIAL))
def test_lvis_numbers_are_those_of_the_official_package(seed: int) -> None:
    evaluation = gather(federated(seed))
    assert lvis_ap(evaluation.truth(), evaluation.results()) == pytest.approx(
        OFFICIAL[seed], abs=1e-7
    )


def test_the_written_file_scores_the_same_against_the_annotations_as_released(
    tmp_path: Path,
) -> None:
    path = make_lvis(tmp_path)
    pairs = [
        answered(
            s,
            [
                ("person", [22.0, 30.0, 100.0, 200.0]),
                ("dog", [150.0, 150.0, 200.0, 210.0]),
                ("cat", [1, 1, 50, 50]),
                ("traffic light", [58.0, 22.0, 84.0, 80.0]),
            ],
        )
        for s in read_lvis(path, check=_plain_check)
    ]
    numbers = lvis_benchmark(pairs, tmp_path)
    results = json.loads((tmp_path / "lvis_results.json").read_text())
    again = lvis_ap(json.loads(Path(path).read_text()), results)
    assert again == pytest.approx({name: numbers[name] for name in again}) and 0 < again["AP"] < 1


A, B, FAR = [10.0, 10.0, 90.0, 90.0], [100.0, 100.0, 200.0, 200.0], [300.0, 300.0, 350.0, 350.0]


def one(
    answer: Sequence[tuple[str, Sequence[float]]],
    found: Sequence[tuple[str, Sequence[float]]],
    negative: Sequence[int] = (),
    partial: Sequence[int] = (),
    asked: Sequence[str] = NAMES,
) -> tuple[Sample, Score]:
    ids = [NAMES.index(name) + 1 for name in asked]
    sample = Sample(
        "1",
        "detection",
        "lvis",
        "q",
        [{"bbox": list(b), "label": n} for n, b in answer],
        params={
            "image_id": 1,
            "categories": list(asked),
            "category_ids": ids,
            "frequency": [OFTEN[i - 1] for i in ids],
            "neg_category_ids": list(negative),
            "not_exhaustive_category_ids": list(partial),
        },
    )
    return answered(sample, found)


def test_only_categories_with_known_truth_can_be_wrong() -> None:
    truth = [("dog", A)]
    cases = {
        "unknown": one(truth, [("dog", A), ("cup", FAR)]),
        "negative": one(truth, [("dog", A), ("cup", FAR)], negative=[4]),
        "partial": one(truth, [("dog", FAR), ("dog", A)], partial=[2]),
        "whole": one(truth, [("dog", FAR), ("dog", A)]),
        "not asked": one(truth, [("dog", A), ("cup", FAR)], asked=["dog"]),
    }
    precision = {name: order_free(gather([pair]))["precision@0.5"] for name, pair in cases.items()}
    assert precision == {
        "unknown": 1,
        "negative": 0.5,
        "partial": 1,
        "whole": 0.5,
        "not asked": 0.5,
    }
    ap = {
        name: lvis_ap(gather([pair]).truth(), gather([pair]).results())["AP"]
        for name, pair in cases.items()
    }
    assert (
        ap["partial"] == pytest.approx(1)
        and ap["whole"] == pytest.approx(0.5)
        and ap["unknown"] == pytest.approx(1)
    )


def test_the_first_300_boxes_of_a_picture_count() -> None:
    flood = [("dog", FAR)] * (MAX_DETECTIONS - 1)
    inside, outside = (
        gather([one([("dog", A)], [*flood, *extra, ("dog", A)])]) for extra in ([], [("cup", FAR)])
    )
    assert lvis_ap(inside.truth(), inside.results())["AR300"] == 1
    assert lvis_ap(outside.truth(), outside.results())["AR300"] == 0
    assert lvis_ap(inside.truth(), [])["AP"] == 0


def test_a_box_without_area_is_no_false_positive_but_takes_one_of_the_300_places() -> None:
    """lvis-api drops it when it loads the boxes, which is after the limit; so it does with a truth without area."""
    truth = {
        "images": [{"id": 1, "neg_category_ids": [], "not_exhaustive_category_ids": []}],
        "annotations": [
            {
                "id": 1,
                "image_id": 1,
                "category_id": 1,
                "bbox": [0, 0, 10, 10],
                "area": 100,
                "iscrowd": 0,
            }
        ],
        "categories": [{"id": 1, "name": "a", "frequency": "f"}],
    }
    right, line = (
        {"image_id": 1, "category_id": 1, "bbox": [0, 0, 10, height], "score": 1.0}
        for height in (10, 0)
    )
    backwards = {**line, "bbox": [10, 0, -10, 10]}
    assert lvis_ap(truth, [line, backwards, right])["AP"] == 1 and lvis_ap(truth, [line])["AP"] == 0
    assert lvis_ap(truth, [line] * MAX_DETECTIONS + [right])["AP"] == 0
    flat = {
        "id": 2,
        "image_id": 1,
        "category_id": 1,
        "bbox": [50, 50, 10, 0],
        "area": 0,
        "iscrowd": 0,
    }
    assert lvis_ap({**truth, "annotations": [*truth["annotations"], flat]}, [right])["AP"] == 1


def test_categories_without_frequency_are_refused() -> None:
    truth = gather([one([("dog", A)], [])]).truth()
    for category in truth["categories"]:
        category.pop("frequency")
    with pytest.raises(
        DataError,
        match=r"frequency 'r', 'c' or 'f' for LVIS category 'person', found None; read the file",
    ):
        lvis_ap(truth, [])


def test_fixtures_answered_rightly_score_one_through_the_dispatcher(tmp_path: Path) -> None:
    lvis = read_lvis(make_lvis(tmp_path), check=_plain_check).samples
    ovdeval = read_ovdeval(make_ovdeval(tmp_path), check=_plain_check).samples
    numbers = detection_benchmark([answered(s) for s in lvis], tmp_path)
    assert [numbers[k] for k in ("AP", "APr", "APc", "APf", "AR300", "F1@0.5")] == pytest.approx(
        [1] * 6
    )
    # annotation id 0 is matched as well
    numbers = detection_benchmark([answered(s) for s in ovdeval], tmp_path)
    assert [
        numbers[k] for k in ("NMS-AP", "NMS-AP_first", "ovdeval/color/NMS-AP", "AR100", "F1@0.5")
    ] == pytest.approx([1] * 5)
    results = json.loads((tmp_path / "ovdeval_results.ovdeval_color.json").read_text())
    assert {entry["image_id"] for entry in results} == {0, 1} and results[0]["bbox"] == [
        20.5,
        30.25,
        80.0,
        160.0,
    ]
    both = detection_benchmark([answered(s) for s in [*lvis, *ovdeval]], tmp_path)
    assert (
        both["lvis/AP"] == pytest.approx(1)
        and both["ovdeval/NMS-AP"] == pytest.approx(1)
        and "AP" not in both
    )


def _entry(
    image: int, category: int, corners: Sequence[float], score: float = 1.0
) -> dict[str, Any]:
    x1, y1, x2, y2 = corners
    return {
        "image_id": image,
        "category_id": category,
        "bbox": [x1, y1, x2 - x1, y2 - y1],
        "score": score,
    }


def _by_definition(
    results: Sequence[dict[str, Any]], annotations: Sequence[dict[str, Any]], ties: str
) -> list[dict[str, Any]]:
    """Keep a prediction unless some true box has it within IoU > 0.5 beside a better one, and no true box has it as best."""

    def near(result: Mapping[str, Any], annotation: Mapping[str, Any]) -> bool:
        (x, y, w, h), (a, b, c, d) = result["bbox"], annotation["bbox"]
        return (
            result["image_id"] == annotation["image_id"]
            and box_iou((x, y, x + w, y + h), (a, b, a + c, b + d)) > 0.5
        )

    def better(i: int, j: int) -> bool:
        if results[i]["score"] != results[j]["score"]:
            return bool(results[i]["score"] > results[j]["score"])
        return i > j if ties == "last" else i < j

    kept = []
    for i, result in enumerate(results):
        verdicts = [
            not any(near(other, annotation) and better(j, i) for j, other in enumerate(results))
            for annotation in annotations
            if near(result, annotation)
        ]
        if not verdicts or any(verdicts):
            kept.append(result)
    return kept


@pytest.mark.parametrize("ties", ["last", "first"])
@pytest.mark.parametrize("seed", range(15))
def test_nms_by_truth_is_its_definition(seed: int, ties: str) -> None:
    rng = random.Random(seed)

    def box() -> list[float]:
        x, y = rng.randrange(6), rng.randrange(6)
        return [x, y, x + rng.randrange(2, 6), y + rng.randrange(2, 6)]

    annotations = [_entry(rng.randrange(2), 1, box()) for _ in range(4)]
    results = [
        _entry(rng.randrange(3), rng.randrange(3), box(), rng.choice([0.5, 1.0])) for _ in range(14)
    ]
    kept = nms_by_truth(results, annotations, ties=ties)
    assert kept == _by_definition(results, annotations, ties)
    assert nms_by_truth(results, [], ties=ties) == results


def test_naming_every_label_is_rewarded_by_ap_but_not_by_nms_ap(tmp_path: Path) -> None:
    labels = ["red car", "blue car"]
    params = {"categories": labels, "category_ids": [0, 1], "neg_text": []}
    samples = [
        Sample(
            str(i),
            "detection",
            "ovdeval/color",
            "q",
            [{"bbox": A, "label": labels[i % 2]}],
            params={**params, "image_id": i},
        )
        for i in range(6)
    ]
    greedy = [answered(s, [("red car", A), ("blue car", A)]) for s in samples]
    numbers = ovdeval_benchmark(greedy, tmp_path)
    assert numbers["AR100"] == 1 and numbers["precision@0.5"] == 0.5
    # "blue car" stays everywhere: half right there, all red cars lost
    assert numbers["NMS-AP"] == pytest.approx(0.25)
    assert numbers["NMS-AP_first"] < numbers["AP"] and numbers["AP"] > 2 * numbers["NMS-AP"]
    honest = ovdeval_benchmark([answered(s) for s in samples], tmp_path)
    assert honest["NMS-AP"] == pytest.approx(1)
    assert "last emitted" in TIE_RULE
    with pytest.raises(ConfigError, match="'last' or 'first', found 'best'"):
        nms_by_truth([], [], ties="best")


def test_the_tie_rule_decides_which_of_two_labels_stays(tmp_path: Path) -> None:
    sample = Sample(
        "1",
        "detection",
        "ovdeval/color",
        "q",
        [{"bbox": A, "label": "red car"}],
        params={
            "categories": ["red car", "blue car"],
            "category_ids": [0, 1],
            "image_id": 0,
            "neg_text": ["blue car"],
        },
    )
    right_last = ovdeval_benchmark([answered(sample, [("blue car", A), ("red car", A)])], tmp_path)
    right_first = ovdeval_benchmark([answered(sample, [("red car", A), ("blue car", A)])], tmp_path)
    assert (right_last["NMS-AP"], right_last["NMS-AP_first"]) == pytest.approx((1, 0))
    assert (right_first["NMS-AP"], right_first["NMS-AP_first"]) == pytest.approx((0, 1))
    assert right_last["F1@0.5"] == right_first["F1@0.5"]
    silent = ovdeval_benchmark([answered(sample, [])], tmp_path)
    assert silent["NMS-AP"] == silent["AP"] == silent["F1@0.5"] == 0
    assert np.isfinite(list(silent.values())).all()
