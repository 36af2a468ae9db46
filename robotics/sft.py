"""Warm start of a VLA policy by behaviour cloning: the chunk a demonstrator chose, as action tokens.

    mmrl sft configs/maniskill.yaml
    torchrun --nproc_per_node 8 -m mmrl.cli.main sft configs/maniskill.yaml engine.train=fsdp2

Every control step of a demonstration is a training example: the picture there, and the chunk that follows as the target. Steps
beyond the end of an episode are not learned. Loss: mean negative log-likelihood of the action tokens.

Legend: T control steps of an episode, A action dimensions, S proprioception values, N tokens of a decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmrl.distributed.engines import (
    TrainEngine,
    accelerator_options,
    build_actor,
    build_train_engine,
)
from mmrl.distributed.world import World
from mmrl.errors import ConfigError
from mmrl.policy.encode import Prompt
from mmrl.policy.pack import within_budget
from mmrl.robotics.config import EmbodiedConfig
from mmrl.robotics.contract import Observation
from mmrl.robotics.vla import VLAPolicy
from mmrl.training.optim import build_optimizer
from mmrl.training.sft import supervised, supervised_step

__all__ = ["DemoEpisode", "DemoSteps", "clone"]


@dataclass(frozen=True)
class DemoEpisode:
    """One demonstration in memory: pictures uint8 (T, H, W, 3) by camera, proprio (T, S), the demonstrator's actions (T, A).

    `steps` (P,): the control steps that have a picture, for recordings that did not render all; images and proprio then have
    P rows.
    """

    instruction: str
    images: Mapping[str, np.ndarray]
    proprio: np.ndarray
    actions: np.ndarray
    steps: np.ndarray


class DemoSteps:
    """The examples of several demonstrations, drawn in a seeded order that never repeats within an epoch."""

    def __init__(self, episodes: Sequence[DemoEpisode], vla: VLAPolicy) -> None:
        self.episodes, self.vla = episodes, vla
        self.index = [
            (e, p) for e, episode in enumerate(episodes) for p in range(len(episode.steps))
        ]
        if not self.index:
            raise ConfigError(
                "expected demonstrations to learn from, found none: record or name some (demos.path)"
            )

    def __len__(self) -> int:
        return len(self.index)

    def example(self, number: int) -> tuple[Observation, np.ndarray, np.ndarray]:
        """The observation, target bins (N,), and which of them are real actions (N,)."""
        e, p = self.index[number]
        episode, codec = self.episodes[e], self.vla.codec
        bins, valid = codec.targets(episode.actions, int(episode.steps[p]))
        pictures = {name: frames[p] for name, frames in episode.images.items()}
        return (
            Observation(pictures, episode.proprio[p], episode.instruction),
            bins.reshape(-1),
            np.repeat(valid, codec.dim),
        )


@dataclass(frozen=True)
class _Example:
    """An encoded control step: its prompt, the target bins (N,), and which of them are real actions (N,)."""

    prompt: Prompt
    tokens: list[int]
    mask_N: np.ndarray


def clone(
    vla: VLAPolicy,
    demos: DemoSteps,
    config: EmbodiedConfig,
    on_step: Callable[[int, dict[str, Any]], None] | None = None,
    world: World | None = None,
) -> dict[str, float]:
    """config.demos.steps optimizer steps of demos.batch examples; the main process calls on_step(step, metrics) after each.

    `world`: the processes of the run, each of which takes its share of a batch; those of the launcher by default. Metrics are those
    of all together, "seconds" apart. Where engine.train shards the weights, `vla` holds whole trained ones afterwards in the main
    process alone, in host memory.

    Raises ConfigError for an engine that does not go with the number of processes, and NonFiniteError when the loss stops being
    finite: all processes together.
    """
    config = supervised(config, config.demos.optim)
    world = world or World(vla.device, **accelerator_options(config))
    with world.raise_on_all_ranks():
        kept = build_actor(config, world, vla, samples=False)
    world.barrier()
    engine = build_train_engine(config, world, vla, build_optimizer(vla.trainable(), config.optim))
    rng = np.random.default_rng((config.seed, 31))
    order: list[int] = []
    metrics: dict[str, float] = {}
    for step in range(1, config.demos.steps + 1):
        began = time.perf_counter()
        while len(order) < config.demos.batch:
            order += rng.permutation(len(demos)).tolist()
        chosen, order = order[: config.demos.batch], order[config.demos.batch :]
        with world.raise_on_all_ranks():
            examples = _encoded(vla, demos, chosen[world.rank :: world.size])
        metrics = _update(vla, engine, examples, config, step, world) | {
            "seconds": time.perf_counter() - began
        }
        if on_step is not None and world.is_main:
            with world.raise_on_all_ranks():
                on_step(step, metrics)
    world.barrier()
    if kept is not vla:
        engine.fill(kept)
        vla.core.take_over(kept.core)
        vla.value_head = kept.value_head
    return metrics


def _encoded(vla: VLAPolicy, demos: DemoSteps, numbers: Sequence[int]) -> list[_Example]:
    found = [demos.example(number) for number in numbers]
    return [
        _Example(vla.prompt(observation), bins_N.tolist(), mask_N)
        for observation, bins_N, mask_N in found
    ]


def _update(
    vla: VLAPolicy,
    engine: TrainEngine,
    examples: Sequence[_Example],
    config: EmbodiedConfig,
    step: int,
    world: World,
) -> dict[str, float]:
    """One optimizer step on this process's examples; its metrics, of all processes."""

    def terms(part: Sequence[_Example]) -> tuple[torch.Tensor, list[float]]:
        logp_N, values_M = _evaluated(vla, engine, part)
        logp_N = logp_N[torch.tensor(np.concatenate([e.mask_N for e in part]), device=vla.device)]
        unused = values_M.sum() * 0.0 if engine.lockstep else 0.0  # sharded, a critic takes part
        return (
            -logp_N.sum() + unused,
            [-float(logp_N.detach().sum()), float((logp_N.detach() > np.log(0.5)).sum())],
        )

    plan = [
        [examples[i] for i in part]
        for part in within_budget(
            [e.prompt.length + vla.tokens_per_decision for e in examples], config.train.token_budget
        )
    ]
    bins = vla.tokens_per_decision
    idle = [_Example(vla.idle_turn()[0], [0] * bins, np.zeros(bins, bool))]
    failure = (
        f"step {step}: the gradient norm is {{}}; lower demos.optim.lr (now {config.optim.lr})"
    )
    (loss, right), tokens, norm = supervised_step(
        engine,
        world,
        plan,
        idle,
        terms,
        2,
        sum(e.mask_N.sum() for e in examples),
        (step - 1, config.demos.steps),
        failure.format,
    )
    return {"loss": loss / tokens, "sure": right / tokens, "grad_norm": norm, "tokens": tokens}


def _evaluated(
    vla: VLAPolicy, engine: TrainEngine, examples: Sequence[_Example]
) -> tuple[torch.Tensor, ...]:
    def forward() -> tuple[torch.Tensor, ...]:
        found = vla.evaluate([e.prompt for e in examples], [e.tokens for e in examples])
        return found.logp_N, found.values_M

    return engine.run(forward)
