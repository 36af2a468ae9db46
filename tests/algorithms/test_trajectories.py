"""Episodes to loss inputs: rewards, grids, token masks, length weights.

Run: pytest tests/algorithms/test_trajectories.py
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrl.algorithms import (
    EpisodeCounts,
    GAESettings,
    ObjectiveSettings,
    ReturnSettings,
    chunk_gae,
    length_weights,
    make_grid,
    policy_loss,
    return_parts,
    step_rewards,
    token_mask,
    trajectory_return,
)
from mmrl.errors import ConfigError
from mmrl.types import Rollout, StopReason, Turn

C, DIMS = 3, 2


def _episode(
    rewards: list[float],
    success: bool = False,
    at_end: bool | None = None,
    error: str | None = None,
    truncated: bool = False,
) -> Rollout:
    """Control steps cut into chunks of C; what was never executed carries junk."""
    turns = []
    for k in range(0, len(rewards), C):
        part, last = rewards[k : k + C], k + C >= len(rewards)
        n = C * DIMS
        turns.append(
            Turn(
                tuple(range(n)),
                "",
                tuple(-0.1 * (k + i + 1) for i in range(n)),
                StopReason.EOS,
                values=(k / 10,),
                rewards=(*part, *[99.0] * (C - len(part))),
                valid=tuple(i < len(part) for i in range(C)),
                terminated=last and not truncated,
                truncated=last and truncated,
            )
        )
    info = {
        "success_once": float(success),
        "success_at_end": float(success if at_end is None else at_end),
    }
    return Rollout(tuple(turns), info=info, error=error)


def test_rewards_by_hand() -> None:
    """A state that pays in steps 2 to 4 and is lost in step 5; five steps in chunks of three."""
    episode = _episode([0, 0.2, 1, 1, 0.5], success=True, at_end=False)

    def steps(**settings) -> list[float]:
        rows = step_rewards(episode, ReturnSettings(**settings))
        assert [len(r) for r in rows] == [C, C] and rows[1][2] == 0
        return [x for r in rows for x in r][:5]

    assert steps() == [0, 0, 0, 0, 1]
    assert steps(coef=5.0) == [0, 0, 0, 0, 5]
    assert steps(success="at_end") == [0] * 5
    assert steps(kind="shaped", coef=2.0) == [0, 0.4, 2, 2, 1]
    assert steps(kind="relative") == pytest.approx([0, 0.2, 0.8, 0, -0.5])
    assert trajectory_return(episode, ReturnSettings(kind="shaped")) == pytest.approx(2.7)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=11), st.floats(0.1, 9))
def test_relative_rewards_telescope_to_the_last_one(rewards, coef) -> None:
    episode = _episode(rewards)
    assert trajectory_return(episode, ReturnSettings(kind="relative", coef=coef)) == pytest.approx(
        coef * rewards[-1], abs=1e-9
    )
    assert trajectory_return(episode, ReturnSettings(kind="shaped")) == pytest.approx(
        math.fsum(rewards), abs=1e-9
    )


def test_several_kinds_are_summed_with_their_weights_and_told_apart() -> None:
    """Six steps of a horizon of ten, solved: success 1, brevity 0.4, the simulator's rewards 3."""
    episode = _episode([0.5] * 6, success=True)
    both = ReturnSettings(
        kind={"success": 1.0, "brevity": 0.5, "shaped": 0.1}, coef=2.0, horizon=10
    )
    assert return_parts(episode, both) == pytest.approx(
        {"success": 2.0, "brevity": 0.8, "shaped": 6.0}
    )
    assert trajectory_return(episode, both) == pytest.approx(2.0 + 0.4 + 0.6)
    assert [x for row in step_rewards(episode, both) for x in row if x] == pytest.approx(
        [0.1] * 5 + [2.0 + 0.4 + 0.1]
    )
    assert return_parts(_episode([0.0] * 10), both) == {
        "success": 0.0,
        "brevity": 0.0,
        "shaped": 0.0,
    }
    assert return_parts(_episode([0.0] * 10, success=True), both)["brevity"] == 0, (
        "all of the horizon was needed"
    )


def test_lost_episodes_are_counted_and_nothing_else() -> None:
    lost = _episode([0.0], error="timeout")
    empty = dataclasses.replace(_episode([0.0]), turns=())
    assert EpisodeCounts.of([empty, _episode([0.0, 0.0], truncated=True)]) + EpisodeCounts.of(
        [lost]
    ) == EpisodeCounts(episodes=3, finished=1, errored=2, truncated=1, decisions=1, steps=2)


