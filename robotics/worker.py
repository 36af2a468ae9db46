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
import itertools
import mmap
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    check_finite,
    check_picture,
    make_simulator,
    run_chunk,
    simulator_class,
)
from mmrl.robotics.vector import VectorSimulator, make_vector
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
    def __init__(self, number: int, fd: int) -> None:
        self.number, self.area = number, Area(fd)
        self.simulator: Simulator | None = None
        self.batch: _Batch | None = None  # whose row plays here instead

    def drop(self) -> None:
        if self.batch is not None:
            self.batch.leave(self)
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
        check_finite(command.spec, "after a reset", proprio=observation.proprio)
        facts = (
            Facts(
                self.simulator.action_space, self.simulator.proprio_dim, self.simulator.versions()
            )
            if fresh
            else None
        )
        return observation, facts

    def answer(self, command: Command, started: float) -> Answer:
        facts: Facts | None = None
        chunk: ChunkResult | None = None
        if command.kind == "reset":
            observation, facts = self.reset(command)
        else:
            assert self.simulator is not None
            chunk = run_chunk(self.simulator, command.actions_CA, frames=command.frames)
            observation = chunk.observation
        assert self.simulator is not None
        spec = self.simulator.spec
        return self.published(command, spec, observation, chunk, facts, started)

    def published(
        self,
        command: Command,
        spec: EnvSpec,
        observation: Observation,
        chunk: ChunkResult | None,
        facts: Facts | None,
        started: float,
        ended: float | None = None,
    ) -> Answer:
        """The answer, its pictures in the slot's memory."""
        self.area.attach(command.area_bytes)
        frames = chunk.frames if chunk else ()
        pictures = [*(observation.images[camera] for camera in spec.cameras), *frames]
        for number, picture in enumerate(pictures):
            self.area.write(number, check_picture(spec, picture))
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
            time.monotonic() if ended is None else ended,
            resident_gib(),
            np.asarray(observation.proprio, np.float32),
            observation.instruction,
            steps,
            len(frames),
            facts,
        )


class _Batch:
    """The rows of one VectorSimulator, one for each slot of the worker, whether it plays in it or not. What breaks the whole, and
    not a row, ends the worker: a device that failed once is broken for its process."""

    def __init__(self, spec: EnvSpec, slots: Sequence[int]) -> None:
        self.spec = spec
        self.row = {slot: row for row, slot in enumerate(slots)}
        self._vector: VectorSimulator | None = None
        self._inside: set[int] = set()  # slots

    @property
    def vector(self) -> VectorSimulator:
        """Made on first use. Raises ConfigError."""
        if self._vector is None:
            self._vector = make_vector(self.spec, len(self.row))
        return self._vector

    def leave(self, slot: _Slot) -> None:
        """The slot plays elsewhere now; with the last one the simulator goes."""
        slot.batch = None
        self._inside.discard(slot.number)
        self.vector.drop(self.row[slot.number])
        if not self._inside:
            self.vector.close()

    def play(self, commands: Sequence[Command], slots: Mapping[int, _Slot]) -> Iterator[Answer]:
        """Answers to commands of one kind, in their order, when all have been played. They share its time evenly."""
        began = time.monotonic()
        facts: Facts | None = None
        found: Mapping[int, Any]  # by row: a ChunkResult, an Observation or an Exception
        if commands[0].kind == "chunk":
            chunks = {self.row[c.slot]: c.actions_CA for c in commands}
            found = self.vector.step_chunk(chunks, [self.row[c.slot] for c in commands if c.frames])
        else:
            try:
                found, facts = self._reset(commands, slots)
            except MMRLError as error:
                # a mistake of the user, which the next one to try will meet as well
                found = {self.row[c.slot]: error for c in commands}
        share = (time.monotonic() - began) / len(commands)
        for place, command in enumerate(commands):
            slot, result = slots[command.slot], found[self.row[command.slot]]
            started, ended = began + place * share, began + (place + 1) * share
            try:
                if isinstance(result, Exception):
                    raise result
                chunk = result if isinstance(result, ChunkResult) else None
                seen = result.observation if isinstance(result, ChunkResult) else result
                if chunk is None:
                    check_finite(self.spec, "after a reset", proprio=seen.proprio)
                yield slot.published(command, self.spec, seen, chunk, facts, started, ended)
            except Exception as error:
                yield replace(_failed(slot, command, started, error), ended=ended)

    def _reset(
        self, commands: Sequence[Command], slots: Mapping[int, _Slot]
    ) -> tuple[Mapping[int, Any], Facts | None]:
        vector = self.vector
        states: dict[int, InitialState] = {}
        failed: dict[int, Exception] = {}
        for command in commands:
            slot, row = slots[command.slot], self.row[command.slot]
            assert command.state is not None
            try:
                if slot.batch is not self or command.fresh:
                    slot.drop()
                states[row] = command.state
            except Exception as error:
                failed[row] = error
            slot.batch = self
        self._inside |= {c.slot for c in commands}
        failed |= vector.reset(states)
        seen = vector.observe([row for row in states if row not in failed])
        facts = None
        if seen.rows:  # what they are may need an episode
            facts = Facts(vector.action_space, vector.proprio_dim, dict(vector.versions()))
        return {**seen.apart(), **seen.failed, **failed}, facts


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


