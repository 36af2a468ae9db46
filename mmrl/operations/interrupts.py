"""Clean ends: SIGTERM and SIGUSR1 let the step at hand finish, leave a checkpoint, and end the process with 128 + signal.

    with Interrupts(grace_s=100) as interrupts:
        for step in ...:
            ...
            interrupts.stop_if_requested(world, step, saved_step, save)      # raises Interrupted, on all processes at the same step

SIGTERM is what Slurm, Kubernetes, systemd and torchrun send before they kill; SIGUSR1 is the usual choice of Slurm's --signal.
Where a manager signals the whole tree (systemd, Slurm, LSF), a process under torchrun gets SIGTERM twice: directly and from its
agent. Repeats of SIGTERM or SIGUSR1 within `REPEAT_S` of the first are therefore ignored; a later one is meant, and stops at once.

Ctrl-C (SIGINT) stays Python's KeyboardInterrupt: it stops where the run stands. SIGINT after one of the two, or a step that takes
longer than `grace_s`, stops at once as well, and from another thread: the process may be inside a collective that never returns,
where no signal handler runs. The last checkpoint stands: files appear complete or not at all.

Exit status: `mmrl train` by itself ends with 143 (SIGTERM) or 138 (SIGUSR1). Under torchrun that is the status of the workers; a
torchrun that was signalled itself ends with a status of its own (1), and dies of SIGUSR1. It kills its workers 30 s after SIGTERM,
before `grace_s` has passed, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says otherwise: scripts/launch_torchrun.sh sets both (--grace).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmrl.distributed.world import World

__all__ = ["REPEAT_S", "SIGNALS", "Interrupted", "Interrupts"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
REPEAT_S = 10.0
"""Seconds after the first signal in which another one counts as the same request, delivered twice."""
_CHILD_S = 5.0  # for children to end once asked to
_WRITE_S = 5.0  # for run.json, on a disk that may hang


class Interrupted(KeyboardInterrupt):
    """The run was asked to end by `signal` and ended after a whole step. The CLI exits with `status`, 128 + its number."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.signal, self.status = signal.Signals(number).name, 128 + number


class Interrupts:
    """Takes in the signals while it is open; handlers are put back after. In a thread that is not the main one it does nothing.

    `abandoned(name of the signal)` is called when the step at hand is given up, just before the process ends; `go_on` is the
    command that the messages name.
    """

    def __init__(
        self,
        grace_s: float,
        abandoned: Callable[[str], None] | None = None,
        *,
        repeat_s: float = REPEAT_S,
        go_on: str = "--resume",
    ) -> None:
        self.grace_s, self.repeat_s, self._go_on = grace_s, repeat_s, go_on
        self.number = 0
        """The signal that asked for the end; 0: none."""
        self._abandoned = abandoned or (lambda name: None)
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self  # signals are the business of whoever owns the main thread
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = {s: signal.signal(s, self._note) for s in SIGNALS}
        # The C handler writes the number of each signal into the pipe, also while the main thread is inside a C call.
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="mmrl-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is None:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            # None: set by something outside Python
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        os.close(self._write)  # the watcher reads the end of the file
        self._thread.join()
        os.close(self._read)
        self._thread = None

    def stop_if_requested(
        self,
        world: World,
        step: int,
        saved_step: Callable[[], int],
        save: Callable[[], None] | None,
    ) -> None:
        """Raise Interrupted if any process of `world` was asked to end; collective: all processes call it after the same step.

        `save` writes the checkpoint of `step` (None: it exists, or there is nothing to save); `saved_step` is the last there is.
        """
        number = max(world.gather([self.number])) if world.size > 1 else self.number
        if not number:
            return
        if save is not None:
            save()
        name, last = signal.Signals(number).name, saved_step() if world.is_main else step
        kept = (
            f"its checkpoint is written; continue with {self._go_on}"
            if last == step and step
            else (
                f"the last checkpoint is of step {last}; continue with {self._go_on}"
                if last
                else f"there is no checkpoint yet: start again with {self._go_on}"
            )
        )
        raise Interrupted(number, f"{name}: ended after step {step}; {kept}")

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler, which Python runs in the main thread once that is not inside a C call; the pipe tells the watcher too."""
        self.number = self.number or number

    def _watch(self) -> None:
        """Read signals from the pipe until it is closed; a second request, or the end of the grace period, ends the process."""
        deadline: float | None = None
        while True:
            wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._read], [], [], wait_s)[0]:
                self._abandon(
                    f"the step at hand took longer than operations.grace_s = {self.grace_s:g} s"
                )
            found = os.read(self._read, 64)
            if not found:
                return
            for number in found:
                repeats = (
                    deadline is not None
                    and number in SIGNALS
                    and time.monotonic() < deadline - self.grace_s + self.repeat_s
                )
                if deadline is not None and number in (*SIGNALS, signal.SIGINT) and not repeats:
                    self._abandon(
                        f"a second signal ({signal.Signals(number).name}) came before the step at hand was done"
                    )
                if deadline is None and number in SIGNALS:
                    self.number, deadline = self.number or number, time.monotonic() + self.grace_s

    def _abandon(self, why: str) -> None:
        """End this process and its children now; the last checkpoint stands."""
        name = signal.Signals(self.number).name
        with suppress(Exception):  # the process ends in any case
            note = threading.Thread(target=self._abandoned, args=(name,), daemon=True)
            note.start()
            note.join(_WRITE_S)
        with suppress(Exception):
            _end_children()
        with suppress(OSError, ValueError):
            print(
                f"{name}: stopped in the middle of a step: {why}; continue from the last checkpoint with {self._go_on}",
                file=sys.stderr,
                flush=True,
            )
        os._exit(128 + self.number)


def _end_children() -> None:
    """Terminate, then kill every process below this one."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.Error):
            child.terminate()
    for child in psutil.wait_procs(children, timeout=_CHILD_S)[1]:
        with suppress(psutil.Error):
            child.kill()
