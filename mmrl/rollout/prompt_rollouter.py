"""The stream of closed groups the trainer consumes: draw prompts, roll out, score, close, replace what taught nothing.

Which prompts a step gets depends only on the seed and on earlier rewards, never on the number of processes or the kind of
schedule: the prompts of a round are submitted to the sampler in order of their keys and new ones requested only once all are
submitted. So a round may be answered, scored and yielded in waves (config.schedule.wave), for mmrl.training.pipeline to train on
the groups of one while the next is rolled out; serial runs answer it as a whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmrl.algorithms import (
    DynamicSampler,
    SamplerSettings,
    Ticket,
    VarianceSelection,
    Verdict,
)
from mmrl.algorithms.group_rewards import GroupOutcome, group_outcome
from mmrl.config import RunConfig
from mmrl.data.demonstrations import on_policy
from mmrl.data.sources import LoadedSource, prompt_stream
from mmrl.distributed.world import World
from mmrl.policy.policy import Policy
from mmrl.rollout import RolloutEngine
from mmrl.rollout.group_generator import GroupGenerator, StepTally
from mmrl.rollout.trees import shared_turns
from mmrl.types import RolloutGroup
from mmrl.workers.scorer import Scorer

__all__ = ["GroupIndex", "PromptRollouter"]


class GroupIndex:
    """(place, version of the weights) of each group, for mmrl.training.pipeline.IteratorSource: places count the groups of a step
    as they come, which is always the same order. A completion's policy_version is that of the step the weights begin: one more."""

    def __init__(self) -> None:
        self._step, self._count = 0, 0

    def __call__(self, group: RolloutGroup) -> tuple[int, int]:
        """Called once for each group, in order."""
        step = group.key[0]
        self._count = self._count + 1 if step == self._step else 0
        self._step = step
        oldest = min((r.oldest_version(step) for r in on_policy(group.rollouts)), default=step)
        return self._count, oldest - 1


