"""The critic's loss against a loop over its values, split invariance, hand cases.

Run: pytest tests/algorithms/test_ppo.py
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from mmrl.algorithms import PPOSettings, ValueStats, critic_warming_up, value_loss
from mmrl.errors import ConfigError


@pytest.mark.parametrize(("kind", "clip"), list(itertools.product(("huber", "mse"), (0.2, None))))
def test_value_loss_equals_the_loop_and_its_split(kind, clip) -> None:
    g = torch.Generator().manual_seed(5)
    values, old, returns = (torch.randn(40, generator=g, dtype=torch.float64) * 9 for _ in range(3))
    old = torch.where(torch.rand(40, generator=g) > 0.5, old, values + 0.1)
    mask = torch.rand(40, generator=g) > 0.3
    values[~mask] = returns[~mask] = float("nan")
    values.requires_grad_()
    s = PPOSettings(value_loss=kind, value_clip=clip)

    def penalty(e: Tensor) -> Tensor:
        return 0.5 * e * e if kind == "mse" or abs(e) <= 10 else 10 * (abs(e) - 5)

    terms = []
    for v, o, r in zip(values[mask], old[mask], returns[mask], strict=True):
        limit = torch.tensor(clip or 0.0, dtype=torch.float64)
        near = v if clip is None else o + max(-limit, min(limit, v - o))
        terms.append(max(penalty(r - v), penalty(r - near)))
    out = value_loss(s, values, old, returns, mask)
    assert out.denominator == int(mask.sum()) == out.stats.count
    assert out.loss.item() == pytest.approx(sum(terms).item(), rel=1e-9)
    torch.testing.assert_close(
        torch.autograd.grad(out.loss, values)[0], torch.autograd.grad(sum(terms), values)[0]
    )
    halves = [
        value_loss(s, values[i], old[i], returns[i], mask[i]) for i in (slice(0, 17), slice(17, 40))
    ]
    total = halves[0].stats + halves[1].stats
    assert total.to_list() == pytest.approx(out.stats.to_list(), rel=1e-9)
    kept = (returns[mask], (returns - values)[mask].detach())
    assert total.explained_variance() == pytest.approx(
        1 - (kept[1].var() / kept[0].var()).item(), rel=1e-9
    )
    assert out.stats.clipped == (
        0 if clip is None else int(((values - old).abs() > clip)[mask].sum())
    )


def test_huber_and_clip_by_hand() -> None:
    one = torch.ones(1)
    for value, old, target, expected in (
        (0.0, 0.0, 4.0, 8.0),
        (0.0, 0.0, 14.0, 90.0),
        (1.0, 0.0, 1.0, 0.5 * 0.8**2),
        (0.0, 1.0, -1.0, 0.5 * 1.8**2),
    ):
        v = torch.tensor([value], requires_grad=True)
        out = value_loss(PPOSettings(), v, torch.tensor([old]), torch.tensor([target]), one)
        assert out.loss.item() == pytest.approx(expected)
    out.loss.backward()
    assert v.grad.item() == 0  # already moved further than 0.2 towards the target: no more pull
    assert value_loss(
        PPOSettings(), v, one, one, one, weight_N=torch.tensor([3.0])
    ).loss.item() == pytest.approx(1.5)
    half = value_loss(PPOSettings(), torch.zeros(1, dtype=torch.bfloat16), one, one * 4, one)
    assert half.loss.dtype == torch.float32


def test_explained_variance_of_perfect_constant_and_spreadless() -> None:
    x = torch.tensor([1.0, 2.0, 4.0])
    ones = torch.ones(3)
    assert value_loss(PPOSettings(), x, x, x, ones).stats.explained_variance() == pytest.approx(1)
    assert value_loss(
        PPOSettings(), ones, ones, x, ones
    ).stats.explained_variance() == pytest.approx(0)
    assert value_loss(PPOSettings(), x, x, 0.1 * ones, ones).stats.explained_variance() is None
    assert ValueStats().explained_variance() is None
    assert value_loss(PPOSettings(), x, x, x, torch.zeros(3)).denominator == 0


def test_warm_up_counts_training_steps() -> None:
    assert [critic_warming_up(PPOSettings(critic_warmup_steps=2), n) for n in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    assert not critic_warming_up(PPOSettings(), 0)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"value_loss": "hubert"}, "value_loss to be one of huber, mse, found 'hubert'.*huber"),
        ({"value_clip": 0.0}, "value_clip above 0"),
        ({"huber_delta": -1.0}, "huber_delta above 0"),
        ({"entropy_coef": float("nan")}, "entropy_coef at least 0"),
        ({"critic_warmup_steps": -1}, "critic_warmup_steps at least 0"),
    ],
)
def test_settings_explain_themselves(wrong, text) -> None:
    with pytest.raises(ConfigError, match=text):
        PPOSettings(**wrong)
