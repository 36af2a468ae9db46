"""Off-policy tokens in the policy loss: completions somebody else wrote, beside the policy's own, in one group.

LUFFY (Yan et al. 2025, "Learning to Reason under Off-Policy Guidance", arXiv 2504.14945) adds demonstrations to each group of
rollouts, compares the rewards of all of them, and weighs a demonstration's tokens by the importance ratio pi / b of policy
and behaviour (who wrote it), shaped and not clipped; the policy's own tokens keep the clipped objective:

    J = 1/Z ( sum over demonstrations of f(pi / b) A  +  sum over rollouts of min(r A, clip(r) A) ),   f(x) = x / (x + gamma)

with Z all tokens and gamma 0.1. Demonstrations come without probabilities, so LUFFY sets b = 1. Where b is known the ratio
is the correct importance weight here, truncated: rho = min(pi / b, cap) (Ionides 2008, "Truncated importance sampling").
The truncation bounds the weight, it does not stop the gradient as a clip would:

    dJ / dlogp = A rho f'(rho),   f'(x) = gamma / (x + gamma)^2;   without shaping (gamma None: f(x) = x)  A rho

With b = 1, shaping gives unlikely tokens of a demonstration more of the gradient than pi itself would (near pi = 0 the slope
is 1 / gamma instead of 1) and fades as pi approaches 1. It trades the unbiasedness of the plain weight for that. The weight
of dlogp, gamma rho / (rho + gamma)^2, is 1/4 at its largest, where rho = gamma, and about rho / gamma far below: a policy to
which the demonstrations are very unlikely (pi well under 0.01 per token) learns from them slowly at 0.1; a smaller gamma, or
known behaviour (pi / b near 1 without shaping: the whole advantage), teaches it much faster.

    off_policy_loss(OfflineConfig(), logp_M, behaviour_M, advantage_M).sum().backward()

Legend: M tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmrl.config import OfflineConfig

__all__ = ["capped", "off_policy_loss"]


def capped(settings: OfflineConfig, logp_M: Tensor, behaviour_M: Tensor) -> Tensor:
    """Which tokens' ratio exceeds the cap, (M,) bool."""
    return (logp_M - behaviour_M).detach() > math.log(settings.cap)


def off_policy_loss(
    settings: OfflineConfig,
    logp_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    limit: float = 20.0,
) -> Tensor:
    """-A f(rho) per token, (M,), with the gradient given in the module docstring.

    logp_M: under the current policy, with gradient. behaviour_M: of whoever wrote the token (0 where the behaviour counts
    as 1). The log-ratio is clamped to +-limit before exp, as in the rest of the loss.
    """
    log_ratio_M = (logp_M - behaviour_M).clamp(-limit, limit)
    # a constant: the gradient stays cap * dlogp
    excess_M = (log_ratio_M - math.log(settings.cap)).clamp(min=0).detach()
    rho_M = torch.exp(log_ratio_M - excess_M)
    shaped_M = rho_M if settings.gamma is None else rho_M / (rho_M + settings.gamma)
    return -advantage_M * shaped_M
