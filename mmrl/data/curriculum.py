"""What is drawn when: the mix of data sources and tasks, and the stages of a curriculum.

Samples that share everything a mix can weigh form a bucket: a data source, or its samples of one task and source name when
these are weighed apart. A stage draws from pools (a bucket's samples within the stage's bounds), each with a probability;
stages that leave a bucket as it is share its pool, so that its epochs go on across stages. Nothing here is random and
nothing has state: PromptStream draws.

    plan = Plan(sources, balance="tasks", stages=config.data.curriculum)
    stage = plan.stages[plan.stage_at(step, total_steps)]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mmrl.config import CurriculumStage
from mmrl.errors import ConfigError, did_you_mean
from mmrl.types import Sample

if TYPE_CHECKING:
    from mmrl.data.sources import LoadedSource

__all__ = ["Bucket", "Plan", "Pool", "Stage"]


@dataclass(frozen=True)
class Bucket:
    """Places of samples in one loaded source; task and source name are '' when it is the whole of it."""

    entry: int
    positions: tuple[int, ...]
    task: str = ""
    source: str = ""


@dataclass(frozen=True)
class Pool:
    """Samples drawn in a shuffled order, each once per epoch. `seed` identifies it among all pools of a run."""

    entry: int
    positions: tuple[int, ...]
    seed: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """Pools (numbers) with their cumulative probabilities, and how many samples of each loaded source take part."""

    until: float
    pools: tuple[int, ...]
    cumulative: np.ndarray
    used: tuple[int, ...]


@dataclass
class Plan:
    """The stages of a run: those configured, then one with everything at the configured weights.

    balance 'weights' draws a source by its weight; 'tasks' ('sources') gives every task (source name) an equal share, split
    inside it by the weights and, within one data file, by numbers of samples. Raises ConfigError for unknown names, for a
    stage that leaves no sample, and for samples without the difficulty or pass rate a stage bounds.
    """

    sources: Sequence[LoadedSource]
    balance: str = "weights"
    curriculum: Sequence[CurriculumStage] = ()
    pools: list[Pool] = field(init=False, default_factory=list)
    stages: list[Stage] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        named = any(stage.weights for stage in self.curriculum)
        self._buckets = (
            _split(self.sources)
            if named or self.balance != "weights"
            else [Bucket(i, tuple(range(len(s.samples)))) for i, s in enumerate(self.sources)]
        )
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        for number, bucket in enumerate(self._buckets):
            # the unfiltered ones first: their numbers do not depend on the stages
            self._pool(number, bucket.positions)
        for number, settings in enumerate(self.curriculum):
            self.stages.append(self._stage(settings, f"data.curriculum.{number}"))
        self.stages.append(self._stage(CurriculumStage(until=1.0), "data.train"))

    def stage_at(self, step: int, total_steps: int) -> int:
        """Number of the stage of `step` (from 1): the first whose `until` exceeds the share of steps already done."""
        done = (step - 1) / total_steps
        return next(
            (i for i, stage in enumerate(self.stages[:-1]) if done < stage.until - 1e-12),
            len(self.stages) - 1,
        )

    def _pool(self, bucket: int, positions: tuple[int, ...]) -> int:
        key = (bucket, positions)
        if key not in self._numbers:
            variant = sum(b == bucket for b, _ in self._numbers)
            self._numbers[key] = len(self.pools)
            self.pools.append(
                Pool(
                    self._buckets[bucket].entry,
                    positions,
                    (bucket, variant) if variant else (bucket,),
                )
            )
        return self._numbers[key]

    def _stage(self, settings: CurriculumStage, where: str) -> Stage:
        left = [self._within(bucket, settings, where) for bucket in self._buckets]
        shares = self._shares(settings.weights, [len(positions) for positions in left], where)
        chosen = [i for i, share in enumerate(shares) if share > 0]
        if not chosen:
            raise ConfigError(
                f"{where} leaves no sample: of {sum(len(s.samples) for s in self.sources)} samples none has a "
                "positive weight and lies within its bounds; widen difficulty or pass_rate, or raise weights"
            )
        used = [0] * len(self.sources)
        for i in chosen:
            used[self._buckets[i].entry] += len(left[i])
        weights = np.array([shares[i] for i in chosen], dtype=np.float64)
        return Stage(
            settings.until,
            tuple(self._pool(i, left[i]) for i in chosen),
            np.cumsum(weights / weights.sum()),
            tuple(used),
        )

    def _within(self, bucket: Bucket, settings: CurriculumStage, where: str) -> tuple[int, ...]:
        """Places of the bucket's samples that lie within the stage's bounds."""
        if settings.difficulty is None and settings.pass_rate is None:
            return bucket.positions
        source = self.sources[bucket.entry]

        def inside(sample: Sample) -> bool:
            told = {
                "difficulty": sample.params.get("difficulty"),
                "pass_rate": source.pass_rates.get((sample.source, sample.id)),
            }
            for name, value in told.items():
                bounds = getattr(settings, name)
                if bounds is None:
                    continue
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    if settings.missing == "error":
                        origin = (
                            "params.difficulty in its data row"
                            if name == "difficulty"
                            else "data.train[].pass_rate"
                        )
                        raise ConfigError(
                            f"{where} bounds {name}: expected it on every sample ({origin}), found {value!r} on "
                            f"'{sample.id}' of source '{sample.source}'; add it, or set missing: keep or drop"
                        )
                    if settings.missing == "drop":
                        return False
                elif (
                    not (-math.inf if bounds[0] is None else bounds[0]) - 1e-9
                    <= value
                    <= (math.inf if bounds[1] is None else bounds[1]) + 1e-9
                ):  # means of rewards carry rounding
                    return False
            return True

        return tuple(p for p in bucket.positions if inside(source.samples[p]))

    def _shares(
        self, weights: Mapping[str, float], sizes: Sequence[int], where: str
    ) -> list[float]:
        """Probability of each bucket, up to a common factor; 0 for an empty one."""
        names = {s.source for source in self.sources for s in source.samples} if weights else set()
        for key in weights:
            if key not in names and not (key.isdigit() and int(key) < len(self.sources)):
                known = sorted(names)
                raise ConfigError(
                    f"{where}.weights: expected the name of a source ({', '.join(known)}) or a place in data.train "
                    f"(0 to {len(self.sources) - 1}), found '{key}'.{did_you_mean(key, known)}"
                )
        per_entry, per_name = [0] * len(self.sources), dict.fromkeys(names, 0)
        for bucket, size in zip(self._buckets, sizes, strict=True):
            per_entry[bucket.entry] += size
            if bucket.source in per_name:
                per_name[bucket.source] += size
        shares = []
        for bucket, size in zip(self._buckets, sizes, strict=True):
            if bucket.source in weights:
                weight, whole = weights[bucket.source], per_name[bucket.source]
            else:
                weight = weights.get(str(bucket.entry), self.sources[bucket.entry].config.weight)
                whole = per_entry[bucket.entry]
            shares.append(
                weight if size == whole and size else weight * size / whole if size else 0.0
            )
        if self.balance == "weights":
            return shares
        keys = [
            bucket.task if self.balance == "tasks" else bucket.source for bucket in self._buckets
        ]
        totals = {
            key: sum(s for s, k in zip(shares, keys, strict=True) if k == key) for key in keys
        }
        return [
            share / totals[key] if totals[key] > 0 else 0.0
            for share, key in zip(shares, keys, strict=True)
        ]


def _split(sources: Sequence[LoadedSource]) -> list[Bucket]:
    """One bucket per task and source name of every loaded source, in order of first appearance."""
    buckets: list[Bucket] = []
    for entry, source in enumerate(sources):
        places: dict[tuple[str, str], list[int]] = {}
        for position, sample in enumerate(source.samples):
            places.setdefault((sample.task, sample.source), []).append(position)
        buckets += [Bucket(entry, tuple(p), task, name) for (task, name), p in places.items()]
    return buckets
