"""PPO's judgement of decisions: generalised advantages from the values the critic gave during the rollout.

Legend: B episodes, D decisions of all of them.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mmrl.algorithms import GAESettings, PPOSettings, chunk_gae, make_grid, normalise, trainable
from robotics.config import EmbodiedConfig
from robotics.returns import return_settings
from robotics.rollout import EpisodeGroup
from robotics.sft import parts_of
from robotics.vla import VLAPolicy

__all__ = ["Critique", "critique", "gae_settings", "ppo_settings"]


@dataclass(frozen=True)
class Critique:
    """By (group key, member): advantage, old value and target of each decision."""

    advantages: dict[tuple[tuple[int, int, int], int], list[float]]
    values: dict[tuple[tuple[int, int, int], int], list[float]]
    returns: dict[tuple[tuple[int, int, int], int], list[float]]
    metrics: dict[str, float] = field(default_factory=dict)


def gae_settings(config: EmbodiedConfig) -> GAESettings:
    """The rl section as GAE wants it: one decision is one step."""
    return GAESettings(gamma=config.rl.gamma, lam=config.rl.gae_lambda, bootstrap=config.rl.bootstrap, level="chunk")


def ppo_settings(config: EmbodiedConfig) -> PPOSettings:
    """The rl section as PPO's losses want it."""
    r = config.rl
    return PPOSettings(value_clip=r.value_clip, huber_delta=r.huber_delta, value_coef=r.value_coef, entropy_coef=r.entropy_coef,
                       critic_warmup_steps=r.critic_warmup)


def critique(config: EmbodiedConfig, vla: VLAPolicy, groups: Sequence[EpisodeGroup]) -> Critique:
    """Judge the decisions of all episodes that may train. Raises NonFiniteError for a reward or value that is not finite."""
    episodes = [(g.request.key, e) for g in groups for e in g.episodes if trainable(e)]
    settings = gae_settings(config)
    waiting = [i for i, (_, e) in enumerate(episodes) if e.final is not None]
    finals = [e.final for _, e in episodes if e.final is not None]
    parts = parts_of([p.length + vla.tokens_per_decision for p in finals], config.train.token_budget)
    values = [v for part in parts for v in vla.values([finals[i] for i in part])]
    final_values = dict(zip(waiting, values, strict=True))
    grid = make_grid([e for _, e in episodes], return_settings(config), [final_values.get(i, 0.0) for i in range(len(episodes))])
    found = chunk_gae(settings, grid.rewards_TBC, grid.values_RB, grid.terminated_TBC, grid.truncated_TBC,
                      final_values_TB=grid.final_values_TB, valid_TBC=grid.valid_TBC)
    advantages_TB = normalise(found.advantages, found.valid)
    columns: dict[str, dict[tuple[tuple[int, int, int], int], list[float]]] = {"advantages": {}, "values": {}, "returns": {}}
    for b, (key, episode) in enumerate(episodes):
        length = len(episode.decisions)
        for name, table in (("advantages", advantages_TB), ("values", grid.values_RB), ("returns", found.returns)):
            columns[name][key, episode.member] = table[:length, b].tolist()
    targets, old = found.returns[found.valid].double(), grid.values_RB[:-1][found.valid].double()
    spread = float(targets.var(correction=0)) if targets.numel() else 0.0
    explained = 1 - float((targets - old).var(correction=0)) / spread if spread > 0 else 0.0
    mean = float(targets.mean()) if targets.numel() else 0.0
    return Critique(columns["advantages"], columns["values"], columns["returns"],
                    {"critic/explained_variance": explained, "critic/return": mean,
                     "critic/value": float(torch.as_tensor(old).mean()) if old.numel() else 0.0})
