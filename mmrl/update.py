"""One GRPO update: advantages per group, packed micro-batches, gradients summed and scaled once, AdamW.

Legend: N completion tokens, B sequences of a micro-batch.
"""
from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mmrl.algorithms import LossStats, ObjectiveSettings, group_advantages, policy_loss, trajectory_in_loss
from mmrl.config import RunConfig
from mmrl.data import PromptStream
from mmrl.errors import MismatchError, NonFiniteError
from mmrl.optim import learning_rate, reduce_and_scale, set_learning_rate
from mmrl.policy.pack import Batch, PackItem, micro_batches, pack, pack_padded
from mmrl.policy.policy import Policy
from mmrl.schedule import training_rewards, usable
from mmrl.types import Group
from mmrl.world import World

__all__ = ["UpdateResult", "Updater", "objective_settings"]


def objective_settings(config: RunConfig) -> ObjectiveSettings:
    """The algorithm section as the loss wants it."""
    a = config.algorithm
    return ObjectiveSettings(clip_low=a.clip_low, clip_high=a.clip_high, dual_clip=a.dual_clip, importance=a.importance,
                             aggregate=a.aggregate, max_completion_length=config.rollout.max_new_tokens,
                             kl_coef=a.kl.coef, kl_estimator=a.kl.estimator)


@dataclass
class UpdateResult:
    """Sums over all processes; `entropy` is {source: (sum of nats, tokens)}."""

    stats: LossStats = field(default_factory=LossStats)
    denominator: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    lr: float = 0.0
    gap_sum: float = 0.0
    gap_max: float = 0.0
    gap_tokens: float = 0.0
    entropy: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    packed_tokens: float = 0.0
    logprobs_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True)
class _Work:
    """One group ready for packing: trajectories that are in the loss or count in its denominator."""

    group: Group
    item: PackItem
    advantages: tuple[float, ...]
    in_loss: tuple[bool, ...]
    behaviour: tuple[tuple[float, ...], ...]


