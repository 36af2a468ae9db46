"""T-GRPO's condition and bonus, and when its second group of rollouts may be left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.algorithms import (
    ContrastSettings,
    EmaScale,
    EmaSettings,
    bonuses,
    centred,
    group_advantages,
    needs_contrast,
    over_rewards_std,
)
from mmrl.errors import ConfigError

accuracies = st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.5, 1.0]), min_size=2, max_size=8)


def test_the_numbers_of_video_r1() -> None:
    rule = ContrastSettings()
    assert bonuses([1, 0, 1, 0], [1, 0], rule) == [0.3, 0, 0.3, 0], "p = p~ = 0.5 >= 0.8 * 0.5"
    assert bonuses([1, 0, 0, 0], [1, 0], rule) == [0, 0, 0, 0], "0.25 < 0.8 * 0.5"
    assert bonuses([1, 0, 0, 0, 0], [1, 0, 0, 0], rule) == [0.3, 0, 0, 0, 0], (
        "0.2 >= 0.8 * 0.25: equality counts"
    )
    assert bonuses([0, 0], [0, 0], rule) == [0, 0], "the condition holds, but nobody qualifies"
    assert bonuses([0.1, 0.11], [0.0], rule) == [0, 0.3], "above the threshold, not at it"
    assert bonuses([1, 0], [], rule) == [0, 0], (
        "every rollout of the other group failed: nothing is known"
    )
    assert bonuses([1, 0, 0, 0], [1, 0], ContrastSettings(factor=0.5, bonus=1.0)) == [1, 0, 0, 0]


@settings(max_examples=150, deadline=None)
@given(accuracies, accuracies)
def test_a_skipped_group_changes_no_advantage(plain: list[float], changed: list[float]) -> None:
    rule = ContrastSettings()
    if needs_contrast(plain, rule):
        return
    rolled_out = np.add(plain, bonuses(plain, changed, rule))
    skipped = np.add(plain, bonuses(plain, None, rule))
    for scale in ("std", "none"):
        assert np.allclose(
            group_advantages(rolled_out.tolist(), scale),
            group_advantages(skipped.tolist(), scale),
            atol=1e-5,
        )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(accuracies, accuracies), min_size=1, max_size=5),
    st.sampled_from(["ema", "ema_within", "batch_rewards"]),
)
def test_nor_does_it_where_groups_are_divided_by_a_common_std(
    groups: list[tuple[list[float], list[float]]], scale: str
) -> None:
    rule = ContrastSettings(pooled=scale != "ema_within")
    found = []
    for skip in (False, True):
        rewards = [
            np.add(
                plain,
                bonuses(plain, None if skip and not needs_contrast(plain, rule) else changed, rule),
            ).tolist()
            for plain, changed in groups
        ]
        if scale == "batch_rewards":
            found.append(over_rewards_std([centred(r) for r in rewards], rewards))
        else:
            ema = EmaScale(EmaSettings(within=scale == "ema_within"))
            ema.update([("t", r) for r in rewards])
            found.append([ema.advantages("t", r) for r in rewards])
    for rolled_out, skipped in zip(*found, strict=True):
        assert skipped == pytest.approx(rolled_out, abs=1e-5)


@settings(max_examples=100, deadline=None)
@given(accuracies, st.sampled_from([0.0, 0.5, 0.8, 1.0, 1.5]))
def test_every_group_is_rolled_out_when_asked(plain: list[float], factor: float) -> None:
    assert needs_contrast(plain, ContrastSettings(factor=factor, skip=False))
    assert bonuses(plain, None, ContrastSettings(factor=factor, skip=False)) == [0.0] * len(plain)


def test_what_cannot_matter() -> None:
    rule = ContrastSettings()
    assert (
        needs_contrast([1, 0, 0, 0], rule)
        and not needs_contrast([1, 1], rule)
        and not needs_contrast([0, 0.1], rule)
    )
    assert not needs_contrast([1, 1, 1, 1, 0], rule), (
        "0.8 >= 0.8 * 1: nothing the others do can change it"
    )
    assert needs_contrast([1, 1, 1, 1, 0], rule, top=2.0), "an accuracy part that may reach 2"
    assert not needs_contrast([1, 0], ContrastSettings(bonus=0.0))
    pooled = ContrastSettings(pooled=True)
    assert needs_contrast([0.5, 0.5], pooled) and not needs_contrast([0, 0.1], pooled), (
        "every answer's bonus widens a common std"
    )


@pytest.mark.parametrize(
    ("name", "value"), [("factor", -1), ("bonus", float("nan")), ("threshold", -0.1)]
)
def test_impossible_settings(name: str, value: float) -> None:
    with pytest.raises(
        ConfigError, match=rf"algorithm\.contrast\.{name} as a number of at least 0, found"
    ):
        ContrastSettings(**{name: value})


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=8), st.sampled_from([0.05, 0.3, 3.0])
)
def test_two_valued_rewards_lose_the_bonus_in_the_division_by_their_own_spread(
    right: list[float], bonus: float
) -> None:
    paid = bonuses(right, [0.0], ContrastSettings(bonus=bonus))
    assert paid == [bonus * r for r in right], "never below a contrast group that is always wrong"
    raised = np.add(right, paid).tolist()
    assert np.allclose(group_advantages(right, "std"), group_advantages(raised, "std"), atol=1e-5)
    assert np.allclose(
        (1 + bonus) * group_advantages(right, "none").numpy(),
        group_advantages(raised, "none"),
        atol=1e-6,
    )


def test_the_bonus_acts_beside_a_second_reward_part_and_without_the_division() -> None:
    accuracy, form = [1.0, 1.0, 0.0, 0.0], [0.1, 0.0, 0.1, 0.0]
    paid = bonuses(accuracy, [0.0], ContrastSettings())
    both = np.add(accuracy, form)
    without, with_bonus = (
        group_advantages(both.tolist(), "std"),
        group_advantages((both + paid).tolist(), "std"),
    )
    assert float((without - with_bonus).abs().max()) > 0.01
    assert float(with_bonus[0] - with_bonus[1]) < float(without[0] - without[1]), (
        "the other part weighs less"
    )
    plain, raised = (
        group_advantages(accuracy, "none"),
        group_advantages(np.add(accuracy, paid).tolist(), "none"),
    )
    assert plain.tolist() == [0.5, 0.5, -0.5, -0.5] and np.allclose(
        raised, [0.65, 0.65, -0.65, -0.65]
    )
