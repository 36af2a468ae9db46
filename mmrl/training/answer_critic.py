"""PPO on answers to prompts: a critic reads the language model's hidden states, generalised advantages from its values.

    advantages, critic = build_advantages(config, world)  # for a Learner; algorithm.advantage gae, else no critic

Level token: V(t) is what the critic expects before token t is written, read from the hidden state that predicts it; the reward
comes with the last token, where an environment rewards turns with the last of each turn. Level turn: one value of each turn, read
from its prompt's last token. Old values are those of the weights before the update (`compute_values`), by the packing that training
uses: answers of a prompt share it there as well. What follows the last step of a rollout is algorithm.critic.bootstrap: nothing
(TRL, verl), or the value read from its last token's hidden state.

Advantages are normalised over all tokens (level turn: turns) in the loss of the step, as verl's masked_whiten and TRL's
whiten do.

Legend: B rollouts, T steps (tokens or turns) of the longest, R = T + 1 rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mmrl.algorithms import GAESettings, gae_advantages, trainable, trajectory_in_loss
from mmrl.algorithms.group_rewards import training_rewards, usable
from mmrl.config import RunConfig
from mmrl.distributed.world import World
from mmrl.policy.loading import add_value_head
from mmrl.policy.policy import Policy
from mmrl.training.critic import CriticLoss, normalised
from mmrl.training.group_advantages import GroupAdvantages
from mmrl.training.sequences import RolloutTargets, TrainingSample, TrainingTurn
from mmrl.types import Rollout, RolloutGroup, Sample, StopReason

__all__ = ["AnswerAdvantages", "add_critic", "build_advantages", "compute_values"]

Key = tuple[int, int, int]


def add_critic(policy: Policy, config: RunConfig, *folders: Any) -> Policy:
    """The policy with the value head that `config` asks for, if it does; it goes on with the one saved in the first of `folders`
    that holds one."""
    c = config.algorithm.critic
    if config.algorithm.advantage == "gae":
        add_value_head(
            policy,
            hidden=c.hidden,
            tokens=c.level == "token",
            seed=config.seed,
            folders=[f for f in folders if f],
        )
    return policy


def build_advantages(
    config: RunConfig, world: World, headline_of: Callable[[Sample], str]
) -> tuple[Any, CriticLoss | None]:
    """What rollouts are to learn, and the value loss where there is a critic; of a run on prompts."""
    if config.algorithm.advantage != "gae":
        return GroupAdvantages(config, world, headline_of), None
    return AnswerAdvantages(config, world), CriticLoss.of(
        config.algorithm.critic, computes_values=True
    )


def compute_values(
    groups: Sequence[RolloutGroup],
    drafts: Sequence[TrainingSample],
    plan: Sequence[Sequence[TrainingTurn]],
    predict: Callable[[Sequence[TrainingTurn]], tuple[Sequence[Sequence[float]], Sequence[float]]],
) -> list[RolloutGroup]:
    """The groups with the critic's values in their turns, and in their rollouts what it expects after the last one.

    `drafts`: the samples that will be trained on, `plan` their micro-batches, some of them idle (without turns). `predict` gives
    the values of each turn of a micro-batch, and what each is worth when it has been written.
    """
    values: dict[int, tuple[float, ...]] = {}
    after: dict[int, float] = {}
    for turns in plan:
        for turn, before, last in zip(turns, *predict(turns), strict=True):
            values[id(turn)], after[id(turn)] = tuple(before), last
    found: dict[Key, dict[int, Rollout]] = defaultdict(dict)
    rollouts = {g.key: g.rollouts for g in groups}
    for sample in drafts:
        key, number = sample.place
        rollout = rollouts[key][number]
        valued = tuple(
            replace(t, values=values[id(s)])
            for t, s in zip(rollout.turns, sample.turns, strict=True)
        )
        found[key][number] = replace(rollout, turns=valued, final_value=after[id(sample.turns[-1])])
    return [
        replace(g, rollouts=tuple(found[g.key].get(i, r) for i, r in enumerate(g.rollouts)))
        for g in groups
    ]


@dataclass(frozen=True)
class _Column:
    """A rollout that is trained on: its values step by step, what it earned in which step, and how it ended."""

    values: tuple[float, ...]
    rewards: Mapping[int, float]
    truncated: bool
    final_value: float

    @property
    def earned(self) -> float:
        """Undiscounted."""
        return math.fsum(self.rewards.values())

    def paid_at_the_end(self, reward: float) -> _Column:
        """The same with another reward."""
        return replace(self, rewards={len(self.values) - 1: reward})


class AnswerAdvantages:
    """An AdvantageEstimator: generalised advantages from the values in the groups' turns (see `compute_values`).

    `world`: the processes that have the other groups of the step, over all of which advantages are normalised.
    """

    needs_whole_step = "algorithm.advantage gae (its advantages are normalised over the step)"

    def __init__(self, config: RunConfig, world: World) -> None:
        c = config.algorithm.critic
        self.config, self.world = config, world
        self.gae = GAESettings(gamma=c.gamma, lam=c.gae_lambda, bootstrap=c.bootstrap)
        self._metrics: dict[str, float] = {}

    def targets(self, groups: Sequence[RolloutGroup]) -> Mapping[Key, list[RolloutTargets | None]]:
        """See AdvantageEstimator. Collective. A rollout whose reward failed, or that is left out of the loss, learns nothing and
        counts in no mean. Raises NonFiniteError for a reward or value that is not finite."""
        columns: dict[tuple[Key, int], _Column] = {}
        for group in groups:
            rewards = training_rewards(group, self.config)
            for number, (rollout, good) in enumerate(
                zip(group.rollouts, usable(group), strict=True)
            ):
                if (
                    good
                    and trainable(rollout)
                    and trajectory_in_loss(
                        rollout,
                        self.config.algorithm.overlong,
                        self.config.algorithm.mask_rollouts,
                    )
                ):
                    columns[group.key, number] = _column(rollout, rewards[number])
        if self.config.reward.shuffle:
            columns = self._shuffled(columns)
        advantages, returns = self._gae(list(columns.values()))
        learned = {place: (advantages[:, b], returns[:, b]) for b, place in enumerate(columns)}
        return {
            g.key: [
                _targets(r, learned.get((g.key, i))) if trainable(r) else None
                for i, r in enumerate(g.rollouts)
            ]
            for g in groups
        }

    def _shuffled(
        self, columns: Mapping[tuple[Key, int], _Column]
    ) -> dict[tuple[Key, int], _Column]:
        """The control experiment: the step's rewards permuted over all of its answers, of all processes. Collective."""
        told = sorted(
            self.world.gather([(place, column.earned) for place, column in columns.items()])
        )
        order = np.random.default_rng(
            (self.config.seed, 17, *(told[0][0][0] if told else ()))
        ).permutation(len(told))
        given = {place: told[i][1] for (place, _), i in zip(told, order, strict=True)}
        return {place: column.paid_at_the_end(given[place]) for place, column in columns.items()}

    def _gae(self, columns: Sequence[_Column]) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised advantages and value targets, (T, B) float64."""
        T, B = max((len(c.values) for c in columns), default=0), len(columns)
        rewards_TB, final_TB = (torch.zeros(T, B, dtype=torch.float64) for _ in range(2))
        values_RB = torch.zeros(T + 1, B, dtype=torch.float64)
        valid_TB, terminated_TB, truncated_TB = (
            torch.zeros(T, B, dtype=torch.bool) for _ in range(3)
        )
        for b, column in enumerate(columns):
            last = len(column.values) - 1
            values_RB[: last + 1, b] = torch.tensor(column.values, dtype=torch.float64)
            valid_TB[: last + 1, b] = True
            final_TB[last, b] = column.final_value
            for step, reward in column.rewards.items():
                rewards_TB[step, b] = reward
            truncated_TB[last, b], terminated_TB[last, b] = column.truncated, not column.truncated
        found = gae_advantages(
            self.gae,
            rewards_TB,
            values_RB,
            terminated_TB,
            truncated_TB,
            final_values_TB=final_TB,
            valid_TB=valid_TB,
        )
        advantages_TB, self._metrics = normalised(found, values_RB[:-1], self.world)
        return advantages_TB, found.returns

    def metrics(self) -> dict[str, float]:
        """Explained variance, mean target and mean value of the last step."""
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        """Nothing: each step is judged by itself."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""


def _column(rollout: Rollout, reward: float) -> _Column:
    """What an environment pays for a turn is earned in it, the rest of `reward` (a score, a bonus, a penalty) at the end."""
    last, steps = rollout.turns[-1], np.cumsum([len(t.values) for t in rollout.turns]) - 1
    rewards = {int(step): turn.reward for step, turn in zip(steps, rollout.turns, strict=True)}
    rewards[int(steps[-1])] += reward - math.fsum(rewards.values())
    cut = not last.terminated and (last.truncated or last.stop is StopReason.LENGTH)
    return _Column(
        tuple(v for t in rollout.turns for v in t.values), rewards, cut, rollout.final_value
    )


def _targets(rollout: Rollout, learned: tuple[torch.Tensor, torch.Tensor] | None) -> RolloutTargets:
    """Of each turn its part of the rollout's steps; without `learned` no advantage, and the values it has."""
    values = [t.values for t in rollout.turns]
    if learned is None:
        return RolloutTargets([(0.0,) * len(v) for v in values], values, values)
    counts = [len(v) for v in values]
    advantages, returns = (
        [piece.tolist() for piece in column[: sum(counts)].split(counts)] for column in learned
    )
    return RolloutTargets(advantages, values, returns)
