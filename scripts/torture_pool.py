"""Simulators in eight slots on two workers are killed, hang, raise and leak while episodes are played; none may be lost.

    OMP_NUM_THREADS=1 python -m scripts.torture_pool --seconds 60 --record

Episodes are requested until the time is up, each for a state, a task and an attempt; about one in four has a fault inside the
simulator (tests/robotics/faulty.py), a few get NaN actions or a task that does not exist, and workers are killed from outside
at random moments. A failed episode is asked for again until it succeeds or has failed four times. At the end: every request
is a finished episode or a recorded error, the pool's counters agree with the caller's, every finished episode is played again
without a pool and compared bit for bit, and no process, descriptor or shared memory is left. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import psutil

from mmrl.robotics.contract import (
    ChunkResult,
    EnvSpec,
    InitialState,
    Observation,
    initial_states,
    make_simulator,
    run_chunk,
)
from mmrl.robotics.pool import PoolSettings, Reply, VectorEnv
from scripts._bench import parse, write_results
from scripts._torture_runs import held_elsewhere, shared_memory

__all__ = ["Request", "torture"]

_FAULTY = "tests.robotics.faulty:FaultySimulator"
_FAULTS = (
    "kill",
    "exit",
    "hang",
    "memory",
    "kill_reset",
    "hang_reset",
    *("raise", "raise_reset", "bad_picture") * 2,
    *("leak",) * 6,
)
_SPECS = (
    ("push", 32, ("base",)),
    ("reach", 64, ("base", "wrist")),
    ("pick", 32, ("wrist", "base")),
    ("push", 64, ("base",)),
)
_SAME = 40  # requests of one spec in a row, so that simulators are also used again
_ATTEMPTS = 4
_LIMITS = PoolSettings(
    handshake_s=15.0,
    reset_s=3.0,
    step_s=3.0,
    respawns=100_000,
    restart_after_resets=4,
    memory_gib=0.15,
)


@dataclass
class Request:
    """An episode asked for, once per attempt."""

    spec: EnvSpec
    state: InitialState
    attempt: int
    bad_actions: bool
    frames: bool
    decisions: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


def _draw(rng: random.Random, number: int, chaos: float) -> Request:
    """Request `number`: tasks, pictures and cameras change every _SAME requests; a few name a task that does not exist."""
    task, size, cameras = _SPECS[number // _SAME % len(_SPECS)]
    options = {"chaos": chaos, "faults": _FAULTS, "at": 3, "leak_mib": 48}
    spec = EnvSpec(_FAULTY, "nowhere" if number % 25 == 9 else task, 16, size, cameras, options)
    return Request(
        spec,
        replace(initial_states("train", 1, number)[0], row=0),
        0,
        number % 20 == 3,
        rng.random() < 0.3,
    )


def _actions(request: Request) -> np.ndarray:
    """The chunk of the request's next decision, the same in the pool and in the replay."""
    rng = np.random.default_rng([request.state.seed, request.decisions])
    return rng.uniform(-1, 1, (int(rng.integers(1, 7)), 3 if request.spec.task == "pick" else 2))


def _add(digest: Any, seen: Observation | ChunkResult) -> None:
    """Every number of a result into the digest."""
    if isinstance(seen, ChunkResult):
        for array in (
            seen.rewards_C,
            seen.terminated_C,
            seen.truncated_C,
            seen.success_C,
            seen.valid_C,
            *seen.frames,
        ):
            digest.update(array.tobytes())
        seen = seen.observation
    for camera, picture in seen.images.items():
        digest.update(camera.encode() + picture.tobytes())
    digest.update(seen.proprio.tobytes() + seen.instruction.encode())


def _replay(request: Request) -> str:
    """The digest of the same episode on a simulator without faults, in this process."""
    spec = replace(request.spec, suite="tiny", options={})
    again, simulator = Request(spec, request.state, 0, False, request.frames), make_simulator(spec)
    simulator.reset(request.state)
    _add(again.digest, simulator.observe())
    done = False
    while not done:
        chunk = run_chunk(simulator, _actions(again), frames=again.frames)
        again.decisions += 1
        _add(again.digest, chunk)
        done = chunk.done
    return str(again.digest.hexdigest())


