"""Timestamps anchored reasoning: later estimates weigh more, regress costs, and no number of anchors earns more."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.errors import ConfigError
from mmrl.rewards.anchored import anchored_value, check_anchor_numbers, read_anchors
from tests.kits.clock_kit import takes_less

share = st.floats(0, 1)
anchors = st.lists(share, min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(anchors, share, share)
def test_never_more_than_the_answer_or_the_last_anchor(
    some: list[float], answer: float, early: float
) -> None:
    value = anchored_value(some, answer, early)
    assert 0 <= value <= min(answer, some[-1]) + 1e-12


@settings(max_examples=100, deadline=None)
@given(anchors, share, share, st.integers(0, 5), share)
def test_another_anchor_before_the_last_never_raises(
    some: list[float], answer: float, extra: float, place: int, early: float
) -> None:
    place = min(place, len(some) - 1)
    assert (
        anchored_value([*some[:place], extra, *some[place:]], answer, early)
        <= anchored_value(some, answer, early) + 1e-12
    )


@settings(max_examples=80, deadline=None)
@given(anchors, share, st.integers(0, 5), share)
def test_a_better_anchor_or_answer_never_lowers(
    some: list[float], answer: float, place: int, better: float
) -> None:
    place = min(place, len(some) - 1)
    improved = [*some[:place], max(some[place], better), *some[place + 1 :]]
    assert anchored_value(improved, answer) >= anchored_value(some, answer) - 1e-12
    assert anchored_value(some, max(answer, better)) >= anchored_value(some, answer) - 1e-12


def test_examples() -> None:
    assert anchored_value([1, 1], 1) == 1 and anchored_value([], 1) == 0
    assert (
        anchored_value([0.3, 0.9], 0.9) > anchored_value([0.9, 0.3], 0.9) == pytest.approx(0.3)
    ), "order matters"
    assert anchored_value([0.6, 0.9], 0.9) > anchored_value([0.3, 0.9], 0.9), (
        "a good first estimate counts"
    )
    assert anchored_value([1, 1], 0) == 0, "nothing without a right answer"


def test_tags_are_read_from_the_thoughts_only() -> None:
    text = "<think>a <timestamp>1 to 2</timestamp> b <timestamp>[3, 4]</timestamp></think>\n<answer>[3, 4]</answer>"
    found = read_anchors(text)
    assert found is not None and [a.spans for a in found] == [((1.0, 2.0),), ((3.0, 4.0),)]
    assert read_anchors("<answer><timestamp>1 to 2</timestamp></answer>") is None
    assert read_anchors("<think>x</think><answer><timestamp>1 to 2</timestamp></answer>") == []
    assert read_anchors("<think><timestamp>1 to 2</think>") is None
    assert read_anchors("<think><timestamp>1 <b>to 2</timestamp></think>") is None
    assert (
        read_anchors("<think>" + "<timestamp>1 to 2</timestamp>" * 5 + "</think>", most=4) is None
    )
    broken = read_anchors("<think><timestamp>soon</timestamp></think>")
    assert broken is not None and broken[0].reason == "not_spans"


def test_hostile_thoughts_take_no_time() -> None:
    for text in (
        "<timestamp>" * 30_000,
        "</timestamp>" * 30_000,
        "<timestamp>x</timestamp>" * 15_000,
        "<" * 300_000,
    ):
        takes_less(0.1, partial(read_anchors, f"<think>{text}</think>"))


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0, 4, 0.5), "anchors.least"),
        ((2, 1, 0.5), "least <= anchors.most"),
        ((1, 99, 0.5), "anchors.most"),
        ((1, 2, 1.5), "anchors.early"),
        ((1, 2, True), "early"),
    ],
)
def test_wrong_numbers_are_named(numbers: tuple[int, int, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_anchor_numbers(*numbers)
