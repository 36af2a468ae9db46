"""AP of one picture: equal to pycocotools where it takes boxes in order, order-free and junk-proof where it does not."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.errors import ConfigError
from mmrl.rewards.average_precision import COCO_THRESHOLDS, image_ap
from tests.kits.clock_kit import takes_less

Labelled = list[tuple[str, tuple[float, ...]]]
LABELS = ("a", "b", "c")


def _official(predicted: Labelled, true: Labelled) -> tuple[float, float, float]:
    """stats[0:3] of pycocotools for one picture, all scores 1, predictions with unknown labels left out."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def xywh(box: Sequence[float]) -> list[float]:
        return [box[0], box[1], box[2] - box[0], box[3] - box[1]]

    ids = {label: i + 1 for i, label in enumerate(LABELS)}
    names = {label for label, _ in true}
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "images": [{"id": 1}],
            "categories": [{"id": i} for i in ids.values()],
            "annotations": [
                {
                    "id": n + 1,
                    "image_id": 1,
                    "category_id": ids[label],
                    "bbox": xywh(box),
                    "iscrowd": 0,
                    "area": (box[2] - box[0]) * (box[3] - box[1]),
                }
                for n, (label, box) in enumerate(true)
            ],
        }
        coco.createIndex()
        rows = [
            {"image_id": 1, "category_id": ids[label], "bbox": xywh(box), "score": 1.0}
            for label, box in predicted
            if label in names
        ]
        if not rows:
            return 0.0, 0.0, 0.0
        run = COCOeval(coco, coco.loadRes(rows), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return tuple(float(v) for v in run.stats[:3])


def _random(rng: np.random.Generator, count: int) -> Labelled:
    corner, side = rng.integers(0, 40, (count, 2)), rng.integers(8, 30, (count, 2))
    return [
        (LABELS[int(rng.integers(3))], (*map(float, c), *map(float, c + s)))
        for c, s in zip(corner, side, strict=True)
    ]


def _near(rng: np.random.Generator, true: Labelled) -> Labelled:
    """Some of the truth, moved a little, with wrong labels and junk among it."""
    found = [
        (label if rng.random() < 0.9 else "b", tuple(v + float(rng.integers(-3, 4)) for v in box))
        for label, box in true
        if rng.random() < 0.9
    ]
    found += _random(rng, int(rng.integers(0, 3)))
    return [found[i] for i in rng.permutation(len(found))]


@pytest.mark.parametrize("seed", range(60))
def test_the_coco_rule_is_pycocotools_number(seed: int) -> None:
    rng = np.random.default_rng(seed)
    true = _random(rng, int(rng.integers(1, 9)))
    predicted = _near(rng, true)
    whole, half, quarter = _official(predicted, true) if predicted else (0.0, 0.0, 0.0)
    assert image_ap(predicted, true, rule="coco") == pytest.approx(whole, abs=1e-12)
    assert image_ap(predicted, true, (0.5,), "coco") == pytest.approx(half, abs=1e-12)
    assert image_ap(predicted, true, (0.75,), "coco") == pytest.approx(quarter, abs=1e-12)


def test_the_coco_rule_stops_at_100_boxes_per_label_as_pycocotools_does() -> None:
    true = [("a", (0.0, 0.0, 10.0, 10.0)), ("a", (20.0, 20.0, 30.0, 30.0))]
    predicted: Labelled = [("a", (50.0, 50.0, 60.0, 60.0))] * 99 + [
        (label, tuple(box)) for label, box in true
    ]
    value = image_ap(predicted, true, rule="coco")
    assert value > 0 and value == pytest.approx(_official(predicted, true)[0], abs=1e-12)


def test_equal_ious_choose_the_truth_pycocotools_chooses() -> None:
    true = [
        ("a", (0.0, 0.0, 10.0, 10.0)),
        ("a", (0.0, 0.0, 10.0, 10.0)),
        ("a", (5.0, 0.0, 15.0, 10.0)),
    ]
    for predicted in itertools.product(
        [(0, 0, 10, 10), (2.5, 0, 12.5, 10), (5, 0, 15, 10)], repeat=3
    ):
        rows: Labelled = [("a", tuple(map(float, box))) for box in predicted]
        assert image_ap(rows, true, rule="coco") == pytest.approx(
            _official(rows, true)[0], abs=1e-12
        )


boxes = st.tuples(
    st.sampled_from(LABELS),
    st.tuples(*[st.integers(0, 20)] * 2, *[st.integers(5, 20)] * 2).map(
        lambda v: (float(v[0]), float(v[1]), float(v[0] + v[2]), float(v[1] + v[3]))
    ),
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(boxes, max_size=6),
    st.lists(boxes, min_size=1, max_size=5),
    boxes,
    st.randoms(use_true_random=False),
)
def test_the_order_free_rule_ignores_order_and_junk_lowers_it(
    predicted: Labelled, true: Labelled, stranger: tuple[str, tuple[float, ...]], random
) -> None:  # type: ignore[no-untyped-def]
    value = image_ap(predicted, true)
    mixed = random.sample(predicted, len(predicted))
    assert image_ap(mixed, random.sample(true, len(true))) == pytest.approx(value)
    assert 0 <= value <= 1
    far = (stranger[0], (500.0, 500.0, 510.0, 510.0))
    unknown = ("unknown", stranger[1])
    for junk in (far, unknown):
        worse = image_ap([*predicted, junk], true)
        known = any(label == junk[0] for label, _ in true)
        assert worse < value or (worse <= value + 1e-12 and (value == 0 or (known and junk is far)))


@settings(max_examples=80, deadline=None)
@given(st.lists(boxes, min_size=1, max_size=4))
def test_the_best_order_of_coco_never_beats_precision_free_recall(predicted: Labelled) -> None:
    """Where nothing is wrong both rules agree; with junk last the coco rule does not see it, the order-free one does."""
    labels = {label for label, _ in predicted}
    # one per label: no overlap to decide
    once = [next(p for p in predicted if p[0] == label) for label in sorted(labels)]
    assert (
        image_ap(once, once) == pytest.approx(image_ap(once, once, rule="coco")) == pytest.approx(1)
    )
    junk = [(label, (900.0, 900.0, 910.0, 910.0)) for label, _ in once] * 3
    assert image_ap(once + junk, once, rule="coco") == pytest.approx(1)
    assert image_ap(once + junk, once) == pytest.approx(0.25)


def test_one_point_on_the_curve_by_hand() -> None:
    """2 of 4 truths found by 3 boxes: precision 2/3 on the 51 recall levels up to 0.5."""
    true: Labelled = [("a", (0.0, 20.0 * i, 10.0, 20.0 * i + 10)) for i in range(4)]
    predicted = [true[0], true[1], ("a", (100.0, 100.0, 110.0, 110.0))]
    assert image_ap(predicted, true) == pytest.approx(2 / 3 * 51 / 101)


def test_empties_and_unknown_rules() -> None:
    assert (
        image_ap([], []) == 1
        and image_ap([], [("a", (0, 0, 1, 1))]) == 0
        and image_ap([("a", (0, 0, 1, 1))], []) == 0
    )
    with pytest.raises(ConfigError, match="Did you mean 'order_free'"):
        image_ap([], [], rule="order-free")
    assert len(COCO_THRESHOLDS) == 10 and COCO_THRESHOLDS[5] == 0.75


def test_64_boxes_against_64_take_under_two_milliseconds() -> None:
    rng = np.random.default_rng(0)
    true: Labelled = [
        ("a", (*map(float, c), *map(float, c + 60))) for c in rng.integers(0, 900, (64, 2))
    ]
    predicted: Labelled = [(label, tuple(v + 2.0 for v in box)) for label, box in true]
    takes_less(0.02, lambda: image_ap(predicted, true))  # measured: about 0.5 ms
