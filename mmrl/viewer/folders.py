"""Which run folders there are, and files in them that may be read.

A run is known by its path below the folder that `mmrl view` was given ('sweep/lr_1e-6'). Requests name runs by that key, which is
looked up among those found: no path is ever made from a request. Links are not followed to other places, so that a folder from
elsewhere cannot make the viewer show files it does not hold.

    from mmrl.viewer.folders import Roots
    Roots([Path("runs")]).runs()        # {'demo': PosixPath('runs/demo'), ...}
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from mmrl.errors import DataError
from mmrl.report.load import own_file

__all__ = ["Roots", "Stamp", "open_own", "stamp"]

_DEPTH = 4  # folders below a root that are looked into
_MOST_FOLDERS = 20_000
_AGE_S = 1.0  # a list of runs is looked up so long before it is made anew
Stamp = tuple[int, int, int]
"""(inode, bytes, modification time in ns) of a file; (0, 0, 0) where there is none."""


def stamp(path: Path) -> Stamp:
    """What tells whether a file changed."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


def open_own(path: Path, folder: Path) -> BinaryIO | None:
    """A regular file that lies in `folder`, links followed; None where there is none such."""
    if not own_file(path, folder):
        return None
    try:
        # never waits for the other end of a pipe that took the file's place meanwhile
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        return None
    return open(number, "rb")


class Roots:
    """The folders that were named on the command line, and the runs below them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises DataError for a path that is no folder, or for none."""
        if not paths:
            raise DataError("expected a folder with runs, found none; give one, such as runs/")
        for path in paths:
            if not path.is_dir():
                raise DataError(
                    f"expected a folder with runs, found none at {path}; give the folder of a run, or one that holds runs"
                )
        self.paths = list(dict.fromkeys(p.resolve() for p in paths))
        self._lock = threading.Lock()
        self._runs: dict[str, Path] = {}
        self._made = float("-inf")

    def runs(self) -> dict[str, Path]:
        """Key -> folder of every run there is now, in order of their keys."""
        with self._lock:
            if time.monotonic() - self._made > _AGE_S:
                self._runs = self._scan()
                self._made = time.monotonic()
            return self._runs

    def folder(self, key: str) -> Path | None:
        """The run of that key."""
        return self.runs().get(key)

    def _scan(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for root in self.paths:
            for path in _below(root):
                name = path.relative_to(root).as_posix() if path != root else root.name
                if len(self.paths) > 1 and path != root:
                    name = f"{root.name}/{name}"
                key, number = name, 2
                while key in found:  # two roots of one name
                    key, number = f"{name} ({number})", number + 1
                found[key] = path
        return dict(sorted(found.items()))


def _below(root: Path) -> Iterator[Path]:
    """Run folders at or below `root`; what lies inside a run is not looked into."""
    waiting, seen = [(root, 0)], 0
    while waiting and seen < _MOST_FOLDERS:
        folder, depth = waiting.pop()
        seen += 1
        try:
            with os.scandir(folder) as entries:
                found = list(entries)
        except OSError:
            continue
        files = {e.name for e in found if e.is_file(follow_symlinks=False)}
        if files & {"run.json", "metrics.jsonl"}:
            yield folder
        elif depth < _DEPTH:
            waiting += [
                (Path(e.path), depth + 1)
                for e in sorted(found, key=lambda e: e.name, reverse=True)
                if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")
            ]
