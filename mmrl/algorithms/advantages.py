"""Group-relative advantages: how much better each completion is than the others of its own prompt.

`group_advantages` (GRPO) needs only its own group, so a group can go to the trainer the moment it closes; `whiten` needs
all groups of a step. mmrl.training.group_advantages applies them to the groups of a run. Legend: G group size.
Try: python -c "from mmrl.algorithms import group_advantages; print(group_advantages([0, 0, 1, 1]))"
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from mmrl.errors import ConfigError, NonFiniteError, RewardError, did_you_mean

__all__ = [
    "AdvantageScale",
    "Baseline",
    "SIGNAL_TOLERANCE",
    "centred",
    "gdpo_advantages",
    "group_advantages",
    "group_std",
    "has_signal",
    "over_rewards_std",
    "tree_advantages",
    "whiten",
]

AdvantageScale = Literal["std", "none"]
Baseline = Literal["grpo", "rloo", "opo", "pass_k"]

SIGNAL_TOLERANCE = 1e-8  # rewards closer than this differ by rounding only (the same IoU computed in another order)


def _as_floats(rewards_G: Sequence[float] | Tensor) -> list[float]:
    values: list[float] = [
        float(r) for r in (rewards_G.tolist() if isinstance(rewards_G, Tensor) else rewards_G)
    ]
    bad = [i for i, r in enumerate(values) if not math.isfinite(r)]
    if bad:
        raise NonFiniteError(
            f"expected finite rewards, found {values[bad[0]]} at position {bad[0]} of a group of {len(values)}; "
            "score a completion that cannot be rewarded with Score.failure(reason)"
        )
    return values


def group_advantages(
    rewards_G: Sequence[float] | Tensor,
    scale: AdvantageScale = "std",
    eps: float = 1e-6,
    clip: float | None = None,
) -> Tensor:
    """Advantages of one group, shape (G,), float32; computed in float64.

    scale 'std': (r - mean) / (std + eps) with the unbiased standard deviation, as GRPO is practised (Shao et al. 2024,
    arXiv 2402.03300). scale 'none': r - mean (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783), which does not inflate
    nearly solved or nearly hopeless prompts. `clip` bounds the result to [-clip, clip].
    Equal rewards, and a group of one, give exactly 0: rounding of the mean must not be amplified by 1 / eps.
    Raises ConfigError for an unknown scale, NonFiniteError for a NaN or infinite reward.
    """
    if scale not in ("std", "none"):
        raise ConfigError(
            f"expected advantage scale 'std' or 'none', found {scale!r}."
            f"{did_you_mean(scale, ('std', 'none'))}"
        )
    if clip is not None and not clip > 0:
        raise ConfigError(f"expected an advantage clip above 0 or none, found {clip!r}")
    values = _as_floats(rewards_G)
    if len(values) < 2 or max(values) == min(values):
        return torch.zeros(len(values), dtype=torch.float32)
    rewards = torch.tensor(values, dtype=torch.float64)
    advantages = rewards - rewards.mean()
    if scale == "std":
        advantages = advantages / (rewards.std(correction=1) + eps)
    if clip is not None:
        advantages = advantages.clamp(-clip, clip)
    return advantages.to(torch.float32)


def tree_advantages(
    rewards_G: Sequence[float],
    trees_G: Sequence[int | None],
    scale: AdvantageScale = "std",
    eps: float = 1e-6,
) -> list[float]:
    """Tree-GRPO (Ji et al. 2025, arXiv 2509.21240, section 3.3): group_advantages within a rollout's own tree plus those within the
    whole group; (G,). Rollouts that part at a turn share all that comes before it, so that the first term compares what followed.
    """
    whole = group_advantages(rewards_G, scale, eps).double().tolist()
    for tree in sorted({t for t in trees_G if t is not None}):
        places = [i for i, t in enumerate(trees_G) if t == tree]
        if len(places) == len(whole):
            break  # the only tree is the group
        within = group_advantages([rewards_G[i] for i in places], scale, eps).double().tolist()
        for place, value in zip(places, within, strict=True):
            whole[place] += value
    return whole


def has_signal(rewards_G: Sequence[float] | Tensor, tol: float = SIGNAL_TOLERANCE) -> bool:
    """Whether a group teaches anything: its rewards spread by more than `tol` (a group of one never does)."""
    values = _as_floats(rewards_G)
    return len(values) > 1 and max(values) - min(values) > tol


def group_std(rewards_G: Sequence[float]) -> float:
    """Unbiased standard deviation of one group; exactly 0 for equal rewards and for a group of one."""
    values = _as_floats(rewards_G)
    if len(values) < 2 or max(values) == min(values):
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def centred(
    rewards_G: Sequence[float], baseline: Baseline = "grpo", lengths_G: Sequence[int] | None = None
) -> list[float]:
    """Rewards of one group minus a baseline, before any scaling; (G,), exactly 0 for equal rewards.

    grpo    r_i - mean                                  (Shao et al. 2024, arXiv 2402.03300)
    rloo    r_i - mean of the other G - 1               (leave one out, Ahmadian et al. 2024, arXiv 2402.14740)
    opo     r_i - sum(len * r) / sum(len)               (length-weighted, Hao et al. 2025, arXiv 2505.23585); needs lengths
    pass_k  r_max - r_second for the best, 0 for others (GRPO pass@k as in verl); the first of several best
    """
    if baseline not in get_args(Baseline):
        raise ConfigError(
            f"expected advantage {', '.join(get_args(Baseline))}, found {baseline!r}."
            f"{did_you_mean(baseline, get_args(Baseline))}"
        )
    values = _as_floats(rewards_G)
    if len(values) < 2 or max(values) == min(values):
        return [0.0] * len(values)
    if baseline == "rloo":
        total = math.fsum(values)
        return [v - (total - v) / (len(values) - 1) for v in values]
    if baseline == "pass_k":
        second, best = sorted(values)[-2:]
        place = values.index(best)
        return [best - second if i == place else 0.0 for i in range(len(values))]
    if baseline == "opo":
        if lengths_G is None or len(lengths_G) != len(values) or sum(lengths_G) <= 0:
            raise ConfigError(
                f"advantage 'opo' expects one length in tokens per reward, found {lengths_G} for {len(values)}"
            )
        middle = math.fsum(n * v for n, v in zip(lengths_G, values, strict=True)) / sum(lengths_G)
    else:
        middle = math.fsum(values) / len(values)
    return [v - middle for v in values]


def gdpo_advantages(
    parts_G: Sequence[Mapping[str, float]], weights: Mapping[str, float], eps: float = 1e-6
) -> list[float]:
    """GDPO, one group, before whitening: sum over parts k of w_k (r_k - mean_k) / (std_k + eps); (G,).

    Each part is normalised inside its group before the weighted sum, so that a part of small spread (format) is neither
    swamped by one of large spread nor dominates it (GDPO as in verl's core_algos.py; Liu et al. 2026, arXiv 2601.05242).
    Standard deviations are unbiased; a part that is equal on the whole group adds exactly 0, a part of weight 0 is not
    read. Raises RewardError when a completion lacks a weighted part: a missing part must not count as a 0 score.
    """
    totals = [0.0] * len(parts_G)
    for name, weight in weights.items():
        if weight == 0:
            continue
        lacking = [i for i, parts in enumerate(parts_G) if name not in parts]
        if lacking:
            raise RewardError(
                f"reward_aggregation gdpo expected reward part '{name}' on every completion of the group, found it "
                f"missing on completion {lacking[0]} (it has {sorted(parts_G[lacking[0]])}); give failures "
                "all parts (Score.failure(reason, part_names)) or use algorithm.reward_aggregation plain"
            )
        normalised = (
            group_advantages([parts[name] for parts in parts_G], "std", eps).double().tolist()
        )
        totals = [t + weight * a for t, a in zip(totals, normalised, strict=True)]
    return totals


def whiten(groups: Sequence[Sequence[float]], eps: float = 1e-6) -> list[list[float]]:
    """Advantages of all groups of a step divided by their common unbiased std + eps, after subtracting their common mean.

    Every completion counts once, whatever its length, so the result depends neither on packing nor on the order or the
    processes of the groups (sums are exact). Fewer than two values, or equal ones, give zeros.
    """
    flat = [a for group in groups for a in group]
    if len(flat) < 2 or max(flat) == min(flat):
        return [[0.0] * len(group) for group in groups]
    mean = math.fsum(flat) / len(flat)
    std = math.sqrt(math.fsum((a - mean) ** 2 for a in flat) / (len(flat) - 1))
    return [[(a - mean) / (std + eps) for a in group] for group in groups]


def over_rewards_std(
    offsets: Sequence[Sequence[float]], rewards: Sequence[Sequence[float]], eps: float = 1e-4
) -> list[list[float]]:
    """Centred rewards of all groups of a step divided by the unbiased std + eps of all their rewards (Lite PPO, Liu et al. 2025,
    arXiv 2508.08221; TRL's scale_rewards batch and its eps).

    The rewards themselves spread, prompts against prompts included, where `whiten` divides by the spread of what is left
    after the baseline: easy and hard prompts in one step make this divisor larger and the advantages smaller.
    """
    std = group_std([r for group in rewards for r in group])
    return [[a / (std + eps) for a in group] for group in offsets]
