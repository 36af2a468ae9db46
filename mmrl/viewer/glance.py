"""What the table of runs says of each: status, task, model, steps, the metric it is judged by with its interval, and when.

Only run.json, the last line of metrics.jsonl and two evaluations are read, and only when they changed.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mmrl.operations.lock import STALE_S, lock_file
from mmrl.report.embodied import HEADLINE, is_embodied
from mmrl.report.load import Run, eval_folders, load_eval, number, parse_line
from mmrl.report.text import metric_name
from mmrl.report.verdict import choose_headline, mode_label
from mmrl.viewer.folders import Stamp, open_own, stamp

__all__ = ["Glances", "headline", "status_of", "timing"]

_QUIET_S = 900.0
"""A run that says 'running' and wrote nothing for so long counts as stale, where no lock tells."""
_TAIL = 1 << 20
_MOST_JSON = 16 << 20
_STATUS = {"finished": "finished", "interrupted": "stopped", "failed": "failed"}


def status_of(folder: Path, info: dict[str, Any], now: float | None = None) -> str:
    """running, finished, stopped (by a signal; it can be resumed), failed, stale (says it runs, but nothing is alive) or unknown.

    A live run touches its lock, which lies beside its folder (mmrl.operations.lock)."""
    said = str(info.get("status") or "")
    if said != "running":
        return _STATUS.get(said, "unknown")
    now = time.time() if now is None else now
    touched = stamp(lock_file(folder))[2] / 1e9
    if touched:
        return "running" if now - touched < STALE_S else "stale"
    return "running" if now - last_written(folder) < _QUIET_S else "stale"


def last_written(folder: Path) -> float:
    """When the run last wrote something, in seconds since 1970; 0 for an empty folder."""
    names = ("run.json", "metrics.jsonl", "rollouts", "eval", "alarms.jsonl")
    return max(stamp(folder / name)[2] for name in names) / 1e9


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """An object in a file of the folder; {} where there is none."""
    file = open_own(folder / name, folder)
    if file is None:
        return {}
    with file:
        value = parse_line(file.read(_MOST_JSON).decode("utf-8", "replace"))
    return value if isinstance(value, dict) else {}


def last_row(folder: Path) -> dict[str, Any]:
    """The last complete row of metrics.jsonl."""
    file = open_own(folder / "metrics.jsonl", folder)
    if file is None:
        return {}
    with file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _TAIL))
        lines = file.read(_TAIL).split(b"\n")
    for line in reversed(lines[:-1]):
        row = parse_line(line.decode("utf-8", "replace"))
        if isinstance(row, dict) and number(row.get("step")) is not None:
            return row
    return {}


def headline(run: Run) -> dict[str, Any] | None:
    """The run's own metric at its first and last evaluation, with intervals; None before the first."""
    if not run.evals:
        return None
    first, last = run.evals[0], run.evals[-1]
    mode, metric = choose_headline(run)
    if is_embodied(run):
        metric = HEADLINE
        mode = next(
            (m for m in ("sampled", "greedy") if metric in first.estimates.get(m, {})), mode
        )
    many = f" of {len(last.per_source)} sources" if metric == "macro" else ""
    return {
        "mode": mode,
        "metric": metric,
        "name": ("Mean" if metric == "macro" else metric_name(metric)) + many,
        "how": mode_label(last, mode),
        "step": last.step,
        "last": last.estimates.get(mode, {}).get(metric),
        "first": first.estimates.get(mode, {}).get(metric) if last is not first else None,
        "stand_in": any("stand-in" in str(e.protocol.get("assets")) for e in run.evals),
    }


def _seconds(text: Any) -> float | None:
    """Seconds since 1970 of an ISO time."""
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


@dataclass
class _Kept:
    mark: tuple[Any, ...]
    row: dict[str, Any]
    info: dict[str, Any]
    alarms: int = 0


class Glances:
    """A line of the table per run, kept until one of its files changes."""

    def __init__(self) -> None:
        self._kept: dict[Path, _Kept] = {}

    def of(self, key: str, folder: Path) -> dict[str, Any]:
        """The line of one run, as JSON."""
        evals = eval_folders(folder)
        ends = [*evals[:1], *evals[-2:]]  # of the last two: one may not be finished yet
        mark = (
            _mark(folder, "run.json"),
            _mark(folder, "metrics.jsonl"),
            _mark(folder, "config.yaml"),
            tuple((step, stamp(path / "results.json")) for step, path in ends),
        )
        kept = self._kept.get(folder)
        if kept is None or kept.mark != mark:
            kept = _Kept(mark, *self._read(folder, dict(ends)))
            self._kept[folder] = kept
        return {"key": key, **kept.row, **timing(folder, kept.info)}

    def forget(self, there: set[Path]) -> None:
        """Keep only those runs."""
        for folder in set(self._kept) - there:
            self._kept.pop(folder, None)

    def _read(self, folder: Path, ends: dict[int, Path]) -> tuple[dict[str, Any], dict[str, Any]]:
        info, last = read_json(folder, "run.json"), last_row(folder)
        run = Run(folder, info=info)
        config = open_own(folder / "config.yaml", folder)
        if config is not None:
            with config:
                run.config_text = config.read(1 << 20).decode("utf-8", "replace")
        found = (load_eval(step, path, run) for step, path in ends.items())
        run.evals = [e for e in found if e is not None]
        row = {
            "name": run.name,
            "task": str(info.get("task") or "")[:200],
            "model": str(info.get("model") or "")[:300],
            "step": int(number(last.get("step")) or (run.evals[-1].step if run.evals else 0)),
            "total": number(info.get("total_steps")),
            "reward": number(last.get("train/reward/mean")),
            "headline": headline(run),
            "robot": is_embodied(run),
        }
        return row, info


def _mark(folder: Path, name: str) -> Stamp:
    return stamp(folder / name)


def timing(folder: Path, info: dict[str, Any]) -> dict[str, Any]:
    """Status, start, and seconds: until now of a run that runs, else until it last wrote."""
    status, started = status_of(folder, info), _seconds(info.get("started"))
    written = last_written(folder)
    end = time.time() if status == "running" else written
    words = info.get("error") or (f"ended by {info['signal']}" if info.get("signal") else "")
    return {
        "status": status,
        "said": str(words)[:2000],
        "started": started,
        "written": written or None,
        "seconds": max(0.0, end - started) if started and end else None,
    }
