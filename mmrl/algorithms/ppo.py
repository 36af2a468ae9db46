"""PPO's critic: value loss with clip and Huber, its statistics, critic warm-up. The actor's loss is `policy_loss`.

A critic judges a decision (a chunk of actions) as a whole, or each action step of it (mmrl.algorithms.gae, level). Every
result is a sum with its share of the step's denominator.
Try: python -c "import torch; from mmrl.algorithms import *; o = torch.ones(3); print(value_loss(PPOSettings(), o, o, o, o))"

Legend: N values of a micro-batch, M those in the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mmrl.errors import ConfigError, did_you_mean

__all__ = [
    "PPOSettings",
    "ValueLossKind",
    "ValueStats",
    "ValueSum",
    "critic_warming_up",
    "value_loss",
]

ValueLossKind = Literal["huber", "mse"]


@dataclass(frozen=True, kw_only=True)
class PPOSettings:
    """What PPO adds to ObjectiveSettings. Defaults as RLinf's embodied PPO."""

    value_clip: float | None = 0.2
    """Values may move this far from the old ones before the loss stops pulling; none: any."""
    value_loss: ValueLossKind = "huber"
    """'huber': quadratic up to huber_delta, linear beyond. 'mse': 0.5 * error^2."""
    huber_delta: float = 10.0
    value_coef: float = 1.0
    """Weight of the value loss beside the policy loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    critic_warmup_steps: int = 0
    """Training steps at the start, each with all its optimizer steps, that train the critic alone."""

    def __post_init__(self) -> None:
        known = get_args(ValueLossKind)
        if self.value_loss not in known:
            raise ConfigError(
                f"expected value_loss to be one of {', '.join(known)}, found {self.value_loss!r}."
                f"{did_you_mean(self.value_loss, known)}"
            )
        if self.value_clip is not None and not self.value_clip > 0:
            raise ConfigError(f"expected value_clip above 0 or none, found {self.value_clip}")
        if not self.huber_delta > 0:
            raise ConfigError(
                f"expected huber_delta above 0, found {self.huber_delta}; the usual value is 10"
            )
        for name in ("value_coef", "entropy_coef", "critic_warmup_steps"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"expected {name} at least 0, found {getattr(self, name)}")


def critic_warming_up(settings: PPOSettings, step: int) -> bool:
    """Whether training step `step` (from 0, over the whole run, so a resumed run continues) trains the critic alone.

    Then neither policy loss nor KL nor entropy bonus enter: the advantages of an untrained critic would only add noise to
    a policy that already works (RLinf: critic_warmup_steps).
    """
    return step < settings.critic_warmup_steps


@dataclass(frozen=True)
class ValueStats:
    """Sums over the valid values: add them over micro-batches and ranks, divide at the end."""

    count: float = 0.0
    loss: float = 0.0
    clipped: float = 0.0
    """Values further than value_clip from the old ones."""
    value: float = 0.0
    returns: float = 0.0
    returns_squares: float = 0.0
    error: float = 0.0
    """returns - value."""
    error_squares: float = 0.0

    def __add__(self, other: ValueStats) -> ValueStats:
        return ValueStats.from_list(
            [a + b for a, b in zip(self.to_list(), other.to_list(), strict=True)]
        )

    def to_list(self) -> list[float]:
        """The fields in order, ready for one all-reduce."""
        return [getattr(self, f.name) for f in dataclasses.fields(self)]

    @classmethod
    def from_list(cls, values: Sequence[float]) -> ValueStats:
        """The inverse of `to_list`."""
        return cls(**{f.name: v for f, v in zip(dataclasses.fields(cls), values, strict=True)})

    def explained_variance(self) -> float | None:
        """1 - Var(returns - value) / Var(returns): 1 is perfect, 0 no better than a constant; None without spread."""
        if self.count < 2:
            return None
        spread = self.returns_squares - self.returns**2 / self.count
        if spread <= 1e-13 * self.returns_squares:
            return None
        return 1.0 - (self.error_squares - self.error**2 / self.count) / spread


@dataclass(frozen=True)
class ValueSum:
    """`loss` () is a sum to call backward() on, without value_coef; divide by the total of all `denominator`s."""

    loss: Tensor
    denominator: float
    stats: ValueStats


def value_loss(
    settings: PPOSettings,
    values_N: Tensor,
    old_values_N: Tensor,
    returns_N: Tensor,
    mask_N: Tensor,
    weight_N: Tensor | None = None,
) -> ValueSum:
    """Sum over valid values of max(l(R - v), l(R - v_clip)), v_clip = v_old + clamp(v - v_old, +-value_clip).

    l is Huber, 0.5 e^2 up to delta and delta * (|e| - delta / 2) beyond (RLinf, delta 10), or 0.5 e^2 (EasyR1). All (N,),
    one per decision (or action); values_N with gradient. weight_N multiplies the terms, not the denominator (the number
    of valid values).
    """
    kept_M = mask_N.bool().nonzero().squeeze(1)
    values_M = values_N[kept_M].float() if values_N.dtype.itemsize < 4 else values_N[kept_M]
    old_M, returns_M = (x.detach()[kept_M].to(values_M) for x in (old_values_N, returns_N))

    def penalty(error_M: Tensor) -> Tensor:
        if settings.value_loss == "mse":
            return 0.5 * error_M.square()
        return torch.nn.functional.huber_loss(
            error_M, torch.zeros_like(error_M), reduction="none", delta=settings.huber_delta
        )

    loss_M = penalty(returns_M - values_M)
    moved_M = values_M - old_M
    clipped_M = torch.zeros_like(values_M, dtype=torch.bool)
    if settings.value_clip is not None:
        near_M = old_M + moved_M.clamp(-settings.value_clip, settings.value_clip)
        loss_M = torch.maximum(loss_M, penalty(returns_M - near_M))
        clipped_M = moved_M.detach().abs() > settings.value_clip
    if weight_N is not None:
        loss_M = loss_M * weight_N.detach()[kept_M].to(loss_M)
    seen_M, target_M = values_M.detach().double(), returns_M.double()
    error_M = target_M - seen_M
    rows = [
        torch.ones_like(seen_M),
        loss_M.detach().double(),
        clipped_M.double(),
        seen_M,
        target_M,
        target_M.square(),
        error_M,
        error_M.square(),
    ]
    return ValueSum(
        loss_M.sum(), float(kept_M.numel()), ValueStats.from_list(torch.stack(rows).sum(1).tolist())
    )
