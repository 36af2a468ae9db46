"""Which prediction belongs to which truth: optimal (Hungarian) and greedy matching, independent of the order of lists.

Both maximise; a pair with similarity 0 is never made. Copies of one prediction may be told apart only where the truth
holds twins as well: equal ones by `forbid_copies`, nearly equal boxes by `near_copies` and `merge_copies`, so that
repeating a box, moved by a pixel or not, earns what its best copy earns.

    python -c "from mmrl.rewards.matching import hungarian_pairs; print(hungarian_pairs([[0.9, 0.8], [0.7, 0.0]]))"
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

__all__ = [
    "COPY_IOU",
    "TWIN_IOU",
    "copy_threshold",
    "forbid_copies",
    "greedy_pairs",
    "hungarian_pairs",
    "matched_sum",
    "merge_copies",
    "most_pairs",
    "near_copies",
]

# N predictions, M truths; similarity_NM >= 0, 0 meaning "cannot be a pair"

TWIN_IOU = 0.9
"""Truths of one label that overlap at least this much may be answered by equal boxes: rounding can make them equal."""
COPY_IOU = (0.7, 0.95)
"""Least and largest IoU beyond which two predictions of one label are copies, see `copy_threshold`."""


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


def hungarian_pairs(
    similarity_NM: npt.ArrayLike, count_first: bool = False
) -> list[tuple[int, int]]:
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


def forbid_copies(
    similarity_NM: Floats, keys_N: Sequence[Hashable], twins_M: npt.ArrayLike | None = None
) -> Floats:
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


def _linked(joined_NN: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Numbers of the connected components of a symmetric relation."""
    from scipy.sparse.csgraph import connected_components

    return connected_components(joined_NN, directed=False)[1].astype(np.int64)


def copy_threshold(iou_MM: Floats) -> float:
    """The IoU beyond which predictions of a label are copies, given the IoUs of its truths: midway from theirs to 1.

    With m the largest IoU of two truths that are no twins, it is (1 + m) / 2 within COPY_IOU: predictions must be clearly
    more alike than the truths are.
    """
    others = iou_MM[~np.eye(len(iou_MM), dtype=bool) & (iou_MM < TWIN_IOU)]
    return min(COPY_IOU[1], max(COPY_IOU[0], (1.0 + float(others.max(initial=0.0))) / 2))


def near_copies(
    iou_NN: Floats,
    iou_MM: Floats,
    touched_NM: npt.NDArray[np.bool_],
    codes_N: npt.NDArray[np.int64],
    codes_M: npt.NDArray[np.int64],
) -> list[tuple[list[int], int]]:
    """[(predictions, how many of them may match), ...]: sets of more copies than the truths allow, in order of the first.

    Predictions of one label are copies when their IoU exceeds `copy_threshold`, and when a chain of copies joins them. As
    many may match as the largest set of twin truths (IoU >= TWIN_IOU, joined alike) among those they touch has members.
    """
    joined_NN = codes_N[:, None] == codes_N[None, :]
    np.fill_diagonal(joined_NN, False)
    joined_NN &= iou_NN > COPY_IOU[0]
    if not joined_NN.any():
        return []
    same_MM = codes_M[:, None] == codes_M[None, :]
    alike_MM = np.where(same_MM & (iou_MM < TWIN_IOU), iou_MM, 0.0)
    np.fill_diagonal(alike_MM, 0.0)
    # by label: copy_threshold's m
    most = np.zeros(int(max(codes_N.max(), codes_M.max(initial=0))) + 1)
    np.maximum.at(most, codes_M, alike_MM.max(1, initial=0.0))
    joined_NN &= iou_NN > np.clip((1.0 + most[codes_N]) / 2, *COPY_IOU)[:, None]
    if not joined_NN.any():
        return []
    twins_M = _linked((iou_MM >= TWIN_IOU) & same_MM)
    size_M = np.bincount(twins_M)[twins_M]
    sets: dict[int, list[int]] = {}
    for i, number in enumerate(_linked(joined_NN).tolist()):
        sets.setdefault(number, []).append(i)
    found = [
        (members, int(size_M[touched_NM[members].any(0)].max(initial=1)))
        for members in sets.values()
    ]
    return [(members, room) for members, room in found if len(members) > room]


def merge_copies(values_NM: Floats, copies: Sequence[tuple[list[int], int]]) -> Floats:
    """`values_NM` where each set of copies keeps as many rows as may match: the best of its values, then the second best...

    The rows stand at the set's first places and belong to the set as a whole; its other rows are 0. With one row, the
    largest sum over pairs is that of using the best single copy.
    """
    if not copies:
        return values_NM
    merged = values_NM.copy()
    for members, room in copies:
        merged[members] = 0.0
        merged[members[:room]] = np.sort(values_NM[members], axis=0)[::-1][:room]
    return merged
