"""Detection rewards: the papers' formulas by hand, and what must never pay, for every mode."""
from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mmrl.errors import ConfigError
from rewards.detection import MODES, compare, detection_metrics, make_detection_reward
from rewards.iou import box_iou
from rewards.matching import TWIN_IOU, hungarian_pairs

Box = tuple[float, ...]
Labelled = list[tuple[str, Box]]

A, B, C = ("cat", (0.0, 0.0, 10.0, 10.0)), ("cat", (20.0, 0.0, 30.0, 10.0)), ("dog", (0.0, 20.0, 10.0, 30.0))
FAR = (500.0, 500.0, 510.0, 510.0)
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((mode, {}) for mode in MODES), ("f1", {"threshold": 0.5}), ("f1", {"threshold": "dynamic", "power": 2}),
    ("v_triune", {"threshold": "average"}), ("v_triune", {"threshold": 0.3, "iou_completeness": 1.0}),
    ("v_triune", {"threshold": 0.5, "weights": {"iou_max_iou_first": 1, "map": 0.5, "map75": 1}}),
]
corner, side = st.integers(0, 24), st.integers(4, 20)
labelled = st.tuples(st.sampled_from(["cat", "dog"]), st.tuples(corner, corner, side, side).map(
    lambda v: (float(v[0]), float(v[1]), float(v[0] + v[2]), float(v[1] + v[3]))))
some = st.lists(labelled, max_size=6)
setting = st.sampled_from(SETTINGS)
progress = st.sampled_from([0.05, 0.2, 1.0])


def _twins(true: Labelled) -> bool:
    return any(a[0] == b[0] and box_iou(a[1], b[1]) >= TWIN_IOU for a, b in itertools.combinations(true, 2))


@settings(max_examples=120, deadline=None)
@given(setting, some, some, progress, st.randoms(use_true_random=False))
def test_in_range_and_whatever_the_order(case: tuple[str, dict[str, Any]], predicted: Labelled, true: Labelled, now: float,
                                         random) -> None:  # type: ignore[no-untyped-def]
    reward = make_detection_reward(case[0], **case[1])
    value = reward(predicted, true, now)
    assert 0 == reward.low <= value <= reward.high and reward.high == (3 if case[0] == "perception_r1" else 1)
    ious = [iou for p in predicted for t in true if (iou := box_iou(p[1], t[1])) >= 0.5]
    if case[0] != "weighted_sum" or len(set(ious)) == len(ious):  # greedy: equal IoUs may be taken in another order
        mixed = reward(random.sample(predicted, len(predicted)), random.sample(true, len(true)), now)
        assert mixed == pytest.approx(value, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(setting, some, some, progress, st.data())
def test_copies_wrong_labels_junk_and_floods_never_pay(case: tuple[str, dict[str, Any]], predicted: Labelled, true: Labelled,
                                                       now: float, data: st.DataObject) -> None:
    reward = make_detection_reward(case[0], **case[1])
    value = reward(predicted, true, now)
    assume(not _twins(true))
    where = data.draw(st.sampled_from([box for _, box in [*predicted, *true]] or [FAR]))
    label = data.draw(st.sampled_from(["cat", "dog", "bird"]))
    junk = [("unheard of", where), (label, FAR), *([data.draw(st.sampled_from(predicted))] if predicted else [])]
    for item, copies in itertools.product(junk, (1, 2, 40)):
        assert reward([*predicted, *[item] * copies], true, now) <= value + 1e-9, (item, copies)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([{}, {"threshold": 0.5}, {"threshold": "dynamic"}, {"threshold": "average", "power": 2}]), some,
       st.lists(labelled, min_size=1, max_size=6), progress)
def test_a_right_box_for_a_truth_without_one_never_lowers_f1(params: dict[str, Any], predicted: Labelled, true: Labelled,
                                                             now: float) -> None:
    reward, pair = make_detection_reward("f1", **params), compare(predicted, true)
    taken = {j for _, j in hungarian_pairs(pair.right_NM)} if predicted else set()
    for j, item in enumerate(true):
        if j not in taken and item not in predicted:
            assert reward([*predicted, item], true, now) > reward(predicted, true, now) - 1e-9


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([{}, {"threshold": 0.5}, {"threshold": "dynamic"}, {"power": 2}]),
       st.lists(labelled, min_size=1, max_size=6), st.lists(labelled, min_size=1, max_size=6), progress, st.floats(0, 1))
def test_moving_a_box_towards_its_truth_never_lowers_f1(params: dict[str, Any], predicted: Labelled, true: Labelled, now: float,
                                                        way: float) -> None:
    reward = make_detection_reward("f1", **params)
    before = reward(predicted, true, now)
    for i, j in hungarian_pairs(compare(predicted, true).right_NM):
        box = tuple(a + way * (b - a) for a, b in zip(predicted[i][1], true[j][1], strict=True))
        moved = [*predicted[:i], (predicted[i][0], box), *predicted[i + 1:]]
        if len(set(moved)) == len(moved):  # to land exactly on another box is to become its copy
            assert reward(moved, true, now) >= before - 1e-9


