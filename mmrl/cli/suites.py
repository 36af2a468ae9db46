"""Tables of `mmrl eval --suite` and `--list-suites`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.table import Table

from mmrl.operations.console import Console

if TYPE_CHECKING:
    from mmrl.evaluation.suite_book import Suite
    from mmrl.evaluation.suite_table import SuiteRow

__all__ = ["list_suites", "print_rows"]

_WIDTH = 130
_TABLE_WIDTH = 240
_TEXTS = ("suite", "protocol", "metric", "mode")  # columns on the left


def list_suites(suites: Path | None) -> None:
    """Print every suite of a file (default: those of mmrl), a table for each kind."""
    from mmrl.evaluation.suite_book import load_suites

    book = load_suites(suites)
    console = Console(width=_WIDTH, highlight=False)
    for kind, title in ((False, "answered in text"), (True, "played by policies that act")):
        found = book.of_kind(kind)
        if not found:
            continue
        table = Table(title=title, title_justify="left")
        for heading in ("suite", *next(iter(found.values())).listed):
            table.add_column(heading, overflow="fold")
        for name, suite in found.items():
            table.add_row(name, *map(escape, suite.listed.values()))
        console.print(table)
    for name, members in book.groups.items():
        console.print(f"{escape(name)} = {escape(','.join(members))}")
    console.print(f"from {escape(', '.join(map(str, book.files)))}")


def print_rows(
    rows: Sequence[SuiteRow],
    suites: Mapping[str, Suite],
    checkpoint: str,
    samples: int,
    folder: str,
) -> None:
    """Print the table and what its numbers were measured on; status 1 when a suite has no number."""
    from mmrl.evaluation.suite_table import by_columns

    console = Console(width=_WIDTH, highlight=False)
    # as wide as its cells: a number and what it was measured on stay on one line
    wide = Console(width=_TABLE_WIDTH, highlight=False)
    for headings, part in by_columns(rows, samples).items():
        table = Table(title=escape(checkpoint), title_justify="left")
        for heading in headings:
            left = heading in _TEXTS
            table.add_column(heading, justify="left" if left else "right", no_wrap=True)
        for row in part:
            table.add_row(*map(escape, row.cells(samples).values()))
            for cells in row.parts():
                table.add_row(*(escape(cells.get(heading, "")) for heading in headings))
        wide.print(table)
    for row in rows:
        if row.error:
            console.print(f"[red]{escape(row.suite)}:[/] {escape(row.error)}")
        else:
            facts = "; ".join(filter(None, row.facts(suites[row.suite])))
            console.print(f"{escape(row.suite)}: {escape(facts)}")
        for line in row.remarks():
            console.print(f"  {escape(line)}")
    typer.echo(f"results: suites.json and suites.md in {folder}")
    if any(row.error for row in rows):
        raise typer.Exit(1)
