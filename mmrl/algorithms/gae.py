"""Generalised advantage estimation on a grid of steps by environments, with terminated and truncated kept apart.

A_t = sum_l (gamma * lambda)^l * delta_{t+l} to the end of the episode, delta_t = r_t + gamma * V_next - V_t (Schulman et al.
2016, arXiv 1506.02438). A column may hold several episodes one after another (auto-reset), or one and then padding.
Which value follows an episode's last step is the `Bootstrap` mode; it is always that of the *final* observation, never of
the one after a reset. A step that is not valid (after the end of the episode, padding) contributes nothing, whatever it
holds. Discounted returns (REINFORCE++) are the case V = 0, lambda = 1.
Try: python -c "import torch; from mmrl.algorithms import *; o = torch.ones(3, 1); n = o > 2; print(
    gae_advantages(GAESettings(), o, torch.zeros(4, 1), n, n).returns)"

Legend: T steps (decisions or action steps), R = T + 1 rows, B environments, C action steps of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mmrl.errors import ConfigError, NonFiniteError, did_you_mean

__all__ = [
    "Advantages",
    "Bootstrap",
    "GAESettings",
    "Moments",
    "RewardLevel",
    "chunk_gae",
    "gae_advantages",
    "normalise",
]

Bootstrap = Literal["standard", "always", "never"]
RewardLevel = Literal["chunk", "action"]


@dataclass(frozen=True, kw_only=True)
class GAESettings:
    """Defaults as RLinf and RL4VLA train with."""

    gamma: float = 0.99
    """Discount per row of the grid: per decision at level 'chunk', per action step at level 'action'."""
    lam: float = 0.95
    """Lambda; 1 gives returns minus values, 0 one-step errors."""
    bootstrap: Bootstrap = "standard"
    """What follows an episode's last step. 'standard': V(final observation) when it was truncated, 0 when it terminated.
    'always': V(final observation) either way (RLinf with auto_reset). 'never': 0 either way. Steps cut off by the end of
    the grid alone are not an episode's end and always take the last row of the values."""
    level: RewardLevel = "chunk"
    """'chunk': rewards of a chunk are summed, one advantage per decision. 'action': one per action step, which needs a value
    per action step."""

    def __post_init__(self) -> None:
        for name, kind in (("bootstrap", Bootstrap), ("level", RewardLevel)):
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                raise ConfigError(
                    f"expected {name} to be one of {', '.join(known)}, found {value!r}.{did_you_mean(value, known)}"
                )
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"expected {name} in [0, 1], found {getattr(self, name)}; the usual values are 0.99 and 0.95"
                )


@dataclass(frozen=True)
class Advantages:
    """Advantages, returns (advantages + values: the critic's targets) and which entries count; all of one shape, 0 where
    not valid."""

    advantages: Tensor
    returns: Tensor
    valid: Tensor


def gae_advantages(
    settings: GAESettings,
    rewards_TB: Tensor,
    values_RB: Tensor,
    terminated_TB: Tensor,
    truncated_TB: Tensor,
    *,
    final_values_TB: Tensor | None = None,
    valid_TB: Tensor | None = None,
) -> Advantages:
    """GAE of T steps in B environments; (T, B), computed in float64, returned in the dtype of the rewards.

    values_RB: row t is V before step t; the last row is V after the last step of columns that go on. terminated_TB,
    truncated_TB: bool, the episode ended with step t; both at once count as terminated. final_values_TB: V(final
    observation), read at the ends that bootstrap only; without auto-reset it may be values_RB[1:].
    valid_TB: bool, all true by default. Steps that are not valid are skipped: neither rewards nor flags nor values are
    read there, and the value that follows a step is that of the next valid one (the last row when there is none).
    `settings.level` is not read: the grid already has its level (`chunk_gae` makes it).
    Raises ConfigError when ends bootstrap and final values are missing, NonFiniteError for a NaN that counts.
    """
    count, envs = rewards_TB.shape
    assert values_RB.shape == (count + 1, envs), (
        f"values: expected {(count + 1, envs)}, found {tuple(values_RB.shape)}"
    )
    valid = (
        torch.ones(count, envs, dtype=torch.bool, device=rewards_TB.device)
        if valid_TB is None
        else valid_TB.bool()
    )
    terminated, truncated = terminated_TB.bool() & valid, truncated_TB.bool() & valid
    for name, grid in (("terminated", terminated), ("truncated", truncated), ("valid", valid)):
        assert grid.shape == (count, envs), (
            f"{name}: expected {(count, envs)}, found {tuple(grid.shape)}"
        )
    done = terminated | truncated
    follows = _end_values(settings.bootstrap, terminated, truncated, final_values_TB)
    rewards, values = rewards_TB.detach().double(), values_RB.detach().double()
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    next_B, carry_B = values[count], torch.zeros_like(values[count])
    for t in reversed(range(count)):
        after_B = torch.where(done[t], follows[t], next_B)
        delta_B = rewards[t] + settings.gamma * after_B - values[t]
        step_B = delta_B + settings.gamma * settings.lam * torch.where(
            done[t], torch.zeros_like(carry_B), carry_B
        )
        advantages[t] = torch.where(valid[t], step_B, advantages[t])
        returns[t] = torch.where(valid[t], step_B + values[t], returns[t])
        carry_B, next_B = (
            torch.where(valid[t], step_B, carry_B),
            torch.where(valid[t], values[t], next_B),
        )
    if not bool(torch.isfinite(advantages).all()):
        t, b = (~torch.isfinite(advantages)).nonzero()[-1].tolist()
        raise NonFiniteError(
            f"expected finite rewards and values, found an advantage of {advantages[t, b].item()} at step {t} "
            f"of environment {b} (reward {rewards[t, b].item()}, value {values[t, b].item()})"
        )
    dtype = rewards_TB.dtype if rewards_TB.dtype.is_floating_point else torch.float32
    return Advantages(advantages.to(dtype), returns.to(dtype), valid)


