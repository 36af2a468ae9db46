"""The table of evaluated suites of simulated tasks: a row for each, and the rows as Markdown.

    row = suite_row("tiny_reach", suite, setting, results, limit=None)
    print(markdown([row], {"tiny_reach": suite}, "runs/robot/checkpoints/best"))

mmrl.robotics.suite_runs makes the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmrl.robotics.suites import RobotSuite, Setting

__all__ = ["RobotRow", "failed_row", "markdown", "percent", "suite_row"]


@dataclass(frozen=True)
class RobotRow:
    """One line of the table. `success_once`, `success_at_end`: mean, low, high (95 %) in the headline's mode."""

    suite: str
    protocol: str
    mode: str
    tasks: int
    n: int
    success_once: Mapping[str, float]
    success_at_end: Mapping[str, float]
    sampled: Mapping[str, float] | None
    per_task: Mapping[str, Mapping[str, Mapping[str, float]]]
    states: str
    assets: str
    render: str
    simulator: Mapping[str, str]
    failed_attempts: int
    unfinished: int
    official: bool
    limited: bool
    deviations: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()  # otherwise than the suite's own settings
    error: str = ""
    stops: bool = False  # episodes end with their first success, so that success_at_end is success_once by construction

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

    def as_dict(self) -> dict[str, Any]:
        """For suites.json."""
        return {**asdict(self), "stand_in": self.stand_in}


def percent(estimate: Mapping[str, float] | None) -> str:
    """'55.0 % [41.2, 68.0]', '-' for nothing."""
    if not estimate:
        return "-"
    return f"{100 * estimate['mean']:.1f} % [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


def suite_row(
    name: str, suite: RobotSuite, setting: Setting, results: Mapping[str, Any], limit: int | None
) -> RobotRow:
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
    return RobotRow(
        name,
        protocol["name"],
        mode,
        len(setting.config.env.tasks),
        int(found["success_once"]["n"]),
        found["success_once"],
        found["success_at_end"],
        sampled,
        per_task,
        protocol["states"],
        protocol["assets"],
        protocol["render"],
        protocol["simulator"],
        len(results["failed_attempts"]),
        sum(sum(reasons.values()) for reasons in results["failures"].values()),
        suite.official and complete and "stand-in" not in protocol["assets"],
        limited,
        setting.deviations,
        changes=setting.changes,
        stops=setting.config.stops_at_success,
    )


def failed_row(name: str, suite: RobotSuite, error: str) -> RobotRow:
    """The line of a suite that could not be evaluated."""
    return RobotRow(
        name,
        suite.protocol or "own",
        "greedy",
        len(suite.tasks),
        0,
        {},
        {},
        None,
        {},
        "",
        "unknown",
        "unknown",
        {},
        0,
        0,
        False,
        False,
        error=error,
    )


def markdown(rows: Sequence[RobotRow], suites: Mapping[str, RobotSuite], checkpoint: str) -> str:
    """The table as Markdown, and what each number was measured on below it."""
    lines = [
        f"# {checkpoint}",
        "",
        "| suite | protocol | states | success rate (95 %) | success at end (95 %) | comparable |",
        "|---|---|--:|--:|--:|---|",
    ]
    for row in rows:
        count = f"{row.n}{' (first n)' if row.limited else ''}"
        lines.append(
            f"| {row.suite} | {row.protocol} | {count} | {percent(row.success_once)}{row.mark} | "
            f"{row.at_end(row.success_at_end)} | {'yes' if row.official else 'no'} |"
        )
    lines.append("")
    for row in rows:
        words = [
            row.mode,
            f"states: {row.states}",
            f"assets: {row.assets}",
            f"GL backend: {row.render}",
            ", ".join(
                f"{k} {v}" for k, v in row.simulator.items() if k not in ("render", "assets")
            ),
            f"failed attempts: {row.failed_attempts}",
            f"not finished: {row.unfinished}",
            "otherwise than the protocol: " + ", ".join(row.deviations) if row.deviations else "",
            "otherwise than the suite: " + ", ".join(row.changes) if row.changes else "",
            " ".join(suites[row.suite].notes.split()),
        ]
        lines.append(
            f"- {row.suite}: "
            + ("; ".join(w for w in words if w) if not row.error else f"error: {row.error}")
        )
        if row.stand_in:
            lines.append("  - measured on stand-in assets: not a score of the benchmark")
        if row.tasks > 1:
            lines += [
                f"  - {task}: {percent(found['success_once'])}{row.mark}, at end {row.at_end(found['success_at_end'])}"
                for task, found in row.per_task.items()
            ]
    return "\n".join(lines) + "\n"
