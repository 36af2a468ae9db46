"""PPO's judgement of decisions: generalised advantages from the values the critic gave during the rollout.

Legend: B episodes, T decisions of an episode, V values of a decision: 1, or with rl.level action one per action step.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mmrl.algorithms import Advantages, GAESettings, Grid, Moments, PPOSettings, chunk_gae, make_grid, normalise, trainable
from mmrl.policy.pack import within_budget
from mmrl.types import RolloutGroup
from mmrl.world import World
from robotics.config import EmbodiedConfig
from robotics.returns import return_settings
from robotics.vla import VLAPolicy

__all__ = ["Critique", "critique", "gae_settings", "judge", "ppo_settings"]


Table = dict[tuple[tuple[int, int, int], int], list[list[float]]]


@dataclass(frozen=True)
class Critique:
    """By (group key, member): advantages, old values and targets, lists of V numbers for each decision; 0 where not executed."""

    advantages: Table
    values: Table
    returns: Table
    metrics: dict[str, float] = field(default_factory=dict)


def gae_settings(config: EmbodiedConfig) -> GAESettings:
    """The rl section as GAE wants it: one decision is one step, or with rl.level action each of its action steps is."""
    return GAESettings(gamma=config.rl.gamma, lam=config.rl.gae_lambda, bootstrap=config.rl.bootstrap, level=config.rl.level)


def ppo_settings(config: EmbodiedConfig) -> PPOSettings:
    """The rl section as PPO's losses want it."""
    r = config.rl
    return PPOSettings(value_clip=r.value_clip, huber_delta=r.huber_delta, value_coef=r.value_coef, entropy_coef=r.entropy_coef,
                       critic_warmup_steps=r.critic_warmup)


def judge(settings: GAESettings, grid: Grid) -> tuple[Advantages, torch.Tensor]:
    """Advantages of a grid's decisions (T, B, V), and the values (T, B, V) they were judged by."""
    single = settings.level == "chunk"
    values = grid.values_RBV[..., 0] if single else grid.values_RBV
    found = chunk_gae(settings, grid.rewards_TBC, values, grid.terminated_TBC, grid.truncated_TBC,
                      final_values_TB=grid.final_values_TB, valid_TBC=grid.valid_TBC)
    if single:
        found = Advantages(found.advantages[..., None], found.returns[..., None], found.valid[..., None])
    return found, grid.values_RBV[:-1]


def critique(config: EmbodiedConfig, vla: VLAPolicy, groups: Sequence[RolloutGroup], world: World | None = None) -> Critique:
    """Judge the decisions of all episodes that may train. Raises NonFiniteError for a reward or value that is not finite.

    `world`: the processes that have the other groups of the step; collective. Advantages are normalised, and metrics are, over all.
    """
    episodes = [((g.key, member), e) for g in groups for member, e in enumerate(g.rollouts) if trainable(e)]
    settings = gae_settings(config)
    waiting = [i for i, (_, e) in enumerate(episodes) if e.final is not None]
    finals = [e.final for _, e in episodes if e.final is not None]
    parts = within_budget([p.length + vla.tokens_per_decision for p in finals], config.train.token_budget)
    values = [v for part in parts for v in vla.values([finals[i] for i in part])]
    final_values = dict(zip(waiting, values, strict=True))
    grid = make_grid([e for _, e in episodes], return_settings(config), [final_values.get(i, 0.0) for i in range(len(episodes))],
                     vla.codec.chunk if settings.level == "action" else None)
    found, values_TBV = judge(settings, grid)
    targets, old = found.returns[found.valid].double(), values_TBV[found.valid].double()
    moments, target, error, value = _moments(world, found.advantages[found.valid], targets, targets - old, old)
    advantages_TBV = normalise(found.advantages, found.valid, moments)
    columns: dict[str, Table] = {"advantages": {}, "values": {}, "returns": {}}
    for b, (place, episode) in enumerate(episodes):
        length = len(episode.turns)
        for name, table in (("advantages", advantages_TBV), ("values", values_TBV), ("returns", found.returns)):
            columns[name][place] = table[:length, b].tolist()
    spread = _variance(target)
    return Critique(columns["advantages"], columns["values"], columns["returns"],
                    {"critic/explained_variance": 1 - _variance(error) / spread if spread > 0 else 0.0,
                     "critic/return": target.mean, "critic/value": value.mean})


def _moments(world: World | None, *columns: torch.Tensor) -> list[Moments]:
    """Of each column (N,), over all processes."""
    mine = [x for column in columns for x in Moments.of(column, torch.ones_like(column, dtype=torch.bool)).to_list()]
    sums = mine if world is None else world.sum(mine)
    return [Moments.from_list(sums[i:i + 3]) for i in range(0, len(sums), 3)]


def _variance(moments: Moments) -> float:
    """Biased; 0 without spread."""
    return moments.std ** 2 * (moments.count - 1) / moments.count if moments.count else 0.0
