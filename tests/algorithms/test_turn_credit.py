"""Advantages of single turns against plain loops, and the choice of turns by entropy.

Run: pytest tests/algorithms/test_turn_credit.py
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.algorithms import (
    discounted_returns,
    group_advantages,
    highest_entropy,
    rewards_of_turns,
    turn_advantages,
)
from mmrl.errors import ConfigError, NonFiniteError

rewards = st.lists(st.integers(-8, 8).map(lambda n: n / 8), min_size=1, max_size=5)
groups = st.lists(rewards, min_size=1, max_size=6)


def naive(
    group: list[list[float]], gamma: float, normalise: str, scale: str, baseline: str
) -> dict[tuple[int, int], float]:
    """From the definitions, loop by loop, in float64."""
    returns = {}
    for g, row in enumerate(group):
        for t in range(len(row)):
            returns[g, t] = sum(row[k] * gamma ** (k - t) for k in range(t, len(row)))
    found = {}
    for (g, t), mine in returns.items():
        others = [
            value
            for (h, k), value in returns.items()
            if (h, k) != (g, t) and (normalise == "all_turns" or k == t)
        ]
        if not others:
            found[g, t] = 0.0
            continue
        together = [*others, mine]
        middle = sum(others) / len(others) if baseline == "rloo" else statistics.mean(together)
        found[g, t] = mine - middle
        if scale == "std":
            found[g, t] /= statistics.stdev(together) + 1e-6
    return found


@settings(deadline=None, max_examples=150)
@given(
    groups,
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.sampled_from(["turn_index", "all_turns"]),
    st.sampled_from([("std", "grpo"), ("none", "grpo"), ("none", "rloo")]),
)
def test_they_are_those_of_plain_loops(
    group: list[list[float]], gamma: float, normalise: Any, kind: Any
) -> None:
    scale, baseline = kind
    found = turn_advantages(group, gamma, normalise, scale, baseline)
    assert [len(row) for row in found] == [len(row) for row in group]
    expected = naive(group, gamma, normalise, scale, baseline)
    for (g, t), value in expected.items():
        # rewards are eighths: a spread is 0, or far above what rounding leaves of it over eps
        assert found[g][t] == pytest.approx(value, rel=1e-5, abs=2e-6)


def test_worked_example() -> None:
    """Two rollouts of two turns and one of three. Returns at gamma 0.5: (1.5, 1), (0, 0), (0.25, 0.5, 1)."""
    group = [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0, 1.0]]
    assert [discounted_returns(r, 0.5) for r in group] == [[1.5, 1.0], [0.0, 0.0], [0.25, 0.5, 1.0]]
    found = turn_advantages(group, 0.5, "turn_index", "none")
    first = 1.75 / 3
    assert found[0] == pytest.approx([1.5 - first, 0.5])
    assert found[1] == pytest.approx([0.0 - first, -0.5])
    # alone at its index: nothing to be compared with
    assert found[2] == pytest.approx([0.25 - first, 0.0, 0.0]) and found[2][2] == 0.0
    pooled = turn_advantages(group, 0.5, "all_turns", "none")
    mean = 4.25 / 7
    assert pooled[2] == pytest.approx([0.25 - mean, 0.5 - mean, 1.0 - mean])


def test_gamma_is_how_far_a_turn_answers() -> None:
    paid = [0.25, -1.0, 0.5, 2.0]
    assert discounted_returns(paid, 0.0) == paid
    assert discounted_returns(paid, 1.0) == [1.75, 1.5, 2.5, 2.0]
    assert discounted_returns([], 0.9) == []
    # an outcome alone, undiscounted, is every turn's return: whole groups of one length are GRPO's
    group = [[0.0, 0.0, r] for r in (0.0, 1.0, 0.25)]
    whole = group_advantages([0.0, 1.0, 0.25]).tolist()
    assert turn_advantages(group, 1.0) == [[a] * 3 for a in whole]


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.sampled_from([0.0, 0.7, 1.0]))
def test_with_one_turn_each_they_are_grpos_bit_for_bit(values: list[float], gamma: float) -> None:
    for scale in ("std", "none"):
        for normalise in ("turn_index", "all_turns"):
            found = turn_advantages([[v] for v in values], gamma, normalise, scale)  # type: ignore[arg-type]
            assert [a for (a,) in found] == group_advantages(values, scale).tolist()  # type: ignore[arg-type]


def test_what_the_outcome_adds_comes_last() -> None:
    assert rewards_of_turns([0.25, 0.5], 1.75) == [0.25, 1.5]
    assert rewards_of_turns([0.25, 0.5], 0.5) == [0.25, 0.25], "a penalty too"
    # added one by one they are more than their exact sum: rounding is no reward
    assert rewards_of_turns([0.1, 0.2, 0.3], 0.1 + 0.2 + 0.3) == [0.1, 0.2, 0.3]
    assert rewards_of_turns([0.1], 0.3) == [0.3] and rewards_of_turns([], 0.3) == []


def test_names_and_numbers_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="turn_index or all_turns, found 'turn_indx'"):
        turn_advantages([[1.0], [0.0]], 1.0, "turn_indx")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'none' with baseline 'rloo', found 'std'"):
        turn_advantages([[1.0], [0.0]], baseline="rloo")
    with pytest.raises(NonFiniteError, match="expected finite rewards"):
        turn_advantages([[1.0, math.nan], [0.0, 0.0]])


# the choice by entropy

entropies = st.lists(
    st.lists(st.one_of(st.none(), st.integers(0, 5).map(float)), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=200)
@given(entropies, st.floats(0.01, 1))
def test_kept_are_the_highest_and_no_more_than_asked_for(
    table: list[list[float | None]], share: float
) -> None:
    kept, threshold = highest_entropy(table, share)
    flat = [
        (entropy, keeps)
        for row, answers in zip(table, kept, strict=True)
        for entropy, keeps in zip(row, answers, strict=True)
    ]
    assert not any(keeps for entropy, keeps in flat if entropy is None)
    known = [(entropy, keeps) for entropy, keeps in flat if entropy is not None]
    if all(len(row) == 1 for row in table):
        assert threshold is None and all(keeps for _, keeps in known)
        return
    number = sum(keeps for _, keeps in known)
    if not known:
        assert threshold is None and number == 0
        return
    assert number >= 1 and share * len(known) - 1e-6 <= number < share * len(known) + 1
    inside = [entropy for entropy, keeps in known if keeps]
    assert threshold == min(inside)
    assert all(entropy <= threshold for entropy, keeps in known if not keeps)


def test_ties_go_to_the_earlier_rollout_then_the_earlier_turn() -> None:
    kept, threshold = highest_entropy([[1.0, 2.0], [2.0, 2.0], [2.0]], 0.4)
    assert kept == [[False, True], [True, False], [False]] and threshold == 2.0


def test_shares_are_counted_without_rounding() -> None:
    """0.55 * 100 is a little more than 55, in floating point."""
    table: list[list[float | None]] = [[float(n), -float(n)] for n in range(1, 51)]
    assert sum(map(sum, highest_entropy(table, 0.55)[0])) == 55
    assert sum(map(sum, highest_entropy(table, 0.551)[0])) == 56
    for share in (0.0, 1.1, math.nan):
        with pytest.raises(ConfigError, match=r"share of turns in \(0, 1\]"):
            highest_entropy(table, share)
    with pytest.raises(NonFiniteError, match="found nan at turn 1 of rollout 0"):
        highest_entropy([[1.0, math.nan]], 0.5)
