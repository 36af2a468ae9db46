"""The learner: closed groups in, optimizer steps out, whatever the rollouts are (answers to prompts, episodes in simulators).

    learner = Learner(config, policy, engine, world, advantages)
    learner.begin(step); learner.add(group) ...; result = learner.finish()

The loss is a sum over turns that is divided once, by a denominator counted over the whole step: so a group may be trained on as
soon as it closes, and the result is that of training on all of them afterwards. With several passes over a step, with advantages
that compare groups, or where forwards are collective, groups are only collected as they close and trained on in `finish`.

In a run of several processes each trains on its own groups. Collective operations run in `finish` alone, in the same order
everywhere and also where a process has no group.

What rollouts are to learn is the advantage estimator's to say (mmrl.training.group_advantages, mmrl.training.critic);
mmrl.training.samples makes training samples of both, mmrl.training.optimizer_steps takes the steps, the loss of a micro-batch is
mmrl.training.turn_loss; forwards and gradients are the training engine's (mmrl.distributed.engines).

Legend: N tokens of a turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from mmrl.algorithms import trainable
from mmrl.config import RunConfig
from mmrl.distributed.engines.base import TrainEngine
from mmrl.distributed.world import World
from mmrl.policy.encode import Prompt
from mmrl.training.answer_critic import compute_values
from mmrl.training.critic import CriticLoss
from mmrl.training.dealing import exchanged
from mmrl.training.optimizer_steps import OptimizerSteps
from mmrl.training.samples import SampleBuilder
from mmrl.training.sequences import (
    RolloutTargets,
    TrainingSample,
    TrainingTurn,
    plan_of,
)
from mmrl.training.turn_loss import TurnLoss
from mmrl.training.turn_selection import select_turns
from mmrl.training.update_result import UpdateResult
from mmrl.types import RolloutGroup

__all__ = [
    "AdvantageEstimator",
    "Learner",
]

Key = tuple[int, int, int]


class AdvantageEstimator(Protocol):
    """What rollouts are to learn."""

    @property
    def needs_whole_step(self) -> str:
        """Why advantages depend on the other groups of the step; '' where a group's own suffice."""

    def targets(
        self, groups: Sequence[RolloutGroup]
    ) -> Mapping[Key, Sequence[RolloutTargets | None]]:
        """For each rollout of each group of this process; None: not trained on. Collective where it looks beyond groups."""

    def metrics(self) -> dict[str, float]:
        """For the step's row."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""


class Learner:
    """Turns the groups of a step into optimizer steps of a training engine.

    `prompt_of(group)` encodes the sample of a group whose turns have no prompt of their own. `shuffles`: rollouts, not places of a
    step, are dealt to its optimizer steps, anew in each pass. `packs_groups`: in serial runs a micro-batch may hold several groups.
    `longest`: the most tokens of a rollout, for loss_aggregation dr_grpo; None: rollout.max_new_tokens.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: Any,
        engine: TrainEngine,
        world: World,
        advantages: AdvantageEstimator,
        *,
        prompt_of: Callable[[RolloutGroup], Prompt] | None = None,
        critic: CriticLoss | None = None,
        shuffles: bool = False,
        packs_groups: bool = True,
        longest: int | None = None,
    ) -> None:
        self.config, self.policy, self.engine, self.world = config, policy, engine, world
        self.advantages, self.critic = advantages, critic
        self._shuffles, self._packs_groups = shuffles, packs_groups
        self.loss = TurnLoss(config, policy, engine, critic)
        self.steps = OptimizerSteps(config, policy, engine, world, self.loss)
        self.samples = SampleBuilder(
            config,
            policy,
            prompt_of=prompt_of,
            longest=config.rollout.max_new_tokens if longest is None else longest,
            asynchronous=self.loss.offpolicy.asynchronous,
        )
        # called when a step has changed them, while the policy is held
        self.on_weights: Callable[[], Any] = lambda: None
        self.step = 0
        self._result = UpdateResult()
        self._collected: list[RolloutGroup] = []
        self._names: list[str] = []  # of the samples trained on as they came

    @property
    def updates(self) -> int:
        """Optimizer steps taken."""
        return self.steps.updates

    @property
    def collects(self) -> str:
        """Which settings keep groups until the last has closed; '' where each can be trained on as it closes."""
        a = self.config.algorithm
        why = {
            f"algorithm.epochs {a.epochs}": a.epochs > 1,
            f"algorithm.minibatches {a.minibatches}": a.minibatches > 1,
            f"algorithm.turns.keep_entropy {a.turns.keep_entropy:g}": self._selects,
            self.advantages.needs_whole_step: bool(self.advantages.needs_whole_step),
        }
        return ", ".join(words for words, holds in why.items() if holds)

    @property
    def _selects(self) -> bool:
        """Whether some turns are left out for their entropy, which the weights before the update tell."""
        return self.config.algorithm.turns.keep_entropy < 1

    @property
    def streams(self) -> bool:
        """Whether a group is trained on when it is added."""
        return not (
            self.collects
            or self.engine.lockstep
            or (self._packs_groups and self.config.schedule.kind == "serial")
        )

    def run(self, groups: Sequence[RolloutGroup], step: int = 0) -> UpdateResult:
        """Train on this process's share of the step's groups. Raises MismatchError and NonFiniteError."""
        self.begin(step)
        for group in groups:
            self.add(group)
        return self.finish()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON values; the optimizer's state is the engine's."""
        return {
            "updates": self.steps.updates,
            "credit": self.advantages.state_dict(),
            "entropy": self.loss.entropy.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. What a checkpoint does not have was not there when it was written."""
        self.steps.updates = state["updates"]
        for name, part in (("credit", self.advantages), ("entropy", self.loss.entropy)):
            if name in state:
                part.load_state_dict(state[name])

    # group by group: mmrl.training.pipeline.Learner

    def begin(self, step: int = 0) -> None:
        """Start a step whose groups are added one by one."""
        if self.policy.device.type == "cuda" and self.policy.device.index is not None:
            # a thread has a current device of its own, which collectives use
            torch.cuda.set_device(self.policy.device)
        self.step = self.loss.step = self.steps.step = step
        self._result, self._collected, self._names = UpdateResult(), [], []
        self.samples.begin(self.policy.version)
        self.loss.offpolicy.begin()
        if not self.engine.lockstep:  # lets last step's gradients go before the rollout
            self.engine.begin()

    def add(self, group: RolloutGroup) -> None:
        """Train on a closed group, or keep it for `finish` (see the module). Raises MismatchError and NonFiniteError."""
        if not self.streams:
            self._collected.append(group)
            return
        began, result = self.steps.clock(), self._result
        samples = self._prepare([group], result)
        self.steps.accumulate(
            plan_of(samples, self.config.train.token_budget), result, first_pass=True, fresh=True
        )
        result.denominator += sum(s.denominator for s in samples)
        self._names.append(group.sample.id)
        result.update_s += self.steps.clock() - began

    def finish(self) -> UpdateResult:
        """Scale and clip the gradients, take the optimizer steps. Collective. Raises MismatchError and NonFiniteError."""
        result = self._result
        self._wait(result)
        began = self.steps.clock()
        if self.streams:
            total, result.denominator = self.world.sum([result.denominator])[0], 0.0
            self.steps.apply(total, self._names, result)
        else:
            self._train_on_all(self._collected, result)
        result.advantage_metrics = {
            **self.advantages.metrics(),
            **self.loss.offpolicy.metrics(self.world),
            **self.loss.entropy.metrics(),
        }
        self._collected = []
        self.samples.begin()
        self.on_weights()
        result.update_s += self.steps.clock() - began - result.logprobs_s
        return result.over(self.world)

    def _wait(self, result: UpdateResult) -> None:
        """Until every process has closed its groups."""
        if self.world.size > 1:
            began = time.perf_counter()
            self.world.barrier()
            result.wait_s += time.perf_counter() - began

    def _train_on_all(self, groups: Sequence[RolloutGroup], result: UpdateResult) -> None:
        """All passes over the step's groups, whatever the order they closed in: round by round, place by place."""
        if self.config.schedule.kind != "serial" or self._shuffles:
            groups = sorted(groups, key=lambda g: (g.key[2], g.key[1]))
        if self.config.train.balance_batch and self.world.size > 1:
            together = self.config.engine.sequence_parallel
            groups = exchanged(
                self.world, groups, self.samples.tokens_of, self._minibatch_of, together
            )
        if self.critic is not None and self.critic.computes_values:
            groups = self._with_values(groups, result)
        with self.world.raise_on_all_ranks():
            samples = self._prepare(groups, result)
        stale = any(t.stale for s in samples for t in s.turns)
        if self.engine.lockstep:  # who has none takes part in the others' forwards
            stale = any(self.world.gather([stale]))
        if self._selects or (
            not self.loss.one_pass
            and (
                self.loss.offpolicy.corrects(stale)
                or self.config.algorithm.router_replay.mode == "R2"
            )
        ):
            samples = self._before_update(samples, result)
        if self._selects:
            with self.world.raise_on_all_ranks():
                samples, result.selected = select_turns(
                    samples, self.config.algorithm, self.samples.longest
                )
        for epoch in range(self.config.algorithm.epochs):
            for number, part in enumerate(self._minibatches(samples, epoch)):
                self.steps.take(
                    part, result, first_pass=epoch == 0, fresh=epoch == 0 and number == 0
                )

    def _minibatches(
        self, samples: Sequence[TrainingSample], epoch: int
    ) -> Iterator[list[TrainingSample]]:
        """What each optimizer step of a pass trains on: every process takes part in all of them."""
        parts = self.config.algorithm.minibatches
        if self._shuffles:
            mine = {s.place: s for s in samples}
            places = sorted(self.world.gather(list(mine)))
            order = np.random.default_rng((self.config.seed, 37, self.step, epoch)).permutation(
                len(places)
            )
            for numbers in np.array_split(order, parts):
                yield [mine[places[i]] for i in numbers if places[i] in mine]
        else:  # by place in the step
            split: list[list[TrainingSample]] = [[] for _ in range(parts)]
            for sample in samples:
                split[self._minibatch(sample.place[0])].append(sample)
            yield from split

    def _minibatch(self, key: Key) -> int:
        """The optimizer step of a pass in which a group is trained on, by its place in the step."""
        return key[1] * self.config.algorithm.minibatches // self.config.train.prompts_per_step

    def _minibatch_of(self, group: RolloutGroup) -> int:
        return self._minibatch(group.key)

    # what rollouts are to learn

    def _prepare(
        self, groups: Sequence[RolloutGroup], result: UpdateResult
    ) -> list[TrainingSample]:
        targets = self.advantages.targets(groups)
        found = [sample for g in groups for sample in self.samples.of(g, targets[g.key])]
        result.turns += sum(len(s.turns) for s in found)
        return found

    def _with_values(
        self, groups: Sequence[RolloutGroup], result: UpdateResult
    ) -> list[RolloutGroup]:
        """The groups with the critic's values, those of the weights before the update, for all passes over the step. Collective."""
        began = time.perf_counter()
        with self.world.raise_on_all_ranks():
            blank = {
                g.key: [
                    RolloutTargets.of_outcome(0.0, len(r.turns)) if trainable(r) else None
                    for r in g.rollouts
                ]
                for g in groups
            }
            drafts = [sample for g in groups for sample in self.samples.of(g, blank[g.key])]
        plan = self.steps.plan_without_step(drafts)
        counted = result if self.steps.counts else UpdateResult()
        with self.engine.collective_section():
            found = compute_values(
                groups, drafts, plan, lambda turns: self.loss.predict_values(turns, counted)
            )
        result.logprobs_s += time.perf_counter() - began
        return found

    def _before_update(
        self, samples: Sequence[TrainingSample], result: UpdateResult
    ) -> list[TrainingSample]:
        """The samples with what the weights before the update say of them, which later passes can no longer compute."""
        began, known = self.steps.clock(), dict[int, TrainingTurn]()
        plan = self.steps.plan_without_step(samples)
        with self.engine.collective_section():
            for turns in plan:
                for turn, told in zip(turns, self.loss.before_update(turns), strict=True):
                    known[id(turn)] = told
                self.steps.pause()
        result.logprobs_s += self.steps.clock() - began
        return [replace(s, turns=tuple(known[id(t)] for t in s.turns)) for s in samples]