def _end_values(
    mode: Bootstrap, terminated_TB: Tensor, truncated_TB: Tensor, final_values_TB: Tensor | None
) -> Tensor:
    """The value after the last step of every episode that ends in the grid; (T, B) float64, 0 elsewhere."""
    bootstraps = {
        "standard": truncated_TB & ~terminated_TB,
        "always": truncated_TB | terminated_TB,
        "never": torch.zeros_like(truncated_TB),
    }[mode]
    zeros = torch.zeros(bootstraps.shape, dtype=torch.float64, device=bootstraps.device)
    if final_values_TB is None:
        if bool(bootstraps.any()):
            raise ConfigError(
                f"bootstrap '{mode}' expects the values of final observations, found none for "
                f"{int(bootstraps.sum())} episode ends; give final_values_TB (values_RB[1:] where nothing resets in "
                "between) or use bootstrap never"
            )
        return zeros
    assert final_values_TB.shape == bootstraps.shape, (
        f"final values: expected {tuple(bootstraps.shape)}"
    )
    return torch.where(bootstraps, final_values_TB.detach().double(), zeros)


def chunk_gae(
    settings: GAESettings,
    rewards_TBC: Tensor,
    values: Tensor,
    terminated_TBC: Tensor,
    truncated_TBC: Tensor,
    *,
    final_values_TB: Tensor | None = None,
    valid_TBC: Tensor | None = None,
) -> Advantages:
    """GAE of T decisions of C action steps each (RLinf's reward_type chunk_level and action_level).

    Level 'chunk': rewards of valid steps are summed, flags hold for a chunk when they hold for one of its valid steps,
    a decision is valid when one of its steps is; `values` is (T + 1, B) and results are (T, B).
    Level 'action': every action step is a row; `values` is (T + 1, B, C), of which the last row is read at step 0 only,
    and results are (T, B, C). final_values_TB: as in `gae_advantages`; an episode ends at most once in a chunk.
    """
    count, envs, width = rewards_TBC.shape
    valid = (
        torch.ones_like(rewards_TBC, dtype=torch.bool) if valid_TBC is None else valid_TBC.bool()
    )
    terminated, truncated = terminated_TBC.bool() & valid, truncated_TBC.bool() & valid
    rewards = torch.where(valid, rewards_TBC, torch.zeros_like(rewards_TBC))
    if settings.level == "chunk":
        return gae_advantages(
            settings,
            rewards.sum(2),
            values,
            terminated.any(2),
            truncated.any(2),
            final_values_TB=final_values_TB,
            valid_TB=valid.any(2),
        )
    if values.shape != (count + 1, envs, width):
        raise ConfigError(
            f"reward level 'action' expects one value per action step, shape {(count + 1, envs, width)}, found "
            f"{tuple(values.shape)}; give the value head {width} outputs or use level chunk"
        )

    def rows(grid_TBC: Tensor) -> Tensor:
        return grid_TBC.permute(0, 2, 1).reshape(-1, envs)

    final = (
        None
        if final_values_TB is None
        else rows(final_values_TB[:, :, None].expand(count, envs, width))
    )
    flat = gae_advantages(
        settings,
        rows(rewards),
        torch.cat([rows(values[:count]), values[count, None, :, 0]]),
        rows(terminated),
        rows(truncated),
        final_values_TB=final,
        valid_TB=rows(valid),
    )

    def grid(rows_NB: Tensor) -> Tensor:
        return rows_NB.reshape(count, width, envs).permute(0, 2, 1)

    return Advantages(grid(flat.advantages), grid(flat.returns), grid(flat.valid))


@dataclass(frozen=True)
class Moments:
    """Sums over valid entries: add them over micro-batches, or all-reduce `to_list`, then `normalise` with the total."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Tensor, valid: Tensor) -> Moments:
        """Of the entries of `values` where `valid`; any shape."""
        kept = values.detach()[valid.bool()].double()
        return cls(float(kept.numel()), kept.sum().item(), kept.square().sum().item())

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count, self.total + other.total, self.squares + other.squares
        )

    def to_list(self) -> list[float]:
        """count, sum, sum of squares: ready for one all-reduce in float64."""
        return [self.count, self.total, self.squares]

    @classmethod
    def from_list(cls, values: Sequence[float]) -> Moments:
        """The inverse of `to_list`."""
        return cls(*values)

    @property
    def mean(self) -> float:
        """0 without entries."""
        return self.total / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """Unbiased; 0 for fewer than two entries and for a spread within rounding of float32 (relative 3e-7)."""
        if self.count < 2:
            return 0.0
        variance = (self.squares - self.total * self.mean) / (self.count - 1)
        return math.sqrt(variance) if variance > 1e-13 * self.squares / self.count else 0.0


def normalise(
    values: Tensor, valid: Tensor, moments: Moments | None = None, eps: float = 1e-5
) -> Tensor:
    """(A - mean) / (std + eps) over the valid entries, 0 elsewhere (RLinf, eps 1e-5, unbiased std); any shape.

    `moments`: sums over more than these entries (other processes, other micro-batches); by default those of `values`.
    Values without spread give exactly 0.
    """
    total = Moments.of(values, valid) if moments is None else moments
    if total.std == 0:
        return torch.zeros_like(values)
    scaled = (values.detach().double() - total.mean) / (total.std + eps)
    return torch.where(valid.bool(), scaled, torch.zeros_like(scaled)).to(values.dtype)
