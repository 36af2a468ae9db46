"""One GRPO update: advantages per group, packed micro-batches, gradients summed and scaled once, AdamW.

`run` trains on the groups of a step at once. `begin`, `add` and `finish` (mmrl.pipeline.Learner) are its pieces: in pipelined
and async runs a group is a micro-batch of its own, trained on when it is added; with several passes over a step, or advantages
that compare groups, it is kept for `finish`, as in serial runs, whose micro-batches hold several groups.

Forwards, gradients and optimizer steps are the training engine's (mmrl.engines). Where forwards are collective, processes agree
on the number of micro-batches of an optimizer step beforehand, and who has fewer runs idle ones.

Legend: N completion tokens, B sequences of a micro-batch.
"""
from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mmrl.algorithms import (
    EntropyBonus,
    EntropySettings,
    LossStats,
    ObjectiveSettings,
    OfflineSettings,
    denominator,
    policy_loss,
    trajectory_in_loss,
)
from mmrl.config import RunConfig
from mmrl.credit import Credit
from mmrl.data import PromptStream
from mmrl.engines.base import TrainEngine
from mmrl.engines.lockstep import Losses, agree, idle_item
from mmrl.errors import MismatchError
from mmrl.group_rewards import usable
from mmrl.offpolicy import OffPolicy
from mmrl.policy.pack import Batch, PackItem, micro_batches, pack, pack_padded
from mmrl.policy.policy import LogpResult, Policy
from mmrl.types import RolloutGroup
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

    group: RolloutGroup
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

    def share(self, settings: ObjectiveSettings) -> float:
        """The group's share of the denominator, known before its loss."""
        lengths_B = torch.tensor([len(c) for c in self.item.completions])
        sequence_N = torch.arange(len(lengths_B)).repeat_interleave(lengths_B)
        return denominator(settings, sequence_N, torch.tensor(self.in_loss)[sequence_N])


