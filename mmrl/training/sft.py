"""Supervised warm start: the task's own gold answers, with the same encoder, packing and optimizer as RL.

    mmrl sft configs/tiny_warmstart.yaml
    torchrun --nproc_per_node 8 -m mmrl.cli.main sft configs/grounding.yaml engine.train=fsdp2

RL sharpens what a policy already does now and then; this teaches it to do so. Loss: mean negative log-likelihood of the
answer tokens (the end-of-turn token included).

Several processes make the steps of one: each takes its share of a step's samples, on any engine of mmrl.distributed.engines; the
loss is summed and divided once by the tokens of all, and failures are counted over all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, TypeVar

import torch

from mmrl.config import OptimConfig, RunConfig
from mmrl.data.sources import PromptStream, load_sources, prompt_stream, stop_at_broken_media
from mmrl.distributed.engines import (
    TrainEngine,
    accelerator_options,
    build_actor,
    build_train_engine,
)
from mmrl.distributed.engines.lockstep import agree
from mmrl.distributed.world import World
from mmrl.errors import DataError, MediaError
from mmrl.files import check_text
from mmrl.policy.pack import PackItem, idle_item, micro_batches, pack
from mmrl.policy.policy import Policy
from mmrl.task import Task
from mmrl.training.optim import build_optimizer
from mmrl.types import RewardContext, Sample
from mmrl.workers.prefetch import prefetching

__all__ = ["context_for", "gold_ids", "run_sft", "supervised", "supervised_step"]

C = TypeVar("C", bound=RunConfig)
Part = TypeVar("Part")

_MAX_FAILURE_SHARE = 0.2  # of a step's samples


def context_for(
    policy: Policy, sample: Sample, task: Task, step: int = 1, total_steps: int = 1
) -> RewardContext:
    """The reward context of a sample's prompt before anything was generated."""
    prompt = policy.encoder(sample, task)
    return RewardContext(
        step, total_steps, policy.template.frame, prompt.images, videos=prompt.videos
    )


def gold_ids(policy: Policy, sample: Sample, task: Task) -> tuple[int, ...]:
    """Token ids of the gold answer, ended by the model's end-of-turn token."""
    text = task.gold(sample, context_for(policy, sample, task))
    check_text(text, f"sample {sample.id}: its gold answer")
    ids = policy.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    return (*ids, policy.eos_ids[0])


def supervised(config: C, optim: OptimConfig | None = None) -> C:
    """The configuration as the training engines are to see it: with this optimizer, and without rollouts to overlap with."""
    schedule = config.schedule.model_copy(update={"kind": "serial"})
    return config.model_copy(update={"schedule": schedule, "optim": optim or config.optim})


def run_sft(
    policy: Policy,
    config: RunConfig,
    on_step: Callable[[int, dict[str, Any]], None] | None = None,
    world: World | None = None,
) -> dict[str, Any]:
    """Train for config.train.steps steps of prompts_per_step samples; the main process calls on_step(step, metrics) after each.

    A sample whose media cannot be read, or whose prompt is too long, is left out of the loss: metrics["failed"] counts those
    of the step, metrics["failures"] lists all so far (step, source, id, reason). data.workers prepare the media of this step
    and the next meanwhile. Metrics are those of all processes together, "seconds" apart, and returned in each.

    `world`: the processes of the run, made with mmrl.distributed.engines.accelerator_options(config); those of the launcher by
    default. Where engine.train shards the weights (fsdp2, deepspeed_zero3), `policy` holds whole trained ones afterwards in the
    main process alone, in host memory: ready to be saved.

    Raises ConfigError for an engine that does not go with the number of processes, DataError when more than one sample and more
    than 20 % of a step fail, or all of it, and NonFiniteError when the loss stops being finite: all processes together.
    """
    config = supervised(config)
    world = world or World(policy.device, **accelerator_options(config))
    with world.raise_on_all_ranks():
        stream = prompt_stream(
            config,
            load_sources(
                config.data.train,
                on_error=config.data.on_error,
                orientation=config.data.image.orientation,
            ),
        )
        kept = build_actor(config, world, policy, samples=False)
    world.barrier()
    engine = build_train_engine(
        config, world, policy, build_optimizer(policy.trainable(), config.optim)
    )
    metrics: dict[str, Any] = {}
    failures: list[dict[str, Any]] = []
    encoder, steps = policy.encoder, config.train.steps
    with ExitStack() as stack:
        with world.raise_on_all_ranks():
            [encoder.ahead] = stack.enter_context(prefetching(config.data, [encoder.visuals]))
            coming = _share(stream, config, world)
        for step in range(1, steps + 1):
            began = time.perf_counter()
            with world.raise_on_all_ranks():
                drawn, coming = coming, _share(stream, config, world) if step < steps else []
                if encoder.ahead is not None:
                    encoder.ahead.forget()
                    encoder.ahead.expect([sample for sample, _ in (*drawn, *coming)])
                items, mine = _encoded(policy, drawn, step, world.rank, config.data.on_error)
            failed = [row for _, _, row in sorted(world.gather(mine), key=lambda found: found[:2])]
            failures += failed
            _check_failures(failed, config.train.prompts_per_step)
            metrics = {
                **_update(policy, engine, items, config, step, world),
                "failed": len(failed),
                "failures": failures,
                "seconds": time.perf_counter() - began,
            }
            if on_step is not None and world.is_main:
                with world.raise_on_all_ranks():
                    on_step(step, metrics)
    encoder.visuals.release()
    world.barrier()
    if kept is not policy:
        engine.fill(kept)
        policy.take_over(kept)
    return metrics


