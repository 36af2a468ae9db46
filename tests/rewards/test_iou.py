"""IoU: symmetric, bounded, scale and translation invariant, monotone towards the truth, defined for every input."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.rewards.iou import box_giou, box_iou, outside_share, pairwise_giou, pairwise_iou

whole = st.integers(-500, 500)
side = st.integers(1, 400)
boxes = st.builds(lambda x, y, w, h: (x, y, x + w, y + h), whole, whole, side, side)
anything = st.tuples(*[st.floats(allow_nan=True, allow_infinity=True)] * 4)


def test_hand_values() -> None:
    assert box_iou((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)
    # pixel-inclusive areas (+1) would give 66/121
    assert box_iou((0, 0, 10, 10), (0, 0, 10, 5)) == 0.5
    assert box_iou((0, 0, 1, 1), (1, 0, 2, 1)) == 0.0
    assert box_giou((0, 0, 1, 1), (1, 0, 2, 1)) == 0.5
    assert box_giou((0, 0, 1, 1), (2, 0, 3, 1)) == pytest.approx((0 - 1 / 3 + 1) / 2)


@settings(deadline=None)
@given(boxes, boxes)
def test_symmetric_and_bounded(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    for measure in (box_iou, box_giou):
        assert measure(a, b) == measure(b, a)
        assert 0 <= measure(a, b) <= 1
        assert measure(a, a) == 1
    assert 2 * box_giou(a, b) - 1 <= box_iou(a, b) + 1e-12


@settings(deadline=None)
@given(boxes, boxes, st.floats(1e-3, 1e3), whole, whole)
def test_scale_and_translation_invariant(
    a: tuple[int, ...], b: tuple[int, ...], k: float, dx: int, dy: int
) -> None:
    def moved(box: tuple[int, ...]) -> tuple[float, ...]:
        return tuple((v + (dy if i % 2 else dx)) * k for i, v in enumerate(box))

    assert box_iou(moved(a), moved(b)) == pytest.approx(box_iou(a, b), abs=1e-9)
    assert box_giou(moved(a), moved(b)) == pytest.approx(box_giou(a, b), abs=1e-9)


@settings(deadline=None)
@given(boxes, st.integers(0, 300), st.integers(0, 300), st.integers(1, 50))
def test_sliding_towards_the_truth_never_lowers_it(
    box: tuple[int, ...], dx: int, dy: int, steps: int
) -> None:
    path = [
        tuple(v + (dy if i % 2 else dx) * (steps - s) / steps for i, v in enumerate(box))
        for s in range(steps + 1)
    ]
    for measure in (box_iou, box_giou):
        values = [measure(p, box) for p in path]
        assert all(b >= a - 1e-9 for a, b in itertools.pairwise(values))
        assert values[-1] == pytest.approx(1)


@settings(deadline=None)
@given(anything, anything)
def test_any_numbers_give_a_bounded_value(a: tuple[float, ...], b: tuple[float, ...]) -> None:
    assert 0 <= box_iou(a, b) <= 1 and 0 <= box_giou(a, b) <= 1
    assert 0 <= outside_share(a, 640, 480) <= 1


@pytest.mark.parametrize(
    "bad", [(5, 5, 5, 9), (9, 0, 1, 5), (0, 9, 5, 1), (math.nan, 0, 1, 1), (0, 0, math.inf, 1)]
)
def test_degenerate_boxes_score_zero_even_against_themselves(bad: tuple[float, ...]) -> None:
    assert box_iou(bad, bad) == box_giou(bad, bad) == box_iou(bad, (0, 0, 9, 9)) == 0
    assert outside_share(bad, 100, 100) == 1


@settings(deadline=None)
@given(st.lists(boxes, max_size=5), st.lists(boxes, max_size=5))
def test_batches_equal_single_pairs(
    many: list[tuple[int, ...]], others: list[tuple[int, ...]]
) -> None:
    many = [*many, (3, 3, 3, 8)]  # and a degenerate one
    for batch, single in ((pairwise_iou, box_iou), (pairwise_giou, box_giou)):
        table = batch(many, others)
        assert table.shape == (len(many), len(others))
        expected = np.array([[single(a, b) for b in others] for a in many]).reshape(table.shape)
        np.testing.assert_allclose(table, expected, atol=1e-12)


def test_batches_refuse_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(N, 4\).*wrap a single box"):
        pairwise_iou([1, 2, 3, 4], [[1, 2, 3, 4]])


def test_outside_share() -> None:
    assert outside_share((0, 0, 10, 10), 10, 10) == 0
    assert outside_share((5, 0, 15, 10), 10, 10) == 0.5
    assert outside_share((20, 20, 30, 30), 10, 10) == 1
