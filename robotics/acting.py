"""What a policy that acts is: observations in, decisions out, and log-probs of decisions. Heads are behind it.

    outputs = policy.act(observations, keys)                     # decisions, with the log-probs they were drawn with
    found = policy.evaluate(prompts, decisions)                  # the same log-probs under the weights of now, differentiable

`mmrl.robotics.vla.VLAPolicy` has a discrete head: tokens, in parallel or one after the other. Simulators (mmrl.robotics.rollout),
cloning (mmrl.robotics.sft) and the one learner (mmrl.training.learner) know no more than this file: a decision is N numbers
(action steps x action dimensions) with a log-prob each, and algorithm.importance_sampling_level says over which of them ratios
are taken: token, action or chunk.

Legend: D decisions, N numbers of a decision, K action steps of it, A action dimensions, T control steps of a demonstration,
V values of a decision: one, or one per action step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from mmrl.distributed.engines.base import Trained
from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Evaluated
from mmrl.policy.storage import Stored
from mmrl.policy.value_head import ValueHead
from mmrl.robotics.actions import ActionCodec
from mmrl.robotics.config import VLAConfig
from mmrl.robotics.contract import Observation
from mmrl.types import Turn

__all__ = ["ActingPolicy", "ActionOutput", "Cloned"]


@dataclass(frozen=True)
class ActionOutput:
    """What the policy chose in one decision: bin indices (N,) and the fp32 log-probs of its numbers; the values (V,), 0 without a
    head. `decision`: what it chose where that is no bins (mmrl.types.Turn); the bins are then the nearest ones."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    values_V: tuple[float, ...]
    prompt: Prompt
    decision: Any = None


@dataclass(frozen=True)
class Cloned:
    """Demonstrated decisions under a policy, all (D * N,) but the last: the loss of each number, differentiable, and whether the
    policy is sure of it (discrete: gives it more than 1/2; flow: its squared error is below 1/4); the critic's values."""

    loss_N: torch.Tensor
    sure_N: torch.Tensor
    values_M: torch.Tensor


class ActingPolicy(Trained, Protocol):
    """A policy that acts; it is also what an engine trains."""

    codec: ActionCodec
    settings: VLAConfig
    value_head: ValueHead | None
    tokens_per_decision: int
    """N."""
    version: int
    """Number of the published weights."""

    def prompt(self, observation: Observation, /) -> Prompt:
        """The encoded observation. Raises ConfigError for a camera or proprioception that it lacks."""

    def act(
        self,
        observations: Sequence[Observation],
        keys: Sequence[tuple[int, ...]],
        *,
        greedy: bool = False,
        temperature: float = 1.0,
    ) -> list[ActionOutput]:
        """One output per observation; `keys` seed the noise of each, so that it does not depend on what stands beside it."""

    def actions(self, output: ActionOutput) -> np.ndarray:
        """Control steps (K * repeat, A) of an output, for the simulator."""

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        decisions: Sequence[Any],
        temperature: float = 1.0,
        *,
        entropy_gradient: bool = False,
        detach_values: bool = False,
    ) -> Evaluated:
        """Log-probs and entropies (nats) of the numbers of decisions (`Turn.decision`, else token_ids), and values."""

    def values(self, prompts: Sequence[Prompt]) -> list[float]:
        """The critic's value of each prompt (of its first action step); zeros without a critic."""

    def targets(self, actions_TA: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        """What the decision at control step `start` of a demonstration should choose, numbers or bins (N,), and which of them are
        real actions (N,)."""

    def clone(
        self, prompts: Sequence[Prompt], targets_DN: Sequence[Any], keys: Sequence[tuple[int, ...]]
    ) -> Cloned:
        """The loss of demonstrated decisions; `keys` seed what of it is drawn at random."""

    def token_mask(self, turn: Turn) -> np.ndarray:
        """Which numbers of a decision were executed, at least in part, (N,) bool."""

    def idle_turn(self) -> tuple[Prompt, Any]:
        """The smallest decision there is, for forwards that count for nothing (mmrl.distributed.engines.lockstep)."""

    def publish(self) -> int:
        """Name the current weights by the next version; returns it."""

    def reference(self) -> AbstractContextManager[Any]:
        """The policy before training, for a KL term."""

    def copied_types(self, stored: Stored) -> Mapping[str, torch.dtype]:
        """See mmrl.policy.policy.Policy."""

    def full_replica(self, device: torch.device | None = None, stored: Stored = "masters") -> Any:
        """See mmrl.policy.policy.Policy."""

    def adopt_replica(self, replica: Any) -> None:
        """See mmrl.policy.policy.Policy."""

    def save(self, folder: str | Path) -> None:
        """Write what load_vla reads."""
