"""What the tests of the pool share: faulty environments, episodes played on it and without it, what is left behind."""

from __future__ import annotations

import time
from pathlib import Path
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
from mmrl.robotics.pool import Reply, VectorEnv

REPO = Path(__file__).resolve().parents[2]
FAULTY = "tests.robotics.faulty:FaultySimulator"
PUSH = EnvSpec("tiny", "push", 12, 32)
STATES = initial_states("train", 20)


def faulty(fault: str, **options: Any) -> EnvSpec:
    return EnvSpec(FAULTY, "push", 12, 32, options={"fault": fault, **options})


def actions_of(state: InitialState, decision: int, chunk: int = 4, dim: int = 2) -> np.ndarray:
    return np.random.default_rng([state.seed, decision]).uniform(-1, 1, (chunk, dim))


def one(pool: VectorEnv, timeout_s: float = 120.0) -> Reply:
    """The one reply that is due."""
    replies = pool.ready(timeout_s)
    assert len(replies) == 1
    return replies[0]


def same(a: ChunkResult, b: ChunkResult) -> bool:
    arrays = ("rewards_C", "terminated_C", "truncated_C", "success_C", "valid_C")
    return (
        all(
            np.array_equal(getattr(a, n), getattr(b, n))
            and getattr(a, n).dtype == getattr(b, n).dtype
            for n in arrays
        )
        and seen(a.observation, b.observation)
        and len(a.frames) == len(b.frames)
        and all(np.array_equal(x, y) for x, y in zip(a.frames, b.frames, strict=True))
    )


def seen(a: Observation, b: Observation) -> bool:
    return (
        list(a.images) == list(b.images)
        and all(np.array_equal(a.images[c], b.images[c]) for c in a.images)
        and a.images[next(iter(a.images))].dtype == np.uint8
        and np.array_equal(a.proprio, b.proprio)
        and a.proprio.dtype == b.proprio.dtype
        and a.instruction == b.instruction
    )


Played = tuple[list[Observation | ChunkResult], str | None]


def play(
    pool: VectorEnv,
    jobs: dict[int, tuple[EnvSpec, InitialState]],
    frames: bool = False,
    in_step: bool = False,
) -> dict[int, Played]:
    """One episode per slot, all at once: what came back, and the error. `in_step`: all go on when all have answered, as a stage
    of a Driver does, so that those of a worker are one batch."""
    found: dict[int, Played] = {slot: ([], None) for slot in jobs}
    with pool.together():
        for slot, (spec, state) in jobs.items():
            pool.reset(slot, spec, state)
    open_slots = set(jobs)
    while open_slots:
        replies = pool.ready(120.0)
        while in_step and len(replies) < len(open_slots):
            replies += pool.ready(120.0)
        with pool.together():
            for reply in replies:
                rows = found[reply.slot][0]
                if reply.error is not None:
                    found[reply.slot] = rows, reply.error
                    open_slots.discard(reply.slot)
                    continue
                rows.append(reply.observation if reply.observation is not None else reply.chunk)  # type: ignore[arg-type]
                if reply.chunk is not None and reply.chunk.done:
                    open_slots.discard(reply.slot)
                else:
                    spec, state = jobs[reply.slot]
                    actions = actions_of(state, len(rows), dim=_dim(spec))
                    pool.step(reply.slot, actions, frames=frames)
    return found


def _dim(spec: EnvSpec) -> int:
    return 3 if spec.task == "pick" else 2


def direct(
    spec: EnvSpec, state: InitialState, frames: bool = False
) -> list[Observation | ChunkResult]:
    """The same episode without a pool."""
    simulator = make_simulator(spec)
    simulator.reset(state)
    rows: list[Observation | ChunkResult] = [simulator.observe()]
    while not (isinstance(rows[-1], ChunkResult) and rows[-1].done):
        rows.append(
            run_chunk(simulator, actions_of(state, len(rows), dim=_dim(spec)), frames=frames)
        )
    return rows


def equal(a: list[Observation | ChunkResult], b: list[Observation | ChunkResult]) -> bool:
    return len(a) == len(b) and all(
        same(x, y) if isinstance(x, ChunkResult) and isinstance(y, ChunkResult) else seen(x, y)  # type: ignore[arg-type]
        for x, y in zip(a, b, strict=True)
    )


def adds_up(pool: VectorEnv) -> bool:
    stats = pool.stats()
    return (
        stats.episodes == stats.finished + stats.errors + stats.abandoned + stats.running
        and sum(stats.error_causes.values()) == stats.errors
    )


def gone(pids: list[int], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        for pid in pids
    ):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
