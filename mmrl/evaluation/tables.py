"""The tables of an evaluation: means with intervals per metric, source and task. Part of mmrl.evaluation.evaluate.

A row is a line of predictions.jsonl with `_order` (number of its data source, place of its sample), `_score` and `_sample`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.data.sources import LoadedSource
from mmrl.evaluation.stats import Estimate, describe, macro_estimate

__all__ = ["ALWAYS", "Group", "group_of", "measured_metrics", "parts_of", "summarize", "value_of"]

Group = tuple[int, str]
"""(number of the data source, task of the sample): the rows that share their metrics."""
ALWAYS = ("reward", "parse_rate", "macro")


def value_of(score: Mapping[str, Any], name: str) -> float:
    """'reward', 'parse_rate' or a metric of a score as a dictionary; what a failure lacks is 0."""
    if name == "reward":
        return float(score["value"])
    return (
        float(score["parsed"]) if name == "parse_rate" else float(score["metrics"].get(name, 0.0))
    )


def group_of(row: Mapping[str, Any]) -> Group:
    """The group of a row."""
    return row["_order"][0], row["task"]


def measured_metrics(
    rows: Sequence[Mapping[str, Any]], sources: Sequence[LoadedSource], first_key: int
) -> dict[Group, frozenset[str]]:
    """Metrics per (data source, task): what the task says it measures, what any score has, and its headline.

    A set of which every answer failed, or no picture could be read, still has its columns, full of zeros.
    """
    names: dict[Group, set[str]] = defaultdict(set)
    for row in rows:
        group = group_of(row)
        if group not in names:
            task = sources[group[0] - first_key].task.member(group[1])
            names[group].update(task.metric_names, {task.headline} - {"reward"})
        names[group].update(row["_score"].metrics)
    return {group: frozenset(found) for group, found in names.items()}


class _Tables:
    """Estimates of sets of rows; a set asked for twice (one source is one task) is resampled once."""

    def __init__(self, seed: int, measured: Mapping[Group, frozenset[str]]) -> None:
        self.seed, self.measured = seed, measured
        self._known: dict[tuple[int, ...], dict[str, Estimate]] = {}

    def of(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Estimate]:
        """Mean with interval, clustered by sample, of the reward, of every metric and of each row's own headline."""
        key = tuple(map(id, rows))
        if key not in self._known:
            columns: dict[str, list[tuple[str, float]]] = defaultdict(list)
            for row in rows:
                unit, score = f"{row['source']}/{row['id']}", row["score"]
                for name in ("reward", "parse_rate", *sorted(self.measured[group_of(row)])):
                    columns[name].append((unit, value_of(score, name)))
                columns["headline"].append((unit, value_of(score, row["headline"])))
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


def parts_of(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[Mapping[str, Any]]]:
    """The rows by their value of `key`, in the order of these values."""
    parts: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        parts[row[key]].append(row)
    return dict(sorted(parts.items()))


def _headlines(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """What the column 'headline' of each table row is: one metric, or several where tasks differ."""
    return {
        table: {
            name: ", ".join(sorted({r["headline"] for r in part}))
            for name, part in parts_of(rows, key).items()
        }
        for table, key in (("per_source", "source"), ("per_task", "task"))
    }


def _summaries(
    rows: Sequence[Mapping[str, Any]], sources: Sequence[LoadedSource], first_key: int
) -> dict[str, Any]:
    """Task.summarize per data source; where a source holds several tasks, each under 'task/'."""
    out: dict[str, Any] = {}
    for key, source in enumerate(sources, first_key):
        parts = parts_of([r for r in rows if r["_order"][0] == key], "task")
        for name, part in parts.items():
            summary = source.task.member(name).summarize([r["_score"] for r in part])
            prefix = f"{name}/" if len(parts) > 1 else ""
            out.setdefault(source.config.path, {}).update(
                {f"{prefix}{k}": v for k, v in summary.items()}
            )
    return out


def summarize(
    rows: Sequence[Mapping[str, Any]],
    sources: Sequence[LoadedSource],
    seed: int,
    first_key: int,
    measured: Mapping[Group, frozenset[str]],
) -> dict[str, Any]:
    """Per mode: every metric with its interval, failures by reason, the tasks' own summaries; and tables per source and task."""
    results: dict[str, Any] = {"headlines": _headlines(rows), "per_source": {}, "per_task": {}}
    tables = _Tables(seed, measured)
    for mode in ("greedy", "sampled"):
        chosen = [r for r in rows if r["mode"] == mode]
        if not chosen:
            continue
        by_source = parts_of(chosen, "source")
        whole = {name: e for name, e in tables.of(chosen).items() if name != "headline"}
        whole["macro"] = macro_estimate(
            [tables.of(part)["headline"] for part in by_source.values()]
        )
        results[mode] = {name: dataclasses.asdict(e) for name, e in whole.items()}
        reasons: dict[str, int] = defaultdict(int)
        for r in chosen:
            if r["_score"].reason:
                reasons[r["_score"].reason.partition(":")[0]] += 1
        results.setdefault("failures", {})[mode] = dict(reasons)
        results.setdefault("summary", {})[mode] = _summaries(chosen, sources, first_key)
        prefix = "" if mode == "greedy" or "greedy" not in results else "sampled/"
        for table, parts in (("per_source", by_source), ("per_task", parts_of(chosen, "task"))):
            for name, part in parts.items():
                results[table].setdefault(name, {}).update(
                    {f"{prefix}{k}": dataclasses.asdict(e) for k, e in tables.of(part).items()}
                )
    return results
