"""Matching equals brute force, ignores order, and copies never earn a second truth."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.rewards.matching import (
    copy_threshold,
    forbid_copies,
    greedy_pairs,
    hungarian_pairs,
    matched_sum,
    merge_copies,
    most_pairs,
    near_copies,
)

value = st.sampled_from([0.0, 0.0, 0.25, 0.36, 0.5, 0.5, 0.75, 0.9, 1.0]) | st.floats(0, 1)


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    rows, columns = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    return np.array(
        draw(
            st.lists(
                st.lists(value, min_size=columns, max_size=columns), min_size=rows, max_size=rows
            )
        ),
        dtype=np.float64,
    ).reshape(rows, columns)


def _all_matchings(matrix: np.ndarray) -> list[list[tuple[int, int]]]:
    """Every one-to-one set of pairs with positive similarity."""
    rows, columns = matrix.shape
    found = []
    for choice in itertools.product([None, *range(columns)], repeat=rows):
        used = [j for j in choice if j is not None]
        if len(set(used)) == len(used) and all(
            j is None or matrix[i, j] > 0 for i, j in enumerate(choice)
        ):
            found.append([(i, j) for i, j in enumerate(choice) if j is not None])
    return found


@settings(max_examples=80, deadline=None)
@given(matrices())
def test_hungarian_equals_brute_force(matrix: np.ndarray) -> None:
    everything = _all_matchings(matrix)
    pairs = hungarian_pairs(matrix)
    assert pairs in everything
    best = max(math.fsum(matrix[i, j] for i, j in m) for m in everything)
    assert matched_sum(matrix, pairs) == pytest.approx(best)

    pairs = hungarian_pairs(matrix, count_first=True)
    most = max(len(m) for m in everything)
    best = max(math.fsum(matrix[i, j] for i, j in m) for m in everything if len(m) == most)
    assert pairs in everything and len(pairs) == most == most_pairs(matrix > 0)
    assert matched_sum(matrix, pairs) == pytest.approx(best)


@settings(max_examples=80, deadline=None)
@given(matrices())
def test_greedy_takes_the_most_similar_pair_that_is_left(matrix: np.ndarray) -> None:
    pairs = greedy_pairs(matrix)
    left, expected = matrix.copy(), []
    while left.size and left.max() > 0:
        i, j = divmod(int(left.argmax()), left.shape[1])
        expected.append((i, j))
        left[i, :] = left[:, j] = 0
    assert pairs == sorted(expected)
    assert matched_sum(matrix, pairs) >= matched_sum(matrix, hungarian_pairs(matrix)) / 2 - 1e-9


@settings(max_examples=100, deadline=None)
@given(matrices(), st.integers(0, 1000))
def test_order_does_not_matter(matrix: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, columns = rng.permutation(matrix.shape[0]), rng.permutation(matrix.shape[1])
    mixed = matrix[np.ix_(rows, columns)]
    for count_first in (False, True):
        a, b = hungarian_pairs(matrix, count_first), hungarian_pairs(mixed, count_first)
        assert matched_sum(matrix, a) == pytest.approx(matched_sum(mixed, b))
    assert most_pairs(matrix > 0) == most_pairs(mixed > 0)


def test_a_pair_below_the_threshold_is_never_credited_with_another_pairs_iou() -> None:
    """V-Triune's greedy loop credited a box with IoU 0.36 with the IoU 1.0 of another pair."""
    matrix = np.array([[1.0, 0.0], [0.36, 0.36]])
    kept = np.where(matrix >= 0.5, matrix, 0.0)
    assert greedy_pairs(kept) == hungarian_pairs(kept) == [(0, 0)]


