"""From the closed groups of one step to one advantage per completion.

Which rewards are compared (total or each part), with what (baseline), in which scale (group, task, batch) and how much the
group counts (difficulty) is the `algorithm` section; the formulas are pure functions in mmrl.algorithms. Whatever looks
beyond one group sees the groups of all processes in order of their keys, so every process computes the same numbers.

    estimator = GroupAdvantages(config, world, headline_of)
    advantages = estimator.assign(groups)          # {group key: one advantage per trajectory}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.algorithms import (
    EmaScale,
    EmaSettings,
    centred,
    difficulty_weights,
    gdpo_advantages,
    group_advantages,
    group_std,
    over_rewards_std,
    rewards_of_turns,
    tree_advantages,
    turn_advantages,
    whiten,
)
from mmrl.algorithms.group_rewards import (
    is_usable,
    score_of,
    training_parts,
    training_rewards,
    usable,
)
from mmrl.config import RunConfig
from mmrl.data.demonstrations import on_policy
from mmrl.distributed.world import World
from mmrl.errors import RewardError
from mmrl.training.sequences import RolloutTargets
from mmrl.types import Rollout, RolloutGroup, Sample

__all__ = ["GroupAdvantages", "GroupView", "accuracy_level", "part_weights"]

Key = tuple[int, int, int]


@dataclass(frozen=True)
class GroupView:
    """What advantages need of a group, picklable: its completions whose reward did not fail, in order."""

    key: Key
    sample: str
    task: str
    source: str
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    parts: tuple[Mapping[str, float], ...]
    weights: tuple[Mapping[str, float], ...]
    level: float  # mean accuracy
    trees: tuple[int | None, ...] = ()
    turns: tuple[
        tuple[float, ...], ...
    ] = ()  # rewards of their turns, with algorithm.turns.advantage turn


def accuracy_level(group: RolloutGroup, headline: str) -> float:
    """The rollouts' mean accuracy in the task's own terms: the headline metric, else reward part 'accuracy', else the value.

    The headline comes first because it lies in [0, 1] where a paper's accuracy part may not.
    A completion that could not be parsed counts as 0; one whose reward failed does not count (nor is it trained on), and
    neither does a demonstration: how hard a prompt is, the policy's own answers tell.
    """
    scores = [score_of(t) for t in on_policy(group.rollouts) if is_usable(t)]
    if not scores:
        return 0.0
    if any(headline in s.metrics for s in scores):
        values = [s.metrics.get(headline, 0.0) for s in scores]
    elif any("accuracy" in s.parts for s in scores):
        values = [s.parts.get("accuracy", 0.0) for s in scores]
    else:
        values = [s.value for s in scores]
    return math.fsum(values) / len(values)


def part_weights(weights: Sequence[Mapping[str, float]], sample: str) -> dict[str, float]:
    """The weights of a group's reward parts, from its completions; all-zero ones (plain failures) say nothing.

    Raises RewardError when two completions of one prompt weigh their parts differently: there is no common sum then.
    """
    told = [dict(w) for w in weights if any(w.values())]
    for other in told[1:]:
        if other != told[0]:
            raise RewardError(
                f"reward_aggregation gdpo expected the same part weights for all completions of sample {sample}, found "
                f"{told[0]} and {other}; weigh by sample or source, not by completion"
            )
    return told[0] if told else {}


class GroupAdvantages:
    """Advantages of a run's steps; holds the running std per task (ema, ema_within), its only state. `paid(rollout)`: what its
    turns were paid, where that is not what their environment says."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        headline_of: Callable[[Sample], str] = lambda sample: "reward",
        paid: Callable[[Rollout], Sequence[float]] | None = None,
    ) -> None:
        self.config, self.world, self.headline_of = config, world, headline_of
        self._paid = paid or _paid_by_environment
        ema = config.algorithm.ema
        self.ema = EmaScale(
            EmaSettings(
                decay=ema.decay,
                min_std=ema.min_std,
                limit=ema.limit,
                within=config.algorithm.advantage_scale == "ema_within",
            )
        )

    @property
    def needs_whole_step(self) -> str:
        """Why advantages depend on the other groups of the step, so that processes must exchange them; '' where they do not."""
        a = self.config.algorithm
        why = {
            "algorithm.reward_aggregation gdpo": a.reward_aggregation == "gdpo",
            "algorithm.difficulty softmax": a.difficulty == "softmax",
            f"algorithm.advantage_scale {a.advantage_scale}": a.advantage_scale
            not in ("std", "none"),
        }
        return ", ".join(words for words, holds in why.items() if holds)

    def targets(self, groups: Sequence[RolloutGroup]) -> dict[Key, list[RolloutTargets | None]]:
        """What a learner is to make of the groups; None for a rollout that failed. All turns of a rollout share its advantage (see
        `assign`), unless each has one of its own (algorithm.turns.advantage turn). Collective as `assign`."""
        if self.config.algorithm.turns.advantage == "turn":
            return self._targets_of_turns(groups)
        assigned = self.assign(groups)
        return {
            g.key: [
                RolloutTargets.of_outcome(a, len(r.turns)) if r.turns and r.error is None else None
                for r, a in zip(g.rollouts, assigned[g.key], strict=True)
            ]
            for g in groups
        }

    def assign(self, groups: Sequence[RolloutGroup]) -> dict[Key, tuple[float, ...]]:
        """One advantage per trajectory of each group of this process; 0 for one whose reward failed.

        Raises RewardError when GDPO lacks a reward part. Every process must call it in every step.
        """
        found = self._found(groups)
        assigned = {}
        for group in groups:
            values = iter(found[group.key])
            assigned[group.key] = tuple(next(values) if good else 0.0 for good in usable(group))
        return assigned

    def _targets_of_turns(
        self, groups: Sequence[RolloutGroup]
    ) -> dict[Key, list[RolloutTargets | None]]:
        found = self._found(groups)
        targets: dict[Key, list[RolloutTargets | None]] = {}
        for group in groups:
            values, targets[group.key] = iter(found[group.key]), []
            for rollout, good in zip(group.rollouts, usable(group), strict=True):
                own = [(next(values) if good else 0.0,) for _ in rollout.turns]
                targets[group.key].append(
                    RolloutTargets(own) if own and rollout.error is None else None
                )
        return targets

    def _found(self, groups: Sequence[RolloutGroup]) -> dict[Key, list[float]]:
        """The advantages of each group's usable rollouts, or of their turns one after the other."""
        views = [self._view(group) for group in groups]
        everywhere = self.world.gather(views) if self.needs_whole_step else views
        everywhere = sorted(everywhere, key=lambda v: v.key)
        return dict(zip((v.key for v in everywhere), self._advantages(everywhere), strict=True))

    def _view(self, group: RolloutGroup) -> GroupView:
        good_G = usable(group)

        def keep(values: Sequence[Any]) -> list[Any]:
            return [v for v, good in zip(values, good_G, strict=True) if good]

        rewards = training_rewards(group, self.config)
        turns: list[tuple[float, ...]] = []
        if self.config.algorithm.turns.advantage == "turn":
            told = zip(keep(group.rollouts), keep(rewards), strict=True)
            turns = [tuple(rewards_of_turns(self._paid_for(r), reward)) for r, reward in told]
        gdpo = self.config.algorithm.reward_aggregation == "gdpo"
        parts, weights = (
            (keep(column) for column in training_parts(group, self.config)) if gdpo else ([], [])
        )
        return GroupView(
            group.key,
            group.sample.id,
            group.sample.task,
            group.sample.source,
            tuple(keep(rewards)),
            tuple(keep([t.num_tokens for t in group.rollouts])),
            tuple(parts),
            tuple(weights),
            accuracy_level(group, self.headline_of(group.sample)),
            tuple(keep([t.tree for t in group.rollouts])),
            tuple(turns),
        )

    def _paid_for(self, rollout: Rollout) -> Sequence[float]:
        """What its turns were paid. In the control experiment (reward.shuffle) nothing: the reward of another rollout of the group,
        which it has then, comes at its end."""
        return [0.0] * len(rollout.turns) if self.config.reward.shuffle else self._paid(rollout)

    def _advantages(self, views: Sequence[GroupView]) -> list[list[float]]:
        a = self.config.algorithm
        if a.reward_aggregation == "gdpo":
            found = whiten(
                [gdpo_advantages(v.parts, part_weights(v.weights, v.sample)) for v in views]
            )
        elif a.turns.advantage == "turn":
            found = [self._of_turns(v) for v in views]
        elif a.advantage_scale in ("ema", "ema_within"):
            found = self._by_ema(views)
        elif a.advantage == "grpo" and a.advantage_scale in ("std", "none"):
            tree = self.config.rollout.tree
            found = [
                tree_advantages(v.rewards, v.trees, a.advantage_scale)
                if tree.roots and tree.within
                else group_advantages(v.rewards, a.advantage_scale).tolist()
                for v in views
            ]
        else:
            assert a.advantage != "gae", "a critic's advantages are mmrl.training.critic's"
            found = [centred(v.rewards, a.advantage, v.lengths) for v in views]
            if a.advantage_scale == "batch":
                found = whiten(found)
            elif a.advantage_scale == "batch_rewards":
                found = over_rewards_std(found, [v.rewards for v in views])
            elif a.advantage_scale == "std":  # pass_k: the group's own std, as in GRPO
                found = [
                    _over_std(offsets, v.rewards) for offsets, v in zip(found, views, strict=True)
                ]
        if a.difficulty == "none":
            return found
        weights = difficulty_weights(
            [v.level for v in views],
            a.difficulty,
            power=a.difficulty_power,
            temperature=a.difficulty_temperature,
        )
        return [[w * x for x in values] for w, values in zip(weights, found, strict=True)]

    def _of_turns(self, view: GroupView) -> list[float]:
        a = self.config.algorithm
        assert a.advantage in ("grpo", "rloo"), "the configuration refuses others"
        assert a.advantage_scale in ("std", "none"), "the configuration refuses others"
        of_rollouts = turn_advantages(
            view.turns, a.turns.gamma, a.turns.normalise, a.advantage_scale, a.advantage
        )
        return [advantage for turns in of_rollouts for advantage in turns]

    def _by_ema(self, views: Sequence[GroupView]) -> list[list[float]]:
        def name(view: GroupView) -> str:
            return view.task if self.config.algorithm.ema.by == "task" else view.source

        self.ema.update([(name(v), v.rewards) for v in views])
        return [self.ema.advantages(name(v), v.rewards) for v in views]

    def metrics(self) -> dict[str, float]:
        """'train/ema/TASK/std' and the like for the step's row; none unless the scale is ema or ema_within."""
        if self.config.algorithm.advantage_scale not in ("ema", "ema_within"):
            return {}
        return {
            **{f"train/ema/{k}": v for k, v in self.ema.metrics().items()},
            "train/ema/fallbacks": self.ema.fallbacks,
        }

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"ema": self.ema.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.ema.load_state_dict(state["ema"])


def _paid_by_environment(rollout: Rollout) -> list[float]:
    return [turn.reward for turn in rollout.turns]


def _over_std(offsets: Sequence[float], rewards: Sequence[float], eps: float = 1e-6) -> list[float]:
    std = group_std(rewards)
    return [x / (std + eps) for x in offsets]
