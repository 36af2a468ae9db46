"""Temporal IoU: equal to counting on a grid, monotone, degenerate spans are 0, repeating and splitting never pay."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.errors import ConfigError
from mmrl.rewards.temporal import (
    MODES,
    clip_spans,
    make_span_reward,
    matched_iou,
    merged,
    near_iou,
    span_iop,
    span_iou,
    union_iou,
)

whole = st.integers(0, 40)
spans = st.lists(st.tuples(whole, whole), min_size=1, max_size=5)
real = st.floats(0, 100, allow_nan=False)


def _seconds(some: list[tuple[int, int]]) -> set[int]:
    return {k for a, b in some for k in range(a, b)}


@settings(max_examples=80, deadline=None)
@given(spans, spans)
def test_union_is_counting_whole_seconds(
    p: list[tuple[int, int]], g: list[tuple[int, int]]
) -> None:
    a, b = _seconds(p), _seconds(g)
    assert union_iou(p, g) == pytest.approx(len(a & b) / len(a | b) if a and b else 0.0)
    assert sum(e - s for s, e in merged(p)) == len(a)
    gap = max(0, min(b) - max(a) - 1, min(a) - max(b) - 1) if a and b else 0
    expected = (1 + len(a & b) / len(a | b) - gap / (gap + len(b))) / 2 if a and b else 0.0
    assert near_iou(p, g) == pytest.approx(expected)


@settings(max_examples=100, deadline=None)
@given(spans, spans)
def test_matched_is_the_best_of_all_matchings(
    p: list[tuple[int, int]], g: list[tuple[int, int]]
) -> None:
    few, many = sorted((p, g), key=len)
    best = max(
        math.fsum(span_iou(a, b) for a, b in zip(few, order, strict=True))
        for order in itertools.permutations(many, len(few))
    )
    assert matched_iou(p, g) == pytest.approx(best / len(many))


@settings(max_examples=80, deadline=None)
@given(st.tuples(real, real), st.tuples(real, real), st.floats(0, 1), st.booleans())
def test_moving_an_end_toward_the_truth_never_lowers(
    p: tuple[float, float], g: tuple[float, float], share: float, first: bool
) -> None:
    p, g = (min(p), max(p)), (min(g), max(g))
    moved = (p[0] + share * (g[0] - p[0]), p[1]) if first else (p[0], p[1] + share * (g[1] - p[1]))
    for rule in (
        lambda a: span_iou(a, g),
        lambda a: union_iou([a], [g]),
        lambda a: matched_iou([a], [g]),
    ):
        assert rule(moved) >= rule(p) - 1e-9
    if p[1] > p[0] and moved[1] > moved[0]:
        assert near_iou([moved], [g]) >= near_iou([p], [g]) - 1e-9


@settings(max_examples=100, deadline=None)
@given(spans, spans)
def test_every_rule_is_in_range_and_needs_no_order_and_pays_no_surplus(
    p: list[tuple[int, int]], g: list[tuple[int, int]]
) -> None:
    for mode in MODES:
        reward = make_span_reward(mode)
        value = reward(p, g)
        assert 0 <= value <= 1
        assert reward(p[::-1], g[::-1]) == pytest.approx(value)
        # while spans are missing, a copy is a second guess
        if mode != "matched" or len(p) >= len(g):
            assert reward(p + p, g) <= value + 1e-9, "repeating never pays"
        assert reward([*p, (7, 7)], g) <= value + 1e-9, "a span without length never pays"


def test_exact_and_degenerate() -> None:
    for mode in MODES:
        reward = make_span_reward(mode)
        assert reward([(2, 5)], [(2, 5)]) == 1 and reward([(2, 5), (8, 9)], [(8, 9), (2, 5)]) == 1
        assert (
            reward([(3, 3)], [(2, 5)]) == 0
            and reward([(3, 3)], [(3, 3)]) == 0
            and reward([], [(2, 5)]) == 0
        )
        assert reward([(math.nan, 3)], [(2, 5)]) == 0 and reward([(0, math.inf)], [(2, 5)]) == 0
    assert span_iou((1, 3), (3, 5)) == 0 and span_iou((10, 20), (15, 25)) == pytest.approx(5 / 15)
    assert matched_iou([(2, 3.5), (3.5, 5)], [(2, 5)]) == pytest.approx(0.25), (
        "splitting costs where spans are matched"
    )
    assert union_iou([(2, 3.5), (3.5, 5)], [(2, 5)]) == 1, "and does not where their union counts"


def test_near_pays_the_whole_video_as_its_docs_warn() -> None:
    assert near_iou([(0, 100)], [(10, 20)]) == pytest.approx(0.55) and union_iou(
        [(0, 100)], [(10, 20)]
    ) == pytest.approx(0.1)
    assert near_iou([(20.5, 25)], [(10, 20)]) < 0.5


def test_iop() -> None:
    assert (
        span_iop((3, 4), (2, 6)) == 1
        and span_iop((2, 6), (3, 4)) == 0.25
        and span_iop((6, 2), (3, 4)) == 0
    )
    assert span_iop((3, 3), (2, 6)) == 0


@settings(max_examples=100, deadline=None)
@given(whole, whole, spans)
def test_a_span_that_ends_before_it_starts_is_worth_nothing(
    a: int, b: int, g: list[tuple[int, int]]
) -> None:
    """The formula of TALL, 2D-TAN, VTimeLLM and VideoChat-R1 is at most 0 for it, whatever the truth."""
    start, end = max(a, b), min(a, b)
    for mode in MODES:
        assert make_span_reward(mode)([(start, end)], g) == 0
    for truth in g:
        assert span_iou((start, end), truth) == 0 == span_iop((start, end), truth)
        if truth[0] < truth[1]:
            assert min(end, truth[1]) - max(start, truth[0]) <= 0
    assert union_iou([*g, (start, end)], g) == union_iou(g, g), "beside others it adds nothing"


def test_clipping_to_the_duration() -> None:
    assert clip_spans([(7, 2), (-4, 3), (8, 99), (20, 30)], 10) == [
        (7, 2),
        (0, 3),
        (8, 10),
        (10, 10),
    ]
    assert clip_spans([(5, 99)]) == [(5, 99)] and clip_spans([(99, -5)], 10) == [(10, 0)]


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown accuracy mode 'unoin'.*Did you mean 'union'"):
        make_span_reward("unoin")
    with pytest.raises(ConfigError, match="unknown parameter 'power' of mode union; expected none"):
        make_span_reward("union", power=2)
