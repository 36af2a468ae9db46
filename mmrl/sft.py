"""Supervised warm start: the task's own gold answers, with the same encoder, packing and optimizer as RL.

    mmrl sft configs/tiny_warmstart.yaml

RL sharpens what a policy already does now and then; this teaches it to do so. Loss: mean negative log-likelihood of the
answer tokens (the end-of-turn token included).
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from mmrl.config import RunConfig
from mmrl.data import load_sources, prompt_stream
from mmrl.errors import NonFiniteError
from mmrl.optim import build_optimizer, learning_rate, reduce_and_scale, set_learning_rate
from mmrl.policy.pack import PackItem, micro_batches, pack
from mmrl.policy.policy import Policy
from mmrl.task import Task
from mmrl.types import RewardContext, Sample

__all__ = ["context_for", "gold_ids", "run_sft"]


def context_for(policy: Policy, sample: Sample, task: Task, step: int = 1, total_steps: int = 1) -> RewardContext:
    """The reward context of a sample's prompt before anything was generated."""
    prompt = policy.encoder(sample, task)
    return RewardContext(step, total_steps, policy.template.frame, prompt.images, videos=prompt.videos)


def gold_ids(policy: Policy, sample: Sample, task: Task) -> tuple[int, ...]:
    """Token ids of the gold answer, ended by the model's end-of-turn token."""
    text = task.gold(sample, context_for(policy, sample, task))
    ids = policy.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    return (*ids, policy.eos_ids[0])


def run_sft(policy: Policy, config: RunConfig,
            on_step: Callable[[int, dict[str, Any]], None] | None = None) -> dict[str, float]:
    """Train for config.train.steps steps of prompts_per_step samples; calls on_step(step, metrics) after each.

    Raises NonFiniteError when the loss stops being finite.
    """
    stream = prompt_stream(config, load_sources(config.data.train, on_error=config.data.on_error))
    parameters = policy.trainable()
    optimizer = build_optimizer(parameters, config.optim)
    metrics: dict[str, float] = {}
    for step in range(config.train.steps):
        began = time.perf_counter()
        drawn = [stream.draw() for _ in range(config.train.prompts_per_step)]
        items = [PackItem(policy.encoder(s, t), (gold_ids(policy, s, t),)) for s, t in drawn]
        optimizer.zero_grad(set_to_none=True)
        loss, tokens = 0.0, 0
        for indices in micro_batches(items, config.train.token_budget):
            logp_N = policy.logp(pack([items[i] for i in indices])).logp_N
            (-logp_N.sum()).backward()
            loss -= float(logp_N.detach().sum())
            tokens += logp_N.numel()
        reduce_and_scale(parameters, tokens)
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in parameters], config.optim.max_grad_norm)
        if not torch.isfinite(norm):
            raise NonFiniteError(f"step {step + 1}: the gradient norm is {float(norm)}; lower optim.lr (now {config.optim.lr})")
        set_learning_rate(optimizer, learning_rate(config.optim, step, config.train.steps))
        optimizer.step()
        metrics = {"loss": loss / tokens, "grad_norm": float(norm), "tokens": tokens, "seconds": time.perf_counter() - began}
        if on_step is not None:
            on_step(step + 1, metrics)
    return metrics
