"""What `mmrl env check` prints: a table for people, exit status for scripts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.table import Table

from mmrl.config import load_config, parse_overrides
from mmrl.operations.console import Console, quiet_transformers

if TYPE_CHECKING:
    from mmrl.diagnostics.environments import EnvironmentReport

__all__ = ["check_environment_command"]

_WIDTH = 110


def check_environment_command(
    name: str,
    data: Path | None,
    model: str | None,
    param: list[str],
    out: Path,
    episodes: int,
    timeout_s: float,
    seed: int,
    config: Path | None,
) -> None:
    """Play and check an environment; status 1 when a check failed."""
    settings = load_config(config) if config is not None else None
    from mmrl.diagnostics.environments import check_environment

    quiet_transformers()
    report = check_environment(
        name,
        data,
        model=model,
        params=parse_overrides(param),
        out=out,
        episodes=episodes,
        timeout_s=timeout_s,
        seed=seed,
        config=settings,
    )
    _print(report, Console(width=_WIDTH, highlight=False))
    if not report.ok:
        raise typer.Exit(1)


def _print(report: EnvironmentReport, console: Console) -> None:
    console.print(
        f"environment {escape(report.task)}: {report.samples} samples of {escape(report.data)}"
    )
    table = Table()
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for finding in report.findings:
        problems = f"[red]failed[/], {finding.count} problem{'s' if finding.count > 1 else ''}"
        table.add_row(escape(finding.check), "[green]passed[/]" if finding.ok else problems)
    console.print(table)
    for finding in report.findings:
        if not finding.ok:
            console.print(
                f"\n[bold]{escape(finding.check)}[/]\n  expected  {escape(finding.expected)}"
            )
            for problem in finding.problems:
                console.print(f"  found     {escape(problem)}")
            if finding.count > len(finding.problems):
                console.print(f"            and {finding.count - len(finding.problems)} more")
            console.print(f"  fix       {escape(finding.fix)}")
    for player, earned in report.players.items():
        facts = ", ".join(f"{k} {v:.3g}" for k, v in earned.items() if k != "episodes")
        console.print(f"{player} player, {earned['episodes']:g} episodes: {escape(facts)}")
    if report.speed:
        console.print(
            f"{report.speed['resets_per_s']:.3g} resets and {report.speed['steps_per_s']:.3g} steps per second, the slowest call "
            f"{report.speed['slowest_s']:.3g} s"
        )
    for what, lengths in report.tokens.items():
        console.print(
            f"tokens of the {what} with {escape(report.model)}: "
            + ", ".join(f"{name} {value:g}" for name, value in lengths.items())
        )
    if report.pictures:
        console.print(
            f"{len(report.pictures)} filmstrips in {escape(str(Path(report.pictures[0]).parent))}"
        )
