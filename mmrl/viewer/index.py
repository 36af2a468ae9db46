"""Rows of rollouts/step_*.jsonl, of eval/step_*/predictions.jsonl, or of the evaluations that `mmrl eval` made of a run's
checkpoints, as byte offsets and a few facts each, in memory.

A run has hundreds of such files and hundreds of thousands of rows. They are parsed once, in the background, and only as far as they
grew; what is kept of a row is about 60 bytes: where it is, and what it is filtered and sorted by. Its text stays on disk.

    table = Table(Path("runs/demo"), "rollouts")
    while not table.update(seconds=0.5): ...
    table.facts(0), table.row(0)["text"]
"""

from __future__ import annotations

import os
import re
import threading
import time
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mmrl.report.load import own_file, parse_line
from mmrl.report.rows import headline_of, metric_of, score_of
from mmrl.viewer.folders import open_own

__all__ = ["KINDS", "NAMED", "Facts", "Table", "flat_row"]

KINDS = ("rollouts", "predictions", "evaluations")
"""Training rollouts, the run's own held-out predictions, and those of `mmrl eval` (mmrl.evaluation.places)."""
NAMED = ("evaluation", "source", "task", "mode", "reason", "stop")
"""Columns of few different texts: filters of the explorer."""
_MOST_TEXTS = 2000  # different ones of a column; the others are one
_OTHER = "(other)"
_CHUNK = 1 << 20
_MOST_LINE = 16 << 20
_MOST_ROWS = 5_000_000


@dataclass(frozen=True)
class Facts:
    """What is known of a row without reading it: `unit` tells prompts apart, `group` the groups of a step."""

    step: int
    reward: float
    headline: float
    parsed: bool
    contrast: bool
    unit: int
    group: int
    named: dict[str, str]


