"""Matchings of boxes as VLM-R1's and V-Triune's code makes them, for their published numbers: `matching: published`.

    greedy       VLM-R1 detection_score: the most similar pair first, whatever the labels; a pair of unequal labels has IoU 0 and
                 still counts as found
    overwritten  V-Triune iou_max_iou_first: the same, but its loops overwrite the indices of the pair they found, so that the
                 largest IoU is credited to the last boxes of both lists
    by_truth     V-Triune iou_max_label_first: each truth in turn takes the most similar box of its label that is left

Repeated boxes are matched like any others. mmrl's own rules (`corrected`) do none of this, see mmrl.rewards.detection.

    python -c "import numpy; from mmrl.rewards.published_matching import published_iou as p; help(p)"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

__all__ = ["MATCHINGS", "is_published", "published_iou", "published_pairs"]

MATCHINGS = ("corrected", "published")


def is_published(matching: Any) -> bool:
    """True for 'published', False for 'corrected'; raises ConfigError for anything else."""
    if matching not in MATCHINGS:
        raise ConfigError(
            f"expected matching as one of {', '.join(MATCHINGS)}, found {matching!r}."
            f"{did_you_mean(str(matching), MATCHINGS)}"
        )
    return bool(matching == "published")


def _by_truth(iou_NM: Floats, level: float) -> list[tuple[int, int, float]]:
    left, found = set(range(len(iou_NM))), []
    for j in range(iou_NM.shape[1]):
        best = max(sorted(left), key=lambda i: iou_NM[i, j], default=None)
        if best is not None and iou_NM[best, j] >= max(level, 1e-12):
            found.append((best, j, float(iou_NM[best, j])))
            left.remove(best)
    return found


def published_pairs(
    iou_NM: Floats, same_NM: npt.NDArray[np.bool_], level: float, how: str = "greedy"
) -> list[tuple[int, int, float]]:
    """[(prediction, truth, credited IoU), ...] of IoUs (N, M), labels being equal where `same_NM`; pairs reach `level`."""
    if how == "by_truth":
        return _by_truth(np.where(same_NM, iou_NM, 0.0), level)
    rows, columns = list(range(iou_NM.shape[0])), list(range(iou_NM.shape[1]))
    found = []
    while rows and columns:
        left = iou_NM[np.ix_(rows, columns)]
        best = float(left.max())
        if best < level:
            break
        r, c = (
            (-1, -1) if how == "overwritten" else np.unravel_index(int(left.argmax()), left.shape)
        )
        i, j = rows[r], columns[c]
        found.append((i, j, best if same_NM[i, j] else 0.0))
        rows.remove(i)
        columns.remove(j)
    return found


def published_iou(
    iou_NM: Floats,
    same_NM: npt.NDArray[np.bool_],
    level: float,
    iou: float,
    completeness: float,
    how: str = "greedy",
) -> float:
    """iou * (sum of credited IoUs / M) + completeness * (1 - (missed + false) / 2) over `published_pairs`."""
    pairs = published_pairs(iou_NM, same_NM, level, how)
    missed, false = 1 - len(pairs) / iou_NM.shape[1], 1 - len(pairs) / iou_NM.shape[0]
    return iou * sum(value for _, _, value in pairs) / iou_NM.shape[1] + completeness * (
        1 - (missed + false) / 2
    )
