"""Rewards scored on the nodes of a Ray cluster (engine.workers ray).

    with RayScorer(specs, tasks, cluster, workers=4, timeout_s=10.0) as scorer:
        scorer.score(jobs)

Each actor scores its share with a mmrl.workers.scorer.Scorer of one process beside it: deadlines, crashes and their records
(reward_timeout, reward_crash) are the local ones, and a reward that hangs or dies never takes an actor along. A lost actor or node
is nobody's fault: its share is scored again by another, and counted in `cluster.restarts`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from mmrl.distributed.cluster.group import ActorGroup
from mmrl.distributed.cluster.session import Cluster
from mmrl.registry import adopt, carried, task_from_spec
from mmrl.task import Task
from mmrl.types import Score
from mmrl.workers.scorer import Scorer
from mmrl.workers.scoring import ScoreJob

__all__ = ["RayScorer", "RewardHost"]


class RewardHost:
    """The Ray actor: a Scorer with one process. `part_names` by task, for scores of rewards that failed."""

    def __init__(
        self,
        specs: Sequence[tuple[str, dict[str, Any]]],
        part_names: Sequence[Sequence[str]],
        timeout_s: float,
        tasks_there: bytes = b"",
    ) -> None:
        adopt(tasks_there)
        # else every reward process imports Ray's own main module first
        vars(sys.modules["__main__"]).pop("__file__", None)
        for spec, params in specs:  # pickle must know what scores of a file.py:Task may hold
            with contextlib.suppress(Exception):  # a task that cannot be made says so in the worker
                task_from_spec(spec, params)
        named: list[Any] = [SimpleNamespace(part_names=tuple(names)) for names in part_names]
        self._scorer = Scorer(specs, named, workers=1, timeout_s=timeout_s)

    def score(self, jobs: Sequence[ScoreJob]) -> list[Score]:
        """One score per job, in order."""
        return self._scorer.score(jobs)

    def close(self) -> None:
        """End the process."""
        self._scorer.close()


class RayScorer(Scorer):
    """A Scorer whose workers are actors of `cluster`. Raises RewardError as that does, and ClusterError."""

    def __init__(
        self,
        specs: Sequence[tuple[str, dict[str, Any]]],
        tasks: Sequence[Task],
        cluster: Cluster,
        *,
        workers: int,
        timeout_s: float = 10.0,
        concurrency: int = 64,
        verdicts: str | None = None,
    ) -> None:
        super().__init__(
            specs,
            tasks,
            workers=0,
            timeout_s=timeout_s,
            concurrency=concurrency,
            verdicts=verdicts,
        )
        names = [tuple(task.part_names) for task in tasks]
        self.group = ActorGroup(
            cluster,
            "rewards",
            workers,
            RewardHost,
            list(specs),
            names,
            timeout_s,
            carried({spec for spec, _ in specs}),
        )

    def score(self, jobs: Sequence[ScoreJob]) -> list[Score]:
        """See Scorer.score. Rewards that are an `async def` wait in a process beside this one: one loop keeps the limits of their
        judges."""
        waiting = self.waiting(jobs)
        rest = iter(self._remote([job for i, job in enumerate(jobs) if i not in waiting]))
        mine = [jobs[i] for i in sorted(waiting)]
        apart = iter(self._supervised(mine, range(len(mine))) if mine else [])
        return [next(apart) if i in waiting else next(rest) for i in range(len(jobs))]

    def _remote(self, jobs: Sequence[ScoreJob]) -> list[Score]:
        share = max(1, -(-len(jobs) // len(self.group.actors)))
        parts = [(list(jobs[first : first + share]),) for first in range(0, len(jobs), share)]
        return [score for scores in self.group.call("score", parts) for score in scores]

    def close(self) -> None:
        """End the actors and their processes."""
        self.group.close("close")
        super().close()
