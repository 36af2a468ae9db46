"""A child process that may hang, die or lie: its deadline, its end with all that it started, and how it ended, in one place.

    Child                 since when it works on what, when it is late, whether it lives, how it ended (Death), kill, restart
      Worker              mmrl.workers.spawned: a Python process that runs `target(connection, progress, *args)`
      Program             mmrl.workers.program: a command with stdin and stdout, or descriptors that it inherits
    ChildError            the one error: it carries the Death
    Losses                deaths and timeouts against a limit: in a row, or altogether
    patience, late        how long to wait for several children, and which of them missed their deadline

A child is started, asked, waited for and ended; what goes wrong in between is a Death with one of these causes:

    exit      it ended by itself with `code`                 timeout   it missed its deadline; its user ends it
    signal    it was killed by signal -code                  message   what it sent is too long, or no message
    memory    it left with MEMORY_EXIT                       pipe      it closed its pipe and still runs
    refused   it said why it cannot do its work

| who                                       | transport                        | believes                                        |
|-------------------------------------------|----------------------------------|-------------------------------------------------|
| rewards (mmrl.workers.scorer)             | Worker, frames of reward_pipe    | frames with its token: user code runs there     |
| media (mmrl.workers.prefetch)             | Worker of a fork server          | what our code there sends                       |
| rollouts (mmrl.training.generator)        | Worker, weights by shared memory | what our code there sends                       |
| requests (mmrl.serve.pool)                | Worker of a fork server          | what our code there sends                       |
| recording (mmrl.robotics.datasets.record) | Worker                           | what our code there sends                       |
| simulators (mmrl.robotics.pool_process)   | Program, a pipe that it inherits | what our code there sends                       |
| verifiers (mmrl.rewards.verifier_pool)    | Program, lines of JSON           | JSON                                            |
| worlds (mmrl.tasks.verifiers_process)     | Program, a socket that it inherits | JSON                                          |
| other policies (mmrl.robotics.external)   | Program, headers and arrays      | JSON and numbers of the size that was announced |
| questions of mmrl doctor                  | Program, all that it prints      | one line of JSON                                |

The rules of each user stay with it: whom a loss is blamed on, what is asked again, how many losses are too many.
"""

from __future__ import annotations

import abc
import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from mmrl.errors import MMRLError

__all__ = [
    "END_S",
    "MEMORY_EXIT",
    "Cause",
    "Child",
    "ChildError",
    "Death",
    "Losses",
    "end_group",
    "patience",
]

END_S = 5.0
"""Seconds for a process to end, once asked to, or killed: one that hangs in the kernel ends when the kernel lets it."""
MEMORY_EXIT = 78
"""Exit status of a child that ended itself because it passed its memory limit."""

Cause = Literal["exit", "signal", "memory", "timeout", "message", "pipe", "refused"]


@dataclass(frozen=True)
class Death:
    """How a child ended, or why it is of no use any more. `code`: exit status, -N for signal N, None while it runs; `said`: the
    detail, in words; `tail`: the end of its stderr, where that is kept."""

    cause: Cause
    code: int | None = None
    said: str = ""
    tail: str = ""

    @property
    def signal(self) -> str:
        """SIGKILL, or 'signal 99' for a number without a name; '' when it was not killed by one."""
        if self.code is None or self.code >= 0:
            return ""
        with contextlib.suppress(ValueError):
            return signal.Signals(-self.code).name
        return f"signal {-self.code}"

    @property
    def how(self) -> str:
        """'was killed by SIGKILL', 'exited with status 3', or 'closed its pipe' of one that still ran."""
        if self.code is None:
            return "closed its pipe"
        return (
            f"was killed by {self.signal}" if self.code < 0 else f"exited with status {self.code}"
        )


