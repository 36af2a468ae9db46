"""The policy loss against TRL's GRPOTrainer: its own loss method runs on the same tensors, losses and gradients agree.

The trainer object is made without its constructor (no model, no data); only the forward is replaced, to return the
given log-probs. TRL 1.16. Run: pytest tests/algorithms/test_objective_trl.py
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmrl import _torchvision_cpu
from mmrl.algorithms import (
    EntropyBonus,
    EntropySettings,
    ObjectiveSettings,
    gradient_scale,
    policy_loss,
)

pytestmark = pytest.mark.slow  # importing TRL takes longer than all else here
MAX_LENGTH = 9
TRL_NAME = {"sequence_mean": "grpo", "token_mean": "dapo", "dr_grpo": "dr_grpo"}


@pytest.fixture(scope="module", autouse=True)
def _trl_is_here() -> None:
    """Where these tests run, and not in every process that collects them."""
    _torchvision_cpu.install()  # TRL imports torchvision, which beside a CPU torch needs help
    pytest.importorskip("trl")


def _padded(seed: int) -> dict[str, Tensor]:
    """Six right-padded completions of at most 9 tokens, (B, T) float32; some inner tokens are masked (tool output)."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([9, 4, 1, 7, 2, 5])
    mask = (torch.arange(MAX_LENGTH)[None] < lengths[:, None]).long()
    mask[0, 3] = mask[3, 0] = 0
    old = -3 * torch.rand(6, MAX_LENGTH, generator=g)
    return {
        "logp": old + 0.6 * torch.randn(6, MAX_LENGTH, generator=g),
        "old": old,
        "ref": old + 0.4 * torch.randn(6, MAX_LENGTH, generator=g),
        "advantage": torch.randn(6, generator=g),
        "weight": torch.rand(6, MAX_LENGTH, generator=g) * 2,
        "mask": mask,
    }


def _trainer(logp: Tensor, settings: ObjectiveSettings, loss_type: str, use_weights: bool) -> Any:
    from accelerate import Accelerator
    from trl import GRPOTrainer

    trainer = object.__new__(GRPOTrainer)
    trainer.__dict__.update(
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        off_policy_mask_threshold=None,
        use_vllm=use_weights,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        accelerator=Accelerator(cpu=True),
        importance_sampling_level=settings.importance_sampling_level,
        beta=settings.kl_coef,
        loss_type=loss_type,
        epsilon_low=settings.clip_low,
        epsilon_high=settings.clip_high,
        args=SimpleNamespace(
            delta=settings.dual_clip, use_bias_correction_kl=False, steps_per_generation=1
        ),
    )
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
        logp,
        torch.zeros_like(logp),
        None,
    )
    return trainer


def _entropic(logp: Tensor, entropy: Tensor, bonus: EntropySettings) -> Any:
    """TRL's trainer with its entropy bonus, adaptive where there is a target."""
    trainer = _trainer(logp, ObjectiveSettings(), "dapo", False)
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logp, entropy, None)
    trainer.__dict__.update(
        _entropy_bonus_enabled=True,
        entropy_coef=bonus.coef,
        use_adaptive_entropy=bonus.target is not None,
        _last_world_entropy=float("inf"),
        _entropy_window_stats=None,
    )
    trainer.args.__dict__.update(
        entropy_target=bonus.target,
        entropy_coef_delta=bonus.delta,
        entropy_coef_min=bonus.low,
        entropy_coef_max=bonus.high,
    )
    return trainer


def _inputs(t: dict[str, Tensor]) -> dict[str, Tensor]:
    empty = torch.zeros(6, 0, dtype=torch.long)
    return {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": torch.zeros_like(t["mask"]),
        "completion_mask": t["mask"],
        "advantages": t["advantage"],
        "old_per_token_logps": t["old"],
        "ref_per_token_logps": t["ref"],
        "importance_sampling_ratio": t["weight"],
        "num_items_in_batch": t["mask"].sum(),
    }


