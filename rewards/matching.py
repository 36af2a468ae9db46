"""Which prediction belongs to which truth: optimal (Hungarian) and greedy matching, independent of the order of lists.

Both maximise; a pair with similarity 0 is never made. Copies of one prediction may be told apart only where the truth
holds twins as well (`forbid_copies`), so that repeating a box never earns anything.

    python -c "from rewards.matching import hungarian_pairs; print(hungarian_pairs([[0.9, 0.8], [0.7, 0.0]]))"
"""
from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

__all__ = ["TWIN_IOU", "forbid_copies", "greedy_pairs", "hungarian_pairs", "matched_sum", "most_pairs"]

# N predictions, M truths; similarity_NM >= 0, 0 meaning "cannot be a pair"

TWIN_IOU = 0.9
"""Truths of one label that overlap at least this much may be answered by equal boxes: rounding can make them equal."""


def _as_matrix(similarity_NM: npt.ArrayLike) -> Floats:
    matrix = np.asarray(similarity_NM, dtype=np.float64)
    if matrix.ndim != 2:
        if matrix.size == 0:
            return matrix.reshape(0, 0)
        raise ValueError(f"expected similarities of shape (N, M), found {matrix.shape}")
    return matrix


def _alone(allowed_NM: npt.NDArray[np.bool_]) -> bool:
    """True when no prediction has two possible truths and no truth two predictions: then there is nothing to decide."""
    return bool((allowed_NM.sum(0) <= 1).all() and (allowed_NM.sum(1) <= 1).all())


def _pairs(rows: Any, columns: Any) -> list[tuple[int, int]]:
    return [(int(i), int(j)) for i, j in zip(rows, columns, strict=True)]


def hungarian_pairs(similarity_NM: npt.ArrayLike, count_first: bool = False) -> list[tuple[int, int]]:
    """One-to-one pairs (i, j) with the largest sum of similarities; sorted by i.

    `count_first`: the largest number of pairs, and among those the largest sum (similarities must not exceed 1).
    """
    matrix = _as_matrix(similarity_NM)
    allowed = matrix > 0
    if _alone(allowed):
        return _pairs(*np.nonzero(allowed))
    from scipy.optimize import linear_sum_assignment

    bonus = min(matrix.shape) + 1.0 if count_first else 0.0
    rows, columns = linear_sum_assignment(np.where(allowed, matrix + bonus, 0.0), maximize=True)
    kept = allowed[rows, columns]
    return _pairs(rows[kept], columns[kept])


def most_pairs(allowed_NM: npt.ArrayLike) -> int:
    """Number of pairs of the largest one-to-one matching within `allowed_NM` (booleans)."""
    allowed = _as_matrix(allowed_NM) > 0
    used_N, used_M = allowed.sum(1), allowed.sum(0)
    if (used_N <= 1).all():
        return int(np.count_nonzero(used_M))  # every truth that somebody wants gets somebody
    if (used_M <= 1).all():
        return int(np.count_nonzero(used_N))
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(allowed.astype(np.float64), maximize=True)
    return int(np.count_nonzero(allowed[rows, columns]))


def greedy_pairs(similarity_NM: npt.ArrayLike) -> list[tuple[int, int]]:
    """One-to-one pairs taken from the most similar down (VLM-R1, V-Triune); sorted by i. Ties go to the earlier i, then j.

    Unlike V-Triune's code, the pair that is taken is the pair that was found (its loop overwrote the indices).
    """
    matrix = _as_matrix(similarity_NM)
    rows, columns = np.nonzero(matrix > 0)
    order = np.argsort(-matrix[rows, columns], kind="stable")
    pairs: list[tuple[int, int]] = []
    used_N: set[int] = set()
    used_M: set[int] = set()
    for k in order.tolist():
        i, j = int(rows[k]), int(columns[k])
        if i not in used_N and j not in used_M:
            pairs.append((i, j))
            used_N.add(i)
            used_M.add(j)
    return sorted(pairs)


def matched_sum(values_NM: Floats, pairs: Sequence[tuple[int, int]]) -> float:
    """Sum of `values_NM` over `pairs`, rounded once (so the order of the pairs does not matter)."""
    return math.fsum(float(values_NM[i, j]) for i, j in pairs)


def forbid_copies(similarity_NM: Floats, keys_N: Sequence[Hashable], twins_M: npt.ArrayLike | None = None) -> Floats:
    """`similarity_NM` with 0 for copies: predictions whose key appeared before.

    The r-th extra copy may be paired only with truths that have at least r twins (`twins_M`, default none).
    """
    seen: dict[Hashable, int] = {}
    copies = [0] * len(keys_N)
    for i, key in enumerate(keys_N):
        copies[i] = seen.get(key, 0)
        seen[key] = copies[i] + 1
    if len(seen) == len(keys_N):
        return similarity_NM
    twins = np.zeros(similarity_NM.shape[1]) if twins_M is None else np.asarray(twins_M)
    return np.where(np.asarray(copies)[:, None] <= twins[None, :], similarity_NM, 0.0)
