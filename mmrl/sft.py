"""Supervised warm start: the task's own gold answers, with the same encoder, packing and optimizer as RL.

    mmrl sft configs/tiny_warmstart.yaml

RL sharpens what a policy already does now and then; this teaches it to do so. Loss: mean negative log-likelihood of the
answer tokens (the end-of-turn token included).
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mmrl.config import RunConfig
from mmrl.data import PromptStream, load_sources, prompt_stream
from mmrl.errors import ConfigError, DataError, MediaError
from mmrl.optim import build_optimizer, take_step
from mmrl.policy.pack import PackItem, micro_batches, pack
from mmrl.policy.policy import Policy
from mmrl.prefetch import prefetching
from mmrl.task import Task
from mmrl.types import RewardContext, Sample

__all__ = ["context_for", "gold_ids", "run_sft"]

_MAX_FAILURE_SHARE = 0.2  # of a step's samples


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
            on_step: Callable[[int, dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """Train for config.train.steps steps of prompts_per_step samples; calls on_step(step, metrics) after each.

    A sample whose media cannot be read, or whose prompt is too long, is left out of the loss: metrics["failed"] counts those
    of the step, metrics["failures"] lists all so far (step, source, id, reason). data.workers prepare the media of this step
    and the next meanwhile.

    Raises ConfigError for an engine of several processes, DataError when more than one sample and more than 20 % of a step
    fail, or all of it, and NonFiniteError when the loss stops being finite.
    """
    if (found := config.engine.train) not in ("auto", "single"):
        raise ConfigError(f"expected engine.train auto or single for supervised fine-tuning, found {found}: it trains in one "
                          "process; remove engine.train")
    stream = prompt_stream(config, load_sources(config.data.train, on_error=config.data.on_error))
    optimizer = build_optimizer(policy.trainable(), config.optim)
    metrics: dict[str, Any] = {}
    failures: list[dict[str, Any]] = []
    encoder, steps = policy.encoder, config.train.steps
    with prefetching(config.data, [encoder.visuals]) as [encoder.ahead]:
        coming: list[tuple[Sample, Task]] = []
        for step in range(1, steps + 1):
            began = time.perf_counter()
            drawn = coming or _draw(stream, config)
            coming = _draw(stream, config) if step < steps else []
            if encoder.ahead is not None:
                encoder.ahead.forget()
                encoder.ahead.expect([sample for sample, _ in (*drawn, *coming)])
            items, failed = _encoded(policy, drawn, step)
            failures += failed
            _check_failures(failed, len(drawn))
            metrics = {**_update(policy, optimizer, items, config, step), "failed": len(failed), "failures": failures,
                       "seconds": time.perf_counter() - began}
            if on_step is not None:
                on_step(step, metrics)
    encoder.visuals.release()
    return metrics


def _draw(stream: PromptStream, config: RunConfig) -> list[tuple[Sample, Task]]:
    return [stream.draw() for _ in range(config.train.prompts_per_step)]


def _encoded(policy: Policy, drawn: Sequence[tuple[Sample, Task]], step: int) -> tuple[list[PackItem], list[dict[str, Any]]]:
    """Prompts with their gold answers, whose media nothing can take away until the next step; and a record of those without."""
    items: list[PackItem] = []
    failed: list[dict[str, Any]] = []
    policy.encoder.visuals.release()
    for sample, task in drawn:
        try:
            prompt = policy.encoder(sample, task)
            policy.encoder.visuals.lease(prompt.visuals, policy.tower())
        except (MediaError, DataError) as error:
            failed.append({"step": step, "source": sample.source, "id": sample.id, "reason": f"{type(error).__name__}: {error}"})
            continue
        items.append(PackItem(prompt, (gold_ids(policy, sample, task),)))
    return items, failed


def _check_failures(failed: Sequence[Mapping[str, Any]], drawn: int) -> None:
    if len(failed) == drawn or len(failed) > max(1, _MAX_FAILURE_SHARE * drawn):
        raise DataError(f"step {failed[0]['step']}: expected samples that can be read, found {len(failed)} of {drawn} that cannot "
                        f"(limit {_MAX_FAILURE_SHARE:.0%}); mend or remove them; first: {failed[0]['source']}/{failed[0]['id']}: "
                        f"{failed[0]['reason']}")


def _update(policy: Policy, optimizer: torch.optim.Optimizer, items: Sequence[PackItem], config: RunConfig,
            step: int) -> dict[str, float]:
    """One optimizer step; its loss per token, gradient norm and number of tokens."""
    parameters = policy.trainable()
    optimizer.zero_grad(set_to_none=True)
    loss, tokens = 0.0, 0
    for indices in micro_batches(items, config.train.token_budget):
        logp_N = policy.logp(pack([items[i] for i in indices])).logp_N
        (-logp_N.sum()).backward()
        loss -= float(logp_N.detach().sum())
        tokens += logp_N.numel()
    norm, _ = take_step(optimizer, parameters, config.optim, tokens, step - 1, config.train.steps,
                        lambda norm: f"step {step}: the gradient norm is {norm}; lower optim.lr (now {config.optim.lr})")
    return {"loss": loss / tokens, "grad_norm": norm, "tokens": tokens}