class PromptRollouter:
    """Draws the prompts of one step at a time, has a GroupGenerator answer them, and says which groups are trained on.

    `tallies` and, for async, `states` (what `state_dict` was when a step had ended) are kept by step until the trainer takes them.
    `known` are groups of the steps to come that were rolled out before, by a rollouter that was lost: they are not made again.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        engine: RolloutEngine,
        scorer: Scorer,
        sources: Sequence[LoadedSource],
        world: World,
    ) -> None:
        self.config, self.world = config, world
        self.stream = prompt_stream(config, sources)
        self.generator = GroupGenerator(config, policy, engine, scorer, sources, self.stream)
        a, d = config.algorithm, config.data.selection
        self.sampler = DynamicSampler(
            SamplerSettings(
                quota=config.train.prompts_per_step,
                max_attempts=a.max_rounds if a.dynamic_sampling else 1,
                carry_share=a.carry_share if a.dynamic_sampling else 0.0,
            )
        )
        self.selection = None if d.kind == "none" else VarianceSelection(d)
        self.tally = StepTally()
        self.tallies: dict[int, StepTally] = {}
        self.states: dict[int, dict[str, Any]] = {}
        self.keeps_states = config.schedule.kind == "async"
        self.known: dict[tuple[int, int, int], RolloutGroup] = {}

    def groups(self, step: int) -> Iterator[RolloutGroup]:
        """Closed, scored groups of `step` for this process; `self.tally` counts and times what was done."""
        tally = self.tally = self.tallies[step] = StepTally()
        self.generator.begin_step(step, tally)
        if self.stream.begin_step(step, self.config.train.steps):
            self.sampler.retain(self.stream.allows)
        self.sampler.begin_step(step)
        replaying = self.generator.replaying
        replaying.pool.begin_step(step)
        if self.selection is not None:
            self.selection.begin_step(step, self.config.train.prompts_per_step)
        draw, closed = self._next, list[RolloutGroup]()
        while tickets := self.sampler.request(draw):
            draw = self._replacement
            local = [t for t in tickets if t.key[1] % self.world.size == self.world.rank]
            self._look_ahead(local)
            asked = {t.key: t for t in tickets}
            for wave in self._waves(local):
                fresh = [t for t in wave if t.key not in self.known]
                made = self.generator.generate(fresh) if fresh or not wave else []
                again = [self.known.pop(t.key) for t in wave if t.key in self.known]
                kept = self._kept(sorted([*made, *again], key=lambda g: g.key), asked)
                # others count what is known
                told = {g.key for g in again}
                tally.groups += made
                closed += made
                tally.trained += [g for g in kept if g.key not in told]
                yield from kept
        tally.report = self.sampler.end_step()
        tally.notes = self._notes()
        if replaying.pool.active:
            tally.notes |= replaying.gathered(closed, self.world.gather)
        if self.config.rollout.tree.roots:
            tally.notes |= shared_turns(closed, self.world.gather)
        # the next step begins before this one is trained and saved
        if self.keeps_states:
            self.states[step] = copy.deepcopy(self.state_dict())

    def _waves(self, tickets: Sequence[Ticket]) -> list[Sequence[Ticket]]:
        """The tickets of a round that are answered together, in order of their keys; all at once in serial runs."""
        s = self.config.schedule
        if s.kind == "serial":
            return [tickets]  # also when there are none: every process takes part in judging
        size = s.wave or max(1, self.config.train.prompts_per_step // 8)
        return [tickets[i : i + size] for i in range(0, len(tickets), size)]

    def _kept(
        self, closed: Sequence[RolloutGroup], asked: Mapping[tuple[int, int, int], Ticket]
    ) -> list[RolloutGroup]:
        """Those of the closed groups that are trained on."""
        outcomes = [
            group_outcome(g, self.config, self.stream.find(g.sample.source, g.sample.id)[1])
            for g in closed
        ]
        verdicts = {
            o.key: self._judge(o, asked[o.key])
            for o in sorted(self.world.gather(outcomes), key=lambda o: o.key)
        }
        keep_all = not self.config.algorithm.dynamic_sampling
        return [
            g
            for g in closed
            if verdicts[g.key] is Verdict.KEPT
            or (keep_all and verdicts[g.key] is not Verdict.FAILED)
        ]

    def _judge(self, outcome: GroupOutcome, ticket: Ticket) -> Verdict:
        """Submit a group to the sampler, and show it to the selection when there is one; the same on every process."""
        keep = outcome.signal
        if self.selection is not None and outcome.rewards is not None:
            strength = self.selection.strength(outcome.rewards, outcome.low, outcome.high)
            self.selection.observe(ticket.source, ticket.sample_id, strength)
            keep = keep and self.selection.keeps(strength)
        return self.sampler.submit(outcome.key, outcome.judged, top=outcome.top, keep=keep)

    def _next(self) -> tuple[str, str]:
        sample, _ = self.stream.draw()
        return sample.source, sample.id

    def _replacement(self) -> tuple[str, str]:
        """A prompt for a place whose group was not kept: from the selection's memory if it has one, else from the stream."""
        return (self.selection and self.selection.replay(self.stream.allows)) or self._next()

    def _notes(self) -> dict[str, float]:
        """Metrics of curriculum and selection for the step's row."""
        staged = (
            {"train/curriculum/stage": float(self.stream.stage)}
            if self.config.data.curriculum
            else {}
        )
        selected = self.selection.metrics() if self.selection is not None else {}
        skipped = (
            {"train/offline/skipped": self.world.sum([float(self.tally.demonstrations_skipped)])[0]}
            if self.config.algorithm.offline.per_group
            else {}
        )
        return {
            **staged,
            **{f"train/selection/{k}": float(v) for k, v in selected.items()},
            **skipped,
        }

    def _look_ahead(self, tickets: Sequence[Ticket]) -> None:
        """Tell the media workers what is asked for now, and what the stream draws next; a wrong guess costs only their time."""
        ahead = self.generator.policy.encoder.ahead
        if ahead is None:
            return
        stream = copy.copy(self.stream)
        stream.taken = list(stream.taken)
        coming = [stream.draw()[0] for _ in range(self.config.train.prompts_per_step)]
        with self.generator.exclusive():
            ahead.forget()
            ahead.expect(
                [self.stream.find(t.source, t.sample_id)[0] for t in tickets]
                + coming[self.world.rank :: self.world.size]
            )

    def state_dict(self) -> dict[str, Any]:
        """Stream position, carry-over queue, replay memory and experience pool, as JSON values."""
        pool = self.generator.replaying.pool
        return {
            "stream": self.stream.state_dict(),
            "sampler": self.sampler.state_dict(),
            "selection": self.selection.state_dict() if self.selection is not None else None,
            **({"replay": pool.state_dict()} if pool.active else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.stream.load_state_dict(state["stream"])
        self.sampler.load_state_dict(state["sampler"])
        if self.selection is not None:
            self.selection.load_state_dict(state["selection"])
        self.generator.replaying.pool.load_state_dict(state.get("replay", ()))
