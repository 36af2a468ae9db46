"""View consistency: what a mirror does to words, and when two answers agree with it."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrl.rewards.views import is_consistent, swap_sides, view_consistency
from tests.kits.clock_kit import takes_less


@pytest.mark.parametrize(
    ("text", "swapped"),
    [
        ("left", "right"),
        ("Right", "Left"),
        ("LEFT", "RIGHT"),
        ("to the left of the dog", "to the right of the dog"),
        ("left or right?", "right or left?"),
        ("the leftmost cup", "the rightmost cup"),
        ("clockwise", "counterclockwise"),
        ("left-hand side", "right-hand side"),
        ("above", "above"),
        ("bright copyright cleft", "bright copyright cleft"),
        ("", ""),
    ],
)
def test_whole_words_change_sides(text: str, swapped: str) -> None:
    assert swap_sides(text) == swapped


@given(
    st.lists(
        st.sampled_from(
            [
                "left",
                "right",
                "Left",
                "RIGHT",
                "leftmost",
                "bright",
                "clockwise",
                "counterclockwise",
                "of",
                "?",
            ]
        ),
        max_size=12,
    ).map(" ".join)
)
def test_swapping_twice_changes_nothing(text: str) -> None:
    assert swap_sides(swap_sides(text)) == text


@pytest.mark.parametrize(
    ("answer", "mirrored", "truth", "mirrored_truth", "agree"),
    [
        ("left", "right", "left", "right", True),
        ("left", "left", "left", "right", False),
        ("right", "left", "left", "right", True),
        ("above", "above", "left", "right", True),
        ("above", "below", "above", "above", False),
        ("yes", "yes", "yes", "yes", True),
        ("yes", "no", "yes", "yes", False),
        ("yes", "no", "yes", "no", True),
        ("no", "yes", "yes", "no", True),
        ("yes", "yes", "yes", "no", False),
        ("dog", "cat", "dog", "cat", True),
        ("dog", "dog", "dog", "cat", False),
        ("cow", "ant", "dog", "cat", True),
        ("left dog", "right dog", "left dog", "right dog", True),
        (None, "left", "right", "left", False),
        ("left", None, "left", "right", False),
        (None, None, "left", "right", False),
    ],
)
def test_answers_flip_exactly_as_the_truth_flips(
    answer: str | None, mirrored: str | None, truth: str, mirrored_truth: str, agree: bool
) -> None:
    assert is_consistent(answer, mirrored, truth, mirrored_truth) is agree
    assert view_consistency([answer], [mirrored], [truth], [mirrored_truth]) == float(agree)


def test_two_right_answers_are_always_consistent_and_truths_are_not_needed_for_words() -> None:
    for truth, mirrored in (
        ("left", "right"),
        ("yes", "no"),
        ("yes", "yes"),
        ("dog", "cat"),
        ("above", "above"),
    ):
        assert is_consistent(truth, mirrored, truth, mirrored)
    assert (
        is_consistent("left", "right")
        and not is_consistent("left", "left")
        and is_consistent("above", "above")
    )


def test_a_habit_is_half_right_and_never_consistent() -> None:
    truths = ["left", "right"] * 10
    habit = ["left"] * 20
    assert view_consistency(habit, habit, truths, [swap_sides(t) for t in truths]) == 0
    assert view_consistency(truths, [swap_sides(t) for t in truths]) == 1


def test_shares_edges_and_errors() -> None:
    assert view_consistency(["left", "left", None, "up"], ["right", "left", "right", "up"]) == 0.5
    assert view_consistency([], []) == 0
    with pytest.raises(ValueError, match="zip"):
        view_consistency(["left"], [])


def test_long_texts_take_milliseconds() -> None:
    for text in ("left " * 80_000, "l" * 400_000, "le" * 200_000):
        takes_less(4, partial(swap_sides, text))
