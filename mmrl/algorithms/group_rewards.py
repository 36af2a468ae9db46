"""What a closed group's rewards are to the trainer: which count, what is added to them, whether the group teaches anything.

    >>> from mmrl.algorithms.group_rewards import training_rewards
    >>> training_rewards(group, config)                                  # score, contrast bonus, soft overlong penalty

Pure functions of a group and the configuration: every process, and a resumed run, gets the same numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mmrl.algorithms import (
    ContrastSettings,
    OverlongSettings,
    bonuses,
    has_signal,
    overlong_penalty,
)
from mmrl.config import DataSource, RunConfig
from mmrl.data.demonstrations import on_policy
from mmrl.errors import ConfigError, did_you_mean
from mmrl.task import Task
from mmrl.types import AudioSize, ImageSize, Rollout, RolloutGroup, Score, VideoSize
from mmrl.workers.scoring import is_reward_failure

__all__ = [
    "GroupOutcome",
    "accuracies",
    "check_filter_key",
    "contrast_bonuses",
    "contrast_settings",
    "group_outcome",
    "is_usable",
    "passes_filter",
    "score_of",
    "score_origin",
    "training_parts",
    "training_rewards",
    "usable",
]

T = TypeVar("T")


def score_of(trajectory: Rollout) -> Score:
    """The score of a closed trajectory."""
    assert trajectory.score is not None, "a closed group has scores"
    return trajectory.score


def _overlong_penalties(group: RolloutGroup, config: RunConfig) -> list[float]:
    settings = OverlongSettings(
        mode="soft",
        max_length=config.rollout.max_new_tokens,
        cache=config.algorithm.overlong_buffer,
    )
    return [overlong_penalty(t.num_tokens, settings) for t in group.rollouts]


def _shuffled(values: Sequence[T], group: RolloutGroup, config: RunConfig) -> list[T]:
    """The control experiment's permutation of a group (reward.shuffle), or the values as they are.

    With a critic they are: it compares with no group's mean, so that an answer, which keeps its own reward once in G times, would
    learn from it; there the whole step is permuted (mmrl.training.answer_critic).
    """
    if not config.reward.shuffle or config.algorithm.advantage == "gae":
        return list(values)
    # what has no reward takes no part
    found, places = list(values), [i for i, good in enumerate(usable(group)) if good]
    order = np.random.default_rng((config.seed, 17, *group.key)).permutation(len(places))
    for place, number in zip(places, order, strict=True):
        found[place] = values[places[number]]
    return found


def contrast_settings(config: RunConfig) -> ContrastSettings:
    """The algorithm.contrast section as the rule wants it."""
    a, c = config.algorithm, config.algorithm.contrast
    pooled = a.advantage == "gae" or (
        a.reward_aggregation == "plain" and a.advantage_scale in ("ema", "batch_rewards")
    )
    return ContrastSettings(c.factor, c.threshold, c.bonus, c.skip, pooled)


def accuracies(trajectories: Sequence[Rollout]) -> list[float]:
    """Accuracy part of each usable trajectory's reward (its value where none of them has such a part)."""
    scores = [score_of(t) for t in trajectories if is_usable(t)]
    return _part(scores, "accuracy") or [s.value for s in scores]


def _part(scores: Sequence[Score], name: str) -> list[float] | None:
    """One reward part of each completion of a group, 0 for a failure without it; None where none of them has it."""
    return (
        [s.parts.get(name, 0.0) for s in scores] if any(name in s.parts for s in scores) else None
    )


def contrast_bonuses(group: RolloutGroup, config: RunConfig) -> list[float]:
    """What T-GRPO's rule adds to each trajectory's reward; all 0 for a group no changed view applies to.

    Demonstrations neither count in the rule nor get the bonus: they show nothing of what the policy looks at. Nor do
    trajectories whose reward failed, on either side.
    """
    if not group.view:
        return [0.0] * len(group.rollouts)
    changed = accuracies(group.contrast) if group.contrast else None
    own = iter(bonuses(accuracies(on_policy(group.rollouts)), changed, contrast_settings(config)))
    return [0.0 if t.offline or not is_usable(t) else next(own) for t in group.rollouts]


def training_rewards(group: RolloutGroup, config: RunConfig) -> list[float]:
    """The rewards advantages are made of: score, contrast bonus, soft overlong penalty; permuted in the control experiment."""
    a = config.algorithm
    rewards = [r + b for r, b in zip(group.rewards_G, contrast_bonuses(group, config), strict=True)]
    if a.overlong == "soft":
        rewards = [
            r + a.overlong_weight * p
            for r, p in zip(rewards, _overlong_penalties(group, config), strict=True)
        ]
    return _shuffled(rewards, group, config)


