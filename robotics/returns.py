"""What an embodied episode earns and which groups teach, as the configuration says (mmrl.algorithms.trajectories)."""
from __future__ import annotations

from mmrl.algorithms import AdvantageScale, GroupBounds, GroupOutcome, ReturnSettings, group_outcome
from mmrl.types import RolloutGroup
from robotics.config import EmbodiedConfig

__all__ = ["outcome_of", "return_settings"]


def return_settings(config: EmbodiedConfig) -> ReturnSettings:
    """The rl section's rewards."""
    return ReturnSettings(kind=config.rl.reward, coef=config.rl.reward_coef, success=config.rl.success)


def outcome_of(config: EmbodiedConfig, group: RolloutGroup) -> GroupOutcome:
    """Returns, GRPO advantages and whether the group is worth training on."""
    scale: AdvantageScale = "none" if config.algorithm.advantage_scale == "none" else "std"
    return group_outcome(group.rollouts, return_settings(config), GroupBounds(low=config.rl.filter_low, high=config.rl.filter_high),
                         scale)
