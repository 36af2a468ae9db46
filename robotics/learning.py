"""What a robot's episodes earn, which groups of them teach, and the learner of a run on simulators, as the configuration says."""

from __future__ import annotations

import math
from dataclasses import replace

from mmrl.algorithms import GAESettings, ReturnSettings, return_parts, step_rewards, trainable
from mmrl.algorithms.group_rewards import passes_filter, score_of
from mmrl.distributed.engines import TrainEngine
from mmrl.distributed.world import World
from mmrl.errors import ConfigError
from mmrl.robotics.acting import ActingPolicy
from mmrl.robotics.config import EmbodiedConfig
from mmrl.training.critic import CriticAdvantages, CriticLoss
from mmrl.training.group_advantages import GroupAdvantages
from mmrl.training.learner import AdvantageEstimator, Learner
from mmrl.types import Rollout, RolloutGroup, Score

__all__ = [
    "critic_advantages",
    "most_tokens",
    "return_settings",
    "robot_learner",
    "scored",
    "teaches",
]


def robot_learner(
    config: EmbodiedConfig,
    policy: ActingPolicy,
    engine: TrainEngine,
    world: World,
    actor: ActingPolicy | None = None,
) -> Learner:
    """What trains `policy` on groups of episodes: with algorithm.advantage gae by a critic, else by the episodes' scores. `actor`
    has the weights before a step, whole: a copy where the engine shards them, else (None) the policy itself."""
    critic = None
    _check_entropies(config, policy)
    earns = return_settings(config)
    advantages: AdvantageEstimator = GroupAdvantages(
        config,
        world,
        lambda sample: f"success_{config.rl.success}",
        lambda episode: [math.fsum(map(float, row)) for row in step_rewards(episode, earns)],
    )
    if config.algorithm.advantage == "gae":
        critic = CriticLoss.of(config.algorithm.critic)
        advantages = critic_advantages(config, actor or policy, world)
    return Learner(
        config,
        policy,
        engine,
        world,
        advantages,
        critic=critic,
        shuffles=True,
        packs_groups=False,
        longest=most_tokens(config, policy),
    )


def _check_entropies(config: EmbodiedConfig, policy: ActingPolicy) -> None:
    """Raises ConfigError where entropies tell no decision from another."""
    if config.algorithm.turns.keep_entropy == 1 or config.vla.flow.noise != "sde":
        return
    from mmrl.robotics.flow_policy import FlowPolicy

    if isinstance(policy, FlowPolicy):
        raise ConfigError(
            "algorithm.turns.keep_entropy chooses decisions by entropy, which with vla.flow.noise sde is that of the noise of "
            "their steps, whatever the policy saw; set algorithm.turns.keep_entropy: 1.0, or vla.flow.noise: learned"
        )


def most_tokens(config: EmbodiedConfig, policy: ActingPolicy) -> int:
    """Tokens of an episode that is never over before env.horizon."""
    return (
        math.ceil(config.env.horizon / (policy.codec.chunk * policy.codec.repeat))
        * policy.tokens_per_decision
    )


def critic_advantages(
    config: EmbodiedConfig, actor: ActingPolicy, world: World
) -> CriticAdvantages:
    """PPO's judge: one decision is one step of GAE, or with algorithm.critic.level action each of its action steps is."""
    c = config.algorithm.critic
    gae = GAESettings(
        gamma=c.gamma,
        lam=c.gae_lambda,
        bootstrap=c.bootstrap,
        level="action" if c.level == "action" else "chunk",
    )
    return CriticAdvantages(return_settings(config), gae, actor, world, config.train.token_budget)


def return_settings(config: EmbodiedConfig) -> ReturnSettings:
    """The rl section's rewards."""
    return ReturnSettings(
        kind=config.rl.reward,
        coef=config.rl.reward_coef,
        success=config.rl.success,
        horizon=config.env.horizon,
    )


def teaches(config: EmbodiedConfig, group: RolloutGroup) -> bool | None:
    """Whether a group of scored episodes has signal by algorithm.filter; None where fewer than two of them finished.

    Its keys are accuracy and reward (the whole), success (0 or 1), and the kinds of rl.reward."""
    done = [r for r in group.rollouts if trainable(r)]
    if len(done) < 2:
        return None
    key, settings, scores = (
        config.algorithm.filter.key,
        return_settings(config),
        [score_of(r) for r in done],
    )
    values = None
    if key == "success":
        values = [float(settings.succeeded(r)) for r in done]
    elif key not in ("accuracy", "reward"):
        values = [s.parts[key] for s in scores]
    return passes_filter(scores, values, config)


def scored(episode: Rollout, settings: ReturnSettings) -> Rollout:
    """The episode with the score that training compares: its return, kind by kind. One that could not be finished has none."""
    if not trainable(episode):
        return episode
    weights = {str(kind): weight for kind, weight in settings.weights.items()}
    return replace(
        episode,
        score=Score.combine(
            return_parts(episode, settings),
            weights,
            parsed=True,
            metrics={**episode.info, "steps": float(episode.steps)},
        ),
    )
