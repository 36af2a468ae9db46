"""What a configuration may say and hardly means: remarks that `mmrl train` prints when a run starts.

python -c "from mmrl.training.advice import remarks; from mmrl.config import load_config; print(remarks(load_config('FILE')))"
"""

from __future__ import annotations

from mmrl.config import GSPO, RunConfig

__all__ = ["remarks"]

_WIDE = 0.01  # of clip ranges of sequence ratios: no published run goes beyond 1e-3


def remarks(config: RunConfig) -> list[str]:
    """One line for each, with the fix; empty for most configurations."""
    return [*_of_gspo(config), *_of_contrast(config)]


def _of_contrast(config: RunConfig) -> list[str]:
    a = config.algorithm
    if (
        a.contrast.kind == "none"
        or a.contrast.bonus == 0
        or a.advantage_scale != "std"
        or a.reward_aggregation != "plain"
    ):
        return []
    return [
        "algorithm.contrast with advantage_scale std: in groups whose rewards are right or wrong and nothing else (also once "
        "every answer keeps the format) the bonus cancels exactly; it acts with advantage_scale none, and, between groups that "
        "get it and others that do not, with batch, batch_rewards, ema, ema_within and reward_aggregation gdpo"
    ]


def _of_gspo(config: RunConfig) -> list[str]:
    a = config.algorithm
    found: list[str] = []
    if a.importance_sampling_level != "sequence":
        return found
    if max(a.clip_low, a.clip_high) > _WIDE:
        found.append(
            f"algorithm.importance_sampling_level sequence with clip_low {a.clip_low:g} and clip_high {a.clip_high:g}: a "
            "sequence's ratio is the geometric mean of its tokens' and hardly ever gets that far from 1, so nothing will be "
            f"clipped; GSPO's are {GSPO['clip_low']:g} and {GSPO['clip_high']:g} (the defaults when the keys are left out)"
        )
    if a.loss_aggregation != "sequence_mean":
        found.append(
            f"algorithm.importance_sampling_level sequence with loss_aggregation {a.loss_aggregation}: GSPO weighs every "
            "sequence the same (loss_aggregation sequence_mean, the default when the key is left out); here long ones weigh more"
        )
    return found
