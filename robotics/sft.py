"""Warm start of a VLA policy by behaviour cloning: the chunk a demonstrator chose, as action tokens.

    mmrl sft configs/maniskill.yaml

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

from mmrl.errors import ConfigError
from mmrl.optim import build_optimizer, take_step
from mmrl.policy.pack import within_budget
from robotics.config import EmbodiedConfig
from robotics.contract import Observation
from robotics.vla import VLAPolicy

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
        self.index = [(e, p) for e, episode in enumerate(episodes) for p in range(len(episode.steps))]
        if not self.index:
            raise ConfigError("expected demonstrations to learn from, found none: record or name some (demos.path)")

    def __len__(self) -> int:
        return len(self.index)

    def example(self, number: int) -> tuple[Observation, np.ndarray, np.ndarray]:
        """The observation, target bins (N,), and which of them are real actions (N,)."""
        e, p = self.index[number]
        episode, codec = self.episodes[e], self.vla.codec
        bins, valid = codec.targets(episode.actions, int(episode.steps[p]))
        pictures = {name: frames[p] for name, frames in episode.images.items()}
        return Observation(pictures, episode.proprio[p], episode.instruction), bins.reshape(-1), np.repeat(valid, codec.dim)


def clone(vla: VLAPolicy, demos: DemoSteps, config: EmbodiedConfig,
          on_step: Callable[[int, dict[str, Any]], None] | None = None) -> dict[str, float]:
    """config.demos.steps optimizer steps of demos.batch examples; on_step(step, metrics) after each.

    Raises NonFiniteError when the loss stops being finite.
    """
    parameters = vla.trainable()
    settings = config.demos.optim
    optimizer = build_optimizer(parameters, settings)
    rng = np.random.default_rng((config.seed, 31))
    order: list[int] = []
    metrics: dict[str, float] = {}
    for step in range(1, config.demos.steps + 1):
        began = time.perf_counter()
        while len(order) < config.demos.batch:
            order += rng.permutation(len(demos)).tolist()
        chosen, order = order[:config.demos.batch], order[config.demos.batch:]
        examples = [demos.example(i) for i in chosen]
        prompts = [vla.prompt(o) for o, _, _ in examples]
        optimizer.zero_grad(set_to_none=True)
        loss, tokens, right = 0.0, 0, 0.0
        for part in within_budget([p.length + vla.tokens_per_decision for p in prompts], config.train.token_budget):
            mask = torch.tensor(np.concatenate([examples[i][2] for i in part]), device=vla.core.device)
            logp_N = vla.evaluate([prompts[i] for i in part], [examples[i][1].tolist() for i in part]).logp_N[mask]
            (-logp_N.sum()).backward()
            loss, tokens = loss - float(logp_N.detach().sum()), tokens + logp_N.numel()
            right += float((logp_N.detach() > np.log(0.5)).sum())
        failure = f"step {step}: the gradient norm is {{}}; lower demos.optim.lr (now {settings.lr})"
        norm, _ = take_step(optimizer, parameters, settings, tokens, step - 1, config.demos.steps, failure.format)
        metrics = {"loss": loss / tokens, "sure": right / tokens, "grad_norm": norm, "tokens": tokens,
                   "seconds": time.perf_counter() - began}
        if on_step is not None:
            on_step(step, metrics)
    return metrics
