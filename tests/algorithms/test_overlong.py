"""Overlong completions: who stays in the loss, and DAPO's soft punishment.

Run: pytest tests/algorithms/test_overlong.py
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.algorithms import (
    OverlongSettings,
    overlong_penalty,
    soft_overlong_penalty,
    trajectory_in_loss,
)
from mmrl.errors import ConfigError
from mmrl.types import Rollout, StopReason, Turn


def _trajectory(*stops: StopReason, error: str | None = None) -> Rollout:
    return Rollout(tuple(Turn((1, 2), "ab", (-0.1, -0.2), stop) for stop in stops), error=error)


def test_only_masking_drops_truncated_trajectories() -> None:
    done, cut = _trajectory(StopReason.EOS), _trajectory(StopReason.LENGTH)
    cut_in_the_middle = _trajectory(StopReason.EOS, StopReason.LENGTH, StopReason.EOS)
    for mode in ("none", "soft"):
        assert all(trajectory_in_loss(t, mode) for t in (done, cut, cut_in_the_middle))
    assert trajectory_in_loss(done, "mask")
    assert not trajectory_in_loss(cut, "mask")
    assert not trajectory_in_loss(cut_in_the_middle, "mask")


@pytest.mark.parametrize("mode", ["none", "mask", "soft"])
def test_failed_and_empty_trajectories_are_never_in_the_loss(mode) -> None:
    assert not trajectory_in_loss(_trajectory(StopReason.EOS, error="decoder died"), mode)
    assert not trajectory_in_loss(_trajectory(StopReason.EOS, StopReason.ERROR), mode)
    assert not trajectory_in_loss(Rollout(()), mode)
    assert not trajectory_in_loss(Rollout((Turn((), "", (), StopReason.EOS),)), mode)


def test_soft_punishment_at_the_paper_s_corners() -> None:
    # L_max 100, L_cache 20: free to 80, -0.5 at 90, -1 from 100 on
    lengths = (0, 80, 85, 90, 100, 101, 500)
    assert [soft_overlong_penalty(n, 100, 20) for n in lengths] == [
        0.0,
        0.0,
        -0.25,
        -0.5,
        -1.0,
        -1.0,
        -1.0,
    ]


@settings(deadline=None)
@given(st.integers(0, 3000), st.integers(1, 1000), st.data())
def test_soft_punishment_is_bounded_and_falls_with_length(
    length: int, max_length: int, data
) -> None:
    cache = data.draw(st.integers(1, max_length))
    here, next_one = (soft_overlong_penalty(n, max_length, cache) for n in (length, length + 1))
    assert -1.0 <= next_one <= here <= 0.0
    if max_length - cache < length <= max_length:
        assert here == pytest.approx((max_length - cache - length) / cache)


def test_soft_punishment_equals_trl() -> None:
    rewards = pytest.importorskip("trl.rewards")
    theirs = rewards.get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    lengths = [*range(0, 130, 7), 80, 81, 100]
    assert [soft_overlong_penalty(n, 100, 20) for n in lengths] == pytest.approx(
        theirs(completion_ids=[[1] * n for n in lengths])
    )


def test_penalty_applies_in_soft_mode_only() -> None:
    soft = OverlongSettings(mode="soft", max_length=100, cache=20)
    assert overlong_penalty(90, soft) == -0.5
    assert overlong_penalty(10_000, OverlongSettings(mode="none")) == 0.0
    assert overlong_penalty(10_000, OverlongSettings(mode="mask", max_length=100, cache=20)) == 0.0


def test_user_errors_say_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=r"none, mask or soft, found 'masked'\. Did you mean 'mask'\?"
    ):
        OverlongSettings(mode="masked")  # type: ignore[arg-type]
    for cache, max_length in ((None, 100), (0, 100), (101, 100), (20, None)):
        with pytest.raises(ConfigError, match="0 < cache <= max_length"):
            OverlongSettings(mode="soft", max_length=max_length, cache=cache)
    with pytest.raises(ConfigError, match="0 < cache <= max_length"):
        soft_overlong_penalty(5, 10, 11)
