"""Advantages against the textbook formula, and the invariances a group-relative advantage must have.

Run: pytest tests/algorithms/test_advantages.py
"""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.algorithms import group_advantages, has_signal
from mmrl.errors import ConfigError, NonFiniteError

rewards = st.lists(st.floats(0, 1, width=32), min_size=2, max_size=12)
spread_rewards = rewards.filter(lambda r: max(r) - min(r) > 1e-2)


@settings(deadline=None)
@given(rewards)
def test_equal_the_formulas(values: list[float]) -> None:
    mean = statistics.fmean(values)
    std = statistics.stdev(values)
    plain = group_advantages(values, "none")
    scaled = group_advantages(values, "std", eps=1e-6)
    if max(values) == min(values):
        assert plain.tolist() == scaled.tolist() == [0.0] * len(values)
        return
    assert plain.tolist() == pytest.approx([r - mean for r in values], abs=1e-6)
    assert scaled.tolist() == pytest.approx(
        [(r - mean) / (std + 1e-6) for r in values], rel=1e-5, abs=1e-6
    )


def test_worked_example() -> None:
    # mean 0.5, unbiased std sqrt(4 * 0.25 / 3) = 0.57735
    out = group_advantages([0, 0, 1, 1], eps=0.0)
    assert out.dtype == torch.float32 and out.shape == (4,)
    assert out.tolist() == pytest.approx([-0.8660254, -0.8660254, 0.8660254, 0.8660254])


@settings(deadline=None)
@given(spread_rewards, st.floats(-3, 3), st.floats(0.5, 20))
def test_shift_and_scale(values: list[float], shift: float, scale: float) -> None:
    shifted = [r + shift for r in values]
    stretched = [r * scale for r in values]
    for mode in ("std", "none"):
        expected = group_advantages(values, mode)
        torch.testing.assert_close(group_advantages(shifted, mode), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        group_advantages(stretched, eps=0.0), group_advantages(values, eps=0.0)
    )
    torch.testing.assert_close(
        group_advantages(stretched, "none"), group_advantages(values, "none") * scale
    )


@settings(deadline=None)
@given(spread_rewards, st.randoms(use_true_random=False))
def test_follow_their_rewards_under_permutation_and_sum_to_zero(
    values: list[float], random
) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    out = group_advantages(values)
    torch.testing.assert_close(group_advantages([values[i] for i in order]), out[order])
    assert abs(out.double().sum().item()) < 1e-5


@settings(deadline=None)
@given(st.floats(0, 1), st.integers(1, 16))
def test_equal_rewards_are_exactly_zero(value: float, size: int) -> None:
    # 0.1 summed ten times and divided is not 0.1: without care the rest is blown up by 1 / eps
    for mode in ("std", "none"):
        assert group_advantages([value] * size, mode, eps=1e-12).tolist() == [0.0] * size
    assert not has_signal([value] * size, tol=0.0)


def test_clip_bounds_both_sides() -> None:
    values = [0.0] * 7 + [1.0]
    assert group_advantages(values).max() > 2
    clipped = group_advantages(values, clip=1.5)
    assert clipped.max().item() == 1.5
    assert clipped[0] == group_advantages(values)[0]
    assert group_advantages([1 - v for v in values], clip=1.5).min().item() == -1.5


def test_signal_tolerance() -> None:
    assert has_signal([0.0, 0.1])
    assert has_signal(torch.tensor([0.0, 1.0]))
    assert not has_signal([0.3, 0.1 + 0.2])  # differ by rounding only
    assert has_signal([0.3, 0.1 + 0.2], tol=0.0)
    assert not has_signal([0.0, 0.1], tol=0.2)
    assert not has_signal([0.5]) and not has_signal([])


def test_user_errors_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"'std' or 'none', found 'stdd'\. Did you mean 'std'\?"):
        group_advantages([0, 1], "stdd")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="clip above 0"):
        group_advantages([0, 1], clip=0.0)
    with pytest.raises(NonFiniteError, match="found nan at position 1 of a group of 3"):
        group_advantages([0.0, float("nan"), 1.0])
    with pytest.raises(NonFiniteError, match="found inf at position 0"):
        has_signal([float("inf"), 0.0, float("nan")])