@settings(max_examples=80, deadline=None)
@given(setting, st.lists(labelled, max_size=6), progress)
def test_the_truth_is_the_best_answer_and_empties_are_defined(case: tuple[str, dict[str, Any]], true: Labelled, now: float) -> None:
    reward = make_detection_reward(case[0], **case[1])
    assert reward([], [], now) == reward.high
    if true:
        assert reward(true, true, now) == pytest.approx(reward.high) or _twins(true)
        assert reward([], true, now) == reward(true, [], now) == reward.low
        far = [(label, FAR) for label, _ in true[:1]]
        assert reward(far, true, now) == 0


few = st.lists(labelled, min_size=1, max_size=4, unique=True)


@settings(max_examples=100, deadline=None)
@given(few, few)
def test_f1_is_the_best_matching_by_brute_force(predicted: Labelled, true: Labelled) -> None:
    best = 0.0
    for choice in itertools.product([None, *range(len(true))], repeat=len(predicted)):
        used = [j for j in choice if j is not None]
        if len(set(used)) == len(used):
            best = max(best, sum(box_iou(p[1], true[j][1]) for p, j in zip(predicted, choice, strict=True)
                                 if j is not None and true[j][0] == p[0]))
    assert make_detection_reward()(predicted, true) == pytest.approx(2 * best / (len(predicted) + len(true)))


def test_twins_in_the_truth_may_be_answered_by_equal_boxes() -> None:
    true = [A, ("cat", (0.0, 0.0, 10.0, 10.4))]
    assert make_detection_reward()([A, A], true) > make_detection_reward()([A], true)
    assert make_detection_reward()([A, A, A], true) < make_detection_reward()([A, A], true)


# the papers' formulas, by hand

def test_v_triune_by_hand() -> None:
    half = ("cat", (20.0, 0.0, 30.0, 5.0))  # IoU 0.5 with B
    whole = make_detection_reward("v_triune", threshold=0.5)
    assert whole([A, half], [A, B]) == pytest.approx(0.7 * 0.75 + 0.3)
    strict = make_detection_reward("v_triune", threshold=0.6)
    assert strict([A, half], [A, B]) == pytest.approx(0.7 * 0.5 + 0.3 * (1 - (0.5 + 0.5) / 2)), "tried, but not matched"
    assert whole([A], [A, B]) == pytest.approx(0.6 * (0.7 * 0.5 + 0.3 * (1 - (0.5 + 0) / 2)))
    assert whole([A, ("cat", FAR)], [A, B]) == pytest.approx(0.6 * (0.7 * 0.5 + 0.3 * 0.5)), "junk does not fill up the number"
    assert make_detection_reward("v_triune")([A, half], [A, B], 0.05) == pytest.approx(strict([A, half], [A, B]))
    near = ("cat", (0.0, 0.0, 10.0, 9.0))
    dynamic = make_detection_reward("v_triune")
    assert dynamic([near], [A], 0.05) == pytest.approx(0.7 * 0.9 + 0.3) and dynamic([near], [A], 0.2) == 0
    assert dynamic([near], [A], 1.0, ceilings=[0.9]) == pytest.approx(0.7 * 0.9 + 0.3), "the grid cannot spell more"
    assert make_detection_reward("v_triune", threshold="average")([near], [A]) == pytest.approx(9 / 11 * (0.7 * 0.9 + 0.3))


def test_v_triune_terms() -> None:
    first = make_detection_reward("v_triune", threshold=0.5, weights={"iou_max_iou_first": 1.0})
    label = make_detection_reward("v_triune", threshold=0.5)
    near = ("cat", (0.0, 0.0, 10.0, 8.0))
    over = [near, ("dog", A[1])]  # the dog lies better on the cat
    assert first(over, [A]) == 0 < label(over, [A]) == pytest.approx(0.6 * (0.7 * 0.8 + 0.3 * 0.75))
    both = make_detection_reward("v_triune", threshold=0.5, weights={"iou_max_label_first": 1, "map50": 1, "map75": 2})
    assert both([near], [A]) == pytest.approx((0.7 * 0.8 + 0.3 + 1 + 2) / 4)


def test_v_triunes_index_overwrite_is_not_repeated() -> None:
    """A dog with IoU 0.36 was credited 1.0 by the published greedy loop."""
    dog = ("dog", (0.0, 20.0, 10.0, 23.6))
    for mode in ("f1", "v_triune", "weighted_sum"):
        reward = make_detection_reward(mode, **({} if mode == "f1" else {"threshold": 0.5}))
        assert reward([A, dog], [A, C], 1.0) < 0.8


