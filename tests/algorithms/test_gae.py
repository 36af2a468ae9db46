"""GAE against the definition by sums, written episode by episode without recursion, and against cases done by hand.

Run: pytest tests/algorithms/test_gae.py
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmrl.algorithms import GAESettings, Moments, chunk_gae, gae_advantages, normalise
from mmrl.errors import ConfigError, NonFiniteError

MODES = ("standard", "always", "never")


def _by_sums(
    s: GAESettings,
    rewards: list[float],
    values: list[float],
    last: float,
    ends: list[str],
    finals: list[float],
) -> list[float]:
    """One column of valid steps; ends[t] is '', 'terminated' or 'truncated'. O(T^2), from the definition alone."""
    bootstrapped = {"standard": ("truncated",), "always": ("truncated", "terminated"), "never": ()}[
        s.bootstrap
    ]
    deltas = []
    for t, end in enumerate(ends):
        if end:
            after = finals[t] if end in bootstrapped else 0.0
        else:
            after = values[t + 1] if t + 1 < len(values) else last
        deltas.append(rewards[t] + s.gamma * after - values[t])
    result = []
    for t in range(len(ends)):
        stop = next((k for k in range(t, len(ends)) if ends[k]), len(ends) - 1)
        result.append(
            math.fsum((s.gamma * s.lam) ** (k - t) * deltas[k] for k in range(t, stop + 1))
        )
    return result


@st.composite
def _grids(draw) -> tuple[GAESettings, dict[str, Tensor], Tensor]:
    """Random episodes with auto-reset, invalid steps anywhere, junk (NaN, flags) where a step is not valid."""
    count, envs = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    s = GAESettings(
        gamma=draw(st.sampled_from([0.0, 0.5, 0.99, 1.0])),
        lam=draw(st.sampled_from([0.0, 0.5, 0.95, 1.0])),
        bootstrap=draw(st.sampled_from(MODES)),
    )

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64)

    valid = uniform(count, envs) > draw(st.sampled_from([-1.0, 0.3, 0.9]))
    junk = torch.where(valid, 0.0, float("nan"))
    values = uniform(count + 1, envs) * 4 - 2
    values[:count] += junk
    return (
        s,
        {
            "rewards_TB": uniform(count, envs) * 2 - 1 + junk,
            "values_RB": values,
            "terminated_TB": uniform(count, envs) > 0.8,
            "truncated_TB": uniform(count, envs) > 0.8,
            "final_values_TB": uniform(count, envs) * 4 + junk,
        },
        valid,
    )


@given(_grids())
def test_equals_the_definition_by_sums(case) -> None:
    s, grid, valid = case
    out = gae_advantages(s, **grid, valid_TB=valid)
    for b in range(valid.shape[1]):
        steps = [t for t in range(valid.shape[0]) if valid[t, b]]
        ends = [
            "terminated"
            if grid["terminated_TB"][t, b]
            else "truncated"
            if grid["truncated_TB"][t, b]
            else ""
            for t in steps
        ]
        column = {name: [x[t, b].item() for t in steps] for name, x in grid.items()}
        expected = _by_sums(
            s,
            column["rewards_TB"],
            column["values_RB"],
            grid["values_RB"][-1, b].item(),
            ends,
            column["final_values_TB"],
        )
        assert [out.advantages[t, b].item() for t in steps] == pytest.approx(expected, abs=1e-9)
        sums = [a + v for a, v in zip(expected, column["values_RB"], strict=True)]
        assert [out.returns[t, b].item() for t in steps] == pytest.approx(sums, abs=1e-9)
    assert out.advantages[~valid].eq(0).all() and out.returns[~valid].eq(0).all()


@given(_grids())
def test_columns_and_padding_do_not_touch_each_other(case) -> None:
    s, grid, valid = case
    whole = gae_advantages(s, **grid, valid_TB=valid).advantages
    for b in range(valid.shape[1]):
        alone = gae_advantages(
            s, **{n: x[:, b : b + 1] for n, x in grid.items()}, valid_TB=valid[:, b : b + 1]
        ).advantages
        assert torch.equal(alone[:, 0], whole[:, b])
    # one more row, not valid, full of junk
    pad = {n: torch.cat([x, x[-1:]]) for n, x in grid.items()}
    pad["values_RB"][-2] = float("nan")
    longer = gae_advantages(
        s, **pad, valid_TB=torch.cat([valid, torch.zeros_like(valid[:1])])
    ).advantages
    assert torch.equal(longer[:-1], whole)


@given(_grids())
def test_lambda_one_gives_returns_that_do_not_depend_on_inner_values(case) -> None:
    s, grid, valid = case
    s = dataclasses.replace(s, lam=1.0)
    one = gae_advantages(s, **grid, valid_TB=valid).returns
    moved = grid["values_RB"].clone()
    moved[:-1] += torch.randn(
        moved[:-1].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    torch.testing.assert_close(
        gae_advantages(s, **{**grid, "values_RB": moved}, valid_TB=valid).returns,
        one,
        atol=1e-9,
        rtol=0,
    )


def _column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(
    ("mode", "end", "after"),
    [
        ("standard", "terminated", 0),
        ("standard", "truncated", 8),
        ("always", "terminated", 8),
        ("always", "truncated", 8),
        ("never", "terminated", 0),
        ("never", "truncated", 0),
        ("standard", "both", 0),
        ("always", "both", 8),
    ],
)
def test_three_steps_by_hand(mode, end, after) -> None:
    """gamma = lambda = 1/2, V = 4, 2, 1, final 8, post-reset value 1000, rewards 0, 0, 1."""
    flags = _column(0, 0, 1).bool()
    none = torch.zeros_like(flags)
    out = gae_advantages(
        GAESettings(gamma=0.5, lam=0.5, bootstrap=mode),
        _column(0, 0, 1),
        _column(4, 2, 1, 1000),
        none if end == "truncated" else flags,
        none if end == "terminated" else flags,
        final_values_TB=_column(0, 0, 8),
    )
    deltas = [0 + 0.5 * 2 - 4, 0 + 0.5 * 1 - 2, 1 + 0.5 * after - 1]
    expected = [deltas[0] + deltas[1] / 4 + deltas[2] / 16, deltas[1] + deltas[2] / 4, deltas[2]]
    assert out.advantages[:, 0].tolist() == expected
    assert out.returns[:, 0].tolist() == [e + v for e, v in zip(expected, (4, 2, 1), strict=True)]


def test_standard_is_rlinfs_reward_with_the_bootstrap_added() -> None:
    """RLinf adds gamma * V(final) to the reward of a truncated step and then treats every end alike, with T + 1 done rows."""
    g = torch.Generator().manual_seed(1)
    rewards, finals = (
        torch.randn(12, 5, generator=g).double(),
        torch.randn(12, 5, generator=g).double(),
    )
    values = torch.randn(13, 5, generator=g).double()
    ended = torch.rand(12, 5, generator=g) > 0.7
    cut = ended & (torch.rand(12, 5, generator=g) > 0.5)
    for mode, paid in (("standard", cut), ("always", ended)):
        s = GAESettings(bootstrap=mode)
        dones, added = (
            torch.cat([torch.zeros(1, 5).bool(), ended]),
            rewards + s.gamma * finals * paid,
        )
        expected, carry = torch.zeros_like(rewards), torch.zeros(5).double()
        for t in reversed(range(12)):
            go = (~dones[t + 1]).double()
            carry = (
                added[t] + s.gamma * values[t + 1] * go - values[t] + s.gamma * s.lam * go * carry
            )
            expected[t] = carry
        out = gae_advantages(s, rewards, values, ended & ~cut, cut, final_values_TB=finals)
        torch.testing.assert_close(out.advantages, expected, atol=1e-12, rtol=0)


def test_final_values_are_asked_for_where_they_would_be_read() -> None:
    zeros, last = torch.zeros(2, 1), torch.tensor([[0], [1]]).bool()
    with pytest.raises(
        ConfigError,
        match=r"bootstrap 'standard' expects the values of final observations, found none for 1",
    ):
        gae_advantages(GAESettings(), zeros, torch.zeros(3, 1), torch.zeros_like(last), last)
    gae_advantages(GAESettings(), zeros, torch.zeros(3, 1), last, torch.zeros_like(last))
    gae_advantages(GAESettings(bootstrap="never"), zeros, torch.zeros(3, 1), last, last)
    gae_advantages(
        GAESettings(), zeros, torch.zeros(3, 1), torch.zeros_like(last), last, valid_TB=~last
    )  # flag on a padded step


def test_nan_that_counts_is_an_error_and_settings_explain_themselves() -> None:
    flags = torch.zeros(2, 1).bool()
    with pytest.raises(NonFiniteError, match="step 1 of environment 0"):
        gae_advantages(
            GAESettings(), torch.tensor([[0.0], [float("nan")]]), torch.zeros(3, 1), flags, flags
        )
    with pytest.raises(
        ConfigError,
        match=r"bootstrap to be one of standard, always, never, found 'standart'.*standard",
    ):
        GAESettings(bootstrap="standart")
    with pytest.raises(ConfigError, match=r"gamma in \[0, 1\], found 1.5"):
        GAESettings(gamma=1.5)


@pytest.mark.parametrize("mode", MODES)
def test_chunk_level_sums_and_action_level_is_a_finer_grid(mode) -> None:
    g = torch.Generator().manual_seed(3)
    T, B, C = 4, 3, 3
    rewards, finals = (
        torch.rand(T, B, C, generator=g).double(),
        torch.rand(T, B, generator=g).double(),
    )
    terminated, truncated = torch.zeros(T, B, C).bool(), torch.zeros(T, B, C).bool()
    valid = torch.ones(T, B, C).bool()
    # one end in each column, two inside a chunk
    terminated[1, 0, 1] = truncated[2, 1, 0] = truncated[3, 2, 2] = True
    valid[1, 0, 2:] = valid[2:, 0] = valid[2, 1, 1:] = valid[3:, 1] = False
    rewards[~valid] = float("nan")
    values = torch.rand(T + 1, B, C, generator=g).double()
    s = GAESettings(bootstrap=mode, gamma=0.9, lam=0.8)
    out = chunk_gae(
        s, rewards, values[:, :, 0], terminated, truncated, final_values_TB=finals, valid_TBC=valid
    )
    fine = chunk_gae(
        dataclasses.replace(s, level="action"),
        rewards,
        values,
        terminated,
        truncated,
        final_values_TB=finals,
        valid_TBC=valid,
    )
    assert out.valid.sum(0).tolist() == [2, 3, 4] and torch.equal(fine.valid, valid)
    for b, steps in enumerate((5, 7, 12)):
        chunks = math.ceil(steps / C)
        end = "terminated" if b == 0 else "truncated"
        r = rewards[:, b].reshape(-1)[:steps].tolist()
        final = finals[chunks - 1, b].item()
        expected = _by_sums(
            s,
            [math.fsum(r[C * k : C * k + C]) for k in range(chunks)],
            values[:chunks, b, 0].tolist(),
            0.0,
            [""] * (chunks - 1) + [end],
            [final] * chunks,
        )
        assert out.advantages[:chunks, b].tolist() == pytest.approx(expected, abs=1e-12)
        expected = _by_sums(
            s,
            r,
            values[:, b].reshape(-1)[:steps].tolist(),
            0.0,
            [""] * (steps - 1) + [end],
            [final] * steps,
        )
        assert fine.advantages[:, b].reshape(-1)[:steps].tolist() == pytest.approx(
            expected, abs=1e-12
        )
    with pytest.raises(ConfigError, match="one value per action step"):
        chunk_gae(GAESettings(level="action"), rewards, values[:, :, 0], terminated, truncated)


@given(
    st.lists(st.lists(st.floats(-50, 50, width=32), max_size=6), min_size=1, max_size=5),
    st.integers(0, 99),
)
def test_normalisation_over_processes_equals_that_of_all_entries(parts, seed) -> None:
    g = torch.Generator().manual_seed(seed)
    blocks = [(torch.tensor(p), torch.rand(len(p), generator=g) > 0.3) for p in parts]
    total = sum((Moments.of(x, m) for x, m in blocks), Moments())
    kept = torch.cat([x[m] for x, m in blocks]).double()
    spread = kept.std().item() if len(kept) > 1 else 0.0
    for x, m in blocks:
        x = torch.where(m, x, float("nan"))
        done = normalise(x, m, Moments.from_list(total.to_list()))
        assert done[~m].eq(0).all()
        if spread > 1e-4:
            torch.testing.assert_close(
                done[m].double(),
                (x[m].double() - kept.mean()) / (spread + 1e-5),
                atol=1e-4,
                rtol=1e-4,
            )


def test_equal_or_single_advantages_are_exactly_zero() -> None:
    assert normalise(torch.full((7,), 0.1), torch.ones(7)).tolist() == [0.0] * 7
    assert normalise(torch.tensor([3.0, 9.0]), torch.tensor([True, False])).tolist() == [0.0, 0.0]
    assert normalise(torch.zeros(0), torch.zeros(0)).tolist() == []
