"""A command as a child: bytes through its stdin and stdout under a deadline, and the end of what it writes to stderr.

    program = Program(["envs/openvla/bin/python", "server.py"], "external policy", group=True)
    program.begin(600.0)                        # seconds for the question and its answer
    program.write(question)
    answer = program.read_line(1 << 20)         # or read(count), read_all(most); ChildError when it is late, gone or too long

Nothing is unpickled here, and nothing is believed of the bytes. Killed when nobody holds it any more and when the interpreter ends;
a fork of the process that started it leaves it alone. Light to import: verifiers do so in each of their processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any

from mmrl.workers.process import END_S, Child, ChildError, end_group, patience

__all__ = ["CHROMIUM", "TAIL", "Program"]

CHROMIUM = (
    "chromium-headless-shell",
    "chrome-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)
"""Names under which distributions install the browser. The shell without windows comes first: the whole Chromium
builds its toolbars for each page, also where nobody sees them (scripts/bench_browser.py measures what that costs)."""
TAIL = 3000
"""Bytes of stderr that an error ends with."""
_MOST_STDERR = 4 << 20  # of a program that writes on and on: more is forgotten by `trim`
# of one reading: a larger buffer would be mapped and unmapped for every short answer
_CHUNK = 1 << 16
_BLOCK = 1 << 20
_SLICE_S = 1.0  # how often a silent program is asked whether it lives: what it started may hold its pipe open


def _appended() -> IO[bytes]:
    """A file without a name that is written at its end, also after it was cut: tempfile's mode "a" does not see to that."""
    file = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (lives as long as the program)
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


def _end(process: subprocess.Popen[bytes], group: bool, owner: int) -> None:
    if os.getpid() != owner:
        return
    if group:
        end_group(process.pid)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)