def test_rewards_that_mean_nothing_explain_themselves() -> None:
    with pytest.raises(
        ConfigError,
        match=r"kind to be one of success, shaped, relative, brevity, found 'relativ'.*relative",
    ):
        ReturnSettings(kind="relativ")
    with pytest.raises(ConfigError, match="coef above 0"):
        ReturnSettings(coef=0)
    with pytest.raises(ConfigError, match="each with a weight above 0, found"):
        ReturnSettings(kind={"success": 0.0})
    with pytest.raises(ConfigError, match="brevity is a share of the horizon"):
        ReturnSettings(kind="brevity")


def test_token_mask_follows_the_executed_steps() -> None:
    assert token_mask((True, True, False), 6, 2) == [True] * 4 + [False] * 2
    # two actions of two steps: the second began
    assert token_mask((True, True, True, False), 4, 2) == [True] * 4
    assert token_mask((True, True, False, False), 4, 2) == [True, True, False, False]
    # SimpleVLA-RL: two chunks of eight actions of seven tokens, valid if index < finish_step * 7
    finish, horizon = 13, 16
    flags = [t < finish for t in range(horizon)]
    assert token_mask(flags[:8], 56, 7) + token_mask(flags[8:], 56, 7) == [
        i < finish * 7 for i in range(112)
    ]
    for wrong in (((True,) * 3, 5, 2), ((True,) * 3, 4, 2), ((True,) * 3, 0, 2), ((True,), 2, 0)):
        with pytest.raises(ConfigError, match="whole actions"):
            token_mask(*wrong)


def test_nothing_trainable_gives_empty_inputs() -> None:
    lost = [_episode([0.0], error="died")]
    for actions in (None, C):
        grid = make_grid(lost, ReturnSettings(), [0.0], actions)
        assert grid.rewards_TBC.shape == (0, 1, 1) and grid.values_RBV.shape == (1, 1, 1)
        out = chunk_gae(
            GAESettings(),
            grid.rewards_TBC,
            grid.values_RBV[..., 0],
            grid.terminated_TBC,
            grid.truncated_TBC,
            final_values_TB=grid.final_values_TB,
            valid_TBC=grid.valid_TBC,
        )
        assert out.advantages.numel() == 0


def test_gae_on_the_grid_by_hand() -> None:
    """gamma 0.5, lambda 1; values 0, 0.3 (by decision); a success that terminates, one truncated, one cut by the caller."""
    whole = _episode([0.0] * 3)
    cut = dataclasses.replace(
        whole, turns=tuple(dataclasses.replace(t, terminated=False) for t in whole.turns)
    )
    episodes = [
        _episode([0.0] * 4, True),
        _episode([0.0] * 6, truncated=True),
        cut,
        _episode([0.0] * 9, error="died"),
    ]
    grid = make_grid(episodes, ReturnSettings(coef=5.0), [1000.0, 2.0, 4.0, 7.0])
    out = chunk_gae(
        GAESettings(gamma=0.5, lam=1.0),
        grid.rewards_TBC,
        grid.values_RBV[..., 0],
        grid.terminated_TBC,
        grid.truncated_TBC,
        final_values_TB=grid.final_values_TB,
        valid_TBC=grid.valid_TBC,
    )
    assert out.returns.T[out.valid.T].tolist() == pytest.approx([2.5, 5.0, 0.5, 1.0, 2.0])
    assert out.advantages.T[out.valid.T].tolist() == pytest.approx([2.5, 4.7, 0.5, 0.7, 2.0])
    assert not out.valid[:, 3].any()