class Updater:
    """Owns the optimizer and turns the groups of a step into optimizer steps."""

    def __init__(self, config: RunConfig, policy: Policy, optimizer: torch.optim.Optimizer, stream: PromptStream,
                 world: World) -> None:
        self.config, self.policy, self.optimizer, self.stream, self.world = config, policy, optimizer, stream, world
        self.settings = objective_settings(config)
        self.parameters = policy.trainable()
        self.updates = 0  # optimizer steps taken, drives the learning rate
        a = config.algorithm
        self.total_updates = config.train.steps * a.epochs * a.minibatches

    def run(self, groups: Sequence[Group]) -> UpdateResult:
        """Train on this process's share of the step's groups. Raises MismatchError and NonFiniteError."""
        began = time.perf_counter()
        work = [self._prepare(g) for g in groups]
        result = UpdateResult()
        for epoch in range(self.config.algorithm.epochs):
            for number, part in enumerate(self._minibatches(work)):
                self._optimizer_step(part, result, first_pass=epoch == 0, fresh=epoch == 0 and number == 0)
        result.update_s = time.perf_counter() - began - result.logprobs_s
        return self._reduce(result)

    def _prepare(self, group: Group) -> _Work:
        a = self.config.algorithm
        sample, task = self.stream.find(group.sample.source, group.sample.id)
        good_G = usable(group)
        rewards = [r for r, good in zip(training_rewards(group, self.config), good_G, strict=True) if good]
        found = iter(group_advantages(rewards, a.advantage_scale).tolist())
        advantages_G = tuple(next(found) if good else 0.0 for good in good_G)
        turns = [t.turns[0] for t in group.trajectories]
        return _Work(group, PackItem(self.policy.encoder(sample, task), tuple(c.token_ids for c in turns)),
                     advantages_G, tuple(good and trajectory_in_loss(t, a.overlong)
                                         for t, good in zip(group.trajectories, good_G, strict=True)),
                     tuple(c.logps for c in turns))

    def _minibatches(self, work: Sequence[_Work]) -> list[list[_Work]]:
        """Split by place in the step, so that every process takes part in the same optimizer steps."""
        places, parts = self.config.train.prompts_per_step, self.config.algorithm.minibatches
        split: list[list[_Work]] = [[] for _ in range(parts)]
        for w in work:
            split[w.group.key[1] * parts // places].append(w)
        return split

    def _optimizer_step(self, work: Sequence[_Work], result: UpdateResult, *, first_pass: bool,
                        fresh: bool) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        denominator = 0.0
        items = [w.item for w in work]
        packer = pack if self.config.train.forward == "shared" else pack_padded
        for indices in micro_batches(items, self.config.train.token_budget):
            chunk = [work[i] for i in indices]
            batch = packer([w.item for w in chunk])
            if first_pass:
                self._compare_inputs(chunk, batch)
            denominator += self._backward(chunk, batch, result, first_pass, fresh)
        denominator = self.world.sum([denominator])[0]
        reduce_and_scale(self.parameters, denominator, self.world.size)
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in self.parameters], self.config.optim.max_grad_norm)
        if not torch.isfinite(norm):
            raise NonFiniteError(f"the gradient norm is {float(norm)} in optimizer step {self.updates + 1}; samples: "
                                 f"{', '.join(w.group.sample.id for w in work[:8])}; lower optim.lr or resume from the "
                                 "last checkpoint")
        result.lr = learning_rate(self.config.optim, self.updates, self.total_updates)
        set_learning_rate(self.optimizer, result.lr)
        if denominator > 0:  # AdamW would still move the weights by its momentum
            self.optimizer.step()
        self.updates += 1
        result.grad_norms.append(float(norm))
        result.denominator += denominator

    def _compare_inputs(self, chunk: Sequence[_Work], batch: Batch) -> None:
        for w, seen in zip(chunk, batch.fingerprints, strict=True):
            if seen != w.group.fingerprint:
                raise MismatchError(
                    f"sample {w.group.sample.id}: rollout saw tensors {w.group.fingerprint}, training is about to see "
                    f"{seen}; the picture or the processor changed during the run: restore it, or resume")

    def _backward(self, chunk: Sequence[_Work], batch: Batch, result: UpdateResult, first_pass: bool,
                  fresh: bool) -> float:
        temperature, device = self.config.rollout.temperature, self.policy.device
        sequence_N = batch.sequence_N.to(device)
        advantage_N = torch.tensor([a for w in chunk for a in w.advantages], device=device)[sequence_N]
        mask_N = torch.tensor([m for w in chunk for m in w.in_loss], device=device)[sequence_N]
        behaviour_N = torch.tensor([x for w in chunk for lps in w.behaviour for x in lps], device=device)
        reference_N = None
        if self.settings.kl_coef > 0:
            began = time.perf_counter()
            with torch.no_grad(), self.policy.reference() as reference:
                reference_N = reference.logp(batch, temperature).logp_N
            result.logprobs_s += time.perf_counter() - began
        out = self.policy.logp(batch, temperature)
        loss = policy_loss(self.settings, out.logp_N, behaviour_N, advantage_N, sequence_N, mask_N, ref_logp_N=reference_N)
        if not torch.isfinite(loss.loss):
            raise NonFiniteError(f"the loss is {float(loss.loss)}; samples: {', '.join(w.group.sample.id for w in chunk)}")
        loss.loss.backward()
        result.stats += loss.stats
        result.packed_tokens += batch.num_tokens
        if first_pass:
            gap_N = (out.logp_N.detach() - behaviour_N).abs()
            if fresh:  # the weights are still the rollout's
                result.gap_sum += float(gap_N.sum())
                result.gap_max = max(result.gap_max, float(gap_N.max()))
                result.gap_tokens += gap_N.numel()
            sizes = [sum(map(len, w.item.completions)) for w in chunk]
            for w, entropy in zip(chunk, out.entropy_N.split(sizes), strict=True):
                entry = result.entropy[w.group.sample.source]
                entry[0] += float(entropy.sum())
                entry[1] += entropy.numel()
        return loss.denominator

    def _reduce(self, result: UpdateResult) -> UpdateResult:
        if self.world.size == 1:
            return result
        merged = UpdateResult(denominator=result.denominator, grad_norms=result.grad_norms, lr=result.lr,
                              logprobs_s=result.logprobs_s, update_s=result.update_s)
        rows = self.world.gather([(result.stats.to_list(), result.gap_sum, result.gap_max, result.gap_tokens,
                                   dict(result.entropy), result.packed_tokens)])
        for stats, gap_sum, gap_max, gap_tokens, entropy, packed in rows:
            merged.stats += LossStats.from_list(stats)
            merged.gap_sum, merged.gap_max = merged.gap_sum + gap_sum, max(merged.gap_max, gap_max)
            merged.gap_tokens, merged.packed_tokens = merged.gap_tokens + gap_tokens, merged.packed_tokens + packed
            for source, (total, tokens) in entropy.items():
                merged.entropy[source][0] += total
                merged.entropy[source][1] += tokens
        return merged
