"""The policy loss on flat tokens: a sum that is divided once, by a denominator counted over the whole step.

Each micro-batch returns a *sum*; the trainer adds gradients and denominators over micro-batches and ranks and scales
once before the optimizer step. So the update does not depend on how sequences were packed, in which order groups
closed, or on which rank they ran. Legend: N flat tokens of this micro-batch, M those of them in the loss.

    total = LossStats(); denominator = 0.0
    for batch in micro_batches:
        out = policy_loss(settings, logp_N, old_logp_N, advantage_N, sequence_id_N, mask_N)
        out.loss.backward(); denominator += out.denominator; total += out.stats
    for p in parameters: p.grad *= gradient_scale(denominator)      # after summing both over the ranks

Declared rules. A sequence is whole inside one micro-batch. Tokens outside the mask touch nothing, whatever they hold.
A sequence without a token in the loss is not counted in any denominator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from mmrl.algorithms.offline import capped, off_policy_loss
from mmrl.config import OfflineConfig
from mmrl.errors import ConfigError, did_you_mean

__all__ = [
    "Aggregate",
    "Importance",
    "KLEstimator",
    "LossStats",
    "LossSum",
    "ObjectiveSettings",
    "denominator",
    "gradient_scale",
    "kl_estimate",
    "policy_loss",
    "truncated_importance",
]

Importance = Literal["token", "sequence", "action", "chunk"]
Aggregate = Literal["token_mean", "sequence_mean", "dr_grpo"]
KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """What the loss is. Defaults: token mean with clip-higher (DAPO, arXiv 2503.14476) and dual clip, no KL."""

    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low. GSPO needs far smaller values (3e-4, 4e-4)."""
    clip_high: float = 0.28
    """The ratio is clipped above at 1 + clip_high; larger than clip_low keeps room for unlikely tokens."""
    dual_clip: float | None = 3.0
    """For negative advantages the loss is at most dual_clip * |A| (Ye et al. 2020, arXiv 1912.09729); None: any."""
    importance_sampling_level: Importance = "token"
    """'token': one ratio per token. 'sequence': exp(mean log-ratio) of the sequence (GSPO, arXiv 2507.18071). 'action', 'chunk':
    of policies that act, exp(sum of log-ratios) over an action step or a decision (RLinf), see `policy_loss(unit_N=...)`."""
    loss_aggregation: Aggregate = "token_mean"
    """'token_mean' (DAPO), 'sequence_mean' (GRPO: every sequence weighs the same), 'dr_grpo' (constant length)."""
    max_completion_length: int | None = None
    """Tokens; the constant length of 'dr_grpo', which needs it."""
    kl_coef: float = 0.0
    """Weight of the KL term against the reference policy; above 0 it needs reference log-probs."""
    kl_estimator: KLEstimator = "k3"
    """See `kl_estimate`; k1 is measured only, not a loss: its gradient is 0 in expectation."""
    log_ratio_clamp: float = 20.0
    """Log-ratios are clamped to +-this before exp. The clamp also stops the gradient, so it is counted."""
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    """Loss of the tokens somebody else wrote (`policy_loss(offline_N=...)`)."""

    def __post_init__(self) -> None:
        for name, kind in (
            ("importance_sampling_level", Importance),
            ("loss_aggregation", Aggregate),
            ("kl_estimator", KLEstimator),
        ):
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                raise ConfigError(
                    f"expected {name} to be one of {', '.join(known)}, found {value!r}."
                    f"{did_you_mean(value, known)}"
                )
        if not 0 < self.clip_low <= 1:
            raise ConfigError(
                f"expected clip_low in (0, 1], found {self.clip_low}; the usual value is 0.2"
            )
        if not self.clip_high > 0:
            raise ConfigError(
                f"expected clip_high above 0, found {self.clip_high}; the usual value is 0.28"
            )
        if self.dual_clip is not None and not self.dual_clip > 1 + self.clip_high:
            raise ConfigError(
                f"expected dual_clip above 1 + clip_high = {1 + self.clip_high:g}, found "
                f"{self.dual_clip:g}; the usual value is 3, and none switches it off"
            )
        if self.loss_aggregation == "dr_grpo" and not (self.max_completion_length or 0) > 0:
            raise ConfigError(
                "loss_aggregation 'dr_grpo' divides by a constant length: expected max_completion_length above "
                f"0, found {self.max_completion_length}; set it to the rollout's token limit"
            )
        if self.kl_coef > 0 and self.kl_estimator == "k1":
            raise ConfigError(
                "expected kl_estimator k3 or k2 for a KL term in the loss, found k1: its gradient is 0 in "
                "expectation, so that it adds noise and regularises nothing; k1 may be measured (kl_coef 0)"
            )
        if self.kl_coef < 0:
            raise ConfigError(f"expected kl_coef at least 0, found {self.kl_coef}")
        if not 0 < self.log_ratio_clamp <= 80:
            raise ConfigError(
                f"expected log_ratio_clamp in (0, 80] (exp of more overflows float32), "
                f"found {self.log_ratio_clamp}; the usual value is 20"
            )


