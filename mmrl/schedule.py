"""The stream of closed groups the trainer consumes: draw prompts, roll out, score, close, replace what taught nothing.

`SerialSchedule` rolls out first and trains afterwards; other schedules yield the same groups earlier. Which prompts a
step gets depends only on the seed and on earlier rewards, never on the number of processes.
"""
from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mmrl.algorithms import (
    ContrastSettings,
    DynamicSampler,
    OverlongSettings,
    SamplerSettings,
    SelectionSettings,
    StepReport,
    Ticket,
    VarianceSelection,
    Verdict,
    bonuses,
    has_signal,
    needs_contrast,
    overlong_penalty,
)
from mmrl.config import DataSource, RunConfig
from mmrl.data import LoadedSource, prompt_stream
from mmrl.errors import DataError, MediaError
from mmrl.offline import Demonstrations, on_policy
from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Policy
from mmrl.rollout import Request, RolloutEngine, SamplingSettings
from mmrl.scoring import ScoreJob, Scorer, is_reward_failure
from mmrl.task import Task
from mmrl.types import Completion, Group, ImageSize, RewardContext, Sample, Score, StopReason, Trajectory, VideoSize
from mmrl.views import changed_prompt
from mmrl.world import World

__all__ = [
    "GroupOutcome", "SerialSchedule", "StepTally", "accuracies", "contrast_bonuses", "contrast_settings", "group_outcome",
    "is_usable", "sampling_settings", "score_of", "score_origin", "training_parts", "training_rewards", "usable",
]

T = TypeVar("T")


def sampling_settings(config: RunConfig) -> SamplingSettings:
    """The rollout section as the engine wants it."""
    r = config.rollout
    return SamplingSettings(r.temperature, r.top_p, r.top_k, r.max_new_tokens, r.batch_tokens)


def _overlong_penalties(group: Group, config: RunConfig) -> list[float]:
    settings = OverlongSettings(mode="soft", max_length=config.rollout.max_new_tokens, cache=config.algorithm.overlong_buffer)
    return [overlong_penalty(t.num_tokens, settings) for t in group.trajectories]


def _shuffled(values: Sequence[T], group: Group, config: RunConfig) -> list[T]:
    """The control experiment's permutation of a group (reward.shuffle), or the values as they are."""
    if not config.reward.shuffle:
        return list(values)
    return [values[i] for i in np.random.default_rng((config.seed, 17, *group.key)).permutation(len(values))]


def contrast_settings(config: RunConfig) -> ContrastSettings:
    """The algorithm.contrast section as the rule wants it."""
    c = config.algorithm.contrast
    return ContrastSettings(c.factor, c.threshold, c.bonus, c.skip)


def accuracies(trajectories: Sequence[Trajectory]) -> list[float]:
    """Accuracy part of each usable trajectory's reward (its value where the task has no such part)."""
    return [score_of(t).parts.get("accuracy", score_of(t).value) for t in trajectories if is_usable(t)]


def contrast_bonuses(group: Group, config: RunConfig) -> list[float]:
    """What T-GRPO's rule adds to each trajectory's reward; all 0 for a group no changed view applies to.

    Demonstrations neither count in the rule nor get the bonus: they show nothing of what the policy looks at. Nor do
    trajectories whose reward failed, on either side.
    """
    if not group.view:
        return [0.0] * len(group.trajectories)
    changed = accuracies(group.contrast) if group.contrast else None
    own = iter(bonuses(accuracies(on_policy(group.trajectories)), changed, contrast_settings(config)))
    return [0.0 if t.offline or not is_usable(t) else next(own) for t in group.trajectories]


