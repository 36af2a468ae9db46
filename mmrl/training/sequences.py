"""Closed groups as the loss takes them: every turn with its prompt, its tokens, and what each token weighs.

    group -> advantages of its rollouts -> TrainingSample (a rollout) -> TrainingTurn -> micro-batches within the token budget

Turns that follow each other and have one prompt (the answers to a question) are packed behind one copy of it, and so is a turn
whose prompt extends the turn before (a chat that grows); every other turn (a robot's decision) has a place of its own. A group
that exceeds the token budget is split between rollouts, never inside of one, and its prompt is computed once for each part: losses
are summed and divided once per optimizer step, so the gradient is that of the whole group to rounding.

Legend: N tokens of a turn, V values and advantages of it: 1, or one per action step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mmrl.algorithms import LengthNorm, length_weights
from mmrl.errors import ConfigError
from mmrl.policy.encode import Prompt
from mmrl.policy.pack import extends, pack_turns, packed_length, within_budget

__all__ = [
    "Place",
    "RolloutTargets",
    "TrainingSample",
    "TrainingTurn",
    "bundles",
    "plan_of",
    "token_weight",
]

Place = tuple[tuple[int, int, int], int]
"""Key of a group, number of the rollout in it."""
Bundle = list["TrainingTurn"]


@dataclass(frozen=True)
class RolloutTargets:
    """What a rollout is to learn: for each of its turns V advantages and, with a critic, V old values and V value targets."""

    advantages: Sequence[Sequence[float]]
    values: Sequence[Sequence[float]] = ()
    returns: Sequence[Sequence[float]] = ()

    @classmethod
    def of_outcome(cls, advantage: float, turns: int) -> RolloutTargets:
        """One advantage for all turns: that of the rollout's reward."""
        return cls([(advantage,)] * turns)


@dataclass(frozen=True)
class TrainingTurn:
    """A turn ready for the loss.

    `mask_N` marks the tokens that had an effect (of a chunk of actions, those executed at least in part). With `in_loss` they are
    trained on, each with its entry of `advantage_N`, times `scale`. `stale`: written with older weights than those of now (async);
    `stale_N` which of its tokens, where newer ones wrote some of them.
    `offline`: somebody else wrote it. `proximal_N`: its log-probs before the update, where that has several passes.
    `fingerprint`: of the input that the rollout saw, where training encodes it anew; '' where the prompt is that of the rollout.
    `decision`: what was chosen, where that is no tokens (mmrl.types.Turn). `experts`: those that are to compute it, where routing
    is replayed (mmrl.policy.routing.TurnExperts). `entropy`: the mean of those (nats) of the
    distributions that its tokens in `mask_N` were drawn from, by the weights before the update, where turns are chosen by it.
    """

    prompt: Prompt
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    mask_N: np.ndarray
    advantage_N: np.ndarray
    scale: float
    source: str
    sample: str
    in_loss: bool = True
    fingerprint: str = ""
    offline: bool = False
    stale: bool = False
    values_V: tuple[float, ...] = ()
    returns_V: tuple[float, ...] = ()
    proximal_N: tuple[float, ...] | None = None
    decision: Any = None
    stale_N: np.ndarray | None = None
    experts: Any = None
    entropy: float | None = None

    @property
    def chosen(self) -> Any:
        """What the policy's `evaluate` gives log-probs of."""
        return self.tokens if self.decision is None else self.decision


@dataclass(frozen=True)
class TrainingSample:
    """The turns of a rollout, and its share of the denominator."""

    place: Place
    turns: tuple[TrainingTurn, ...]
    denominator: float


def token_weight(
    tokens: int,
    loss_aggregation: Literal["token_mean", "sequence_mean", "dr_grpo"],
    max_length: int | None = None,
) -> tuple[float, float]:
    """(weight of each token, share of the denominator) of a rollout with so many tokens in the loss, over all of its turns.

    token_mean: 1, its tokens (DAPO). sequence_mean: 1 / tokens, 1 (GRPO; every rollout weighs the same). dr_grpo: 1, the constant
    `max_length` (Dr.GRPO). A rollout without a token in the loss counts nowhere.
    """
    if loss_aggregation == "dr_grpo":
        if not max_length:
            raise ConfigError(
                "loss_aggregation dr_grpo divides by a constant length: expected the most tokens of a rollout, found none"
            )
        return 1.0, float(max_length) if tokens else 0.0
    modes: dict[str, LengthNorm] = {"token_mean": "token_mean", "sequence_mean": "trajectory_mean"}
    norm = length_weights([tokens], modes[loss_aggregation])
    return float(norm.weights_B[0]), norm.denominator


def bundles(samples: Iterable[TrainingSample]) -> list[Bundle]:
    """Turns of a group that follow each other and have one prompt, or a prompt that extends the turn before, together."""
    found: list[Bundle] = []
    group: tuple[int, int, int] | None = None
    for sample in samples:
        for turn in sample.turns:
            # groups of one sample are bundles of their own
            known = found[-1] if found and sample.place[0] == group else []
            if known and (
                turn.prompt is known[0].prompt
                or extends(turn.prompt, known[-1].prompt, known[-1].tokens)
            ):
                known.append(turn)
            else:
                found.append([turn])
            group = sample.place[0]
    return found


def _length(turns: Sequence[TrainingTurn]) -> int:
    return sum(map(packed_length, pack_turns([t.prompt for t in turns], [t.tokens for t in turns])))


def _parted(bundle: Bundle, token_budget: int) -> list[Bundle]:
    """The bundle; where it exceeds the budget, whole rollouts of it behind a copy of their prompt each, within the budget (one
    rollout at least)."""
    root = bundle[0].prompt
    if _length(bundle) <= token_budget:
        return [bundle]
    starts = [n for n, t in enumerate(bundle) if t.prompt is root]
    rollouts = [bundle[a:b] for a, b in itertools.pairwise([*starts, len(bundle)])]
    own = [_length(r) - root.length for r in rollouts]
    return [
        [t for number in part for t in rollouts[number]]
        for part in within_budget(own, max(1, token_budget - root.length))
    ]


def plan_of(samples: Iterable[TrainingSample], token_budget: int) -> list[list[TrainingTurn]]:
    """The turns of each micro-batch, in order, which are within the token budget (one rollout at least)."""
    packed = [part for bundle in bundles(samples) for part in _parted(bundle, token_budget)]
    lengths = [_length(bundle) for bundle in packed]
    return [
        [t for number in part for t in packed[number]]
        for part in within_budget(lengths, token_budget)
    ]
