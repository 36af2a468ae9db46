"""PPO beside `policy_loss`: ratios of actions and chunks, entropy bonus, value loss, critic warm-up.

A decision is a chunk of C actions of D tokens each. The ratio can be that of a token, of an action (product over its D
tokens) or of the whole chunk (over C x D): RLinf's logprob_type token_level, action_level, chunk_level. `actor_loss` adds
the log-probs of a unit's tokens and hands the units to `policy_loss` as if they were tokens, so everything there (clips,
aggregation, statistics) then counts units. Like there, every result is a sum with its share of the step's denominator.
Try: python -c "import torch; from mmrl.algorithms import *; i = torch.arange(8); print(unit_ids('action', i // 4, i % 4 // 2))"

Legend: N flat tokens (or values) of a micro-batch, M those in the loss, U units with a token in the loss.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mmrl.algorithms.objective import LossSum, ObjectiveSettings, policy_loss
from mmrl.algorithms.staleness import CorrectionSettings, behave_weights
from mmrl.errors import ConfigError, did_you_mean

__all__ = ["ActorSum", "Level", "PPOSettings", "ValueLossKind", "ValueStats", "ValueSum", "actor_loss", "critic_warming_up",
           "unit_ids", "value_loss"]

Level = Literal["token", "action", "chunk"]
ValueLossKind = Literal["huber", "mse"]


@dataclass(frozen=True, kw_only=True)
class PPOSettings:
    """What PPO adds to ObjectiveSettings. Defaults as RLinf's embodied PPO."""

    level: Level = "token"
    """Which tokens share one ratio, and one entropy."""
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
    """Optimizer steps at the start that train the critic alone."""

    def __post_init__(self) -> None:
        for name, kind in (("level", Level), ("value_loss", ValueLossKind)):
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                raise ConfigError(f"expected {name} to be one of {', '.join(known)}, found {value!r}.{did_you_mean(value, known)}")
        if self.value_clip is not None and not self.value_clip > 0:
            raise ConfigError(f"expected value_clip above 0 or none, found {self.value_clip}")
        if not self.huber_delta > 0:
            raise ConfigError(f"expected huber_delta above 0, found {self.huber_delta}; the usual value is 10")
        for name in ("value_coef", "entropy_coef", "critic_warmup_steps"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"expected {name} at least 0, found {getattr(self, name)}")


def critic_warming_up(settings: PPOSettings, step: int) -> bool:
    """Whether optimizer step `step` (from 0, over the whole run, so a resumed run continues) trains the critic alone.

    Then neither policy loss nor KL nor entropy bonus enter: the advantages of an untrained critic would only add noise to
    a policy that already works (RLinf: critic_warmup_steps).
    """
    return step < settings.critic_warmup_steps


def unit_ids(level: Level, decision_N: Tensor, action_N: Tensor) -> Tensor:
    """Which tokens share one ratio, long (N,): distinct numbers per token, per action of a decision, or per decision.

    decision_N: long, distinct over the micro-batch. action_N: long, at least 0, number of the action within its chunk.
    """
    if level not in get_args(Level):
        raise ConfigError(f"expected level {', '.join(get_args(Level))}, found {level!r}.{did_you_mean(level, get_args(Level))}")
    if level == "token":
        return torch.arange(decision_N.numel(), device=decision_N.device)
    if level == "chunk" or not decision_N.numel():
        return decision_N
    return decision_N * (action_N.max() + 1) + action_N


@dataclass(frozen=True)
class ActorSum(LossSum):
    """`LossSum` whose statistics count units, with what `actor_loss` adds (sums over units)."""

    entropy: float = 0.0
    """Sum of the units' entropies, before the coefficient; divide by stats.num_tokens for the mean."""
    masked: float = 0.0
    """Units whose importance weight exceeded the threshold of correction 'mask'."""


