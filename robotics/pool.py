"""Many simulators in worker processes, driven asynchronously; a worker that dies or hangs costs its episodes, not the run.

    from mmrl.robotics.contract import EnvSpec, initial_states
    with VectorEnv(8, workers=2) as pool:
        pool.reset(0, EnvSpec("tiny", "push", 24), initial_states("train", 1)[0])
        for reply in pool.ready(): print(reply.slot, reply.observation.instruction)
        pool.step(0, np.zeros((4, 2)))

A slot is one episode at a time; its simulator lives in the slot's worker as long as the spec stays the same. States of
a slot: idle -(reset)-> resetting -> waiting -(step)-> stepping -> waiting, or idle again when the episode has ended. An
error makes it broken until its next reset. Every reset that was accepted ends in exactly one of: finished, error, abandoned
(reset again in the middle). Use a pool from one thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import numpy as np

from mmrl.errors import ConfigError
from mmrl.robotics.contract import ChunkResult, EnvSpec, InitialState, Observation
from mmrl.robotics.pool_fleet import WorkerFleet
from mmrl.robotics.pool_process import Pending, WorkerHandle, Workers
from mmrl.robotics.pool_types import (
    EPISODES_PER_RESPAWN,
    ErrorCause,
    PoolError,
    PoolSettings,
    PoolStats,
    Reply,
    SlotState,
)
from mmrl.robotics.worker import Answer, Command, Facts

__all__ = ["VectorEnv", "PoolError", "PoolSettings", "PoolStats", "Reply"]


@dataclass
class _Slot:
    number: int
    state: SlotState = "idle"
    process: WorkerHandle | None = None  # where the running episode is, or the last one was
    spec: EnvSpec | None = None
    made_in: WorkerHandle | None = None  # where its simulator is; None: make a new one
    resets: int = 0  # of that simulator
    group: Hashable = None

    @property
    def running(self) -> bool:
        return self.state in ("resetting", "waiting", "stepping")

    @property
    def spec_key(self) -> str:
        return "" if self.spec is None else self.spec.key


class VectorEnv:
    """`num_slots` slots on `workers` processes, which `starter` starts (null: on this machine). `batched`: the simulators of a
    worker are the rows of a batch (Simulator.batches): what is asked of several `together` is played at once. Raises PoolError when
    a worker does not start."""

    def __init__(
        self,
        num_slots: int,
        workers: int = 2,
        settings: PoolSettings | None = None,
        starter: Workers | None = None,
        batched: bool = False,
    ) -> None:
        if num_slots < 1 or workers < 1:
            raise ConfigError(
                f"pool: expected at least one slot and one worker, found {num_slots} and {workers}"
            )
        self.num_slots, self.workers = num_slots, min(workers, num_slots)
        self.settings = settings or PoolSettings()
        self.facts: dict[str, Facts] = {}  # by spec.key, once one of its simulators has run
        self._counts: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()
        self._busy, self._peak = [0.0] * self.workers, [0.0] * self.workers
        self._replies: list[Reply] = []
        self._began = time.monotonic()
        self._slots = [_Slot(number) for number in range(num_slots)]
        self.batched = batched
        self._held: list[tuple[WorkerHandle, Command]] | None = None
        self.fleet = WorkerFleet(num_slots, self.workers, self.settings, starter, batched)

    # commands

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is asked of several slots in this context reaches a batched worker in one message, at the end of it."""
        if not self.batched or self._held is not None:
            yield
            return
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            # those that one batch plays at once follow each other
            held.sort(key=lambda item: (item[1].kind, self._slots[item[1].slot].spec_key))
            for process in dict.fromkeys(process for process, _ in held):
                process.send([command for owner, command in held if owner is process])

    def _send(self, process: WorkerHandle, command: Command) -> None:
        if self._held is None:
            process.send([command])
        else:
            self._held.append((process, command))

    def reset(self, slot: int, spec: EnvSpec, state: InitialState, group: Hashable = None) -> None:
        """Start an episode in a slot; returns at once. One that still waits for actions there counts as abandoned. Of `group`, the
        episodes that begin alike, PoolSettings.group_respawns says how many lost workers count."""
        place = self._place(slot, ("idle", "waiting", "broken"))
        if place.state == "waiting":
            self._counts["abandoned"] += 1
        process = self.fleet.worker_of(slot)
        # a batch is there for all of its slots
        limit = 0 if self.batched else self.settings.restart_after_resets
        fresh = (
            place.made_in is not process
            or place.spec is None
            or place.spec.key != spec.key
            or 0 < limit <= place.resets
        )
        place.resets = 1 if fresh else place.resets + 1
        place.spec, place.process, place.made_in, place.state = spec, process, process, "resetting"
        place.group = group
        self._counts["episodes"] += 1
        self._counts["simulators"] += fresh
        self.fleet.retire(self._plays)
        size = self.fleet.starter.reserve(slot, len(spec.cameras) * spec.image_size**2 * 3)
        self._send(process, Command("reset", slot, size, spec, state, fresh))

    def step(self, slot: int, actions_CA: Any, frames: bool = False) -> None:
        """Execute a chunk (C, A) in a slot that waits for actions; returns at once. Actions that cannot be executed end the
        episode with an error reply."""
        place = self._place(slot, ("waiting",))
        assert place.spec is not None and place.process is not None
        place.state = "stepping"
        try:
            actions = np.asarray(actions_CA, np.float64)
        except (TypeError, ValueError) as error:
            text = f"expected actions of shape (C, A), found no array of numbers: {error}"
            return self._error(place, "chunk", text, "action", time.monotonic())
        pictures = len(place.spec.cameras) + (len(actions) if frames and actions.ndim == 2 else 0)
        size = self.fleet.starter.reserve(slot, pictures * place.spec.image_size**2 * 3)
        command = Command("chunk", slot, size, actions_CA=actions, frames=frames)
        self._send(place.process, command)

    def ready(self, timeout_s: float | None = None) -> list[Reply]:
        """Replies that have arrived, at most one per slot, waiting up to `timeout_s` for the first (None: without end); empty at
        once when nothing
        is under way. Raises PoolError once the budget of respawns is spent and all replies have been handed out."""
        assert self._held is None, (
            "expected no waiting inside `together`: what is held there would never be answered"
        )
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._pump()
            if self._replies:
                replies, self._replies = self._replies, []
                return replies
            if self.fleet.failure is not None:
                raise self.fleet.failure
            now = time.monotonic()
            busy = [p for p in self.fleet.processes if p.pending]
            if not busy or (deadline is not None and now >= deadline):
                return []
            until = min(
                [limit for p in busy if (limit := self.fleet.deadline(p)) is not None]
                + ([] if deadline is None else [deadline]),
                default=now + 1.0,
            )
            self.fleet.starter.wait(self.fleet.processes, max(0.0, until - now) + 0.001)

    def settle(self) -> None:
        """Give up every running episode: waits for commands under way and drops their replies; all slots can be reset then.
        For a caller that ends early."""
        while any(p.pending for p in self.fleet.processes) and self.fleet.failure is None:
            self.ready(1.0)
        self._replies = []
        for place in self._slots:
            if place.running:
                place.state = "idle"
                self._counts["abandoned"] += 1

    def state(self, slot: int) -> SlotState:
        """idle, resetting, waiting (for actions), stepping or broken."""
        return self._slots[slot].state

    def stats(self) -> PoolStats:
        """Counters now."""
        running = sum(slot.running for slot in self._slots)
        c = self._counts
        return PoolStats(
            c["episodes"],
            c["finished"],
            c["errors"],
            c["abandoned"],
            running,
            dict(self._causes),
            self.fleet.counts["respawns"],
            self.fleet.counts["restarts"],
            c["simulators"],
            c["resets"],
            c["chunks"],
            c["control_steps"],
            tuple(self._busy),
            tuple(self._peak),
            time.monotonic() - self._began,
        )

    def pids(self) -> list[int]:
        """Process ids of the workers, in their order."""
        return [process.pid for process in self.fleet.current]

    def close(self) -> None:
        """End all workers; they get two seconds to close their simulators. May be called more than once."""
        self.fleet.close()

    def __enter__(self) -> VectorEnv:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # workers

    def _place(self, slot: int, allowed: tuple[SlotState, ...]) -> _Slot:
        if self.fleet.failure is not None:
            raise self.fleet.failure
        if not 0 <= slot < self.num_slots:
            raise PoolError(f"expected a slot from 0 to {self.num_slots - 1}, found {slot}")
        place = self._slots[slot]
        if place.state not in allowed:
            fix = (
                "read its reply with ready() first"
                if place.state in ("resetting", "stepping")
                else "reset it first: it has no running episode"
            )
            raise PoolError(
                f"slot {slot}: expected state {' or '.join(allowed)}, found {place.state}; {fix}"
            )
        return place

    def _plays(self, process: WorkerHandle) -> bool:
        return any(slot.process is process and slot.running for slot in self._slots)

    def _pump(self) -> None:
        """Take what has arrived, then look for the dead and the late."""
        for process in list(self.fleet.processes):
            alive = True
            try:
                while alive and process.poll():
                    if process.free_since is None:
                        alive = self.fleet.greet(process)
                    else:
                        answer = process.receive()
                        assert isinstance(answer, Answer), "a hello comes once"
                        self._take(process, answer)
            except (EOFError, ConnectionResetError, OSError):
                alive = False
            limit = self.fleet.deadline(process)
            if not alive:
                how, memory = process.ended()
                self._lost(process, how, "memory" if memory else "crash")
            elif limit is not None and time.monotonic() >= limit:
                self._lost(process, self.fleet.lateness(process), "timeout")
        self.fleet.retire(self._plays)

    def _take(self, process: WorkerHandle, answer: Answer) -> None:
        item = process.pending.popleft()
        process.free_since = answer.ended
        place, command = self._slots[answer.slot], item.command
        assert command.slot == answer.slot and place.process is process, "an answer of another slot"
        self._busy[process.worker] += answer.ended - answer.started
        self._peak[process.worker] = max(self._peak[process.worker], answer.rss_gib)
        self._counts["resets" if command.kind == "reset" else "chunks"] += 1
        process.trim()
        if 0 < self.settings.memory_gib < answer.rss_gib:
            process.retiring = True
        if answer.error is not None:
            if answer.cause != "action":
                place.made_in = None
            cause = self._cause(place, command, answer)
            if cause == "rebuild":
                self.fleet.replace(process, answer.error)
            return self._error(
                place, command.kind, answer.error, cause, answer.started, answer.ended
            )
        self._answered(place, command, answer)

    def _cause(self, place: _Slot, command: Command, answer: Answer) -> ErrorCause:
        """What an error means here: a setup that has worked before is not missing, it failed this time."""
        assert place.spec is not None
        if answer.cause != "setup" and answer.cause != "state":
            return answer.cause
        if place.spec.key not in self.facts:
            return "setup"
        return "rebuild" if answer.cause == "setup" and command.fresh else "exception"

    def _answered(self, place: _Slot, command: Command, answer: Answer) -> None:
        assert place.spec is not None and place.process is not None and answer.proprio is not None
        if answer.facts is not None:
            self.facts[place.spec.key] = answer.facts
        side, cameras = place.spec.image_size, place.spec.cameras
        pictures = place.process.pictures(place.number, len(cameras) + answer.num_frames, side)
        observation = Observation(
            dict(zip(cameras, pictures, strict=False)), answer.proprio, answer.instruction
        )
        reply = Reply(
            place.number,
            command.kind,
            place.process.worker,
            answer.started,
            answer.ended,
            observation,
        )
        place.state = "waiting"
        if command.kind == "chunk":
            assert answer.steps is not None
            chunk = ChunkResult(observation, frames=tuple(pictures[len(cameras) :]), **answer.steps)
            self._counts["control_steps"] += int(chunk.valid_C.sum())
            if chunk.done:
                place.state = "idle"
                self._counts["finished"] += 1
                if self._counts["finished"] % EPISODES_PER_RESPAWN == 0:
                    self.fleet.forgive()
            reply = replace(reply, observation=None, chunk=chunk)
        self._replies.append(reply)

    def _error(
        self,
        place: _Slot,
        kind: Literal["reset", "chunk"],
        text: str,
        cause: ErrorCause,
        started: float,
        ended: float | None = None,
    ) -> None:
        place.state = "broken"
        self._counts["errors"] += 1
        self._causes[cause] += 1
        now = time.monotonic() if ended is None else ended
        # not handed out, and out of date now
        self._replies = [reply for reply in self._replies if reply.slot != place.number]
        self._replies.append(
            Reply(
                place.number,
                kind,
                self.fleet.number_of(place.number),
                min(started, now),
                now,
                error=text,
                cause=cause,
            )
        )

    def _lost(self, process: WorkerHandle, how: str, cause: ErrorCause) -> None:
        """A worker is gone: its episodes end with errors, resets it had not begun go to its successor. Of chunks that a batch
        executed together nobody knows which it was: none is blamed, and the budget of respawns is what bounds it."""
        now, began = time.monotonic(), process.free_since is not None
        since, pending = process.head_since() or now, list(process.pending)
        process.pending.clear()
        self.fleet.bury(process)
        worker, blamed = process.worker, pending[0] if pending and began else None
        under = f"slot {blamed.command.slot}" if blamed else "no command under way"
        if blamed is not None:
            self._busy[worker] += now - since
            if blamed.command.kind == "chunk" and blamed.together > 1:
                under = f"a batch of {blamed.together} under way"
                blamed, cause = None, "neighbour"
        kept = [item for item in pending if item.command.kind == "reset" and item is not blamed]
        if blamed is not None:
            self._error(self._slots[blamed.command.slot], blamed.command.kind, how, cause, since)
        resent = {item.command.slot for item in kept}
        for place in self._slots:
            if place.process is process and place.running and place.number not in resent:
                text = f"lost with its worker ({under}): {how}"
                self._error(place, "chunk", text, "neighbour" if blamed else cause, now)
        group = None if blamed is None else self._slots[blamed.command.slot].group
        successor = self.fleet.succeed(process, how, group)
        for item in kept:
            self._send_again(item, successor, how)

    def _send_again(self, item: Pending, process: WorkerHandle, how: str) -> None:
        place = self._slots[item.command.slot]
        if self.fleet.failure is not None:
            return self._error(
                place, "reset", f"lost with its worker: {how}", "neighbour", time.monotonic()
            )
        place.process = place.made_in = process
        place.resets = 1
        process.send([replace(item.command, fresh=True)])
