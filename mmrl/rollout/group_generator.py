"""Closed groups of prompts: encode, roll out, score, mix demonstrations in, roll out again on a changed input.

    generator = GroupGenerator(config, policy, engine, scorer, sources, stream)
    generator.begin_step(1, StepTally())
    groups = generator.generate(tickets)          # of mmrl.algorithms.DynamicSampler

Which prompts a step gets, and which of their groups are trained on, is mmrl.rollout.prompt_rollouter's to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np

from mmrl.algorithms import StepReport, Ticket, needs_contrast
from mmrl.algorithms.group_rewards import accuracies, contrast_settings, score_origin
from mmrl.config import RunConfig
from mmrl.data.demonstrations import Demonstrations, on_policy
from mmrl.data.sources import LoadedSource, PromptStream, stop_at_broken_media
from mmrl.diagnostics.timeline import Timeline
from mmrl.errors import DataError, MediaError
from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Policy
from mmrl.rollout import Request, RolloutEngine, SamplingSettings
from mmrl.rollout.episodes import Beginning, Episode, Spent, begin, begin_groups, play
from mmrl.rollout.replaying import Replaying
from mmrl.rollout.trees import waves
from mmrl.rollout.views import changed_prompt
from mmrl.task import Task
from mmrl.types import RewardContext, Rollout, RolloutGroup, Sample, Score, StopReason, Turn
from mmrl.workers.scorer import Scorer
from mmrl.workers.scoring import ScoreJob

__all__ = ["GroupGenerator", "StepTally", "sampling_settings"]

_FILMED_STEPS = 16  # of a run, about, from which the pictures of some rollouts are kept


def sampling_settings(config: RunConfig) -> SamplingSettings:
    """The rollout section as the engine wants it."""
    r = config.rollout
    return SamplingSettings(
        r.temperature,
        r.top_p,
        r.top_k,
        r.max_new_tokens,
        r.batch_tokens,
        routed_experts=config.algorithm.router_replay.mode == "R3",
    )


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
    # resets and steps of environments, beyond `rollout_s`
    environment_s: float = 0.0
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

    def take(self) -> StepTally:
        """What was counted so far, which is forgotten here: for the tally that another process keeps of the step."""
        taken = replace(self)
        for own, blank in zip(fields(self), vars(StepTally()).values(), strict=True):
            setattr(self, own.name, blank)
        return taken

    def add(self, later: StepTally) -> None:
        """Count what `later` counted after this."""
        for own in fields(self):
            mine, theirs = getattr(self, own.name), getattr(later, own.name)
            if isinstance(mine, dict):
                mine.update(theirs)
            elif own.name == "report":
                self.report = theirs or mine
            else:
                setattr(self, own.name, mine + theirs)


class GroupGenerator:
    """Rolls out and scores the groups of tickets.

    `exclusive` holds the policy (model, encoder, media) for this thread while it is used here; `tally` counts and times what was
    done since the last `begin_step`.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        engine: RolloutEngine,
        scorer: Scorer,
        sources: Sequence[LoadedSource],
        stream: PromptStream,
    ) -> None:
        self.config, self.policy, self.engine, self.scorer = config, policy, engine, scorer
        self.stream = stream
        self._task_key = {id(s.task): i for i, s in enumerate(sources)}
        self._config_of = {id(s.task): s.config for s in sources}
        self.demonstrations = Demonstrations(config, policy, sources)
        self.replaying = Replaying(config, policy, sources)
        tree = config.rollout.tree
        self._spent = Spent()
        self._tree = partial(waves, policy, tree, spent=self._spent) if tree.roots else None
        self.exclusive: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.timeline = Timeline()
        self.step, self.tally = 0, StepTally()

    def begin_step(self, step: int, tally: StepTally) -> None:
        """What follows belongs to `step` and is counted in `tally`. Lets go of the media of the step before."""
        self.step, self.tally = step, tally
        # async: media of steps still being trained come from the cache again
        with self.exclusive():
            self.policy.encoder.visuals.unpin()

    def generate(self, tickets: Sequence[Ticket]) -> list[RolloutGroup]:
        """Roll out and score the tickets; a prompt that cannot be encoded gives a group with an error."""
        groups: list[RolloutGroup] = []
        ready: list[_Open] = []
        asked = [self._asked(ticket) for ticket in tickets]
        with ExitStack() as begun:  # whatever ends the wave, no environment stays open
            episodes = begin_groups(
                self.policy, asked, begun=begun, spent=self._spent, encoding=self.exclusive
            )
            for ticket, one, playing in zip(tickets, asked, episodes, strict=True):
                with self.exclusive():
                    opened = self._open(ticket, one, playing)
                if isinstance(opened, RolloutGroup):
                    groups.append(opened)
                else:
                    ready.append(opened)
            written = self._answers(
                ready, [self.demonstrations.rollouts(len(o.demonstrations)) for o in ready], 3
            )
        closed = [replace(o.group, rollouts=found) for o, found in zip(ready, written, strict=True)]
        closed = self._filled(self._mixed(closed, ready), ready)
        for group, opened in zip(closed, ready, strict=True):
            self.tally.origins[group.key] = score_origin(
                self._config_of[id(opened.task)],
                opened.prompt.images,
                opened.prompt.videos,
                opened.prompt.audios,
            ) | ({"environment": True} if opened.episodes else {})
        found = sorted([*groups, *self._contrasted(closed, ready)], key=lambda g: g.key)
        self.tally.environment_s += self._spent.environments
        self.tally.reward_s += self._spent.rewards
        self._spent.environments = self._spent.rewards = 0.0
        return found

    def _asked(self, ticket: Ticket) -> Beginning:
        """The ticket's group, for tasks with an environment."""
        sample, task = self.stream.find(ticket.source, ticket.sample_id)
        return Beginning(
            sample,
            task,
            self.demonstrations.rollouts(0),
            (self.config.seed, 3, *ticket.key),
            filmed=int(self._filmed(ticket)),
        )

    def _open(
        self,
        ticket: Ticket,
        asked: Beginning,
        episodes: list[Episode] | MediaError | DataError,
    ) -> _Open | RolloutGroup:
        """The ticket's group with its encoded prompt; the group alone, with an error, when it cannot be encoded."""
        sample, task = asked.sample, asked.task
        try:
            if isinstance(episodes, Exception):
                raise episodes
            prompt = next(
                (e.prompt for e in episodes if e.prompt is not None), None
            ) or self.policy.encoder(sample, task)
            # until the next step begins
            self.policy.pin(prompt.visuals)
        except (MediaError, DataError) as error:
            stop_at_broken_media(error, sample, self.config.data.on_error)
            group = RolloutGroup(
                sample, (), key=ticket.key, error=f"{type(error).__name__}: {error}"
            )
            self._record(sample, [group.error])
            return group
        return _Open(
            RolloutGroup(sample, (), fingerprint=prompt.fingerprint, key=ticket.key),
            task,
            prompt,
            self._demonstrations(sample, task, prompt, ticket),
            episodes,
        )

    def _filmed(self, ticket: Ticket) -> bool:
        """Whether the first rollout of this group keeps what it is shown: of the first ones that a step asks for, in the first, the
        last and some steps between, which are drawn in the report."""
        t = self.config.train
        some = self.step in (1, t.steps) or self.step % max(1, t.steps // _FILMED_STEPS) == 0
        return some and ticket.key[1] < t.log_rollouts

    def _demonstrations(
        self, sample: Sample, task: Task, prompt: Prompt, ticket: Ticket
    ) -> tuple[Turn, ...]:
        """What somebody else wrote for this prompt, if demonstrations are wanted in this step; the unusable are recorded."""
        if not self.demonstrations.active(self.step):
            return ()
        chosen, skipped = self.demonstrations.choose(
            sample, task, ticket.key, self.context(prompt, StopReason.EOS, 0)
        )
        self.tally.demonstrations_skipped += len(skipped)
        self._record(sample, skipped)
        return chosen

    def _mixed(self, closed: Sequence[RolloutGroup], ready: Sequence[_Open]) -> list[RolloutGroup]:
        """The groups with their scored demonstrations, where there are any and they are wanted."""
        groups = list(closed)
        asked = [
            i
            for i, o in enumerate(ready)
            if o.demonstrations and self.demonstrations.wanted(groups[i])
        ]
        scored = (
            self._scores([self._jobs(ready[i], ready[i].demonstrations) for i in asked])
            if asked
            else []
        )
        for i, scores in zip(asked, scored, strict=True):
            groups[i] = self.demonstrations.mix(groups[i], ready[i].demonstrations, scores)
        return groups

    def _filled(self, closed: Sequence[RolloutGroup], ready: Sequence[_Open]) -> list[RolloutGroup]:
        """The groups, those without a success with past ones from the pool (algorithm.replay)."""
        groups = list(closed)
        wanted = {i: found for i, g in enumerate(closed) if (found := self.replaying.wanted(g))}
        plain = [i for i in wanted if not ready[i].episodes]
        jobs = [self._jobs(ready[i], [t for s in wanted[i] for t in s.turns]) for i in plain]
        for i, scores in zip(plain, self._scores(jobs) if jobs else [], strict=True):
            groups[i] = self.replaying.answered(groups[i], wanted[i], scores)
        for i in sorted(wanted.keys() - set(plain)):
            # begun as the group was: its rollouts were closed when they were over
            seed = (self.config.seed, 3, *groups[i].key)
            with self.exclusive(), ExitStack() as begun:
                again = begin(
                    self.policy,
                    groups[i].sample,
                    ready[i].task,
                    len(wanted[i]),
                    seed,
                    begun=begun,
                    spent=self._spent,
                )
                groups[i] = self.replaying.played(groups[i], wanted[i], again, self._spent)
        return groups

    def _record(self, sample: Sample, reasons: Sequence[str | None]) -> None:
        self.tally.failures += [
            {"step": self.step, "source": sample.source, "id": sample.id, "reason": reason}
            for reason in reasons
        ]

    def _scores(self, jobs: list[list[ScoreJob]]) -> list[list[Score]]:
        began = time.perf_counter()
        with self.timeline.span("reward", "rollout"):
            scored = self.scorer.score_groups(jobs)
        self.tally.reward_s += time.perf_counter() - began
        return scored

    def _jobs(self, opened: _Open, completions: Sequence[Turn]) -> list[ScoreJob]:
        return [
            ScoreJob(
                self._task_key[id(opened.task)],
                opened.group.sample,
                c.text,
                self.context(opened.prompt, c.stop, len(c.token_ids)),
            )
            for c in completions
        ]

    def _answers(
        self, ready: Sequence[_Open], counts: Sequence[int], noise: int
    ) -> list[tuple[Rollout, ...]]:
        """So many scored completions of each prompt; `noise` tells their random numbers from those of other rollouts. Tasks with an
        environment are played instead."""
        played = iter(self._played([o for o in ready if o.episodes]))
        plain = [(o, n) for o, n in zip(ready, counts, strict=True) if not o.episodes]
        written = iter(self._completions([o for o, _ in plain], [n for _, n in plain], noise))
        return [next(played) if o.episodes else next(written) for o in ready]

    def _played(self, ready: Sequence[_Open]) -> list[tuple[Rollout, ...]]:
        """The rollouts of tasks with an environment; those that failed are recorded."""
        if not ready:
            return []
        with self.exclusive(), self.timeline.span("infer", "rollout", step=self.step):
            began, before = time.perf_counter(), self._spent.total
            found = play(
                self.policy,
                self.engine,
                [o.episodes for o in ready],
                sampling_settings(self.config),
                self._tree,
                self._spent,
            )
            beside = self._spent.total - before
            self.tally.rollout_s += time.perf_counter() - began - beside
        for opened, rollouts in zip(ready, found, strict=True):
            turns = [t for r in rollouts for t in r.turns[r.shared_turns :]]
            self.tally.prompt_tokens += opened.prompt.length + sum(
                t.prompt.length for r in rollouts for t in r.turns[max(1, r.shared_turns) :]
            )
            self.tally.rollout_tokens += sum(len(t.token_ids) for t in turns)
            self._record(opened.group.sample, [r.error for r in rollouts if r.error is not None])
        return found

    def _completions(
        self, ready: Sequence[_Open], counts: Sequence[int], noise: int
    ) -> list[tuple[Rollout, ...]]:
        """So many scored completions of each prompt."""
        requests = [
            Request(o.prompt, n, (self.config.seed, noise, *o.group.key))
            for o, n in zip(ready, counts, strict=True)
        ]
        completions: list[list[Turn]] = []
        if requests:
            with self.exclusive(), self.timeline.span("infer", "rollout", step=self.step):
                began = time.perf_counter()
                completions = self.engine.generate(requests, sampling_settings(self.config))
                self.tally.rollout_s += time.perf_counter() - began
        scored = self._scores([self._jobs(o, cs) for o, cs in zip(ready, completions, strict=True)])
        self.tally.prompt_tokens += sum(o.prompt.length for o in ready)
        self.tally.rollout_tokens += sum(len(c.token_ids) for cs in completions for c in cs)
        return [
            tuple(Rollout((c,), s) for c, s in zip(cs, scores, strict=True))
            for cs, scores in zip(completions, scored, strict=True)
        ]

    def _contrasted(
        self, closed: Sequence[RolloutGroup], ready: Sequence[_Open]
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
                        self.policy.pin(changed.visuals)
                except MediaError as error:
                    stop_at_broken_media(error, group.sample, self.config.data.on_error)
                    self._record(group.sample, [f"no {c.kind} view: MediaError: {error}"])
                    continue
                asked.append((number, replace(opened, prompt=changed)))
            groups[number] = replace(group, view=c.kind, probe=probe)
        count = c.group_size or max(1, self.config.rollout.group_size // 2)
        written = self._answers([o for _, o in asked], [count] * len(asked), 4)
        for (number, _), found in zip(asked, written, strict=True):
            groups[number] = replace(groups[number], contrast=found)
        return groups

    def context(self, prompt: Prompt, stop: StopReason, num_tokens: int) -> RewardContext:
        """What the reward of a completion written in this step may know."""
        return RewardContext(
            self.step,
            self.config.train.steps,
            self.policy.template.frame,
            prompt.images,
            stop,
            num_tokens,
            self.config.rollout.max_new_tokens,
            prompt.videos,
            prompt.audios,
        )
