"""COCO numbers: equal to both scorers, declared ties, order-free numbers against brute force, nothing lost or raised."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assets.make_detection_fixtures import make_coco
from mmrl.errors import DataError
from mmrl.rewards.iou import box_iou
from mmrl.tasks.metrics import detection_benchmark
from mmrl.tasks.metrics.boxes import gather, label_key, order_free
from mmrl.tasks.metrics.coco import TIE_RULE, coco_ap, coco_benchmark
from mmrl.tasks.readers.coco import read_coco
from mmrl.types import Sample, Score

NAMES = ["person", "dog", "traffic light"]
IDS = [1, 18, 10]
Box = tuple[float, float, float, float]
Labelled = tuple[str, Sequence[Any]]


def pair(
    image_id: int | None,
    truth: Sequence[Labelled],
    found: Sequence[Labelled] | None,
    *,
    source: str = "val",
    categories: Sequence[str] = NAMES,
    name: str = "",
    **params: Any,
) -> tuple[Sample, Score]:
    """A sample and its score; `found` None is a failed completion, which has no detail at all."""
    answer = [{"bbox": list(box), "label": label} for label, box in truth]
    params = {
        "categories": list(categories),
        "category_ids": [IDS[NAMES.index(c)] for c in categories],
        **params,
    }
    if image_id is not None:
        params["image_id"] = image_id
    sample = Sample(
        name or f"{source}-{image_id}-{'-'.join(categories)}",
        "detection",
        source,
        "q",
        answer,
        ("a.png",),
        params=params,
    )
    if found is None:
        return sample, Score.failure("no_answer")
    return sample, Score(
        1.0,
        True,
        detail={
            "pred_boxes": [list(box) for _, box in found],
            "pred_labels": [n for n, _ in found],
        },
    )


def random_pairs(seed: int, count: int = 30, crowds: bool = True) -> list[tuple[Sample, Score]]:
    """Pictures from easy to hard, with misses, extra boxes, wrong labels, shifted boxes, crowds and mask areas."""
    rng = random.Random(seed)
    pairs = []
    for image in range(count):
        truth: list[Labelled] = []
        found: list[Labelled] = []
        for _ in range(rng.randrange(0, 6)):
            x, y, w, h = (
                rng.uniform(0, 300),
                rng.uniform(0, 300),
                rng.uniform(8, 200),
                rng.uniform(8, 200),
            )
            label = rng.choice(NAMES)
            truth.append((label, (x, y, x + w, y + h)))
            if rng.random() < 0.8:
                noise = 0.3 * image / count
                moved = [
                    v + rng.gauss(0, noise) * (w, h)[i % 2]
                    for i, v in enumerate((x, y, x + w, y + h))
                ]
                found.append((label if rng.random() < 0.9 else rng.choice(NAMES), moved))
        for _ in range(rng.randrange(0, 1 + 6 * image // count)):
            x, y = rng.uniform(0, 300), rng.uniform(0, 300)
            found.append(
                (rng.choice(NAMES), (x, y, x + rng.uniform(5, 100), y + rng.uniform(5, 100)))
            )
        rng.shuffle(found)
        crowd = (
            [{"bbox": [0.0, 0.0, 250.0, 250.0], "label": rng.choice(NAMES)}]
            if crowds and rng.random() < 0.3
            else []
        )
        areas = [0.7 * (b[2] - b[0]) * (b[3] - b[1]) for _, b in truth]
        pairs.append(pair(image + 1, truth, found, areas=areas, crowd=crowd))
    return pairs


@pytest.mark.parametrize("seed", range(4))
def test_pycocotools_and_faster_coco_eval_agree_to_four_digits(seed: int) -> None:
    from faster_coco_eval import COCO, COCOeval_faster

    evaluation = gather(random_pairs(seed))
    truth, results = evaluation.truth(), evaluation.results()
    ours = coco_ap(truth, results)
    gold = COCO(json.loads(json.dumps(truth)))
    other = COCOeval_faster(gold, gold.loadRes(json.loads(json.dumps(results))), "bbox")
    other.run()
    names = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
    assert ours == pytest.approx(
        {n: float(v) for n, v in zip(names, other.stats, strict=True)}, abs=1e-4
    )
    assert 0.05 < ours["AP"] < 0.95  # a case that could tell two scorers apart


def test_the_order_of_pictures_moves_constant_score_ap_and_nothing_else(tmp_path: Path) -> None:
    pairs = random_pairs(11, crowds=False)
    numbers = []
    # easy pictures first, hard pictures first
    for ids in (list(range(1, 31)), list(range(30, 0, -1))):
        renumbered = [
            (
                Sample(
                    s.id,
                    s.task,
                    s.source,
                    s.question,
                    s.answer,
                    s.images,
                    params={**s.params, "image_id": i},
                ),
                score,
            )
            for (s, score), i in zip(pairs, ids, strict=True)
        ]
        numbers.append(coco_benchmark(renumbered, tmp_path))
    easy, hard = numbers
    assert easy["AP"] > hard["AP"] + 0.01
    for name in ("AR100", "precision@0.5", "recall@0.5", "F1@0.5", "unknown_label_rate"):
        assert easy[name] == pytest.approx(hard[name], abs=1e-12)
    assert "ascending image_id" in TIE_RULE


def test_the_order_of_the_file_does_not_matter_with_image_ids_and_breaks_ties_without(
    tmp_path: Path,
) -> None:
    pairs = random_pairs(11, crowds=False)
    assert coco_benchmark(pairs, tmp_path) == coco_benchmark(pairs[::-1], tmp_path)
    bare = [
        (Sample(s.id, s.task, s.source, s.question, s.answer, s.images), score)
        for s, score in pairs
    ]
    assert coco_benchmark(bare, tmp_path)["AP"] > coco_benchmark(bare[::-1], tmp_path)["AP"] + 0.01
    assert (
        coco_benchmark(bare, tmp_path)["F1@0.5"] == coco_benchmark(bare[::-1], tmp_path)["F1@0.5"]
    )


def test_the_written_file_scores_the_same_against_the_annotations_as_released(
    tmp_path: Path,
) -> None:
    """Reader, benchmark and results file together: ids, mask areas and crowds survive."""
    path = make_coco(tmp_path)
    found: list[Labelled] = [
        ("person", (22, 30, 100, 200)),
        ("dog", (150, 150, 200, 210)),
        ("person", (20, 160, 60, 220)),
        ("traffic light", (58, 22, 84, 80)),
        ("person", (235, 45, 300, 180)),
    ]
    detail = {
        "pred_boxes": [list(box) for _, box in found],
        "pred_labels": [name for name, _ in found],
    }
    samples = read_coco(path, check=lambda task, value, frame, sizes, params: value).samples
    numbers = detection_benchmark(
        [(sample, Score(1.0, True, detail=detail)) for sample in samples], tmp_path
    )
    results = json.loads((tmp_path / "coco_results.json").read_text())
    again = coco_ap(json.loads(Path(path).read_text()), results)
    assert len(results) == 15 and 0 < again["AP"] < 1 and "APm" in again
    assert {name: numbers[name] for name in again if name in numbers} == pytest.approx(
        {name: value for name, value in again.items() if name in numbers}
    )


A, B, C = (10.0, 10.0, 60.0, 90.0), (100.0, 20.0, 180.0, 200.0), (5.0, 5.0, 300.0, 300.0)


def test_right_answers_are_one_everywhere_and_the_official_file_holds_them(
    tmp_path: Path, capsys: Any
) -> None:
    pairs = [
        pair(7, [("dog", A), ("person", B)], [("Person ", B), ("DOG", A)]),
        pair(3, [], []),
        pair(5, [("traffic light", C)], [("traffic_light", C)]),
    ]
    numbers = coco_benchmark(pairs, tmp_path)
    assert {
        k: v for k, v in numbers.items() if not k.startswith(("APs", "APm", "APl"))
    } == pytest.approx(
        {
            "AP": 1,
            "AP50": 1,
            "AP75": 1,
            "AR100": 1,
            "precision@0.5": 1,
            "recall@0.5": 1,
            "F1@0.5": 1,
            "unknown_label_rate": 0,
        }
    )
    assert json.loads((tmp_path / "coco_results.json").read_text()) == [
        {"image_id": 5, "category_id": 10, "bbox": [5, 5, 295, 295], "score": 1.0},
        {"image_id": 7, "category_id": 1, "bbox": [100, 20, 80, 180], "score": 1.0},
        {"image_id": 7, "category_id": 18, "bbox": [10, 10, 50, 80], "score": 1.0},
    ]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("found", [[], None])
def test_nothing_predicted_is_zero_and_an_empty_results_file(tmp_path: Path, found: Any) -> None:
    numbers = coco_benchmark([pair(1, [("dog", A)], found), pair(2, [], found)], tmp_path)
    assert {
        numbers[k] for k in ("AP", "AP50", "AP75", "AR100", "precision@0.5", "recall@0.5", "F1@0.5")
    } == {0.0}
    assert json.loads((tmp_path / "coco_results.json").read_text()) == []


def test_a_failed_sample_stays_in_every_denominator(tmp_path: Path) -> None:
    good = pair(1, [("dog", A)], [("dog", A)])
    failed = pair(2, [("dog", B)], None)
    numbers = coco_benchmark([good, failed], tmp_path)
    assert (
        numbers["AR100"] == pytest.approx(0.5)
        and numbers["recall@0.5"] == 0.5
        and numbers["precision@0.5"] == 1
    )
    assert numbers["AP"] == pytest.approx(51 / 101)  # recall levels 0, 0.01 ... 0.50 of COCO's 101
    assert coco_benchmark([good], tmp_path)["AP"] == pytest.approx(1)


def test_without_any_truth_ap_is_left_out_and_f1_tells_silence_from_noise(tmp_path: Path) -> None:
    silent, noisy = (coco_benchmark([pair(1, [], found)], tmp_path) for found in ([], [("dog", A)]))
    assert "AP" not in silent and "AP" not in noisy
    assert silent["F1@0.5"] == 1 and noisy["F1@0.5"] == 0
    assert coco_benchmark([], tmp_path) == {} == detection_benchmark([], tmp_path)


def test_unknown_labels_and_broken_boxes_are_invisible_to_ap_but_cost_precision(
    tmp_path: Path,
) -> None:
    rubbish: list[Labelled] = [
        ("cow", A),
        ("dog", [1, 2, 3]),
        ("dog", [float("nan")] * 4),
        ("dog", ["x"] * 4),
        ("dog", [1e400, 0, 1, 1]),
    ]
    numbers = coco_benchmark([pair(1, [("dog", A)], [*rubbish, ("dog", A)])], tmp_path)
    assert numbers["AP"] == pytest.approx(1) and numbers["recall@0.5"] == 1
    assert numbers["precision@0.5"] == pytest.approx(1 / 6) and numbers[
        "unknown_label_rate"
    ] == pytest.approx(5 / 6)
    inverted = coco_benchmark([pair(1, [("dog", A)], [("dog", (60, 90, 10, 10))])], tmp_path)
    assert inverted["AP"] == 0 and inverted["precision@0.5"] == 0
    assert [
        entry["bbox"] for entry in json.loads((tmp_path / "coco_results.json").read_text())
    ] == [[60, 90, -50, -80]], "as said"


def test_boxes_without_labels_answer_the_only_category_asked_and_no_other() -> None:
    sample, score = pair(1, [("dog", A)], [("dog", A)], categories=["dog"])
    bare = Score(1.0, True, detail={"pred_boxes": score.detail["pred_boxes"]})
    assert order_free(gather([(sample, bare)]))["F1@0.5"] == 1
    several, _ = pair(1, [("dog", A)], None)
    assert order_free(gather([(several, bare)]))["F1@0.5"] == 0


def test_duplicates_and_wrong_labels_cost_precision(tmp_path: Path) -> None:
    truth: list[Labelled] = [("dog", A)]
    one, two, wrong = (
        order_free(gather([pair(1, truth, found)]))
        for found in ([("dog", A)], [("dog", A), ("dog", A)], [("person", A)])
    )
    assert (one["F1@0.5"], two["precision@0.5"], wrong["F1@0.5"]) == (1, 0.5, 0)


def test_boxes_over_a_crowd_are_neither_right_nor_wrong(tmp_path: Path) -> None:
    crowd = [{"bbox": list(C), "label": "person", "area": 80_000.0}]
    over, other = (20.0, 200.0, 60.0, 280.0), (400.0, 400.0, 450.0, 450.0)
    ignored = coco_benchmark(
        [pair(1, [("person", A)], [("person", over), ("person", A)], crowd=crowd)], tmp_path
    )
    assert ignored["precision@0.5"] == 1 and ignored["AP"] == pytest.approx(1)
    beside = coco_benchmark(
        [pair(1, [("person", A)], [("person", other), ("person", A)], crowd=crowd)], tmp_path
    )
    assert beside["precision@0.5"] == 0.5 and beside["AP"] < 1
    label = coco_benchmark(
        [pair(1, [("person", A)], [("dog", over), ("person", A)], crowd=crowd)], tmp_path
    )
    assert label["precision@0.5"] == 0.5


def test_samples_that_ask_one_category_each_make_one_picture(tmp_path: Path) -> None:
    truth: list[Labelled] = [("dog", A), ("person", B)]
    whole = coco_benchmark([pair(4, truth, [("dog", A), ("person", C)])], tmp_path)
    split = [
        pair(4, truth[:1], [("dog", A)], categories=["dog"]),
        pair(4, truth[1:], [("person", C)], categories=["person"]),
        pair(4, [], [], categories=["traffic light"]),
    ]
    assert len(gather(split).pictures) == 1
    assert coco_benchmark(split, tmp_path) == pytest.approx(whole)
    # "dog" was not asked for there
    poached = [split[0], pair(4, truth[1:], [("dog", A)], categories=["person"])]
    assert coco_benchmark(poached, tmp_path)["precision@0.5"] == 0.5
    assert len(json.loads((tmp_path / "coco_results.json").read_text())) == 1
    # the same question twice is two pictures
    assert len(gather([split[0], split[0]]).pictures) == 2


def test_several_sources_stand_by_name_with_their_mean(tmp_path: Path) -> None:
    pairs = [
        pair(1, [("dog", A)], [("dog", A)], source="a/1"),
        pair(1, [("dog", A)], None, source="a 1"),
    ]
    numbers = coco_benchmark(pairs, tmp_path)
    assert (numbers["a/1/AP"], numbers["a 1/AP"], numbers["AP"]) == pytest.approx((1, 0, 0.5))
    files = sorted(p.name for p in tmp_path.glob("coco_results*"))
    assert files == ["coco_results.a_1.json", "coco_results.a_1_.json"]


def test_categories_that_disagree_are_refused_with_a_fix() -> None:
    first = pair(1, [], [], categories=["dog"])
    other = pair(2, [], [], categories=["dog"], category_ids=[99])
    with pytest.raises(
        DataError, match=r"one id for each category, found 'dog' with id 99.*sources of their own"
    ):
        gather([first, other])
    with pytest.raises(DataError, match=r"as long as params\.categories"):
        gather([pair(1, [], [], category_ids=[1])])


def test_labels_without_ids_get_ids_of_their_own() -> None:
    sample = Sample(
        "1",
        "detection",
        "s",
        "q",
        [{"bbox": list(A), "label": "kite"}],
        params={"categories": ["kite", "bird"]},
    )
    evaluation = gather([pair(1, [], []), (sample, Score.failure("empty"))])
    assert {entry["name"]: entry["id"] for entry in evaluation.categories.values()} == {
        "person": 1,
        "dog": 18,
        "traffic light": 10,
        "kite": 19,
        "bird": 20,
    }
    assert [image["id"] for image in evaluation.truth()["images"]] == [1, 2]


small = st.integers(0, 6)
side = st.integers(1, 5)
boxes = st.lists(
    st.tuples(small, small, side, side).map(lambda b: (b[0], b[1], b[0] + b[2], b[1] + b[3])),
    max_size=5,
)


def _largest(predicted: Sequence[Box], truth: Sequence[Box]) -> int:
    """The size of the largest matching with IoU >= 0.5, by trying every assignment."""
    fits = [[box_iou(p, t) >= 0.5 for t in truth] for p in predicted]
    if len(predicted) < len(truth):
        return max(
            sum(fits[i][j] for i, j in enumerate(order))
            for order in itertools.permutations(range(len(truth)), len(fits))
        )
    if not truth:
        return 0
    return max(
        sum(fits[i][j] for j, i in enumerate(order))
        for order in itertools.permutations(range(len(fits)), len(truth))
    )


@settings(max_examples=100, deadline=None)
@given(boxes, boxes, st.randoms(use_true_random=False))
def test_the_matching_is_the_largest_and_the_order_of_boxes_does_not_matter(
    predicted: list[Box], truth: list[Box], rng: random.Random
) -> None:
    hits = _largest(predicted, truth)
    crowd = [{"bbox": [0, 0, 4, 4], "label": "dog"}]
    expected = 2 * hits / (len(predicted) + len(truth)) if predicted or truth else 1
    mixed_p, mixed_t = rng.sample(predicted, len(predicted)), rng.sample(truth, len(truth))
    numbers = [
        order_free(gather([pair(1, [("dog", b) for b in t], [("dog", b) for b in p])]))
        for p, t in ((predicted, truth), (mixed_p, mixed_t))
    ]
    assert numbers[0]["F1@0.5"] == pytest.approx(expected) and numbers[0] == numbers[1]
    with_crowd = [
        order_free(gather([pair(1, [("dog", b) for b in t], [("dog", b) for b in p], crowd=crowd)]))
        for p, t in ((predicted, truth), (mixed_p, mixed_t))
    ]
    assert (
        with_crowd[0] == with_crowd[1]
        and with_crowd[0]["precision@0.5"] >= numbers[0]["precision@0.5"] - 1e-12
    )


def test_a_flood_of_boxes_is_scored_in_time_and_never_pays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    corner = rng.uniform(0, 300, (2000, 2))
    flood = [("dog", (x, y, x + 50, y + 80)) for x, y in corner.tolist()]
    few = [pair(1, [("dog", A), ("dog", B)], [("dog", A)])]
    many = [pair(1, [("dog", A), ("dog", B)], [("dog", A), *flood])]
    assert coco_benchmark(many, tmp_path)["F1@0.5"] < 0.01 < coco_benchmark(few, tmp_path)["F1@0.5"]


def test_label_keys() -> None:
    assert label_key("  Traffic_Light\n") == "traffic light" and label_key(None) == "" == label_key(
        7
    )