@dataclass(frozen=True)
class LossStats:
    """Sums over the tokens in the loss: add them over micro-batches and ranks, divide at the end (`means`).

    Tokens of demonstrations count in num_tokens, num_sequences, policy_loss and offline_*, and in nothing else.
    """

    num_tokens: float = 0.0
    num_sequences: float = 0.0
    clip_low: float = 0.0
    """Tokens with A < 0 whose ratio fell below 1 - clip_low."""
    clip_high: float = 0.0
    """Tokens with A > 0 whose ratio rose above 1 + clip_high."""
    dual_clip: float = 0.0
    """Tokens with A < 0 whose ratio rose above dual_clip."""
    clamped: float = 0.0
    """Tokens whose log-ratio (to the old or to the reference policy) hit the clamp."""
    ratio: float = 0.0
    approx_kl: float = 0.0
    """k3 of KL(old || new) from the token ratios, whatever the importance level."""
    kl_ref: float = 0.0
    """The chosen estimator of KL(new || reference); 0 without reference log-probs."""
    policy_loss: float = 0.0
    """Sum of the policy term as aggregated (without KL), to be divided by the denominator."""
    offline_tokens: float = 0.0
    """Tokens of demonstrations."""
    offline_logp: float = 0.0
    """Their log-probs under the current policy."""
    offline_capped: float = 0.0
    """Those whose importance weight exceeded the cap."""

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats.from_list(
            [a + b for a, b in zip(self.to_list(), other.to_list(), strict=True)]
        )

    def to_list(self) -> list[float]:
        """The fields in order, ready for one all-reduce."""
        return [getattr(self, f.name) for f in dataclasses.fields(self)]

    @classmethod
    def from_list(cls, values: Sequence[float]) -> LossStats:
        """The inverse of `to_list`."""
        return cls(**{f.name: v for f, v in zip(dataclasses.fields(cls), values, strict=True)})

    def means(self) -> dict[str, float]:
        """Per-token means, over the policy's own tokens, of everything counted per token, for logging; zeros without any."""
        names = ("clip_low", "clip_high", "dual_clip", "clamped", "ratio", "approx_kl", "kl_ref")
        return {
            name: getattr(self, name) / max(self.num_tokens - self.offline_tokens, 1.0)
            for name in names
        }


@dataclass(frozen=True)
class LossSum:
    """`loss` () is a sum to call backward() on; divide gradients once by the total of all `denominator`s."""

    loss: Tensor
    denominator: float
    stats: LossStats
    by_label: tuple[LossStats, ...] = ()
    """`stats` split by the label of each token (data source), when labels were given."""


