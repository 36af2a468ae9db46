"""From episodes of several decisions to loss inputs: rewards, masks, grids for GAE, length weights.

An episode is a mmrl.types.Rollout in an environment: its turns have rewards and say which of their steps were executed. Episodes
that ended in an error are counted and nothing else: they neither train nor enter the mean of their group, since nobody knows
what they would have earned.

Legend: G members of a group, B episodes, T decisions of the longest, R = T + 1 rows, C control steps of a chunk, K action
steps of a chunk, V values of a decision: 1, or K.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mmrl.errors import ConfigError, did_you_mean
from mmrl.types import Rollout

__all__ = [
    "EpisodeCounts",
    "Grid",
    "LengthNorm",
    "LengthWeights",
    "ReturnKind",
    "ReturnSettings",
    "length_weights",
    "make_grid",
    "return_parts",
    "step_rewards",
    "token_mask",
    "trainable",
    "trajectory_return",
]

ReturnKind = Literal["success", "shaped", "relative", "brevity"]
LengthNorm = Literal["token_mean", "trajectory_mean", "max_length"]


@dataclass(frozen=True, kw_only=True)
class ReturnSettings:
    """What an episode earns."""

    kind: ReturnKind | Mapping[ReturnKind, float] = "success"
    """One kind of reward, or several with the weight of each.
    'success': coef at the last valid step of a successful episode, else 0 (SimpleVLA-RL coef 1; RLinf GRPO coef 5).
    'shaped': coef times the simulator's rewards. 'relative': coef times their differences r_t - r_{t-1}, so that a state
    that pays in every step pays once, and losing it takes the pay back (RLinf use_rel_reward, RL4VLA).
    'brevity': coef times the share of the horizon that a successful episode did not need, at its last valid step; else 0."""
    coef: float = 1.0
    success: Literal["once", "at_end"] = "once"
    """Which success counts: ever reached, or still there at the end."""
    horizon: int = 0
    """Control steps until an episode is truncated; read by brevity."""

    def __post_init__(self) -> None:
        for name, known, values in (
            ("kind", get_args(ReturnKind), list(self.weights)),
            ("success", ("once", "at_end"), [self.success]),
        ):
            for value in values:
                if value not in known:
                    raise ConfigError(
                        f"expected {name} to be one of {', '.join(known)}, found {value!r}."
                        f"{did_you_mean(value, known)}"
                    )
        if not self.weights or not all(math.isfinite(w) and w > 0 for w in self.weights.values()):
            raise ConfigError(
                f"expected at least one kind of reward, each with a weight above 0, found {dict(self.weights)}"
            )
        if not self.coef > 0:
            raise ConfigError(f"expected coef above 0, found {self.coef}; 1 and 5 are usual")
        if "brevity" in self.weights and self.horizon < 1:
            raise ConfigError(
                f"kind brevity is a share of the horizon: expected its control steps, found {self.horizon}"
            )

    @property
    def weights(self) -> Mapping[ReturnKind, float]:
        """Kinds of reward and their weights; 1 for a single kind."""
        return {self.kind: 1.0} if isinstance(self.kind, str) else self.kind

    def succeeded(self, episode: Rollout) -> bool:
        """The success that counts here."""
        return bool(episode.info.get(f"success_{self.success}", 0.0))


def trainable(episode: Rollout) -> bool:
    """Whether an episode may train: it ended without an error and decided something."""
    return episode.error is None and len(episode.turns) > 0


def step_rewards(episode: Rollout, settings: ReturnSettings) -> list[np.ndarray]:
    """Rewards of every control step, the weighted sum of their kinds: one float64 (C,) array per decision; exactly 0 at steps that
    are not valid."""
    rows = [np.zeros(len(d.rewards)) for d in episode.turns]
    for kind, weight in settings.weights.items():
        for row, paid in zip(rows, _rewards_of_kind(episode, settings, kind), strict=True):
            row += weight * paid
    return rows


def _rewards_of_kind(
    episode: Rollout, settings: ReturnSettings, kind: ReturnKind
) -> list[np.ndarray]:
    """`step_rewards` of one kind, without its weight."""
    rows = [np.zeros(len(d.rewards)) for d in episode.turns]
    steps = [
        (k, c) for k, d in enumerate(episode.turns) for c, valid in enumerate(d.valid) if valid
    ]
    if kind in ("success", "brevity"):
        if steps and settings.succeeded(episode):
            k, c = steps[-1]
            rows[k][c] = settings.coef * (
                1.0 if kind == "success" else 1 - len(steps) / settings.horizon
            )
        return rows
    before = 0.0
    for k, c in steps:
        reward = float(episode.turns[k].rewards[c])
        rows[k][c] = settings.coef * (reward - before)
        before = reward if kind == "relative" else 0.0
    return rows


def trajectory_return(episode: Rollout, settings: ReturnSettings) -> float:
    """Undiscounted sum of `step_rewards`: the score of GRPO on trajectories (RLinf: rewards up to the first done)."""
    return math.fsum(float(x) for row in step_rewards(episode, settings) for x in row)


def return_parts(episode: Rollout, settings: ReturnSettings) -> dict[str, float]:
    """The undiscounted sum of each kind of reward, without its weight: reward parts of an episode."""
    return {
        kind: math.fsum(float(x) for row in _rewards_of_kind(episode, settings, kind) for x in row)
        for kind in settings.weights
    }


@dataclass(frozen=True)
class EpisodeCounts:
    """Sums over episodes: add them over groups and ranks. finished + errored == episodes; the rest counts finished ones."""

    episodes: int = 0
    finished: int = 0
    errored: int = 0
    success_once: int = 0
    success_at_end: int = 0
    terminated: int = 0
    truncated: int = 0
    decisions: int = 0
    steps: int = 0

    def __add__(self, other: EpisodeCounts) -> EpisodeCounts:
        return EpisodeCounts(
            *(
                a + b
                for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
            )
        )

    @classmethod
    def of(cls, episodes: Sequence[Rollout]) -> EpisodeCounts:
        """Count a list of episodes."""
        done = [e for e in episodes if trainable(e)]
        ended, cut = (
            sum(e.terminated for e in done),
            sum(e.truncated and not e.terminated for e in done),
        )
        succeeded = {
            kind: sum(bool(e.info.get(f"success_{kind}", 0.0)) for e in done)
            for kind in ("once", "at_end")
        }
        return cls(
            len(episodes),
            len(done),
            len(episodes) - len(done),
            succeeded["once"],
            succeeded["at_end"],
            ended,
            cut,
            sum(len(e.turns) for e in done),
            sum(e.steps for e in done),
        )


def token_mask(valid_C: Sequence[bool], num_tokens: int, dims: int) -> list[bool]:
    """Which of a decision's action tokens were executed, `num_tokens` flags (SimpleVLA-RL: index < finish_step * 7).

    Tokens come action by action, `dims` each; an action lasts C / (num_tokens / dims) control steps and is in when the
    first of them ran. Raises ConfigError when the numbers do not divide.
    """
    actions = num_tokens // dims if dims > 0 else 0
    if actions < 1 or actions * dims != num_tokens or len(valid_C) % actions:
        raise ConfigError(
            f"expected tokens in whole actions of {dims} and control steps in whole actions, found {num_tokens} "
            f"tokens and {len(valid_C)} control steps"
        )
    repeat = len(valid_C) // actions
    return [bool(valid_C[n // dims * repeat]) for n in range(num_tokens)]


@dataclass(frozen=True)
class Grid:
    """Inputs of `chunk_gae`, one column per episode, padded; episodes that do not train are columns without a valid step.

    The third axis of rewards and flags is control steps (C), or action steps (K) where `make_grid` was told their number.
    """

    rewards_TBC: Tensor
    values_RBV: Tensor
    terminated_TBC: Tensor
    truncated_TBC: Tensor
    valid_TBC: Tensor
    final_values_TB: Tensor


def make_grid(
    episodes: Sequence[Rollout],
    settings: ReturnSettings,
    final_values_B: Sequence[float],
    actions: int | None = None,
) -> Grid:
    """The grid of a batch of episodes of different lengths, float32.

    final_values_B: V(final observation) per episode, anything where the bootstrap does not read it. It also follows an
    episode that neither terminated nor truncated (cut off by the caller).
    actions: action steps of a chunk; the rewards of the control steps that repeat one are summed, and it is valid when the
    first of them ran (as in `token_mask`). None leaves control steps. Raises ConfigError where they do not divide.
    """
    lengths = [len(e.turns) if trainable(e) else 0 for e in episodes]
    decisions = [d for e, length in zip(episodes, lengths, strict=True) for d in e.turns[:length]]
    T, B = max(lengths, default=0), len(episodes)
    C, V = (
        max((len(d.rewards) for d in decisions), default=1),
        max((len(d.values) for d in decisions), default=1),
    )
    assert len(final_values_B) == B, f"expected {B} final values, found {len(final_values_B)}"
    if actions is not None and decisions and C % actions:
        raise ConfigError(
            f"expected control steps in whole actions, found {C} control steps in {actions} actions"
        )
    rewards, values, final = np.zeros((T, B, C)), np.zeros((T + 1, B, V)), np.zeros((T, B))
    terminated, truncated, valid = (np.zeros((T, B, C), bool) for _ in range(3))
    for b, (episode, length) in enumerate(zip(episodes, lengths, strict=True)):
        for t, row in enumerate(step_rewards(episode, settings) if length else []):
            decision = episode.turns[t]
            ran = np.flatnonzero(decision.valid)
            rewards[t, b, : len(row)], valid[t, b, ran], values[t, b] = row, True, decision.values
            if len(ran) and t == length - 1:
                terminated[t, b, ran[-1]], truncated[t, b, ran[-1]] = (
                    episode.terminated,
                    episode.truncated,
                )
        if length:
            final[length - 1, b] = values[T, b] = final_values_B[b]
    steps = actions if actions is not None and decisions else C
    rewards_TBC, values_RBV, final_TB = (
        torch.as_tensor(x, dtype=torch.float32)
        for x in (rewards.reshape(T, B, steps, -1).sum(3) if steps < C else rewards, values, final)
    )
    ended_TBC, cut_TBC, valid_TBC = (
        torch.as_tensor(x.reshape(T, B, steps, C // steps).any(3))
        for x in (terminated, truncated, valid)
    )
    return Grid(rewards_TBC, values_RBV, ended_TBC, cut_TBC, valid_TBC, final_TB)


@dataclass(frozen=True)
class LengthWeights:
    """Loss of the step = sum_i weights_B[i] * (sum of trajectory i's terms) / denominator."""

    weights_B: Tensor
    denominator: float


def length_weights(
    lengths_B: Sequence[int] | Tensor, mode: LengthNorm, max_length: int | None = None
) -> LengthWeights:
    """Weights of trajectories by their number of units in the loss; those of length 0 get 0.

    token_mean       1, by all units: masked mean over tokens, long episodes weigh more (SimpleVLA-RL); `policy_loss`
                     loss_aggregation 'token_mean'
    trajectory_mean  1 / length, by trajectories that have a unit; loss_aggregation 'sequence_mean'
    max_length       max_length / length, by B * max_length, all elements (RLinf's loss / (valid / max_steps) averaged over
                     the padded batch): every trajectory weighs the same, and one masked out wholly shrinks the step
    For `policy_loss`: loss_aggregation 'token_mean', weight_N = weights_B[sequence], this denominator summed over the step.
    """
    lengths_B = torch.as_tensor(lengths_B, dtype=torch.float64)
    if mode not in get_args(LengthNorm):
        raise ConfigError(
            f"expected length normalisation {', '.join(get_args(LengthNorm))}, found {mode!r}."
            f"{did_you_mean(mode, get_args(LengthNorm))}"
        )
    some_B = lengths_B > 0
    if mode == "token_mean":
        return LengthWeights(some_B.float(), float(lengths_B.sum()))
    share_B = torch.where(some_B, 1 / lengths_B.clamp(min=1), torch.zeros_like(lengths_B))
    if mode == "trajectory_mean":
        return LengthWeights(share_B.float(), float(some_B.sum()))
    longest = lengths_B.max().item() if lengths_B.numel() else 0
    if not max_length or max_length < longest:
        raise ConfigError(
            f"length normalisation max_length expects a max_length of at least {longest:g}, found {max_length}"
        )
    return LengthWeights((share_B * max_length).float(), float(lengths_B.numel() * max_length))
