"""Read a run's folder for the report, forgiving what is missing or half written: a run in progress can be looked at.

Nothing is guessed: what could not be read is listed in `Run.notes`, which the page shows.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.errors import DataError

__all__ = [
    "EvalStep",
    "Find",
    "Run",
    "Series",
    "eval_folders",
    "load_eval",
    "load_run",
    "logged_path",
    "number",
    "own_file",
    "parse_line",
    "renamed",
]

Series = list[tuple[float, float | None]]
"""(step, value) in order of step; None where the value is missing, null or not finite."""

Find = Callable[[str], str]
"""Where a picture or clip that a row names lies; a name that no file can have for one that may not be shown."""


@dataclass(frozen=True)
class EvalStep:
    """One evaluation. `estimates[mode][metric]` is {'mean', 'low', 'high', 'n'}; missing numbers are None."""

    step: int
    folder: Path
    estimates: Mapping[str, Mapping[str, Mapping[str, float | None]]]
    per_source: Mapping[str, Mapping[str, Mapping[str, float | None]]]
    protocol: Mapping[str, Any]
    per_task: Mapping[str, Mapping[str, Mapping[str, float | None]]] = field(default_factory=dict)
    # table -> row -> the metric it is judged by
    headlines: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def rows(
        self, keep: Callable[[dict[str, Any]], bool] = lambda row: True
    ) -> Iterator[dict[str, Any]]:
        """Rows of predictions.jsonl that `keep` wants, read line by line; lines cut short by a kill are passed over."""
        path = self.folder / "predictions.jsonl"
        if not own_file(path, self.folder):
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                row = parse_line(line)
                if isinstance(row, dict) and keep(row):
                    yield row


@dataclass
class Run:
    """What the folder holds. `metrics` are the rows of metrics.jsonl; where a step occurs twice the last one wins."""

    folder: Path
    info: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evals: list[EvalStep] = field(default_factory=list)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    gallery: list[tuple[str | None, str]] = field(default_factory=list)
    """(source, id) of the prompts followed through training; source None (older runs) is any source."""
    # one record per data file, see mmrl.data.sources.skipped_report
    data: list[dict[str, Any]] = field(default_factory=list)
    # samples that could not be used at their step
    failures: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The run's name, else its folder's."""
        return str(self.info.get("name") or self.folder.name)

    @property
    def last_step(self) -> int:
        """The last step with metrics or an evaluation."""
        return max(
            [int(r["step"]) for r in self.metrics[-1:]] + [e.step for e in self.evals[-1:]],
            default=0,
        )

    def names(self) -> list[str]:
        """All metric names, in order of first appearance, without 'step'."""
        return [n for n in dict.fromkeys(k for row in self.metrics for k in row) if n != "step"]

    def series(self, name: str) -> Series:
        """The metric over the steps; empty when no step has a finite value."""
        points: Series = [(float(row["step"]), number(row.get(name))) for row in self.metrics]
        return points if any(v is not None for _, v in points) else []

    def sources(self) -> list[str]:
        """Data sources named in training metrics and evaluations, in order of first appearance."""
        found = [
            m.group(1) for n in self.names() if (m := re.fullmatch(r"train/(.+)/reward/mean", n))
        ]
        return list(dict.fromkeys(found + [s for e in self.evals for s in e.per_source]))

    def headline(self, source: str) -> str | None:
        """The metric that `source` is judged by; None when its tasks differ or no evaluation names it."""
        named = next(
            (
                e.headlines["per_source"][source]
                for e in reversed(self.evals)
                if source in e.headlines.get("per_source", {})
            ),
            None,
        )
        return named if named and "," not in named else None


def number(value: Any) -> float | None:
    """A finite float, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond any float
        return None


def own_file(path: Path, folder: Path) -> bool:
    """Whether a regular file is at `path` and lies in `folder`, links followed: a run folder from elsewhere must not make a page
    show other files of this machine."""
    try:
        return path.is_file() and path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # no name of a file, or links in a circle
        return False


def logged_path(path: str, folder: Path | None) -> str:
    """Where a file that a log names lies: in `folder` if it is there, else as it is named."""
    # no name of a file: too long, or with a zero byte
    with contextlib.suppress(OSError, ValueError):
        if folder is not None and (folder / path).exists():
            return str(folder / path)
    return path


def parse_line(line: str) -> Any:
    """The JSON value of a line, None where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _there(path: Path, run: Run) -> bool:
    """Whether the run has the file; else a note says why not."""
    if own_file(path, run.folder):
        return True
    name = path.relative_to(run.folder).as_posix()
    run.notes.append(
        f"{name} is a link that leads out of the run's folder, and is left out"
        if path.is_symlink() and path.exists()
        else f"{name} is missing"
    )
    return False


