"""Data sources of a run and the endless, seeded, resumable stream of prompts drawn from them.

The order depends only on (seed, curriculum stage, draw number), so two processes or a resumed run see the same samples.
What is drawn with which probability in which stage is decided in mmrl.data.curriculum.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.config import CurriculumStage, DataSource, RunConfig
from mmrl.data.curriculum import Plan
from mmrl.data.demonstrations import check_demonstrations
from mmrl.data.pass_rates import filter_by_rate, read_pass_rates
from mmrl.errors import DataError, MediaError
from mmrl.files import json_line, write_text
from mmrl.registry import OFFERED, task_from_spec
from mmrl.task import Task
from mmrl.types import Sample
from mmrl.video.media import Orientation

__all__ = [
    "LoadedSource",
    "PromptStream",
    "data_name",
    "load_sources",
    "note_lines",
    "prompt_stream",
    "skipped_report",
    "stop_at_broken_media",
    "write_rejected",
    "write_skipped",
]

_DEMO = Path("runs/demo_data")  # of the recipe `demo`


@dataclass(frozen=True)
class LoadedSource:
    """One data source: its task, its samples, its share of the draws, rows that could not be used (`rejected`) and those
    left out on request, counted by reason (`skipped`): by the reader, by the pass-rate filter. `notes` count what was done to
    rows that are used: annotations left out or cut, pictures with an EXIF orientation."""

    config: DataSource
    task: Task
    samples: tuple[Sample, ...]
    rejected: tuple[Any, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    # by (source name, sample id)
    pass_rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)


def load_sources(
    configs: Sequence[DataSource],
    *,
    on_error: str = "raise",
    orientation: Orientation = "displayed",
    where: str = "data.train",
) -> list[LoadedSource]:
    """Read every source. Raises DataError when a source is missing, empty, or repeats the id of another.

    With on_error 'record', unusable rows are kept in `rejected` instead of stopping the run; `orientation` is
    data.image.orientation. `where` is what the user
    would correct, named in errors: a list in the configuration (data.train, data.eval) or an option (--data).
    """
    key = f"{where}[].path" if where.startswith("data.") else where
    loaded: list[LoadedSource] = []
    seen: dict[str, str] = {}
    for config in configs:
        task = task_from_spec(config.task, config.params)
        if (
            config.path not in task.own_rows
            and not config.path.startswith("hf:/")
            and not Path(config.path).exists()
        ):
            drawn = "`mmrl demo` draws it and trains on it; or " * (
                _DEMO in Path(config.path).parents
            )
            own = "".join(f"{name}, " for name in task.own_rows)
            raise DataError(
                f"expected {own and f'one of {own}or '}data at {config.path}, found nothing; {drawn}check {key}"
            )
        task.on_error, task.orientation = on_error, orientation
        samples, refused = check_demonstrations(config.path, _rows(task, config), on_error)
        skipped, rates = Counter(task.skipped), {}
        if config.pass_rate is not None:
            rates = read_pass_rates(config.pass_rate)
            samples, dropped = filter_by_rate(samples, rates, config.pass_rate)
            skipped += dropped
        samples = samples[: config.limit]
        if not samples:
            left_out = ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items()))
            raise DataError(
                f"{config.path}: expected at least one usable sample, found none"
                + (f"; left out: {left_out}" if left_out else "")
            )
        for sample in samples:
            key = f"{sample.source}/{sample.id}"
            if key in seen:
                raise DataError(
                    f"{config.path}: sample id '{sample.id}' of source '{sample.source}' is already used in "
                    f"{seen[key]}; ids must be unique per source: give the rows of one of them other ids (of a generated set: "
                    "another --seed)"
                )
            seen[key] = config.path
        loaded.append(
            LoadedSource(
                config,
                task,
                samples,
                (*task.rejected, *refused),
                dict(sorted(skipped.items())),
                rates,
                dict(sorted(task.notes.items())),
            )
        )
    return loaded


def data_name(path: str | Path) -> str:
    """The path of data as text; hf://owner/name gets back the slash that a command line took it for a file."""
    text = str(path)
    return (
        text.replace("hf:/", "hf://", 1)
        if text.startswith("hf:/") and not text.startswith("hf://")
        else text
    )


