"""A base in 4 bits under an adapter, beside bitsandbytes' own layer and the model that is saved."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import pytest
import torch

from mmrl.config import LoraSettings, ModelConfig, RunConfig
from mmrl.diagnostics.memory import parameter_bytes
from mmrl.diagnostics.shapes import config_of
from mmrl.distributed.engines.local import LocalEngine
from mmrl.distributed.world import World
from mmrl.errors import ConfigError
from mmrl.policy.pack import PackItem, pack
from mmrl.policy.quantized import NF4Linear, whole_weight
from mmrl.registry import resolve_task
from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
from mmrl.rollout.weights import SyncPlan
from mmrl.training.optim import build_optimizer
from tests.kits.engine_kit import ALBUM, fresh_policy, picture, sample_with, tiny_folder

LORA = LoraSettings(r=4, quantize="nf4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradient_are_bitsandbytes_own(dtype: torch.dtype) -> None:
    plain = torch.nn.Linear(256, 320, dtype=dtype)
    theirs = bitsandbytes.nn.Linear4bit(256, 320, compute_dtype=dtype, quant_type="nf4")
    theirs.weight = bitsandbytes.nn.Params4bit(
        plain.weight.detach().clone(), requires_grad=False, quant_type="nf4"
    )
    theirs.bias = plain.bias
    # its path for inference packs the weight anew
    theirs.train().to("cpu")
    ours = NF4Linear(plain, torch.device("cpu"))
    assert ours.weight.numel() == 256 * 320 // 2 and ours.weight.dtype == torch.uint8
    for rows in (1, 7):
        x = torch.randn(rows, 256, dtype=dtype)
        a, b = (x.clone().requires_grad_() for _ in range(2))
        mine, other = ours(a), theirs(b)
        mine.float().square().sum().backward()
        other.float().square().sum().backward()
        assert a.grad is not None and b.grad is not None
        tolerance = (
            {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
        )
        torch.testing.assert_close(mine, other, **tolerance)
        torch.testing.assert_close(a.grad, b.grad, **tolerance)
        # one row is that row among others
        assert rows == 1 or torch.equal(ours(x[:1]), ours(x)[:1])
    apart = (whole_weight(ours) - plain.weight).float().norm() / plain.weight.float().norm()
    assert 0.05 < apart < 0.15, "16 levels"


def trained(**options: Any) -> Any:
    p = fresh_policy(lora=LORA, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in p.trainable():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return p


def test_what_samples_is_what_trains() -> None:
    p = trained()
    prompt = p.encoder(sample_with([picture((56, 56))]), resolve_task(ALBUM)())
    p.eos_ids = (-1,)
    [turns] = PrefillOnceEngine(p).generate(
        [Request(prompt, 3, (0,))], SamplingSettings(max_new_tokens=8)
    )
    rows = tuple(tuple(turn.token_ids) for turn in turns)
    sampled = torch.cat([torch.as_tensor(turn.logprobs) for turn in turns])
    logp_N = p.logp(pack([PackItem(prompt, rows)])).logp_N
    torch.testing.assert_close(sampled, logp_N.detach(), rtol=1e-5, atol=1e-5)
    logp_N.sum().backward()
    assert all(q.grad is not None and q.grad.abs().sum() > 0 for _, q in p.trainable())


def test_a_rollout_engine_gets_the_weights_that_are_saved(tmp_path: Any) -> None:
    from transformers import AutoModelForImageTextToText

    p = trained()
    config = RunConfig()
    engine = LocalEngine(
        config.optim,
        World(torch.device("cpu")),
        p,
        build_optimizer(p.trainable(), config.optim),
    )
    sent = dict(SyncPlan(p).weights(engine, everything=True))
    p.save(tmp_path)
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path).state_dict()
    assert not any(".lora_" in name or t.dtype == torch.uint8 for name, t in saved.items())
    for name, tensor in saved.items():
        torch.testing.assert_close(sent[name], tensor, rtol=1e-6, atol=1e-6)


def test_the_estimate_counts_its_bytes() -> None:
    p, folder = fresh_policy(lora=LORA), tiny_folder()
    config = RunConfig(model=ModelConfig(path=folder, device="cpu", lora=LORA))
    layers = [m for m in p.model.modules() if isinstance(m, NF4Linear)]
    scales = sum(s.absmax.nbytes + s.state2.absmax.nbytes for s in (m._state for m in layers))
    held = sum(q.numel() * q.element_size() for q in p.model.parameters()) + scales
    assert parameter_bytes(config, config_of(folder), "cpu").weights == pytest.approx(
        held, rel=0.01
    )


def test_a_mixture_of_experts_is_refused() -> None:
    """Its experts would stay as they are, without a word."""
    folder = tiny_folder("qwen3_vl_moe")
    with pytest.raises(ConfigError, match="experts are stored together"):
        fresh_policy(path=folder, lora=LORA)


def test_sharded_engines_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs engine\.train auto, single or ddp, found fsdp2"):
        RunConfig.model_validate(
            {"model": {"lora": {"quantize": "nf4"}}, "engine": {"train": "fsdp2"}}
        )
