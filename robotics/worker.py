"""A process that hosts the simulators of some slots: commands come over a pipe, pictures go through shared memory.

    python -c "from mmrl.robotics.worker import resident_gib; print(resident_gib())"   # main() is started by mmrl.robotics.pool

One worker answers its commands one after the other. An exception in a simulator is an answer like any other; the simulator is
thrown away. The worker ends with its parent, also when that is killed, and when its memory passes the hard limit.

A slot's shared memory is an anonymous file whose descriptor the worker inherits: it has no name, so nothing can be left
behind, and the size of /dev/shm (64 MiB in many containers) does not bound it. It holds the pictures of the spec's cameras
in order, then, when frames were asked for, one base-camera picture per executed control step.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np

from mmrl.errors import DataError, MMRLError
from mmrl.operations.startup import loaded, loading
from mmrl.robotics.contract import (
    ActionError,
    ActionSpace,
    ChunkResult,
    EnvSpec,
    InitialState,
    Observation,
    Simulator,
    make_simulator,
    run_chunk,
)
from mmrl.workers.process import MEMORY_EXIT, end_group

__all__ = ["Answer", "Area", "Command", "Facts", "WorkerPlan", "main", "resident_gib"]

_WATCH_S = 0.25
_TEXT = 6000  # characters of a traceback that travel

Cause = Literal["", "action", "setup", "state", "exception"]


@dataclass(frozen=True)
class WorkerPlan:
    """What a worker is told when it starts: whose child it is, its slots with the descriptors of their memory, hard memory
    limit in GiB (0: none)."""

    parent: int
    areas: dict[int, int]
    hard_gib: float


@dataclass(frozen=True)
class Command:
    """`fresh`: make a new simulator first. `area_bytes`: size of the slot's memory, which the parent has set."""

    kind: Literal["reset", "chunk"]
    slot: int
    area_bytes: int
    spec: EnvSpec | None = None
    state: InitialState | None = None
    fresh: bool = False
    actions_CA: Any = None
    frames: bool = False


@dataclass(frozen=True)
class Facts:
    """What only a simulator that runs can tell."""

    action_space: ActionSpace
    proprio_dim: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Answer:
    """The reply to a command, pictures apart. started, ended: time.monotonic(), one clock for all processes."""

    slot: int
    started: float
    ended: float
    rss_gib: float
    proprio: np.ndarray | None = None
    instruction: str = ""
    steps: dict[str, np.ndarray] | None = None
    num_frames: int = 0
    facts: Facts | None = None
    error: str | None = None
    cause: Cause = ""