def _trl(
    t: dict[str, Tensor],
    settings: ObjectiveSettings,
    loss_type: str,
    use_weights: bool = False,
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient (B, T) and logged means of TRL's own compute_loss."""
    logp = t["logp"].clone().requires_grad_()
    trainer = _trainer(logp, settings, loss_type, use_weights)
    loss = trainer.compute_loss(None, _inputs(t))
    loss.backward()
    assert logp.grad is not None
    return (
        loss.item(),
        logp.grad,
        {name: values[0] for name, values in trainer._metrics["train"].items()},
    )


def _ours(
    t: dict[str, Tensor],
    settings: ObjectiveSettings,
    use_weights: bool = False,
) -> tuple[float, Tensor, dict[str, float]]:
    logp = t["logp"].clone().requires_grad_()
    ids = torch.arange(6)[:, None].expand(6, MAX_LENGTH).flatten()
    advantage = t["advantage"][:, None].expand(6, MAX_LENGTH).flatten()
    out = policy_loss(
        settings,
        logp.flatten(),
        t["old"].flatten(),
        advantage,
        ids,
        t["mask"].flatten(),
        ref_logp_N=t["ref"].flatten(),
        weight_N=t["weight"].flatten() if use_weights else None,
    )
    out.loss.backward()
    assert logp.grad is not None
    scale = gradient_scale(out.denominator)
    return out.loss.item() * scale, logp.grad * scale, out.stats.means()


def _assert_equal(
    t: dict[str, Tensor], settings: ObjectiveSettings, loss_type: str, use_weights: bool = False
) -> None:
    loss, gradient, logged = _ours(t, settings, use_weights)
    trl_loss, trl_gradient, trl_logged = _trl(t, settings, loss_type, use_weights)
    assert loss == pytest.approx(trl_loss, abs=1e-5)
    torch.testing.assert_close(gradient, trl_gradient, atol=1e-6, rtol=1e-5)
    if settings.kl_coef > 0:
        assert logged["kl_ref"] == pytest.approx(trl_logged["kl"], abs=1e-5)
    # with sequence ratios TRL averages over sequences, we over tokens
    if settings.importance_sampling_level == "token":
        assert logged["clip_low"] == pytest.approx(trl_logged["clip_ratio/low_mean"])
        assert logged["clip_high"] == pytest.approx(trl_logged["clip_ratio/high_mean"])


@pytest.mark.parametrize("loss_aggregation", ["sequence_mean", "token_mean", "dr_grpo"])
@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
@pytest.mark.parametrize("dual_clip", [None, 1.5, 3.0])
def test_loss_and_gradient_equal_trl(loss_aggregation, importance, kl_coef, dual_clip) -> None:
    """Asymmetric clip, dual clip (TRL's delta is the same bound as long as it lies above 1 + clip_high), KL k3."""
    s = ObjectiveSettings(
        loss_aggregation=loss_aggregation,
        importance_sampling_level=importance,
        kl_coef=kl_coef,
        dual_clip=dual_clip,
        clip_low=0.2,
        clip_high=0.28,
        max_completion_length=MAX_LENGTH,
    )
    for seed in range(3):
        _assert_equal(_padded(seed), s, TRL_NAME[loss_aggregation])


def test_cases_reach_every_clip() -> None:
    stats = _ours(_padded(0), ObjectiveSettings(dual_clip=1.5))[2]
    assert stats["clip_low"] > 0 and stats["clip_high"] > 0 and stats["dual_clip"] > 0


def test_bnpo_is_the_token_mean_of_one_micro_batch() -> None:
    _assert_equal(_padded(0), ObjectiveSettings(kl_coef=0.04), "bnpo")


@pytest.mark.parametrize("loss_aggregation", ["sequence_mean", "token_mean", "dr_grpo"])
def test_importance_weights_of_a_separate_sampler_equal_trl(loss_aggregation) -> None:
    s = ObjectiveSettings(
        loss_aggregation=loss_aggregation, kl_coef=0.04, max_completion_length=MAX_LENGTH
    )
    _assert_equal(_padded(1), s, TRL_NAME[loss_aggregation], use_weights=True)


def test_wholly_masked_sequences_are_the_one_declared_difference() -> None:
    """TRL keeps a masked completion in the number of sequences (5 of 6 here); ours leaves it out."""
    t = _padded(2)
    t["mask"][4] = 0
    for loss_aggregation, factor in (
        ("token_mean", 1.0),
        ("sequence_mean", 6 / 5),
        ("dr_grpo", 6 / 5),
    ):
        s = ObjectiveSettings(loss_aggregation=loss_aggregation, max_completion_length=MAX_LENGTH)
        assert _ours(t, s)[0] == pytest.approx(
            factor * _trl(t, s, TRL_NAME[loss_aggregation])[0], abs=1e-5
        )


ADAPTIVE = EntropySettings(coef=0.02, target=0.5, delta=0.05, low=0.01, high=0.1)


@pytest.mark.parametrize("bonus", [EntropySettings(coef=0.3), ADAPTIVE], ids=["fixed", "adaptive"])
def test_the_entropy_bonus_and_its_coefficient_equal_trls(bonus) -> None:
    """Eight optimizer steps of one micro-batch: losses, gradients of log-probs and entropies, coefficients."""
    state, acted = EntropyBonus(bonus), 0
    trainer = _entropic(torch.zeros(1), torch.zeros(1), bonus)
    for step in range(8):
        t = _padded(step)
        means = (0.2, 0.4, 0.45, 0.3, 0.9, 0.1, 0.8, 0.2)
        entropy = (
            torch.rand(6, MAX_LENGTH, generator=torch.Generator().manual_seed(step))
            * 2
            * means[step]
        )
        theirs = [x.clone().requires_grad_() for x in (t["logp"], entropy)]
        trainer._get_per_token_logps_and_entropies = lambda *args, found=theirs, **kwargs: (
            *found,
            None,
        )
        loss = trainer.compute_loss(None, _inputs(t))
        loss.backward()
        ours = [x.clone().requires_grad_() for x in (t["logp"], entropy)]
        ids = torch.arange(6)[:, None].expand(6, MAX_LENGTH).flatten()
        out = policy_loss(
            ObjectiveSettings(),
            ours[0].flatten(),
            t["old"].flatten(),
            t["advantage"][:, None].expand(6, MAX_LENGTH).flatten(),
            ids,
            t["mask"].flatten(),
            entropy_N=ours[1].flatten(),
            entropy_coef=state.coefficient,
        )
        scale = gradient_scale(out.denominator)
        (out.loss * scale).backward()
        assert out.loss.item() * scale == pytest.approx(loss.item(), abs=1e-5)
        torch.testing.assert_close(ours[0].grad, theirs[0].grad, atol=1e-6, rtol=1e-5)
        none = torch.zeros_like(entropy)
        torch.testing.assert_close(
            none if ours[1].grad is None else ours[1].grad, theirs[1].grad, atol=1e-8, rtol=1e-5
        )
        acted += bool(theirs[1].grad.any())
        kept = t["mask"].bool()
        state.observe(entropy[kept].double().sum().item(), int(kept.sum()))
        assert state.state_dict()["coef"] == pytest.approx(trainer.entropy_coef)
    assert acted == (8 if bonus.target is None else 5), (
        "in the steps after one at or below the target"
    )


@pytest.mark.parametrize("loss_aggregation", ["sequence_mean", "dr_grpo"])
def test_the_bonus_is_weighed_as_the_policy_term_is(loss_aggregation) -> None:
    """verl's rule (its entropy_loss goes through agg_loss with loss_agg_mode); TRL takes the token mean under every loss type."""
    t, s = (
        _padded(0),
        ObjectiveSettings(loss_aggregation=loss_aggregation, max_completion_length=MAX_LENGTH),
    )
    entropy = torch.rand(6, MAX_LENGTH, generator=torch.Generator().manual_seed(9)).requires_grad_()
    ids = torch.arange(6)[:, None].expand(6, MAX_LENGTH).flatten()
    advantage = t["advantage"][:, None].expand(6, MAX_LENGTH).flatten()
    out = policy_loss(
        s,
        t["logp"].flatten(),
        t["old"].flatten(),
        advantage,
        ids,
        t["mask"].flatten(),
        entropy_N=entropy.flatten(),
        entropy_coef=0.3,
    )
    (out.loss * gradient_scale(out.denominator)).backward()
    lengths = (
        t["mask"].sum(1, keepdim=True)
        if loss_aggregation == "sequence_mean"
        else torch.full((6, 1), MAX_LENGTH)
    )
    torch.testing.assert_close(entropy.grad, -0.3 * t["mask"] / lengths / 6, atol=1e-8, rtol=1e-6)
    assert (
        out.stats
        == policy_loss(
            s, t["logp"].flatten(), t["old"].flatten(), advantage, ids, t["mask"].flatten()
        ).stats
    )
