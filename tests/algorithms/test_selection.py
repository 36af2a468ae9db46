"""Variance-based selection: the measure against brute force, the memory as a state machine, resumed at any step."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mmrl.algorithms import VarianceSelection, largest_variance
from mmrl.config import SelectionConfig
from mmrl.errors import CheckpointError


def selection(**options: Any) -> VarianceSelection:
    return VarianceSelection(SelectionConfig.model_validate({"kind": "variance", **options}))


@pytest.mark.parametrize("size", range(2, 9))
def test_the_largest_variance_is_that_of_the_most_spread_group(size: int) -> None:
    brute = max(np.var(g, ddof=1) for g in itertools.product((0.0, 1.0), repeat=size))
    assert largest_variance(size) == pytest.approx(brute)
    assert largest_variance(size) == pytest.approx(
        size / (4 * (size - 1)) if size % 2 == 0 else (size + 1) / (4 * size)
    )
    assert (
        largest_variance(size, -0.5, 2.0) == pytest.approx(brute * 2.5**2)
        and largest_variance(1) == 0
    )


@given(st.lists(st.integers(-8, 16).map(lambda n: n / 16), min_size=2, max_size=8))
def test_strength_is_variance_relative_to_the_possible_or_the_std(rewards: list[float]) -> None:
    strength = selection().strength(rewards, -0.5, 1.0)
    assert 0 <= strength <= 1
    assert strength == pytest.approx(
        np.var(rewards, ddof=1) / largest_variance(len(rewards), -0.5, 1.0)
    )
    assert selection(kind="std").strength(rewards) == pytest.approx(np.std(rewards, ddof=1))


def test_half_solved_is_strongest_and_the_threshold_is_inclusive() -> None:
    found = [selection().strength([1.0] * k + [0.0] * (8 - k)) for k in range(9)]
    assert found[4] == pytest.approx(1.0) and found == sorted(found[:5]) + sorted(
        found[5:], reverse=True
    )
    assert found[0] == found[8] == 0
    chosen = selection(threshold=found[2])
    assert chosen.keeps(found[2]) and not chosen.keeps(found[1])
    assert not selection(threshold=0.0).keeps(0.0), (
        "equal rewards teach nothing, whatever the threshold"
    )


def test_priorities_have_momentum_and_mastered_samples_leave() -> None:
    s = selection(threshold=0.3, momentum=0.5, rest=1)
    s.begin_step(1, 4)
    s.observe("a", "x", 0.8)
    s.observe("a", "weak", 0.1)
    assert len(s) == 1, "a sample enters only when it is kept"
    s.begin_step(2, 4)
    s.observe("a", "x", 0.2)
    assert s.state_dict() == {"memory": [["a", "x", 0.5, 2]]}
    s.begin_step(3, 4)
    s.observe("a", "x", 0.0)
    assert len(s) == 0, "0.25 is below the threshold"


def test_replay_takes_the_best_rested_allowed_sample_once_per_step() -> None:
    s = selection(rest=2, replay_share=0.5)
    s.begin_step(1, 4)
    for name, strength in (("x", 0.5), ("y", 0.9), ("z", 0.7)):
        s.observe("a", name, strength)
    assert s.replay() is None, "seen in this step"
    s.begin_step(2, 4)
    assert s.replay() is None, "still resting"
    s.begin_step(3, 4)
    assert s.replay(lambda source, name: name != "y") == ("a", "z"), "y belongs to another stage"
    assert s.replay() == ("a", "y") and s.replay() is None and s.replayed == 2, (
        "half of four places"
    )
    s.begin_step(4, 4)
    assert s.replay() == ("a", "x") and s.replay() is None
    assert s.metrics() == {"replayed": 1, "memory": 3, "priority": pytest.approx(0.7)}


def test_the_memory_is_bounded_and_the_weakest_leaves() -> None:
    s = selection(memory=3, threshold=0.0)
    s.begin_step(1, 1)
    for number in range(10):
        s.observe("a", str(number), (number * 7 % 10 + 1) / 10)
    assert sorted(row[2] for row in s.state_dict()["memory"]) == [0.8, 0.9, 1.0]


def course(seed: int, cut: int | None) -> list[Any]:
    """Fifteen random steps; the state goes through JSON into a new object before step `cut`."""
    s, rng, notes = selection(memory=6, rest=2), random.Random(seed), []
    for step in range(15):
        if step == cut:
            state = json.loads(json.dumps(s.state_dict()))
            s = selection(memory=6, rest=2)
            s.load_state_dict(state)
        s.begin_step(step, 4)
        for _ in range(4):
            s.observe("a", str(rng.randrange(12)), rng.random())
        notes.append((s.replay(), s.replay(), s.replay(), s.metrics()))
    return notes


@given(st.integers(0, 10**6), st.integers(0, 14))
def test_resumed_at_any_step_it_continues_identically(seed: int, cut: int) -> None:
    assert course(seed, cut) == course(seed, None)


def test_wrong_settings_and_states_are_refused() -> None:
    for wrong in (
        {"threshold": -1},
        {"replay_share": 2},
        {"momentum": 1.0},
        {"memory": 0},
        {"rest": 0},
    ):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            selection(**wrong)
    with pytest.raises(CheckpointError, match="earlier checkpoint"):
        selection().load_state_dict({"memory": [["a"]]})


def test_the_threshold_may_change_on_the_way_as_in_vcrl() -> None:
    selection = VarianceSelection(
        SelectionConfig(kind="variance", threshold=[(20, 0.3), (21, 0.8)])
    )
    kept = []
    for step in (1, 20, 21, 500):
        selection.begin_step(step, 8)
        kept.append((selection.keeps(0.5), selection.keeps(0.9)))
    assert kept == [(True, True), (True, True), (False, True), (False, True)]
    for wrong in ((), ((5, 0.3), (5, 0.8)), ((9, 0.3), (2, 0.8))):
        with pytest.raises(ValidationError, match="rising steps" if wrong else "expected numbers"):
            SelectionConfig.model_validate({"kind": "variance", "threshold": wrong})
