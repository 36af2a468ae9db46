"""Difficulty weights: what multiplies a group's advantages so that hard prompts count more than nearly solved ones.

    python -c "from mmrl.algorithms import difficulty_weights; print(difficulty_weights([0.2, 0.9], 'univg_exp'))"

The accuracy m is the group's own mean, in [0, 1], never that of a local batch (UniVG-R1's code takes the latter, so that
its weights depend on sharding).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from mmrl.errors import ConfigError, did_you_mean

__all__ = ["Difficulty", "difficulty_weights"]

Difficulty = Literal["none", "univg_exp", "univg_power", "univg_log", "softmax"]


def difficulty_weights(
    accuracies: Sequence[float], kind: Difficulty, *, power: float = 1.0, temperature: float = 2.0
) -> list[float]:
    """One weight >= 0 per group from the mean accuracies m of *all* groups of a step; m outside [0, 1] is clipped.

    none         1
    univg_exp    exp(1 - m)                  UniVG-R1 (arXiv 2505.14231), the one its script uses: e ... 1
    univg_power  (1.05 - m) ** power         UniVG-R1
    univg_log    max(0, -log(0.02 + m))      UniVG-R1; without the max, m > 0.98 would turn the gradient round
    softmax      n * exp(-m / T) / sum over the step's n groups of exp(-m / T): weights of mean 1, so that the step's size
                 stays. mmrl's own formula. The only kind that looks beyond its own group.
    """
    if kind not in get_args(Difficulty):
        raise ConfigError(
            f"expected difficulty {', '.join(get_args(Difficulty))}, found {kind!r}."
            f"{did_you_mean(kind, get_args(Difficulty))}"
        )
    levels = [min(1.0, max(0.0, float(m))) for m in accuracies]
    if kind == "univg_exp":
        return [math.exp(1 - m) for m in levels]
    if kind == "univg_power":
        return [(1.05 - m) ** power for m in levels]
    if kind == "univg_log":
        return [max(0.0, -math.log(0.02 + m)) for m in levels]
    if kind == "softmax":
        raw = [math.exp(-m / temperature) for m in levels]
        total = math.fsum(raw)
        return [len(raw) * r / total for r in raw]
    return [1.0] * len(levels)
