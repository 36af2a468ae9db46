"""What a closed group's rewards are to the trainer: which count, what is added to them, whether the group teaches anything.

    >>> from mmrl.group_rewards import training_rewards
    >>> training_rewards(group, config)                                  # score, contrast bonus, soft overlong penalty

Pure functions of a group and the configuration: every process, and a resumed run, gets the same numbers.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mmrl.algorithms import ContrastSettings, OverlongSettings, bonuses, has_signal, overlong_penalty
from mmrl.config import DataSource, RunConfig
from mmrl.offline import on_policy
from mmrl.scoring import is_reward_failure
from mmrl.task import Task
from mmrl.types import Group, ImageSize, Score, Trajectory, VideoSize

__all__ = [
    "GroupOutcome", "accuracies", "contrast_bonuses", "contrast_settings", "group_outcome", "is_usable", "score_of",
    "score_origin", "training_parts", "training_rewards", "usable",
]

T = TypeVar("T")


def score_of(trajectory: Trajectory) -> Score:
    """The score of a closed trajectory."""
    assert trajectory.score is not None, "a closed group has scores"
    return trajectory.score


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
