"""Verdicts that were given, by the content of the question: a question that is asked again is answered from here.

    store = VerdictStore("runs/a/verdicts")
    store.put(digest({"model": "m", "messages": [...]}), {"value": 0.7, "text": "..."})
    store.get(key)                                          # {"value": 0.7, ...}, also in a later process

So a run that is killed and resumed gets the verdicts it had, whatever its judge would say a second time, and pays for none twice.
Each process appends JSON lines to a file of its own, one write for each: what a kill leaves is whole lines and at most half of
one, which is passed over. Lines stay on disk; memory holds where they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["VerdictStore", "current", "digest", "keep_in"]

_HEAD, _DIGITS = b'{"key": "', 32
_LONGEST = 1 << 20


def digest(question: Any) -> str:
    """The name of a question: 32 hex digits of a hash of its JSON, whose keys are ordered."""
    text = json.dumps(question, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=_DIGITS // 2).hexdigest()


class VerdictStore:
    """Verdicts of one folder, which is looked at when the first is asked for: a run that replaces another empties it before that.
    Without a folder those of this process. Not for several threads."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._memory: dict[str, dict[str, Any]] = {}
        self._places: dict[bytes, tuple[int, int, int]] = {}
        self._open: list[int] = []
        self._own: int | None = None
        self._end = 0
        self._looked = False

    def __len__(self) -> int:
        self._look()
        return len(self._memory) + len(self._places)

    def _look(self) -> None:
        if self._looked:
            return
        self._looked = True
        if self.folder is not None and self.folder.is_dir():
            for path in sorted(self.folder.glob("*.jsonl")):
                self._index(path)

    def _index(self, path: Path) -> None:
        """Where each whole line of a file is."""
        self._open.append(os.open(path, os.O_RDONLY))
        place = 0
        with open(path, "rb") as lines:
            for line in lines:
                key = line[len(_HEAD) : len(_HEAD) + _DIGITS]
                if line.startswith(_HEAD) and line.endswith(b"}\n") and len(line) <= _LONGEST:
                    self._places[key] = len(self._open) - 1, place, len(line)
                place += len(line)

    def get(self, key: str) -> dict[str, Any] | None:
        """What was put under `key`; None where nothing was, or where its line is damaged."""
        if self.folder is None:
            return self._memory.get(key)
        self._look()
        if (found := self._places.get(key.encode())) is None:
            return None
        number, place, length = found
        try:
            row = json.loads(os.pread(self._open[number], length, place))
        except (ValueError, RecursionError):
            return None
        return row if isinstance(row, dict) and row.get("key") == key else None

    def put(self, key: str, row: Mapping[str, Any]) -> None:
        """Keep `row` (JSON values) under `key`. Raises OSError where the disk takes no more."""
        row = {"key": key, **row}
        if self.folder is None:
            self._memory[key] = row
            return
        line = json.dumps(row).encode() + b"\n"
        if len(line) > _LONGEST:
            raise ValueError(
                f"expected a verdict of at most {_LONGEST:,} bytes, found {len(line):,}"
            )
        self._look()
        if self._own is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}.jsonl"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._own = os.open(self.folder / name, flags, 0o644)
            self._open.append(self._own)
        written = os.write(self._own, line)
        if written == len(line):
            self._places[key.encode()] = len(self._open) - 1, self._end, len(line)
        else:  # the disk is full: what was begun must not swallow the next line
            written += os.write(self._own, b"\n")
        self._end += written

    def close(self) -> None:
        """Close its files."""
        for descriptor in self._open:
            os.close(descriptor)
        self._open, self._places, self._own = [], {}, None


_current = VerdictStore()


def current() -> VerdictStore:
    """The store of this process."""
    return _current


def keep_in(folder: str | Path | None) -> None:
    """Let this process's verdicts be kept in `folder`, and taken from what is there now; None: kept in memory, from none on."""
    global _current
    _current.close()
    _current = VerdictStore(folder)
