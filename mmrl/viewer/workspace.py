"""The runs that are open: their columns, tables and evaluations, each read once and kept while it is looked at."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from mmrl.errors import DataError
from mmrl.report.load import Run, eval_folders, load_run
from mmrl.viewer.catalog import LiveRun
from mmrl.viewer.folders import Roots, stamp
from mmrl.viewer.glance import Glances
from mmrl.viewer.index import KINDS, Table
from mmrl.viewer.media import MediaPolicy, Thumbs
from mmrl.viewer.query import Finder
from mmrl.viewer.series import Columns

__all__ = ["OpenRun", "Workspace"]

_MOST_OPEN = 8
_FILES = ("run.json", "config.yaml", "alarms.jsonl", "skipped.json", "failures.jsonl")


class OpenRun:
    """One run that is looked at."""

    def __init__(self, key: str, folder: Path) -> None:
        self.key, self.folder = key, folder
        self.columns = Columns(folder)
        self.tables = {kind: Table(folder, kind) for kind in KINDS}
        self.finders = {kind: Finder(table) for kind, table in self.tables.items()}
        self._lock = threading.Lock()
        self._mark: tuple[Any, ...] = ()
        self._run: LiveRun | None = None

    def live(self) -> LiveRun:
        """The run as it is now. Raises DataError when its folder is gone."""
        self.columns.update()
        with self._lock:
            mark = (
                tuple(stamp(self.folder / name) for name in _FILES),
                tuple(stamp(path / "results.json") for _, path in eval_folders(self.folder)),
            )
            if self._run is None or mark != self._mark:
                self._run = LiveRun(load_run(self.folder, metrics=False), self.columns)
                self._mark = mark
            return self._run

    @property
    def version(self) -> str:
        """Changes when anything but metrics and rows did."""
        return str(hash(self._mark) & 0xFFFFFFFF)


class Workspace:
    """All that requests share."""

    def __init__(self, roots: Roots, media: MediaPolicy) -> None:
        self.roots, self.media, self.thumbs, self.glances = roots, media, Thumbs(), Glances()
        self._open: OrderedDict[Path, OpenRun] = OrderedDict()
        self._lock = threading.Lock()
        self.exporting = threading.Semaphore(1)

    def runs(self) -> list[dict[str, Any]]:
        """The table of runs."""
        found = {key: path for key, path in self.roots.runs().items() if path.is_dir()}
        self.glances.forget(set(found.values()))
        return [self.glances.of(key, folder) for key, folder in found.items()]

    def open(self, key: str) -> OpenRun:
        """The run of that key. Raises DataError for one that is not there."""
        folder = self.roots.folder(key)
        if folder is None or not folder.is_dir():
            raise DataError(
                f"expected a run below the viewer's folders, found none called {key[:200]!r}"
            )
        with self._lock:
            found = self._open.get(folder)
            if found is None:
                found = self._open[folder] = OpenRun(key, folder)
            self._open.move_to_end(folder)
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
            return found

    def run(self, key: str) -> Run:
        """The run as it is now, for functions of the report."""
        return self.open(key).live()
