"""Adapters on a mixture's experts (model.lora.experts): their gradients are those of the weights that peft merges them into, by
transformers' own forward, whichever way transformers multiplies experts, and whether activations are computed again or kept."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mmrl.config import LoraSettings
from mmrl.policy.policy import Policy
from tests.kits.engine_kit import Album, fresh_policy, picture, plain_logits, sample_with
from tests.kits.fast_kit import first_fast

TASK = Album()
ANSWERS = [(7, 8, 9, 40, 41), (10, 11), tuple(range(20, 31))]
FAMILIES = ("qwen3_vl_moe", "glm4v_moe", "qwen3_5_moe", "kimi_k25")
SAMPLE = sample_with([picture((112, 84), 1)], number=1)


def adapted(arch: str, **options: Any) -> Policy:
    """A policy with an adapter on its experts that is not zero."""
    p = fresh_policy(arch, lora=LoraSettings(r=3, alpha=6, experts=True), **options)
    drawn = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _, q in p.trainable():
            q.add_(0.1 * torch.randn(q.shape, generator=drawn))
    return p


def weighted(logp_N: torch.Tensor) -> torch.Tensor:
    return (logp_N * torch.linspace(-1, 1, len(logp_N))).sum()


def gradients(p: Policy) -> dict[str, torch.Tensor]:
    """Of the adapters on experts, from a packed group."""
    prompt = p.encoder(SAMPLE, TASK)
    p.model.zero_grad()
    weighted(p.evaluate([prompt] * len(ANSWERS), ANSWERS).logp_N).backward()
    return {n: q.grad.clone() for n, q in p.trainable() if ".experts." in n and q.grad is not None}


def of_merged_weights(p: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """The same by the chain rule from gradients G of the merged weights W + s B A of each expert: s B^T G and s G A^T (Hu et al.
    2021), as peft lays them out: A (E r, in) expert by expert, B (out, r E) rank by rank."""
    plain = copy.deepcopy(p.model).merge_and_unload()
    for name, q in plain.named_parameters():
        q.requires_grad_(".experts." in name)
    logp = []
    for tokens_N, logits_NV in plain_logits(p, plain, TASK, SAMPLE, ANSWERS):
        logp_NV = logits_NV.index_fill(-1, p.banned, float("-inf")).log_softmax(-1)
        logp.append(logp_NV.gather(-1, tokens_N[:, None])[:, 0])
    weighted(torch.cat(logp)).backward()
    for name, layer in p.model.named_modules():
        if not hasattr(layer, "parameter_name"):
            continue
        path = name.removeprefix("base_model.model.").replace(".base_layer", "")
        G_Eoi = plain.get_parameter(f"{path}.{layer.parameter_name}").grad
        A, B = (getattr(layer, part)["default"].weight.detach() for part in ("lora_A", "lora_B"))
        for e, G_oi in enumerate(G_Eoi):
            A_ri, B_or = A[3 * e : 3 * e + 3], B[:, e :: len(G_Eoi)]
            yield f"{name}.lora_A.default.weight {e}", 2 * B_or.T @ G_oi
            yield f"{name}.lora_B.default.weight {e}", 2 * G_oi @ A_ri.T


def by_expert(found: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    return {
        f"{name} {e}": q[3 * e : 3 * e + 3] if "lora_A" in name else q[:, e::experts]
        for name, q in found.items()
        for e in range(experts)
    }


@pytest.mark.parametrize("arch", first_fast(FAMILIES))
def test_gradients_are_those_of_the_merged_weights(arch: str) -> None:
    p = adapted(arch)
    wanted, found = dict(of_merged_weights(p)), by_expert(gradients(p), 4)
    assert found.keys() == wanted.keys() and len(wanted) == 2 * 2 * 4 * (1 + ("qwen" in arch))
    norm = torch.stack([w.norm() for w in wanted.values()]).norm()
    apart = torch.stack([(found[n] - w).norm() for n, w in wanted.items()]).norm()
    assert norm > 0.1 and apart < 1e-5 * norm, (float(apart), float(norm))


@pytest.mark.parametrize("experts", ["eager", "batched_mm", None])
def test_each_way_to_multiply_experts_sees_the_adapter(experts: str | None) -> None:
    """None: as loaded, with activations computed again in the backward pass."""
    p = adapted("qwen3_vl_moe")
    wanted = gradients(p)
    other = adapted("qwen3_vl_moe", gradient_checkpointing=experts is None)
    if experts is not None:
        other.base.set_experts_implementation(experts)
    found = gradients(other)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        if experts is None:
            assert torch.equal(found[name], gradient), name
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
