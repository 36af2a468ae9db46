"""Intervals: known values, coverage by simulation, and why pictures (not completions) are resampled."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.errors import DataError
from mmrl.evaluation.stats import bootstrap_mean, describe, paired_gain, wilson

# R. G. Newcombe, Statistics in Medicine 17 (1998) 857-872, table I, score method without continuity correction
WILSON = [
    (81, 263, 0.2553, 0.3662),
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0.0, 0.1611),
    (1, 29, 0.0061, 0.1718),
]


@pytest.mark.parametrize(("successes", "n", "low", "high"), WILSON)
def test_wilson_gives_the_published_values(successes: int, n: int, low: float, high: float) -> None:
    estimate = wilson(successes, n)
    assert (round(estimate.low, 4), round(estimate.high, 4)) == (low, high)
    assert estimate.mean == successes / n and estimate.n == n


@settings(deadline=None)
@given(st.integers(1, 400), st.data(), st.floats(0.5, 0.999))
def test_wilson_agrees_with_scipy(n: int, data: st.DataObject, level: float) -> None:
    from scipy.stats import binomtest

    k = data.draw(st.integers(0, n))
    ours, theirs = wilson(k, n, level), binomtest(k, n).proportion_ci(level, method="wilson")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)
    assert 0 <= ours.low <= ours.mean <= ours.high <= 1


def _beta_clusters(rng: np.random.Generator, n: int, k: int) -> tuple[list[float], list[int]]:
    """n pictures of differing difficulty, k 0/1 completions each; the true mean is 0.5."""
    difficulty = rng.beta(0.6, 0.6, size=n)
    return list((rng.random((n, k)) < difficulty[:, None]).astype(float).ravel()), list(
        np.repeat(np.arange(n), k)
    )


def test_cluster_bootstrap_covers_and_the_naive_one_does_not() -> None:
    rng, covered, naive, runs = np.random.default_rng(0), 0, 0, 300
    for seed in range(runs):
        values, clusters = _beta_clusters(rng, 25, 8)
        e, wrong = (
            bootstrap_mean(values, 0.95, seed, clusters, 500),
            bootstrap_mean(values, 0.95, seed, None, 500),
        )
        covered += e.low <= 0.5 <= e.high
        naive += wrong.low <= 0.5 <= wrong.high
        assert e.n == 25
    assert 0.92 <= covered / runs <= 0.985
    assert naive / runs < 0.75


def test_small_samples_are_covered_too() -> None:
    rng, runs = np.random.default_rng(1), 400
    hits = sum(
        e.low <= 0 <= e.high
        for e in (
            bootstrap_mean(rng.normal(size=6).tolist(), 0.95, seed, None, 500)
            for seed in range(runs)
        )
    )
    # measured over 2000 draws: 0.93; the plain percentile interval: 0.87
    assert 0.90 <= hits / runs <= 0.98


def test_the_interval_matches_theory_on_many_values() -> None:
    values = np.random.default_rng(2).normal(3.0, 2.0, size=4000)
    e, half = bootstrap_mean(values.tolist()), 1.96 * values.std() / math.sqrt(4000)
    assert e.mean == pytest.approx(values.mean())
    assert (e.low, e.high) == pytest.approx((e.mean - half, e.mean + half), abs=0.1 * half)


def test_same_seed_same_interval_in_any_order_of_rows() -> None:
    values, clusters = _beta_clusters(np.random.default_rng(3), 12, 4)
    order = np.random.default_rng(4).permutation(len(values))
    first = bootstrap_mean(values, seed=7, clusters=clusters)
    again = bootstrap_mean(
        [values[i] for i in order], seed=7, clusters=[f"p{clusters[i]}" for i in order]
    )
    other = bootstrap_mean(values, seed=8, clusters=clusters)
    assert first == again
    assert (other.low, other.high) != (first.low, first.high) and other.mean == first.mean


def test_repeating_completions_adds_no_certainty() -> None:
    values, clusters = _beta_clusters(np.random.default_rng(5), 20, 1)
    repeated = bootstrap_mean(values * 8, clusters=clusters * 8)
    once = bootstrap_mean(values, clusters=clusters)
    assert (repeated.low, repeated.high) == pytest.approx(
        (once.low, once.high)
    ) and repeated.n == once.n == 20


def test_the_mean_weighs_every_value_alike() -> None:
    assert bootstrap_mean([1.0, 0.0, 0.0, 0.0], clusters=["a", "b", "b", "b"]).mean == 0.25


def test_one_unit_has_no_interval() -> None:
    e = bootstrap_mean([0.2, 0.4], clusters=["a", "a"])
    assert e.mean == pytest.approx(0.3) and math.isnan(e.low) and math.isnan(e.high) and e.n == 1


def test_describe_is_not_certain_when_all_values_agree() -> None:
    assert describe([1.0] * 20).low == wilson(20, 20).low < 1
    assert describe([0.0] * 160, clusters=[i // 8 for i in range(160)]) == wilson(0, 20)
    assert describe([1.0, 0.0, 1.0]) == wilson(2, 3)
    mixed = [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert describe(mixed, clusters=[0, 0, 1, 1, 2, 2]) == bootstrap_mean(
        mixed, clusters=[0, 0, 1, 1, 2, 2]
    )


def test_pairing_sees_a_gain_that_separate_intervals_hide() -> None:
    rng = np.random.default_rng(6)
    before = {i: [v] for i, v in enumerate(rng.random(40))}
    after = {i: [v[0] + 0.03 + rng.normal(0, 0.01)] for i, v in before.items()} | {
        "only after": [9.0]
    }
    gain = paired_gain(before, after)
    assert gain is not None and 0.02 < gain.low < 0.03 < gain.high < 0.04 and gain.n == 40
    old, new = (bootstrap_mean([v[0] for v in d.values() if v[0] < 5]) for d in (before, after))
    assert new.low < old.high
    assert paired_gain({"a": [1.0]}, {"b": [1.0]}) is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: wilson(5, 4), "0 <= successes <= n"),
        (lambda: wilson(0, 0), "n >= 1"),
        (lambda: wilson(1, 2, 95), "between 0 and 1, found 95"),
        (lambda: bootstrap_mean([]), "at least one number"),
        (lambda: bootstrap_mean([0.1, math.nan]), "finite"),
        (lambda: bootstrap_mean([1.0, 2.0], clusters=["a"]), "found 1"),
        (lambda: describe([1.0, 0.0], clusters=["a"]), "found 1"),
    ],
)
def test_misuse_is_explained(call: object, words: str) -> None:
    with pytest.raises(DataError, match=words):
        call()  # type: ignore[operator]


def test_importing_needs_neither_numpy_nor_scipy() -> None:
    code = (
        "import sys, mmrl.evaluation.stats; sys.exit(bool({'numpy', 'scipy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("score_before", "score_after"), [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.5, 0.75)]
)
def test_equal_gains_are_not_certain(score_before: float, score_after: float) -> None:
    """At least as wide as what a narrower interval of scipy leaves for units unlike the others."""
    from scipy.stats import binomtest

    for n in (1, 2, 4, 20, 300):
        units = range(n)
        gain = paired_gain({u: [score_before] for u in units}, {u: [score_after] for u in units})
        assert gain is not None and gain.mean == score_after - score_before and gain.n == n
        unlike = binomtest(0, n).proportion_ci(0.90, "wilson").high
        assert gain.low <= gain.mean - unlike * (gain.mean + 1) and gain.low >= -1
        assert gain.high >= gain.mean + unlike * (1 - gain.mean) and gain.high <= 1
    # of numbers without bounds nothing is known of a unit that is unlike the others
    free = paired_gain({u: [3.0] for u in range(4)}, {u: [5.0] for u in range(4)})
    assert free is not None and (free.low, free.high) == (2.0, 2.0)
