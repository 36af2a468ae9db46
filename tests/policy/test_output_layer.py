"""The output layer: log-probs, entropies and their gradients as torch's own; products of 16-bit factors; one copy of a weight."""

from __future__ import annotations

import pytest
import torch

from mmrl.config import LoraSettings
from mmrl.policy import output_layer
from mmrl.policy.output_layer import HalfProduct, OutputLayer, TokenScores
from tests.kits.engine_kit import fresh_policy


def some_logits(rows: int = 13, words: int = 501) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(rows, words, generator=draw)
    logits[:, [3, 77]] = float("-inf")  # media tokens
    return logits, torch.randint(78, words, (rows,), generator=draw)


@pytest.mark.parametrize("block", [1, 2 * 501, 1 << 22])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_scores_and_their_gradient_are_autograds_own(
    block: int, entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_layer, "_BLOCK", block)
    logits, target = some_logits()
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logp, entropy = TokenScores.apply(ours, target, entropy_gradient)
    log_probs = theirs.log_softmax(-1)
    expected = log_probs.gather(-1, target[:, None])[:, 0]
    their_entropy = -(log_probs.exp() * log_probs.masked_fill(log_probs.isneginf(), 0.0)).sum(-1)
    torch.testing.assert_close(logp, expected)
    torch.testing.assert_close(entropy, their_entropy, rtol=1e-5, atol=1e-5)
    assert entropy.requires_grad == entropy_gradient
    weight = torch.linspace(-1, 2, len(target))
    (logp * weight + (entropy * weight.flip(0) if entropy_gradient else 0)).sum().backward()
    total = (expected * weight).sum()
    if entropy_gradient:
        total = total + (their_entropy * weight.flip(0)).sum()
    total.backward()
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_halved_factors_give_the_sums_and_gradients_of_their_exact_product() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 64, generator=draw).requires_grad_()
    weight = torch.randn(300, 64, generator=draw).requires_grad_()
    out = HalfProduct.apply(hidden, weight, torch.bfloat16)
    exact = hidden.bfloat16().double() @ weight.bfloat16().double().T
    assert out.dtype == torch.float32 and (out - exact).abs().max() < 1e-5 * exact.abs().max()
    slope = torch.randn(9, 300, generator=draw)
    out.backward(slope)
    rounded = slope.bfloat16().double()
    for found, expected in (
        (hidden.grad, rounded @ weight.detach().bfloat16().double()),
        (weight.grad, rounded.T @ hidden.detach().bfloat16().double()),
    ):
        assert found is not None and found.dtype == torch.float32
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_frozen_weight_is_copied_once_and_again_when_it_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, hidden = OutputLayer(), torch.randn(3, 64)
    weight = torch.nn.Parameter(torch.randn(50, 64).bfloat16(), requires_grad=False)
    kept = layer._in(weight, torch.float32)
    assert layer._in(weight, torch.float32) is kept
    assert torch.equal(layer(hidden, weight, torch.bfloat16), hidden @ weight.float().T)
    other = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)
    assert layer._in(other, torch.float32) is not kept
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(layer(hidden, weight, None), hidden @ weight.float().T)
    weight.requires_grad_()
    assert layer._in(weight, torch.float32) is not layer._in(weight, torch.float32)


def test_a_lora_runs_logits_make_no_copy_of_the_output_layer() -> None:
    """Each decoded token and each chunk of an update made one: 1.2 GB with the vocabulary of Qwen2.5-VL-3B."""
    from torch.utils._python_dispatch import TorchDispatchMode

    p = fresh_policy(lora=LoraSettings(r=4), dtype="bf16")
    hidden, weight = torch.randn(5, 64).bfloat16(), p.base.lm_head.weight
    first = p.logits(hidden)
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default:
                sizes.append(out.numel())
            return out

    with Sizes():
        assert torch.equal(p.logits(hidden), first)
    assert sizes and max(sizes) < weight.numel()