class _Texts:
    """Texts as small numbers, with how often each occurs."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.counts = array("Q")
        self._codes: dict[str, int] = {}

    def code(self, text: str) -> int:
        """The number of a text; it is counted."""
        text = text[:200]
        if text not in self._codes:
            if len(self.texts) >= _MOST_TEXTS:
                text = _OTHER
            if text not in self._codes:
                self._codes[text] = len(self.texts)
                self.texts.append(text)
                self.counts.append(0)
        self.counts[self._codes[text]] += 1
        return self._codes[text]

    def find(self, text: str) -> int | None:
        """The number of a text that occurred."""
        return self._codes.get(text)


@dataclass
class _File:
    """A file of rows, how far it was read, and which file it was."""

    path: Path
    step: int
    evaluation: str = ""
    read: int = 0
    inode: int = 0


class Table:
    """All rows of one kind of a run. `update` is called by one thread at a time, all else at any time."""

    def __init__(self, folder: Path, kind: str) -> None:
        assert kind in KINDS, kind
        self.folder, self.kind = folder, kind
        self.generation = self.broken = 0
        self.done = False
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._files: list[_File] = []
        self._known: dict[str, int] = {}
        self.columns = {name: array("I") for name in NAMED}
        self.texts = {name: _Texts() for name in NAMED}
        self._file, self._offset, self._length = array("I"), array("Q"), array("I")
        self.steps, self.rewards, self.headlines = array("q"), array("d"), array("d")
        self.flags = array("B")  # 1 parsed, 2 written on changed input
        self.units, self.groups = array("Q"), array("Q")
        self.broken = 0
        self._at, self._listed, self._failed = 0, array("Q"), 0

    def __len__(self) -> int:
        return len(self.flags)

    # building

    def update(self, seconds: float) -> bool:
        """Read on for so long; returns whether everything that is there now has been read."""
        if not self._lock.acquire(timeout=seconds):
            return self.done
        try:
            ends = time.monotonic() + seconds
            files = self._found()
            if self._changed(files):
                # once before and once after: who reads meanwhile sees that the rows are others at its end
                self.generation += 1
                self._clear()
                self.generation += 1
            for path, step, evaluation in files:
                if path.as_posix() not in self._known:
                    self._known[path.as_posix()] = len(self._files)
                    self._files.append(_File(path, step, evaluation))
            self.done = all(self._read_on(i, ends) for i in range(len(self._files)))
            return self.done
        finally:
            self._lock.release()

    def any(self) -> bool:
        """Whether there is a file of such rows."""
        return any(own_file(path, self.folder) for path, _, _ in self._found())

    def _found(self) -> list[tuple[Path, int, str]]:
        """Files, their steps and the names of their evaluations ('' for the run's own rows), in order."""
        if self.kind == "rollouts":
            found = [
                (path, int(m.group(1)), "")
                for path in _listed(self.folder / "rollouts")
                if (m := re.fullmatch(r"step_(\d{1,12})\.jsonl", path.name))
            ]
        elif self.kind == "predictions":
            found = [
                (path / "predictions.jsonl", int(m.group(1)), "")
                for path in _listed(self.folder / "eval")
                if (m := re.fullmatch(r"step_(\d{1,12})", path.name))
            ]
        else:
            found = [
                (file, int(m.group(1)), name)
                for path in _listed(self.folder / "eval")
                if (m := re.fullmatch(r".+@step_(\d{1,12})(?:-\d+)?", path.name))
                for name, file in _evaluated(path)
            ]
        return sorted(found, key=lambda entry: (entry[1], entry[2]))

    def _changed(self, files: list[tuple[Path, int, str]]) -> bool:
        """Whether a file that was read is gone, cut or another one now."""
        there = {path for path, _, _ in files}
        for file in self._files:
            if not file.read:
                continue
            try:
                found = file.path.stat()
            except OSError:
                return True
            if file.path not in there or found.st_ino != file.inode or found.st_size < file.read:
                return True
        return False

    def _read_on(self, place: int, ends: float) -> bool:
        file = self._files[place]
        opened = open_own(file.path, self.folder)
        if opened is None:
            return True
        with opened:
            found = os.fstat(opened.fileno())
            file.inode = found.st_ino
            if found.st_size == file.read:
                return True
            opened.seek(file.read)
            return self._lines(place, file, opened, ends)

    def _lines(self, place: int, file: _File, opened: BinaryIO, ends: float) -> bool:
        rest = b""
        while chunk := opened.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take(place, file, file.read, line)
                file.read += len(line) + 1
            if len(rest) > _MOST_LINE or len(self) >= _MOST_ROWS:  # a line is never held whole
                self.broken += 1
                file.read, rest = opened.tell(), b""
            if time.monotonic() > ends:
                return False
        if rest and isinstance(parse_line(rest.decode("utf-8", "replace")), dict):
            self._take(place, file, file.read, rest)  # complete, without its line end
            file.read += len(rest)
        return True

    def _take(self, place: int, file: _File, offset: int, line: bytes) -> None:
        if not line.strip():
            return
        row = flat_row(line)
        if row is None:
            self.broken += 1
            return
        score = score_of(row)
        reason = str(score.get("reason") or "no reason").partition(":")[0]
        parsed = bool(score.get("parsed"))
        words = {
            "evaluation": file.evaluation,
            "source": str(row.get("source", "")),
            "task": str(row.get("task", "")),
            "mode": str(row.get("mode") or "sampled"),
            "reason": "" if parsed else reason,
            "stop": str(row.get("stop", "")),
        }
        for name, text in words.items():
            self.columns[name].append(self.texts[name].code(text))
        self._file.append(place)
        self._offset.append(offset)
        self._length.append(len(line))
        self.steps.append(file.step)
        self.rewards.append(metric_of(row, "reward"))
        self.headlines.append(metric_of(row, headline_of(row)))
        self.units.append(_digest(f"{row.get('source')}\n{row.get('id')}"))
        self.groups.append(
            _digest(
                f"{file.step}\n{file.evaluation}\n{row.get('key')}\n{row.get('source')}\n{row.get('id')}"
            )
        )
        self.flags.append(parsed + 2 * (row.get("contrast") is True))  # last: it counts the rows

    # reading

    def facts(self, row: int) -> Facts:
        """What is known of the row. Raises IndexError."""
        flags = self.flags[row]
        return Facts(
            self.steps[row],
            self.rewards[row],
            self.headlines[row],
            bool(flags & 1),
            bool(flags & 2),
            self.units[row],
            self.groups[row],
            {name: self.texts[name].texts[self.columns[name][row]] for name in NAMED},
        )

    def lines(self, rows: list[int]) -> list[bytes]:
        """The lines of the rows as they are in their files; b'' for one that is no longer there."""
        out, opened, place = [], None, -1
        try:
            for row in rows:
                try:
                    at, offset, length = self._file[row], self._offset[row], self._length[row]
                    path = self._files[at].path
                except IndexError:  # a file was replaced or cut, and the table is read anew
                    out.append(b"")
                    continue
                if at != place:
                    if opened is not None:
                        opened.close()
                    place, opened = at, open_own(path, self.folder)
                if opened is None:
                    out.append(b"")
                    continue
                opened.seek(offset)
                out.append(opened.read(length))
        finally:
            if opened is not None:
                opened.close()
        return out

    def row(self, row: int) -> dict[str, Any] | None:
        """The row, with its sample's fields beside its own; None where its file is no longer what it was."""
        return flat_row(self.lines([row])[0])

    def folder_of(self, row: int) -> Path:
        """The folder of the row's file: of a prediction that of its evaluation."""
        return self._files[self._file[row]].path.parent


def _evaluated(folder: Path) -> list[tuple[str, Path]]:
    """Name and file of what lies in a folder of `mmrl eval`: one evaluation, or one in each suite's folder."""
    below = [path for path in sorted(_listed(folder)) if (path / "predictions.jsonl").is_file()]
    return [
        (folder.name, folder / "predictions.jsonl"),
        *((f"{folder.name}/{path.name}", path / "predictions.jsonl") for path in below),
    ]


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _digest(text: str) -> int:
    data = text.encode("utf-8", "replace")
    return zlib.crc32(data) << 32 | zlib.adler32(data)


def flat_row(line: bytes) -> dict[str, Any] | None:
    """The object of a line, as predictions have it: a rollout's source, id and media stand in its sample. None for other lines."""
    row = parse_line(line.decode("utf-8", "replace"))
    if not isinstance(row, dict):
        return None
    sample = row.get("sample")
    if isinstance(sample, dict):
        shared = ("id", "source", "task", "question", "images", "videos")
        row = {**{k: sample[k] for k in shared if k in sample}, **row}
    return row
