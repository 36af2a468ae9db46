"""Precision: what is stored, cast and computed in which type, and what that may change in samples and log-probs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import LoraSettings, ModelConfig
from mmrl.errors import ConfigError
from mmrl.policy import loading
from mmrl.policy.loading import load_policy, store_frozen
from mmrl.policy.pack import Batch, PackItem, pack
from mmrl.policy.policy import Policy
from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
from tests.kits.engine_kit import (
    ARCHITECTURES,
    Album,
    fresh_policy,
    picture,
    sample_with,
    tiny_folder,
    weights_of,
)

pytestmark = pytest.mark.slow  # models of three architectures in several precisions

TASK = Album()
ANY_DEVICE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Largest and mean difference of a log-prob between rollout and update under bf16 autocast, in nats, with the kit's models
# of enlarged weights. Measured on a CPU: at most 0.016 and 0.0020 (LoRA, all in bf16), 0.008 and 0.0013 (full fine-tune).
LARGEST_GAP, MEAN_GAP = 0.05, 0.005


def policy_on(
    device: str, arch: str, *, needs_reference: bool = False, trainable: bool = True, **options: Any
) -> Policy:
    config = ModelConfig(
        **{"path": tiny_folder(arch), "device": device, "dtype": "bf16", **options}
    )
    return load_policy(config, needs_reference=needs_reference, trainable=trainable)


def prompts(p: Policy) -> list[Any]:
    return [
        p.encoder(sample_with(list(pictures), question, n), TASK)
        for n, (pictures, question) in enumerate(
            [
                ((picture((112, 84)),), "Where is the red circle?"),
                ((), "yes"),
                ((picture((56, 56)), picture((37, 211))), "?"),
            ]
        )
    ]


def some_batch(p: Policy) -> Batch:
    return pack([PackItem(prompt, ((5, 6, 7), (80,), (9, 11))) for prompt in prompts(p)])


def sampled_and_trained(p: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the same tokens as rollout reports them and as the update computes them (with a graph)."""
    asked = [Request(prompt, 6, (7, n)) for n, prompt in enumerate(prompts(p))]
    results = PrefillOnceEngine(p).generate(asked, SamplingSettings(max_new_tokens=12))
    batch = pack(
        [
            PackItem(r.prompt, tuple(c.token_ids for c in group))
            for r, group in zip(asked, results, strict=True)
        ]
    )
    return torch.tensor([x for group in results for c in group for x in c.logprobs]), p.logp(
        batch
    ).logp_N.cpu()


def gradients(p: Policy, batch: Batch) -> dict[str, torch.Tensor]:
    p.logp(batch).logp_N.sum().backward()
    return {n: q.grad.cpu() for n, q in p.trainable() if q.grad is not None}


