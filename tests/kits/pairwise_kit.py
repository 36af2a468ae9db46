"""Few combinations of settings in which every two settings still meet.

    pairwise(("qwen2_vl", "qwen3_vl"), ("fp32", "bf16"), ("full", "lora", "frozen"))     # 6 rows of 12

A defect of a setting alone, or of two together, is found by these rows as by the whole grid; one that takes three together may not
be. Only a grid of three lists or more gets smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["pairwise"]

Row = tuple[Any, ...]


def _pairs(row: Row) -> set[tuple[int, Any, int, Any]]:
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def pairwise(*lists: Sequence[Any], keep: Iterable[Row] = ()) -> list[Row]:
    """Rows with one value of each list, in the order of the whole grid, so that every two values of different lists stand together
    in one. `keep` are rows that must be there; each further row is the one with the most new pairs, of equals the first.
    Raises ValueError for a row to keep that is none of the grid."""
    grid = list(itertools.product(*lists))
    rows = list(keep)
    if strange := [row for row in rows if row not in grid]:
        raise ValueError(f"expected rows of the grid to keep, found {strange}")
    left = set().union(*map(_pairs, grid)).difference(*map(_pairs, rows))
    while left:
        rows.append(max(grid, key=lambda row: len(_pairs(row) & left)))
        left -= _pairs(rows[-1])
    return sorted(rows, key=grid.index)