class Program(Child):
    """A running command; used by one thread at a time, `stop` apart.

    `environment` is added to ours. `talk`: its stdin and stdout are pipes to us, else it has neither. `passed`: descriptors that
    it inherits. `errors`: the end of its stderr is kept for `tail`, else it has none. `group`: it leads a session of its own, and
    all that it starts ends with it. Raises OSError when it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        name: str,
        *,
        environment: Mapping[str, str] | None = None,
        cwd: str | None = None,
        talk: bool = True,
        passed: Sequence[int] = (),
        errors: bool = True,
        group: bool = False,
    ) -> None:
        self.command, self.name, self.group = tuple(command), name, group
        self._options: dict[str, Any] = {
            "env": {**os.environ, **(environment or {})},
            "cwd": cwd,
            "pass_fds": tuple(passed),
            "start_new_session": group,
            "bufsize": 0,
            **dict.fromkeys(("stdin", "stdout"), subprocess.PIPE if talk else subprocess.DEVNULL),
        }
        self._errors = errors
        self._stderr: IO[bytes] | None = None
        self.start()

    # life

    def start(self) -> None:
        """Start the command."""
        # read, and not yet asked for; after an error: what came of the message
        self.held = bytearray()
        self._stderr = _appended() if self._errors else None
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                self.command, stderr=self._stderr or subprocess.DEVNULL, **self._options
            )
        except BaseException:
            if self._stderr is not None:
                self._stderr.close()
            raise
        self._finalizer = weakref.finalize(self, _end, self.process, self.group, os.getpid())
        if self.process.stdin is not None:
            os.set_blocking(self.process.stdin.fileno(), False)

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def wait(self, seconds: float | None) -> int | None:
        """See Child.wait."""
        if seconds == 0.0:
            return self.process.poll()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def stop(self) -> None:
        """See Child.stop."""
        if self.group:
            end_group(self.pid)
        self.process.kill()

    def kill(self) -> None:
        """End the program, with what it started where it has a group, and close the pipes."""
        self._finalizer()
        self.abandon()

    def abandon(self) -> None:
        """Close our ends of the pipes only: after a fork the other process still uses the program."""
        self._finalizer.detach()
        for pipe in (self.process.stdin, self.process.stdout, self._stderr):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def close(self, patience_s: float = END_S) -> None:
        """Close its stdin and end it, by force after `patience_s`."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        if patience_s > 0:
            self.wait(patience_s)
        self.kill()

    @property
    def closed(self) -> bool:
        """Whether `kill`, `close` or `abandon` was called."""
        return not self._finalizer.alive

    # what it says

    def write(self, data: bytes | memoryview) -> None:
        """All of `data` to its stdin, within the deadline. Raises ChildError."""
        assert self.process.stdin is not None
        descriptor, left = self.process.stdin.fileno(), memoryview(data)
        while left:
            try:
                left = left[os.write(descriptor, left[:_BLOCK]) :]
            except BlockingIOError:
                self._await(descriptor, select.POLLOUT)
            except OSError as error:
                raise self._closed("stdin") from error

    def read(self, count: int) -> bytes:
        """Exactly `count` bytes of its stdout, within the deadline. Raises ChildError; `held` are those that came."""
        while len(self.held) < count:
            if not self._more(count - len(self.held)):
                raise self._closed("stdout")
        return self._take(count)

    def read_line(self, most: int) -> bytes:
        """The next line of its stdout, with its end, within the deadline. Raises ChildError, also for one of more than `most`
        bytes."""
        start = 0
        while (end := self.held.find(b"\n", start)) < 0:
            start = len(self.held)
            if start > most:
                raise self.error("message", f"sent a line of more than {most:,} bytes")
            if not self._more(_CHUNK):
                raise self._closed("stdout")
        return self._take(end + 1)

    def read_all(self, most: int) -> bytes:
        """Its stdout to the end, within the deadline. Raises ChildError, also for more than `most` bytes."""
        while self._more(_CHUNK):
            if len(self.held) > most:
                raise self.error("message", f"wrote more than {most:,} bytes")
        return self._take(len(self.held))

    def _closed(self, pipe: str) -> ChildError:
        """It seems to end by itself: its status is worth a moment, within the deadline."""
        return self.error(
            said=f"closed its {pipe}", patience_s=patience([self.deadline], END_S) or 0.0
        )

    def _take(self, count: int) -> bytes:
        with memoryview(self.held) as view:
            data = bytes(view[:count])
        del self.held[:count]
        return data

    def _more(self, count: int) -> bool:
        """Read up to `count` more bytes into `held`; False at the end."""
        assert self.process.stdout is not None
        self._await(self.process.stdout.fileno(), select.POLLIN)
        part = os.read(self.process.stdout.fileno(), min(_BLOCK, count))
        self.held += part
        return bool(part)

    def _await(self, descriptor: int, event: int) -> None:
        """Until the pipe is ready. Raises ChildError when the time is over or the program is no longer there."""
        poller = select.poll()
        poller.register(descriptor, event)
        while not poller.poll(1000 * max(0.0, min(_SLICE_S, self.deadline - time.monotonic()))):
            if not self.alive:
                if poller.poll(0):  # what it wrote before it ended is there
                    return
                raise self.error()
            if self.late:
                raise self.error("timeout", f"gave no answer within {self.limit_s:g} s")

    # what it writes to stderr

    @property
    def stderr_size(self) -> int:
        """Bytes of it that are kept; 0 without."""
        return (
            0
            if self._stderr is None or self._stderr.closed
            else os.fstat(self._stderr.fileno()).st_size
        )

    def tail(self, most: int = TAIL) -> str:
        """The end of what it wrote to stderr."""
        if self._stderr is None or self._stderr.closed:
            return ""
        return (
            os.pread(self._stderr.fileno(), most, max(0, self.stderr_size - most))
            .decode("utf-8", "replace")
            .strip()
        )

    def trim(self) -> None:
        """Forget a long stderr: a program that warns at every step would fill the disk."""
        if self._stderr is not None and self.stderr_size > _MOST_STDERR:
            os.ftruncate(self._stderr.fileno(), 0)
