"""One GRPO update: advantages per group, packed micro-batches, gradients summed and scaled once, AdamW.

`run` trains on the groups of a step at once. `begin`, `add` and `finish` (mmrl.pipeline.Learner) are its pieces: in pipelined
and async runs a group is a micro-batch of its own, trained on when it is added; with several passes over a step, or advantages
that compare groups, it is kept for `finish`, as in serial runs, whose micro-batches hold several groups.

Legend: N completion tokens, B sequences of a micro-batch.
"""
from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from mmrl.algorithms import (
    CorrectionSettings,
    LossStats,
    ObjectiveSettings,
    OfflineSettings,
    behave_weights,
    policy_loss,
    trajectory_in_loss,
)
from mmrl.config import RunConfig
from mmrl.credit import Credit
from mmrl.data import PromptStream
from mmrl.errors import MismatchError, NonFiniteError
from mmrl.group_rewards import usable
from mmrl.optim import take_step
from mmrl.policy.pack import Batch, PackItem, micro_batches, pack, pack_padded
from mmrl.policy.policy import Policy
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
    stale: tuple[bool, ...]  # written with older weights than those of now (async)
    proximal: tuple[float, ...] | None = None  # log-probs of all tokens before the update, where it has several passes

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions."""
        return sum(map(len, self.item.completions))


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
        self.correction = CorrectionSettings(mode=config.schedule.correction, threshold=config.schedule.threshold)
        self._asynchronous = config.schedule.kind == "async"
        self._version = 0  # of the weights a step begins with, as completions name it
        self._result = UpdateResult()
        self._collected: list[Group] = []
        self._names: list[str] = []  # of the samples trained on as they came
        self._offpolicy: dict[str, float] = defaultdict(float)

    @property
    def one_pass(self) -> bool:
        """Whether a step is one optimizer step."""
        return self.config.algorithm.epochs == self.config.algorithm.minibatches == 1

    @property
    def streams(self) -> bool:
        """Whether a group is trained on when it is added."""
        return self.config.schedule.kind != "serial" and self.one_pass and not self.credit.looks_beyond_groups

    def run(self, groups: Sequence[Group]) -> UpdateResult:
        """Train on this process's share of the step's groups. Raises MismatchError and NonFiniteError."""
        self.begin()
        for group in groups:
            self.add(group)
        return self.finish()

    def begin(self, step: int = 0) -> None:
        """Start a step whose groups are added one by one."""
        if self.policy.device.type == "cuda" and self.policy.device.index is not None:
            torch.cuda.set_device(self.policy.device)  # a thread has a current device of its own
        self._version, self._result, self._collected, self._names = self.policy.version, UpdateResult(), [], []
        self._offpolicy = defaultdict(float)
        self.optimizer.zero_grad(set_to_none=True)

    def add(self, group: Group) -> None:
        """Train on a closed group, or keep it for `finish` (see the module). Raises MismatchError and NonFiniteError."""
        if not self.streams:
            self._collected.append(group)
            return
        began, result = time.perf_counter(), self._result
        work = self._prepare(group, self.credit.assign([group])[group.key])
        result.denominator += self._accumulate([work], result, first_pass=True, fresh=True)
        self._names.append(group.sample.id)
        result.update_s += time.perf_counter() - began

    def finish(self) -> UpdateResult:
        """Scale and clip the gradients, take the optimizer steps. Raises MismatchError and NonFiniteError.

        Outside serial runs the weights get the next version here, while the policy is still held.
        """
        began, result = time.perf_counter(), self._result
        if self.streams:
            denominator, result.denominator = result.denominator, 0.0
            self._apply(denominator, self._names, result)
        else:
            self._train_on_all(self._collected, result)
        result.credit = {**self.credit.metrics(), **self._offpolicy_metrics()}
        self._collected = []
        if self.config.schedule.kind != "serial":
            self.policy.publish()
        result.update_s += time.perf_counter() - began - result.logprobs_s
        return self._reduce(result)

    def _train_on_all(self, groups: Sequence[Group], result: UpdateResult) -> None:
        if self.config.schedule.kind != "serial":  # groups may come in any order: that of serial runs, round by round
            groups = sorted(groups, key=lambda g: (g.key[2], g.key[1]))
        advantages = self.credit.assign(groups)
        work = [self._prepare(g, advantages[g.key]) for g in groups]
        if not self.one_pass and self.correction.mode != "none" and any(any(w.stale) for w in work):
            work = self._with_proximal(work, result)
        for epoch in range(self.config.algorithm.epochs):
            for number, part in enumerate(self._minibatches(work)):
                self._optimizer_step(part, result, first_pass=epoch == 0, fresh=epoch == 0 and number == 0)

    def _prepare(self, group: Group, advantages_G: tuple[float, ...]) -> _Work:
        sample, task = self.stream.find(group.sample.source, group.sample.id)
        turns = [t.turns[0] for t in group.trajectories]
        in_loss_G = tuple(good and trajectory_in_loss(t, self.config.algorithm.overlong)
                          for t, good in zip(group.trajectories, usable(group), strict=True))
        return _Work(group, PackItem(self.policy.encoder(sample, task), tuple(c.token_ids for c in turns)), advantages_G,
                     in_loss_G, tuple(c.logps for c in turns), tuple(t.offline for t in group.trajectories),
                     tuple(self._asynchronous and not t.offline and c.policy_version < self._version
                           for t, c in zip(group.trajectories, turns, strict=True)))

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
        denominator = self._accumulate(work, result, first_pass=first_pass, fresh=fresh)
        self._apply(denominator, [w.group.sample.id for w in work], result)

    def _packed(self, work: Sequence[_Work]) -> Iterator[tuple[list[_Work], Batch]]:
        """Micro-batches within the token budget."""
        packer = pack if self.config.train.forward == "shared" else pack_padded
        for indices in micro_batches([w.item for w in work], self.config.train.token_budget):
            chunk = [work[i] for i in indices]
            yield chunk, packer([w.item for w in chunk])

    def _accumulate(self, work: Sequence[_Work], result: UpdateResult, *, first_pass: bool, fresh: bool) -> float:
        """Forward and backward; returns the groups' share of the denominator."""
        denominator = 0.0
        for chunk, batch in self._packed(work):
            if first_pass:
                self._compare_inputs(chunk, batch)
            denominator += self._backward(chunk, batch, result, first_pass, fresh)
        return denominator

    def _apply(self, denominator: float, names: Sequence[str], result: UpdateResult) -> None:
        """One optimizer step of the gradients summed so far."""
        denominator = self.world.sum([denominator])[0]
        norm, result.lr = take_step(
            self.optimizer, self.parameters, self.config.optim, denominator, self.updates, self.total_updates,
            lambda norm: f"the gradient norm is {norm} in optimizer step {self.updates + 1}; samples: {', '.join(names[:8])}; "
                         "lower optim.lr or resume from the last checkpoint", world_size=self.world.size)
        self.updates += 1
        result.grad_norms.append(norm)
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
        stale_N = torch.tensor([s for w in chunk for s in w.stale], device=device)[sequence_N]
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
        old_N, weight_N = behaviour_N, None
        if self.correction.mode != "none" and any(any(w.stale) for w in chunk):
            old_N, weight_N = self._corrected(chunk, out.logp_N.detach(), behaviour_N, stale_N, mask_N, first_pass)
        loss = policy_loss(self.settings, out.logp_N, old_N, advantage_N, sequence_N, mask_N, ref_logp_N=reference_N,
                           weight_N=weight_N, label_N=label_N, num_labels=len(names), offline_N=offline_N if self._mixes else None)
        if not torch.isfinite(loss.loss):
            raise NonFiniteError(f"the loss is {float(loss.loss)}; samples: {', '.join(w.group.sample.id for w in chunk)}")
        loss.loss.backward()
        for name, stats in zip(names, loss.by_label, strict=True):
            result.sources[name].stats += stats
        result.packed_tokens += batch.num_tokens
        if first_pass:
            self._observe(chunk, (out.logp_N.detach() - behaviour_N).abs(), out.entropy_N, ~offline_N, stale_N, result, fresh)
            if self._asynchronous:
                self._offpolicy["tokens"] += float(mask_N.sum())
                self._offpolicy["stale"] += float((mask_N & stale_N).sum())
        return loss.denominator

    def _with_proximal(self, work: Sequence[_Work], result: UpdateResult) -> list[_Work]:
        """The groups with the log-probs of the weights before the update, which later passes can no longer compute."""
        began, found = time.perf_counter(), []
        with torch.no_grad():
            for chunk, batch in self._packed(work):
                pieces = self.policy.logp(batch, self.config.rollout.temperature).logp_N.split([w.num_tokens for w in chunk])
                found += [replace(w, proximal=tuple(piece.tolist())) for w, piece in zip(chunk, pieces, strict=True)]
        result.logprobs_s += time.perf_counter() - began
        return found

    def _corrected(self, chunk: Sequence[_Work], logp_N: torch.Tensor, behaviour_N: torch.Tensor, stale_N: torch.Tensor,
                   mask_N: torch.Tensor, first_pass: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Old log-probs and weights of decoupled PPO (mmrl.algorithms.behave_weights) where older weights wrote; elsewhere those of
        the rollout, and 1."""
        proximal_N = logp_N
        if not self.one_pass:
            proximal_N = torch.tensor([x for w in chunk for x in w.proximal or ()], device=logp_N.device)
        weight_N, masked_N = behave_weights(self.correction, proximal_N, behaviour_N)
        if first_pass:
            self._offpolicy["weight"] += float(weight_N[mask_N & stale_N].sum())
            self._offpolicy["masked"] += float((masked_N & mask_N & stale_N).sum())
        return torch.where(stale_N, proximal_N, behaviour_N), torch.where(stale_N, weight_N, torch.ones_like(weight_N))

    def _offpolicy_metrics(self) -> dict[str, float]:
        """Of async runs: share of tokens that older weights wrote, and of those the mean weight and the share masked."""
        if not self._asynchronous:
            return {}
        found, stale = self._offpolicy, self._offpolicy["stale"]
        shares = {"train/offpolicy/share": stale / max(found["tokens"], 1.0)}
        if stale and self.correction.mode != "none":
            shares |= {"train/offpolicy/weight": found["weight"] / stale, "train/offpolicy/masked": found["masked"] / stale}
        return shares

    def _observe(self, chunk: Sequence[_Work], gap_N: torch.Tensor, entropy_N: torch.Tensor, own_N: torch.Tensor,
                 stale_N: torch.Tensor, result: UpdateResult, fresh: bool) -> None:
        """Entropy and, while the weights are still the rollout's, the sampler-trainer gap of each group's source, over the
        tokens the policy wrote (`own_N`)."""
        sizes = [w.num_tokens for w in chunk]
        columns = (x.split(sizes) for x in (gap_N, entropy_N, own_N, stale_N))
        for w, gaps, entropies, own, stale in zip(chunk, *columns, strict=True):
            gaps, entropies = gaps[own & ~stale], entropies[own]
            entry = result.sources[w.group.sample.source]
            entry.entropy += float(entropies.sum())
            entry.entropy_tokens += entropies.numel()
            if fresh and gaps.numel():
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
