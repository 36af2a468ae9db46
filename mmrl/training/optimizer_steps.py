"""Optimizer steps of a learner: micro-batches through the loss and the training engine, gradients applied, on all processes alike.

    steps = OptimizerSteps(config, policy, engine, world, loss)
    steps.take(samples, result, first_pass=True, fresh=True)           # all at once, collective
    steps.accumulate(plan, result, ...); steps.apply(total, ...)       # or micro-batches as they come, and a step at the end

Where the engine's forwards are collective (sharded weights) processes agree on the number of micro-batches of a step beforehand,
and who has fewer runs idle ones. Processes that compute rows together (engine.sequence_parallel) train on the samples of all of
them, in the same micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mmrl.config import RunConfig
from mmrl.distributed.engines.base import TrainEngine
from mmrl.distributed.engines.lockstep import Losses, agree
from mmrl.distributed.world import World
from mmrl.errors import MismatchError
from mmrl.training.sequences import TrainingSample, TrainingTurn, plan_of
from mmrl.training.turn_loss import TurnLoss
from mmrl.training.update_result import UpdateResult

__all__ = ["OptimizerSteps"]


class OptimizerSteps:
    """The optimizer steps of a run; `updates` counts them and drives the learning rate. `step` is the run's, for messages."""

    def __init__(
        self, config: RunConfig, policy: Any, engine: TrainEngine, world: World, loss: TurnLoss
    ) -> None:
        self.policy, self.engine, self.world, self.loss = policy, engine, world, loss
        self._token_budget = config.train.token_budget
        a = config.algorithm
        self.step, self.updates = 0, 0
        self.total_updates = config.train.steps * a.epochs * a.minibatches
        self.losses = Losses(engine, world)
        # called between micro-batches; see mmrl.training.pipeline
        self.make_way: Callable[[], None] = lambda: None
        self._paused_s = 0.0

    def plan_without_step(self, samples: Sequence[TrainingSample]) -> list[list[TrainingTurn]]:
        """Micro-batches of forwards alone, with idle ones where forwards are collective."""
        plan = plan_of(self._shared(samples), self._token_budget)
        return plan + [[]] * self._agree(plan, 0.0)[0] if self.engine.lockstep else plan

    def take(
        self,
        samples: Sequence[TrainingSample],
        result: UpdateResult,
        *,
        first_pass: bool,
        fresh: bool,
    ) -> None:
        """One optimizer step on these samples. Collective. `first_pass`: over the step's groups; `fresh`: no optimizer step was
        taken since they were rolled out."""
        share, total = sum(s.denominator for s in samples), None
        plan = plan_of(self._shared(samples), self._token_budget)
        if self.engine.lockstep:
            idle, total = self._agree(plan, share)
            plan += [[]] * idle
        with self.engine.collective_section():
            self.engine.begin(total)
            counted = result if self.counts else UpdateResult()
            self.accumulate(plan, counted, first_pass=first_pass, fresh=fresh)
            if counted is not result:
                result.logprobs_s += counted.logprobs_s
            names = list(dict.fromkeys(t.sample for s in samples for t in s.turns))
            self.apply(self.world.sum([share])[0] if total is None else total, names, result)

    @property
    def counts(self) -> bool:
        """Whether what this process computes is counted: of those that compute the same rows together the first one."""
        return self.engine.sequence is None or self.engine.sequence.rank == 0

    def _shared(self, samples: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
        """The samples of all processes that compute rows together. Collective."""
        if self.engine.sequence is None:
            return samples
        self.world.barrier()  # where the error of another process is heard of
        return self.engine.sequence.share(
            samples, lambda s: (v for t in s.turns for v in t.prompt.visuals)
        )

    def _agree(self, plan: Sequence[Sequence[TrainingTurn]], share: float) -> tuple[int, float]:
        """How many idle micro-batches this process adds to its plan, and the denominator of all processes. Collective.

        What is wrong with the prompts is said here, to all: inside a forward the others would wait for this process.
        """
        with self.world.raise_on_all_ranks():
            for turns in plan:
                self._compare_inputs(turns)
                for turn in turns:
                    if turn.fingerprint:
                        visuals = turn.prompt.visuals
                        if (group := self.engine.sequence) is not None:
                            visuals = tuple(v for v in visuals if group.owner(v) == group.rank)
                        self.policy.pin(visuals)
        count, total = agree(self.world, len(plan), share)
        return count - len(plan), total

    def accumulate(
        self,
        plan: Sequence[Sequence[TrainingTurn]],
        result: UpdateResult,
        *,
        first_pass: bool,
        fresh: bool,
    ) -> None:
        """Forward and backward of micro-batches; one without turns is idle."""
        for number, turns in enumerate(plan, 1):
            if first_pass:
                self._compare_inputs(turns)
            loss = (
                self.loss.of(turns, result, first_pass, fresh) if turns else self.loss.idle(result)
            )
            names = ", ".join(dict.fromkeys(t.sample for t in turns))
            self.engine.backward(
                self.losses.finite(
                    loss,
                    f" in step {self.step}; samples: {names}; lower optim.lr or resume from "
                    "the last checkpoint",
                ),
                last=number == len(plan),
            )
            self.pause()

    def pause(self) -> None:
        """Others may use the policy now. Not where forwards are collective: other processes would be in another one."""
        if not self.engine.lockstep:
            began = time.perf_counter()
            self.make_way()
            self._paused_s += time.perf_counter() - began

    def clock(self) -> float:
        """Seconds, like time.perf_counter(), of a clock that stands still in `pause`."""
        return time.perf_counter() - self._paused_s

    def _compare_inputs(self, turns: Sequence[TrainingTurn]) -> None:
        for turn in turns:
            if turn.fingerprint and (seen := turn.prompt.fingerprint) != turn.fingerprint:
                raise MismatchError(
                    f"sample {turn.sample}: rollout saw tensors {turn.fingerprint}, training is about to see "
                    f"{seen}; the picture or the processor changed during the run: restore it, or resume"
                )

    def apply(self, total: float, names: Sequence[str], result: UpdateResult) -> None:
        """One optimizer step of the gradients summed so far, divided by the denominator of all processes.

        A critic that warms up steps alone: with gradients of zero AdamW would decay the policy's weights and count its steps on,
        and divide the first real gradients by moments still near 0.
        """
        norm, result.lr = self.engine.step(
            total,
            self.updates,
            self.total_updates,
            lambda norm: self._failure(norm, names),
            heads_only=self.loss.warming,
        )
        self.updates += 1
        if self.loss.entropy.adaptive and not self.loss.warming:
            self.loss.entropy.observe(*self.world.sum(self.loss.take_entropy()))
        result.grad_norms.append(norm)
        result.denominator += total

    def _failure(self, norm: float, names: Sequence[str]) -> str:
        """What is wrong with the gradients."""
        return (
            f"{self.losses.said()}the gradient norm is {norm} in optimizer step {self.updates + 1}; samples: "
            f"{', '.join(names[:8])}; lower optim.lr or resume from the last checkpoint"
        )
