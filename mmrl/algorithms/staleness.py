"""How samples of an older policy are weighed in an asynchronous schedule. (Which may be used at all: mmrl/training/pipeline.py.)

Try: python -c "import torch; from mmrl.algorithms import *; o = torch.ones(1)
print(behave_weights(CorrectionSettings(), o, 0 * o))"

Legend: N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mmrl.algorithms.objective import truncated_importance
from mmrl.errors import ConfigError, did_you_mean

__all__ = ["Correction", "CorrectionSettings", "Level", "behave_weights"]

Correction = Literal["none", "truncate", "mask"]
Level = Literal["token", "sequence"]


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """How samples of an older policy are weighed by w = pi_proximal / pi_behaviour."""

    mode: Correction = "truncate"
    """'none': 1. 'truncate': min(w, threshold), see `truncated_importance`. 'mask': w, and 0 where it exceeds the threshold."""
    threshold: float = 2.0
    """RLinf's behave_weight_threshold."""
    level: Level = "token"
    """'token': w of each token. 'sequence': the product of a turn's, for all of its tokens: unbiased where token weights are not,
    and of more variance (verl's rollout_is at sequence level)."""

    def __post_init__(self) -> None:
        if self.level not in get_args(Level):
            raise ConfigError(
                f"expected a correction level token or sequence, found {self.level!r}."
                f"{did_you_mean(self.level, get_args(Level))}"
            )
        if self.mode not in get_args(Correction):
            raise ConfigError(
                f"expected off-policy correction none, truncate or mask, found {self.mode!r}."
                f"{did_you_mean(self.mode, get_args(Correction))}"
            )
        if not self.threshold > 0:
            raise ConfigError(
                f"expected a weight threshold above 0, found {self.threshold}; the usual value is 2"
            )


def behave_weights(
    settings: CorrectionSettings,
    proximal_logp_N: Tensor,
    behaviour_logp_N: Tensor,
    *,
    turn_N: Tensor | None = None,
    counted_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Detached weights (N,) and which of them were masked (N,), for `policy_loss(weight_N=...)`.

    With old_logp_N = proximal log-probs this is decoupled PPO, L = -E[w * min(r A, clip(r) A)] (Hilton et al. 2022, arXiv
    2110.00641; AReaL; RLinf's asynchronous PPO masks w > threshold). Masked samples stay in the denominator, so that
    masking does not raise the weight of the others. With level 'sequence' `turn_N` numbers the tokens' turns, and `counted_N` says
    which of them the policy chose (all, where it is None).
    """
    masked_N = torch.zeros_like(proximal_logp_N, dtype=torch.bool)
    if settings.mode == "none":
        return torch.ones_like(proximal_logp_N, dtype=torch.float32), masked_N
    if settings.level == "sequence":
        assert turn_N is not None, "a product over turns needs their numbers"
        gap_N = (proximal_logp_N - behaviour_logp_N).detach().double()
        gap_N = gap_N if counted_N is None else gap_N.masked_fill(~counted_N, 0.0)
        turns = int(turn_N.max()) + 1 if len(turn_N) else 0
        proximal_logp_N = gap_N.new_zeros(turns).index_add(0, turn_N, gap_N)[turn_N]
        behaviour_logp_N = torch.zeros_like(proximal_logp_N)
    weight_N = truncated_importance(proximal_logp_N, behaviour_logp_N, settings.threshold)
    if settings.mode == "mask":
        exact_N = (proximal_logp_N - behaviour_logp_N).detach().double()
        masked_N = exact_N > torch.tensor(settings.threshold, dtype=torch.float64).log()
        weight_N = weight_N.masked_fill(masked_N, 0.0)
    return weight_N, masked_N
