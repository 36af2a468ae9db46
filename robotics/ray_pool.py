"""Simulator workers of a VectorEnv on the nodes of a Ray cluster (engine.workers ray).

    with Cluster(config.engine.ray, [Demand("simulators", 2, 1.0)]) as cluster, VectorEnv(8, 2, starter=RayWorkers(cluster)) as p:
        ...

The pool's own rules stay: deadlines, the budget of respawns, what a loss costs. Here is only how a worker is reached: an actor
(mmrl.robotics.ray_host) holds its process on some node; commands are calls to it, pictures come through Ray's object store and are
copied and freed when they are read. A process that dies is started again in its actor; a lost actor or node is a lost worker to
the pool (cause crash), and another actor takes its place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mmrl.distributed.cluster.session import Cluster, code_paths, ending, stop_if_broken
from mmrl.robotics.pool_process import WorkerHandle, Workers
from mmrl.robotics.ray_host import Answered, Ended, Hello, SimulatorHost, boot_id
from mmrl.robotics.worker import Answer, Command

__all__ = ["RayWorker", "RayWorkers"]

_STACK_S = 5.0
_END_S = 2.0  # for an actor to end one of its processes by force
# how often a worker that does not come up looks whether there still is a node for it
_CHECK_S = 1.0


class _Host:
    """The actor of worker number `worker`: `lost` once it is gone or silent; `runs` processes were started in it."""

    def __init__(self, cluster: Cluster, worker: int) -> None:
        self.actor = cluster.start("simulators", worker, SimulatorHost, worker, code_paths())
        self.lost, self.runs = False, 0


class RayWorker(WorkerHandle):
    """One worker process through the actor that holds it."""

    def __init__(
        self,
        cluster: Cluster,
        host: _Host,
        worker: int,
        slots: Sequence[int],
        hard_gib: float,
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(worker)
        self._cluster, self._ray, self.host = cluster, cluster.ray, host
        self._run, host.runs = host.runs, host.runs + 1
        self._refs: deque[Any] = deque(
            [host.actor.hello.remote(self._run, tuple(slots), hard_gib, dict(environment))]
        )
        self._came: deque[Answered | Ended] = (
            deque()
        )  # of a message answered whole, not yet handed out
        self._number, self._checked = 0, time.monotonic()
        self._clock: float | None = None  # what to add to the worker's clock
        self._same_clock = False
        self._pictures: np.ndarray | None = None
        self._ended: tuple[str, bool] | None = None
        self._leaving: Any = None
        self.hello: Hello | None = None

    @property
    def pid(self) -> int:
        """Of the worker process on its node; 0 before it has said hello."""
        return self.hello.pid if self.hello is not None else 0

    @property
    def head(self) -> Any:
        """The call that comes back next, or None."""
        return self._refs[0] if self._refs else None

    def post(self, commands: Sequence[Command]) -> None:
        """See WorkerHandle.post."""
        self._number += 1
        self._refs.append(self.host.actor.answer.remote(self._run, self._number, commands))

    def poll(self, timeout_s: float = 0.0) -> bool:
        """See WorkerHandle.poll. Raises ClusterError when it cannot come up: no node is left for it."""
        if self._came:
            return True
        if not self._refs:
            return False
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            if self._ray.wait([self._refs[0]], timeout=min(left, _CHECK_S))[0]:
                return True
            self.check()
            if time.monotonic() >= deadline:
                return False

    def check(self) -> None:
        """Raise ClusterError when it has not come up and no node is left where it may."""
        now = time.monotonic()
        if self.hello is None and now > self._checked + _CHECK_S:
            self._checked = now
            self._cluster.check("simulators")

    def receive(self) -> float | Answer:
        """See WorkerHandle.receive. Raises ClusterError when its actor cannot start."""
        if self._came:
            return self._answer(self._came.popleft())
        try:
            found = self._ray.get(self._refs.popleft())
        except self._ray.exceptions.RayError as error:  # the actor or its node is gone
            stop_if_broken(error, self._cluster.demands["simulators"].words)
            where = (
                f" (process {self.hello.host_pid} on node {self.hello.node[:8]})"
                if self.hello is not None
                else ""
            )
            self._ended = f"the Ray actor of the worker{where} ended: {ending(error)}", False
            self.host.lost = True
            raise EOFError from error
        if isinstance(found, Ended):
            found = [found]
        if isinstance(found, Hello):
            self.hello, self._same_clock = found, bool(found.boot) and found.boot == boot_id()
            self._tick(found.now)
            return found.used_gib
        self._came.extend(found)
        if isinstance(found[-1], Answered):
            self._tick(found[-1].answer.ended)  # it has just arrived
        return self._answer(self._came.popleft())

    def _answer(self, found: Answered | Ended) -> Answer:
        if isinstance(found, Ended):
            self._ended = found.how, found.memory
            raise EOFError
        self._pictures, shift = found.pictures, self._clock
        assert shift is not None, "a hello comes first"
        return replace(
            found.answer, started=found.answer.started + shift, ended=found.answer.ended + shift
        )

    def _tick(self, theirs: float) -> float:
        """What to add to the worker's clock to get ours, given its time of something that has just arrived: the smallest
        difference seen, which contains the shortest way here."""
        shift = 0.0 if self._same_clock else time.monotonic() - theirs
        self._clock = shift if self._clock is None else min(self._clock, shift)
        return self._clock

    def pictures(self, slot: int, count: int, side: int) -> list[np.ndarray]:
        """See WorkerHandle.pictures."""
        assert self._pictures is not None and self._pictures.shape == (count, side, side, 3)
        # what Ray gives lies in its store as long as anybody looks at it
        copies = [picture.copy() for picture in self._pictures]
        self._pictures = None
        return copies

    def stack(self) -> str:
        """See WorkerHandle.stack."""
        if self.hello is None:
            nodes = ", ".join(map(str, self._cluster.nodes()))
            return f"its actor has not started the worker yet; nodes alive: {nodes}"
        try:
            return str(self._ray.get(self.host.actor.stack.remote(self._run), timeout=_STACK_S))
        except self._ray.exceptions.RayError as error:  # GetTimeoutError among them
            self.host.lost = True
            return f"no stack: its actor does not answer ({type(error).__name__})"

    def ended(self) -> tuple[str, bool]:
        """See WorkerHandle.ended."""
        return self._ended or ("the Ray actor of the worker ended", False)

    def ask_to_end(self) -> None:
        """See WorkerHandle.ask_to_end."""
        self._end(2.0)

    def close(self, patience_s: float = 0.0) -> None:
        """See WorkerHandle.close. The actor stays for a successor."""
        if self.closed:
            return
        self.closed = True
        self._end(0.0)
        if self._leaving is not None:
            self._ray.wait([self._leaving], timeout=max(patience_s, _END_S))
        self._refs.clear()
        self._came.clear()
        self._pictures = self._leaving = None

    def _end(self, patience_s: float) -> None:
        if self._leaving is None and self._cluster.open and not self.host.lost:
            self._leaving = self.host.actor.end.remote(self._run, patience_s)


class RayWorkers(Workers):
    """Starts workers in the places that `cluster` has reserved for simulators."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._hosts: dict[int, _Host] = {}

    def start(
        self, worker: int, slots: Sequence[int], *, hard_gib: float, environment: Mapping[str, str]
    ) -> RayWorker:
        """See Workers.start. In the worker's actor, or in a new one where it was lost. Raises ClusterError when no node is left."""
        host = self._hosts.get(worker)
        if host is not None and host.lost:
            self.cluster.end(host.actor)
            self.cluster.restarts["simulators"] += 1
            host = None
        if host is None:
            host = self._hosts[worker] = _Host(self.cluster, worker)
        return RayWorker(self.cluster, host, worker, slots, hard_gib, environment)

    def reserve(self, slot: int, size: int) -> int:
        """See Workers.reserve: the actor makes the room."""
        return size

    def wait(self, handles: Sequence[RayWorker], timeout_s: float) -> None:
        """See Workers.wait; also returns when one of them should be looked at."""
        heads = [handle.head for handle in handles if handle.head is not None]
        if heads:
            self.cluster.ray.wait(heads, num_returns=1, timeout=min(timeout_s, _CHECK_S))
        else:
            time.sleep(min(timeout_s, _CHECK_S))

    def close(self) -> None:
        """See Workers.close: ends the actors."""
        while self._hosts:
            self.cluster.end(self._hosts.popitem()[1].actor)
