"""How scores travel from a reward process: each in a frame of its own, with the id of its job and the token of its process.

    writer = ScoreWriter(connection, token)            # in the reward process
    writer.add(job_id, score, part_names); writer.flush()
    inbox = ScoreInbox(connection, token)              # in the run's process
    for job_id, score in inbox.read(): ...

User code runs between the two. A reward that forks leaves a second process behind the same pipe, and one that writes into the pipe,
or closes it, leaves half a message: so a score is never told from another by its place in the stream. A frame is the token (made
for this process by the run), the length, and the pickled (job id, score); what a forked copy would send is not sent, and what has
no token, no id that was asked for or no end within the deadline is not believed. Reading never waits.
"""

from __future__ import annotations

import os
import pickle
import select
import struct
from collections.abc import Sequence
from multiprocessing.connection import Connection

from mmrl.types import Score

__all__ = ["CLOSED", "TOKEN_BYTES", "GarbledError", "ScoreInbox", "ScoreWriter"]

TOKEN_BYTES = 8
CLOSED = 74
"""Exit status of a reward process whose pipe was closed by the reward."""
_HEADER = struct.Struct(f">{TOKEN_BYTES}sI")
# bytes of one score; what it may hold is bounded long before (mmrl.workers.scoring)
_LONGEST = 8 << 20
_READ = 1 << 20


class GarbledError(Exception):
    """What came through the pipe was not sent by its process's writer."""


class ScoreWriter:
    """Frames scores; `flush` sends them together. Only the process that made it sends: in a forked copy it ends that copy."""

    def __init__(self, connection: Connection, token: bytes) -> None:
        self._connection, self._token, self._pid = connection, token, os.getpid()
        self._pipe = self._place()
        self._waiting: list[bytes] = []

    def _place(self) -> tuple[int, int]:
        facts = os.fstat(self._connection.fileno())
        return facts.st_dev, facts.st_ino

    def check(self) -> None:
        """To be asked after user code ran. Ends this process if it is a fork of the one that scores (user code returned twice, and
        the original goes on), or if the pipe is no longer there: while the job that closed it is still the one at hand."""
        # os._exit: nothing of the original's is to be closed or flushed twice
        if os.getpid() != self._pid:
            os._exit(0)
        try:
            if self._place() == self._pipe:
                return
        except OSError:
            pass  # closed
        os._exit(CLOSED)

    def add(self, job: int, score: Score, part_names: Sequence[str]) -> None:
        """Take in the score of `job`; one that cannot be pickled becomes a recorded failure."""
        try:
            data = pickle.dumps((job, score))
            if len(data) > _LONGEST:
                raise ValueError(
                    f"expected a score of at most {_LONGEST:,} bytes, found {len(data):,}"
                )
        except Exception as error:
            reason = f"reward_error: the score cannot be sent between processes: {type(error).__name__}: {error}"
            data = pickle.dumps((job, Score.failure(reason[:500], part_names)))
        self._waiting.append(_HEADER.pack(self._token, len(data)) + data)

    def flush(self) -> None:
        """Send what was taken in. Raises BrokenPipeError when the run is gone."""
        self.check()
        data, self._waiting = memoryview(b"".join(self._waiting)), []
        while data:
            data = data[os.write(self._connection.fileno(), data) :]


class ScoreInbox:
    """Takes scores out of the pipe of one process."""

    def __init__(self, connection: Connection, token: bytes) -> None:
        self._descriptor, self._token = connection.fileno(), token
        self._buffer = bytearray()

    def read(self) -> list[tuple[int, Score]]:
        """(job id, score) of every frame that is complete by now. Raises EOFError when the other end is closed and all is read,
        GarbledError for anything that the writer did not send."""
        found: list[tuple[int, Score]] = []
        while select.select([self._descriptor], [], [], 0)[0]:
            try:
                data = os.read(self._descriptor, _READ)
            except ConnectionResetError:
                data = b""
            self._buffer += data
            found += self._frames()
            if not data and not found:
                raise EOFError
            if not data or len(found) > 64:
                break
        return found

    def _frames(self) -> list[tuple[int, Score]]:
        found = []
        while len(self._buffer) >= _HEADER.size:
            token, length = _HEADER.unpack_from(self._buffer)
            if token != self._token or length > _LONGEST:
                raise GarbledError("expected a score, found other bytes")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            try:
                job, score = pickle.loads(memoryview(self._buffer)[_HEADER.size : end])
            except Exception as error:  # what a class of the reward's own does when it is read
                raise GarbledError(
                    f"a score that cannot be read: {type(error).__name__}: {error}"
                ) from error
            if not (isinstance(job, int) and isinstance(score, Score)):
                raise GarbledError(f"expected a score, found {type(score).__name__}")
            found.append((job, score))
            del self._buffer[:end]
        return found
