"""Algorithms as pure functions: advantages, the policy loss, and what enters the update. The trainer calls them."""
from __future__ import annotations

from mmrl.algorithms.advantages import SIGNAL_TOLERANCE, AdvantageScale, group_advantages, has_signal
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

__all__ = [
    "SIGNAL_TOLERANCE", "AdvantageScale", "Aggregate", "DynamicSampler", "Importance", "KLEstimator", "LossStats",
    "LossSum", "ObjectiveSettings", "Overlong", "OverlongSettings", "SamplerSettings", "StepReport", "Ticket",
    "Verdict", "denominator", "gradient_scale", "group_advantages", "has_signal", "kl_estimate", "overlong_penalty",
    "policy_loss", "soft_overlong_penalty", "trajectory_in_loss", "truncated_importance",
]
