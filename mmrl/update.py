"""One GRPO update: advantages per group, packed micro-batches, gradients summed and scaled once, AdamW.

Legend: N completion tokens, B sequences of a micro-batch.
"""
from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from mmrl.algorithms import LossStats, ObjectiveSettings, OfflineSettings, policy_loss, trajectory_in_loss
from mmrl.config import RunConfig
from mmrl.credit import Credit
from mmrl.data import PromptStream
from mmrl.errors import MismatchError, NonFiniteError
from mmrl.optim import learning_rate, reduce_and_scale, set_learning_rate
from mmrl.policy.pack import Batch, PackItem, micro_batches, pack, pack_padded
from mmrl.policy.policy import Policy
from mmrl.schedule import usable
from mmrl.types import Group
from mmrl.world import World

__all__ = ["SourceStats", "UpdateResult", "Updater", "objective_settings"]


def objective_settings(config: RunConfig) -> ObjectiveSettings:
    """The algorithm section as the loss wants it."""
    a = config.algorithm
    return ObjectiveSettings(clip_low=a.clip_low, clip_high=a.clip_high, dual_clip=a.dual_clip, importance=a.importance,
                             aggregate=a.aggregate, max_completion_length=config.rollout.max_new_tokens,
                             kl_coef=a.kl.coef, kl_estimator=a.kl.estimator,
                             offline=OfflineSettings(gamma=a.offline.gamma, cap=a.offline.cap))


@dataclass
class SourceStats:
    """Sums of one data source: loss statistics, |sampler - trainer| log-prob gap, entropy in nats."""

    stats: LossStats = field(default_factory=LossStats)
    gap_sum: float = 0.0
    gap_max: float = 0.0
    gap_tokens: float = 0.0
    entropy: float = 0.0
    entropy_tokens: float = 0.0

    def add(self, other: SourceStats) -> None:
        """Add the sums of `other`."""
        self.stats += other.stats
        self.gap_sum, self.gap_max = self.gap_sum + other.gap_sum, max(self.gap_max, other.gap_max)
        self.gap_tokens += other.gap_tokens
        self.entropy, self.entropy_tokens = self.entropy + other.entropy, self.entropy_tokens + other.entropy_tokens


@dataclass
class UpdateResult:
    """Sums over all processes, by data source."""

    sources: dict[str, SourceStats] = field(default_factory=lambda: defaultdict(SourceStats))
    denominator: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    lr: float = 0.0
    packed_tokens: float = 0.0
    logprobs_s: float = 0.0
    update_s: float = 0.0
    credit: dict[str, float] = field(default_factory=dict)  # metrics of the advantages

    @property
    def total(self) -> SourceStats:
        """The sums over all sources."""
        total = SourceStats()
        for _, stats in sorted(self.sources.items()):
            total.add(stats)
        return total


@dataclass(frozen=True)
class _Work:
    """One group ready for packing: trajectories that are in the loss or count in its denominator."""

    group: Group
    item: PackItem
    advantages: tuple[float, ...]
    in_loss: tuple[bool, ...]
    behaviour: tuple[tuple[float, ...], ...]
    offline: tuple[bool, ...]


