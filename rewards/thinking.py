"""SophiaVL-R1's thinking reward with Trust-GRPO's weight and annealing: reasoning is paid as far as it goes with right answers.

    trust([1, 1, 0, 0], [0.9, 0.7, 0.4, 0.2])               # 1.0: right answers were thought better
    weight(100, trusted=1.0)                                # 0.3 * exp(-100 / 500) = 0.2456

Formulas: "SophiaVL-R1: Reinforcing MLLMs Reasoning with Thinking Reward" (arXiv 2505.17018), as its program has them
(verl/workers/reward/custom.py at a818494): R_i = R_outcome_i + gamma * alpha * exp(-step / T) * R_thinking_i with alpha 0.3 and
T 500, gamma = 1 where the mean thinking reward of right answers is at least that of wrong ones, else exp(mean_right - mean_wrong).
Answers are right from outcome 0.5 on; those below 0.2 are not asked for and count with 0; a group that is right or wrong as a whole
(all from 0.9 on, all up to 0.1) has no thinking reward. In the program a judge that fails counts as a thinking reward of 0, and so
do texts that it cannot read; here such verdicts are left out of the means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["ALPHA", "ASKED_FROM", "DECAY_STEPS", "RIGHT_FROM", "is_uniform", "trust", "weight"]

ALPHA, DECAY_STEPS = 0.3, 500.0
RIGHT_FROM, ASKED_FROM = 0.5, 0.2
_ALL_RIGHT, _ALL_WRONG = 0.9, 0.1


def is_uniform(outcomes: Sequence[float]) -> bool:
    """Whether a group is right, or wrong, as a whole."""
    return all(o >= _ALL_RIGHT for o in outcomes) or all(o <= _ALL_WRONG for o in outcomes)


def trust(outcomes: Sequence[float], thinking: Sequence[float | None]) -> float:
    """gamma in (0, 1] of a group; None in `thinking` is a verdict that there is none of. 1 where no answer is right."""
    right = [
        t for o, t in zip(outcomes, thinking, strict=True) if o >= RIGHT_FROM and t is not None
    ]
    wrong = [t for o, t in zip(outcomes, thinking, strict=True) if o < RIGHT_FROM and t is not None]
    if not right:
        return 1.0
    gap = math.fsum(right) / len(right) - (math.fsum(wrong) / len(wrong) if wrong else 0.0)
    return math.exp(min(0.0, gap))


def weight(
    step: int, *, trusted: float, alpha: float = ALPHA, decay_steps: float = DECAY_STEPS
) -> float:
    """gamma * alpha * exp(-step / T): what a thinking reward of 1 adds at a step."""
    return trusted * alpha * math.exp(-step / decay_steps)
