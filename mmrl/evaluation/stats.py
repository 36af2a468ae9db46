"""Means with confidence intervals: Wilson for counts, cluster bootstrap for scores, paired gains before and after.

    python -c "from mmrl.evaluation.stats import wilson; print(wilson(45, 50))"

k completions of one picture are not independent: a bootstrap over completions would promise an interval about sqrt(k)
times too narrow, so pictures are resampled, each with all of its completions. scipy is imported only when needed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from mmrl.errors import DataError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Estimate", "bootstrap_mean", "describe", "macro_estimate", "paired_gain", "wilson"]

# random indices drawn at a time: bounds the memory of a large resampling to ~16 MB
_CHUNK = 2_000_000


@dataclass(frozen=True)
class Estimate:
    """A mean with its confidence interval [low, high]; n counts independent units (pictures), not completions.

    low and high are NaN when n == 1: one unit says nothing about the spread.
    """

    mean: float
    low: float
    high: float
    n: int


def _check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise DataError(
            f"expected a confidence level between 0 and 1, found {level!r}; 0.95 is usual"
        )


def wilson(successes: int, n: int, level: float = 0.95) -> Estimate:
    """Share of successes with Wilson's score interval, which stays inside [0, 1] and has width at 0 and n successes.

    Source: E. B. Wilson, JASA 22 (1927) 209-212. Raises DataError unless 0 <= successes <= n and n >= 1.
    """
    _check_level(level)
    if n < 1 or not 0 <= successes <= n:
        raise DataError(
            f"expected 0 <= successes <= n with n >= 1, found successes={successes!r}, n={n!r}"
        )
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Estimate(share, low, high, n)


def _columns(
    values: Sequence[float], clusters: Sequence[Hashable] | None
) -> tuple[np.ndarray, np.ndarray]:
    """(sums_N, counts_N) per cluster, in an order that does not depend on the order of the rows."""
    import numpy as np

    values_V = np.asarray(values, dtype=np.float64)
    if values_V.ndim != 1 or values_V.size == 0:
        raise DataError(f"expected a list of at least one number, found shape {values_V.shape}")
    if not np.isfinite(values_V).all():
        raise DataError(
            f"expected finite numbers, found {values_V[~np.isfinite(values_V)][0]}; score failures as 0"
        )
    if clusters is None:
        return np.sort(values_V), np.ones_like(values_V)
    if len(clusters) != values_V.size:
        raise DataError(
            f"expected one cluster per value, found {len(clusters)} for {values_V.size} values"
        )
    number: dict[Hashable, int] = {}
    which_V = np.array([number.setdefault(c, len(number)) for c in clusters])
    sums_N = np.bincount(which_V, weights=values_V)
    counts_N = np.bincount(which_V).astype(np.float64)
    order_N = np.lexsort((counts_N, sums_N))
    return sums_N[order_N], counts_N[order_N]


def _resampled_means(
    sums_N: np.ndarray, counts_N: np.ndarray, resamples: int, seed: int
) -> np.ndarray:
    """Means_R of `resamples` draws of N clusters with replacement: sum of sums / sum of counts."""
    import numpy as np

    rng, n = np.random.default_rng(seed), len(sums_N)
    rows = max(1, _CHUNK // n)
    parts = []
    for start in range(0, resamples, rows):
        pick_RN = rng.integers(0, n, size=(min(rows, resamples - start), n))
        parts.append(sums_N[pick_RN].sum(axis=1) / counts_N[pick_RN].sum(axis=1))
    return np.concatenate(parts)


def bootstrap_mean(
    values: Sequence[float],
    level: float = 0.95,
    seed: int = 0,
    clusters: Sequence[Hashable] | None = None,
    resamples: int = 2000,
) -> Estimate:
    """Mean of all `values` with a cluster-bootstrap interval.

    `clusters` names the unit each value belongs to (avg@k: the picture); without it every value is its own unit. The
    interval is the percentile interval with Hesterberg's expansion for small n: the tail probability alpha / 2 becomes
    Phi(-t_{1 - alpha/2, n - 1} * sqrt(n / (n - 1))). The same seed gives the same interval, whatever the order of the
    rows. Source: T. Hesterberg, "What Teachers Should Know About the Bootstrap", 2014, arXiv:1411.5279, "expanded
    percentile interval". Raises DataError for an empty list, values that are not finite, or a wrong number of cluster
    names.
    """
    import numpy as np

    _check_level(level)
    sums_N, counts_N = _columns(values, clusters)
    n, mean = len(sums_N), float(np.sum(sums_N) / np.sum(counts_N))
    if n == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    from scipy.special import stdtrit

    t = float(stdtrit(n - 1, 0.5 + level / 2))
    tail = NormalDist().cdf(-t * math.sqrt(n / (n - 1)))
    low, high = np.quantile(_resampled_means(sums_N, counts_N, resamples, seed), [tail, 1 - tail])
    return Estimate(mean, float(min(low, mean)), float(max(high, mean)), n)


def describe(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    level: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """The interval that fits the data: Wilson when each unit is one 0/1 outcome, else the cluster bootstrap.

    When every value is the same 0 or 1 a bootstrap has no spread and would claim certainty; Wilson over the units is
    used then too (all of 20 pictures parsed: [0.84, 1], not [1, 1]).
    """
    kinds = set(values)
    if kinds and kinds <= {0.0, 1.0}:
        units = len(values) if clusters is None else len(set(clusters))
        if clusters is not None and len(clusters) != len(values):
            raise DataError(
                f"expected one cluster per value, found {len(clusters)} for {len(values)} values"
            )
        if units == len(values):
            return wilson(round(sum(values)), units, level)
        if len(kinds) == 1:
            return wilson(units if 1.0 in kinds else 0, units, level)
    return bootstrap_mean(values, level, seed, clusters)


def paired_gain(
    before: Mapping[Any, Sequence[float]],
    after: Mapping[Any, Sequence[float]],
    level: float = 0.95,
    seed: int = 0,
) -> Estimate | None:
    """Mean gain per unit over the units present in both, with its interval; None when they share none.

    Both map a unit (picture) to the scores of its completions; a unit's score is their mean. Pairing removes the spread
    between easy and hard pictures, so a gain can be certain although the two separate intervals overlap.

    Where all gains are the same a bootstrap has no spread and would claim certainty. Of n units with scores from 0 to 1 none was
    unlike the others, so that at most a share u is, the upper end of Wilson's interval for 0 of n, and each of those gains
    anything from -1 to 1: the interval is mean - u (mean + 1) to mean + u (1 - mean).
    """
    shared = [unit for unit in before if unit in after and before[unit] and after[unit]]
    if not shared:
        return None
    gains = [
        math.fsum(after[u]) / len(after[u]) - math.fsum(before[u]) / len(before[u]) for u in shared
    ]
    scores = [score for unit in shared for score in (*before[unit], *after[unit])]
    if max(gains) - min(gains) < 1e-12 and all(0 <= score <= 1 for score in scores):
        mean, unlike = gains[0], wilson(0, len(gains), level).high
        return Estimate(mean, mean - unlike * (mean + 1), mean + unlike * (1 - mean), len(gains))
    return bootstrap_mean(gains, level, seed)


def macro_estimate(estimates: Sequence[Estimate]) -> Estimate:
    """The unweighted mean of independent estimates, with an interval made of theirs.

    low = mean - sqrt(sum((mean_s - low_s)^2)) / S, high likewise (MOVER: G. Y. Zou and A. Donner, Statistics in Medicine
    27 (2008) 1693-1702), so that one source gives its own interval, and one with nothing but zeros is not taken for
    certain, as a bootstrap of it would be. `n` counts the units of all. low and high are NaN when one of theirs is.
    """
    count = len(estimates)
    mean = math.fsum(e.mean for e in estimates) / count
    down, up = (
        math.sqrt(math.fsum(d * d for d in gaps)) / count
        for gaps in ([e.mean - e.low for e in estimates], [e.high - e.mean for e in estimates])
    )
    return Estimate(mean, mean - down, mean + up, sum(e.n for e in estimates))
