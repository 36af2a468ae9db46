"""Sampling: the right distribution, the right truncation, noise that belongs to the row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from mmrl.rollout.sampling import choose, keep_top, noise_stream, row_noise

logits = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_draws_follow_the_softmax(temperature: float) -> None:
    draws = 200_000
    logits_V = torch.tensor([2.0, -1.0, 0.5, float("-inf"), 1.5, -3.0, 0.0]) / temperature
    uniform_R = row_noise((1, 2, 3), draws, 1)[:, 0]
    token_R = choose(logits_V.expand(draws, -1), uniform_R)
    count_V = np.bincount(token_R.numpy(), minlength=7)
    expected_V = logits_V.double().softmax(-1).numpy() * draws
    assert count_V[3] == 0, "probability 0 is never drawn"
    possible = expected_V > 0
    assert chisquare(count_V[possible], expected_V[possible]).pvalue > 1e-3
    wrong_V = (logits_V.double() * 1.05).softmax(-1).numpy() * draws
    assert chisquare(count_V[possible], wrong_V[possible]).pvalue < 1e-6, (
        "5 % in temperature would be noticed"
    )


def test_successive_columns_are_independent() -> None:
    noise_RS = row_noise((4,), 100_000, 2)
    first, second = (noise_RS[:, i].mul(4).long() for i in (0, 1))
    table = torch.bincount(first * 4 + second, minlength=16).numpy()
    assert chisquare(table).pvalue > 1e-3


@given(logits, st.floats(0, 1, exclude_max=True))
@settings(max_examples=150, deadline=None)
def test_inverse_cdf_and_extremes(values: list[float], u: float) -> None:
    values = [*values, float("-inf"), 0.0, float("-inf")]
    logits_1V = torch.tensor([values])
    p_V = logits_1V.double().softmax(-1)[0]
    for uniform in (u, 0.0, 1 - 2**-53):
        token = int(choose(logits_1V, torch.tensor([uniform], dtype=torch.double)))
        assert p_V[token] > 0
        before = float(p_V[:token].sum())
        assert before - 1e-9 <= uniform <= before + float(p_V[token]) + 1e-9
    assert logits_1V[0, int(choose(logits_1V, None))] == max(values)


@given(logits, st.integers(0, 14), st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.95, 1.0]))
@settings(max_examples=150, deadline=None)
def test_keep_top_equals_the_naive_definition(
    values: list[float], top_k: int, top_p: float
) -> None:
    kept = torch.isfinite(keep_top(torch.tensor([values]), top_k, top_p))[0].tolist()
    order = sorted(range(len(values)), key=lambda i: -values[i])
    allowed = set(range(len(values)))
    if 0 < top_k < len(values):
        # ties stay, as in transformers
        allowed = {i for i in allowed if values[i] >= values[order[top_k - 1]]}
    if top_p < 1:
        weights = {i: float(np.exp(np.float64(values[i]) - max(values))) for i in allowed}
        total, before = sum(weights.values()), 0.0
        small, doubtful = set(), set()
        for i in (i for i in order if i in allowed):
            if abs(before / total - top_p) < 1e-5:
                doubtful.add(i)
            elif before / total < top_p:
                small.add(i)
            before += weights[i]
        # ties: either may stay
        doubtful |= {i for i in allowed for j in small | doubtful if values[i] == values[j]}
    else:
        small, doubtful = allowed, set()
    found = {i for i, keep in enumerate(kept) if keep}
    assert found - doubtful <= small and small - doubtful <= found
    assert found and max(values) == max(values[i] for i in found), (
        "the most likely token always stays"
    )


def test_rows_are_truncated_each_by_itself() -> None:
    logits_RV = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 3
    together = keep_top(logits_RV, 7, 0.6)
    for row in range(5):
        assert torch.equal(together[row : row + 1], keep_top(logits_RV[row : row + 1], 7, 0.6))
    assert torch.equal(keep_top(logits_RV, 0, 1.0), logits_RV) and torch.equal(
        keep_top(logits_RV, 40, 1.0), logits_RV
    )
    kept = torch.isfinite(together)
    assert torch.equal(together[kept], logits_RV[kept]), "what stays is unchanged"


def test_rare_tokens_of_a_large_vocabulary_are_reachable() -> None:
    """In float32 the cumulative sum of 150 000 small probabilities loses whole tokens."""
    size = 152_064
    logits_V = torch.full((size,), -12.0)
    logits_V[0] = 12.0
    p_V = logits_V.double().softmax(-1)
    edges_V = p_V.cumsum(-1) - p_V / 2
    some = torch.tensor([1, 1000, 77_777, 151_000, size - 1])
    assert torch.equal(choose(logits_V.expand(5, -1), edges_V[some]), some)


@pytest.mark.parametrize("key", [(7,), (-7, 3), ((1 << 64) - 1, 127)])
def test_a_stream_of_noise_is_the_noise_of_the_row(key: tuple[int, ...]) -> None:
    draw = noise_stream(key)
    assert [draw() for _ in range(50)] == row_noise(key, 1, 50)[0].tolist()


def test_noise_depends_on_key_and_row_only() -> None:
    assert torch.equal(row_noise((1, 2), 8, 5)[:3], row_noise((1, 2), 3, 5)), (
        "a larger group begins with the smaller one"
    )
    assert not torch.equal(row_noise((1, 2), 3, 5), row_noise((2, 1), 3, 5))
    noise = row_noise((0,), 1000, 50)
    assert noise.dtype == torch.float64 and noise.min() >= 0 and noise.max() < 1