def actor_loss(settings: ObjectiveSettings, unit_N: Tensor, logp_N: Tensor, old_logp_N: Tensor, advantage_N: Tensor,
               sequence_id_N: Tensor, mask_N: Tensor, *, entropy_N: Tensor | None = None, entropy_coef: float = 0.0,
               behaviour_logp_N: Tensor | None = None, correction: CorrectionSettings | None = None,
               ref_logp_N: Tensor | None = None, weight_N: Tensor | None = None, label_N: Tensor | None = None,
               num_labels: int = 0) -> ActorSum:
    """`policy_loss` with one ratio per unit (`unit_ids`), minus entropy_coef times the entropy of the units.

    A unit's log-probs (current, old, behaviour, reference) and entropies are sums over its tokens in the mask: actions of a
    chunk that were never executed (their episode had ended) are marginalised out. Advantage, weight, sequence and label
    are constant within a unit. With units of one token this is `policy_loss`, bit for bit. entropy_N: with gradient.
    behaviour_logp_N with `correction`: old_logp_N is the proximal policy, and the weight of a unit is that of its summed
    log-probs (`behave_weights`). The denominator is that of `policy_loss`: units for 'token_mean', trajectories for
    'sequence_mean' when the sequence ids are those of trajectories. The entropy is aggregated in the same way.
    Raises ConfigError when advantages differ within a unit.
    """
    kept_M = mask_N.bool().nonzero().squeeze(1)
    _, row_M = unit_N[kept_M].unique(return_inverse=True)
    units = int(row_M.max()) + 1 if row_M.numel() else 0
    places_M = torch.arange(row_M.numel(), device=row_M.device)
    first_U = places_M.new_zeros(units).scatter_reduce(0, row_M, places_M, "amin", include_self=False)

    def add(values_N: Tensor) -> Tensor:
        values_M = values_N[kept_M].to(torch.promote_types(values_N.dtype, torch.float32))
        return values_M.new_zeros(units).index_add(0, row_M, values_M)

    def only(values_N: Tensor, name: str) -> Tensor:
        values_M = values_N[kept_M]
        if not torch.equal(values_M, values_M[first_U][row_M]):
            raise ConfigError(f"expected one {name} for all tokens of a unit, found several; use a finer level (an advantage "
                              "per action needs level action or token)")
        return values_M[first_U]

    old_U, sequence_U = add(old_logp_N.detach()), only(sequence_id_N, "sequence")
    weight_U, masked = None if weight_N is None else only(weight_N, "weight"), 0.0
    if correction is not None:
        if behaviour_logp_N is None:
            raise ConfigError("off-policy correction expects behaviour log-probs, found none; keep those of the rollout")
        factor_U, masked_U = behave_weights(correction, old_U, add(behaviour_logp_N.detach()))
        weight_U, masked = factor_U if weight_U is None else weight_U * factor_U, float(masked_U.sum())
    out = policy_loss(settings, add(logp_N), old_U, only(advantage_N, "advantage"), sequence_U,
                      torch.ones(units, dtype=torch.bool, device=logp_N.device), weight_N=weight_U,
                      ref_logp_N=None if ref_logp_N is None else add(ref_logp_N.detach()),
                      label_N=None if label_N is None else only(label_N, "label"), num_labels=num_labels)
    loss, entropy = out.loss, 0.0
    if entropy_N is not None:
        entropy_U = add(entropy_N)
        entropy = entropy_U.detach().double().sum().item()
        loss = loss - entropy_coef * (entropy_U * _shares(settings, sequence_U).to(entropy_U)).sum() if entropy_coef else loss
    return ActorSum(**{f.name: getattr(out, f.name) for f in dataclasses.fields(out)} | {"loss": loss}, entropy=entropy,
                    masked=masked)


def _shares(settings: ObjectiveSettings, sequence_U: Tensor) -> Tensor:
    """What a unit's term is multiplied with before the sum: 1 / length of its sequence for 'sequence_mean', else 1."""
    _, row_U, length_B = sequence_U.unique(return_inverse=True, return_counts=True)
    return length_B.double().reciprocal()[row_U] if settings.aggregate == "sequence_mean" else torch.ones_like(row_U).double()


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
        return ValueStats.from_list([a + b for a, b in zip(self.to_list(), other.to_list(), strict=True)])

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
        spread = self.returns_squares - self.returns ** 2 / self.count
        if spread <= 1e-13 * self.returns_squares:
            return None
        return 1.0 - (self.error_squares - self.error ** 2 / self.count) / spread


@dataclass(frozen=True)
class ValueSum:
    """`loss` () is a sum to call backward() on, without value_coef; divide by the total of all `denominator`s."""

    loss: Tensor
    denominator: float
    stats: ValueStats


def value_loss(settings: PPOSettings, values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, mask_N: Tensor,
               weight_N: Tensor | None = None) -> ValueSum:
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
        return torch.nn.functional.huber_loss(error_M, torch.zeros_like(error_M), reduction="none", delta=settings.huber_delta)

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
    rows = [torch.ones_like(seen_M), loss_M.detach().double(), clipped_M.double(), seen_M, target_M, target_M.square(), error_M,
            error_M.square()]
    return ValueSum(loss_M.sum(), float(kept_M.numel()), ValueStats.from_list(torch.stack(rows).sum(1).tolist()))