def resident_gib() -> float:
    """Resident memory of this process, GiB; 0 where /proc does not tell."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE / 2**30
    return 0.0


class Area:
    """A slot's pictures in memory that two processes share; each makes its own Area on the same descriptor. One side writes,
    the other reads after the answer has arrived."""

    def __init__(self, fd: int) -> None:
        self.fd, self.size = fd, 0
        self._map: mmap.mmap | None = None

    def grow(self, size: int) -> int:
        """Make room for `size` bytes; the size that the other side must attach."""
        if size > self.size:
            os.ftruncate(self.fd, size)
            self.attach(size)
        return self.size

    def attach(self, size: int) -> None:
        """Use `size` bytes that the other side has made."""
        if size != self.size:
            self.close()
            self._map, self.size = mmap.mmap(self.fd, size), size

    def write(self, number: int, picture: np.ndarray) -> None:
        """Put picture `number`; all pictures of an area are of one size."""
        assert self._map is not None
        np.frombuffer(self._map, np.uint8, picture.size, number * picture.size).reshape(
            picture.shape
        )[:] = picture

    def read(self, number: int, side: int) -> np.ndarray:
        """A copy of picture `number`, uint8 (side, side, 3)."""
        assert self._map is not None
        count = side * side * 3
        return (
            np.frombuffer(self._map, np.uint8, count, number * count).reshape(side, side, 3).copy()
        )

    def close(self) -> None:
        """Unmap; the descriptor stays open."""
        if self._map is not None:
            self._map.close()
            self._map, self.size = None, 0


class _Slot:
    def __init__(self, fd: int) -> None:
        self.area = Area(fd)
        self.simulator: Simulator | None = None

    def drop(self) -> None:
        simulator, self.simulator = self.simulator, None
        if simulator is not None:
            simulator.close()
            del simulator
            gc.collect()

    def reset(self, command: Command) -> tuple[Observation, Facts | None]:
        assert command.spec is not None and command.state is not None
        fresh = command.fresh or self.simulator is None
        if fresh:
            self.drop()
            self.simulator = make_simulator(command.spec)
        assert self.simulator is not None
        self.simulator.reset(command.state)
        observation = self.simulator.observe()
        facts = (
            Facts(
                self.simulator.action_space, self.simulator.proprio_dim, self.simulator.versions()
            )
            if fresh
            else None
        )
        return observation, facts

    def publish(self, pictures: list[np.ndarray]) -> None:
        assert self.simulator is not None
        side = self.simulator.spec.image_size
        for number, picture in enumerate(pictures):
            if picture.shape != (side, side, 3) or picture.dtype != np.uint8:
                raise ValueError(
                    f"simulator {self.simulator.spec.suite}: expected pictures uint8 ({side}, {side}, 3), found "
                    f"{picture.dtype} {picture.shape}"
                )
            self.area.write(number, picture)

    def answer(self, command: Command, started: float) -> Answer:
        self.area.attach(command.area_bytes)
        facts: Facts | None = None
        chunk: ChunkResult | None = None
        if command.kind == "reset":
            observation, facts = self.reset(command)
        else:
            assert self.simulator is not None
            chunk = run_chunk(self.simulator, command.actions_CA, frames=command.frames)
            observation = chunk.observation
        assert self.simulator is not None
        frames = list(chunk.frames) if chunk else []
        self.publish(
            [observation.images[camera] for camera in self.simulator.spec.cameras] + frames
        )
        steps = (
            {}
            if chunk is None
            else {
                name: getattr(chunk, name)
                for name in ("rewards_C", "terminated_C", "truncated_C", "success_C", "valid_C")
            }
        )
        return Answer(
            command.slot,
            started,
            time.monotonic(),
            resident_gib(),
            np.asarray(observation.proprio, np.float32),
            observation.instruction,
            steps,
            len(frames),
            facts,
        )


def _failed(slot: _Slot, command: Command, started: float, error: Exception) -> Answer:
    """An exception as an answer: a mistake of the user in words, anything else with its traceback."""
    kinds: tuple[tuple[type[Exception], Cause], ...] = (
        (ActionError, "action"),
        (DataError, "state"),
        (MMRLError, "setup"),
    )
    cause: Cause = next((name for kind, name in kinds if isinstance(error, kind)), "exception")
    text = (
        str(error) if cause != "exception" else "".join(traceback.format_exception(error))[-_TEXT:]
    )
    error.__traceback__ = None  # it holds the simulator
    if cause != "action":
        try:
            slot.drop()
        except Exception:
            text += "\nwhile closing the simulator:\n" + traceback.format_exc()[-_TEXT:]
    return Answer(command.slot, started, time.monotonic(), resident_gib(), error=text, cause=cause)


def _watch(plan: WorkerPlan) -> None:
    """End this process when the parent is gone, also out of a call that hangs, or when memory passes the hard limit."""
    while True:
        time.sleep(_WATCH_S)
        if os.getppid() != plan.parent:
            end_group(os.getpid())  # with what simulators started
            os._exit(1)
        used = resident_gib()
        if plan.hard_gib and used > plan.hard_gib:
            os.write(
                2,
                f"memory {used:.2f} GiB is above the limit of {plan.hard_gib:.2f} GiB for one episode\n".encode(),
            )
            os._exit(MEMORY_EXIT)


def main(connection_fd: int, plan_fields: dict[str, Any]) -> None:
    """Answer commands until the pipe ends or brings None."""
    # terminals and schedulers send them to all processes
    for number in (signal.SIGINT, signal.SIGTERM):
        # .. the parent finishes its step with us and ends us in its own order
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    loading()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent asks where a worker hangs
    plan = WorkerPlan(**plan_fields)
    for fd in (connection_fd, *plan.areas.values()):
        os.set_inheritable(fd, False)
    threading.Thread(target=_watch, args=(plan,), daemon=True, name="watch").start()
    connection, slots = (
        Connection(connection_fd),
        {number: _Slot(fd) for number, fd in plan.areas.items()},
    )
    # the parent is gone: so are we
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        connection.send(resident_gib())
        while (command := connection.recv()) is not None:
            started, slot = time.monotonic(), slots[command.slot]
            try:
                answer = slot.answer(command, started)
            except Exception as error:
                answer = _failed(slot, command, started, error)
            connection.send(answer)
            loaded()  # the first command has made the first simulator
    for slot in slots.values():
        slot.drop()
    sys.stderr.flush()
    os._exit(0)  # GL drivers like to crash in the destructors of a normal exit