class _Torture:
    """The caller's side of the books."""

    def __init__(self, pool: VectorEnv, seed: int, chaos: float) -> None:
        self.pool, self.rng, self.chaos = pool, random.Random(seed), chaos
        self.open: dict[int, Request] = {}
        self.finished: list[Request] = []
        self.again: list[Request] = []
        self.asked = self.number = self.given_up = self.outside = 0
        self.errors: Counter[str] = Counter()

    def fill(self) -> None:
        """Ask for an episode in every free slot; failed ones first."""
        for slot in range(self.pool.num_slots):
            if slot not in self.open:
                if not self.again:
                    self.again.append(_draw(self.rng, self.number, self.chaos))
                    self.number += 1
                self.open[slot] = request = self.again.pop()
                self.asked += 1
                self.pool.reset(slot, request.spec, request.state)

    def take(self, reply: Reply) -> None:
        """Go on with the episode of a reply."""
        request = self.open[reply.slot]
        if reply.error is not None:
            self.errors[reply.cause] += 1
            del self.open[reply.slot]
            if request.attempt + 1 == _ATTEMPTS or reply.cause in ("setup", "action"):
                self.given_up += 1
                return
            self.again.append(
                Request(
                    request.spec,
                    replace(request.state, row=request.attempt + 1),
                    request.attempt + 1,
                    False,
                    request.frames,
                )
            )
            return
        seen = reply.chunk or reply.observation
        assert seen is not None
        _add(request.digest, seen)
        if reply.chunk is not None and reply.chunk.done:
            self.finished.append(self.open.pop(reply.slot))
            return
        actions = _actions(request)
        if request.bad_actions and request.decisions:
            actions[-1, -1] = np.nan
        request.decisions += 1
        self.pool.step(reply.slot, actions, frames=request.frames)

    def kill_one(self) -> None:
        """SIGKILL a worker from outside."""
        try:
            os.kill(self.rng.choice(self.pool.pids()), signal.SIGKILL)
            self.outside += 1
        except ProcessLookupError:
            return  # it has just died by itself

    def run(self, seconds: float) -> None:
        """Play until the time is up and the last episode has ended."""
        end, next_kill = time.monotonic() + seconds, time.monotonic() + self.rng.expovariate(1 / 8)
        while True:
            if time.monotonic() < end:
                self.fill()
                if time.monotonic() > next_kill:
                    self.kill_one()
                    next_kill = time.monotonic() + self.rng.expovariate(1 / 8)
            if not self.open:
                return
            replies = self.pool.ready(0.5)
            self.rng.shuffle(replies)
            for reply in replies:
                self.take(reply)


def _left(descriptors: int, shared: set[str], pids: set[int]) -> list[str]:
    """What is still there after close()."""
    found = [f"process {pid}" for pid in pids if psutil.pid_exists(pid)]
    found += [f"/dev/shm/{name}" for name in shared_memory() - shared if not held_elsewhere(name)]
    now = len(os.listdir("/proc/self/fd"))
    return found + ([f"{now - descriptors} descriptors"] if now > descriptors else [])


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def torture(
    seconds: float, seed: int = 0, slots: int = 8, workers: int = 2, chaos: float = 0.25
) -> dict[str, Any]:
    """One torture; the record that --record writes. `passed` is False when anything does not add up."""
    descriptors, shared, others = len(os.listdir("/proc/self/fd")), shared_memory(), _children()
    began = time.monotonic()
    with VectorEnv(slots, workers, _LIMITS) as pool:
        player = _Torture(pool, seed, chaos)
        player.run(seconds)
        stats, pids = pool.stats(), _children() - others
    wrong = sum(_replay(request) != request.digest.hexdigest() for request in player.finished)
    errors = sum(player.errors.values())
    checks = {
        "requested_is_finished_and_errors": player.asked == len(player.finished) + errors,
        "every_state_finished_or_given_up": player.number
        == len(player.finished) + player.given_up + len(player.again),
        "counters_agree": (
            stats.episodes,
            stats.finished,
            stats.errors,
            stats.abandoned,
            stats.running,
        )
        == (player.asked, len(player.finished), errors, 0, 0),
        "causes_agree": dict(stats.error_causes) == dict(player.errors),
        "all_kinds_of_errors_seen": {
            "crash",
            "timeout",
            "exception",
            "neighbour",
            "action",
            "setup",
        }
        <= set(player.errors),
        "workers_replaced_for_memory": stats.restarts > 0,
        "replays_equal": wrong == 0 and len(player.finished) > 0,
    }
    left = _left(descriptors, shared, pids)
    checks["nothing_left_behind"] = not left
    return {
        "what": f"{slots} slots on {workers} workers under kills, hangs, exceptions, leaks, NaN actions and missing tasks; "
        "finished episodes are replayed without the pool and compared bit for bit",
        "seconds": round(time.monotonic() - began, 1),
        "seed": seed,
        "requested": player.asked,
        "states": player.number,
        "finished": len(player.finished),
        "errors": dict(sorted(player.errors.items())),
        "given_up": player.given_up,
        "asked_again_too_late": len(player.again),
        "replays_wrong": wrong,
        "killed_from_outside": player.outside,
        "respawns": stats.respawns,
        "restarts_for_memory": stats.restarts,
        "simulators_made": stats.simulators,
        "control_steps": stats.control_steps,
        "peak_rss_gib": [round(x, 3) for x in stats.peak_rss_gib],
        "left_behind": left,
        "checks": checks,
        "passed": all(checks.values()),
    }


def main() -> int:
    """Command line; exit status 1 when something was lost, wrong or left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="time in which new episodes are asked for"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of requests and kills")
    parser.add_argument(
        "--record", action="store_true", help="write assets/results/torture_pool.json"
    )
    args = parse(parser)
    record = torture(args.seconds, args.seed)
    for name, value in record.items():
        print(f"{name:28} {value}")
    if args.record:
        print(write_results("torture_pool", record, "numpy"))
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
