"""Weights of samples that an older policy chose. (Which of them are used at all: tests/training/test_pipeline.py.)

Run: pytest tests/algorithms/test_staleness.py
"""

from __future__ import annotations

import pytest
import torch

from mmrl.algorithms import CorrectionSettings, behave_weights, truncated_importance
from mmrl.errors import ConfigError


def test_weights_truncate_or_mask_above_the_threshold() -> None:
    behaviour = torch.zeros(4)
    proximal = torch.tensor([0.5, 1.0, 1.99, 3.0]).log().requires_grad_()
    weights, masked = behave_weights(CorrectionSettings(), proximal, behaviour)
    assert (
        weights.tolist() == pytest.approx([0.5, 1, 1.99, 2])
        and not masked.any()
        and not weights.requires_grad
    )
    assert torch.equal(weights, truncated_importance(proximal, behaviour, 2.0))
    weights, masked = behave_weights(CorrectionSettings(mode="mask"), proximal, behaviour)
    assert weights.tolist() == pytest.approx([0.5, 1, 1.99, 0]) and masked.tolist() == [
        False,
        False,
        False,
        True,
    ]
    weights, masked = behave_weights(CorrectionSettings(mode="none"), proximal, behaviour)
    assert weights.tolist() == [1] * 4 and not masked.any()
    assert behave_weights(
        CorrectionSettings(mode="mask"), torch.tensor([900.0]), torch.tensor([0.0])
    )[0].tolist() == [0.0]
    with pytest.raises(ConfigError, match=r"none, truncate or mask, found 'masked'.*mask"):
        CorrectionSettings(mode="masked")
    with pytest.raises(ConfigError, match="threshold above 0"):
        CorrectionSettings(threshold=0)


def test_a_sequence_weight_is_the_ratio_of_the_probabilities_of_whole_turns() -> None:
    turn = torch.tensor([0, 0, 0, 1, 1, 2])
    chosen = torch.tensor([True, True, False, True, True, True])
    proximal, behaviour = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).double()
    ratios = [
        float(proximal[keep].exp().prod() / behaviour[keep].exp().prod())
        for keep in ((turn == n) & chosen for n in range(3))
    ]
    assert min(ratios) < 1 < max(ratios)
    expected = torch.tensor(ratios)[turn]
    for mode in ("truncate", "mask"):
        settings = CorrectionSettings(mode=mode, level="sequence", threshold=1.0)
        weights, masked = behave_weights(
            settings, proximal, behaviour, turn_N=turn, counted_N=chosen
        )
        wanted = expected.clamp(max=1) if mode == "truncate" else expected * (expected <= 1)
        assert torch.allclose(weights.double(), wanted.double(), rtol=1e-6)
        assert masked.tolist() == ((expected > 1) & (mode == "mask")).tolist()
    with pytest.raises(ConfigError, match="token or sequence, found 'turn'"):
        CorrectionSettings(level="turn")  # type: ignore[arg-type]
