"""`mmrl doctor`: what this machine has, what it lacks, what each thing is for, and the command that fixes it.

    python -m mmrl.diagnostics.doctor            # a table, then the commands; status 1 when something is broken
    python -m mmrl.diagnostics.doctor --json     # for programs and bug reports

Every probe is isolated: one that crashes is a finding of its own and the others still report.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from mmrl.diagnostics._doctor_probes import PROBES, Finding, Status

if TYPE_CHECKING:
    from mmrl.operations.console import Console

__all__ = ["Finding", "Status", "main", "print_doctor", "run_doctor"]

_MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "missing": ("missing", "bright_black"),
    "warn": ("warn", "yellow"),
    "bad": ("BAD", "bold red"),
}
Probe = Callable[[], list[Finding]]


def _isolated(probe: Probe) -> list[Finding]:
    try:
        return probe()
    except Exception as error:
        # a probe meets broken machines; its own failure is news, not the end of the report
        name = probe.__name__.removeprefix("probe_")
        return [
            Finding(
                f"probe {name}",
                "bad",
                f"failed itself: {type(error).__name__}: {error}",
                "this report",
                f"report it with the output of: {sys.executable} -m mmrl.diagnostics.doctor --json",
            )
        ]


def run_doctor(probes: Sequence[Probe] = PROBES) -> list[Finding]:
    """Run the probes, four at a time (most of them wait for a child process), and return findings in their order."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return [finding for findings in pool.map(_isolated, probes) for finding in findings]


def print_doctor(
    findings: Sequence[Finding] | None = None, console: Console | None = None
) -> list[Finding]:
    """Print a table of the findings (run now when not given) and below it the commands that fix them; returns the findings."""
    from rich.markup import escape
    from rich.table import Table

    from mmrl.operations.console import Console

    found = run_doctor() if findings is None else list(findings)
    console = Console() if console is None else console
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "what", "found", "needed for"):
        table.add_column(title, overflow="fold")
    for finding in found:
        mark, style = _MARKS[finding.status]
        table.add_row(
            f"[{style}]{mark}[/]",
            escape(finding.name),
            escape(finding.found),
            escape(finding.needed_for),
        )
    console.print(table)
    to_fix = [finding for finding in found if finding.status != "ok"]
    if to_fix:
        console.print("\n[bold]How to fix this, or to add what you need:[/]")
    for finding in sorted(to_fix, key=lambda f: ("bad", "warn", "missing").index(f.status)):
        mark, style = _MARKS[finding.status]
        # soft_wrap keeps a command on one line, so that it can be copied
        console.print(
            f"  [{style}]{mark}[/] {escape(finding.name)}: {escape(finding.fix)}", soft_wrap=True
        )
    broken = sum(finding.status == "bad" for finding in found)
    console.print(
        f"\n{broken} broken" if broken else "\nnothing is broken",
        style="bold red" if broken else "green",
    )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 1 when a finding is bad, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m mmrl.diagnostics.doctor", description="What this machine has and lacks."
    )
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    if parser.parse_args(arguments).json:
        findings = run_doctor()
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        findings = print_doctor()
    return int(any(finding.status == "bad" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