def training_rewards(group: Group, config: RunConfig, *, bonus: bool = True) -> list[float]:
    """The rewards advantages are made of: score, contrast bonus, soft overlong penalty; permuted in the control experiment.

    Without `bonus`: the task's own rewards, by which prompts are judged (has it signal? is it solved?).
    """
    a = config.algorithm
    rewards = list(group.rewards_G)
    if bonus:
        rewards = [r + b for r, b in zip(rewards, contrast_bonuses(group, config), strict=True)]
    if a.overlong == "soft":
        rewards = [r + a.overlong_weight * p for r, p in zip(rewards, _overlong_penalties(group, config), strict=True)]
    return _shuffled(rewards, group, config)


def training_parts(group: Group, config: RunConfig) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """What `training_rewards` sums up: (parts, weights) per trajectory; contrast bonus and overlong penalty are parts too."""
    a = config.algorithm
    scores = [score_of(t) for t in group.trajectories]
    parts, weights = [dict(s.parts) for s in scores], [dict(s.weights) for s in scores]
    if group.view:
        for table, weight, bonus in zip(parts, weights, contrast_bonuses(group, config), strict=True):
            table["contrast"] = float(bonus > 0)
            if any(weight.values()):
                weight["contrast"] = a.contrast.bonus
    if a.overlong == "soft":
        for table, weight, penalty in zip(parts, weights, _overlong_penalties(group, config), strict=True):
            table["overlong"] = penalty
            if any(weight.values()):
                weight["overlong"] = a.overlong_weight
    order = _shuffled(range(len(parts)), group, config)
    return [parts[i] for i in order], [weights[i] for i in order]


def score_origin(source: DataSource, images: Sequence[ImageSize], videos: Sequence[VideoSize] = ()) -> dict[str, Any]:
    """What a logged completion needs beside sample and text to be scored again: configured task and sizes of media."""
    sizes = {"video_sizes": [dataclasses.asdict(size) for size in videos]} if videos else {}
    return {"task_spec": source.task, "task_params": dict(source.params),
            "image_sizes": [dataclasses.asdict(size) for size in images], **sizes}


def is_usable(trajectory: Trajectory) -> bool:
    """Whether a trajectory has a reward: one whose reward raised, hung or crashed says nothing about the policy."""
    return trajectory.score is not None and not is_reward_failure(trajectory.score)


def usable(group: Group) -> list[bool]:
    """`is_usable` of each trajectory."""
    return [is_usable(t) for t in group.trajectories]


class GroupOutcome(NamedTuple):
    """What every process needs to know of a closed group to decide whether it is trained on."""

    key: tuple[int, int, int]
    rewards: list[float] | None  # usable training rewards; None when it failed or has fewer than two of them
    low: float = 0.0  # range of its task's rewards
    high: float = 1.0
    signal: bool | None = None  # None: the rewards themselves tell


def group_outcome(group: Group, config: RunConfig, task: Task) -> GroupOutcome:
    """The outcome of a closed group. With GDPO a group has signal when any weighted reward part differs inside it."""
    if group.error is not None:
        return GroupOutcome(group.key, None)
    good_G, (low, high) = usable(group), task.member(group.sample.task).value_range
    if sum(good_G) < 2:
        return GroupOutcome(group.key, None, low, high)
    rewards = [r for r, good in zip(training_rewards(group, config, bonus=False), good_G, strict=True) if good]
    if config.algorithm.aggregation != "gdpo":
        return GroupOutcome(group.key, rewards, low, high)
    parts, weights = ([x for x, good in zip(column, good_G, strict=True) if good] for column in training_parts(group, config))
    names = {name for table in weights for name, weight in table.items() if weight}
    return GroupOutcome(group.key, rewards, low, high, any(has_signal([t.get(n, 0.0) for t in parts]) for n in names))


@dataclass(frozen=True)
class _Open:
    """A group about to be answered."""

    group: Group
    task: Task
    prompt: Prompt
    demonstrations: tuple[Completion, ...] = ()


