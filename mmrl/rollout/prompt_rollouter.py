"""The stream of closed groups the trainer consumes: draw prompts, roll out, score, close, replace what taught nothing.

Which prompts a step gets depends only on the seed and on earlier rewards, never on the number of processes or the kind of
schedule: the prompts of a round are offered to the sampler in order of their keys and asked for anew only once all are
offered. So a round may be answered, scored and yielded in waves (config.schedule.wave), for mmrl.training.pipeline to train on the
groups of one while the next is rolled out; serial runs answer it as a whole.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mmrl.algorithms import (
    DynamicSampler,
    SamplerSettings,
    SelectionSettings,
    StepReport,
    Ticket,
    VarianceSelection,
    Verdict,
    needs_contrast,
)
from mmrl.algorithms.group_rewards import (
    GroupOutcome,
    accuracies,
    contrast_settings,
    group_outcome,
    score_origin,
)
from mmrl.config import RunConfig
from mmrl.data.demonstrations import Demonstrations, on_policy
from mmrl.data.sources import LoadedSource, prompt_stream, stop_at_broken_media
from mmrl.diagnostics.timeline import Timeline
from mmrl.distributed.world import World
from mmrl.errors import DataError, MediaError
from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Policy
from mmrl.rollout import Request, RolloutEngine, SamplingSettings
from mmrl.rollout.episodes import Episode, begin, play
from mmrl.rollout.views import changed_prompt
from mmrl.task import Task
from mmrl.types import RewardContext, Rollout, RolloutGroup, Sample, Score, StopReason, Turn
from mmrl.workers.scoring import ScoreJob, Scorer

__all__ = ["GroupIndex", "PromptRollouter", "StepTally", "sampling_settings"]


def sampling_settings(config: RunConfig) -> SamplingSettings:
    """The rollout section as the engine wants it."""
    r = config.rollout
    return SamplingSettings(r.temperature, r.top_p, r.top_k, r.max_new_tokens, r.batch_tokens)


@dataclass(frozen=True)
class _Open:
    """A group about to be answered."""

    group: RolloutGroup
    task: Task
    prompt: Prompt
    demonstrations: tuple[Turn, ...] = ()
    # of a task with an environment: its rollouts, which have begun
    episodes: Sequence[Episode] = ()


@dataclass
class StepTally:
    """What happened while a step's groups were made, on this process (`report` is the same on all)."""

    rollout_s: float = 0.0
    reward_s: float = 0.0
    rollout_tokens: int = 0
    prompt_tokens: int = 0
    report: StepReport | None = None
    failures: list[dict[str, Any]] = field(default_factory=list)
    # every closed group, also those not trained on
    groups: list[RolloutGroup] = field(default_factory=list)
    trained: list[RolloutGroup] = field(default_factory=list)  # those yielded to be trained on
    # by key: score_origin
    origins: dict[tuple[int, int, int], dict[str, Any]] = field(default_factory=dict)
    demonstrations_skipped: int = 0
    # metrics of curriculum and selection, the same on all
    notes: dict[str, float] = field(default_factory=dict)


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
    """Draws, rolls out and scores the groups of one step at a time.

    `exclusive` holds the policy (model, encoder, media) for this thread while it is used here; `tallies` and, for async,
    `states` (what `state_dict` was when a step had ended) are kept by step until the trainer takes them.
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
        self.config, self.policy, self.engine, self.scorer, self.world = (
            config,
            policy,
            engine,
            scorer,
            world,
        )
        self.stream = prompt_stream(config, sources)
        self._task_key = {id(s.task): i for i, s in enumerate(sources)}
        self._config_of = {id(s.task): s.config for s in sources}
        a, d = config.algorithm, config.data.selection
        self.sampler = DynamicSampler(
            SamplerSettings(
                quota=config.train.prompts_per_step,
                max_attempts=a.max_rounds if a.dynamic_sampling else 1,
                carry_share=a.carry_share if a.dynamic_sampling else 0.0,
            )
        )
        self.selection = (
            None
            if d.kind == "none"
            else VarianceSelection(
                SelectionSettings(
                    kind=d.kind,
                    threshold=d.threshold,
                    replay_share=d.replay_share,
                    memory=d.memory,
                    momentum=d.momentum,
                    rest=d.rest,
                )
            )
        )
        self.demonstrations = Demonstrations(config, policy, sources)
        self.tally = StepTally()
        self.tallies: dict[int, StepTally] = {}
        self.states: dict[int, dict[str, Any]] = {}
        self.exclusive: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.timeline = Timeline()

    def groups(self, step: int) -> Iterator[RolloutGroup]:
        """Closed, scored groups of `step` for this process; `self.tally` counts and times what was done."""
        tally = self.tally = self.tallies[step] = StepTally()
        # async: media of steps still being trained come from the cache again
        with self.exclusive():
            self.policy.encoder.visuals.unpin()
        if self.stream.begin_step(step, self.config.train.steps):
            self.sampler.retain(self.stream.allows)
        self.sampler.begin_step(step)
        if self.selection is not None:
            self.selection.begin_step(step, self.config.train.prompts_per_step)
        draw = self._next
        while tickets := self.sampler.ask(draw):
            draw = self._replacement
            local = [t for t in tickets if t.key[1] % self.world.size == self.world.rank]
            self._look_ahead(local)
            asked = {t.key: t for t in tickets}
            for wave in self._waves(local):
                closed = self._close(wave, step)
                kept = self._kept(closed, asked)
                tally.groups += closed
                tally.trained += kept
                yield from kept
        tally.report = self.sampler.end_step()
        tally.notes = self._notes()
        # the next step begins before this one is trained and saved
        if self.config.schedule.kind == "async":
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
        """Offer a group to the sampler, and to the selection when there is one; the same on every process."""
        keep = outcome.signal
        if self.selection is not None and outcome.rewards is not None:
            strength = self.selection.strength(outcome.rewards, outcome.low, outcome.high)
            self.selection.observe(ticket.source, ticket.sample_id, strength)
            keep = keep and self.selection.keeps(strength)
        return self.sampler.offer(outcome.key, outcome.judged, top=outcome.top, keep=keep)

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

    def _close(self, tickets: Sequence[Ticket], step: int) -> list[RolloutGroup]:
        """Roll out and score the tickets; a prompt that cannot be encoded gives a group with an error."""
        groups: list[RolloutGroup] = []
        ready: list[_Open] = []
        with ExitStack() as begun:  # whatever ends the wave, no environment stays open
            for ticket in tickets:
                with self.exclusive():
                    opened = self._open(ticket, step, begun)
                if isinstance(opened, RolloutGroup):
                    groups.append(opened)
                else:
                    ready.append(opened)
            written = self._answers(
                ready, [self.demonstrations.rollouts(len(o.demonstrations)) for o in ready], 3, step
            )
        closed = [replace(o.group, rollouts=found) for o, found in zip(ready, written, strict=True)]
        closed = self._mixed(closed, ready, step)
        for group, opened in zip(closed, ready, strict=True):
            self.tally.origins[group.key] = score_origin(
                self._config_of[id(opened.task)], opened.prompt.images, opened.prompt.videos
            ) | ({"environment": True} if opened.episodes else {})
        return sorted([*groups, *self._contrasted(closed, ready, step)], key=lambda g: g.key)

    def _open(self, ticket: Ticket, step: int, begun: ExitStack) -> _Open | RolloutGroup:
        """The ticket's group with its encoded prompt; the group alone, with an error, when it cannot be encoded. Its episodes are
        closed by the end of `begun`."""
        sample, task = self.stream.find(ticket.source, ticket.sample_id)
        try:
            episodes = begin(
                self.policy,
                sample,
                task,
                self.demonstrations.rollouts(0),
                (self.config.seed, 3, *ticket.key),
                begun=begun,
            )
            prompt = next(
                (e.prompt for e in episodes if e.prompt is not None), None
            ) or self.policy.encoder(sample, task)
            # until the next step begins
            self.policy.encoder.visuals.pin(prompt.visuals, self.policy.tower())
        except (MediaError, DataError) as error:
            stop_at_broken_media(error, sample, self.config.data.on_error)
            group = RolloutGroup(
                sample, (), key=ticket.key, error=f"{type(error).__name__}: {error}"
            )
            self.tally.failures.append(
                {"step": step, "source": sample.source, "id": sample.id, "reason": group.error}
            )
            return group
        return _Open(
            RolloutGroup(sample, (), fingerprint=prompt.fingerprint, key=ticket.key),
            task,
            prompt,
            self._demonstrations(sample, task, prompt, ticket, step),
            episodes,
        )

    def _demonstrations(
        self, sample: Sample, task: Task, prompt: Prompt, ticket: Ticket, step: int
    ) -> tuple[Turn, ...]:
        """What somebody else wrote for this prompt, if demonstrations are wanted in this step; the unusable are recorded."""
        if not self.demonstrations.active(step):
            return ()
        chosen, skipped = self.demonstrations.choose(
            sample, task, ticket.key, self.context(prompt, step, StopReason.EOS, 0)
        )
        self.tally.demonstrations_skipped += len(skipped)
        self.tally.failures += [
            {"step": step, "source": sample.source, "id": sample.id, "reason": reason}
            for reason in skipped
        ]
        return chosen

    def _mixed(
        self, closed: Sequence[RolloutGroup], ready: Sequence[_Open], step: int
    ) -> list[RolloutGroup]:
        """The groups with their scored demonstrations, where there are any and they are wanted."""
        groups = list(closed)
        asked = [
            i
            for i, o in enumerate(ready)
            if o.demonstrations and self.demonstrations.wanted(groups[i])
        ]
        scored = (
            self._scores([self._jobs(ready[i], ready[i].demonstrations, step) for i in asked])
            if asked
            else []
        )
        for i, scores in zip(asked, scored, strict=True):
            groups[i] = self.demonstrations.mix(groups[i], ready[i].demonstrations, scores)
        return groups

    def _scores(self, jobs: list[list[ScoreJob]]) -> list[list[Score]]:
        began = time.perf_counter()
        with self.timeline.span("reward", "rollout"):
            scored = self.scorer.score_groups(jobs)
        self.tally.reward_s += time.perf_counter() - began
        return scored

    def _jobs(self, opened: _Open, completions: Sequence[Turn], step: int) -> list[ScoreJob]:
        return [
            ScoreJob(
                self._task_key[id(opened.task)],
                opened.group.sample,
                c.text,
                self.context(opened.prompt, step, c.stop, len(c.token_ids)),
            )
            for c in completions
        ]

    def _look_ahead(self, tickets: Sequence[Ticket]) -> None:
        """Tell the media workers what is asked for now, and what the stream draws next; a wrong guess costs only their time."""
        ahead = self.policy.encoder.ahead
        if ahead is None:
            return
        stream = copy.copy(self.stream)
        stream.taken = list(stream.taken)
        coming = [stream.draw()[0] for _ in range(self.config.train.prompts_per_step)]
        with self.exclusive():
            ahead.forget()
            ahead.expect(
                [self.stream.find(t.source, t.sample_id)[0] for t in tickets]
                + coming[self.world.rank :: self.world.size]
            )

    def _answers(
        self, ready: Sequence[_Open], counts: Sequence[int], noise: int, step: int
    ) -> list[tuple[Rollout, ...]]:
        """So many scored completions of each prompt; `noise` tells their random numbers from those of other rollouts. Tasks with an
        environment are played instead."""
        played = iter(self._played([o for o in ready if o.episodes], step))
        plain = [(o, n) for o, n in zip(ready, counts, strict=True) if not o.episodes]
        written = iter(self._completions([o for o, _ in plain], [n for _, n in plain], noise, step))
        return [next(played) if o.episodes else next(written) for o in ready]

    def _played(self, ready: Sequence[_Open], step: int) -> list[tuple[Rollout, ...]]:
        """The rollouts of tasks with an environment; those that failed are recorded."""
        if not ready:
            return []
        with self.exclusive(), self.timeline.span("infer", "rollout", step=step):
            began = time.perf_counter()
            found = play(
                self.policy,
                self.engine,
                [o.episodes for o in ready],
                sampling_settings(self.config),
            )
            self.tally.rollout_s += time.perf_counter() - began
        for opened, rollouts in zip(ready, found, strict=True):
            turns = [t for r in rollouts for t in r.turns]
            self.tally.prompt_tokens += opened.prompt.length + sum(
                t.prompt.length for r in rollouts for t in r.turns[1:]
            )
            self.tally.rollout_tokens += sum(len(t.token_ids) for t in turns)
            sample = opened.group.sample
            self.tally.failures += [
                {"step": step, "source": sample.source, "id": sample.id, "reason": r.error}
                for r in rollouts
                if r.error is not None
            ]
        return found

    def _completions(
        self, ready: Sequence[_Open], counts: Sequence[int], noise: int, step: int
    ) -> list[tuple[Rollout, ...]]:
        """So many scored completions of each prompt."""
        requests = [
            Request(o.prompt, n, (self.config.seed, noise, *o.group.key))
            for o, n in zip(ready, counts, strict=True)
        ]
        completions: list[list[Turn]] = []
        if requests:
            with self.exclusive(), self.timeline.span("infer", "rollout", step=step):
                began = time.perf_counter()
                completions = self.engine.generate(requests, sampling_settings(self.config))
                self.tally.rollout_s += time.perf_counter() - began
        scored = self._scores(
            [self._jobs(o, cs, step) for o, cs in zip(ready, completions, strict=True)]
        )
        self.tally.prompt_tokens += sum(o.prompt.length for o in ready)
        self.tally.rollout_tokens += sum(len(c.token_ids) for cs in completions for c in cs)
        return [
            tuple(Rollout((c,), s) for c, s in zip(cs, scores, strict=True))
            for cs, scores in zip(completions, scored, strict=True)
        ]

    def _contrasted(
        self, closed: Sequence[RolloutGroup], ready: Sequence[_Open], step: int
    ) -> list[RolloutGroup]:
        """The groups with rollouts on a changed view of their input, where there is one and it can matter."""
        c, groups = self.config.algorithm.contrast, list(closed)
        if c.kind == "none":
            return groups
        asked: list[tuple[int, _Open]] = []
        for number, (group, opened) in enumerate(zip(closed, ready, strict=True)):
            with self.exclusive():
                changed = changed_prompt(
                    self.policy.encoder,
                    group.sample,
                    opened.task,
                    opened.prompt,
                    c.kind,
                    (self.config.seed, 19, *group.key),
                    2 if c.unit == "pairs" else 1,
                )
            if changed is None:
                continue
            probe = not c.skip or bool(
                np.random.default_rng((self.config.seed, 23, *group.key)).random() < c.measure
            )
            top = max(1.0, opened.task.member(group.sample.task).value_range[1])
            if probe or needs_contrast(
                accuracies(on_policy(group.rollouts)), contrast_settings(self.config), top=top
            ):
                try:  # features of the plain view may have been enough so far: a changed one may need the pixels again
                    with self.exclusive():
                        self.policy.encoder.visuals.pin(changed.visuals, self.policy.tower())
                except MediaError as error:
                    stop_at_broken_media(error, group.sample, self.config.data.on_error)
                    self.tally.failures.append(
                        {
                            "step": step,
                            "source": group.sample.source,
                            "id": group.sample.id,
                            "reason": f"no {c.kind} view: MediaError: {error}",
                        }
                    )
                    continue
                asked.append((number, replace(opened, prompt=changed)))
            groups[number] = replace(group, view=c.kind, probe=probe)
        count = c.group_size or max(1, self.config.rollout.group_size // 2)
        written = self._answers([o for _, o in asked], [count] * len(asked), 4, step)
        for (number, _), found in zip(asked, written, strict=True):
            groups[number] = replace(groups[number], contrast=found)
        return groups

    def context(
        self, prompt: Prompt, step: int, stop: StopReason, num_tokens: int
    ) -> RewardContext:
        """What the reward of a completion written at `step` may know."""
        return RewardContext(
            step,
            self.config.train.steps,
            self.policy.template.frame,
            prompt.images,
            stop,
            num_tokens,
            self.config.rollout.max_new_tokens,
            prompt.videos,
        )

    def state_dict(self) -> dict[str, Any]:
        """Stream position, carry-over queue and replay memory, as JSON values."""
        return {
            "stream": self.stream.state_dict(),
            "sampler": self.sampler.state_dict(),
            "selection": self.selection.state_dict() if self.selection is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.stream.load_state_dict(state["stream"])
        self.sampler.load_state_dict(state["sampler"])
        if self.selection is not None:
            self.selection.load_state_dict(state["selection"])
