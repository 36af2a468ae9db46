"""Rollouts with the LoRA adapter merged (rollout.merge_adapter), beside peft's own merge and transformers' generate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from mmrl.config import LoraSettings, RunConfig
from mmrl.distributed.engines.local import LocalEngine
from mmrl.distributed.world import World
from mmrl.errors import ConfigError
from mmrl.policy.pack import PackItem, pack
from mmrl.registry import resolve_task
from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
from mmrl.rollout.merged import MergedAdapter
from mmrl.rollout.weights import SyncPlan
from mmrl.training.optim import build_optimizer
from tests.kits.engine_kit import ALBUM, fresh_policy, picture, sample_with

NEW = 8


def disturb(p: Any, seed: int) -> None:
    """Another version of the adapter, written in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in p.trainable():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def adapted(**options: Any) -> Any:
    p = fresh_policy(**{"lora": LoraSettings(r=4), **options})
    p.eos_ids = (-1,)
    disturb(p, 0)
    return p


ALSO_EXPERTS = [{}, {"arch": "qwen3_vl_moe", "lora": LoraSettings(r=4, experts=True)}]


@pytest.mark.parametrize("options", ALSO_EXPERTS, ids=["layers", "experts"])
def test_what_samples_is_pefts_merge_of_the_adapter_as_it_is_now(options: dict[str, Any]) -> None:
    p = adapted(**options)
    before = {name: t.clone() for name, t in p.base.named_parameters() if ".lora_" not in name}
    prompt = p.encoder(sample_with([]), resolve_task(ALBUM)())
    engine = PrefillOnceEngine(p, merge=True)
    for seed in (1, 2):
        disturb(p, seed)
        p.publish()
        theirs = copy.deepcopy(p.model).merge_and_unload()
        asked = [Request(prompt, 1, greedy=True)]
        [[turn]] = engine.generate(asked, SamplingSettings(max_new_tokens=NEW))
        ids = prompt.ids_P[None]
        expected = theirs.generate(
            input_ids=ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False
        )
        assert turn.token_ids == tuple(expected[0, ids.shape[1] :].tolist())
        assert turn.policy_version == p.version
        ours, peft = (m.state_dict() for m in (MergedAdapter(p).now().model, theirs))
        assert ours.keys() == peft.keys() and all(torch.equal(ours[n], peft[n]) for n in ours)
    for name, tensor in before.items():
        assert torch.equal(dict(p.base.named_parameters())[name], tensor), name


def test_in_bf16_it_is_what_vllm_would_get_and_close_to_what_trains() -> None:
    p = adapted(dtype="bf16")
    config = RunConfig()
    optimizer = build_optimizer(p.trainable(), config.optim)
    source = LocalEngine(config.optim, World(torch.device("cpu")), p, optimizer)
    sent = dict(SyncPlan(p).weights(source, everything=True))
    merged = MergedAdapter(p).now()
    linear = {
        n: m.weight for n, m in merged.model.named_modules() if isinstance(m, torch.nn.Linear)
    }
    changed = [name for name in sent if ".layers." in name and name.endswith("_proj.weight")]
    for name in changed:
        assert torch.equal(linear[name.removesuffix(".weight")], sent[name]), name
    assert changed and all(
        linear[n.removesuffix(".weight")].dtype == torch.bfloat16 for n in changed
    )

    prompt = p.encoder(sample_with([picture((56, 56))]), resolve_task(ALBUM)())
    gaps = {}
    for merge in (False, True):
        [turns] = PrefillOnceEngine(p, merge=merge).generate(
            [Request(prompt, 8, (0,))], SamplingSettings(max_new_tokens=NEW)
        )
        rows = tuple(turn.token_ids for turn in turns)
        with torch.no_grad():
            trained = p.logp(pack([PackItem(prompt, rows)])).logp_N
        sampled = torch.cat([torch.as_tensor(turn.logprobs) for turn in turns])
        gaps[merge] = float((sampled - trained).abs().mean())
    print("mean gap of log-probs between sampler and trainer, bf16:", gaps)
    assert gaps[True] < 0.05, gaps


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "found model.lora null"),
        ({"model": {"lora": {"quantize": "nf4"}}}, "quantize nf4"),
        ({"model": {"lora": {}}, "engine": {"rollout": "vllm"}}, "is merged anyway"),
        (
            {"model": {"lora": {}}, "engine": {"workers": "ray", "ray": {"rollout_actors": 1}}},
            "rollout_actors 1",
        ),
    ],
)
def test_where_it_cannot_act_it_is_refused(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunConfig.model_validate({**tree, "rollout": {"merge_adapter": True}})


def test_without_an_adapter_there_is_nothing_to_merge() -> None:
    with pytest.raises(ConfigError, match="found none in the policy"):
        PrefillOnceEngine(fresh_policy(), merge=True)
