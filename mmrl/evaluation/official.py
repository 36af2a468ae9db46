"""Official numbers of an evaluation, by the tasks' official scorers, with their submission files."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrl.data.sources import LoadedSource
from mmrl.evaluation.result import Evaluation
from mmrl.evaluation.tables import Group
from mmrl.task import Task
from mmrl.types import Sample, Score

__all__ = ["run_benchmarks"]


def run_benchmarks(
    evaluation: Evaluation, sources: Sequence[LoadedSource], folder: Path, *, first_key: int = 0
) -> dict[str, dict[str, Any]]:
    """Official numbers of the greedy answers by `Task.benchmark`; also put into results['benchmark'].

    One call per data source and task, with all of its samples: a benchmark's parts (platforms, subsets) belong together.
    The entry, and the folder of its submission files in `folder`, is named by what the samples' sources share
    ('ScreenSpot-v2' of 'ScreenSpot-v2/web' and 'ScreenSpot-v2/mobile'), else by the data file. An official scorer that
    fails gives {'error': why}: what it wrote stays, and the caller must tell the user.
    """
    groups: dict[Group, list[tuple[Sample, Score]]] = defaultdict(list)
    for j in evaluation.judged:
        if j.row["mode"] == "greedy":
            groups[j.group].append((j.sample, j.score))
    names = {
        (key, task): _shared_name(
            [s.source for s, _ in pairs], sources[key - first_key].config.path
        )
        for (key, task), pairs in groups.items()
    }
    found: dict[str, dict[str, Any]] = {}
    taken: set[str] = set()
    for (key, task), pairs in groups.items():
        title = names[key, task]
        title = f"{title} {task}" if list(names.values()).count(title) > 1 else title
        place = re.sub(r"[^\w.+-]+", "_", title).strip(".") or "source"
        while title in found or place in taken:
            title, place = f"{title}'", f"{place}_"
        taken.add(place)
        (folder / place).mkdir(parents=True, exist_ok=True)
        numbers = _official(sources[key - first_key].task.member(task), pairs, folder / place)
        if numbers:
            found[title] = numbers
        if not any((folder / place).iterdir()):
            (folder / place).rmdir()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    evaluation.results["benchmark"] = found
    return found


def _shared_name(names: Sequence[str], path: str) -> str:
    """The one source, else the whole folders that all sources begin with, else the data file's name without ending."""
    distinct = sorted(set(names))
    if len(distinct) == 1:
        return distinct[0]
    # sorted: what these two share, all share
    first, last = distinct[0].split("/"), distinct[-1].split("/")
    shared = [
        a
        for a, _ in itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(first, last, strict=False)
        )
    ]
    return "/".join(shared) or Path(path).stem


def _official(task: Task, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> dict[str, Any]:
    try:
        numbers = {str(k): float(v) for k, v in task.benchmark(pairs, folder).items()}
    except Exception as error:  # the official scorer's own: shown to the user, who must not lose the evaluation for it
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    broken = {k: v for k, v in numbers.items() if not math.isfinite(v)}
    sound = {k: v for k, v in numbers.items() if k not in broken}
    return {**sound, "error": f"expected finite numbers, found {broken}"} if broken else sound
