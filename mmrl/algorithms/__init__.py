"""Algorithms as pure functions: advantages, the policy loss, and what enters the update. The trainer calls them."""
from __future__ import annotations

from mmrl.algorithms.advantages import (
    SIGNAL_TOLERANCE,
    AdvantageScale,
    Baseline,
    centred,
    gdpo_advantages,
    group_advantages,
    group_std,
    has_signal,
    over_rewards_std,
    whiten,
)
from mmrl.algorithms.contrast import ContrastSettings, bonuses, needs_contrast
from mmrl.algorithms.difficulty import Difficulty, difficulty_weights
from mmrl.algorithms.ema import EmaScale, EmaSettings
from mmrl.algorithms.entropy import EntropyBonus, EntropySettings
from mmrl.algorithms.filters import (
    DynamicSampler,
    Overlong,
    OverlongSettings,
    SamplerSettings,
    StepReport,
    Ticket,
    Verdict,
    overlong_penalty,
    soft_overlong_penalty,
    trajectory_in_loss,
)
from mmrl.algorithms.gae import (
    Advantages,
    Bootstrap,
    GAESettings,
    Moments,
    RewardLevel,
    chunk_gae,
    gae_advantages,
    normalise,
)
from mmrl.algorithms.objective import (
    Aggregate,
    Importance,
    KLEstimator,
    LossStats,
    LossSum,
    ObjectiveSettings,
    denominator,
    gradient_scale,
    kl_estimate,
    policy_loss,
    truncated_importance,
)
from mmrl.algorithms.offline import OfflineSettings, off_policy_loss
from mmrl.algorithms.ppo import (
    PPOSettings,
    ValueLossKind,
    ValueStats,
    ValueSum,
    critic_warming_up,
    value_loss,
)
from mmrl.algorithms.selection import SelectionSettings, VarianceSelection, largest_variance
from mmrl.algorithms.staleness import Correction, CorrectionSettings, behave_weights
from mmrl.algorithms.trajectories import (
    EpisodeCounts,
    Grid,
    LengthNorm,
    LengthWeights,
    ReturnKind,
    ReturnSettings,
    length_weights,
    make_grid,
    return_parts,
    step_rewards,
    token_mask,
    trainable,
    trajectory_return,
)

__all__ = [
    "SIGNAL_TOLERANCE", "AdvantageScale", "Advantages", "Aggregate", "Baseline", "Bootstrap", "ContrastSettings", "Correction",
    "CorrectionSettings", "Difficulty", "DynamicSampler", "EmaScale", "EmaSettings", "EntropyBonus", "EntropySettings",
    "EpisodeCounts", "GAESettings", "Grid", "Importance", "KLEstimator", "LengthNorm", "LengthWeights", "LossStats", "LossSum",
    "Moments", "ObjectiveSettings", "OfflineSettings", "Overlong", "OverlongSettings", "PPOSettings", "ReturnKind",
    "ReturnSettings", "RewardLevel", "SamplerSettings", "SelectionSettings", "StepReport", "Ticket", "ValueLossKind",
    "ValueStats", "ValueSum", "VarianceSelection", "Verdict", "behave_weights", "bonuses", "centred", "chunk_gae",
    "critic_warming_up", "denominator", "difficulty_weights", "gae_advantages", "gdpo_advantages", "gradient_scale",
    "group_advantages", "group_std", "has_signal", "kl_estimate", "largest_variance", "length_weights", "make_grid",
    "needs_contrast", "normalise", "off_policy_loss", "over_rewards_std", "overlong_penalty", "policy_loss", "return_parts",
    "soft_overlong_penalty", "step_rewards", "token_mask", "trainable", "trajectory_in_loss", "trajectory_return",
    "truncated_importance", "value_loss", "whiten",
]
