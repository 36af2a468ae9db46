"""Group-relative advantages: how much better each completion is than the others of its own prompt.

An advantage needs only its own group, so a group can go to the trainer the moment it closes. Legend: G group size.
Try: python -c "from mmrl.algorithms import group_advantages; print(group_advantages([0, 0, 1, 1]))"
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from mmrl.errors import ConfigError, NonFiniteError, did_you_mean

__all__ = ["AdvantageScale", "SIGNAL_TOLERANCE", "group_advantages", "has_signal"]

AdvantageScale = Literal["std", "none"]

SIGNAL_TOLERANCE = 1e-8  # rewards closer than this differ by rounding only (the same IoU computed in another order)


def _as_floats(rewards_G: Sequence[float] | Tensor) -> list[float]:
    values: list[float] = [float(r) for r in (rewards_G.tolist() if isinstance(rewards_G, Tensor) else rewards_G)]
    bad = [i for i, r in enumerate(values) if not math.isfinite(r)]
    if bad:
        raise NonFiniteError(
            f"expected finite rewards, found {values[bad[0]]} at position {bad[0]} of a group of {len(values)}; "
            "score a completion that cannot be rewarded with Score.failure(reason)"
        )
    return values


def group_advantages(rewards_G: Sequence[float] | Tensor, scale: AdvantageScale = "std", eps: float = 1e-6,
                     clip: float | None = None) -> Tensor:
    """Advantages of one group, shape (G,), float32; computed in float64.

    scale 'std': (r - mean) / (std + eps) with the unbiased standard deviation, as GRPO is practised (Shao et al. 2024,
    arXiv 2402.03300). scale 'none': r - mean (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783), which does not inflate
    nearly solved or nearly hopeless prompts. `clip` bounds the result to [-clip, clip].
    Equal rewards, and a group of one, give exactly 0: rounding of the mean must not be amplified by 1 / eps.
    Raises ConfigError for an unknown scale, NonFiniteError for a NaN or infinite reward.
    """
    if scale not in ("std", "none"):
        raise ConfigError(f"expected advantage scale 'std' or 'none', found {scale!r}."
                          f"{did_you_mean(scale, ('std', 'none'))}")
    if clip is not None and not clip > 0:
        raise ConfigError(f"expected an advantage clip above 0 or none, found {clip!r}")
    values = _as_floats(rewards_G)
    if len(values) < 2 or max(values) == min(values):
        return torch.zeros(len(values), dtype=torch.float32)
    rewards = torch.tensor(values, dtype=torch.float64)
    advantages = rewards - rewards.mean()
    if scale == "std":
        advantages = advantages / (rewards.std(correction=1) + eps)
    if clip is not None:
        advantages = advantages.clamp(-clip, clip)
    return advantages.to(torch.float32)


def has_signal(rewards_G: Sequence[float] | Tensor, tol: float = SIGNAL_TOLERANCE) -> bool:
    """Whether a group teaches anything: its rewards spread by more than `tol` (a group of one never does)."""
    values = _as_floats(rewards_G)
    return len(values) > 1 and max(values) - min(values) > tol