def test_vlm_r1_rules_by_hand() -> None:
    assert make_detection_reward("weighted_sum")([A, ("dog", B[1])], [A, B]) == pytest.approx(0.7 * 0.5 + 0.3 * 0.5)
    near = ("cat", (20.0, 0.0, 30.0, 6.0))
    assert make_detection_reward("weighted_sum")([A, near], [A, B]) == pytest.approx(0.7 * 0.8 + 0.3)
    map_, map50, length = (make_detection_reward(m) for m in ("vlm_r1_map", "vlm_r1_map50", "od_length"))
    assert map50([A, near], [A, B]) == 1 and map_([A, near], [A, B]) == pytest.approx((3 + 7 * 0.5 * 51 / 101) / 10)
    extra = [A, B, ("cat", FAR), ("cat", FAR)]
    assert map_(extra, [A, B]) == pytest.approx(0.5) and length(extra, [A, B]) == pytest.approx(0.25)
    assert make_detection_reward("vlm_r1_map", rule="coco")(extra, [A, B]) == pytest.approx(1), "published: junk at the end is free"
    assert make_detection_reward("vlm_r1_map", rule="coco")([*extra, C], [A, B]) == pytest.approx(1)
    assert map_([A, B, C], [A, B]) == pytest.approx(2 / 3), "a label that is not there is a false positive"
    assert length([A], [A, B]) == map_([A], [A, B]) == pytest.approx(51 / 101)


def test_perception_r1_by_hand() -> None:
    reward = make_detection_reward("perception_r1")
    assert reward([A, B], [A, B]) == 3
    near = ("cat", (20.0, 0.0, 30.0, 6.0))
    assert reward([A, near], [A, B], size=(100, 100)) == pytest.approx(0.25 + 0.75 + 1 + 0.8)
    assert reward([A], [A, B]) == pytest.approx(0.25 + 0.75 * 2 / 3 + 1 + 1 - 0.25)
    assert reward([A, ("dog", B[1])], [A, B]) == pytest.approx(0.25 + 0.75 * 0.5 + 0.5 + 1 - 0.5)
    assert reward([("cat", (0.0, 0.0, 10.0, 5.0))], [A]) == 0, "IoU must exceed 0.5"


def test_metrics_by_hand() -> None:
    near = ("Cat ", (20.0, 0.0, 30.0, 5.0))
    assert detection_metrics(compare([A, near, C], [A, B])) == pytest.approx({
        "f1@0.5": 0.8, "precision@0.5": 2 / 3, "recall@0.5": 1, "mean_iou": 0.75, "count_ok": 0, "correct": 0})
    assert set(detection_metrics(compare([], [])).values()) == {1.0}
    assert set(detection_metrics(compare([A], [])).values()) == set(detection_metrics(compare([], [A])).values()) == {0.0}
    assert detection_metrics(compare([B, A], [A, B]))["correct"] == 1


@pytest.mark.parametrize(("mode", "params", "message"), [
    ("v_triun", {}, "Did you mean 'v_triune'"), ("f1", {"treshold": 1}, "Did you mean 'threshold'"),
    ("f1", {"threshold": "dynamc"}, "Did you mean 'dynamic'"), ("f1", {"threshold": 1.5}, r"threshold to be a number in \[0, 1\]"),
    ("f1", {"threshold": True}, "found True"), ("f1", {"threshold": "dynamic", "schedule": [[0.5, 0.5]]}, "end at 1.0"),
    ("v_triune", {"weights": {"maps": 1}}, "Did you mean 'map'"), ("v_triune", {"weights": {"map": 0}}, "positive"),
    ("v_triune", {"weights": 3}, "as a mapping"), ("od_length", {"rule": "coc"}, "Did you mean 'coco'"),
    ("weighted_sum", {"iou": 0, "completeness": 0}, "positive weight"), ("perception_r1", {"x": 1}, "expected none")])
def test_wrong_parameters_are_named(mode: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_detection_reward(mode, **params)


def test_64_boxes_against_64_take_about_a_millisecond() -> None:
    rng = np.random.default_rng(0)
    true: Labelled = [("cat", (*map(float, c), *map(float, c + 60))) for c in rng.integers(0, 900, (64, 2))]
    predicted = [(label, tuple(v + 2.0 for v in box)) for label, box in true]
    for mode in MODES:
        reward = make_detection_reward(mode)
        reward(predicted, true, 0.05)
        times = []
        for _ in range(5):
            start = time.thread_time()
            reward(predicted, true, 0.05)
            times.append(time.thread_time() - start)
        assert min(times) < 0.02, f"{mode}; measured: 0.3 to 0.7 ms"
