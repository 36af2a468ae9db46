"""What a robot's episodes earn, which groups of them teach, and the learner of a run on simulators, as the configuration says."""
from __future__ import annotations

from dataclasses import replace

from mmrl.algorithms import (
    AdvantageScale,
    GAESettings,
    GroupBounds,
    GroupOutcome,
    PPOSettings,
    ReturnSettings,
    group_outcome,
    trainable,
    trajectory_return,
)
from mmrl.credit import Credit
from mmrl.engines import TrainEngine
from mmrl.training.critic import CriticAdvantages, CriticLoss
from mmrl.training.learner import Learner
from mmrl.types import Rollout, RolloutGroup, Score
from mmrl.world import World
from robotics.config import EmbodiedConfig, learner_config
from robotics.vla import VLAPolicy

__all__ = ["critic_advantages", "outcome_of", "return_settings", "robot_learner", "scored"]


def robot_learner(config: EmbodiedConfig, policy: VLAPolicy, engine: TrainEngine, world: World,
                  actor: VLAPolicy | None = None) -> Learner:
    """What trains `policy` on groups of episodes: with rl.kind ppo by a critic, else by the episodes' returns. `actor` has the
    weights before a step, whole: a copy where the engine shards them, else (None) the policy itself."""
    own, r = learner_config(config), config.rl
    if r.kind != "ppo":
        return Learner(own, policy, engine, world, Credit(own, world), shuffles=True, packs_groups=False)
    critic = CriticLoss(PPOSettings(value_clip=r.value_clip, huber_delta=r.huber_delta, value_coef=r.value_coef,
                                    critic_warmup_steps=r.critic_warmup))
    return Learner(own, policy, engine, world, critic_advantages(config, actor or policy, world), critic=critic, shuffles=True,
                   packs_groups=False)


def critic_advantages(config: EmbodiedConfig, actor: VLAPolicy, world: World) -> CriticAdvantages:
    """PPO's judge: one decision is one step of GAE, or with rl.level action each of its action steps is."""
    r = config.rl
    gae = GAESettings(gamma=r.gamma, lam=r.gae_lambda, bootstrap=r.bootstrap, level=r.level)
    return CriticAdvantages(return_settings(config), gae, actor, world, config.train.token_budget)


def return_settings(config: EmbodiedConfig) -> ReturnSettings:
    """The rl section's rewards."""
    return ReturnSettings(kind=config.rl.reward, coef=config.rl.reward_coef, success=config.rl.success)


def outcome_of(config: EmbodiedConfig, group: RolloutGroup) -> GroupOutcome:
    """Returns, GRPO advantages and whether the group is worth training on."""
    scale: AdvantageScale = "none" if config.algorithm.advantage_scale == "none" else "std"
    return group_outcome(group.rollouts, return_settings(config), GroupBounds(low=config.rl.filter_low, high=config.rl.filter_high),
                         scale)


def scored(episode: Rollout, settings: ReturnSettings) -> Rollout:
    """The episode with the score that training compares: its return. One that could not be finished has none."""
    if not trainable(episode):
        return episode
    return replace(episode, score=Score.combine({settings.kind: trajectory_return(episode, settings)}, {settings.kind: 1.0},
                                                parsed=True, metrics={**episode.info, "steps": float(episode.steps)}))
