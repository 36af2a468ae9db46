"""pairwise: every two values meet, fewer rows than the grid, and what must be kept is kept."""

from __future__ import annotations

import itertools

import pytest

from tests.kits.pairwise_kit import pairwise


@pytest.mark.parametrize(
    "lists",
    [
        ("abc", "xy", "1234"),
        ("ab", "xy", "12", "78"),
        ("abc", "xyz", "123", "456", "789"),
        ("a", "xyz", "12"),
    ],
    ids="-".join,
)
def test_every_two_values_meet(lists: tuple[str, ...]) -> None:
    rows = pairwise(*lists)
    for (i, ours), (j, theirs) in itertools.combinations(enumerate(lists), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(ours, theirs))
    grid = list(itertools.product(*lists))
    assert rows == [row for row in grid if row in rows], "in the grid's order, none twice"
    sizes = sorted(map(len, lists))
    assert sizes[-1] * sizes[-2] <= len(rows) <= len(grid)
    # a grid of 3 to the fifth needs 11 to 18 rows
    assert len(rows) <= 2 * sizes[-1] * sizes[-2]


def test_two_lists_stay_whole_and_rows_are_kept() -> None:
    assert pairwise("ab", "xyz") == list(itertools.product("ab", "xyz"))
    kept = [("c", "y", "4"), ("a", "x", "1")]
    assert set(kept) <= set(pairwise("abc", "xy", "1234", keep=kept))
    with pytest.raises(
        ValueError, match=r"expected rows of the grid to keep, found \[\('d', 'x', '1'\)\]"
    ):
        pairwise("abc", "xy", "12", keep=[("d", "x", "1")])
