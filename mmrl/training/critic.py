"""PPO: a critic judges each turn, or each action step or token of it, and learns from what became of them (GAE, value loss).

    estimator = CriticAdvantages(rewards, gae, actor, world, token_budget)
    targets = estimator.targets(groups)              # advantages, old values and value targets of every turn that may train

The value loss is that of answers and of episodes; the advantages here are those of episodes, of answers see
mmrl.training.answer_critic.

Legend: B rollouts, T turns of a rollout, V values of a turn: 1, or with level action one per action step; M values of a
micro-batch, turn after turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmrl.algorithms import (
    Advantages,
    GAESettings,
    Grid,
    Moments,
    PPOSettings,
    ReturnSettings,
    ValueStats,
    chunk_gae,
    critic_warming_up,
    make_grid,
    normalise,
    trainable,
    value_loss,
)
from mmrl.config import CriticConfig
from mmrl.distributed.world import World
from mmrl.policy.pack import within_budget
from mmrl.training.sequences import RolloutTargets, TrainingTurn
from mmrl.types import Rollout, RolloutGroup

__all__ = ["CriticAdvantages", "CriticLoss", "gae_of_grid", "normalised"]


def gae_of_grid(settings: GAESettings, grid: Grid) -> tuple[Advantages, torch.Tensor]:
    """Advantages of a grid's turns (T, B, V), and the values (T, B, V) they are relative to."""
    single = settings.level == "chunk"
    values = grid.values_RBV[..., 0] if single else grid.values_RBV
    found = chunk_gae(
        settings,
        grid.rewards_TBC,
        values,
        grid.terminated_TBC,
        grid.truncated_TBC,
        final_values_TB=grid.final_values_TB,
        valid_TBC=grid.valid_TBC,
    )
    if single:
        found = Advantages(
            found.advantages[..., None], found.returns[..., None], found.valid[..., None]
        )
    return found, grid.values_RBV[:-1]


class CriticAdvantages:
    """An AdvantageEstimator: generalised advantages from the values that the critic gave during the rollout.

    `actor` values final observations; `world`: the processes that have the other groups of the step, over all of which advantages
    are normalised and metrics taken.
    """

    needs_whole_step = "algorithm.advantage gae (normalised over the step)"

    def __init__(
        self, rewards: ReturnSettings, gae: GAESettings, actor: Any, world: World, token_budget: int
    ) -> None:
        self.rewards, self.gae, self.actor, self.world, self.token_budget = (
            rewards,
            gae,
            actor,
            world,
            token_budget,
        )
        self._metrics: dict[str, float] = {}

    def targets(
        self, groups: Sequence[RolloutGroup]
    ) -> Mapping[tuple[int, int, int], list[RolloutTargets | None]]:
        """See AdvantageEstimator. Collective. Raises NonFiniteError for a reward or value that is not finite."""
        rollouts = [r for g in groups for r in g.rollouts if trainable(r)]
        grid = make_grid(
            rollouts,
            self.rewards,
            self._final_values(rollouts),
            self.actor.codec.chunk if self.gae.level == "action" else None,
        )
        found, values_TBV = gae_of_grid(self.gae, grid)
        advantages_TBV, self._metrics = normalised(found, values_TBV, self.world)
        columns = iter(range(len(rollouts)))
        assigned: dict[tuple[int, int, int], list[RolloutTargets | None]] = {}
        tables = (advantages_TBV, values_TBV, found.returns)
        for group in groups:
            assigned[group.key] = [
                self._targets(r, next(columns), *tables) if trainable(r) else None
                for r in group.rollouts
            ]
        return assigned

    def metrics(self) -> dict[str, float]:
        """Explained variance, mean target and mean value of the last step."""
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        """Nothing: what it knows of a step it learns from that step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""

    def _final_values(self, rollouts: Sequence[Rollout]) -> list[float]:
        """The critic's value of the last observation where one is kept, else 0."""
        waiting = [i for i, r in enumerate(rollouts) if r.final is not None]
        finals = [r.final for r in rollouts if r.final is not None]
        parts = within_budget(
            [p.length + self.actor.tokens_per_decision for p in finals], self.token_budget
        )
        values = [v for part in parts for v in self.actor.values([finals[i] for i in part])]
        known = dict(zip(waiting, values, strict=True))
        return [known.get(i, 0.0) for i in range(len(rollouts))]

    @staticmethod
    def _targets(rollout: Rollout, column: int, *tables: torch.Tensor) -> RolloutTargets:
        advantages, values, returns = (
            table[: len(rollout.turns), column].tolist() for table in tables
        )
        return RolloutTargets(advantages, values, returns)


