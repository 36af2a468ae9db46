"""Data sources of a run and the endless, seeded, resumable stream of prompts drawn from them.

The order depends only on (seed, draw number), so two processes or a resumed run see the same samples.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.config import DataSource
from mmrl.errors import DataError
from mmrl.registry import task_from_spec
from mmrl.task import Task
from mmrl.types import Sample

__all__ = ["LoadedSource", "PromptStream", "load_sources", "write_rejected"]


@dataclass(frozen=True)
class LoadedSource:
    """One data source: its task, its samples, its share of the draws, and rows that could not be used."""

    config: DataSource
    task: Task
    samples: tuple[Sample, ...]
    rejected: tuple[Any, ...] = ()


def load_sources(configs: Sequence[DataSource], *, on_error: str = "raise", where: str = "data.train") -> list[LoadedSource]:
    """Read every source. Raises DataError when a source is missing, empty, or repeats the id of another.

    With on_error 'record', unusable rows are kept in `rejected` instead of stopping the run. `where` is what the user
    would correct, named in errors: a list in the configuration (data.train, data.eval) or an option (--data).
    """
    key = f"{where}[].path" if where.startswith("data.") else where
    loaded: list[LoadedSource] = []
    seen: dict[str, str] = {}
    for config in configs:
        if not Path(config.path).exists():
            raise DataError(f"expected data at {config.path}, found nothing; check {key}")
        task = task_from_spec(config.task, config.params)
        task.on_error = on_error
        samples = tuple(task.load(config.path))[: config.limit]
        if not samples:
            raise DataError(f"{config.path}: expected at least one usable sample, found none")
        for sample in samples:
            key = f"{sample.source}/{sample.id}"
            if key in seen:
                raise DataError(f"{config.path}: sample id '{sample.id}' of source '{sample.source}' is already used in "
                                f"{seen[key]}; ids must be unique per source")
            seen[key] = config.path
        loaded.append(LoadedSource(config, task, samples, tuple(task.rejected)))
    return loaded


def write_rejected(sources: Sequence[LoadedSource], path: Path) -> int:
    """List unusable rows in a jsonl file (file, row, reason); returns how many there are."""
    rows = [{"path": s.config.path, "row": str(getattr(r, "row", "")), "reason": str(getattr(r, "reason", r))}
            for s in sources for r in s.rejected]
    if rows:
        path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return len(rows)


def _digest(samples: Sequence[Sample]) -> str:
    """'<count> samples, <hash of ids, questions, answers and pictures' paths>'."""
    digest = hashlib.blake2b(digest_size=8)
    for sample in samples:
        digest.update(repr((sample.id, sample.question, sample.answer, sample.images)).encode("utf-8", "surrogatepass"))
    return f"{len(samples)} samples, {digest.hexdigest()}"


class PromptStream:
    """Endless draws: a source by weight, then its next sample in a shuffled order renewed every epoch."""

    def __init__(self, sources: Sequence[LoadedSource], seed: int) -> None:
        if not sources:
            raise DataError("expected at least one entry in data.train, found none")
        self.sources, self.seed = list(sources), seed
        weights = np.array([s.config.weight for s in sources], dtype=np.float64)
        self._cumulative = np.cumsum(weights / weights.sum())
        self._order: dict[tuple[int, int], np.ndarray] = {}
        self.draws = 0
        self.taken = [0] * len(self.sources)
        self._digests = [_digest(s.samples) for s in self.sources]
        self._by_id = {(x.source, x.id): (x, s) for s in self.sources for x in s.samples}

    def find(self, source: str, sample_id: str) -> tuple[Sample, Task]:
        """The sample of that source and id, with its task."""
        sample, loaded = self._by_id[source, sample_id]
        return sample, loaded.task

    def draw(self) -> tuple[Sample, Task]:
        """The next (sample, its task)."""
        u = np.random.default_rng((self.seed, 11, self.draws)).random()
        index = min(int(np.searchsorted(self._cumulative, u, side="right")), len(self.sources) - 1)
        self.draws += 1
        source = self.sources[index]
        epoch, position = divmod(self.taken[index], len(source.samples))
        self.taken[index] += 1
        return source.samples[self._permutation(index, epoch)[position]], source.task

    def _permutation(self, index: int, epoch: int) -> np.ndarray:
        if (index, epoch) not in self._order:
            for key in [k for k in self._order if k[0] == index]:
                del self._order[key]
            rng = np.random.default_rng((self.seed, 13, index, epoch))
            self._order[index, epoch] = rng.permutation(len(self.sources[index].samples))
        return self._order[index, epoch]

    def epochs(self) -> list[float]:
        """Passes over each source so far."""
        return [t / len(s.samples) for t, s in zip(self.taken, self.sources, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able position of the stream."""
        return {"draws": self.draws, "taken": list(self.taken), "data": self._digests}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position. Raises DataError when the data changed since."""
        if state["data"] != self._digests:
            raise DataError(f"cannot resume: the data changed since the checkpoint was written (was {state['data']}, now "
                            f"{self._digests}); restore the files or start a new run")
        self.draws, self.taken = state["draws"], list(state["taken"])
