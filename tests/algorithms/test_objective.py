"""The policy loss against naive per-sequence loops in float64, written from the papers' formulas alone.

Run: pytest tests/algorithms/test_objective.py
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from mmrl.algorithms import (
    LossStats,
    ObjectiveSettings,
    denominator,
    gradient_scale,
    kl_estimate,
    policy_loss,
    truncated_importance,
)
from mmrl.errors import ConfigError

LENGTHS = (5, 1, 8, 3, 6)


def _tokens(
    seed: int = 0, spread: float = 0.6, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Five sequences of mixed length; ratios fall on every side of both clips; some tokens are masked out."""
    g = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    old = -torch.rand(n, generator=g, dtype=torch.float64) * 3
    mask = torch.rand(n, generator=g) > 0.25
    mask[ids == 1] = True
    return {
        "logp_N": (old + spread * torch.randn(n, generator=g, dtype=torch.float64))
        .to(dtype)
        .requires_grad_(),
        "old_logp_N": old.to(dtype),
        "advantage_N": torch.randn(len(LENGTHS), generator=g, dtype=torch.float64)[ids].to(dtype),
        "sequence_id_N": ids,
        "mask_N": mask,
        "ref_logp_N": (old + 0.3 * torch.randn(n, generator=g, dtype=torch.float64)).to(dtype),
    }


def _naive_token(rho: float, adv: float, s: ObjectiveSettings) -> float:
    clipped = min(max(rho, 1 - s.clip_low), 1 + s.clip_high)
    loss = -min(rho * adv, clipped * adv)
    return min(loss, -s.dual_clip * adv) if s.dual_clip is not None and adv < 0 else loss


def _naive(s: ObjectiveSettings, t: dict[str, Tensor]) -> tuple[float, float]:
    """(mean loss, denominator) by plain loops over sequences and tokens."""
    per_sequence, tokens = [], 0
    for sequence in sorted(set(t["sequence_id_N"].tolist())):
        rows = [
            i
            for i in range(len(t["mask_N"]))
            if t["sequence_id_N"][i] == sequence and t["mask_N"][i]
        ]
        if not rows:
            continue
        diffs = [t["logp_N"][i].item() - t["old_logp_N"][i].item() for i in rows]
        losses = []
        for i, diff in zip(rows, diffs, strict=True):
            log_rho = (
                math.fsum(diffs) / len(diffs) if s.importance_sampling_level == "sequence" else diff
            )
            loss = _naive_token(math.exp(log_rho), t["advantage_N"][i].item(), s)
            d = t["ref_logp_N"][i].item() - t["logp_N"][i].item()
            kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[s.kl_estimator]
            losses.append(loss + s.kl_coef * kl)
        per_sequence.append(losses)
        tokens += len(rows)
    if s.loss_aggregation == "sequence_mean":
        return math.fsum(math.fsum(x) / len(x) for x in per_sequence) / len(per_sequence), len(
            per_sequence
        )
    below = (
        tokens
        if s.loss_aggregation == "token_mean"
        else len(per_sequence) * (s.max_completion_length or 0)
    )
    return math.fsum(itertools.chain.from_iterable(per_sequence)) / below, below


AGGREGATES = ("token_mean", "sequence_mean", "dr_grpo")
ALL = list(itertools.product(("token", "sequence"), AGGREGATES, (None, 3.0), ("k1", "k2", "k3")))


@pytest.mark.parametrize(("importance", "loss_aggregation", "dual", "estimator"), ALL)
def test_equals_the_naive_loops(importance, loss_aggregation, dual, estimator) -> None:
    s = ObjectiveSettings(
        importance_sampling_level=importance,
        loss_aggregation=loss_aggregation,
        dual_clip=dual,
        kl_coef=0.0 if estimator == "k1" else 0.1,
        kl_estimator=estimator,
        max_completion_length=16,
    )
    for seed in range(3):
        t = _tokens(seed)
        if seed == 2:
            # one sequence wholly out of the loss
            t["mask_N"] = t["mask_N"] & (t["sequence_id_N"] != 3)
        out = policy_loss(s, **t)
        expected, below = _naive(s, t)
        assert out.denominator == below == denominator(s, t["sequence_id_N"], t["mask_N"])
        assert out.loss.item() * gradient_scale(out.denominator) == pytest.approx(
            expected, rel=1e-12, abs=1e-12
        )
        assert out.stats.num_tokens == int(t["mask_N"].sum())