class Updater:
    """Owns the optimizer and turns the groups of a step into optimizer steps."""

    def __init__(self, config: RunConfig, policy: Policy, optimizer: torch.optim.Optimizer, stream: PromptStream,
                 world: World) -> None:
        self.config, self.policy, self.optimizer, self.stream, self.world = config, policy, optimizer, stream, world
        self.settings = objective_settings(config)
        self._mixes = config.algorithm.offline.per_group > 0
        self.credit = Credit(config, world, lambda sample: stream.find(sample.source, sample.id)[1].member(sample.task).headline)
        self.parameters = policy.trainable()
        self.updates = 0  # optimizer steps taken, drives the learning rate
        a = config.algorithm
        self.total_updates = config.train.steps * a.epochs * a.minibatches

    def run(self, groups: Sequence[Group]) -> UpdateResult:
        """Train on this process's share of the step's groups. Raises MismatchError and NonFiniteError."""
        began = time.perf_counter()
        advantages = self.credit.assign(groups)
        work = [self._prepare(g, advantages[g.key]) for g in groups]
        result = UpdateResult(credit=self.credit.metrics())
        for epoch in range(self.config.algorithm.epochs):
            for number, part in enumerate(self._minibatches(work)):
                self._optimizer_step(part, result, first_pass=epoch == 0, fresh=epoch == 0 and number == 0)
        result.update_s = time.perf_counter() - began - result.logprobs_s
        return self._reduce(result)

    def _prepare(self, group: Group, advantages_G: tuple[float, ...]) -> _Work:
        sample, task = self.stream.find(group.sample.source, group.sample.id)
        turns = [t.turns[0] for t in group.trajectories]
        in_loss_G = tuple(good and trajectory_in_loss(t, self.config.algorithm.overlong)
                          for t, good in zip(group.trajectories, usable(group), strict=True))
        return _Work(group, PackItem(self.policy.encoder(sample, task), tuple(c.token_ids for c in turns)), advantages_G,
                     in_loss_G, tuple(c.logps for c in turns), tuple(t.offline for t in group.trajectories))

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
        offline_N = torch.tensor([o for w in chunk for o in w.offline], device=device)[sequence_N]
        reference_N = None
        if self.settings.kl_coef > 0:
            began = time.perf_counter()
            with torch.no_grad(), self.policy.reference() as reference:
                reference_N = reference.logp(batch, temperature).logp_N
            result.logprobs_s += time.perf_counter() - began
        out = self.policy.logp(batch, temperature)
        names = sorted({w.group.sample.source for w in chunk})
        label_N = torch.tensor([names.index(w.group.sample.source) for w in chunk for _ in w.advantages],
                               device=device)[sequence_N]
        loss = policy_loss(self.settings, out.logp_N, behaviour_N, advantage_N, sequence_N, mask_N, ref_logp_N=reference_N,
                           label_N=label_N, num_labels=len(names), offline_N=offline_N if self._mixes else None)
        if not torch.isfinite(loss.loss):
            raise NonFiniteError(f"the loss is {float(loss.loss)}; samples: {', '.join(w.group.sample.id for w in chunk)}")
        loss.loss.backward()
        for name, stats in zip(names, loss.by_label, strict=True):
            result.sources[name].stats += stats
        result.packed_tokens += batch.num_tokens
        if first_pass:
            self._observe(chunk, (out.logp_N.detach() - behaviour_N).abs(), out.entropy_N, ~offline_N, result, fresh)
        return loss.denominator

    def _observe(self, chunk: Sequence[_Work], gap_N: torch.Tensor, entropy_N: torch.Tensor, own_N: torch.Tensor,
                 result: UpdateResult, fresh: bool) -> None:
        """Entropy and, while the weights are still the rollout's, the sampler-trainer gap of each group's source, over the
        tokens the policy wrote (`own_N`)."""
        sizes = [sum(map(len, w.item.completions)) for w in chunk]
        for w, gaps, entropies, own in zip(chunk, gap_N.split(sizes), entropy_N.split(sizes), own_N.split(sizes), strict=True):
            gaps, entropies = gaps[own], entropies[own]
            entry = result.sources[w.group.sample.source]
            entry.entropy += float(entropies.sum())
            entry.entropy_tokens += entropies.numel()
            if fresh:
                entry.gap_sum += float(gaps.sum())
                entry.gap_max = max(entry.gap_max, float(gaps.max()))
                entry.gap_tokens += gaps.numel()

    def _reduce(self, result: UpdateResult) -> UpdateResult:
        if self.world.size == 1:
            return result
        merged = replace(result, sources=defaultdict(SourceStats), packed_tokens=0.0)
        for sources, packed in self.world.gather([(dict(result.sources), result.packed_tokens)]):
            merged.packed_tokens += packed
            for name, stats in sorted(sources.items()):
                merged.sources[name].add(stats)
        return merged
