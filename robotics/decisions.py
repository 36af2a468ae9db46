"""Decisions of finished episodes, as the loss takes them.

Legend: N tokens of a decision, V values and advantages of it (see robotics.update).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmrl.algorithms import length_weights, token_mask
from mmrl.policy.encode import Prompt
from mmrl.policy.pack import within_budget
from mmrl.types import Rollout
from robotics.config import EmbodiedConfig

__all__ = ["Column", "Item", "Place", "Trajectory", "plan_of", "trajectory_of"]

Column = Sequence[Sequence[float]]  # V numbers for each decision of an episode
Place = tuple[tuple[int, int, int], int]  # key of a group, member


@dataclass(frozen=True)
class Item:
    """A decision ready for the loss; mask (N,) marks the tokens whose action was executed, at least in part."""

    prompt: Prompt
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    mask: np.ndarray
    advantage_N: np.ndarray
    weight: float
    values_V: tuple[float, ...] = ()
    targets_V: tuple[float, ...] = ()
    stale: bool = False
    proximal: tuple[float, ...] | None = None  # log-probs before the update, of stale decisions where it has several passes


@dataclass(frozen=True)
class Trajectory:
    """The decisions of an episode, and its share of the denominator."""

    place: Place
    items: tuple[Item, ...]
    denominator: float


def trajectory_of(config: EmbodiedConfig, episode: Rollout, place: Place, dim: int, step: int, advantages: Column,
                  values: Column | None = None, returns: Column | None = None) -> Trajectory:
    """An episode for the update of `step`; `dim` action dimensions."""
    masks = [np.array(token_mask(d.valid, len(d.token_ids), dim)) for d in episode.turns]
    tokens = int(sum(m.sum() for m in masks))
    norm = length_weights([tokens], "trajectory_mean" if config.rl.length_norm == "trajectory" else "token_mean")
    weight, blank = float(norm.weights_B[0]), [()] * len(masks)
    items = [Item(d.prompt, d.token_ids, d.logps, mask, np.repeat(np.asarray(a, np.float32), len(mask) // len(a)), weight,
                  tuple(v), tuple(r), stale=d.policy_version < step - 1)
             for d, mask, a, v, r in zip(episode.turns, masks, advantages, values or blank, returns or blank, strict=True)]
    return Trajectory(place, tuple(items), norm.denominator)


def plan_of(trajectories: Sequence[Trajectory], token_budget: int) -> list[list[Item]]:
    """The decisions of each micro-batch, which are within the token budget."""
    items = [i for t in trajectories for i in t.items]
    lengths = [i.prompt.length + len(i.tokens) for i in items]
    return [[items[i] for i in part] for part in within_budget(lengths, token_budget)]