class ChildError(MMRLError, RuntimeError):
    """A child cannot be used any more: `death` says how it ended. Users of the supervisor turn it into their own words."""

    def __init__(self, name: str, death: Death) -> None:
        super().__init__(
            f"{name}: expected a process that answers, found that it "
            f"{death.how if death.cause in ('exit', 'signal', 'memory', 'pipe') else death.said or death.cause}"
        )
        self.death = death


class Child(abc.ABC):
    """One child process. How it is started, asked and released is its transport's (the subclass's)."""

    name: str
    since = 0.0
    """When it was given what it works on, or was started (time.monotonic())."""
    limit_s = math.inf
    """Seconds that this may take."""

    @property
    @abc.abstractmethod
    def pid(self) -> int:
        """Process id."""

    @abc.abstractmethod
    def wait(self, seconds: float | None) -> int | None:
        """Its exit code (-N for signal N) once it has ended, None when it still runs after so long (null: without end)."""

    @abc.abstractmethod
    def start(self) -> None:
        """Start the process."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End the process only: whoever waits for its answer, in this thread or another, meets its end and calls `kill`."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End the process without asking it, and free what was shared with it. May be called more than once."""

    @property
    def code(self) -> int | None:
        """Exit code, -N for signal N; None while it runs."""
        return self.wait(0.0)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.code is None

    def restart(self) -> None:
        """Kill the process and start another."""
        self.kill()
        self.start()

    def tail(self) -> str:
        """The end of its stderr; '' where that is not kept."""
        return ""

    # its job

    def begin(self, limit_s: float) -> None:
        """From now on it has so many seconds."""
        self.since, self.limit_s = time.monotonic(), limit_s

    @contextlib.contextmanager
    def within(self, limit_s: float) -> Iterator[threading.Event]:
        """A job for which it has so many seconds, of a thread that blocks on its pipe: when they are over the process is stopped,
        which the pipe tells, and the event is set."""
        late = threading.Event()

        def expire() -> None:
            late.set()
            self.stop()

        self.begin(limit_s)
        timer = threading.Timer(limit_s, expire)
        timer.start()
        try:
            yield late
        finally:
            timer.cancel()
            timer.join()
            self.clear_deadline()

    def clear_deadline(self) -> None:
        """It owes nothing."""
        self.limit_s = math.inf

    @property
    def deadline(self) -> float:
        """When it is late (time.monotonic()); inf when it owes nothing."""
        return self.since + self.limit_s

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline

    # its end

    def death(self, patience_s: float = 0.0, cause: Cause | None = None, said: str = "") -> Death:
        """How it ended, waiting up to `patience_s` for its status; without a cause that is told by the status."""
        code = self.wait(patience_s)
        if cause is None:
            cause = (
                "pipe"
                if code is None
                else "signal"
                if code < 0
                else "memory"
                if code == MEMORY_EXIT
                else "exit"
            )
        return Death(cause, code, said, self.tail())

    def error(
        self, cause: Cause | None = None, said: str = "", *, patience_s: float = 0.0
    ) -> ChildError:
        """What to raise about it."""
        return ChildError(self.name, self.death(patience_s, cause, said))


class Losses:
    """Deaths and timeouts against `limit`: in a row, where each answer is told by `answered`, else altogether."""

    def __init__(self, limit: int) -> None:
        self.limit, self.count = limit, 0

    def lost(self) -> bool:
        """Count one more; whether it was one too many."""
        self.count += 1
        return self.count > self.limit

    def answered(self) -> None:
        """Start the count again."""
        self.count = 0


def patience(deadlines: Iterable[float], most_s: float | None = None) -> float | None:
    """Seconds from now to the first of `deadlines`, never below 0 and at most `most_s`; None for ever."""
    nearest = min(deadlines, default=math.inf)
    left = math.inf if nearest == math.inf else max(0.0, nearest - time.monotonic())
    left = left if most_s is None else min(left, most_s)
    return None if left == math.inf else left


def end_group(pid: int) -> None:
    """Kill the process group that process `pid` leads: the process and all that it started and that did not leave the group."""
    # none is left, or only what became another user's
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