def _by_loops(
    episode: Rollout, settings: GAESettings, reward: ReturnSettings, repeat: int, final: float
) -> list[float]:
    """Advantages of the executed action steps of one episode, from its fields alone: rewards and values in a flat list, then the
    recursion from its end."""
    rewards, values = [], []
    last = [(d, c) for d in episode.turns for c in range(C) if d.valid[c]][-1]
    for decision in episode.turns:
        for k in range(C // repeat):
            ran = [c for c in range(k * repeat, (k + 1) * repeat) if decision.valid[c]]
            if ran:
                paid = [
                    float(episode.info["success_once"] and decision is last[0] and c == last[1])
                    if reward.kind == "success"
                    else decision.rewards[c]
                    for c in ran
                ]
                rewards.append(reward.coef * sum(paid))
                values.append(decision.values[k])
    after = 0.0 if episode.terminated else final
    advantages, carry = [0.0] * len(rewards), 0.0
    for n in reversed(range(len(rewards))):
        carry = (
            rewards[n] + settings.gamma * after - values[n] + settings.gamma * settings.lam * carry
        )
        advantages[n], after = carry, values[n]
    return advantages


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), min_size=1, max_size=4),
    st.sampled_from([1, 3]),
    st.sampled_from(["success", "shaped"]),
    st.integers(0, 999),
)
def test_action_level_judges_every_executed_step(plans, repeat, kind, seed) -> None:
    """Chunks of C control steps, each action repeated 1 or C times; a value for every action step."""
    g = torch.Generator().manual_seed(seed)
    actions, settings, reward = (
        C // repeat,
        GAESettings(level="action", gamma=0.9, lam=0.7),
        ReturnSettings(kind=kind, coef=2.0),
    )
    episodes = []
    for length, success, truncated in plans:
        plain = _episode(torch.rand(length, generator=g).tolist(), success, truncated=truncated)
        episodes.append(
            dataclasses.replace(
                plain,
                turns=tuple(
                    dataclasses.replace(d, values=tuple(torch.rand(actions, generator=g).tolist()))
                    for d in plain.turns
                ),
            )
        )
    finals = torch.rand(len(plans), generator=g).tolist()
    grid = make_grid(episodes, reward, finals, actions)
    assert grid.rewards_TBC.shape[2] == grid.values_RBV.shape[2] == actions
    out = chunk_gae(
        settings,
        grid.rewards_TBC,
        grid.values_RBV,
        grid.terminated_TBC,
        grid.truncated_TBC,
        final_values_TB=grid.final_values_TB,
        valid_TBC=grid.valid_TBC,
    )
    for b, episode in enumerate(episodes):
        expected = _by_loops(episode, settings, reward, repeat, finals[b])
        assert out.advantages[:, b][out.valid[:, b]].tolist() == pytest.approx(expected, abs=1e-5)
        assert out.advantages[:, b][~out.valid[:, b]].eq(0).all()


def test_control_steps_must_be_whole_actions() -> None:
    with pytest.raises(
        ConfigError, match="control steps in whole actions, found 3 control steps in 2 actions"
    ):
        make_grid([_episode([0.0])], ReturnSettings(), [0.0], actions=2)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.integers(0, 999))
def test_length_weights_are_the_aggregates_of_the_policy_loss(lengths, seed) -> None:
    """Each mode against its loop on a padded (B, 9) batch, and against `policy_loss` where it has the same loss_aggregation."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    logp, old, adv = (torch.rand(len(ids), generator=g, dtype=torch.float64) for _ in range(3))
    ones = torch.ones(len(ids))
    rho = (logp - old).exp()
    terms = (-torch.minimum(rho * adv, rho.clamp(0.8, 1.28) * adv)).tolist()
    per = [
        [x for x, i in zip(terms, ids.tolist(), strict=True) if i == b] for b in range(len(lengths))
    ]
    some = [x for x in per if x]
    expected = {
        "token_mean": sum(terms) / len(terms),
        "trajectory_mean": sum(sum(x) / len(x) for x in some) / len(some),
        "max_length": sum(x / (len(p) / 9) for p in some for x in p) / (len(lengths) * 9),
    }
    for mode, value in expected.items():
        w = length_weights(lengths, mode, 9)
        out = policy_loss(ObjectiveSettings(), logp, old, adv, ids, ones, weight_N=w.weights_B[ids])
        assert out.loss.item() / w.denominator == pytest.approx(value, rel=1e-5, abs=1e-9)
        assert w.weights_B[torch.tensor(lengths) == 0].eq(0).all()
        if mode != "max_length":
            s = ObjectiveSettings(
                loss_aggregation="token_mean" if mode == "token_mean" else "sequence_mean"
            )
            same = policy_loss(s, logp, old, adv, ids, ones)
            assert same.loss.item() / same.denominator == pytest.approx(value, rel=1e-9, abs=1e-12)
    if all(lengths):
        assert expected["max_length"] == pytest.approx(
            expected["trajectory_mean"], rel=1e-9, abs=1e-12
        )


def test_length_weights_explain_themselves() -> None:
    with pytest.raises(
        ConfigError, match=r"token_mean, trajectory_mean, max_length, found 'rlinf'"
    ):
        length_weights([1], "rlinf")
    for limit in (None, 3):
        with pytest.raises(ConfigError, match=f"max_length of at least 4, found {limit}"):
            length_weights([4], "max_length", limit)
    assert length_weights([], "token_mean").denominator == 0
