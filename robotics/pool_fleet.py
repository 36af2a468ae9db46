"""The worker processes of a VectorEnv: started and greeted, found late, replaced within a budget, ended.

    fleet = WorkerFleet(num_slots=8, workers=2, settings=PoolSettings())
    process = fleet.worker_of(slot)            # takes the slot's next episode
    fleet.retire(running=lambda process: ...)  # ends replaced ones without episodes
    fleet.close()

What the slots do, and what a lost worker costs them, is mmrl.robotics.pool's to say.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable

from mmrl.errors import ConfigError
from mmrl.robotics.pool_process import LocalWorkers, WorkerHandle, Workers
from mmrl.robotics.pool_types import EPISODES_PER_RESPAWN, PoolError, PoolSettings

__all__ = ["WorkerFleet"]

_HARD_MEMORY = 1.5  # times memory_gib: an episode that gets there is ended


def _close_all(processes: list[WorkerHandle], starter: Workers, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the process that owns them
        return
    for process in processes:
        process.close()
    starter.close()


class WorkerFleet:
    """`workers` processes that `starter` starts (None: on this machine); slot i belongs to worker i modulo their number, or with
    `neighbours` each worker has slots that follow each other.

    `processes` are all that may still run, `current` the one of each worker that takes new episodes. `failure` is set once more
    workers were lost than settings.respawns, and when the fleet is closed. Raises PoolError when a worker does not start.
    """

    def __init__(
        self,
        num_slots: int,
        workers: int,
        settings: PoolSettings,
        starter: Workers | None = None,
        neighbours: bool = False,
    ) -> None:
        self.num_slots, self.workers, self.settings = num_slots, workers, settings
        self._numbers = [
            # the blocks of mmrl.rollout.stages: with as many stages as workers they are the same slots
            -(-(slot + 1) * workers // num_slots) - 1 if neighbours else slot % workers
            for slot in range(num_slots)
        ]
        self.counts: Counter[str] = Counter()  # respawns, restarts
        self._spent = 0  # of the budget of respawns
        self._lost_by: Counter[Hashable] = Counter()  # by group
        self.failure: PoolError | None = None
        self.starter = LocalWorkers(num_slots) if starter is None else starter
        self.processes: list[WorkerHandle] = []
        self._closer = weakref.finalize(self, _close_all, self.processes, self.starter, os.getpid())
        try:
            self.current = [self._spawn(worker) for worker in range(workers)]
            self._handshake()
        except BaseException:
            self._closer()
            raise

    def number_of(self, slot: int) -> int:
        """The worker of a slot."""
        return self._numbers[slot]

    def worker_of(self, slot: int) -> WorkerHandle:
        """What takes the slot's next episode: a new process where the current one is to be retired."""
        worker = self.number_of(slot)
        if self.current[worker].retiring:
            self.current[worker] = self._spawn(worker)
            self.counts["restarts"] += 1
        return self.current[worker]

    def _spawn(self, worker: int) -> WorkerHandle:
        process = self.starter.start(
            worker,
            [slot for slot in range(self.num_slots) if self.number_of(slot) == worker],
            hard_gib=_HARD_MEMORY * self.settings.memory_gib,
            environment=self.settings.environment,
        )
        self.processes.append(process)
        return process

    def _handshake(self) -> None:
        while waiting := [p for p in self.processes if p.free_since is None]:
            for process in waiting:
                left = process.started + self.settings.handshake_s - time.monotonic()
                if left <= 0:
                    raise PoolError(
                        f"expected worker {process.worker} to start within {self.settings.handshake_s:g} s, found it "
                        f"silent:\n{process.stack()}"
                    )
                if process.poll(left) and not self.greet(process):
                    raise PoolError(
                        f"expected worker {process.worker} to start, found that {process.ended()[0]}"
                    )

    def greet(self, process: WorkerHandle) -> bool:
        """Take a worker's hello; False where it has ended instead. Raises ConfigError for a memory_gib that it exceeds already."""
        try:
            used = process.receive()
        except (EOFError, ConnectionResetError):
            return False
        assert isinstance(used, float), "a hello comes first"
        process.free_since = time.monotonic()
        if 0 < self.settings.memory_gib <= used:
            raise ConfigError(
                f"pool: expected memory_gib above the {used:.2f} GiB of a worker without simulators, found "
                f"{self.settings.memory_gib:g}"
            )
        return True

    def deadline(self, process: WorkerHandle) -> float | None:
        """When it is late (time.monotonic()); None when it owes nothing."""
        if process.free_since is None:
            return process.started + self.settings.handshake_s
        since = process.head_since()
        if since is None:
            return None
        head = process.pending[0].command
        if head.kind == "chunk":
            return since + self.settings.step_s
        return since + self.settings.reset_s + (self.settings.handshake_s if head.fresh else 0.0)

    def lateness(self, process: WorkerHandle) -> str:
        """What a worker that is late was asked, and where it was."""
        what = "handshake" if process.free_since is None else process.pending[0].command.kind
        limit = self.deadline(process)
        assert limit is not None
        seconds = limit - (process.head_since() or process.started)
        return f"no answer to a {what} within {seconds:g} s, worker ended; where it was:\n{process.stack()}"

    def replace(self, process: WorkerHandle, how: str) -> None:
        """A worker that cannot build what was built before takes no new episodes; its running ones end in it. A driver that
        failed once may fail in that process for good, so another one tries."""
        if process.retiring:
            return
        process.retiring = True
        if self._may_respawn(f"a simulator that had run before could not be built again: {how}"):
            self.current[process.worker] = self._spawn(process.worker)

    def bury(self, process: WorkerHandle) -> None:
        """Close a lost process and forget it."""
        process.close()
        self.processes.remove(process)

    def succeed(self, process: WorkerHandle, how: str, group: Hashable = None) -> WorkerHandle:
        """The current process of a lost one's worker: a new one where the budget allows it, else `failure` is set. `group`: whose
        episode it was lost by, where one is to blame."""
        if self._may_respawn(how, group) and self.current[process.worker] is process:
            self.current[process.worker] = self._spawn(process.worker)
        return self.current[process.worker]

    def _may_respawn(self, how: str, group: Hashable = None) -> bool:
        """Take one from the budget of respawns; False once it is spent, and then the fleet has failed."""
        self.counts["respawns"] += 1
        if group is not None:
            # a state that kills its simulator does so for all of its group
            self._lost_by[group] += 1
            if self._lost_by[group] > self.settings.group_respawns:
                return True
        self._spent += 1
        if self._spent <= self.settings.respawns:
            return True
        self.failure = PoolError(
            f"expected at most {self.settings.respawns} workers to die or hang, found one more (each {EPISODES_PER_RESPAWN} "
            "episodes that finish make up for one); raise env.respawns if simulators are known to be unstable. The last: "
            f"{how}"
        )
        return False

    def forgive(self) -> None:
        """Give one back to the budget of respawns."""
        self._spent = max(0, self._spent - 1)

    def retire(self, running: Callable[[WorkerHandle], bool]) -> None:
        """End replaced workers in which no episode is running."""
        for process in list(self.processes):
            replaced = process.retiring and self.current[process.worker] is not process
            if replaced and not running(process):
                self.processes.remove(process)
                process.close()

    def close(self) -> None:
        """End all workers; they get two seconds to close their simulators. May be called more than once."""
        for process in self.processes:
            process.ask_to_end()
        deadline = time.monotonic() + 2.0
        for process in self.processes:
            process.close(0.0 if process.pending else max(0.0, deadline - time.monotonic()))
        self._closer()
        self.processes.clear()
        self.failure = self.failure or PoolError("expected an open pool, found a closed one")