def _rows(task: Task, config: DataSource) -> tuple[Sample, ...]:
    """The samples of a source. Raises DataError for the first broken row, which says how to see all of them."""
    try:
        return tuple(task.load(config.path))
    except DataError as error:
        if config.task.startswith(OFFERED):  # no command knows a task of the caller's own process
            raise
        raise DataError(
            f"{error} (all of them at once: mmrl tasks check {config.task} --all --data {config.path})"
        ) from error


def stop_at_broken_media(error: Exception, sample: Sample, on_error: str) -> None:
    """A picture or clip that cannot be read ends the run where data.on_error is 'raise': DataError from `error`. Other errors, and
    all of them with 'record', are the caller's to list."""
    if on_error == "raise" and isinstance(error, MediaError):
        raise DataError(
            f"sample {sample.id!r} of source {sample.source!r}: {error}; fix the file and resume, remove the row, or "
            "set data.on_error=record, which records such samples and goes on"
        ) from error


def write_rejected(sources: Sequence[LoadedSource], path: Path) -> int:
    """List unusable rows in a jsonl file (file, row, reason); returns how many there are."""
    rows = [
        {
            "path": s.config.path,
            "row": str(getattr(r, "row", "")),
            "reason": str(getattr(r, "reason", r)),
        }
        for s in sources
        for r in s.rejected
    ]
    path.unlink(missing_ok=True)  # of an earlier start in the same folder
    if rows:
        write_text(path, "".join(json.dumps(r) + "\n" for r in rows))
    return len(rows)


def skipped_report(sources: Sequence[LoadedSource], held_out: int = 0) -> list[dict[str, Any]]:
    """Per data source: samples kept (by source name) with their pictures, clips and sounds, rows skipped by reason, what was done
    to rows kept, rows rejected. The last `held_out` sources are those of data.eval."""
    return [
        {
            "path": s.config.path,
            "task": s.config.task,
            "use": "eval" if place >= len(sources) - held_out else "train",
            "kept": len(s.samples),
            "pictures": len({path for x in s.samples for path in x.images}),
            "clips": len({path for x in s.samples for path in x.videos}),
            "sounds": len({path for x in s.samples for path in x.audios}),
            "by_source": dict(sorted(Counter(x.source for x in s.samples).items())),
            "skipped": dict(s.skipped),
            "notes": dict(s.notes),
            "rejected": len(s.rejected),
        }
        for place, s in enumerate(sources)
    ]


def note_lines(sources: Sequence[LoadedSource]) -> list[str]:
    """One line per data source with notes: what was done to rows that are used, counted."""
    return [
        f"{s.config.path}: " + ", ".join(f"{count:,} x {note}" for note, count in s.notes.items())
        for s in sources
        if s.notes
    ]


def write_skipped(sources: Sequence[LoadedSource], path: Path, held_out: int = 0) -> dict[str, int]:
    """Write `skipped_report` as JSON; returns the rows skipped by reason over all sources."""
    write_text(path, json_line(skipped_report(sources, held_out), indent=1) + "\n")
    return dict(sorted(sum((Counter(s.skipped) for s in sources), Counter()).items()))


def _digest(samples: Sequence[Sample]) -> str:
    """'<count> samples, rows <hash of all fields>': what the rows say. The bytes of media are mmrl.training.media_record's."""
    digest = hashlib.blake2b(digest_size=8)
    for x in samples:
        row: tuple[Any, ...] = (
            *(x.id, x.task, x.source, x.question, x.answer),
            *(x.images, x.videos, dict(x.params)),
            *((x.audios,) if x.audios else ()),
        )
        digest.update(repr(row).encode("utf-8", "surrogatepass"))
    return f"{len(samples)} samples, rows {digest.hexdigest()}"


def _digest_before(samples: Sequence[Sample]) -> str:
    """What checkpoints had in its place before params, tasks and sources were part of it."""
    digest = hashlib.blake2b(digest_size=8)
    for sample in samples:
        media = (sample.images, sample.videos) if sample.videos else (sample.images,)
        digest.update(
            repr((sample.id, sample.question, sample.answer, *media)).encode(
                "utf-8", "surrogatepass"
            )
        )
    return f"{len(samples)} samples, {digest.hexdigest()}"