def normalised(
    found: Advantages, values: torch.Tensor, world: World
) -> tuple[torch.Tensor, dict[str, float]]:
    """The advantages normalised over the valid ones of all processes, and the step's metrics: explained variance, mean value target
    and mean old value. `values`: the old ones, of the shape of `found`'s tables. Collective."""
    targets, old = found.returns[found.valid].double(), values[found.valid].double()
    moments, target, error, value = _moments(
        world, found.advantages[found.valid], targets, targets - old, old
    )
    spread = _variance(target)
    metrics = {
        "train/critic/explained_variance": 1 - _variance(error) / spread if spread > 0 else 0.0,
        "train/critic/return": target.mean,
        "train/critic/value": value.mean,
    }
    return normalise(found.advantages, found.valid, moments), metrics


def _moments(world: World, *columns: torch.Tensor) -> list[Moments]:
    """Of each column (N,), over all processes."""
    mine = [
        x
        for column in columns
        for x in Moments.of(column, torch.ones_like(column, dtype=torch.bool)).to_list()
    ]
    sums = world.sum(mine)
    return [Moments.from_list(sums[i : i + 3]) for i in range(0, len(sums), 3)]


def _variance(moments: Moments) -> float:
    """Biased; 0 without spread."""
    return moments.std**2 * (moments.count - 1) / moments.count if moments.count else 0.0


@dataclass(frozen=True)
class ValueTerm:
    """The critic's part of a micro-batch's loss."""

    loss: torch.Tensor
    stats: ValueStats


class CriticLoss:
    """The value loss of a run. `computes_values`: rollouts bring no values along, training computes the old ones before it begins.
    `detached`: the value loss trains the value head alone, not what it reads."""

    def __init__(
        self, settings: PPOSettings, *, computes_values: bool = False, detached: bool = False
    ) -> None:
        self.settings, self.computes_values, self.detached = settings, computes_values, detached

    @classmethod
    def of(cls, critic: CriticConfig, *, computes_values: bool = False) -> CriticLoss:
        """That of the section algorithm.critic."""
        settings = PPOSettings(
            value_clip=critic.value_clip,
            huber_delta=critic.huber_delta,
            value_coef=critic.value_coef,
            critic_warmup_steps=critic.warmup,
        )
        return cls(settings, computes_values=computes_values, detached=critic.detach)

    def warming_up(self, step: int) -> bool:
        """Whether training step `step` (from 1) trains the critic alone."""
        return critic_warming_up(self.settings, step - 1)

    def loss(self, turns: Sequence[TrainingTurn], values_M: torch.Tensor) -> ValueTerm:
        """The loss over the steps that were executed; a value weighs as the tokens it judges do in the policy's loss."""

        def column(values: Sequence[Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.as_tensor(
                np.concatenate([np.asarray(v) for v in values]), dtype=dtype, device=values_M.device
            )

        # (V,) of each turn
        tokens = [(t.mask_N & t.in_loss).reshape(len(t.values_V), -1).sum(1) for t in turns]
        found = value_loss(
            self.settings,
            values_M,
            column([t.values_V for t in turns]),
            column([t.returns_V for t in turns]),
            column([n > 0 for n in tokens], torch.bool),
            column([t.scale * n for t, n in zip(turns, tokens, strict=True)]),
        )
        return ValueTerm(self.settings.value_coef * found.loss, found.stats)