def training_parts(
    group: RolloutGroup, config: RunConfig
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """What `training_rewards` sums up: (parts, weights) per trajectory; contrast bonus and overlong penalty are parts too."""
    a = config.algorithm
    scores = [t.score or Score.failure("not finished") for t in group.rollouts]
    parts, weights = [dict(s.parts) for s in scores], [dict(s.weights) for s in scores]
    if group.view:
        for table, weight, bonus in zip(
            parts, weights, contrast_bonuses(group, config), strict=True
        ):
            table["contrast"] = float(bonus > 0)
            if any(weight.values()):
                weight["contrast"] = a.contrast.bonus
    if a.overlong == "soft":
        for table, weight, penalty in zip(
            parts, weights, _overlong_penalties(group, config), strict=True
        ):
            table["overlong"] = penalty
            if any(weight.values()):
                weight["overlong"] = a.overlong_weight
    order = _shuffled(range(len(parts)), group, config)
    return [parts[i] for i in order], [weights[i] for i in order]


def score_origin(
    source: DataSource,
    images: Sequence[ImageSize],
    videos: Sequence[VideoSize] = (),
    audios: Sequence[AudioSize] = (),
) -> dict[str, Any]:
    """What a logged completion needs beside sample and text to be scored again: configured task and sizes of media."""
    sizes = {
        name: [dataclasses.asdict(size) for size in media]
        for name, media in (("video_sizes", videos), ("audio_sizes", audios))
        if media
    }
    return {
        "task_spec": source.task,
        "task_params": dict(source.params),
        "image_sizes": [dataclasses.asdict(size) for size in images],
        **sizes,
    }


def is_usable(trajectory: Rollout) -> bool:
    """Whether a trajectory has a reward: one whose reward raised, hung or crashed says nothing about the policy."""
    return trajectory.score is not None and not is_reward_failure(trajectory.score)


def usable(group: RolloutGroup) -> list[bool]:
    """`is_usable` of each trajectory."""
    return [is_usable(t) for t in group.rollouts]


class GroupOutcome(NamedTuple):
    """What every process needs to know of a closed group to decide whether it is trained on. Neither the length penalty nor the
    contrast bonus is in it: a prompt is judged by what its task says of the answers."""

    key: tuple[int, int, int]
    # the task's own, of usable completions; None when the group failed or has fewer than two
    rewards: list[float] | None
    low: float = 0.0  # range of its task's rewards
    high: float = 1.0
    judged: list[float] | None = None  # values of algorithm.filter.key, in the order of `rewards`
    top: float = 1.0  # the largest value they can take
    signal: bool = False  # whether the group passes algorithm.filter


def check_filter_key(config: RunConfig, tasks: Sequence[Task]) -> None:
    """Raises ConfigError when algorithm.filter.key names a part that a task says it does not have."""
    for task in tasks:
        if task.part_names:  # a task of several kinds of questions may not know: _judged asks again
            _check_key(config.algorithm.filter.key, task.part_names, task.name)


def _check_key(key: str, known: Sequence[str], task: str) -> None:
    if key not in ("reward", "accuracy", *known):
        raise ConfigError(
            f"algorithm.filter.key: expected reward (the whole), accuracy, or another reward part of task '{task}' "
            f"({', '.join(known)}), found {key!r}.{did_you_mean(key, ['reward', 'accuracy', *known])}"
        )


def _judged(
    scores: Sequence[Score], config: RunConfig, task: Task
) -> tuple[list[float], float] | None:
    """Values of algorithm.filter.key in a group and the largest that they can be; None where the key means the whole reward."""
    key = config.algorithm.filter.key
    values = None if key == "reward" else _part(scores, key)
    if values is not None:
        return values, task.part_ranges.get(key, (0.0, 1.0))[1]
    if known := sorted({name for s in scores for name in s.parts}):
        _check_key(key, known, task.name)
    return None


def group_outcome(group: RolloutGroup, config: RunConfig, task: Task) -> GroupOutcome:
    """The outcome of a closed group: has it signal, by algorithm.filter?

    Its values of the key must differ (DAPO, arXiv 2503.14476 eq. 11, where accuracy is 0 or 1; verl: std of
    filter_groups.metric > 0) and their mean must lie between the bounds, both exclusive (EasyR1: filter_low < mean <
    filter_high). So answers that are equally right and differ only in their form are not trained on under key accuracy; under
    key reward they are. Beyond the peers, what is trained on must differ as well: the whole reward, or with GDPO a weighted
    part of it; else only the length penalty or the contrast bonus would be learned. With advantage gae every group teaches: a
    critic judges each answer by itself.
    """
    if group.error is not None:
        return GroupOutcome(group.key, None)
    task, good_G = task.member(group.sample.task), usable(group)
    low, high = task.value_range
    critic = config.algorithm.advantage == "gae"
    if sum(good_G) < (1 if critic else 2):
        return GroupOutcome(group.key, None, low, high)
    scores = [score_of(t) for t, good in zip(group.rollouts, good_G, strict=True) if good]
    rewards = [s.value for s in scores]
    values, top = _judged(scores, config, task) or (None, high)
    return GroupOutcome(
        group.key,
        rewards,
        low,
        high,
        rewards if values is None else values,
        top,
        critic or passes_filter(scores, values, config),
    )


def passes_filter(
    scores: Sequence[Score], values: Sequence[float] | None, config: RunConfig
) -> bool:
    """Whether a group with these scores has signal by algorithm.filter (see `group_outcome`); `values` of its key, None where that
    means the whole reward."""
    rewards, f = [s.value for s in scores], config.algorithm.filter
    if config.algorithm.reward_aggregation == "gdpo":
        names = sorted({name for s in scores for name, weight in s.weights.items() if weight})
        signal = any(has_signal([s.parts.get(name, 0.0) for s in scores]) for name in names)
    else:
        signal = has_signal(rewards)
    if values is None:
        values = rewards
    else:
        signal = signal and has_signal(values)
    mean = math.fsum(values) / len(values)
    return signal and (f.low is None or f.low < mean) and (f.high is None or mean < f.high)