class _Dispatcher:
    """Who answers a command: the slot's own simulator, or the batch in which it is a row."""

    def __init__(self, slots: Mapping[int, _Slot]) -> None:
        self.slots = slots
        self._batches: dict[str, _Batch] = {}  # by spec.key

    def answers(self, commands: Sequence[Command]) -> Iterator[Answer]:
        """In the order of the commands. Neighbours that one batch can play at once are played at once."""
        for place, run in itertools.groupby(commands, self._place):
            if isinstance(place, tuple):
                yield from place[0].play(list(run), self.slots)
                continue
            for command in run:
                started, slot = time.monotonic(), self.slots[command.slot]
                try:
                    yield slot.answer(command, started)
                except Exception as error:
                    yield _failed(slot, command, started, error)

    def _place(self, command: Command) -> tuple[_Batch, str] | None:
        """The batch of a command and its kind; None where the slot plays for itself."""
        slot, spec = self.slots[command.slot], command.spec
        if command.kind == "chunk":
            return None if slot.batch is None else (slot.batch, command.kind)
        assert spec is not None
        try:
            if not simulator_class(spec.suite).batches(spec.options):
                return None
        except Exception:  # no such suite: the slot's own answer says so
            return None
        if spec.key not in self._batches:
            self._batches[spec.key] = _Batch(spec, sorted(self.slots))
        return self._batches[spec.key], command.kind


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


def _receive(connection: Connection, asked: queue.SimpleQueue[Any]) -> None:
    """Move messages from the pipe into the queue until None comes, or its other end is gone."""
    try:
        while (commands := connection.recv()) is not None:
            asked.put(commands)
    except (EOFError, OSError):
        pass  # the parent is gone: so are we
    asked.put(None)


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
        {number: _Slot(number, fd) for number, fd in plan.areas.items()},
    )
    dispatcher, asked = _Dispatcher(slots), queue.SimpleQueue[Sequence[Command] | None]()
    # commands are taken as they come: the parent, in the midst of a long message, must not wait for us while we wait for it to
    # take our answers
    threading.Thread(target=_receive, args=(connection, asked), daemon=True, name="receive").start()
    # the parent is gone: so are we
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        connection.send(resident_gib())
        while (commands := asked.get()) is not None:
            for answer in dispatcher.answers(commands):
                connection.send(answer)
                loaded()  # the first command has made the first simulator
    for slot in slots.values():
        slot.drop()
    sys.stderr.flush()
    os._exit(0)  # GL drivers like to crash in the destructors of a normal exit
