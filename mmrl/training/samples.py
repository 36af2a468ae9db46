"""Training samples of closed groups: rollouts with what they are to learn, as the loss takes them.

    builder = SampleBuilder(config, policy)
    builder.begin(policy.version)
    samples = list(builder.of(group, targets))          # targets: of an advantage estimator, None: not trained on

Legend: N tokens of a turn, G rollouts of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mmrl.algorithms import trajectory_in_loss as rollout_in_loss
from mmrl.algorithms.group_rewards import usable
from mmrl.config import RunConfig
from mmrl.errors import MismatchError
from mmrl.policy.encode import Prompt
from mmrl.training.sequences import RolloutTargets, TrainingSample, TrainingTurn, token_weight
from mmrl.types import Rollout, RolloutGroup

__all__ = ["SampleBuilder"]

Key = tuple[int, int, int]


class SampleBuilder:
    """Rollouts of a group -> TrainingSample.

    `prompt_of(group)` encodes the sample of a group whose turns have no prompt of their own; what it gave is kept until `begin`.
    `longest`: the most tokens of a rollout, for loss_aggregation dr_grpo. `asynchronous`: turns of older weights are
    marked stale; past successes always are.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: Any,
        *,
        prompt_of: Callable[[RolloutGroup], Prompt] | None,
        longest: int,
        asynchronous: bool,
    ) -> None:
        self._config, self._policy, self._prompt_of = config, policy, prompt_of
        self.longest, self._asynchronous = longest, asynchronous
        self._version = 0
        self._prompts: dict[Key, Prompt] = {}

    def begin(self, version: int = 0) -> None:
        """Forget the prompts. `version` is that of the weights a step begins with, as turns name it."""
        self._version, self._prompts = version, {}

    def of(
        self, group: RolloutGroup, targets_G: Sequence[RolloutTargets | None]
    ) -> Iterator[TrainingSample]:
        """The samples of the group's rollouts that have targets."""
        prompt: Prompt | None = None
        # those of the group's prompt, for turns that the rollouts did not write behind it
        known = next(
            (t.experts for r in group.rollouts for t in r.turns if t.experts and not t.prompt), None
        )
        for number, (rollout, good, targets) in enumerate(
            zip(group.rollouts, usable(group), targets_G, strict=True)
        ):
            if targets is None:
                continue
            if prompt is None and any(t.prompt is None for t in rollout.turns):
                prompt = self._encoded(group)
            a = self._config.algorithm
            in_loss = good and rollout_in_loss(rollout, a.overlong, a.mask_rollouts)
            sample = self._sample(group, number, rollout, targets, prompt, in_loss)
            yield self._with_experts(sample, rollout, known)

    def _with_experts(self, sample: TrainingSample, rollout: Rollout, known: Any) -> TrainingSample:
        """The sample with the experts of its rollout (algorithm.router_replay R3). Raises MismatchError where it has none."""
        if self._config.algorithm.router_replay.mode != "R3":
            return sample
        elsewhere = rollout.offline or rollout.replayed
        if not elsewhere and any(t.experts is None for t in rollout.turns):
            raise MismatchError(
                f"sample {sample.turns[0].sample}: algorithm.router_replay.mode R3 needs the experts of each rollout, found a turn "
                "without; sample with mmrl's own engine (engine.rollout: own), or set mode: R2"
            )
        turns = tuple(
            replace(t, experts=known.prompt_alone() if known and not said.prompt else None)
            if elsewhere
            else replace(t, experts=said.experts)
            for t, said in zip(sample.turns, rollout.turns, strict=True)
        )
        return replace(sample, turns=turns)

    def tokens_of(self, group: RolloutGroup) -> int:
        """Tokens of a packed row of the group, whose turns have no prompt of their own."""
        return self._encoded(group).length + sum(r.num_tokens for r in group.rollouts)

    def _encoded(self, group: RolloutGroup) -> Prompt:
        assert self._prompt_of is not None, (
            "turns without a prompt belong to a sample that can be encoded"
        )
        prompt = self._prompts.get(group.key) or self._prompt_of(group)
        self._prompts[group.key] = prompt
        return prompt

    def _sample(
        self,
        group: RolloutGroup,
        number: int,
        rollout: Rollout,
        targets: RolloutTargets,
        prompt: Prompt | None,
        in_loss: bool,
    ) -> TrainingSample:
        masks = [self._policy.token_mask(turn) for turn in rollout.turns]
        a, blank = self._config.algorithm, [()] * len(masks)
        tokens = sum(int(m.sum()) for m in masks) if in_loss else 0
        scale, denominator = token_weight(tokens, a.loss_aggregation, self.longest)
        turns = []
        for turn, mask, advantages, values, returns in zip(
            rollout.turns,
            masks,
            targets.advantages,
            targets.values or blank,
            targets.returns or blank,
            strict=True,
        ):
            advantage_N = np.repeat(
                np.asarray(advantages, np.float32), len(mask) // len(advantages)
            )
            shown = turn.prompt if turn.prompt is not None else prompt
            assert shown is not None
            older = (self._asynchronous or rollout.replayed) and not rollout.offline
            stale = older and turn.policy_version < self._version
            turns.append(
                TrainingTurn(
                    shown,
                    turn.token_ids,
                    turn.logprobs,
                    mask,
                    advantage_N,
                    scale,
                    group.sample.source,
                    group.sample.id,
                    in_loss,
                    "" if turn.prompt is not None else group.fingerprint,
                    rollout.offline,
                    stale,
                    tuple(values),
                    tuple(returns),
                    decision=turn.decision,
                    stale_N=np.array([v < self._version for v in turn.versions])
                    if stale and turn.versions
                    else None,
                )
            )
        return TrainingSample((group.key, number), tuple(turns), denominator)