class Updater:
    """Turns the groups of a step into optimizer steps of a training engine."""

    def __init__(self, config: RunConfig, policy: Policy, engine: TrainEngine, stream: PromptStream, world: World) -> None:
        self.config, self.policy, self.engine, self.stream, self.world = config, policy, engine, stream, world
        self.settings = objective_settings(config)
        self._mixes = config.algorithm.offline.per_group > 0
        self.credit = Credit(config, world, lambda sample: stream.find(sample.source, sample.id)[1].member(sample.task).headline)
        self.updates = 0  # optimizer steps taken, drives the learning rate
        a = config.algorithm
        self.total_updates = config.train.steps * a.epochs * a.minibatches
        self.offpolicy = OffPolicy(config)
        self.on_weights: Callable[[], Any] = lambda: None  # called when a step has changed them, while the policy is held
        self._version = 0  # of the weights a step begins with, as completions name it
        self._result = UpdateResult()
        self._collected: list[RolloutGroup] = []
        self._names: list[str] = []  # of the samples trained on as they came
        self.losses = Losses(engine, world)
        e = a.entropy
        self.entropy = EntropyBonus(EntropySettings(coef=e.coef, target=e.target, delta=e.delta, low=e.coef_min, high=e.coef_max))
        self._entropy_seen = [0.0, 0.0]  # sum of entropies and tokens of the optimizer step, this process

    @property
    def one_pass(self) -> bool:
        """Whether a step is one optimizer step."""
        return self.config.algorithm.epochs == self.config.algorithm.minibatches == 1

    @property
    def streams(self) -> bool:
        """Whether a group is trained on when it is added."""
        return self.config.schedule.kind != "serial" and self.one_pass and not self.credit.looks_beyond_groups

    def run(self, groups: Sequence[RolloutGroup]) -> UpdateResult:
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
        self.offpolicy.begin()
        if self.streams:
            self.engine.begin()

    def add(self, group: RolloutGroup) -> None:
        """Train on a closed group, or keep it for `finish` (see the module). Raises MismatchError and NonFiniteError."""
        if not self.streams:
            self._collected.append(group)
            return
        began, result = time.perf_counter(), self._result
        work = self._prepare(group, self.credit.assign([group])[group.key])
        result.denominator += self._accumulate([work], result, [[0]], first_pass=True, fresh=True)
        self._names.append(group.sample.id)
        result.update_s += time.perf_counter() - began

    def finish(self) -> UpdateResult:
        """Scale and clip the gradients, take the optimizer steps. Raises MismatchError and NonFiniteError.

        Outside serial runs the weights get the next version here, while the policy is still held.
        """
        began, result = time.perf_counter(), self._result
        if self.streams:
            total, result.denominator = self.world.sum([result.denominator])[0], 0.0
            self._apply(total, self._names, result)
        else:
            self._train_on_all(self._collected, result)
        result.credit = {**self.credit.metrics(), **self.offpolicy.metrics(self.world), **self.entropy.metrics()}
        self._collected = []
        if self.config.schedule.kind != "serial":
            self.policy.publish()
        result.update_s += time.perf_counter() - began - result.logprobs_s
        self.on_weights()
        return self._reduce(result)

    def _train_on_all(self, groups: Sequence[RolloutGroup], result: UpdateResult) -> None:
        if self.config.schedule.kind != "serial":  # groups may come in any order: that of serial runs, round by round
            groups = sorted(groups, key=lambda g: (g.key[2], g.key[1]))
        with self.world.telling():
            advantages = self.credit.assign(groups)
            work = [self._prepare(g, advantages[g.key]) for g in groups]
        if not self.one_pass and self.offpolicy.corrects(any(any(w.stale) for w in work)):
            work = self._with_proximal(work, result)
        for epoch in range(self.config.algorithm.epochs):
            for number, part in enumerate(self._minibatches(work)):
                self._optimizer_step(part, result, first_pass=epoch == 0, fresh=epoch == 0 and number == 0)

    def _prepare(self, group: RolloutGroup, advantages_G: tuple[float, ...]) -> _Work:
        sample, task = self.stream.find(group.sample.source, group.sample.id)
        turns = [t.turns[0] for t in group.rollouts]
        in_loss_G = tuple(good and trajectory_in_loss(t, self.config.algorithm.overlong)
                          for t, good in zip(group.rollouts, usable(group), strict=True))
        return _Work(group, PackItem(self.policy.encoder(sample, task), tuple(c.token_ids for c in turns)), advantages_G,
                     in_loss_G, tuple(c.logps for c in turns), tuple(t.offline for t in group.rollouts),
                     tuple(self.offpolicy.asynchronous and not t.offline and c.policy_version < self._version
                           for t, c in zip(group.rollouts, turns, strict=True)))

    def _minibatches(self, work: Sequence[_Work]) -> list[list[_Work]]:
        """Split by place in the step, so that every process takes part in the same optimizer steps."""
        places, parts = self.config.train.prompts_per_step, self.config.algorithm.minibatches
        split: list[list[_Work]] = [[] for _ in range(parts)]
        for w in work:
            split[w.group.key[1] * parts // places].append(w)
        return split

    def _optimizer_step(self, work: Sequence[_Work], result: UpdateResult, *, first_pass: bool,
                        fresh: bool) -> None:
        plan, total = self._plan(work), None
        if self.engine.lockstep:
            idle, total = self._agree(plan, work)
            plan += [[]] * idle
        self.engine.begin(total)
        share = self._accumulate(work, result, plan, first_pass=first_pass, fresh=fresh)
        self._apply(self.world.sum([share])[0] if total is None else total, [w.group.sample.id for w in work], result)

    def _plan(self, work: Sequence[_Work]) -> list[list[int]]:
        """Numbers of the groups of each micro-batch, which are within the token budget."""
        return list(micro_batches([w.item for w in work], self.config.train.token_budget))

    def _agree(self, plan: Sequence[Sequence[int]], work: Sequence[_Work]) -> tuple[int, float]:
        """How many idle micro-batches this process adds to its plan, and the denominator of all processes. Collective.

        What is wrong with the prompts is said here, to all: inside a forward the others would wait for this process.
        """
        with self.world.telling():
            self._compare_inputs(work, [w.item.prompt.fingerprint for w in work])
            for w in work:
                self.policy.encoder.visuals.lease(w.item.prompt.visuals, self.policy.tower())
        count, total = agree(self.world, len(plan), sum(w.share(self.settings) for w in work))
        return count - len(plan), total

    def _packed(self, work: Sequence[_Work], plan: Sequence[Sequence[int]]) -> Iterator[tuple[list[_Work], Batch]]:
        """The micro-batches of a plan; one without groups is idle."""
        packer = pack if self.config.train.forward == "shared" else pack_padded
        for indices in plan:
            chunk = [work[i] for i in indices]
            yield chunk, packer([w.item for w in chunk] or [idle_item(self.policy.eos_ids[0])])

    def _accumulate(self, work: Sequence[_Work], result: UpdateResult, plan: Sequence[Sequence[int]], *, first_pass: bool,
                    fresh: bool) -> float:
        """Forward and backward; returns the groups' share of the denominator."""
        share = 0.0
        for number, (chunk, batch) in enumerate(self._packed(work, plan), 1):
            if first_pass and chunk:
                self._compare_inputs(chunk, batch.fingerprints)
            backward = self._backward if chunk else self._idle
            share += backward(chunk, batch, result, first_pass, fresh, number == len(plan))
        return share

    def _apply(self, total: float, names: Sequence[str], result: UpdateResult) -> None:
        """One optimizer step of the gradients summed so far, divided by the denominator of all processes."""
        norm, result.lr = self.engine.step(
            total, self.updates, self.total_updates, lambda norm: self._failure(norm, names))
        self.updates += 1
        if self.entropy.adaptive:
            self.entropy.observe(*self.world.sum(self._entropy_seen))
            self._entropy_seen = [0.0, 0.0]
        result.grad_norms.append(norm)
        result.denominator += total

    def _failure(self, norm: float, names: Sequence[str]) -> str:
        """What is wrong with the gradients."""
        return (f"{self.losses.said()}the gradient norm is {norm} in optimizer step {self.updates + 1}; samples: "
                f"{', '.join(names[:8])}; lower optim.lr or resume from the last checkpoint")

    def _compare_inputs(self, chunk: Sequence[_Work], fingerprints: Sequence[str]) -> None:
        for w, seen in zip(chunk, fingerprints, strict=True):
            if seen != w.group.fingerprint:
                raise MismatchError(
                    f"sample {w.group.sample.id}: rollout saw tensors {w.group.fingerprint}, training is about to see "
                    f"{seen}; the picture or the processor changed during the run: restore it, or resume")

    def _backward(self, chunk: Sequence[_Work], batch: Batch, result: UpdateResult, first_pass: bool,
                  fresh: bool, last: bool) -> float:
        device = self.policy.device
        sequence_N = batch.sequence_N.to(device)
        advantage_N = torch.tensor([a for w in chunk for a in w.advantages], device=device)[sequence_N]
        mask_N = torch.tensor([m for w in chunk for m in w.in_loss], device=device)[sequence_N]
        behaviour_N = torch.tensor([x for w in chunk for lps in w.behaviour for x in lps], device=device)
        offline_N = torch.tensor([o for w in chunk for o in w.offline], device=device)[sequence_N]
        stale_N = torch.tensor([s for w in chunk for s in w.stale], device=device)[sequence_N]
        reference_N, out = self._forward(batch, result)
        names = sorted({w.group.sample.source for w in chunk})
        label_N = torch.tensor([names.index(w.group.sample.source) for w in chunk for _ in w.advantages],
                               device=device)[sequence_N]
        old_N, weight_N = behaviour_N, None
        if self.offpolicy.corrects(any(any(w.stale) for w in chunk)):
            proximal_N = out.logp_N.detach()
            if not self.one_pass:
                proximal_N = torch.tensor([x for w in chunk for x in w.proximal or ()], device=device)
            old_N, weight_N = self.offpolicy.correct(proximal_N, behaviour_N, stale_N, ~offline_N, mask_N, count=first_pass)
        loss = policy_loss(self.settings, out.logp_N, old_N, advantage_N, sequence_N, mask_N, ref_logp_N=reference_N,
                           weight_N=weight_N, label_N=label_N, num_labels=len(names), offline_N=offline_N if self._mixes else None,
                           entropy_N=out.entropy_N, entropy_coef=self.entropy.coefficient)
        samples = ", ".join(w.group.sample.id for w in chunk)
        self.engine.backward(self.losses.finite(loss.loss, f"; samples: {samples}"), last=last)
        for name, stats in zip(names, loss.by_label, strict=True):
            result.sources[name].stats += stats
        result.packed_tokens += batch.num_tokens
        if self.entropy.adaptive:
            seen_M = out.entropy_N.detach()[mask_N & ~offline_N].double()
            self._entropy_seen = [self._entropy_seen[0] + float(seen_M.sum()), self._entropy_seen[1] + seen_M.numel()]
        if first_pass:
            self._observe(chunk, (out.logp_N.detach() - behaviour_N).abs(), out.entropy_N.detach(), ~offline_N, stale_N, result,
                          fresh)
            self.offpolicy.observe(stale_N, mask_N)
        return loss.denominator

    def _idle(self, chunk: Sequence[_Work], batch: Batch, result: UpdateResult, first_pass: bool, fresh: bool, last: bool) -> float:
        """What `_backward` runs, for another process that has groups left: nothing is added to gradients or metrics."""
        _, out = self._forward(batch, result)
        self.engine.backward((out.logp_N.sum() + out.entropy_N.sum()) * 0.0, last=last)
        return 0.0

    def _forward(self, batch: Batch, result: UpdateResult) -> tuple[torch.Tensor | None, LogpResult]:
        """Log-probs of the reference, where there is a KL term, and of the policy."""
        reference_N = None
        if self.settings.kl_coef > 0:
            began = time.perf_counter()
            with torch.no_grad(), self.policy.reference():
                reference_N = self._logp(batch).logp_N
            result.logprobs_s += time.perf_counter() - began
        return reference_N, self._logp(batch, entropy_gradient=self.entropy.coefficient > 0)

    def _logp(self, batch: Batch, *, entropy_gradient: bool = False) -> LogpResult:
        def forward() -> tuple[torch.Tensor, ...]:
            found = self.policy.logp(batch, self.config.rollout.temperature, entropy_gradient=entropy_gradient)
            return found.logp_N, found.entropy_N

        return LogpResult(*self.engine.run(forward))

    def _with_proximal(self, work: Sequence[_Work], result: UpdateResult) -> list[_Work]:
        """The groups with the log-probs of the weights before the update, which later passes can no longer compute."""
        began, found = time.perf_counter(), []
        plan = self._plan(work)
        if self.engine.lockstep:
            plan += [[]] * self._agree(plan, work)[0]
        with torch.no_grad():
            for chunk, batch in self._packed(work, plan):
                logp_N = self._logp(batch).logp_N
                pieces = logp_N.split([w.num_tokens for w in chunk]) if chunk else ()
                found += [replace(w, proximal=tuple(piece.tolist())) for w, piece in zip(chunk, pieces, strict=True)]
        result.logprobs_s += time.perf_counter() - began
        return found

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
