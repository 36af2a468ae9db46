"""The stream of closed groups the trainer consumes: draw prompts, roll out, score, close, replace what taught nothing.

`SerialSchedule` rolls out first and trains afterwards; other schedules yield the same groups earlier. Which prompts a
step gets depends only on the seed and on earlier rewards, never on the number of processes.
"""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mmrl.algorithms import (
    DynamicSampler,
    OverlongSettings,
    SamplerSettings,
    StepReport,
    Ticket,
    Verdict,
    overlong_penalty,
)
from mmrl.config import DataSource, RunConfig
from mmrl.data import LoadedSource, PromptStream
from mmrl.errors import DataError, MediaError
from mmrl.policy.encode import fingerprint
from mmrl.policy.policy import Policy
from mmrl.rollout import Request, RolloutEngine, SamplingSettings
from mmrl.scoring import ScoreJob, Scorer, is_reward_failure
from mmrl.task import Task
from mmrl.types import Group, ImageSize, RewardContext, Score, StopReason, Trajectory
from mmrl.world import World

__all__ = ["SerialSchedule", "StepTally", "group_outcome", "sampling_settings", "score_of", "score_origin", "training_rewards",
           "usable"]


def sampling_settings(config: RunConfig) -> SamplingSettings:
    """The rollout section as the engine wants it."""
    r = config.rollout
    return SamplingSettings(r.temperature, r.top_p, r.top_k, r.max_new_tokens, r.batch_tokens)


def training_rewards(group: Group, config: RunConfig) -> list[float]:
    """The rewards advantages are made of: score, plus the soft overlong penalty, permuted in the control experiment."""
    a = config.algorithm
    rewards = list(group.rewards_G)
    if a.overlong == "soft":
        settings = OverlongSettings(mode="soft", max_length=config.rollout.max_new_tokens, cache=a.overlong_buffer)
        rewards = [r + a.overlong_weight * overlong_penalty(t.num_tokens, settings)
                   for r, t in zip(rewards, group.trajectories, strict=True)]
    if config.reward.shuffle:
        order = np.random.default_rng((config.seed, 17, *group.key)).permutation(len(rewards))
        rewards = [rewards[i] for i in order]
    return rewards


def score_origin(source: DataSource, images: Sequence[ImageSize]) -> dict[str, Any]:
    """What a logged completion needs beside sample and text to be scored again: configured task and picture sizes."""
    return {"task_spec": source.task, "task_params": dict(source.params),
            "image_sizes": [dataclasses.asdict(size) for size in images]}


def usable(group: Group) -> list[bool]:
    """Which trajectories have a reward: one whose reward raised, hung or crashed says nothing about the policy."""
    return [t.score is not None and not is_reward_failure(t.score) for t in group.trajectories]


def group_outcome(group: Group, config: RunConfig) -> list[float] | None:
    """The usable training rewards of a closed group; None when it failed or has fewer than two of them."""
    if group.error is not None:
        return None
    rewards = [r for r, good in zip(training_rewards(group, config), usable(group), strict=True) if good]
    return rewards if len(rewards) > 1 else None


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


class SerialSchedule:
    """Draws, rolls out and scores the groups of one step at a time."""

    def __init__(self, config: RunConfig, policy: Policy, engine: RolloutEngine, scorer: Scorer,
                 sources: Sequence[LoadedSource], world: World) -> None:
        self.config, self.policy, self.engine, self.scorer, self.world = config, policy, engine, scorer, world
        self.stream = PromptStream(sources, config.seed)
        self._task_key = {id(s.task): i for i, s in enumerate(sources)}
        self._config_of = {id(s.task): s.config for s in sources}
        a = config.algorithm
        self.sampler = DynamicSampler(SamplerSettings(
            quota=config.train.prompts_per_step, max_attempts=a.max_rounds if a.dynamic_sampling else 1,
            carry_share=a.carry_share if a.dynamic_sampling else 0.0))
        self.tally = StepTally()

    def groups(self, step: int) -> Iterator[Group]:
        """Closed, scored groups of `step` for this process; `self.tally` counts and times what was done."""
        self.tally = StepTally()
        self.sampler.begin_step(step)
        while tickets := self.sampler.ask(self._next):
            local = [t for t in tickets if t.key[1] % self.world.size == self.world.rank]
            closed = self._close(local, step)
            outcomes = [(g.key, group_outcome(g, self.config)) for g in closed]
            verdicts = {key: self.sampler.offer(key, rewards) for key, rewards in sorted(self.world.gather(outcomes))}
            self.tally.groups += closed
            keep_all = not self.config.algorithm.dynamic_sampling
            yield from (g for g in closed if verdicts[g.key] is Verdict.KEPT or (
                keep_all and verdicts[g.key] is not Verdict.FAILED))
        self.tally.report = self.sampler.end_step()

    def _next(self) -> tuple[str, str]:
        sample, _ = self.stream.draw()
        return sample.source, sample.id

    def _close(self, tickets: Sequence[Ticket], step: int) -> list[Group]:
        """Roll out and score the tickets; a prompt that cannot be encoded gives a group with an error."""
        groups: list[Group] = []
        ready: list[tuple[Group, Task]] = []
        requests: list[Request] = []
        for ticket in tickets:
            sample, task = self.stream.find(ticket.source, ticket.sample_id)
            try:
                prompt = self.policy.encoder(sample, task)
            except (MediaError, DataError) as error:
                groups.append(Group(sample, (), key=ticket.key, error=f"{type(error).__name__}: {error}"))
                self.tally.failures.append({"step": step, "source": sample.source, "id": sample.id,
                                            "reason": groups[-1].error})
                continue
            seen = fingerprint(prompt.ids_P, prompt.positions_3P, prompt.media)
            ready.append((Group(sample, (), fingerprint=seen, key=ticket.key), task))
            requests.append(Request(prompt, self.config.rollout.group_size, (self.config.seed, 3, *ticket.key)))
        began = time.perf_counter()
        completions = self.engine.generate(requests, sampling_settings(self.config)) if requests else []
        self.tally.rollout_s += time.perf_counter() - began
        began = time.perf_counter()
        jobs = [ScoreJob(self._task_key[id(task)], group.sample, c.text,
                         self.context(request.prompt.images, step, c.stop, len(c.token_ids)))
                for (group, task), request, cs in zip(ready, requests, completions, strict=True) for c in cs]
        scores = iter(self.scorer.score(jobs))
        for (group, task), request, cs in zip(ready, requests, completions, strict=True):
            groups.append(replace(group, trajectories=tuple(Trajectory((c,), next(scores)) for c in cs)))
            self.tally.origins[group.key] = score_origin(self._config_of[id(task)], request.prompt.images)
            self.tally.prompt_tokens += request.prompt.length
            self.tally.rollout_tokens += sum(len(c.token_ids) for c in cs)
        self.tally.reward_s += time.perf_counter() - began
        return sorted(groups, key=lambda g: g.key)

    def context(self, images: tuple, step: int, stop: StopReason, num_tokens: int) -> RewardContext:
        """What the reward of a completion written at `step` may know."""
        return RewardContext(step, self.config.train.steps, self.policy.template.frame, images, stop, num_tokens,
                             self.config.rollout.max_new_tokens)

    def state_dict(self) -> dict[str, Any]:
        """Stream position and carry-over queue, as JSON values."""
        return {"stream": self.stream.state_dict(), "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.stream.load_state_dict(state["stream"])
        self.sampler.load_state_dict(state["sampler"])


def score_of(trajectory: Trajectory) -> Score:
    """The score of a closed trajectory."""
    assert trajectory.score is not None, "a closed group has scores"
    return trajectory.score