def _kept(mask_N: Tensor) -> Tensor:
    """Indices (M,) of the tokens in the loss. Selecting, not multiplying by 0, keeps NaN padding out."""
    if mask_N.dtype != torch.bool:
        assert bool(((mask_N == 0) | (mask_N == 1)).all()), (
            "mask_N holds 0 and 1 only; weights go into weight_N"
        )
    return mask_N.nonzero().squeeze(1)


def denominator(settings: ObjectiveSettings, sequence_id_N: Tensor, mask_N: Tensor) -> float:
    """This micro-batch's share of the step's denominator; needs no forward, so it can be known before the loss.

    token_mean: tokens in the loss. sequence_mean: sequences with at least one such token. dr_grpo: those sequences
    times max_completion_length. Add it over micro-batches and ranks.
    """
    kept_M = _kept(mask_N)
    if settings.loss_aggregation == "token_mean":
        return float(kept_M.numel())
    return _denominator(settings, kept_M.numel(), sequence_id_N[kept_M].unique().numel())


def _denominator(settings: ObjectiveSettings, num_tokens: int, num_sequences: int) -> float:
    if settings.loss_aggregation == "token_mean":
        return float(num_tokens)
    if settings.loss_aggregation == "sequence_mean":
        return float(num_sequences)
    assert settings.max_completion_length is not None  # checked when the settings were made
    return float(num_sequences) * settings.max_completion_length


def gradient_scale(total_denominator: float) -> float:
    """1 / total, or 0 when nothing at all was in the loss: such a step has no gradient and must not divide by 0."""
    return 1.0 / total_denominator if total_denominator > 0 else 0.0


def kl_estimate(log_ratio: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) from d = logp_ref - logp, any shape (Schulman 2020, kl-approx).

    k1 = -d, unbiased, either sign. k2 = d^2 / 2, biased, >= 0. k3 = exp(d) - d - 1, unbiased, >= 0, low variance.
    As a *loss term* their gradients differ from their values (samples from the policy, on-policy expectation): k1 has
    gradient E[grad logp] = 0, so it only adds noise and regularises nothing; k2 has the gradient of KL(policy ||
    reference); k3 has that of KL(reference || policy). So k1 is refused as a loss term.
    """
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        # expm1: exp(d) - d - 1 would cancel to noise near 0
        return torch.expm1(log_ratio) - log_ratio
    raise ConfigError(f"expected kl_estimator k1, k2 or k3, found {estimator!r}")


def truncated_importance(
    proximal_logp_N: Tensor, behaviour_logp_N: Tensor, cap: float = 2.0
) -> Tensor:
    """Detached weights min(pi_proximal / pi_behaviour, cap), (N,), for `policy_loss(weight_N=...)`.

    Truncated importance sampling (TIS) for samples of an older or differently computed policy; with old_logp_N =
    proximal log-probs this is the decoupled PPO objective (Hilton et al. 2022, arXiv 2110.00641) with bounded weights.
    """
    if not cap > 0:
        raise ConfigError(f"expected an importance cap above 0, found {cap}")
    limit = torch.tensor(cap, dtype=torch.float64).log().item()
    return (proximal_logp_N - behaviour_logp_N).detach().float().clamp(max=limit).exp()


def _surrogate(
    settings: ObjectiveSettings, log_ratio_M: Tensor, advantage_M: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped PPO loss per token (M,) with its clip marks; `log_ratio_M` is already clamped."""
    ratio_M = log_ratio_M.exp()
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    loss_M = -torch.minimum(ratio_M * advantage_M, ratio_M.clamp(low, high) * advantage_M)
    negative_M = advantage_M < 0
    marks = {
        "clip_low": negative_M & (ratio_M < low),
        "clip_high": (advantage_M > 0) & (ratio_M > high),
        "dual_clip": torch.zeros_like(negative_M),
        "ratio": ratio_M.detach(),
    }
    if settings.dual_clip is not None:
        loss_M = torch.where(
            negative_M, torch.minimum(loss_M, -settings.dual_clip * advantage_M), loss_M
        )
        marks["dual_clip"] = negative_M & (ratio_M > settings.dual_clip)
    return loss_M, marks