@dataclass
class StepTally:
    """What happened while a step's groups were made, on this process (`report` is the same on all)."""

    rollout_s: float = 0.0
    reward_s: float = 0.0
    rollout_tokens: int = 0
    prompt_tokens: int = 0
    report: StepReport | None = None
    failures: list[dict[str, Any]] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)  # every closed group, also those not trained on
    origins: dict[tuple[int, int, int], dict[str, Any]] = field(default_factory=dict)  # by key: score_origin
    demonstrations_skipped: int = 0
    notes: dict[str, float] = field(default_factory=dict)  # metrics of curriculum and selection, the same on all


class SerialSchedule:
    """Draws, rolls out and scores the groups of one step at a time."""

    def __init__(self, config: RunConfig, policy: Policy, engine: RolloutEngine, scorer: Scorer,
                 sources: Sequence[LoadedSource], world: World) -> None:
        self.config, self.policy, self.engine, self.scorer, self.world = config, policy, engine, scorer, world
        self.stream = prompt_stream(config, sources)
        self._task_key = {id(s.task): i for i, s in enumerate(sources)}
        self._config_of = {id(s.task): s.config for s in sources}
        a, d = config.algorithm, config.data.selection
        self.sampler = DynamicSampler(SamplerSettings(
            quota=config.train.prompts_per_step, max_attempts=a.max_rounds if a.dynamic_sampling else 1,
            carry_share=a.carry_share if a.dynamic_sampling else 0.0))
        self.selection = None if d.kind == "none" else VarianceSelection(SelectionSettings(
            kind=d.kind, threshold=d.threshold, replay_share=d.replay_share, memory=d.memory, momentum=d.momentum, rest=d.rest))
        self.demonstrations = Demonstrations(config, policy, sources)
        self.tally = StepTally()

    def groups(self, step: int) -> Iterator[Group]:
        """Closed, scored groups of `step` for this process; `self.tally` counts and times what was done."""
        self.tally = StepTally()
        self.policy.encoder.visuals.release()
        if self.stream.begin_step(step, self.config.train.steps):
            self.sampler.retain(self.stream.allows)
        self.sampler.begin_step(step)
        if self.selection is not None:
            self.selection.begin_step(step, self.config.train.prompts_per_step)
        draw = self._next
        while tickets := self.sampler.ask(draw):
            draw = self._replacement
            local = [t for t in tickets if t.key[1] % self.world.size == self.world.rank]
            closed = self._close(local, step)
            outcomes = [group_outcome(g, self.config, self.stream.find(g.sample.source, g.sample.id)[1]) for g in closed]
            asked = {t.key: t for t in tickets}
            verdicts = {o.key: self._judge(o, asked[o.key]) for o in sorted(self.world.gather(outcomes), key=lambda o: o.key)}
            self.tally.groups += closed
            keep_all = not self.config.algorithm.dynamic_sampling
            yield from (g for g in closed if verdicts[g.key] is Verdict.KEPT or (
                keep_all and verdicts[g.key] is not Verdict.FAILED))
        self.tally.report = self.sampler.end_step()
        self.tally.notes = self._notes()

    def _judge(self, outcome: GroupOutcome, ticket: Ticket) -> Verdict:
        """Offer a group to the sampler, and to the selection when there is one; the same on every process."""
        keep = outcome.signal
        if self.selection is not None and outcome.rewards is not None:
            strength = self.selection.strength(outcome.rewards, outcome.low, outcome.high)
            self.selection.observe(ticket.source, ticket.sample_id, strength)
            keep = self.selection.keeps(strength)
        return self.sampler.offer(outcome.key, outcome.rewards, top=outcome.high, keep=keep)

    def _next(self) -> tuple[str, str]:
        sample, _ = self.stream.draw()
        return sample.source, sample.id

    def _replacement(self) -> tuple[str, str]:
        """A prompt for a place whose group was not kept: from the selection's memory if it has one, else from the stream."""
        return (self.selection and self.selection.replay(self.stream.allows)) or self._next()

    def _notes(self) -> dict[str, float]:
        """Metrics of curriculum and selection for the step's row."""
        staged = {"train/curriculum/stage": float(self.stream.stage)} if self.config.data.curriculum else {}
        selected = self.selection.metrics() if self.selection is not None else {}
        skipped = ({"train/offline/skipped": self.world.sum([float(self.tally.demonstrations_skipped)])[0]}
                   if self.config.algorithm.offline.per_group else {})
        return {**staged, **{f"train/selection/{k}": float(v) for k, v in selected.items()}, **skipped}

    def _close(self, tickets: Sequence[Ticket], step: int) -> list[Group]:
        """Roll out and score the tickets; a prompt that cannot be encoded gives a group with an error."""
        groups: list[Group] = []
        ready: list[_Open] = []
        self._look_ahead(tickets)
        for ticket in tickets:
            sample, task = self.stream.find(ticket.source, ticket.sample_id)
            try:
                prompt = self.policy.encoder(sample, task)
                self.policy.encoder.visuals.lease(prompt.visuals, self.policy.tower())  # until the next step begins
            except (MediaError, DataError) as error:
                groups.append(Group(sample, (), key=ticket.key, error=f"{type(error).__name__}: {error}"))
                self.tally.failures.append({"step": step, "source": sample.source, "id": sample.id,
                                            "reason": groups[-1].error})
                continue
            ready.append(_Open(Group(sample, (), fingerprint=prompt.fingerprint, key=ticket.key), task, prompt,
                               self._demonstrations(sample, task, prompt, ticket, step)))
        written = self._answers(ready, [self.demonstrations.rollouts(len(o.demonstrations)) for o in ready], 3, step)
        closed = [replace(o.group, trajectories=found) for o, found in zip(ready, written, strict=True)]
        closed = self._mixed(closed, ready, step)
        for group, opened in zip(closed, ready, strict=True):
            self.tally.origins[group.key] = score_origin(self._config_of[id(opened.task)], opened.prompt.images,
                                                         opened.prompt.videos)
        return sorted([*groups, *self._contrasted(closed, ready, step)], key=lambda g: g.key)

    def _demonstrations(self, sample: Sample, task: Task, prompt: Prompt, ticket: Ticket, step: int) -> tuple[Completion, ...]:
        """What somebody else wrote for this prompt, if demonstrations are wanted in this step; the unusable are recorded."""
        if not self.demonstrations.active(step):
            return ()
        chosen, skipped = self.demonstrations.choose(sample, task, ticket.key, self.context(prompt, step, StopReason.EOS, 0))
        self.tally.demonstrations_skipped += len(skipped)
        self.tally.failures += [{"step": step, "source": sample.source, "id": sample.id, "reason": reason} for reason in skipped]
        return chosen

    def _mixed(self, closed: Sequence[Group], ready: Sequence[_Open], step: int) -> list[Group]:
        """The groups with their scored demonstrations, where there are any and they are wanted."""
        groups = list(closed)
        asked = [i for i, o in enumerate(ready) if o.demonstrations and self.demonstrations.wanted(groups[i])]
        began = time.perf_counter()
        scored = self.scorer.score_groups([self._jobs(ready[i], ready[i].demonstrations, step) for i in asked]) if asked else []
        self.tally.reward_s += time.perf_counter() - began
        for i, scores in zip(asked, scored, strict=True):
            groups[i] = self.demonstrations.mix(groups[i], ready[i].demonstrations, scores)
        return groups

    def _jobs(self, opened: _Open, completions: Sequence[Completion], step: int) -> list[ScoreJob]:
        return [ScoreJob(self._task_key[id(opened.task)], opened.group.sample, c.text,
                         self.context(opened.prompt, step, c.stop, len(c.token_ids))) for c in completions]

    def _look_ahead(self, tickets: Sequence[Ticket]) -> None:
        """Tell the media workers what is asked for now, and what the stream draws next; a wrong guess costs only their time."""
        ahead = self.policy.encoder.ahead
        if ahead is None:
            return
        stream = copy.copy(self.stream)
        stream.taken = list(stream.taken)
        coming = [stream.draw()[0] for _ in range(self.config.train.prompts_per_step)]
        ahead.forget()
        ahead.expect([self.stream.find(t.source, t.sample_id)[0] for t in tickets] + coming[self.world.rank::self.world.size])

    def _answers(self, ready: Sequence[_Open], counts: Sequence[int], noise: int, step: int) -> list[tuple[Trajectory, ...]]:
        """So many scored completions of each prompt; `noise` tells their random numbers from those of other rollouts."""
        began = time.perf_counter()
        requests = [Request(o.prompt, n, (self.config.seed, noise, *o.group.key)) for o, n in zip(ready, counts, strict=True)]
        completions = self.engine.generate(requests, sampling_settings(self.config)) if requests else []
        self.tally.rollout_s += time.perf_counter() - began
        began = time.perf_counter()
        scored = self.scorer.score_groups([self._jobs(o, cs, step) for o, cs in zip(ready, completions, strict=True)])
        self.tally.reward_s += time.perf_counter() - began
        self.tally.prompt_tokens += sum(o.prompt.length for o in ready)
        self.tally.rollout_tokens += sum(len(c.token_ids) for cs in completions for c in cs)
        return [tuple(Trajectory((c,), s) for c, s in zip(cs, scores, strict=True))
                for cs, scores in zip(completions, scored, strict=True)]

    def _contrasted(self, closed: Sequence[Group], ready: Sequence[_Open], step: int) -> list[Group]:
        """The groups with rollouts on a changed view of their input, where there is one and it can matter."""
        c, groups = self.config.algorithm.contrast, list(closed)
        if c.kind == "none":
            return groups
        asked: list[tuple[int, _Open]] = []
        for number, (group, opened) in enumerate(zip(closed, ready, strict=True)):
            changed = changed_prompt(self.policy.encoder, group.sample, opened.task, opened.prompt, c.kind,
                                     (self.config.seed, 19, *group.key), 2 if c.unit == "pairs" else 1)
            if changed is None:
                continue
            probe = not c.skip or bool(np.random.default_rng((self.config.seed, 23, *group.key)).random() < c.measure)
            top = max(1.0, opened.task.member(group.sample.task).value_range[1])
            if probe or needs_contrast(accuracies(on_policy(group.trajectories)), contrast_settings(self.config), top=top):
                try:  # features of the plain view may have been enough so far: a changed one may need the pixels again
                    self.policy.encoder.visuals.lease(changed.visuals, self.policy.tower())
                except MediaError as error:
                    self.tally.failures.append({"step": step, "source": group.sample.source, "id": group.sample.id,
                                                "reason": f"no {c.kind} view: MediaError: {error}"})
                    continue
                asked.append((number, replace(opened, prompt=changed)))
            groups[number] = replace(group, view=c.kind, probe=probe)
        count = c.group_size or max(1, self.config.rollout.group_size // 2)
        written = self._answers([o for _, o in asked], [count] * len(asked), 4, step)
        for (number, _), found in zip(asked, written, strict=True):
            groups[number] = replace(groups[number], contrast=found)
        return groups

    def context(self, prompt: Prompt, step: int, stop: StopReason, num_tokens: int) -> RewardContext:
        """What the reward of a completion written at `step` may know."""
        return RewardContext(step, self.config.train.steps, self.policy.template.frame, prompt.images, stop, num_tokens,
                             self.config.rollout.max_new_tokens, prompt.videos)

    def state_dict(self) -> dict[str, Any]:
        """Stream position, carry-over queue and replay memory, as JSON values."""
        return {"stream": self.stream.state_dict(), "sampler": self.sampler.state_dict(),
                "selection": self.selection.state_dict() if self.selection is not None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.stream.load_state_dict(state["stream"])
        self.sampler.load_state_dict(state["sampler"])
        if self.selection is not None:
            self.selection.load_state_dict(state["selection"])


def score_of(trajectory: Trajectory) -> Score:
    """The score of a closed trajectory."""
    assert trajectory.score is not None, "a closed group has scores"
    return trajectory.score