def test_copies_are_told_apart_only_by_twins() -> None:
    matrix = np.array([[0.9, 0.8], [0.9, 0.8], [0.9, 0.8]])
    assert len(hungarian_pairs(forbid_copies(matrix, ["a", "a", "a"]))) == 1
    assert len(hungarian_pairs(forbid_copies(matrix, ["a", "b", "a"]))) == 2
    assert len(hungarian_pairs(forbid_copies(matrix, ["a", "a", "a"], [1, 1]))) == 2
    assert forbid_copies(matrix, ["a", "b", "c"]) is matrix


def test_empty_sides_and_wrong_shapes() -> None:
    for empty in ([], np.zeros((0, 3)), np.zeros((3, 0))):
        assert hungarian_pairs(empty) == greedy_pairs(empty) == [] and most_pairs(empty) == 0
    with pytest.raises(ValueError, match=r"shape \(N, M\), found \(2,\)"):
        hungarian_pairs([0.1, 0.2])


def _square(values: list[list[float]]) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def test_the_copy_threshold_is_midway_from_the_truths_likeness_to_one() -> None:
    def of(m: float) -> float:
        return copy_threshold(_square([[1, m], [m, 1]]))

    assert (
        of(0)
        == of(0.4)
        == copy_threshold(np.ones((1, 1)))
        == copy_threshold(np.zeros((0, 0)))
        == 0.7
    )
    assert of(0.6) == pytest.approx(0.8) and of(0.89) == pytest.approx(0.945)
    assert of(0.95) == 0.7, "twins have their own rule"


def _near(
    iou_NN: np.ndarray, iou_MM: np.ndarray, codes_N: list[int], codes_M: list[int]
) -> list[tuple[list[int], int]]:
    return near_copies(
        iou_NN,
        iou_MM,
        np.ones((len(codes_N), len(codes_M)), dtype=bool),
        np.array(codes_N),
        np.array(codes_M),
    )


def test_copies_are_chained_within_a_label_and_twins_give_them_room() -> None:
    chain = _square([[1, 0.8, 0.5, 0], [0.8, 1, 0.8, 0], [0.5, 0.8, 1, 0], [0, 0, 0, 1]])
    apart, alike, twins = np.eye(2), _square([[1, 0.7], [0.7, 1]]), _square([[1, 0.92], [0.92, 1]])
    assert _near(chain, apart, [0] * 4, [0, 0]) == [([0, 1, 2], 1)]
    assert _near(chain, apart, [0, 1, 0, 0], [0, 0]) == [], "labels differ"
    assert _near(chain, alike, [0] * 4, [0, 0]) == [], "not more alike than the truths"
    assert _near(chain, alike, [0] * 4, [1, 1]) == [([0, 1, 2], 1)], "truths of another label"
    assert _near(chain, twins, [0] * 4, [0, 0]) == [([0, 1, 2], 2)]
    assert _near(chain[:2, :2], twins, [0, 0], [0, 0]) == [], "there is room for both"


@settings(max_examples=80, deadline=None)
@given(matrices(), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1000))
def test_merged_copies_are_worth_their_best_choice(
    matrix: np.ndarray, size: int, room: int, seed: int
) -> None:
    members = list(range(min(size, len(matrix))))
    if len(members) <= room:
        return

    def best(values: np.ndarray) -> float:
        return matched_sum(values, hungarian_pairs(values))

    merged = merge_copies(matrix, [(members, room)])
    rest = list(range(len(members), len(matrix)))
    choices = [best(matrix[[*chosen, *rest]]) for chosen in itertools.combinations(members, room)]
    whole = max(
        math.fsum(matrix[i, j] for i, j in m)
        for m in _all_matchings(matrix)
        if sum(i in members for i, _ in m) <= room
    )
    assert merged.shape == matrix.shape and max(choices) == pytest.approx(whole)
    assert best(merged) <= whole + 1e-9 and (room > 1 or best(merged) == pytest.approx(whole))
    mixed = matrix[[*np.random.default_rng(seed).permutation(members), *rest]]
    assert np.array_equal(merge_copies(mixed, [(members, room)]), merged)
    assert merge_copies(matrix, []) is matrix
