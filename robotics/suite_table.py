"""The lines that suites of simulated tasks get in the table of mmrl.evaluation.suite_table.

    row = suite_row("tiny_reach", suite, setting, results, limit=None)

mmrl.robotics.suite_runs makes the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmrl.evaluation.suite_table import SuiteRow
from mmrl.robotics.suites import EnvironmentSuite, Setting

__all__ = ["EpisodesRow", "failed_row", "percent", "suite_row"]


@dataclass(frozen=True, kw_only=True)
class EpisodesRow(SuiteRow):
    """`success_once`, `success_at_end`: mean, low, high (95 %) in the headline's mode."""

    protocol: str
    mode: str = "greedy"
    tasks: int
    success_once: Mapping[str, float] = field(default_factory=dict)
    success_at_end: Mapping[str, float] = field(default_factory=dict)
    sampled: Mapping[str, float] | None = None
    per_task: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    states: str = ""
    assets: str = "unknown"
    render: str = "unknown"
    simulator: Mapping[str, str] = field(default_factory=dict)
    failed_attempts: int = 0
    unfinished: int = 0
    deviations: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()  # otherwise than the suite's own settings
    # episodes end with their first success, so that success_at_end is success_once by construction
    stops: bool = False

    def at_end(self, found: Mapping[str, float]) -> str:
        """The cell of success at end."""
        return "same: stops at success" if self.stops and found else percent(found) + self.mark

    @property
    def stand_in(self) -> bool:
        """Whether it was measured on stand-in assets, and so is no score of the benchmark."""
        return "stand-in" in self.assets

    @property
    def mark(self) -> str:
        """What stands beside every number of the row."""
        return " (stand-in assets)" if self.stand_in else ""

    @property
    def summary(self) -> str:
        """See SuiteRow."""
        return f"success rate {percent(self.success_once)}{self.mark}, {self.n:,} states"

    def cells(self, samples: int) -> dict[str, str]:
        """See SuiteRow."""
        sampled = percent(self.sampled) + (self.mark if self.sampled else "")
        return {
            "suite": self.suite,
            "protocol": self.protocol.partition(",")[0],
            "mode": self.mode,
            "states": self.count,
            "success rate (95 %)": percent(self.success_once) + self.mark,
            "success at end (95 %)": self.at_end(self.success_at_end),
            "comparable": "yes" if self.official else "no",
            **({f"avg@{samples}": sampled} if samples else {}),
        }

    def facts(self, suite: EnvironmentSuite) -> list[str]:
        """See SuiteRow."""
        versions = (f"{k} {v}" for k, v in self.simulator.items() if k not in ("render", "assets"))
        return [
            f"protocol: {self.protocol}",
            f"states: {self.states}",
            f"assets: {self.assets}",
            f"GL backend: {self.render}",
            ", ".join(versions),
            f"failed attempts: {self.failed_attempts}, episodes not finished (counted as failures): {self.unfinished}",
        ]

    def remarks(self) -> list[str]:
        """See SuiteRow."""
        found = ["measured on stand-in assets: not a score of the benchmark"] * self.stand_in
        if "modified" in self.assets:
            found.append(f"not the benchmark's own files: assets {self.assets}")
        if self.deviations:
            found.append(f"otherwise than the protocol: {'; '.join(self.deviations)}")
        if self.changes:
            found.append(f"otherwise than the suite: {'; '.join(self.changes)}")
        return found

    def parts(self) -> list[dict[str, str]]:
        """See SuiteRow."""
        return [
            {
                "suite": task,
                "states": f"{found['success_once']['n']} states",
                "success rate (95 %)": percent(found["success_once"]) + self.mark,
                "success at end (95 %)": f"at end {self.at_end(found['success_at_end'])}",
            }
            for task, found in self.per_task.items()
            if self.tasks > 1
        ]

    def as_dict(self) -> dict[str, Any]:
        """For suites.json."""
        return {**super().as_dict(), "stand_in": self.stand_in}


def percent(estimate: Mapping[str, float] | None) -> str:
    """'55.0 % [41.2, 68.0]', '-' for nothing."""
    if not estimate:
        return "-"
    return f"{100 * estimate['mean']:.1f} % [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


def suite_row(
    name: str,
    suite: EnvironmentSuite,
    setting: Setting,
    results: Mapping[str, Any],
    limit: int | None,
) -> EpisodesRow:
    """The line of an evaluated suite."""
    mode, protocol = setting.mode, results["protocol"]
    found, prefix = results[mode], "" if mode == "greedy" else "sampled/"
    per_task = {
        task: {m: row[f"{prefix}{m}"] for m in ("success_once", "success_at_end")}
        for task, row in results["per_task"].items()
    }
    wanted = setting.config.eval_states
    limited = limit is not None and limit < wanted
    sampled = results.get("sampled", {}).get("success_once") if mode == "greedy" else None
    complete = (
        setting.whole
        and not limited
        and not setting.deviations
        and setting.config.env.tasks == suite.tasks
    )
    return EpisodesRow(
        suite=name,
        protocol=protocol["name"],
        mode=mode,
        tasks=len(setting.config.env.tasks),
        n=int(found["success_once"]["n"]),
        success_once=found["success_once"],
        success_at_end=found["success_at_end"],
        sampled=sampled,
        per_task=per_task,
        states=protocol["states"],
        assets=protocol["assets"],
        render=protocol["render"],
        simulator=protocol["simulator"],
        failed_attempts=len(results["failed_attempts"]),
        unfinished=sum(sum(reasons.values()) for reasons in results["failures"].values()),
        official=suite.official and complete and _as_published(protocol["assets"]),
        limited=limited,
        deviations=setting.deviations,
        changes=setting.changes,
        stops=setting.config.stops_at_success,
    )


def _as_published(assets: str) -> bool:
    """Whether a benchmark's own meshes and textures were seen: neither stand-ins nor changed files."""
    return "stand-in" not in assets and "modified" not in assets


def failed_row(name: str, suite: EnvironmentSuite, error: str) -> EpisodesRow:
    """The line of a suite that could not be evaluated."""
    return EpisodesRow(
        suite=name, protocol=suite.protocol or "own", tasks=len(suite.tasks), error=error
    )
