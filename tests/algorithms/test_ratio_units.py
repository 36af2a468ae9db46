"""Ratios over an action step or a decision: products of the numbers' ratios, against torch's own multivariate Gaussians."""

from __future__ import annotations

import pytest
import torch

from mmrl.algorithms import ObjectiveSettings, policy_loss

DIM, STEPS, TURNS = 3, 2, 4
WIDE = {"clip_low": 1.0, "clip_high": 1e9, "dual_clip": None}


def _case() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    mean = torch.randn(TURNS, STEPS, DIM, dtype=torch.double, requires_grad=True)
    old, action = (torch.randn(TURNS, STEPS, DIM, dtype=torch.double) for _ in range(2))
    return mean, old, action, torch.randn(TURNS, dtype=torch.double)


@pytest.mark.parametrize(("level", "shared"), [("action", DIM), ("chunk", STEPS * DIM)])
def test_a_unit_has_the_ratio_of_its_joint_density(level: str, shared: int) -> None:
    mean, old, action, advantage_D = _case()
    one = torch.ones((), dtype=torch.double)
    size = STEPS * DIM
    turn_N = torch.arange(TURNS).repeat_interleave(size)
    unit_N = torch.arange(TURNS * size) // shared
    loss = policy_loss(
        ObjectiveSettings(importance_sampling_level=level, **WIDE),
        torch.distributions.Normal(mean, one).log_prob(action).flatten(),
        torch.distributions.Normal(old, one).log_prob(action).flatten(),
        advantage_D.repeat_interleave(size),
        turn_N,
        torch.ones(TURNS * size, dtype=torch.bool),
        unit_N=unit_N,
    )

    def joint(centre: torch.Tensor) -> torch.Tensor:
        shape = (-1, shared)
        return torch.distributions.MultivariateNormal(
            centre.reshape(shape), torch.eye(shared, dtype=torch.double)
        ).log_prob(action.reshape(shape))

    ratio_U = (joint(mean) - joint(old)).exp()
    expected = -(ratio_U * advantage_D.repeat_interleave(size // shared)).sum() * shared
    assert loss.loss.item() == pytest.approx(expected.item(), rel=1e-9)
    (found,) = torch.autograd.grad(loss.loss, mean, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected, mean)
    torch.testing.assert_close(found, wanted)


def test_what_was_not_executed_is_no_part_of_the_ratio() -> None:
    mean, old, action, advantage_D = _case()
    one = torch.ones((), dtype=torch.double)
    size = STEPS * DIM
    # of each decision the first action step alone was executed
    mask_N = (torch.arange(TURNS * size) % size) < DIM
    turn_N = torch.arange(TURNS).repeat_interleave(size)
    now, before = (
        torch.distributions.Normal(m, one).log_prob(action).flatten() for m in (mean, old)
    )
    loss = policy_loss(
        ObjectiveSettings(importance_sampling_level="chunk", **WIDE),
        now,
        before,
        advantage_D.repeat_interleave(size),
        turn_N,
        mask_N,
        unit_N=turn_N,
    )
    ratio_D = (now - before).view(TURNS, size)[:, :DIM].sum(1).exp()
    assert loss.loss.item() == pytest.approx(-(ratio_D * advantage_D).sum().item() * DIM, rel=1e-9)
