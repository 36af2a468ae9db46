"""The table of evaluated suites, of questions and of simulated tasks: a line for each, suites.json and suites.md.

rows = run_suites(chosen, evaluate, failed, described, checkpoint="runs/demo/checkpoints/best", folder=Path("out"))
print(markdown(rows, chosen, "runs/demo/checkpoints/best"))
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from mmrl.errors import MMRLError, StorageError
from mmrl.evaluation.suite_book import Suite
from mmrl.files import write_text
from mmrl.operations.versions import versions
from mmrl.training.runlog import write_json

__all__ = ["SuiteRow", "by_columns", "markdown", "run_suites"]

R = TypeVar("R", bound="SuiteRow")
S = TypeVar("S", bound=Suite)


@dataclass(frozen=True, kw_only=True)
class SuiteRow(abc.ABC):
    """One line of the table: `n` samples, or initial states; `limited`: the first of more; `error`: why there is no number."""

    suite: str
    n: int = 0
    official: bool = False
    limited: bool = False
    error: str = ""

    @property
    def count(self) -> str:
        """The cell of `n`."""
        return f"{self.n}{' (first n)' if self.limited else ''}"

    @property
    @abc.abstractmethod
    def summary(self) -> str:
        """The number, to be said when the suite is done."""

    @abc.abstractmethod
    def cells(self, samples: int) -> dict[str, str]:
        """Headings of the columns and what stands in them; `samples` were drawn beside the greedy answer."""

    @abc.abstractmethod
    def facts(self, suite: Any) -> list[str]:
        """What the number was measured on, below the table; '' is left out."""

    def remarks(self) -> list[str]:
        """What must not be read without the number, each a line of its own."""
        return []

    def parts(self) -> list[dict[str, str]]:
        """Further lines with some of the cells: those of each task."""
        return []

    def as_dict(self) -> dict[str, Any]:
        """For suites.json."""
        return asdict(self)


def by_columns(rows: Sequence[R], samples: int) -> dict[tuple[str, ...], list[R]]:
    """The rows by the headings of their columns: a table for each."""
    tables: dict[tuple[str, ...], list[R]] = {}
    for row in rows:
        tables.setdefault(tuple(row.cells(samples)), []).append(row)
    return tables


def markdown(
    rows: Sequence[SuiteRow], suites: Mapping[str, Suite], checkpoint: str, samples: int = 0
) -> str:
    """The table as Markdown, and what each number was measured on below it."""
    lines = [f"# {checkpoint}", ""]
    for headings, part in by_columns(rows, samples).items():
        lines += [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
        lines += [f"| {' | '.join(row.cells(samples).values())} |" for row in part] + [""]
    for row in rows:
        suite = suites[row.suite]
        words = [] if row.error and not row.n else row.facts(suite)
        words.append(" ".join(suite.notes.split()))
        lines.append(f"- {row.suite}: {'; '.join(filter(None, words))}")
        lines += [f"  - error: {row.error}"] if row.error else []
        lines += [f"  - {line}" for line in row.remarks()]
        lines += [f"  - {', '.join(filter(None, part.values()))}" for part in row.parts()]
    return "\n".join(lines) + "\n"


def run_suites(
    chosen: Mapping[str, S],
    evaluate: Callable[[str, S], R],
    failed: Callable[[str, S, str], R],
    described: Callable[[str, S], Mapping[str, Any]],
    *,
    checkpoint: str,
    folder: Path,
    samples: int = 0,
    on_row: Callable[[R], None] = lambda row: None,
) -> list[R]:
    """`evaluate` each; FOLDER/suites.json and suites.md are renewed after each. A suite that cannot run is a row with its error,
    made by `failed`; the only one raises it, and so does a full disk. `described`: what suites.json keeps of a suite."""
    rows: list[R] = []
    for name, suite in chosen.items():
        try:
            row = evaluate(name, suite)
        except MMRLError as error:
            if len(chosen) == 1 or isinstance(error, StorageError):
                raise
            row = failed(name, suite, str(error))
        rows.append(row)
        on_row(row)
        found = {
            "checkpoint": checkpoint,
            "suites": [r.as_dict() for r in rows],
            "protocols": {r.suite: dict(described(r.suite, chosen[r.suite])) for r in rows},
            "versions": versions(),
        }
        write_json(folder / "suites.json", found)
        write_text(folder / "suites.md", markdown(rows, chosen, checkpoint, samples))
    return rows