def _json(path: Path, run: Run) -> dict[str, Any]:
    name = path.relative_to(run.folder).as_posix()
    if not _there(path, run):
        return {}
    value = parse_line(path.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(value, dict):
        run.notes.append(f"{name} is not a complete JSON object")
        return {}
    return value


def _data(path: Path, run: Run) -> list[dict[str, Any]]:
    """The records of skipped.json; a run without data files has none."""
    if not _there(path, run):
        return []
    value = parse_line(path.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(value, list) or not all(isinstance(record, dict) for record in value):
        run.notes.append(f"{path.name} is not a complete list of data files")
        return []
    return value


def _jsonl(path: Path, run: Run) -> list[dict[str, Any]]:
    """Rows that carry a step; broken lines are counted in the notes."""
    name = path.relative_to(run.folder).as_posix()
    if not _there(path, run):
        return []
    rows, broken = [], 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            row = parse_line(line) if line.strip() else {}
            if isinstance(row, dict) and number(row.get("step")) is not None:
                rows.append(row)
            elif line.strip():
                broken += 1
    if broken:
        run.notes.append(
            f"{name}: {broken} line{'s' if broken > 1 else ''} could not be read and "
            f"{'are' if broken > 1 else 'is'} left out"
        )
    return rows


def _estimates(value: Any) -> dict[str, dict[str, float | None]]:
    """{'metric': {'mean', 'low', 'high', 'n'}} of whatever has a mean in `value`."""
    if not isinstance(value, Mapping):
        return {}
    return {
        str(name): {k: number(e.get(k)) for k in ("mean", "low", "high", "n")}
        for name, e in value.items()
        if isinstance(e, Mapping) and number(e.get("mean")) is not None
    }


def _table(value: Any) -> dict[str, dict[str, dict[str, float | None]]]:
    return (
        {str(name): _estimates(row) for name, row in value.items()}
        if isinstance(value, Mapping)
        else {}
    )


def _names(value: Any) -> dict[str, dict[str, str]]:
    tables = value.items() if isinstance(value, Mapping) else ()
    return {
        str(t): {str(k): str(v) for k, v in rows.items()}
        for t, rows in tables
        if isinstance(rows, Mapping)
    }


def eval_folders(folder: Path) -> list[tuple[int, Path]]:
    """(step, eval/step_*) of a run in order of step, finished or not."""
    found = []
    for path in (folder / "eval").glob("step_*"):
        if re.fullmatch(r"step_\d{1,12}", path.name) and path.is_dir():
            found.append((int(path.name.removeprefix("step_")), path))
    return sorted(found)


def load_eval(step: int, path: Path, run: Run) -> EvalStep | None:
    """The evaluation in `path`; None, and a note of the run, where it was not finished or cannot be read."""
    if not (path / "results.json").is_file():
        run.notes.append(
            f"eval/{path.name}/results.json is missing: the evaluation was not finished"
        )
        return None
    data = _json(path / "results.json", run)
    if not data:
        return None
    if not own_file(path / "predictions.jsonl", run.folder):
        run.notes.append(f"eval/{path.name}/predictions.jsonl is missing")
    return EvalStep(
        step,
        path,
        {m: _estimates(data.get(m)) for m in ("greedy", "sampled")},
        _table(data.get("per_source")),
        data["protocol"] if isinstance(data.get("protocol"), Mapping) else {},
        _table(data.get("per_task")),
        _names(data.get("headlines")),
    )


def _load_evals(run: Run) -> None:
    if not (run.folder / "eval").is_dir():
        run.notes.append("eval/ is missing")
        return
    found = (load_eval(step, path, run) for step, path in eval_folders(run.folder))
    run.evals = [evaluation for evaluation in found if evaluation is not None]
    if not run.evals:
        run.notes.append("eval/ holds no finished evaluation")


def _gallery(found: Mapping[str, Any]) -> list[tuple[str | None, str]]:
    """Entries of gallery.json: {"prompts": [{"source", "id"}]}, or {"ids": [...]} of older runs; others are left out."""
    prompts, ids = found.get("prompts"), found.get("ids")
    if isinstance(prompts, list):
        return [
            (str(p["source"]), str(p["id"]))
            for p in prompts
            if isinstance(p, dict) and {"source", "id"} <= p.keys()
        ]
    return [(None, str(i)) for i in ids] if isinstance(ids, list) else []


_RENAMED = {
    "train/clip_low": "train/clip/low",
    "train/clip_high": "train/clip/high",
    "train/approx_kl": "train/kl_step",
    "train/kl_ref": "train/kl",
    "train/policy_loss": "train/loss",
    "perf/peak_memory_gib": "memory/peak_gib",
}
"""Metrics that robots' runs called otherwise than runs on prompts, before both had one trainer."""


def renamed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics.jsonl under the names of today."""
    return {_RENAMED.get(name, name): value for name, value in row.items()}


def load_run(folder: Path, *, metrics: bool = True) -> Run:
    """Everything the report needs; `metrics=False` leaves metrics.jsonl to a caller that reads it as it grows.

    Raises DataError when `folder` is no folder; all else is a note."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(
            f"expected the folder of a run, found nothing at {folder}; give the folder that holds run.json"
        )
    run = Run(folder)
    run.info = _json(folder / "run.json", run)
    if _there(folder / "config.yaml", run):
        run.config_text = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
    if metrics:
        by_step = {row["step"]: row for row in _jsonl(folder / "metrics.jsonl", run)}
        run.metrics = [renamed(by_step[step]) for step in sorted(by_step)]
    _load_evals(run)
    run.alarms = _jsonl(folder / "alarms.jsonl", run)
    run.data = _data(folder / "skipped.json", run)
    run.failures = (
        _jsonl(folder / "failures.jsonl", run) if (folder / "failures.jsonl").is_file() else []
    )
    if (folder / "gallery.json").is_file():
        run.gallery = _gallery(_json(folder / "gallery.json", run))
    gaps = sum(
        isinstance(v, float) and not math.isfinite(v) for row in run.metrics for v in row.values()
    )
    if gaps:
        run.notes.append(
            f"metrics.jsonl: {gaps} value{'s' if gaps > 1 else ''} not finite (NaN or infinite), drawn "
            f"as gaps"
        )
    return run