@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("loss_aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
def test_gradient_equals_finite_differences_of_the_naive_loops(
    importance, loss_aggregation
) -> None:
    s = ObjectiveSettings(
        importance_sampling_level=importance,
        loss_aggregation=loss_aggregation,
        kl_coef=0.05,
        max_completion_length=16,
    )
    t = _tokens(4)
    out = policy_loss(s, **t)
    out.loss.backward()
    gradient = t["logp_N"].grad * gradient_scale(out.denominator)
    for i in range(len(gradient)):
        values = []
        for step in (1e-6, -1e-6):
            moved = t["logp_N"].detach().clone()
            moved[i] += step
            values.append(_naive(s, {**t, "logp_N": moved})[0])
        assert gradient[i].item() == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-7)


def test_on_policy_gradient_is_minus_advantage() -> None:
    t = _tokens(0)
    t["logp_N"] = t["old_logp_N"].clone().requires_grad_()
    out = policy_loss(ObjectiveSettings(), **{**t, "ref_logp_N": None})
    out.loss.backward()
    torch.testing.assert_close(t["logp_N"].grad, torch.where(t["mask_N"], -t["advantage_N"], 0.0))
    assert out.stats.means() == pytest.approx(
        {
            "clip_low": 0,
            "clip_high": 0,
            "dual_clip": 0,
            "clamped": 0,
            "ratio": 1,
            "approx_kl": 0,
            "kl_ref": 0,
        }
    )


def _one(log_ratio: float, advantage: float, **settings) -> tuple[float, float, LossStats]:
    """Loss, gradient and stats of a single token."""
    logp = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    zero, ids = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    out = policy_loss(
        ObjectiveSettings(**settings),
        logp,
        zero,
        torch.tensor([advantage], dtype=torch.float64),
        ids,
        torch.ones(1, dtype=torch.bool),
    )
    out.loss.backward()
    assert logp.grad is not None
    return out.loss.item(), logp.grad.item(), out.stats


def test_clip_corners() -> None:
    # A > 0: free below 1.28, flat above. A < 0: flat below 0.8, free up to the dual clip 3, flat above.
    for ratio, advantage, loss, gradient in (
        (1.2, 1.0, -1.2, -1.2),
        (1.5, 1.0, -1.28, 0.0),
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),
        (2.0, -1.0, 2.0, 2.0),
        (50.0, -1.0, 3.0, 0.0),
        (50.0, -2.0, 6.0, 0.0),
        (50.0, 0.0, 0.0, 0.0),
    ):
        assert _one(math.log(ratio), advantage)[:2] == pytest.approx((loss, gradient))
    assert _one(math.log(50.0), -1.0, dual_clip=None)[:2] == pytest.approx((50.0, 50.0))


def test_dual_clip_bounds_the_loss_and_only_touches_negative_advantages() -> None:
    for log_ratio, advantage in itertools.product(
        [-30, -3, -0.1, 0, 0.1, 0.5, 1.2, 3, 30], [-2.0, -0.3, 0.7]
    ):
        with_bound, without = (
            _one(log_ratio, advantage)[0],
            _one(log_ratio, advantage, dual_clip=None)[0],
        )
        assert with_bound <= 3.0 * abs(advantage) + 1e-12
        assert with_bound <= without
        if advantage > 0 or math.exp(min(log_ratio, 20)) <= 3.0:
            assert with_bound == without


def test_clip_marks_are_counted() -> None:
    assert _one(math.log(0.5), -1.0)[2].clip_low == 1 and _one(math.log(0.5), 1.0)[2].clip_low == 0
    assert (
        _one(math.log(2.0), 1.0)[2].clip_high == 1 and _one(math.log(2.0), -1.0)[2].clip_high == 0
    )
    assert (
        _one(math.log(4.0), -1.0)[2].dual_clip == 1 and _one(math.log(4.0), 1.0)[2].dual_clip == 0
    )
    assert _one(math.log(4.0), -1.0, dual_clip=None)[2].dual_clip == 0
    assert _one(math.log(2.0), 1.0)[2].ratio == pytest.approx(2.0)
    assert _one(math.log(2.0), 1.0)[2].approx_kl == pytest.approx(2.0 - 1 - math.log(2.0))


