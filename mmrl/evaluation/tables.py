"""The tables of an evaluation: means with intervals per metric, source and task. Part of mmrl.evaluation.result."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmrl.evaluation.stats import Estimate, describe, macro_estimate
from mmrl.types import Sample, Score

__all__ = ["ALWAYS", "Group", "Judged", "summarize", "value_of"]

Group = tuple[int, str]
"""(number of the data source, task of the sample): the rows that share their metrics."""
ALWAYS = ("reward", "parse_rate", "macro")


@dataclasses.dataclass(frozen=True)
class Judged:
    """A completion, or an episode, and its judgement: a line of predictions.jsonl (`row`) and where it belongs.

    `source`: number of its data source, or simulated task; `place`: number of its sample, or initial state, there; `number`: which
    of the sample's in its mode.
    """

    row: dict[str, Any]
    sample: Sample
    score: Score
    source: int
    place: int
    number: int

    @property
    def group(self) -> Group:
        """The rows that share its metrics."""
        return self.source, self.row["task"]


def value_of(score: Mapping[str, Any], name: str) -> float:
    """'reward', 'parse_rate' or a metric of a score as a dictionary; what a failure lacks is 0."""
    if name == "reward":
        return float(score["value"])
    return (
        float(score["parsed"]) if name == "parse_rate" else float(score["metrics"].get(name, 0.0))
    )


class _Tables:
    """Estimates of sets of rows; a set asked for twice (one source is one task) is resampled once."""

    def __init__(self, seed: int, measured: Mapping[Group, frozenset[str]]) -> None:
        self.seed, self.measured = seed, measured
        self._known: dict[tuple[int, ...], dict[str, Estimate]] = {}

    def of(self, rows: Sequence[Judged]) -> dict[str, Estimate]:
        """Mean with interval, clustered by sample, of the reward, of every metric and of each row's own headline."""
        key = tuple(map(id, rows))
        if key not in self._known:
            columns: dict[str, list[tuple[str, float]]] = defaultdict(list)
            for j in rows:
                unit, score = f"{j.row['source']}/{j.row['id']}", j.row["score"]
                for name in ("reward", "parse_rate", *sorted(self.measured[j.group])):
                    columns[name].append((unit, value_of(score, name)))
                columns["headline"].append((unit, value_of(score, j.row["headline"])))
            self._known[key] = {
                name: describe(
                    [v for _, v in column],
                    clusters=[u for u, _ in column],
                    level=0.95,
                    seed=self.seed,
                )
                for name, column in columns.items()
            }
        return self._known[key]


def _parts(rows: Sequence[Judged], key: str) -> dict[str, list[Judged]]:
    """The rows by their value of `key`, in the order of these values; numbers in them count as such (task/9 before task/10)."""
    parts: dict[str, list[Judged]] = defaultdict(list)
    for j in rows:
        parts[j.row[key]].append(j)
    return {name: parts[name] for name in sorted(parts, key=_natural)}


def _natural(name: str) -> list[tuple[int, int, str]]:
    pieces = re.findall(r"\d+|\D+", name)
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in pieces]


def _headlines(rows: Sequence[Judged]) -> dict[str, dict[str, str]]:
    """What the column 'headline' of each table row is: one metric, or several where tasks differ."""
    return {
        table: {
            name: ", ".join(sorted({j.row["headline"] for j in part}))
            for name, part in _parts(rows, key).items()
        }
        for table, key in (("per_source", "source"), ("per_task", "task"))
    }


def summarize(
    rows: Sequence[Judged],
    seed: int,
    measured: Mapping[Group, frozenset[str]],
    summary: Callable[[Sequence[Judged]], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Per mode: every metric with its interval, failures by reason and what `summary` says of its rows; and tables per source and
    task."""
    results: dict[str, Any] = {"headlines": _headlines(rows), "per_source": {}, "per_task": {}}
    tables = _Tables(seed, measured)
    for mode in ("greedy", "sampled"):
        chosen = [j for j in rows if j.row["mode"] == mode]
        if not chosen:
            continue
        by_source = _parts(chosen, "source")
        whole = {name: e for name, e in tables.of(chosen).items() if name != "headline"}
        whole["macro"] = macro_estimate(
            [tables.of(part)["headline"] for part in by_source.values()]
        )
        results[mode] = {name: dataclasses.asdict(e) for name, e in whole.items()}
        reasons: dict[str, int] = defaultdict(int)
        for j in chosen:
            if j.score.reason:
                reasons[j.score.reason.partition(":")[0]] += 1
        results.setdefault("failures", {})[mode] = dict(reasons)
        if summary is not None:
            results.setdefault("summary", {})[mode] = summary(chosen)
        prefix = "" if mode == "greedy" or "greedy" not in results else "sampled/"
        for table, parts in (("per_source", by_source), ("per_task", _parts(chosen, "task"))):
            for name, part in parts.items():
                results[table].setdefault(name, {}).update(
                    {f"{prefix}{k}": dataclasses.asdict(e) for k, e in tables.of(part).items()}
                )
    return results
