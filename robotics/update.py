"""One embodied update: advantages of closed groups, decisions in micro-batches, gradients summed and scaled once.

GRPO compares the episodes of one initial state; PPO judges each decision, or each action step of it, by a critic (GAE). Either
way the loss is a sum over decisions that is divided once by a denominator counted over the whole step, so groups may be trained
on as they close (`begin`, `add`, `finish`): the result is that of training on all of them afterwards. With several passes over a
step, and for PPO, whose advantages are normalised over the step, groups are only collected as they close. Decisions of older
weights (async) are corrected as `schedule.correction` says (mmrl.algorithms.staleness): the old policy of the ratio is the one
before the update, and now / then becomes a bounded weight.

In a run of several processes each trains on its own groups. Collective operations run in `finish` alone, in the same order
everywhere and also where a process has no group: sums for PPO's normalisation, the places of all trajectories where several
passes shuffle them, and for each optimizer step its denominator and the gradients.

Forwards, gradients and optimizer steps are the training engine's (mmrl.engines). Where its forwards are collective (sharded
weights) groups are collected, processes agree on the number of micro-batches of an optimizer step, and who has fewer runs idle
ones; old values and proximal log-probs are computed by the `actor`, which holds the same weights whole.

Legend: N tokens of all decisions of a micro-batch, D decisions, A action dimensions, V values and advantages of a decision: 1, or
with rl.level action one per action step; then each judges the A tokens of its step.
"""
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mmrl.algorithms import (
    CorrectionSettings,
    LossStats,
    ObjectiveSettings,
    ValueStats,
    behave_weights,
    critic_warming_up,
    policy_loss,
    trainable,
    value_loss,
)
from mmrl.engines.base import TrainEngine
from mmrl.engines.lockstep import Losses, agree
from mmrl.policy.encode import Prompt
from mmrl.policy.pack import within_budget
from mmrl.types import Rollout, RolloutGroup
from mmrl.update import SourceStats
from mmrl.world import World
from robotics.config import EmbodiedConfig
from robotics.critic import critique, ppo_settings
from robotics.decisions import Column, Item, Place, Trajectory, plan_of, trajectory_of
from robotics.returns import outcome_of
from robotics.vla import Evaluated, VLAPolicy

__all__ = ["EmbodiedUpdate", "EmbodiedUpdater"]


@dataclass
class EmbodiedUpdate(SourceStats):
    """What an update did: sums over all processes, and the seconds it took in this one."""

    grad_norms: list[float] = field(default_factory=list)
    denominator: float = 0.0
    lr: float = 0.0
    update_s: float = 0.0
    logprobs_s: float = 0.0
    decisions: int = 0
    value_stats: ValueStats = field(default_factory=ValueStats)
    critic: dict[str, float] = field(default_factory=dict)
    stale_tokens: float = 0.0
    stale_weight: float = 0.0
    masked_tokens: float = 0.0
    wait_s: float = 0.0  # for the slowest process: a sum over processes, too

    def add(self, other: SourceStats) -> None:
        """Add the sums of another process."""
        assert isinstance(other, EmbodiedUpdate)
        super().add(other)
        self.decisions += other.decisions
        self.value_stats += other.value_stats
        self.stale_tokens, self.stale_weight = self.stale_tokens + other.stale_tokens, self.stale_weight + other.stale_weight
        self.masked_tokens, self.wait_s = self.masked_tokens + other.masked_tokens, self.wait_s + other.wait_s

    def correction(self) -> dict[str, float]:
        """Share of tokens that older weights chose, and of those the mean weight and the share masked."""
        if not self.stale_tokens:
            return {}
        return {"offpolicy/share": self.stale_tokens / max(self.entropy_tokens, 1.0),
                "offpolicy/weight": self.stale_weight / self.stale_tokens,
                "offpolicy/masked": self.masked_tokens / self.stale_tokens}


