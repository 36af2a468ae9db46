"""What `mmrl tasks list`, `mmrl tasks check` and `mmrl score` print: tables for people, exit status for scripts."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.table import Table

from mmrl.config import load_config, parse_overrides
from mmrl.operations.console import Console, quiet_transformers

if TYPE_CHECKING:
    from mmrl.diagnostics.conformance import Conformance
    from mmrl.evaluation.rescore import Rescored

__all__ = ["check_all_command", "check_command", "list_command", "score_command"]

_WIDTH = 110
_PLACES = 12  # rows named per kind of error


def list_command() -> None:
    """Print every task with its one-line description, answer shape, presets and origin. One that cannot be imported shows
    its own error instead, and the status is 1."""
    from mmrl.registry import resolve_task, task_names

    failed = False
    console = Console(width=_WIDTH, highlight=False)
    for name, origin in task_names().items():
        console.print(f"[bold]{escape(name)}[/]  [dim]{escape(origin)}[/]", soft_wrap=True)
        try:
            task = resolve_task(name)
        except Exception as error:
            # the task's own import: one broken plug-in must not hide the others
            console.print(
                f"  [red]cannot be imported:[/] {escape(f'{type(error).__name__}: {error}')}",
                soft_wrap=True,
            )
            failed = True
            continue
        facts = {
            "answer": getattr(task, "shapes", "") or getattr(task, "shape", ""),
            "headline": task.headline,
            "presets": ", ".join(getattr(task, "presets", {})),
        }
        about = re.split(r"(?<=\.)\s", (inspect.getdoc(task) or "").partition("\n")[0])[0]
        console.print("  " + escape(about), soft_wrap=True)
        console.print(
            "  " + escape("; ".join(f"{k}: {v}" for k, v in facts.items() if v)), soft_wrap=True
        )
    if failed:
        raise typer.Exit(1)


def check_command(
    name: str,
    data: Path | None,
    model: str | None,
    param: list[str],
    out: Path,
    limit: int,
    config: Path | None = None,
) -> None:
    """Check a task, print one line per check, and exit with status 1 when one failed."""
    settings = load_config(config) if config is not None else None
    from mmrl.diagnostics.conformance import check_task

    quiet_transformers()
    result = check_task(
        name,
        data,
        model=model,
        params=parse_overrides(param),
        out=out,
        limit=limit,
        config=settings,
    )
    _print_check(result, Console(width=_WIDTH, highlight=False), out)
    if not result.ok:
        raise typer.Exit(1)


def check_all_command(
    name: str,
    data: Path | None,
    model: str | None,
    param: list[str],
    out: Path,
    config: Path | None = None,
) -> None:
    """Print how many rows, pictures and prompts are wrong, by kind and with the first of each; status 1 when there is one."""
    settings = load_config(config) if config is not None else None
    import transformers

    from mmrl.diagnostics.check_rows import ERRORS, check_rows

    transformers.utils.logging.set_verbosity_error()
    result = check_rows(
        name, data, model=model, params=parse_overrides(param), out=out, config=settings
    )
    console = Console(width=_WIDTH, highlight=False)
    console.print(
        f"{escape(result.data)}: {result.samples:,} usable rows of task {escape(name)}, {len(result.errors):,} errors"
    )
    for kind, errors in result.kinds.items():
        places = ", ".join(
            " ".join(
                [f"row {e['row']}"] * (e["row"] is not None)
                + [str(e["id"])] * (e["id"] is not None)
            )
            for e in errors[:_PLACES]
        )
        console.print(
            f"\n[bold]{len(errors):,} x {escape(kind)}[/]\n  {escape(places)}{' ...' if len(errors) > _PLACES else ''}\n"
            f"  first: {escape(errors[0]['reason'])}"
        )
    for title, counts in (
        ("rows left out", result.skipped),
        ("of rows that are used", result.notes),
    ):
        if counts:
            console.print(
                f"{title}: "
                + ", ".join(f"{n:,} x {escape(what)}" for what, n in sorted(counts.items()))
            )
    if result.errors:
        console.print(f"all of them: {escape(str(out / ERRORS))}")
        raise typer.Exit(1)


def _print_check(result: Conformance, console: Console, out: Path) -> None:
    from mmrl.diagnostics._conformance_levels import level_lines

    console.print(f"task {escape(result.task)}: {result.samples} samples")
    table = Table()
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for finding in result.findings:
        problems = f"[red]failed[/], {finding.count} problem{'s' if finding.count > 1 else ''}"
        table.add_row(escape(finding.check), "[green]passed[/]" if finding.ok else problems)
    console.print(table)
    for finding in result.findings:
        if not finding.ok:
            console.print(
                f"\n[bold]{escape(finding.check)}[/]\n  expected  {escape(finding.expected)}"
            )
            for problem in finding.problems:
                console.print(f"  found     {escape(problem)}")
            if finding.count > len(finding.problems):
                console.print(f"            and {finding.count - len(finding.problems)} more")
            console.print(f"  fix       {escape(finding.fix)}")
    console.print(
        f"\ndata {escape(result.data)}"
        + (f", {result.rejected} rows rejected:" if result.rejected else "")
    )
    for row in result.rejected_shown:
        console.print(f"  {escape(row)}")
    if result.tokens:
        console.print(
            f"prompt tokens with {escape(result.model)}: "
            + ", ".join(f"{name} {value:g}" for name, value in result.tokens.items())
        )
    if result.skipped:
        console.print(
            "rows left out: "
            + ", ".join(f"{n:,} {escape(why)}" for why, n in sorted(result.skipped.items()))
        )
    if result.notes:
        console.print(
            "of rows that are used: "
            + ", ".join(f"{n:,} x {escape(what)}" for what, n in sorted(result.notes.items()))
        )
    if result.lowest_gold:
        console.print(
            f"lowest gold score{' (coordinates are rounded)' if result.rounds else ''}: "
            + ", ".join(f"{frame} {value:.3f}" for frame, value in result.lowest_gold.items())
        )
    lines = list(level_lines(result.spellings))
    if lines:
        console.print("which level (answers: ...) first reads a right answer that is spelled so:")
        for line in lines:
            console.print(f"  {escape(line)}")
    if result.pictures:
        console.print(
            f"look at {escape(str(out))}/check_*.png: green is the gold answer, orange the wrong one"
        )


def score_command(
    file: Path, task: str | None, param: list[str], out: Path | None, trust_code: bool = False
) -> None:
    """Score a log again, print old and new means per source, and write the new rows to `out` when it is given."""
    from mmrl.evaluation.rescore import rescore, write_rescored

    result = rescore(file, task, parse_overrides(param), trust_code=trust_code)
    _print_scores(result, Console(width=_WIDTH, highlight=False), file)
    if out is not None:
        write_rescored(result, out)
        typer.echo(f"scores: {out}")


def _print_scores(result: Rescored, console: Console, file: Path) -> None:
    from mmrl.evaluation.rescore import summary_rows

    console.print(f"{escape(str(file))}: {len(result.rows)} completions")
    table = Table()
    for heading in ("source", "measure", "logged", "now", "changed"):
        table.add_column(
            heading, justify="left" if heading in ("source", "measure") else "right", no_wrap=True
        )
    previous = ""
    for row in summary_rows(result.rows):
        table.add_row(
            escape(row["source"]) if row["source"] != previous else "",
            escape(row["measure"]),
            f"{row['old']:.4f}",
            f"{row['new']:.4f}",
            f"{row['changed']} of {row['n']}",
        )
        previous = row["source"]
    console.print(table)
    console.print(f"{sum(r.changed for r in result.rows)} of {len(result.rows)} scores changed")
    if result.broken:
        console.print(f"[yellow]{len(result.broken)} lines could not be scored:[/]")
        for line in result.broken[:5]:
            console.print(f"  line {line.line}: {escape(line.reason)[:300]}")
        if len(result.broken) > 5:
            console.print(f"  and {len(result.broken) - 5} more")
