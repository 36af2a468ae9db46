"""Which charts a run has: the report's choice and order, then everything else that was logged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmrl.report.curves import Curve, curves_of, metric_names
from mmrl.report.embodied import embodied_curves, is_embodied
from mmrl.report.load import Run, Series
from mmrl.report.text import metric_name
from mmrl.report.verdict import choose_headline
from mmrl.viewer.series import Columns

__all__ = ["LiveRun", "charts", "held_out"]

_MOST_LINES = 12
_TIMES = ("total", "rollout", "environment", "reward", "logprobs", "update", "eval", "checkpoint")


class LiveRun(Run):
    """A run whose metrics are columns that grow; what the report asks of a run, it answers."""

    def __init__(self, run: Run, columns: Columns) -> None:
        super().__init__(**vars(run))
        self.columns = columns

    @property
    def last_step(self) -> int:
        """The last step with metrics or an evaluation."""
        ends = [int(s) for s in self.columns.steps[-1:]] + [e.step for e in self.evals[-1:]]
        return max(ends, default=0)

    def names(self) -> list[str]:
        """All metric names, in order of first appearance."""
        return self.columns.names

    def series(self, name: str) -> Series:
        """The metric over the steps; empty when no step has a finite value."""
        values = self.columns.series(name)
        if not any(v == v for v in values):
            return []
        return [
            (step, value if value == value else None)
            for step, value in zip(self.columns.steps, values, strict=False)
        ]


def _chart(curve: Curve, group: str, there: set[str]) -> dict[str, Any]:
    names = [n for n in curve.names if n in there][:_MOST_LINES]
    return {
        "title": curve.title,
        "unit": curve.unit,
        "group": group,
        "names": names,
        "words": [curve.names[n] for n in names],
        "percent": curve.percent,
        "zero": curve.zero,
        "log": curve.log,
        "smooth": curve.noisy,
        "bounds": list(curve.bounds) if curve.bounds else None,
    }


def _timing(there: Sequence[str]) -> list[Curve]:
    busy = {f"time/{p}": p for p in _TIMES if f"time/{p}" in there}
    return [
        Curve("Seconds per step", busy, "seconds", zero=True, noisy=False),
        Curve("Speed", {"speed/tokens_per_s": "tokens"}, "tokens per second", zero=True),
        Curve(
            "Speed in simulators",
            {"perf/control_steps_per_s": "control steps"},
            "control steps per second",
            zero=True,
        ),
        Curve("Peak memory", {"memory/peak_gib": "memory"}, "GiB", zero=True, noisy=False),
    ]


def charts(run: Run) -> list[dict[str, Any]]:
    """The charts of training metrics in reading order: group 'training', 'timing' or 'other', whose charts have one metric."""
    there = run.names()
    found = embodied_curves(run) if is_embodied(run) else curves_of(run)
    known = set(there)
    out = [_chart(c, "training", known) for c in found]
    out += [_chart(c, "timing", known) for c in _timing(there)]
    drawn = {n for c in out for n in c["names"]}
    out += [_chart(Curve(n, {n: n}), "other", known) for n in sorted(there) if n not in drawn]
    return [c for c in out if c["names"]]


def held_out(run: Run, most_sources: int = 40) -> dict[str, Any]:
    """The numbers of all evaluations: metrics in reading order, and per step, mode and metric [mean, low, high, n]."""
    names = metric_names(run.evals, choose_headline(run)[1])
    if is_embodied(run):
        names = [n for n in names if n not in ("macro", "parse_rate", "reward")]
    sources = list(dict.fromkeys(s for e in run.evals for s in e.per_source))
    return {
        "metrics": [{"key": n, "name": metric_name(n)} for n in names],
        "sources": [
            {"key": s, "metric": metric_name(run.headline(s) or "headline")}
            for s in sources[:most_sources]
        ]
        if len(sources) > 1
        else [],
        "steps": [
            {
                "step": e.step,
                "modes": {
                    mode: {n: _numbers(v) for n, v in found.items()}
                    for mode, found in e.estimates.items()
                    if found
                },
                "sources": {
                    s: {k: _numbers(v) for k, v in row.items() if k.endswith("headline")}
                    for s, row in e.per_source.items()
                }
                if len(sources) > 1
                else {},
            }
            for e in run.evals
        ],
    }


def _numbers(estimate: Any) -> list[float | None]:
    return [estimate.get(k) for k in ("mean", "low", "high", "n")]