def _summed(values_M: Tensor, unit_M: Tensor) -> Tensor:
    """Each value's sum over its unit, (M,)."""
    _, row_M = unit_M.unique(return_inverse=True)
    return values_M.new_zeros(int(row_M.max()) + 1 if len(row_M) else 0).index_add(
        0, row_M, values_M
    )[row_M]


def policy_loss(
    settings: ObjectiveSettings,
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    sequence_id_N: Tensor,
    mask_N: Tensor,
    *,
    ref_logp_N: Tensor | None = None,
    weight_N: Tensor | None = None,
    scale_N: Tensor | None = None,
    label_N: Tensor | None = None,
    num_labels: int = 0,
    unit_N: Tensor | None = None,
    offline_N: Tensor | None = None,
    entropy_N: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> LossSum:
    """The loss of one micro-batch of whole sequences, as a sum; see the module docstring for the division.

    logp_N: log-probs under the current policy, with gradient. old_logp_N: under the policy of the ratio's bottom
    (behaviour, or proximal with `weight_N`). advantage_N: constant within a sequence for importance_sampling_level 'sequence'.
    sequence_id_N: long, which sequence of this micro-batch a token belongs to (any distinct numbers). mask_N: bool or
    0/1, tokens in the loss. ref_logp_N: reference log-probs; with kl_coef 0 the KL is only measured.
    weight_N: multiplies the policy term (off-policy correction, difficulty), not the KL. scale_N: multiplies both (a length
    normalisation of the caller's, whose denominator is then the caller's too). label_N: long in [0, num_labels),
    constant within a sequence, splits the statistics, not the loss. unit_N: long, which tokens share a ratio, for
    importance_sampling_level action and chunk; advantages are constant within a unit. offline_N: bool, tokens of
    demonstrations, which take `off_policy_loss`, no KL and no entropy bonus. entropy_N: entropies with gradient, for a bonus
    of entropy_coef (not in the statistics; see mmrl.algorithms.entropy). All are (N,) and finite where masked in; 16-bit
    log-probs are raised to float32.
    Non-finite results are the caller's to detect. Raises ConfigError when kl_coef > 0 and there are no reference log-probs.
    """
    if settings.kl_coef > 0 and ref_logp_N is None:
        raise ConfigError(
            f"kl_coef is {settings.kl_coef} but there are no reference log-probs; "
            "give the run a reference policy or set kl_coef to 0"
        )
    kept_M = _kept(mask_N)
    _, row_M, length_B = sequence_id_N[kept_M].unique(return_inverse=True, return_counts=True)
    logp_M = logp_N[kept_M].to(torch.promote_types(logp_N.dtype, torch.float32))

    def select(values_N: Tensor) -> Tensor:
        return values_N.detach()[kept_M].to(logp_M)

    token_log_ratio_M = raw_M = logp_M - select(old_logp_N)
    if settings.importance_sampling_level == "sequence":
        sums_B = torch.zeros(length_B.numel(), dtype=logp_M.dtype, device=logp_M.device)
        raw_M = (sums_B.index_add(0, row_M, raw_M) / length_B)[row_M]
    elif settings.importance_sampling_level != "token":
        assert unit_N is not None, "the caller says which tokens share a ratio"
        raw_M = _summed(raw_M, unit_N[kept_M])
    limit = settings.log_ratio_clamp
    loss_M, marks = _surrogate(settings, raw_M.clamp(-limit, limit), select(advantage_N))
    off_M = torch.zeros_like(kept_M, dtype=torch.bool) if offline_N is None else offline_N[kept_M]
    if offline_N is not None:
        assert settings.importance_sampling_level == "token", "demonstrations are weighed per token"
        shaped_M = off_policy_loss(
            settings.offline, logp_M, select(old_logp_N), select(advantage_N), limit
        )
        loss_M = torch.where(off_M, shaped_M, loss_M)
    if weight_N is not None:
        loss_M = loss_M * select(weight_N)
    policy_M, clamped_M, kl_ref_M = (
        loss_M.detach(),
        raw_M.detach().abs() > limit,
        torch.zeros_like(loss_M),
    )
    if ref_logp_N is not None:
        raw_ref_M = select(ref_logp_N) - logp_M
        clamped_M = clamped_M | (raw_ref_M.detach().abs() > limit)
        kl_M = kl_estimate(raw_ref_M.clamp(-limit, limit), settings.kl_estimator).masked_fill(
            off_M, 0.0
        )
        kl_ref_M = kl_M.detach()
        if settings.kl_coef > 0:
            loss_M = loss_M + settings.kl_coef * kl_M
    # selected, not weighed by zeros: what is masked may hold NaN
    if entropy_N is not None and entropy_coef > 0:
        loss_M = loss_M - entropy_coef * entropy_N[kept_M].to(logp_M.dtype).masked_fill(off_M, 0.0)
    if scale_N is not None:
        loss_M, policy_M = loss_M * select(scale_N), policy_M * select(scale_N)
    # each sequence's own 1 / length belongs inside the sum
    if settings.loss_aggregation == "sequence_mean":
        share_M = length_B.to(logp_M.dtype).reciprocal()[row_M]
        loss_M, policy_M = loss_M * share_M, policy_M * share_M
    approx_kl_M = kl_estimate(token_log_ratio_M.detach().clamp(-limit, limit), "k3")
    sums = {
        **marks,
        "clamped": clamped_M,
        "approx_kl": approx_kl_M,
        "kl_ref": kl_ref_M,
        "policy_loss": policy_M,
    }
    if offline_N is not None:
        sums = {
            name: value if name == "policy_loss" else value * ~off_M for name, value in sums.items()
        }
        sums |= {
            "offline_tokens": off_M,
            "offline_logp": logp_M.detach() * off_M,
            "offline_capped": off_M & capped(settings.offline, logp_M, select(old_logp_N)),
        }
    stats = _statistics(
        sums, None if label_N is None else label_N[kept_M], row_M, length_B, num_labels
    )
    return LossSum(
        loss_M.sum(),
        _denominator(settings, kept_M.numel(), length_B.numel()),
        stats[0],
        tuple(stats[1:]),
    )


def _statistics(
    sums: dict[str, Tensor],
    label_M: Tensor | None,
    row_M: Tensor,
    length_B: Tensor,
    num_labels: int,
) -> list[LossStats]:
    """The sums over all tokens, then, with labels, over those of each label."""
    names, rows = list(sums), torch.stack([value.double() for value in sums.values()])
    columns = [torch.cat([rows.sum(1), rows.new_tensor([row_M.numel(), length_B.numel()])])]
    if label_M is not None:
        columns += _by_label(rows, label_M, row_M, length_B, num_labels)
    names += ["num_tokens", "num_sequences"]
    return [
        LossStats(**dict(zip(names, values, strict=True)))
        for values in torch.stack(columns).tolist()
    ]  # one sync


def _by_label(
    rows: Tensor, label_M: Tensor, row_M: Tensor, length_B: Tensor, num_labels: int
) -> list[Tensor]:
    """Per label: the sums of `rows` (K, M) over its tokens, its number of tokens and of sequences; (K + 2,) each."""
    label_B = torch.zeros_like(length_B).scatter(0, row_M, label_M)
    sums = rows.new_zeros(rows.shape[0], num_labels).index_add(1, label_M, rows)
    counts = [
        torch.bincount(labels, minlength=num_labels).to(rows) for labels in (label_M, label_B)
    ]
    return list(torch.cat([sums, torch.stack(counts)]).unbind(1))
