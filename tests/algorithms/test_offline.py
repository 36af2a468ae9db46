"""The loss of demonstrations' tokens: against loops written from the formulas alone, finite differences and exact expectations.

Run: pytest tests/algorithms/test_offline.py
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from mmrl.algorithms import (
    LossStats,
    ObjectiveSettings,
    off_policy_loss,
    policy_loss,
)
from mmrl.config import OfflineConfig

LENGTHS = (4, 3, 5, 2)
DEMONSTRATIONS = (1, 3)  # sequences somebody else wrote


def batch(seed: int = 0) -> dict[str, Any]:
    """Four sequences; the second and the last are demonstrations, one without behaviour, one with; some tokens masked out."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    old = -torch.rand(len(ids), generator=g, dtype=torch.float64) * 3
    logp = old + 0.7 * torch.randn(len(ids), generator=g, dtype=torch.float64)
    old[ids == DEMONSTRATIONS[0]] = 0.0
    mask = torch.rand(len(ids), generator=g) > 0.2
    mask[ids == DEMONSTRATIONS[1]] = True
    return {
        "logp_N": logp.clamp(max=0.0).requires_grad_(),
        "old_logp_N": old,
        "sequence_id_N": ids,
        "mask_N": mask,
        "advantage_N": torch.randn(len(LENGTHS), generator=g, dtype=torch.float64)[ids],
        "offline_N": torch.isin(ids, torch.tensor(DEMONSTRATIONS)),
    }


def naive_term(
    s: ObjectiveSettings, logp: Tensor, old: float, advantage: float, offline: bool
) -> Tensor:
    """One token's loss in plain scalars; beyond the cap its gradient is that of cap * log pi through f, written out."""
    if offline:
        gamma, cap = s.offline.gamma, s.offline.cap
        ratio = logp.exp() / math.exp(old)
        if float(ratio.detach()) > cap:
            slope = 1.0 if gamma is None else gamma / (cap + gamma) ** 2
            value = cap if gamma is None else cap / (cap + gamma)
            return -advantage * (value + cap * slope * (logp - logp.detach()))
        return -advantage * (ratio if gamma is None else ratio / (ratio + gamma))
    ratio = (logp - old).exp()
    value = float(ratio.detach())
    clipped = min(max(value, 1 - s.clip_low), 1 + s.clip_high)
    loss = (
        -ratio * advantage
        if value * advantage <= clipped * advantage
        else -clipped * advantage + 0 * logp
    )
    if (
        s.dual_clip is not None
        and advantage < 0
        and float(loss.detach()) > -s.dual_clip * advantage
    ):
        loss = -s.dual_clip * advantage + 0 * logp
    return loss


def naive(s: ObjectiveSettings, t: dict[str, Any]) -> tuple[Tensor, list[float]]:
    """(mean loss, gradient by log-prob) of `naive_term`s, summed and divided as the loss_aggregation says."""
    leaf = t["logp_N"].detach().clone().requires_grad_()
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for sequence in range(len(LENGTHS)):
        rows = [i for i in range(len(leaf)) if t["sequence_id_N"][i] == sequence and t["mask_N"][i]]
        terms = [
            naive_term(
                s,
                leaf[i],
                float(t["old_logp_N"][i]),
                float(t["advantage_N"][i]),
                bool(t["offline_N"][i]),
            )
            for i in rows
        ]
        if not rows:
            continue
        share = 1 / len(rows) if s.loss_aggregation == "sequence_mean" else 1.0
        total = total + share * sum(terms, torch.zeros((), dtype=torch.float64))
        weight += {
            "token_mean": len(rows),
            "sequence_mean": 1,
            "dr_grpo": s.max_completion_length or 0,
        }[s.loss_aggregation]
    total.backward()
    return total / weight, (leaf.grad / weight).tolist()