def test_log_ratio_clamp_keeps_the_loss_finite_stops_the_gradient_and_is_counted() -> None:
    loss, gradient, stats = _one(500.0, -1.0, dual_clip=None)
    assert loss == pytest.approx(math.exp(20)) and gradient == 0.0 and stats.clamped == 1
    assert _one(19.0, -1.0, dual_clip=None)[2].clamped == 0
    assert _one(5.0, -1.0, dual_clip=None, log_ratio_clamp=4.0)[2].clamped == 1
    t = _tokens(0)
    t["ref_logp_N"] = t["ref_logp_N"] - 100.0
    stats = policy_loss(ObjectiveSettings(), **t).stats
    assert stats.clamped == stats.num_tokens  # the reference's clamp counts too


def test_sequence_importance_is_one_ratio_per_sequence() -> None:
    logp = torch.tensor([0.0, 0.4, -0.1], dtype=torch.float64, requires_grad=True)
    s = ObjectiveSettings(importance_sampling_level="sequence", loss_aggregation="sequence_mean")
    out = policy_loss(
        s,
        logp,
        torch.zeros(3, dtype=torch.float64),
        torch.full((3,), 2.0),
        torch.full((3,), 7),
        torch.ones(3),
    )
    out.loss.backward()
    ratio = math.exp(0.1)
    assert out.loss.item() == pytest.approx(-2 * ratio)
    # GSPO: every token has the same gradient
    assert logp.grad.tolist() == pytest.approx([-2 * ratio / 3] * 3)
    assert out.stats.ratio == pytest.approx(3 * ratio)


def test_masked_tokens_may_hold_anything() -> None:
    clean = _tokens(1)
    reference = policy_loss(ObjectiveSettings(kl_coef=0.1), **clean)
    reference.loss.backward()
    dirty = {name: value.detach().clone() for name, value in clean.items()}
    bad_values = {
        "logp_N": math.nan,
        "old_logp_N": -math.inf,
        "advantage_N": math.nan,
        "ref_logp_N": math.inf,
    }
    for name, bad in bad_values.items():
        dirty[name][~clean["mask_N"]] = bad
    dirty["logp_N"].requires_grad_()
    out = policy_loss(
        ObjectiveSettings(kl_coef=0.1), **{**dirty, "mask_N": dirty["mask_N"].float()}
    )
    out.loss.backward()
    assert out.loss.item() == reference.loss.item() and out.stats == reference.stats
    assert torch.equal(dirty["logp_N"].grad, clean["logp_N"].grad)


def test_nothing_in_the_loss_gives_zero_gradient_not_nan() -> None:
    for loss_aggregation, importance in itertools.product(
        ("token_mean", "sequence_mean", "dr_grpo"), ("token", "sequence")
    ):
        t = _tokens(0)
        t["mask_N"] = torch.zeros_like(t["mask_N"])
        s = ObjectiveSettings(
            loss_aggregation=loss_aggregation,
            importance_sampling_level=importance,
            kl_coef=0.1,
            max_completion_length=8,
        )
        out = policy_loss(s, **t)
        out.loss.backward()  # the graph is kept: every rank must run its backward
        assert t["logp_N"].grad.tolist() == [0.0] * len(t["mask_N"])
        assert out.denominator == 0 and gradient_scale(out.denominator) == 0.0
        assert out.stats == LossStats()


def test_kl_is_measured_without_a_coefficient_and_needs_a_reference_with_one() -> None:
    t = _tokens(0)
    measured = policy_loss(ObjectiveSettings(), **t)
    blind = policy_loss(ObjectiveSettings(), **{**t, "ref_logp_N": None})
    assert measured.loss.item() == blind.loss.item()
    assert measured.stats.kl_ref > 0 and blind.stats.kl_ref == 0
    with pytest.raises(ConfigError, match=r"kl_coef is 0\.1 but there are no reference log-probs"):
        policy_loss(ObjectiveSettings(kl_coef=0.1), **{**t, "ref_logp_N": None})


def test_weights_multiply_the_policy_term_only() -> None:
    t, s = _tokens(0), ObjectiveSettings(kl_coef=0.1)
    half = torch.full_like(t["old_logp_N"], 0.5)
    full, weighted = policy_loss(s, **t), policy_loss(s, **t, weight_N=half)
    assert weighted.stats.policy_loss == pytest.approx(0.5 * full.stats.policy_loss)
    kl = full.loss.item() - full.stats.policy_loss
    assert kl == pytest.approx(0.1 * full.stats.kl_ref)
    assert weighted.loss.item() == pytest.approx(0.5 * full.stats.policy_loss + kl)