def _share(stream: PromptStream, config: RunConfig, world: World) -> list[tuple[Sample, Task]]:
    """This process's samples of the next step: every world.size-th of all."""
    return [stream.draw() for _ in range(config.train.prompts_per_step)][world.rank :: world.size]


def _encoded(
    policy: Policy, drawn: Sequence[tuple[Sample, Task]], step: int, rank: int, on_error: str
) -> tuple[list[PackItem], list[tuple[int, int, dict[str, Any]]]]:
    """Prompts with their gold answers, whose media nothing can take away until the next step; and a record of each of those
    without, behind its place in `drawn` and the rank, by which all processes' records come in the order of the draws."""
    items: list[PackItem] = []
    failed: list[tuple[int, int, dict[str, Any]]] = []
    policy.encoder.visuals.release()
    for place, (sample, task) in enumerate(drawn):
        try:
            prompt = policy.encoder(sample, task)
            policy.encoder.visuals.lease(prompt.visuals, policy.tower())
            answer = gold_ids(policy, sample, task)
        except (MediaError, DataError) as error:
            stop_at_broken_media(error, sample, on_error)
            reason = f"{type(error).__name__}: {error}"
            failed.append(
                (
                    place,
                    rank,
                    {"step": step, "source": sample.source, "id": sample.id, "reason": reason},
                )
            )
            continue
        items.append(PackItem(prompt, (answer,)))
    return items, failed


def _check_failures(failed: Sequence[Mapping[str, Any]], drawn: int) -> None:
    if len(failed) == drawn or len(failed) > max(1, _MAX_FAILURE_SHARE * drawn):
        raise DataError(
            f"step {failed[0]['step']}: expected samples that can be read, found {len(failed)} of {drawn} that cannot "
            f"(limit {_MAX_FAILURE_SHARE:.0%}); mend or remove them; first: {failed[0]['source']}/{failed[0]['id']}: "
            f"{failed[0]['reason']}"
        )


def _update(
    policy: Policy,
    engine: TrainEngine,
    items: Sequence[PackItem],
    config: RunConfig,
    step: int,
    world: World,
) -> dict[str, float]:
    """One optimizer step; its loss per token, gradient norm and number of tokens, of all processes."""

    def terms(indices: Sequence[int]) -> tuple[torch.Tensor, list[float]]:
        batch = pack([items[i] for i in indices] or [idle_item(policy.eos_ids[0])])
        (logp_N,) = engine.run(lambda: (policy.logp(batch).logp_N,))
        return (
            (-logp_N.sum(), [-float(logp_N.detach().sum())])
            if indices
            else (logp_N.sum() * 0.0, [0.0])
        )

    plan = list(micro_batches(items, config.train.token_budget))
    tokens = sum(len(item.completions[0]) for item in items)
    (loss,), count, norm = supervised_step(
        engine,
        world,
        plan,
        [],
        terms,
        1,
        tokens,
        (step - 1, config.train.steps),
        lambda norm: (
            f"step {step}: the gradient norm is {norm}; lower optim.lr (now {config.optim.lr})"
        ),
    )
    return {"loss": loss / count, "grad_norm": norm, "tokens": count}


def supervised_step(
    engine: TrainEngine,
    world: World,
    plan: Sequence[Part],
    idle: Part,
    terms: Callable[[Part], tuple[torch.Tensor, list[float]]],
    numbers: int,
    tokens: float,
    update: tuple[int, int],
    failure: Callable[[float], str],
) -> tuple[list[float], int, float]:
    """One optimizer step of all processes, each of which has a `plan` of micro-batches with so many `tokens` in the loss.

    `terms(part)`: the summed loss of a micro-batch and `numbers` sums to report; `idle` is run where another process has more of
    them and must add nothing to either. `update`: number of the optimizer step (from 0) and of how many. Returns the sums, the
    tokens and the gradient norm, of all processes. Collective; raises NonFiniteError with the text of `failure(norm)`.
    """
    count, total = agree(world, len(plan), float(tokens))
    parts = [*plan, *[idle] * (count - len(plan))] if engine.lockstep else plan
    engine.begin(total)
    sums = [0.0] * numbers
    # where lockstep, the others are about to run collectives of the engine's own
    with nullcontext() if engine.lockstep else world.raise_on_all_ranks():
        for number, part in enumerate(parts, 1):
            loss, found = terms(part)
            engine.backward(loss, last=number == len(parts))
            sums = [a + b for a, b in zip(sums, found, strict=True)]
    # also where the error of another process is heard of, before gradients are reduced
    sums = world.sum(sums)
    norm, _ = engine.step(total, *update, failure)
    return sums, int(total), norm
