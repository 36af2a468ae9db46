"""Layers in fewer kernels compute what transformers' and peft's own compute: values and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mmrl.config import LoraSettings, ModelConfig
from mmrl.diagnostics.shapes import config_of, meta_model
from mmrl.policy import fused_layers
from mmrl.policy.adapter import add_adapter
from mmrl.policy.families import all_variants, family_of
from mmrl.policy.loading import load_policy
from mmrl.policy.policy import Policy
from tests.kits.engine_kit import ARCHITECTURES, tiny_folder
from tests.kits.fast_kit import first_fast
from tests.policy.test_precision import gradients, randomize_adapter, some_batch

LORA = LoraSettings(r=4, alpha=8)
FROZEN = ["vision", "projector"]


def policy_with(arch: str, *, fused: bool, **options: Any) -> Policy:
    options.setdefault("device", "cpu")
    p = load_policy(ModelConfig(path=tiny_folder(arch), fused_layers=fused, **options))
    if options.get("lora"):
        randomize_adapter(p)
    return p


def names_of(p: Policy) -> set[str]:
    return {type(m).__name__ for m in p.model.modules()}


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("arch", all_variants())
def test_what_can_be_fused_is_what_is_fused(arch: str, lora: LoraSettings | None) -> None:
    """`fusable`, which an estimate of memory asks before weights are there, against what `fuse_layers` leaves."""
    model: Any = meta_model(config_of(tiny_folder(arch)), torch.float32)
    family = family_of(model.config)
    layers = family.parts.decoder_layers(family.body(model))
    if lora:
        model = add_adapter(model, ModelConfig(lora=lora), None, ())
    told = [fused_layers.fusable(layer) for layer in layers]
    fused_layers.fuse_layers(model)
    for layer, fusable in zip(layers, told, strict=True):
        names = {type(m).__name__ for m in layer.modules()}
        ours = {n for n in names if "Norm" in n or n.endswith(("MLP", "MLPs", "Experts"))}
        gated = any(n.endswith("MLP") for n in ours)
        assert fusable == (gated and all(n.startswith("Fused") for n in ours)), names


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("arch", first_fast(ARCHITECTURES))
def test_values_and_gradients_are_those_of_plain_layers(
    arch: str, lora: LoraSettings | None
) -> None:
    plain, fused = (policy_with(arch, fused=f, lora=lora, freeze=FROZEN) for f in (False, True))
    assert not any(n.startswith("Fused") for n in names_of(plain))
    assert {n for n in names_of(fused) if n.startswith("Fused")} >= (
        {"FusedLinear"} if lora else set()
    )
    for end in ("RMSNorm", "MLP"):
        assert any(n.startswith("Fused") and n.endswith(end) for n in names_of(fused)), end
    assert [n for n, _ in plain.trainable()] == [n for n, _ in fused.trainable()]
    batch = some_batch(plain)
    assert torch.allclose(fused.logp(batch).logp_N, plain.logp(batch).logp_N, atol=1e-4)
    expected, found = gradients(plain, batch), gradients(fused, batch)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-3 * gradient.norm(), name


@pytest.mark.slow
def test_adapters_on_a_quantized_base_are_summed_too() -> None:
    lora = LoraSettings(r=4, alpha=8, quantize="nf4")
    plain, fused = (policy_with("qwen2_5_vl", fused=f, lora=lora) for f in (False, True))
    assert "FusedLinear" in names_of(fused)
    batch = some_batch(plain)
    expected, found = gradients(plain, batch), gradients(fused, batch)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-3 * gradient.norm(), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_in_bf16_they_are_as_near_to_fp32_as_plain_layers(checkpointing: bool) -> None:
    exact = policy_with("qwen2_5_vl", fused=False, lora=LORA)
    batch = some_batch(exact)
    truth = exact.logp(batch).logp_N.detach()
    gap = []
    for fused in (False, True):
        p = policy_with(
            "qwen2_5_vl", fused=fused, lora=LORA, dtype="bf16", gradient_checkpointing=checkpointing
        )
        logp = p.logp(batch).logp_N
        gap.append(float((logp.detach() - truth).abs().mean()))
        logp.sum().backward()
        assert all(q.grad is not None and q.grad.isfinite().all() for _, q in p.trainable())
        assert {q.grad.dtype for _, q in p.trainable() if q.grad is not None} == {torch.float32}
    assert gap[1] < 1.5 * gap[0], gap


def test_what_peft_switches_stays_switched() -> None:
    """The reference of a LoRA run is the model without its adapter, and merged weights are the sum."""
    plain, fused = (policy_with("qwen2_5_vl", fused=f, lora=LORA) for f in (False, True))
    batch = some_batch(plain)
    with torch.no_grad():
        for p in (plain, fused):
            p.model.eval()
        with plain.reference() as a, fused.reference() as b:
            assert torch.allclose(a.logp(batch).logp_N, b.logp(batch).logp_N, atol=1e-4)
        adapted = fused.logp(batch).logp_N
        fused.model.merge_adapter()
        assert torch.allclose(fused.logp(batch).logp_N, adapted, atol=1e-3)
        fused.model.unmerge_adapter()
        assert torch.allclose(fused.logp(batch).logp_N, adapted, atol=1e-3)
        with fused.reference() as b:
            assert not torch.allclose(b.logp(batch).logp_N, adapted, atol=1e-2), (
                "the adapter counts"
            )


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The compiler, on the CPU as on a GPU; which functions it was asked for."""
    asked: list[str] = []

    def run(function: Any, first: torch.Tensor, *rest: Any) -> torch.Tensor:
        asked.append(function.__name__)
        return fused_layers._compiled(function)(first, *rest)

    monkeypatch.setattr(fused_layers, "_run", run)
    yield asked
    torch._dynamo.reset()


@pytest.mark.slow
def test_the_compiled_functions_compute_the_same(compiled: list[str]) -> None:
    plain = policy_with("qwen2_5_vl", fused=False, lora=LORA, gradient_checkpointing=True)
    fused = policy_with("qwen2_5_vl", fused=True, lora=LORA, gradient_checkpointing=True)
    batch = some_batch(plain)
    expected, found = gradients(plain, batch), gradients(fused, batch)
    assert set(compiled) == {"_rms_norm", "_silu_times"}
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-3 * gradient.norm(), name


def test_only_classes_with_these_formulas_are_replaced() -> None:
    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(4)), 1e-6

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return (1 + self.weight) * hidden_states

    model = torch.nn.Sequential(Other(), torch.nn.Linear(4, 4))
    assert fused_layers.fuse_layers(model) == 0
    assert type(model[0]) is Other
