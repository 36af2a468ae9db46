"""`mmrl cache stats | verify | prune`: look after a folder of cached visual tensors. Tables for people, JSON for scripts."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mmrl.errors import ConfigError
from mmrl.operations.console import Console

__all__ = ["open_store", "prune_command", "stats_command", "verify_command"]

_WIDTH = 110
_SHOWN = 20


def open_store(folder: Path) -> Any:
    """The TensorStore in `folder`. Raises CacheError if there is none."""
    from mmrl.video.store import TensorStore

    return TensorStore.existing(folder)


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.2f} GiB"


def _table(title: str, heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left")
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


def stats_command(folder: Path, as_json: bool) -> None:
    """Print entries and bytes by kind, and what all processes counted."""
    store = open_store(folder)
    stats = store.stats()
    oldest = min((entry.used_at for entry in store.entries()), default=None)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "entries": stats.entries,
                    "bytes": stats.nbytes,
                    "counts": dict(stats.totals),
                    "kinds": {
                        kind: {"entries": n, "bytes": size}
                        for kind, (n, size) in stats.kinds.items()
                    },
                    "least_recent_use": oldest,
                }
            )
        )
        return
    console = Console(width=_WIDTH, highlight=False)
    rows = [
        (kind, f"{n:,}", _size(size), _size(size / n)) for kind, (n, size) in stats.kinds.items()
    ]
    console.print(
        _table(
            f"cache {folder}",
            ("kind", "entries", "size", "mean"),
            [
                *rows,
                (
                    "(all)",
                    f"{stats.entries:,}",
                    _size(stats.nbytes),
                    _size(stats.nbytes / max(1, stats.entries)),
                ),
            ],
        )
    )
    console.print(
        _table(
            "since it was made",
            tuple(stats.totals),
            [tuple(f"{n:,}" for n in stats.totals.values())],
        )
    )
    asked = stats.totals["hits"] + stats.totals["misses"]
    if asked:
        console.print(f"{stats.totals['hits'] / asked:.1%} of {asked:,} requests were hits")
    if oldest is not None:
        console.print(f"least recently used entry: {(time.time() - oldest) / 86400:.1f} days ago")


@contextmanager
def _progress(text: str, hidden: bool) -> Iterator[Callable[[int, int, float], None]]:
    """A bar with bytes and remaining time on a terminal's standard error."""
    bar = Progress(
        TextColumn(text),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=hidden or not sys.stderr.isatty(),
    )
    with bar:
        job = bar.add_task(text, total=None)
        yield lambda done, total, left_s: bar.update(job, completed=done, total=total)


def verify_command(folder: Path, delete: bool, as_json: bool) -> None:
    """Read every entry and compare its checksum. Status 1 when damaged entries were found and are still there."""
    store = open_store(folder)
    with _progress("verifying", as_json) as progress:
        result = store.verify(delete=delete, progress=progress)
    left = len(result.damaged) - result.removed
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "entries": result.entries,
                    "bytes": result.nbytes,
                    "seconds": round(result.seconds, 3),
                    "removed": result.removed,
                    "damaged": [{"key": k, "why": w} for k, w in result.damaged],
                }
            )
        )
    else:
        console = Console(width=_WIDTH, highlight=False)
        if result.damaged:
            console.print(
                _table("damaged entries", ("key", "what is wrong"), list(result.damaged[:_SHOWN]))
            )
            if len(result.damaged) > _SHOWN:
                console.print(f"and {len(result.damaged) - _SHOWN:,} more")
        rate = result.nbytes / max(result.seconds, 1e-9)
        console.print(
            f"{result.entries:,} entries, {_size(result.nbytes)} read in {result.seconds:.1f} s ({_size(rate)}/s), "
            f"{len(result.damaged):,} damaged, {result.removed:,} removed"
        )
        if left:
            console.print(
                "remove them with --delete; training removes and rebuilds what it meets by itself"
            )
    if left:
        raise typer.Exit(1)


def prune_command(
    folder: Path, max_gib: float | None, unused_days: float | None, as_json: bool
) -> None:
    """Remove entries that were not used for long, then the least recently used ones beyond a size; never one in use."""
    if max_gib is None and unused_days is None:
        raise ConfigError(
            "expected --max-gib or --unused-days (or both), found neither; --max-gib 0 removes everything not in use"
        )
    for name, value in (("--max-gib", max_gib), ("--unused-days", unused_days)):
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"{name}: expected a finite number, found {value}")
    store = open_store(folder)
    removed, left = store.prune(
        max_bytes=None if max_gib is None else int(max_gib * 2**30),
        unused_for_s=None if unused_days is None else unused_days * 86400.0,
    )
    over = max_gib is not None and left > max_gib * 2**30
    facts: Mapping[str, Any] = {"removed": removed, "bytes_left": left, "kept_in_use": over}
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        console = Console(width=_WIDTH, highlight=False)
        console.print(f"{removed:,} entries removed, {_size(left)} left")
        if over:
            console.print("more than asked for is left: those entries are in use")
    if over:
        raise typer.Exit(1)