class PromptStream:
    """Endless draws: a pool of the current stage by its probability, then its next sample in an order renewed every epoch."""

    def __init__(
        self,
        sources: Sequence[LoadedSource],
        seed: int,
        *,
        balance: str = "weights",
        curriculum: Sequence[CurriculumStage] = (),
    ) -> None:
        if not sources:
            raise DataError("expected at least one entry in data.train, found none")
        self.sources, self.seed = list(sources), seed
        self.plan = Plan(self.sources, balance, curriculum)
        self.stage = 0
        self._order: dict[tuple[int, int], np.ndarray] = {}
        self.draws = 0
        self.taken = [0] * len(self.plan.pools)
        self._digests = [_digest(s.samples) for s in self.sources]
        self._by_id = {(x.source, x.id): (x, s) for s in self.sources for x in s.samples}
        # of the stage with that number
        self._allowed: tuple[int, frozenset[tuple[str, str]]] | None = None

    def find(self, source: str, sample_id: str) -> tuple[Sample, Task]:
        """The sample of that source and id, with its task."""
        sample, loaded = self._by_id[source, sample_id]
        return sample, loaded.task

    def begin_step(self, step: int, total_steps: int) -> bool:
        """Enter the curriculum stage of `step`; True when it is another one than before."""
        before, self.stage = self.stage, self.plan.stage_at(step, total_steps)
        return self.stage != before

    def allows(self, source: str, sample_id: str) -> bool:
        """Whether the current stage may draw that sample."""
        if len(self.plan.stages) == 1:
            return True
        if self._allowed is None or self._allowed[0] != self.stage:
            pools = [self.plan.pools[number] for number in self.plan.stages[self.stage].pools]
            samples = [
                self.sources[pool.entry].samples[p] for pool in pools for p in pool.positions
            ]
            self._allowed = (self.stage, frozenset((s.source, s.id) for s in samples))
        return (source, sample_id) in self._allowed[1]

    def draw(self) -> tuple[Sample, Task]:
        """The next (sample, its task)."""
        stage = self.plan.stages[self.stage]
        u = np.random.default_rng((self.seed, 11, self.draws)).random()
        number = stage.pools[
            min(int(np.searchsorted(stage.cumulative, u, side="right")), len(stage.pools) - 1)
        ]
        self.draws += 1
        pool = self.plan.pools[number]
        epoch, position = divmod(self.taken[number], len(pool.positions))
        self.taken[number] += 1
        source = self.sources[pool.entry]
        return source.samples[
            pool.positions[self._permutation(number, epoch)[position]]
        ], source.task

    def _permutation(self, number: int, epoch: int) -> np.ndarray:
        if (number, epoch) not in self._order:
            for key in [k for k in self._order if k[0] == number]:
                del self._order[key]
            pool = self.plan.pools[number]
            rng = np.random.default_rng((self.seed, 13, pool.seed[0], epoch, *pool.seed[1:]))
            self._order[number, epoch] = rng.permutation(len(pool.positions))
        return self._order[number, epoch]

    def epochs(self) -> list[float]:
        """Samples drawn from each source so far, in passes over it."""
        drawn = [0] * len(self.sources)
        for pool, taken in zip(self.plan.pools, self.taken, strict=True):
            drawn[pool.entry] += taken
        return [n / len(s.samples) for n, s in zip(drawn, self.sources, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able position of the stream."""
        return {
            "draws": self.draws,
            "taken": list(self.taken),
            "stage": self.stage,
            "data": self._digests,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position. Raises DataError when the data or its pools changed since."""
        now = self._digests
        if not any(", rows " in saved for saved in state["data"]):
            now = [_digest_before(s.samples) for s in self.sources]
        if state["data"] != now:
            raise DataError(
                f"cannot resume: the data changed since the checkpoint was written (was {state['data']}, now "
                f"{now}); restore the files or start a new run"
            )
        if len(state["taken"]) != len(self.taken):
            raise DataError(
                f"cannot resume: the checkpoint draws from {len(state['taken'])} pools of samples, now there are "
                f"{len(self.taken)} (data.balance, data.curriculum or its pass rates changed); restore them or "
                "start a new run"
            )
        self.draws, self.taken, self.stage = (
            state["draws"],
            list(state["taken"]),
            state.get("stage", 0),
        )


def prompt_stream(config: RunConfig, sources: Sequence[LoadedSource]) -> PromptStream:
    """The stream of a run. Raises ConfigError for a curriculum that does not fit its data."""
    return PromptStream(
        sources, config.seed, balance=config.data.balance, curriculum=config.data.curriculum
    )
