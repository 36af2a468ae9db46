"""What scripts/torture_trust.py and the modules of attacks share: what an attack is, and the table of results."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Attack", "Outcome", "attack", "record"]


@dataclass(frozen=True)
class Outcome:
    """Whether the attack was withstood, what was seen, and figures of it."""

    held: bool
    result: str
    figures: dict[str, Any] = field(default_factory=dict)


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
    rows = json.loads(path.read_text(encoding="utf-8"))["attacks"] if path.exists() else {}
    rows[tried.name] = {
        "attack": tried.what,
        "expected": tried.expected,
        "held": outcome.held,
        "result": outcome.result,
        "figures": outcome.figures,
        "load": round(os.getloadavg()[0], 1),
        "when": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    table = {
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "tried": len(rows),
        "got_through": sum(not row["held"] for row in rows.values()),
        "attacks": dict(sorted(rows.items())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    lines = [
        f"{table['tried']} attacks, {table['got_through']} got through (scripts/torture_trust.py).",
        "",
        "| attack | expected | result |",
        "|---|---|---|",
    ]
    lines += [
        f"| {row['attack']} | {row['expected']} | {'held' if row['held'] else '**got through**'}: {row['result']} |"
        for row in table["attacks"].values()
    ]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