def randomize_adapter(p: Policy) -> None:
    """A fresh adapter has B = 0, and so no gradient in A: give it values."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in p.trainable():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape))


# ---- gradient checkpointing


@pytest.mark.parametrize("lora", [LoraSettings(r=4), None], ids=["lora", "full"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_checkpointing_differentiates_no_frozen_vision_tower(
    arch: str, lora: LoraSettings | None
) -> None:
    found, outputs = [], []
    for checkpointing in (False, True):
        p = fresh_policy(
            arch, lora=lora, freeze=["vision", "projector"], gradient_checkpointing=checkpointing
        )
        if lora:
            randomize_adapter(p)
        p.base.model.visual.register_forward_hook(
            lambda m, i, out: outputs.append(out.pooler_output)
        )
        p.base.model.visual.patch_embed.register_forward_hook(lambda m, i, out: outputs.append(out))
        found.append(gradients(p, some_batch(p)))
    tensors = [t for out in outputs for t in (out if isinstance(out, list | tuple) else [out])]
    assert len(tensors) >= 4 and not any(t.requires_grad for t in tensors)
    plain, checkpointed = found
    assert plain.keys() == checkpointed.keys() and len(plain) > 4
    assert sum(bool(g.any()) for g in plain.values()) > 0.9 * len(plain)
    assert all(torch.equal(plain[n], checkpointed[n]) for n in plain)


# ---- logits


@pytest.mark.parametrize("lora", [None, LoraSettings(r=4)], ids=["full", "lora"])
@pytest.mark.parametrize("device", ANY_DEVICE)
def test_logits_are_computed_in_fp32_under_autocast(device: str, lora: LoraSettings | None) -> None:
    p = policy_on(device, "qwen2_5_vl", lora=lora)
    torch.manual_seed(0)
    hidden = 3 * torch.randn(40, 64, device=p.device).to(p.base.lm_head.weight.dtype)
    weight = p.base.lm_head.weight.detach()
    if device == "cuda":  # tensor cores multiply what is rounded to bf16, and add up in fp32
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
    exact = hidden.double() @ weight.double().T
    with p.autocast():
        logits = p.logits(hidden)
        rounded = p.base.lm_head(hidden)
    assert logits.dtype == torch.float32
    assert rounded.dtype == torch.bfloat16 and (rounded - exact).abs().max() > 1e-2, (
        "this is what autocast would do"
    )
    assert (logits - exact).abs().max() < 1e-5 * exact.abs().max()


def test_logprobs_of_both_passes_are_of_fp32_logits() -> None:
    """Log-probs of bf16 logits differ by whole steps of bf16; the ones of a fp32 product do not."""
    p = policy_on("cpu", "qwen2_5_vl")
    seen: list[torch.Tensor] = []
    adjust = p.adjust
    p.adjust = lambda logits, temperature: (
        seen.append(logits.detach()),
        adjust(logits, temperature),
    )[1]  # type: ignore
    sampled_and_trained(p)
    assert len(seen) > 12
    assert all(t.dtype == torch.float32 and not torch.equal(t, t.bfloat16().float()) for t in seen)


def test_fp32_logits_are_the_output_layers_own_bit_for_bit() -> None:
    p = fresh_policy()
    hidden = torch.randn(7, 64)
    assert torch.equal(p.logits(hidden), p.base.lm_head(hidden))


def test_an_adapter_on_the_output_layer_counts() -> None:
    from peft import LoraConfig, get_peft_model

    p = policy_on("cpu", "qwen2_5_vl", trainable=False)
    hidden = torch.randn(7, 64)
    before = p.logits(hidden)
    p.model = get_peft_model(
        p.base, LoraConfig(r=4, target_modules=["lm_head"], ensure_weight_tying=True), "head"
    )
    weight = p.base.lm_head.lora_B["head"].weight
    with torch.no_grad():
        weight.fill_(0.5)
    with p.autocast():
        after = p.logits(hidden)
    assert after.dtype == torch.float32 and (after - before).abs().max() > 0.1


# ---- what is frozen


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_storing_frozen_weights_changes_no_bit_under_autocast(arch: str) -> None:
    """The KL reference, a model only evaluated and a frozen tower give what their fp32 originals give under autocast."""
    p = policy_on("cpu", arch, needs_reference=True)
    evaluated = policy_on("cpu", arch, trainable=False)
    frozen_tower = policy_on("cpu", arch, freeze=["vision", "projector"])
    batch = some_batch(p)
    with torch.no_grad():
        expected = p.logp(batch).logp_N
        with p.reference() as reference:
            assert torch.equal(reference.logp(batch).logp_N, expected)
        assert torch.equal(evaluated.logp(batch).logp_N, expected)
        assert torch.equal(frozen_tower.logp(batch).logp_N, expected)
    assert {q.dtype for q in p.model.parameters()} == {torch.float32}, "nothing is frozen here"
    models: list[Any] = [p.reference_model, evaluated.model, frozen_tower.base.model.visual]
    for model in models:
        layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv3d)]
        head = getattr(model, "lm_head", None)
        assert len(layers) > 5
        assert {m.weight.dtype for m in layers if m is not head} == {torch.bfloat16}
        assert head is None or head.weight.dtype == torch.float32


def test_store_frozen_leaves_what_is_trained_and_says_how_much_it_stored() -> None:
    model = fresh_policy(freeze=["language"]).model
    assert not any(q.requires_grad for q in model.model.language_model.parameters())
    linear = [m for m in model.model.language_model.modules() if isinstance(m, torch.nn.Linear)]
    assert store_frozen(model, torch.bfloat16) == sum(
        q.numel() for m in linear for q in m.parameters()
    )
    assert {q.dtype for m in linear for q in m.parameters()} == {torch.bfloat16}
    assert {q.dtype for q in model.parameters() if q.requires_grad} == {torch.float32}
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_checkpoint_with_frozen_bf16_parts_continues_bit_for_bit(
    arch: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    options: dict[str, Any] = {"device": "cpu", "dtype": "bf16", "freeze": ["vision"]}
    p = policy_on("cpu", arch, freeze=["vision"])
    with torch.no_grad():
        for _, parameter in p.trainable():
            parameter.mul_(1.001)
    p.save(tmp_path)
    again = load_policy(ModelConfig(path=tiny_folder(arch), **options), weights=tmp_path)
    ours, theirs = dict(p.model.named_parameters()), dict(again.model.named_parameters())
    assert ours.keys() == theirs.keys() and {q.dtype for q in ours.values()} == {
        torch.float32,
        torch.bfloat16,
    }
    for name, parameter in ours.items():
        assert parameter.dtype == theirs[name].dtype and torch.equal(parameter, theirs[name]), name
    assert torch.equal(p.logp(some_batch(p)).logp_N, again.logp(some_batch(p)).logp_N)
    assert {t.dtype for _, t in weights_of(tmp_path)} == {torch.float32, torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    plain = dict(AutoModelForImageTextToText.from_pretrained(tmp_path).named_parameters())
    assert all(torch.equal(plain[n], q.float()) for n, q in ours.items()), (
        "transformers rounds no trained weight"
    )


# ---- bf16 from end to end


@pytest.mark.parametrize("device", ANY_DEVICE)
@pytest.mark.parametrize(
    "freeze",
    [[], ["vision", "projector"], ["vision"], ["projector"], ["language"]],
    ids=lambda f: "+".join(f) or "nothing",
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_full_fine_tune_in_bf16(arch: str, freeze: list[str], device: str) -> None:
    p = policy_on(device, arch, freeze=freeze)
    sampled, trained = sampled_and_trained(p)
    gap = (sampled - trained.detach()).abs()
    assert trained.dtype == torch.float32 and len(gap) > 60
    assert gap.max() < LARGEST_GAP and gap.mean() < MEAN_GAP, (float(gap.max()), float(gap.mean()))
    trained.sum().backward()
    for name, parameter in p.model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or (
            parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all()
        )


@pytest.mark.parametrize("device", ANY_DEVICE)
@pytest.mark.parametrize("vision", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_lora_in_bf16_with_checkpointing(arch: str, vision: bool, device: str) -> None:
    modules = ["q_proj", "v_proj", "qkv", "gate_proj"]
    found = []
    for checkpointing in (False, True):
        p = policy_on(
            device,
            arch,
            lora=LoraSettings(r=4, vision=vision, target_modules=modules),
            gradient_checkpointing=checkpointing,
        )
        randomize_adapter(p)
        found.append(gradients(p, some_batch(p)))
    sampled, trained = sampled_and_trained(p)
    gap = (sampled - trained.detach()).abs()
    assert gap.max() < LARGEST_GAP and gap.mean() < MEAN_GAP, (float(gap.max()), float(gap.mean()))
    assert {q.dtype for _, q in p.trainable()} == {torch.float32}
    assert found[0].keys() == found[1].keys() == {n for n, _ in p.trainable()}
    for name, gradient in found[0].items():
        assert (
            gradient.isfinite().all()
            and (found[1][name] - gradient).norm() <= 0.02 * gradient.norm()
        ), name


def test_a_gpu_that_only_emulates_bf16_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says yes to bf16 on such a GPU (compute capability below 8.0) unless emulation is left out of the question."""
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    gpu = torch.device("cuda")
    assert loading.device_and_precision(ModelConfig(), gpu)[1:] == (torch.float32, None)
    with pytest.raises(ConfigError, match=r"model\.dtype bf16 needs"):
        loading.device_and_precision(ModelConfig(dtype="bf16"), gpu)
