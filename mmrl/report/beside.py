"""The report of a run that goes on, written in a process of its own, so that training does not wait for it.

python -m mmrl.report.beside runs/demo       # what that process runs; `mmrl report runs/demo` by another name, with low priority
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["ReportBeside"]

_NICE = 15  # the run goes first
_END_S = 5.0


class ReportBeside:
    """Writes RUN/report.html now and then: at most one at a time, and none within `every_s` seconds of the last (or of the start),
    so that short runs and frequent evaluations pay little. A report that fails costs nothing but itself."""

    def __init__(self, every_s: float = 60.0) -> None:
        self.every_s = every_s
        self._last = time.monotonic()
        self._child: subprocess.Popen[bytes] | None = None

    def begin(self, folder: Path) -> bool:
        """Start writing the report of the run in `folder`, if it is time to; returns whether."""
        if self._child is not None and self._child.poll() is None:
            return False
        if time.monotonic() - self._last < self.every_s:
            return False
        self._last = time.monotonic()
        with suppress(OSError):  # no room for a process: the report at the end is still written
            self._child = subprocess.Popen(
                [sys.executable, "-m", "mmrl.report.beside", str(folder.absolute())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            return True
        return False

    def wait(self, seconds: float) -> None:
        """Wait so long for the report that is being written. Raises subprocess.TimeoutExpired."""
        if self._child is not None:
            self._child.wait(seconds)

    def close(self) -> None:
        """End the report that is being written: whoever closes writes the last one."""
        child, self._child = self._child, None
        if child is None or child.poll() is not None:
            return
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _main() -> None:
    from mmrl.report import build_report

    with suppress(OSError):
        os.nice(_NICE)
    build_report(Path(sys.argv[1]))


if __name__ == "__main__":
    _main()