class EmbodiedUpdater:
    """Turns the groups of a step into optimizer steps of `engine`, which trains `vla`; `updates` counts them.

    `actor` has the weights of `vla` before a step, whole: a copy where the engine shards them, else (None) `vla` itself. `world`:
    the processes that train together; None: this one alone.
    """

    def __init__(self, config: EmbodiedConfig, vla: VLAPolicy, engine: TrainEngine, world: World | None = None,
                 actor: VLAPolicy | None = None) -> None:
        self.config, self.vla, self.engine, self.actor = config, vla, engine, actor or vla
        self.world = world if world is not None and world.size > 1 else None
        a = config.algorithm
        self.settings = ObjectiveSettings(clip_low=a.clip_low, clip_high=a.clip_high, dual_clip=a.dual_clip, importance="token",
                                          aggregate="token_mean", kl_coef=a.kl.coef, kl_estimator=a.kl.estimator)
        self.ppo = ppo_settings(config)
        self.correction = CorrectionSettings(mode=config.schedule.correction, threshold=config.schedule.threshold)
        self.updates = 0
        self.step = 0
        self.losses = Losses(engine, self.world)
        self._open: EmbodiedUpdate | None = None
        self._collected: list[RolloutGroup] = []

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the whole run, for the learning rate's schedule."""
        return self.config.train.steps * self.config.algorithm.epochs * self.config.algorithm.minibatches

    @property
    def collects(self) -> str:
        """Which settings keep groups until the last has closed; '' where each can be trained on as it closes: one optimizer step,
        and advantages that need their own group only."""
        a, kind = self.config.algorithm, self.config.rl.kind
        why = {f"algorithm.epochs {a.epochs}": a.epochs > 1, f"algorithm.minibatches {a.minibatches}": a.minibatches > 1,
               f"rl.kind {kind} (its advantages are normalised over the step)": kind == "ppo"}
        return ", ".join(words for words, holds in why.items() if holds)

    @property
    def streams(self) -> bool:
        """Whether a group's gradient is taken as it closes."""
        return not self.collects and not self.engine.lockstep

    def _train_on_all(self, groups: Sequence[RolloutGroup], result: EmbodiedUpdate) -> None:
        """All passes over the step's groups, whatever the order they closed in."""
        trajectories = self._prepared(sorted(groups, key=lambda g: g.key), result)
        a = self.config.algorithm
        if a.epochs * a.minibatches > 1 and self.correction.mode != "none":
            trajectories = self._with_proximal(trajectories, result)
        mine = {t.place: t for t in trajectories}
        places = sorted(mine if self.world is None else self.world.gather(list(mine)))
        for epoch in range(a.epochs):
            order = np.random.default_rng((self.config.seed, 37, self.step, epoch)).permutation(len(places))
            for number, numbers in enumerate(np.array_split(order, a.minibatches)):
                part = [mine[places[i]] for i in numbers if places[i] in mine]
                self._optimizer_step(part, result, fresh=epoch == 0 and number == 0, first=epoch == 0)

    def _optimizer_step(self, part: Sequence[Trajectory], result: EmbodiedUpdate, *, fresh: bool, first: bool) -> None:
        plan, share = plan_of(part, self.config.train.token_budget), float(sum(t.denominator for t in part))
        total = None
        if self.engine.lockstep:
            count, total = (len(plan), share) if self.world is None else agree(self.world, len(plan), share)
            plan += [[]] * (count - len(plan))
        with self.engine.engaging():
            self.engine.begin(total)
            self._backward(plan, result, fresh=fresh, first=first)
            self._apply(share, result, total)

    # group by group: mmrl.pipeline.Learner

    def begin(self, step: int) -> None:
        """Start a step whose groups will be added one by one."""
        assert self._open is None, "a step is open"
        if self.vla.core.device.type == "cuda" and self.vla.core.device.index is not None:
            torch.cuda.set_device(self.vla.core.device)  # a thread has a current device of its own, which collectives use
        self.step, self._collected = step, []
        if self.streams or not self.engine.lockstep:  # lets last step's gradients go before the rollout
            self.engine.begin()
        self._open = EmbodiedUpdate()

    def add(self, group: RolloutGroup) -> None:
        """Forward and backward of one closed group; the weights stay as they are. With several passes over a step's groups, or
        a critic that judges them together, it is kept for `finish`."""
        result = self._open
        assert result is not None, "begin() comes first"
        if not self.streams:
            self._collected.append(group)
            return
        began = time.perf_counter()
        trajectories = self._prepared([group], result)
        self._backward(plan_of(trajectories, self.config.train.token_budget), result, fresh=True, first=True)
        result.denominator += sum(t.denominator for t in trajectories)
        result.update_s += time.perf_counter() - began

    def finish(self) -> EmbodiedUpdate:
        """Scale the gradients, clip them, take the optimizer step (or all of them). Collective."""
        result = self._open
        assert result is not None, "begin() comes first"
        self._open = None
        self._wait(result)
        began = time.perf_counter()
        if self.streams:
            denominator, result.denominator = result.denominator, 0.0
            self._apply(denominator, result)
        else:
            groups, self._collected = self._collected, []
            self._train_on_all(groups, result)
        result = self._reduced(result)
        result.critic = {**result.critic, **result.correction()}
        result.update_s += time.perf_counter() - began - result.logprobs_s
        return result

    # pieces

    def _wait(self, result: EmbodiedUpdate) -> None:
        """Until every process has closed its groups."""
        if self.world is not None:
            began = time.perf_counter()
            self.world.barrier()
            result.wait_s += time.perf_counter() - began

    def _reduced(self, result: EmbodiedUpdate) -> EmbodiedUpdate:
        """With the sums of all processes, added in the same order in each."""
        if self.world is None:
            return result
        whole = replace(result, stats=LossStats(), gap_sum=0.0, gap_max=0.0, gap_tokens=0.0, entropy=0.0, entropy_tokens=0.0,
                        decisions=0, value_stats=ValueStats(), stale_tokens=0.0, stale_weight=0.0, masked_tokens=0.0, wait_s=0.0)
        for part in self.world.gather([result]):
            whole.add(part)
        return whole

    def _prepared(self, groups: Sequence[RolloutGroup], result: EmbodiedUpdate) -> list[Trajectory]:
        found = []
        if self.config.rl.kind == "ppo":
            judged = critique(self.config, self.actor, groups, self.world)
            result.critic = judged.metrics
            for group in groups:
                for place, e in (((group.key, m), e) for m, e in enumerate(group.rollouts) if trainable(e)):
                    found.append(self._trajectory(e, place, judged.advantages[place], judged.values[place], judged.returns[place]))
        else:
            for group in groups:
                advantages = outcome_of(self.config, group).advantages_G
                found += [self._trajectory(e, (group.key, m), [(a,)] * len(e.turns))
                          for m, (e, a) in enumerate(zip(group.rollouts, advantages, strict=True)) if trainable(e)]
        result.decisions += sum(len(t.items) for t in found)
        return found

    def _trajectory(self, episode: Rollout, place: Place, *columns: Column) -> Trajectory:
        return trajectory_of(self.config, episode, place, self.vla.codec.dim, self.step, *columns)

    def _backward(self, plan: Sequence[Sequence[Item]], result: EmbodiedUpdate, *, fresh: bool, first: bool) -> None:
        for number, items in enumerate(plan, 1):
            loss = self._loss(items, result, fresh, first) if items else self._idle(result)
            loss = self.losses.finite(loss, f" in step {self.step}; lower optim.lr or resume from the last checkpoint")
            self.engine.backward(loss, last=number == len(plan))

    def _with_proximal(self, trajectories: Sequence[Trajectory], result: EmbodiedUpdate) -> list[Trajectory]:
        """The trajectories with the log-probs that the weights before the update give to stale decisions."""
        began = time.perf_counter()
        stale = [i for t in trajectories for i in t.items if i.stale]
        known: dict[int, tuple[float, ...]] = {}
        with torch.no_grad():
            for part in within_budget([i.prompt.length + len(i.tokens) for i in stale], self.config.train.token_budget):
                batch = [stale[n] for n in part]
                out = self.actor.evaluate([i.prompt for i in batch], [i.tokens for i in batch], self.config.rollout.temperature)
                pieces = out.logp_N.split([len(i.tokens) for i in batch])
                known.update({id(i): tuple(piece.tolist()) for i, piece in zip(batch, pieces, strict=True)})
        result.logprobs_s += time.perf_counter() - began
        return [replace(t, items=tuple(replace(i, proximal=known.get(id(i))) for i in t.items)) for t in trajectories]

    def _corrected(self, items: Sequence[Item], logp_N: torch.Tensor, behaviour_N: torch.Tensor, mask_N: torch.Tensor,
                   result: EmbodiedUpdate, first: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Old log-probs, weights and which tokens are stale: where older weights chose, those of decoupled PPO; elsewhere the
        log-probs of the rollout, and 1."""
        stale_N = torch.tensor([i.stale for i in items for _ in i.tokens], device=logp_N.device)
        one_N = torch.ones_like(behaviour_N)
        if self.correction.mode == "none" or not stale_N.any():
            return behaviour_N, one_N, stale_N
        proximal_N = logp_N
        if any(i.proximal is not None for i in items):
            proximal_N = torch.tensor([x for i in items for x in i.proximal or i.logps], device=logp_N.device)
        weight_N, masked_N = behave_weights(self.correction, proximal_N, behaviour_N)
        if first:
            counted_N = stale_N & mask_N
            result.stale_tokens += float(counted_N.sum())
            result.stale_weight += float(weight_N[counted_N].sum())
            result.masked_tokens += float((masked_N & counted_N).sum())
        return torch.where(stale_N, proximal_N, behaviour_N), torch.where(stale_N, weight_N, one_N), stale_N

    def _forward(self, prompts: Sequence[Prompt], tokens: Sequence[tuple[int, ...]],
                 result: EmbodiedUpdate) -> tuple[torch.Tensor | None, Evaluated]:
        """Log-probs of the reference, where there is a KL term, and what the policy and its critic say."""
        temperature, warming = self.config.rollout.temperature, self._warming
        reference_N = None
        if self.settings.kl_coef > 0 and not warming:
            began = time.perf_counter()
            with torch.no_grad(), self.vla.reference() as reference:
                reference_N, = self.engine.run(lambda: (reference.evaluate(prompts, tokens, temperature).logp_N,))
            result.logprobs_s += time.perf_counter() - began

        def forward() -> tuple[torch.Tensor, ...]:
            out = self.vla.evaluate(prompts, tokens, temperature, detach_values=warming,
                                    entropy_gradient=self.config.rl.entropy_coef > 0 and not warming)
            return out.logp_N, out.entropy_N, out.values_DV

        return reference_N, Evaluated(*self.engine.run(forward))

    def _idle(self, result: EmbodiedUpdate) -> torch.Tensor:
        """A loss of 0 by the forwards that `_loss` runs, for another process that has decisions left. Its gradient, zeros, is of
        the same parameters."""
        _, out = self._forward([self.vla.idle_prompt()], [(0,) * self.vla.tokens_per_decision], result)
        parts = [] if self._warming else [out.logp_N.sum()]
        return torch.stack(parts + [out.values_DV.sum()] * (self.config.rl.kind == "ppo")).sum() * 0.0

    def _loss(self, items: Sequence[Item], result: EmbodiedUpdate, fresh: bool, first: bool) -> torch.Tensor:
        """The summed loss of a micro-batch."""
        device, warming = self.vla.core.device, self._warming
        reference_N, out = self._forward([i.prompt for i in items], [i.tokens for i in items], result)

        def column(values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.as_tensor(np.concatenate([np.asarray(v) for v in values]), dtype=dtype, device=device)

        mask_N = column([i.mask for i in items], torch.bool)
        behaviour_N = column([i.logps for i in items], torch.float32)
        weight_N = column([np.full(len(i.tokens), i.weight) for i in items], torch.float32)
        sequence_N = column([np.full(len(i.tokens), d) for d, i in enumerate(items)], torch.long)
        advantage_N = column([i.advantage_N for i in items], torch.float32)
        old_N, factor_N, stale_N = self._corrected(items, out.logp_N.detach(), behaviour_N, mask_N, result, first)
        total = torch.zeros((), device=device)
        if not warming:  # left out, not multiplied by 0: 0 * inf is NaN, and a gradient of 0 still moves AdamW
            loss = policy_loss(self.settings, out.logp_N, old_N, advantage_N, sequence_N, mask_N, ref_logp_N=reference_N,
                               weight_N=factor_N, scale_N=weight_N)
            result.stats += loss.stats
            total = loss.loss
            if self.config.rl.entropy_coef > 0:
                total = total - self.config.rl.entropy_coef * (out.entropy_N * weight_N)[mask_N].sum()
        if self.config.rl.kind == "ppo":
            total = total + self._value_term(items, out.values_DV, result)
        if first:
            self._observe(out, behaviour_N, mask_N, stale_N, result, fresh)
        return total

    def _value_term(self, items: Sequence[Item], values_DV: torch.Tensor, result: EmbodiedUpdate) -> torch.Tensor:
        """The critic's loss over the steps that were executed; a value weighs as the tokens it judges do in the policy's loss."""
        def column(values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values).reshape(-1), dtype=dtype, device=values_DV.device)

        tokens_DV = np.array([i.mask.reshape(values_DV.shape[1], -1).sum(1) for i in items])
        weight_DV = np.array([i.weight for i in items])[:, None] * tokens_DV
        found = value_loss(self.ppo, values_DV.flatten(), column([i.values_V for i in items]), column([i.targets_V for i in items]),
                           column(tokens_DV > 0, torch.bool), column(weight_DV))
        result.value_stats += found.stats
        return self.config.rl.value_coef * found.loss

    def _observe(self, out: Any, behaviour_N: torch.Tensor, mask_N: torch.Tensor, stale_N: torch.Tensor, result: EmbodiedUpdate,
                 fresh: bool) -> None:
        entropy_M = out.entropy_N.detach()[mask_N]
        result.entropy += float(entropy_M.sum())
        result.entropy_tokens += entropy_M.numel()
        now_N = mask_N & ~stale_N  # only there are sampler and trainer the same weights
        if fresh and now_N.any():
            gap_M = (out.logp_N.detach() - behaviour_N).abs()[now_N]
            result.gap_sum += float(gap_M.sum())
            result.gap_max = max(result.gap_max, float(gap_M.max()))
            result.gap_tokens += gap_M.numel()

    @property
    def _warming(self) -> bool:
        """Whether this step trains the critic alone."""
        return self.config.rl.kind == "ppo" and critic_warming_up(self.ppo, self.step - 1)

    def _apply(self, share: float, result: EmbodiedUpdate, total: float | None = None) -> None:
        """One optimizer step of the gradients summed so far; `total`: the denominator of all processes, where it is known.

        A critic that warms up steps alone: with gradients of zero AdamW would decay the policy's weights and count its steps on,
        and divide the first real gradients by moments still near 0.
        """
        if total is None:
            total = share if self.world is None else self.world.sum([share])[0]
        norm, result.lr = self.engine.step(total, self.updates, self.total_updates, self._failure, heads_only=self._warming)
        self.updates += 1
        result.grad_norms.append(norm)
        result.denominator += total

    def _failure(self, norm: float) -> str:
        """What is wrong with the gradients."""
        return (f"{self.losses.said()}the gradient norm is {norm} in optimizer step {self.updates + 1}; lower "
                "optim.lr or resume from the last checkpoint")
