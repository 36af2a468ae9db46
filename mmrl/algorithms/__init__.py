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
    whiten,
)
from mmrl.algorithms.contrast import ContrastSettings, bonuses, needs_contrast
from mmrl.algorithms.difficulty import Difficulty, difficulty_weights
from mmrl.algorithms.ema import EmaScale, EmaSettings
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
from mmrl.algorithms.selection import SelectionSettings, VarianceSelection, largest_variance

__all__ = [
    "SIGNAL_TOLERANCE", "AdvantageScale", "Aggregate", "Baseline", "ContrastSettings", "Difficulty", "DynamicSampler",
    "EmaScale", "EmaSettings", "Importance", "KLEstimator", "LossStats", "LossSum", "ObjectiveSettings", "OfflineSettings",
    "Overlong", "OverlongSettings", "SamplerSettings", "SelectionSettings", "StepReport", "Ticket", "VarianceSelection",
    "Verdict", "bonuses", "centred", "denominator", "difficulty_weights", "gdpo_advantages", "gradient_scale",
    "group_advantages", "group_std", "has_signal", "kl_estimate", "largest_variance", "needs_contrast", "off_policy_loss",
    "overlong_penalty", "policy_loss", "soft_overlong_penalty", "trajectory_in_loss", "truncated_importance", "whiten",
]