@pytest.mark.parametrize("loss_aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
@pytest.mark.parametrize(("gamma", "cap"), [(0.1, 2.0), (0.5, 1.0), (None, 1.5), (None, 100.0)])
def test_mixed_loss_and_gradient_equal_plain_loops(
    gamma: float | None, cap: float, loss_aggregation: Any
) -> None:
    s = ObjectiveSettings(
        loss_aggregation=loss_aggregation,
        max_completion_length=7,
        offline=OfflineConfig(gamma=gamma, cap=cap),
    )
    beyond = 0.0
    for seed in range(6):
        t = batch(seed)
        out = policy_loss(s, **t)
        out.loss.backward()
        loss, gradient = naive(s, t)
        assert float(out.loss.detach()) / out.denominator == pytest.approx(
            float(loss.detach()), abs=1e-12
        )
        assert (t["logp_N"].grad / out.denominator).tolist() == pytest.approx(gradient, abs=1e-12)
        beyond += out.stats.offline_capped
    assert (beyond > 0) == (cap < 100)


@pytest.mark.parametrize("gamma", [0.1, 1.0, None])
def test_gradient_equals_finite_differences_and_the_formula(gamma: float | None) -> None:
    s = OfflineConfig(gamma=gamma, cap=2.0)
    behaviour = torch.tensor([0.0, -1.0, -3.0, -0.2, -2.0], dtype=torch.float64)
    # the last is beyond the cap
    logp = torch.tensor([-0.3, -1.4, -2.6, -4.0, -0.1], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([1.3, -0.7, 0.4, 2.0, 1.1], dtype=torch.float64)
    off_policy_loss(s, logp, behaviour, advantage).sum().backward()
    assert logp.grad is not None
    rho = (logp.detach() - behaviour).exp().clamp(max=2.0)
    slope = torch.ones_like(rho) if gamma is None else gamma / (rho + gamma) ** 2
    assert logp.grad.tolist() == pytest.approx((-advantage * rho * slope).tolist(), rel=1e-12)
    step = 1e-6
    for i in range(4):

        def at(shift: float, i: int = i) -> float:
            moved = logp.detach().clone()
            moved[i] += shift
            return float(off_policy_loss(s, moved, behaviour, advantage).sum())

        assert float(logp.grad[i]) == pytest.approx((at(step) - at(-step)) / (2 * step), rel=1e-6)
    inner = logp.detach()[:4].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: off_policy_loss(s, x, behaviour[:4], advantage[:4]), (inner,)
    )


def test_behaviour_one_is_luffys_shaped_probability() -> None:
    logp = torch.tensor([0.0, -0.5, -2.3, -9.0], dtype=torch.float64)
    p = logp.exp()
    found = off_policy_loss(
        OfflineConfig(),
        logp,
        torch.zeros(4, dtype=torch.float64),
        torch.ones(4, dtype=torch.float64),
    )
    assert (-found).tolist() == pytest.approx((p / (p + 0.1)).tolist(), rel=1e-12)


def test_the_plain_weight_gives_the_on_policy_gradient_exactly() -> None:
    """Over all tokens of a categorical, E_b[d/dtheta (pi / b) A] = E_pi[A d/dtheta log pi]: no bias from who wrote them."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(7, generator=g, dtype=torch.float64, requires_grad=True)
    behaviour = torch.randn(7, generator=g, dtype=torch.float64).log_softmax(0)
    reward = torch.randn(7, generator=g, dtype=torch.float64)
    logp = logits.log_softmax(0)

    def gradient(s: OfflineConfig) -> Tensor:
        weighted = behaviour.exp() * off_policy_loss(s, logp, behaviour, reward)
        return torch.autograd.grad(-weighted.sum(), logits, retain_graph=True)[0]

    truth = torch.autograd.grad((logp.exp() * reward).sum(), logits, retain_graph=True)[0]
    assert torch.allclose(gradient(OfflineConfig(gamma=None, cap=1e6)), truth, atol=1e-12)
    assert not torch.allclose(gradient(OfflineConfig(gamma=None, cap=1.0)), truth, atol=1e-3), (
        "the cap costs bias"
    )
    assert not torch.allclose(gradient(OfflineConfig(cap=1e6)), truth, atol=1e-3), (
        "shaping costs bias"
    )


def test_demonstrations_are_not_clipped_and_take_no_kl() -> None:
    s = ObjectiveSettings(kl_coef=0.5, offline=OfflineConfig())
    logp = torch.tensor([-0.05, -0.05], requires_grad=True)
    old, ones, ids = torch.tensor([-1.0, -1.0]), torch.ones(2), torch.tensor([0, 1])
    out = policy_loss(
        s,
        logp,
        old,
        ones,
        ids,
        ones.bool(),
        ref_logp_N=old - 2,
        offline_N=torch.tensor([False, True]),
    )
    out.loss.backward()
    alone = torch.tensor([-0.05], requires_grad=True)
    off_policy_loss(s.offline, alone, old[1:], ones[1:]).sum().backward()
    assert logp.grad is not None and alone.grad is not None
    assert float(logp.grad[1]) == pytest.approx(float(alone.grad[0])) and float(alone.grad[0]) < 0
    assert out.stats.clip_high == 1 and out.stats.kl_ref > 0


def test_own_tokens_are_treated_as_if_the_demonstrations_were_not_there() -> None:
    s = ObjectiveSettings(kl_coef=0.1)
    t = batch(3)
    reference = t["old_logp_N"] - 0.2
    mixed = policy_loss(s, **t, ref_logp_N=reference, label_N=t["sequence_id_N"] // 2, num_labels=2)
    mixed.loss.backward()
    own = ~t["offline_N"]
    leaf = t["logp_N"].detach()[own].requires_grad_()
    plain = policy_loss(
        s,
        leaf,
        *(t[k][own] for k in ("old_logp_N", "advantage_N", "sequence_id_N", "mask_N")),
        ref_logp_N=reference[own],
    )
    plain.loss.backward()
    assert torch.equal(t["logp_N"].grad[own], leaf.grad)
    assert mixed.stats.means() == pytest.approx(plain.stats.means(), rel=1e-12)
    assert mixed.stats.num_tokens - mixed.stats.offline_tokens == plain.stats.num_tokens
    trained = t["offline_N"] & t["mask_N"]
    assert mixed.stats.offline_logp == pytest.approx(float(t["logp_N"].detach()[trained].sum()))
    total = sum(mixed.by_label, LossStats())
    assert total.to_list() == pytest.approx(mixed.stats.to_list(), rel=1e-12)
    without = policy_loss(s, **{**t, "offline_N": torch.zeros_like(own)}, ref_logp_N=reference)
    usual = policy_loss(s, **{**t, "offline_N": None}, ref_logp_N=reference)
    assert torch.equal(without.loss, usual.loss) and without.stats == usual.stats


@settings(max_examples=60, deadline=None)
@given(
    st.floats(-1e4, 0), st.floats(-1e4, 0), st.floats(-50, 50), st.sampled_from([0.01, 0.1, None])
)
def test_loss_and_gradient_stay_bounded(
    logp: float, behaviour: float, advantage: float, gamma: float | None
) -> None:
    leaf = torch.tensor([logp], requires_grad=True)
    loss = off_policy_loss(
        OfflineConfig(gamma=gamma), leaf, torch.tensor([behaviour]), torch.tensor([advantage])
    )
    loss.sum().backward()
    assert leaf.grad is not None
    assert abs(float(leaf.grad)) <= abs(advantage) * (2.0 if gamma is None else 0.25) * (1 + 1e-5)
    assert abs(float(loss.detach())) <= 101


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0.0}, "greater than 0"),
        ({"gamma": math.nan}, "gamma"),
        ({"cap": 0.5}, "greater than or equal to 1"),
        ({"cap": math.inf}, "finite"),
    ],
)
def test_settings_are_checked(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OfflineConfig(**options)
    assert (OfflineConfig().gamma, OfflineConfig().cap) == (0.1, 2.0)


def test_demonstrations_get_no_entropy_bonus() -> None:
    offline_N, mask_N = (
        torch.tensor([False, False, True, True]),
        torch.tensor([True, True, True, False]),
    )
    entropy_N = torch.full((4,), 0.5, requires_grad=True)
    logp_N = torch.full((4,), -1.0, requires_grad=True)
    out = policy_loss(
        ObjectiveSettings(),
        logp_N,
        torch.full((4,), -1.0),
        torch.ones(4),
        torch.tensor([0, 0, 1, 1]),
        mask_N,
        offline_N=offline_N,
        entropy_N=entropy_N,
        entropy_coef=0.25,
    )
    out.loss.backward()
    assert entropy_N.grad is not None and entropy_N.grad.tolist() == [-0.25, -0.25, 0.0, 0.0]
