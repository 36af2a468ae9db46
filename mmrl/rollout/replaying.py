"""Past successes in groups that have none: what was written then is played again, and has to come out as it did.

    replaying = Replaying(config, policy, sources)
    if wanted := replaying.wanted(group):
        group = replaying.played(group, wanted, episodes)

The pool (mmrl.algorithms.replay) keeps what the policy wrote. A task without an environment has its reward computed again; an
environment is reset and shown the same turns, so that its observations, pictures included, are there to be trained on. What is not
shown what it was shown then, or does not succeed again, is forgotten: its log-probs would be of something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mmrl.algorithms.group_rewards import is_usable
from mmrl.algorithms.replay import Place, ReplayPool, Success, as_replayed
from mmrl.config import RunConfig
from mmrl.data.demonstrations import is_right
from mmrl.data.sources import LoadedSource
from mmrl.errors import ConfigError
from mmrl.policy.policy import Policy
from mmrl.rollout.episodes import Episode, Spent, play_written
from mmrl.types import Rollout, RolloutGroup, Score

__all__ = ["Replaying", "succeeded"]


def succeeded(rollout: Rollout) -> bool:
    """Whether it came to its end, and is right by the task's own verdict."""
    return (
        rollout.error is None
        and is_usable(rollout)
        and rollout.score is not None
        and is_right(rollout.score)
    )


class _Told(NamedTuple):
    """What a process says of its step."""

    found: list[Success]
    lost: list[Place]
    used: int
    filled: int


class Replaying:
    """Fills groups from the pool, and gathers what the pool takes in. Raises ConfigError for rewards of a whole group."""

    def __init__(self, config: RunConfig, policy: Policy, sources: Sequence[LoadedSource]) -> None:
        self.config, self.policy = config, policy
        self.pool = ReplayPool(config.algorithm.replay)
        for source in sources if self.pool.active else ():
            for kind in sorted({s.task for s in source.samples}):
                if source.task.member(kind).in_group:
                    raise ConfigError(
                        f"algorithm.replay: the reward of task '{kind}' looks at the policy's whole group, so that a success "
                        "of before has no place in it; set algorithm.replay.per_group: 0"
                    )

    def wanted(self, group: RolloutGroup) -> list[Success]:
        """The successes that a group is to be filled with; [] where it has one of its own, or the pool none."""
        if not self.pool.active or not group.rollouts or any(map(succeeded, group.rollouts)):
            return []
        sample = group.sample
        return self.pool.choose(sample.source, sample.id, group.key, self.config.seed)

    def answered(
        self, group: RolloutGroup, wanted: Sequence[Success], scores: Sequence[Score]
    ) -> RolloutGroup:
        """A group of a task without an environment, filled; `scores` of the successes' answers."""
        found = [Rollout(s.turns, score) for s, score in zip(wanted, scores, strict=True)]
        return self._mixed(group, wanted, found)

    def played(
        self,
        group: RolloutGroup,
        wanted: Sequence[Success],
        episodes: Sequence[Episode],
        spent: Spent,
    ) -> RolloutGroup:
        """A group of a task with an environment, filled; `episodes` have begun, one for each success. `spent` counts the time."""
        found = play_written(self.policy, episodes, [s.turns for s in wanted], spent)
        return self._mixed(group, wanted, found)

    def _mixed(
        self, group: RolloutGroup, wanted: Sequence[Success], found: Sequence[Rollout]
    ) -> RolloutGroup:
        told = []
        for success, rollout in zip(wanted, found, strict=True):
            shown = Success.of(
                success.source, success.sample_id, success.place, rollout, group.fingerprint
            ).shown
            if shown == success.shown and succeeded(rollout):
                told.append(as_replayed(rollout, success))
            else:
                self.pool.lost.append(success.place)
        if not told:
            return group
        self.pool.used, self.pool.filled = self.pool.used + len(told), self.pool.filled + 1
        own, room = group.rollouts, len(group.rollouts) - len(told)
        return replace(group, rollouts=(*own[:room], *told), replaced=own[room:])

    def gathered(
        self, groups: Sequence[RolloutGroup], gather: Callable[[list[Any]], list[Any]]
    ) -> dict[str, float]:
        """The step has ended with these closed groups on this process: the pool takes in their successes, of all processes.
        Collective. Returns the metrics of the step."""
        found = [
            Success.of(g.sample.source, g.sample.id, (*g.key, number), r, g.fingerprint)
            for g in groups
            for number, r in enumerate((*g.rollouts, *g.replaced))
            if not r.replayed and succeeded(r)
        ]
        told = gather([_Told(found, self.pool.lost, self.pool.used, self.pool.filled)])
        lost = [place for one in told for place in one.lost]
        self.pool.end_step([s for one in told for s in one.found], lost)
        return {
            "train/replay/pool": float(len(self.pool)),
            "train/replay/rollouts": float(sum(one.used for one in told)),
            "train/replay/groups": float(sum(one.filled for one in told)),
            "train/replay/lost": float(len(set(lost))),
        }
