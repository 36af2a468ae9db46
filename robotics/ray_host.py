"""The Ray actor that holds one simulator worker on its node and relays what it is asked and what it answers.

    host = cluster.start("simulators", 0, SimulatorHost, 0, code_paths())
    hello = ray.get(host.hello.remote(0, (0, 2), 0.0, {}))

The simulators themselves run in a process of their own, started as on a trainer's machine (mmrl.robotics.pool_process) when `hello`
is called: whatever crashes, hangs or fills memory there is told in the same words, with its Python stack and the end of its
stderr, and the actor outlives it. Without torch, as the worker itself.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.robotics.contract import EnvSpec
from mmrl.robotics.pool_process import WorkerProcess, memory_fd
from mmrl.robotics.worker import Answer, Area, Command

__all__ = ["Answered", "Ended", "Hello", "SimulatorHost", "boot_id"]


@dataclass(frozen=True)
class Hello:
    """The worker runs: Ray's id of its node, its memory (GiB), process id and the actor's, the boot of their machine, and its
    clock now."""

    node: str
    used_gib: float
    pid: int
    host_pid: int
    boot: str
    now: float


@dataclass(frozen=True)
class Answered:
    """An answer with the pictures that lie in shared memory locally: (K, side, side, 3) uint8, which Ray puts into its object
    store."""

    answer: Answer
    pictures: np.ndarray


@dataclass(frozen=True)
class Ended:
    """The worker process has ended: how, and whether memory was the reason."""

    how: str
    memory: bool


def boot_id() -> str:
    """Equal for processes that share a clock (time.monotonic()); '' where it cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _import_path(code: Sequence[str]) -> list[str]:
    """What the worker imports from: the driver's folders first, then this node's environment, without what Ray adds for itself."""
    return list(dict.fromkeys([*code, *(p for p in sys.path if f"{os.sep}ray{os.sep}" not in p)]))


class _Relay:
    """One worker process, and the thread that asks it one thing after the other."""

    def __init__(
        self,
        worker: int,
        slots: Sequence[int],
        hard_gib: float,
        environment: Mapping[str, str],
        path: Sequence[str],
    ) -> None:
        areas = {slot: Area(memory_fd()) for slot in slots}
        self.process = WorkerProcess(
            worker, areas, hard_gib=hard_gib, environment=environment, path=path
        )
        self.thread = ThreadPoolExecutor(1, "relay")
        self._specs: dict[int, EnvSpec] = {}

    def hello(self) -> Hello | Ended:
        try:
            used = self.process.receive()
        except (EOFError, OSError):
            return Ended(*self.process.ended())
        assert isinstance(used, float)
        return Hello(_node_id(), used, self.process.pid, os.getpid(), boot_id(), time.monotonic())

    def answer(self, commands: Sequence[Command]) -> list[Answered | Ended]:
        process = self.process
        for command in commands:
            if command.spec is not None:
                self._specs[command.slot] = command.spec
        process.post(
            [replace(c, area_bytes=process.areas[c.slot].grow(c.area_bytes)) for c in commands]
        )
        found: list[Answered | Ended] = []
        for command in commands:
            try:
                answer = process.receive()
            except (EOFError, OSError):
                found.append(Ended(*process.ended()))  # after those that were answered
                return found
            assert isinstance(answer, Answer)
            spec = self._specs[command.slot]
            side = spec.image_size
            count = 0 if answer.error is not None else len(spec.cameras) + answer.num_frames
            pictures = process.pictures(command.slot, count, side)
            stacked = np.stack(pictures) if pictures else np.zeros((0, side, side, 3), np.uint8)
            found.append(Answered(answer, stacked))
        process.trim()
        return found

    def end(self, patience_s: float) -> None:
        if patience_s > 0:
            self.process.ask_to_end()
            self.process.program.wait(patience_s)
        self.process.program.stop()
        self.thread.shutdown(wait=True)  # who waits for an answer meets the end of the pipe
        self.process.close()
        for area in self.process.areas.values():
            area.close()
            os.close(area.fd)


class SimulatorHost:
    """Holds worker number `worker` of a pool. Its processes are numbered too (`run`): one may still finish its episodes beside its
    successor. Calls overlap, and Ray may begin them in any order: what is asked of a process is numbered, hello is 0, and done in
    that order. `code`: folders to import from."""

    def __init__(self, worker: int, code: Sequence[str]) -> None:
        self._worker, self._path = worker, _import_path(code)
        self._relays: dict[int, _Relay] = {}
        self._ended: set[int] = set()
        self._next: Counter[int] = Counter()
        self._turns = asyncio.Condition()
        self._control = ThreadPoolExecutor(2, "control")

    async def hello(
        self, run: int, slots: Sequence[int], hard_gib: float, environment: Mapping[str, str]
    ) -> Hello | Ended:
        """Start process `run` and wait for its first words."""
        if run in self._ended:
            return Ended("ended before it was started", False)
        self._relays[run] = _Relay(self._worker, slots, hard_gib, environment, self._path)
        return await self._in_turn(run, 0, _Relay.hello)

    async def answer(
        self, run: int, number: int, commands: Sequence[Command]
    ) -> list[Answered | Ended]:
        """What process `run` answers to its message `number` (from 1), which waits for those before it."""
        return await self._in_turn(run, number, _Relay.answer, commands)

    async def _in_turn(
        self, run: int, number: int, method: Callable[..., Any], *arguments: Any
    ) -> Any:
        async with self._turns:
            await self._turns.wait_for(lambda: self._next[run] == number)
            relay = self._relays[run]
            waiting = self._on(relay.thread, method, relay, *arguments)
            self._next[run] += 1
            self._turns.notify_all()
        return await waiting

    async def stack(self, run: int) -> str:
        """What process `run` is doing."""
        return str(await self._on(self._control, self._relays[run].process.stack))

    async def end(self, run: int, patience_s: float) -> None:
        """End process `run`: let it close its simulators for so long, then by force."""
        self._ended.add(run)
        if (relay := self._relays.pop(run, None)) is not None:
            await self._on(self._control, relay.end, patience_s)

    @staticmethod
    def _on(
        thread: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(thread, function, *arguments)
