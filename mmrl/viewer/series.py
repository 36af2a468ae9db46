"""metrics.jsonl as columns, read once and then only as far as it grew.

    columns = Columns(Path("runs/demo"))
    columns.update()
    columns.steps[-1], columns.series("train/reward/mean")[-1]

A file that was replaced or cut (a resumed run rewinds it) is read anew, under the next `generation`. The last line counts once it
is complete. Where a step occurs twice the later row wins, as in the report.
"""

from __future__ import annotations

import math
import os
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from mmrl.report.load import number, parse_line, renamed
from mmrl.viewer.folders import open_own

__all__ = ["Columns", "thin"]

_MOST_NAMES = 4096
_MOST_NAME = 300  # characters of a metric's name
_CHUNK = 4 << 20
_MOST_LINE = 16 << 20
_NONE = math.nan


class Columns:
    """The metrics of one run. Values are floats, NaN where a step has none; `update` may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self.path, self._folder = folder / "metrics.jsonl", folder
        self.generation, self.broken = 0, 0
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self.steps = array("d")
        self._columns: dict[str, array[float]] = {}
        self._rows: dict[float, int] = {}
        self._read = self._inode = self.broken = 0

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> list[str]:
        """All metrics, in order of first appearance."""
        return list(self._columns)

    def series(self, name: str) -> Sequence[float]:
        """The metric's values beside `steps`; empty for one that was never logged."""
        return self._columns.get(name, array("d"))

    def update(self) -> None:
        """Read what was written since."""
        with self._lock:
            file = open_own(self.path, self._folder)
            if file is None:
                if self._read:
                    self._clear()
                    self.generation += 1
                return
            with file:
                self._read_on(file)

    def _read_on(self, file: BinaryIO) -> None:
        found = os.fstat(file.fileno())
        if found.st_ino != self._inode or found.st_size < self._read:
            if self._read:
                self.generation += 1
            self._clear()
            self._inode = found.st_ino
        file.seek(self._read)
        rest, skipping = b"", False
        while chunk := file.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._read += len(line) + 1
                if skipping:
                    skipping = False
                    continue
                self._take(line)
            if len(rest) > _MOST_LINE:  # never held whole
                self._read += len(rest)
                self.broken += not skipping
                rest, skipping = b"", True

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        row = parse_line(line.decode("utf-8", "replace"))
        step = number(row.get("step")) if isinstance(row, dict) else None
        if step is None:
            self.broken += 1
            return
        if step in self._rows:
            place = self._rows[step]
            if place != len(self.steps) - 1:
                self.generation += 1  # what was handed out already is no longer so
        else:
            place = len(self.steps)
            self._rows[step] = place
            self.steps.append(step)
            for column in self._columns.values():
                column.append(_NONE)
        for name, value in renamed(row).items():
            if name == "step":
                continue
            wanted = self._column(str(name)[:_MOST_NAME])
            if wanted is not None:
                found = number(value)
                wanted[place] = _NONE if found is None else found

    def _column(self, name: str) -> array[float] | None:
        if name not in self._columns:
            if len(self._columns) >= _MOST_NAMES:
                return None
            self._columns[name] = array("d", [_NONE]) * len(self.steps)
        return self._columns[name]


def thin(columns: Sequence[Sequence[float]], start: int, stop: int, most: int) -> list[int]:
    """Row numbers from `start` to `stop` that show what the columns look like: all of them up to `most` rows, else of each
    stretch its first row and those where a column is lowest and highest, so that no spike is lost."""
    count = stop - start
    if count <= most:
        return list(range(start, stop))
    stretch = max(1, math.ceil(count * (1 + 2 * len(columns)) / most))
    kept: set[int] = {stop - 1}
    for begin in range(start, stop, stretch):
        rows = range(begin, min(begin + stretch, stop))
        kept.add(begin)
        for column in columns:
            there = [r for r in rows if column[r] == column[r]]
            if there:
                kept.add(min(there, key=column.__getitem__))
                kept.add(max(there, key=column.__getitem__))
    return sorted(kept)
