"""From `engine.rollout` to a rollout engine.

engine = build_rollout_engine(config, policy, world, sources)
engine.publish(training)                    # before the first request and after every update
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Literal

import torch

from mmrl.config import RunConfig, rollout_engine, with_choice
from mmrl.data.sources import LoadedSource
from mmrl.distributed.world import World
from mmrl.errors import ConfigError
from mmrl.policy.loading import device_and_precision
from mmrl.policy.policy import Policy
from mmrl.rollout.engine import PrefillOnceEngine, RolloutEngine, SamplingSettings
from mmrl.rollout.probe import PROBE_TOKENS

__all__ = ["build_rollout_engine", "dtype_of", "max_model_len", "vllm_dtype"]


def max_model_len(config: RunConfig) -> int:
    """Tokens of the longest prompt with its answer, or with the probe's completion and the token that vLLM writes behind it."""
    answer = max(config.rollout.max_new_tokens, PROBE_TOKENS + 1)
    return config.engine.vllm.max_model_len or config.model.max_prompt_tokens + answer


def vllm_dtype(policy: Policy) -> str:
    """The type vLLM computes in: what the trainer's forward does."""
    return str(policy.autocast_dtype or torch.float32).removeprefix("torch.")


def dtype_of(config: RunConfig) -> str:
    """What `vllm_dtype` will be for the policy of `config` on a machine like this one: left to itself vLLM rounds fp32 weights."""
    return str(device_and_precision(config.model, None)[2] or torch.float32).removeprefix("torch.")


def build_rollout_engine(
    config: RunConfig,
    policy: Policy,
    world: World,
    sources: Sequence[LoadedSource] = (),
    actor: Policy | None = None,
) -> RolloutEngine:
    """The engine that samples for `policy`; `actor` is its full replica where it is sharded, `sources` give the probe's prompts.

    Raises ConfigError, MissingExtraError, and RolloutError when a server does not answer.
    """
    actor = actor or policy
    kind: Literal["cuda", "cpu"] = "cuda" if world.device.type == "cuda" else "cpu"
    config = with_choice(config, rollout_engine(config, kind))
    if config.engine.rollout == "own":
        if config.engine.cuda_graphs and kind != "cuda":
            raise ConfigError(
                f"engine.cuda_graphs needs an NVIDIA GPU, found device '{world.device}'; leave it out"
            )
        merge = config.rollout.merge_adapter
        return PrefillOnceEngine(actor, graphs=config.engine.cuda_graphs, merge=merge)
    vllm_engine = importlib.import_module("mmrl.rollout.vllm_engine")
    r, settings = config.rollout, config.engine.vllm
    vllm_engine.check_sampling(
        SamplingSettings(r.temperature, r.top_p, r.top_k, r.max_new_tokens, r.batch_tokens)
    )
    limit = int(policy.base.config.get_text_config().max_position_embeddings)
    longest = min(max_model_len(config), limit)
    if settings.mode == "server":
        where = ("servers", "VLLMServers") if settings.urls[1:] else ("client", "VLLMClient")
        client = getattr(importlib.import_module(f"mmrl.rollout.vllm_{where[0]}"), where[1])
        backend = client(settings, config.model.path, vllm_dtype(policy), longest=longest)
    else:
        module = importlib.import_module("mmrl.rollout.vllm_backend")
        made = module.VLLMSettings(
            config.model.path,
            vllm_dtype(policy),
            longest,
            settings.memory,
            settings.kv_cache_gib,
            settings.sleep,
            config.seed,
            settings.compare_weights,
        )
        if actors := config.engine.ray.rollout_actors:
            backend = importlib.import_module("mmrl.distributed.cluster.vllm").RemoteVLLM(
                made, actors
            )
        else:
            backend = module.VLLMBackend(made)
    return vllm_engine.VLLMEngine(settings, policy, actor, world, backend, sources, config.seed)
