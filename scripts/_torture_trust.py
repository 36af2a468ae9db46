"""What scripts/torture_trust.py and the modules of attacks share: what an attack is, and the table of results."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Attack", "Outcome", "attack", "record"]


@dataclass(frozen=True)
class Outcome:
    """Whether the attack was withstood, what was seen, and figures of it. `tests`: rows of a table of their own, by name."""

    held: bool
    result: str
    figures: dict[str, Any] = field(default_factory=dict)
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Attack:
    """`run(options)` tries it; `what` is done, `expected` is what a sound program does."""

    name: str
    what: str
    expected: str
    run: Callable[[Any], Outcome]


def attack(what: str, expected: str) -> Callable[[Callable[[Any], Outcome]], Attack]:
    """Makes a function `run(options) -> Outcome` an attack of the function's name."""
    return lambda run: Attack(run.__name__, what, expected, run)


def record(path: Path, tried: Attack, outcome: Outcome) -> None:
    """Put the row of `tried` into the table at `path` and into the one beside it in Markdown."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows, tests = before.get("attacks", {}), outcome.tests or before.get("tests", {})
    rows[tried.name] = {
        "attack": tried.what,
        "expected": tried.expected,
        "held": outcome.held,
        "result": outcome.result,
        "figures": outcome.figures,
        "load": round(os.getloadavg()[0], 1),
        "when": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    table: dict[str, Any] = {
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "tried": len(rows),
        "got_through": sum(not row["held"] for row in rows.values()),
        "attacks": dict(sorted(rows.items())),
        "tests": tests,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    lines = [
        f"{table['tried']} attacks, {table['got_through']} got through (scripts/torture_trust.py).",
        *_table(table["attacks"].values()),
    ]
    if tests:
        lines += ["", f"{len(tests)} tests of tests/attacks.", *_table(tests.values())]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Lines of Markdown."""
    words = {True: "held", False: "**got through**", None: "not tried"}
    lines = ["", "| attack | expected | result |", "|---|---|---|"]
    for row in rows:
        cells = (row["attack"], row["expected"], f"{words[row['held']]}: {row['result']}")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines
