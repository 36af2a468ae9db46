"""Counting: the one number of an answer, four rewards, and points that are matched."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.errors import ConfigError
from mmrl.rewards.counting import (
    MODES,
    closeness,
    found_points,
    make_counting_reward,
    parse_count,
    point_closeness,
)
from tests.kits.clock_kit import takes_less

count = st.integers(0, 60)
point = st.tuples(st.floats(0, 1000), st.floats(0, 1000))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        (" 0\n", 0),
        ("zero", 0),
        ("Three.", 3),
        ("There are twenty-one circles.", 21),
        ("twenty one", 21),
        ("NINETY-NINE", 99),
        ("eleven", 11),
        ("sixty", 60),
        ("3.0", 3),
        ("1,200", 1200),
        ("**7**", 7),
        ("12 apples", 12),
        ("007", 7),
        ("$5$", 5),
        ("1000000", 1_000_000),
        ("seventeen", 17),
        ("There are 4 cats.", 4),
        ("4 birds over the lake", 4),
        ("The answer is 4", 4),
        ("I count four people around the table", 4),
        ("there's 4", 4),
        ("Exactly 4!", 4),
    ],
)
def test_one_number_in_digits_or_words(text: str, value: int) -> None:
    assert parse_count(text).count == value and parse_count(text).reason is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("none", "not_a_number"),
        ("3 or 4", "several_numbers"),
        ("2-3", "several_numbers"),
        ("three (3)", "several_numbers"),
        ("one two", "several_numbers"),
        ("1/2", "several_numbers"),
        ("-3", "not_a_count"),
        ("3.5", "not_a_count"),
        ("one hundred", "not_a_number"),
        ("minus three", "not_a_number"),
        ("x3", "not_a_number"),
        ("3rd", "not_a_number"),
        ("1e3", "not_a_number"),
        ("30%", "not_a_number"),
        ("３", "not_a_number"),
        ("٣", "not_a_number"),
        ("3²", "not_a_number"),
        ("1,2000", "not_a_number"),
        ("3 ٤", "several_numbers"),
        ("1000001", "out_of_range"),
        *(
            (text, "hedged")
            for text in (
                "not 4",
                "isn't 4",
                "It isn’t four",
                "no 4",
                "at least 4",
                "At most four",
                "4 or more",
                "4 or so",
                "more than 4",
                "4+",
                "~4",
                ">4",
                "≥ 4",
                "about 4",
                "around **4**",
                "approximately 4",
                "nearly the 4",
                "up to 4",
                "over 4 birds",
                "as many as 4",
                "no fewer than 4",
                "maybe 4",
                "4-ish",
                "all but 4",
                "probably 4",
                "under 4",
                "I could see 4",
                "4 plus",
            )
        ),
        *(
            (text, "not_a_number")
            for text in (
                "4 trillion",
                "4 billion",
                "4 zillion",
                "four milliard",
                "4 k",
                "four score",
                "4 lakh",
            )
        ),
        ("9" * 150, "out_of_range"),
        ("1" * 201, "answer_too_long"),
        ("someone", "not_a_number"),
        ("NaN", "not_a_number"),
    ],
)
def test_everything_else_fails_with_its_reason(text: str, reason: str) -> None:
    parsed = parse_count(text)
    assert (parsed.count, parsed.reason) == (None, reason)


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(max_size=220), st.text("0123456789.,-+ twenty-one zero", max_size=60)))
def test_total_on_any_text(text: str) -> None:
    parsed = parse_count(text)
    assert (parsed.count is None) == (parsed.reason is not None)
    assert parsed.count is None or 0 <= parsed.count <= 1_000_000


@pytest.mark.parametrize(
    "text",
    [
        "1," * 100,
        "," * 200,
        "1" * 200,
        "twenty-" * 28,
        "9,999" * 40,
        "-" * 200,
        "about " * 33,
        "over the " * 22 + "4",
        "n't" * 66,
        "over" + " " * 190 + "4",
        "over " + "*" * 190 + "4",
    ],
)
def test_hostile_text_takes_no_time(text: str) -> None:
    takes_less(0.5, lambda: parse_count(text))


@settings(deadline=None)
@given(st.sampled_from(["exact", "smooth", "relative"]), count, count)
def test_one_only_for_the_right_number_and_never_lower_nearer(
    mode: str, predicted: int, true: int
) -> None:
    reward = make_counting_reward(mode)
    value = reward(predicted, true)
    assert 0 <= value <= 1 and (value == 1) == (predicted == true)
    step = (true > predicted) - (true < predicted)
    assert reward(predicted + step, true) >= value
    assert reward(true, true) == 1 and (true == 0 or reward(0, true) == 0) and reward(1, 0) == 0


def test_formulas() -> None:
    assert make_counting_reward("smooth")(3, 4) == closeness(4, 3) == 0.75
    assert make_counting_reward("smooth", power=2)(3, 4) == 0.5625
    assert (
        make_counting_reward("relative")(3, 4) == 0.75
        and make_counting_reward("relative")(9, 4) == 0
    )
    assert make_counting_reward()(3, 4) == 0 and make_counting_reward()(0, 0) == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(point, max_size=4), st.lists(point, max_size=4))
def test_points_are_matched_by_the_smallest_distance(
    predicted: list[tuple[float, float]], true: list[tuple[float, float]]
) -> None:
    value = point_closeness(predicted, true)
    assert 0 <= value <= 1 and point_closeness(predicted[::-1], true) == pytest.approx(value)
    if not predicted or not true:
        assert value == float(len(predicted) == len(true))
        return
    few, many = sorted((predicted, true), key=len)
    best = min(
        sum(math.dist(a, b) for a, b in zip(few, chosen, strict=True))
        for chosen in itertools.permutations(many, len(few))
    )
    assert value == pytest.approx(1 - best / len(few) / (1000 * math.sqrt(2)), abs=1e-6)


def test_found_points_by_hand() -> None:
    reward = make_counting_reward("points")
    true = [(100.0, 100.0), (900.0, 900.0)]
    assert reward(2, 2, true[::-1], true) == 1 and reward(0, 0, [], []) == 1 == reward(
        2, 2, [(140, 100), (900, 870)], true
    )
    assert reward(1, 2, true[:1], true) == pytest.approx(2 / 3), "one of two"
    assert (
        reward(2, 2, [true[0], (500, 500)], true) == reward(2, 2, [true[0], true[0]], true) == 0.5
    ), "padding costs"
    assert reward(2, 2, [(175, 100), true[1]], true) == pytest.approx(0.75), (
        "three quarters of the reach: half a point"
    )
    assert reward(3, 2, [*true, (105.0, 100.0)], true) == pytest.approx(4 / 5), "a copy costs"
    assert reward(1, 0, [(1, 1)], []) == 0 == reward(0, 1, [], true[:1]) == reward(2, 2, None, true)
    assert reward(2, 2, [(5.0, 5.0)] * 2, [(4.0, 4.0), (6.0, 6.0)]) == 1, "two things at one place"
    near = [(400.0, 400.0), (440.0, 400.0)]  # a reach of 20: halfway between them is neither
    assert (
        reward(2, 2, [(420, 400), (900, 0)], near) == 0
        and reward(2, 2, [(409, 400), (431, 400)], near) == 1
    )
    assert make_counting_reward("points", reach=400)(1, 1, [(100, 400)], true[:1]) == pytest.approx(
        0.5
    )
    assert found_points([(9e6, -5)], [(1000, 0)]) == 1, "outside is the edge"


@settings(max_examples=80, deadline=None)
@given(st.lists(point, max_size=6), st.lists(point, max_size=6), point)
def test_found_points_count_nothing_twice(
    predicted: list[tuple[float, float]], true: list[tuple[float, float]], more: tuple[float, float]
) -> None:
    reward = make_counting_reward("points")
    value = found_points(predicted, true)
    assert 0 <= value <= min(len(predicted), len(true)) + 1e-9 and found_points(
        predicted[::-1], true[::-1]
    ) == pytest.approx(value)
    assert value - 1e-9 <= found_points([*predicted, more], true) <= value + 1 + 1e-9
    far = [t for t in true if all(math.dist(t, o) >= 50 for o in true if o is not t)]
    if predicted and far:  # copies moved by a little find no more objects than one of them
        copies = [(far[0][0] + i, far[0][1]) for i in range(5)]
        assert found_points(copies, true) <= 1 + 1e-9
    assert reward(len(predicted), len(true), predicted, true) == (
        pytest.approx(2 * value / (len(predicted) + len(true))) if predicted or true else 1
    )


def _guesses(count: int, rng: random.Random) -> dict[str, list[tuple[float, float]]]:
    """Answers that know the number of objects and nothing of the picture."""
    side = math.ceil(math.sqrt(count))
    return {
        "copies": [(500.0, 500.0)] * count,
        "moved by one": [(500.0 + i, 500.0) for i in range(count)],
        "scattered": [(rng.uniform(0, 1000), rng.uniform(0, 1000)) for _ in range(count)],
        "grid": [
            ((i % side + 0.5) * 1000 / side, (i // side + 0.5) * 1000 / side) for i in range(count)
        ],
    }


def test_scattered_points_earn_less_than_half_of_the_objects() -> None:
    """The published formula pays the guesses 0.70 to 0.79 and half of the objects 0.45."""
    rng = random.Random(0)
    rewards = {rule: make_counting_reward("points", rule=rule) for rule in ("matched", "published")}
    means: dict[tuple[str, str], list[float]] = {}
    for number in range(120):
        true = [(rng.uniform(50, 950), rng.uniform(50, 950)) for _ in range(3 + number % 10)]
        half = true[: len(true) // 2]
        guesses = _guesses(len(true), rng)
        padded = [*half, *guesses["scattered"][len(half) :]]
        for name, guess in {**guesses, "half": half, "half, padded": padded}.items():
            for rule, reward in rewards.items():
                means.setdefault((rule, name), []).append(
                    reward(len(guess), len(true), guess, true)
                )
    mean = {key: math.fsum(values) / len(values) for key, values in means.items()}
    assert (
        max(mean["published", name] for name in ("moved by one", "scattered", "grid"))
        > 1.5 * mean["published", "half"]
    )
    assert all(
        mean["matched", name] < 0.4 * mean["matched", "half"]
        for name in ("copies", "moved by one", "scattered", "grid")
    )
    assert (
        mean["matched", "half"] > 0.55
        and mean["matched", "half, padded"] < mean["matched", "half"] - 0.05
    )
    assert mean["published", "half, padded"] > 1.5 * mean["published", "half"], (
        "it pays for padding, too"
    )


def test_published_points_by_hand() -> None:
    reward = make_counting_reward("points", rule="published")
    true = [(0.0, 0.0), (1000.0, 1000.0)]
    assert (
        reward(2, 2, true[::-1], true) == 1
        and reward(0, 0, [], []) == 1
        and reward(1, 0, [(1, 1)], []) == 0
    )
    assert reward(1, 2, [(0.0, 300.0)], true) == pytest.approx(
        0.5 * (1 - 300 / (1000 * math.sqrt(2)))
    )
    assert reward(3, 2, [*true, true[0]], true) == pytest.approx(2 / 3), "a copy costs"
    assert reward(2, 2, [(0.0, 0.0)] * 2, true) == reward(1, 2, [(0.0, 0.0)], true) == 0.5, (
        "copies do not fill up the number"
    )
    assert reward(2, 2, [(5.0, 5.0)] * 2, [(4.0, 4.0), (6.0, 6.0)]) > 0.99, (
        "two things at one place"
    )
    assert reward(2, 2, None, true) == 0, "a bare number is no list of points"
    assert reward(2, 2, [(9e6, 9e6), (0, 0)], true) == 1, "outside is the edge, never below 0"
    with pytest.raises(ValueError, match="the 2 true points"):
        reward(2, 2, true, None)
    with pytest.raises(ValueError, match="counts >= 0"):
        reward(-1, 2)


@pytest.mark.parametrize(
    ("mode", "params", "message"),
    [
        ("exat", {}, "Did you mean 'exact'"),
        ("smooth", {"powr": 1}, "Did you mean 'power'"),
        ("smooth", {"power": 0}, "power to be"),
        ("exact", {"power": 1}, "expected none"),
        ("points", {"rule": "publishd"}, "Did you mean 'published'"),
        ("points", {"reach": 5}, "reach to be"),
    ],
)
def test_wrong_parameters_are_named(mode: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_counting_reward(mode, **params)
    assert sorted(MODES) == ["exact", "points", "relative", "smooth"]