def test_truncated_importance_is_a_capped_detached_ratio() -> None:
    proximal = torch.tensor([-1.0, -1.0, 0.0], requires_grad=True)
    weights = truncated_importance(proximal, torch.tensor([-1.0, -0.5, -200.0]), cap=2.0)
    assert weights.tolist() == pytest.approx([1.0, math.exp(-0.5), 2.0])
    assert not weights.requires_grad
    with pytest.raises(ConfigError, match="cap above 0"):
        truncated_importance(proximal, proximal, cap=0.0)


def test_half_precision_log_probs_are_raised() -> None:
    t = _tokens(0, dtype=torch.bfloat16)
    out = policy_loss(ObjectiveSettings(), **t)
    assert out.loss.dtype == torch.float32
    raised = {
        name: value.float() if value.is_floating_point() else value for name, value in t.items()
    }
    assert out.loss.item() == policy_loss(ObjectiveSettings(), **raised).loss.item()


def test_kl_estimators_non_negative_and_unbiased_by_exact_expectation() -> None:
    g = torch.Generator().manual_seed(0)
    logp = torch.log_softmax(torch.randn(12, generator=g, dtype=torch.float64), 0)
    ref = torch.log_softmax(torch.randn(12, generator=g, dtype=torch.float64), 0)
    exact = (logp.exp() * (logp - ref)).sum()
    d = ref - logp
    assert (kl_estimate(d, "k3") >= 0).all() and (kl_estimate(d, "k2") >= 0).all()
    # float32, where exp(d) - d - 1 cancels
    assert (kl_estimate(torch.linspace(-1e-6, 1e-6, 101), "k3") >= 0).all()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((logp.exp() * kl_estimate(d, estimator)).sum(), exact)
    assert (logp.exp() * kl_estimate(d, "k2")).sum() != pytest.approx(exact.item(), rel=1e-3)
    variance = {e: (logp.exp() * kl_estimate(d, e).square()).sum() - exact**2 for e in ("k1", "k3")}
    assert variance["k3"] < variance["k1"]
    with pytest.raises(ConfigError, match="k1, k2 or k3, found 'k4'"):
        kl_estimate(d, "k4")  # type: ignore[arg-type]


def test_gradients_of_kl_terms_as_documented() -> None:
    """Expected gradient over samples from the policy: k1 none, k2 of KL(policy||ref), k3 of KL(ref||policy)."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(7, generator=g, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(7, generator=g, dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    sampling = logp.detach().exp()

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    expected = {
        e: gradient((sampling * kl_estimate(ref - logp, e)).sum()) for e in ("k1", "k2", "k3")
    }
    torch.testing.assert_close(
        expected["k1"], torch.zeros(7, dtype=torch.float64), atol=1e-12, rtol=0
    )
    torch.testing.assert_close(expected["k2"], gradient((logp.exp() * (logp - ref)).sum()))
    torch.testing.assert_close(expected["k3"], gradient((ref.exp() * (ref - logp)).sum()))


def test_fractional_masks_are_refused() -> None:
    t = _tokens(0)
    with pytest.raises(AssertionError, match="weights go into weight_N"):
        policy_loss(ObjectiveSettings(), **{**t, "mask_N": t["mask_N"].float() * 0.5})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"loss_aggregation": "token_meen"},
            r"mean, sequence_mean, dr_grpo, found 'token_meen'\. Did you mean 'token_mean'\?",
        ),
        ({"importance_sampling_level": "sequences"}, r"Did you mean 'sequence'\?"),
        ({"kl_estimator": "low_var_kl"}, "k1, k2, k3, found 'low_var_kl'"),
        (
            {"kl_estimator": "k1", "kl_coef": 0.1},
            "k3 or k2 for a KL term in the loss, found k1: its gradient is 0 in expectation",
        ),
        ({"clip_low": 1.5}, r"clip_low in \(0, 1\], found 1.5"),
        ({"clip_high": 0.0}, "clip_high above 0, found 0.0"),
        ({"dual_clip": 1.2}, r"dual_clip above 1 \+ clip_high = 1.28, found 1.2"),
        ({"loss_aggregation": "dr_grpo"}, "max_completion_length above 0, found None"),
        ({"kl_coef": -1.0}, "kl_coef at least 0, found -1.0"),
        ({"log_ratio_clamp": 0.0}, r"log_ratio_clamp in \(0, 80\]"),
    ],
)
def test_user_errors_say_what_to_do(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ObjectiveSettings(**settings)
