"""Batches of simulators: each row plays the episode that its simulator plays alone, whatever happens in the rows beside it, and
so in the workers of a pool. A whole run on batches: test_embodied_run.py."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmrl.errors import ConfigError
from mmrl.robotics.contract import (
    ActionError,
    ChunkResult,
    EnvSpec,
    InitialState,
    Observation,
    make_simulator,
    run_chunk,
)
from mmrl.robotics.pool import PoolSettings, VectorEnv
from mmrl.robotics.pool_fleet import WorkerFleet
from mmrl.robotics.pool_process import WorkerHandle
from mmrl.robotics.tiny import TinySimulator
from mmrl.robotics.vector import SerialVector, VectorSimulator, make_playing, make_vector
from mmrl.rollout.stages import Stages
from tests.kits.pool_kit import (
    FAULTY,
    PUSH,
    STATES,
    actions_of,
    adds_up,
    direct,
    equal,
    gone,
    play,
    same,
)

BATCHED = {"batched": True}
BATCH = replace(PUSH, options=BATCHED)


def batch_of(fault: str = "", **options: Any) -> EnvSpec:
    return EnvSpec(FAULTY, "push", 12, 32, options={"fault": fault, **BATCHED, **options})


def played(
    vector: VectorSimulator,
    jobs: dict[int, InitialState],
    dim: int = 2,
    spoil: dict[int, Any] | None = None,
) -> dict[int, list[Any]]:
    """Whole episodes in some rows, as tests.kits.pool_kit.play does: what each saw, or the exception that ended it. `spoil`: chunks
    to be executed first instead."""
    found: dict[int, list[Any]] = {row: [error] for row, error in vector.reset(jobs).items()}
    seen = vector.observe([row for row in jobs if row not in found])
    found |= {row: [o] for row, o in seen.apart().items()} | {
        r: [e] for r, e in seen.failed.items()
    }
    while chunks := {
        row: actions_of(jobs[row], len(rows), dim=dim)
        for row, rows in found.items()
        if isinstance(rows[-1], Observation)
        or (isinstance(rows[-1], ChunkResult) and not rows[-1].done)
    }:
        chunks |= {row: spoil[row] for row in spoil or {} if row in chunks and len(found[row]) == 1}
        for row, result in vector.step_chunk(chunks).items():
            found[row].append(result)
    return found


# rows of a vector


@pytest.mark.parametrize("task", ["push", "reach", "pick"])
def test_a_row_plays_what_its_simulator_plays_alone(task: str) -> None:
    spec, dim = EnvSpec("tiny", task, 14, 32, ("base", "wrist")), 3 if task == "pick" else 2
    vector = make_vector(spec, 4)
    first = played(vector, {0: STATES[0], 2: STATES[1]}, dim)
    then = played(vector, dict(enumerate(STATES[2:6])), dim)
    for state, rows in [
        (STATES[0], first[0]),
        (STATES[1], first[2]),
        *zip(STATES[2:6], (then[row] for row in range(4)), strict=True),
    ]:
        assert equal(rows, direct(spec, state))
    assert vector.action_space == TinySimulator(spec).action_space and vector.proprio_dim == dim
    vector.close()


def test_rows_are_reset_while_others_go_on_and_equal_states_are_equal() -> None:
    vector = make_vector(PUSH, 3)
    vector.reset({0: STATES[0], 1: STATES[0]})
    ahead = vector.step_chunk({0: actions_of(STATES[0], 1)})[0]
    vector.reset({2: STATES[0]})
    rest = vector.step_chunk({row: actions_of(STATES[0], 1) for row in (1, 2)})
    simulator = make_simulator(PUSH)
    simulator.reset(STATES[0])
    alone = run_chunk(simulator, actions_of(STATES[0], 1))
    for result in (ahead, *rest.values()):
        assert isinstance(result, ChunkResult) and same(result, alone)
    # the row that was ahead has not moved since
    alone, later = (
        run_chunk(simulator, actions_of(STATES[0], 2)),
        vector.step_chunk({0: actions_of(STATES[0], 2)})[0],
    )
    assert isinstance(later, ChunkResult) and same(later, alone)


def test_chunks_may_differ_in_length_and_a_film_has_every_step() -> None:
    vector = make_vector(PUSH, 2)
    vector.reset({0: STATES[0], 1: STATES[1]})
    chunks = {0: actions_of(STATES[0], 1, chunk=2), 1: actions_of(STATES[1], 1, chunk=5)}
    found = vector.step_chunk(chunks, frames=[1])
    for row in (0, 1):
        simulator, result = make_simulator(PUSH), found[row]
        simulator.reset(STATES[row])
        assert isinstance(result, ChunkResult)
        assert same(result, run_chunk(simulator, chunks[row], frames=row == 1))


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (np.full((4, 2), np.nan), "expected finite actions, found nan in step 0"),
        (np.zeros((4, 3)), "expected actions of shape (C, 2)"),
    ],
)
def test_actions_that_cannot_be_executed_cost_their_row(chunk: np.ndarray, words: str) -> None:
    vector = make_vector(PUSH, 3)
    found = played(vector, dict(enumerate(STATES[:3])), spoil={1: chunk})
    assert isinstance(found[1][-1], ActionError) and words in str(found[1][-1])
    for row in (0, 2):
        assert equal(found[row], direct(PUSH, STATES[row]))
    assert equal(played(vector, {1: STATES[1]})[1], direct(PUSH, STATES[1]))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "the physics exploded"),
        ("raise_reset", "the physics exploded"),
        ("bad_picture", "expected pictures uint8 (32, 32, 3), found uint8 (31, 32, 3)"),
    ],
)
def test_a_row_that_raises_costs_itself(fault: str, words: str) -> None:
    vector = SerialVector(batch_of(fault, states=(1,), at=2), 3)
    found = played(vector, dict(enumerate(STATES[:3])))
    assert isinstance(found[1][-1], Exception) and words in str(found[1][-1])
    for row in (0, 2):
        assert equal(found[row], direct(PUSH, STATES[row]))
    assert equal(played(vector, {1: STATES[4]})[1], direct(PUSH, STATES[4]))


class Blown(TinySimulator):
    """Its physics breaks down in one episode: the arm is nowhere."""

    def reset(self, state: InitialState) -> None:
        super().reset(state)
        self.blown = state.index == 1

    def observe(self) -> Observation:
        seen = super().observe()
        nowhere = np.full_like(seen.proprio, np.nan)
        return replace(seen, proprio=nowhere) if self.blown and self.steps else seen


def test_a_state_that_is_not_finite_costs_its_row() -> None:
    vector = SerialVector(replace(PUSH, suite=f"{__name__}:Blown"), 3)
    found = played(vector, dict(enumerate(STATES[:3])))
    assert "expected finite rewards and proprioception" in str(found[1][-1])
    for row in (0, 2):
        assert equal(found[row], direct(PUSH, STATES[row]))


def test_who_batches_is_made_as_a_vector() -> None:
    assert isinstance(make_playing(PUSH), TinySimulator)
    assert isinstance(make_playing(BATCH, 4), SerialVector)
    with pytest.raises(ConfigError, match="expected at least one row, found 0"):
        make_vector(PUSH, 0)


@pytest.mark.slow
@pytest.mark.render("libOSMesa.so.8")
def test_rows_of_libero_equal_libero() -> None:
    spec = EnvSpec(
        "libero",
        "libero_object/0",
        6,
        64,
        ("base", "wrist"),
        {"assets": "stand-in", "gl": "osmesa"},
    )
    kind = type(make_simulator(spec))
    recorded = kind.recorded_states(spec.task, "train")
    assert recorded is not None
    vector = make_vector(spec, 2)
    found = played(vector, {0: recorded[0], 1: recorded[1]}, dim=7)
    vector.close()
    for row in (0, 1):
        simulator = make_simulator(spec)
        simulator.reset(recorded[row])
        rows: list[Any] = [simulator.observe()]
        while len(rows) == 1 or not rows[-1].done:
            rows.append(run_chunk(simulator, actions_of(recorded[row], len(rows), dim=7)))
        simulator.close()
        assert equal(found[row], rows)


# rows behind a pool


@pytest.fixture(scope="module")
def shared() -> Iterator[VectorEnv]:
    with VectorEnv(6, 2, PoolSettings(respawns=1000, step_s=4.0), batched=True) as pool:
        yield pool


@pytest.fixture
def pool(shared: VectorEnv) -> Iterator[VectorEnv]:
    yield shared
    shared.settle()
    assert adds_up(shared) and shared.stats().running == 0


@pytest.mark.parametrize("frames", [False, True])
def test_a_batched_pool_returns_what_direct_play_returns(pool: VectorEnv, frames: bool) -> None:
    other = EnvSpec("tiny", "pick", 14, 24, ("base", "wrist"), BATCHED)
    jobs = {slot: (other if slot == 4 else BATCH, STATES[slot]) for slot in range(6)}
    jobs[5] = (PUSH, STATES[5])  # one that plays for itself
    for slot, (rows, error) in play(pool, jobs, frames).items():
        assert error is None and equal(rows, direct(*jobs[slot], frames))


def test_neighbours_are_rows_of_one_batch_and_share_its_time(pool: VectorEnv) -> None:
    slow = EnvSpec("tiny", "push", 12, 32, options={**BATCHED, "reset_s": 0.05})
    busy = sum(pool.stats().busy_s)
    with pool.together():
        for slot in range(6):
            pool.reset(slot, slow, STATES[slot])
    replies = []
    while len(replies) < 6:
        replies += pool.ready(60.0)
    assert [r.worker for r in sorted(replies, key=lambda r: r.slot)] == [0, 0, 0, 1, 1, 1]
    for worker in (0, 1):
        rows = sorted((r for r in replies if r.worker == worker), key=lambda r: r.started)
        assert [r.ended for r in rows[:-1]] == pytest.approx([r.started for r in rows[1:]])
        assert sum(r.seconds for r in rows) == pytest.approx(rows[-1].ended - rows[0].started)
        assert sum(r.seconds for r in rows) >= 0.15
    assert sum(pool.stats().busy_s) - busy == pytest.approx(sum(r.seconds for r in replies))


def test_an_error_in_a_row_is_an_answer_of_its_slot(pool: VectorEnv) -> None:
    pids = pool.pids()
    bad = batch_of("raise", states=(1,), at=2)
    found = play(pool, {slot: (bad, STATES[slot]) for slot in range(3)})
    assert "the physics exploded" in str(found[1][1]) and "faulty.py" in str(found[1][1])
    for slot in (0, 2):
        assert found[slot][1] is None and equal(found[slot][0], direct(PUSH, STATES[slot]))
    assert pool.pids() == pids


def test_a_row_that_cannot_be_closed_either_is_an_answer_of_its_slot(pool: VectorEnv) -> None:
    pids = pool.pids()
    for fault, told in (("raise", "the physics exploded"), ("raise_reset", "the physics exploded")):
        bad = batch_of(fault, states=(1,), at=2, no_close=True)
        found = play(pool, {slot: (bad, STATES[slot]) for slot in range(3)})
        assert told in str(found[1][1]) and "cannot close" in str(found[1][1])
        for slot in (0, 2):
            assert found[slot][1] is None and equal(found[slot][0], direct(PUSH, STATES[slot]))
    # whose row stays open while it plays elsewhere
    stuck = batch_of("noise", states=(1,), at=99, no_close=True)
    assert play(pool, {slot: (stuck, STATES[slot]) for slot in range(3)})[1][1] is None
    found = play(pool, {slot: (BATCH, STATES[slot]) for slot in range(3)})
    assert "cannot close" in str(found[1][1])
    for slot in (0, 2):
        assert found[slot][1] is None and equal(found[slot][0], direct(PUSH, STATES[slot]))
    assert pool.pids() == pids


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        ("psh", BATCHED, "Did you mean 'push'?"),
        ("push", {**BATCHED, "tolerence": 1.0}, "Did you mean 'tolerance'?"),
    ],
)
def test_a_mistake_is_named_in_each_row(
    pool: VectorEnv, task: str, options: dict[str, Any], words: str
) -> None:
    wrong = EnvSpec("tiny", task, 12, 32, options=options)
    found = play(pool, {slot: (wrong, STATES[slot]) for slot in (0, 1)})
    assert all(words in str(error) and "Traceback" not in str(error) for _, error in found.values())
    assert pool.stats().error_causes["setup"] >= 2
    assert equal(play(pool, {0: (BATCH, STATES[0])})[0][0], direct(PUSH, STATES[0]))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_a_worker_that_dies_costs_its_rows_and_no_other(pool: VectorEnv, fault: str) -> None:
    """Nobody knows which row it was, so none is blamed: all are played again without it counting as a try of theirs, as often as
    workers may be started anew."""
    before, old = pool.stats(), pool.pids()
    bad = batch_of(fault, states=(2,), at=2)
    found = play(pool, {slot: (bad, STATES[slot]) for slot in range(6)}, in_step=True)
    after = pool.stats()
    assert {slot for slot in found if found[slot][1] is not None} == {0, 1, 2}
    assert all("a batch of 3 under way" in str(found[slot][1]) for slot in range(3))
    neighbours = after.error_causes["neighbour"] - before.error_causes.get("neighbour", 0)
    assert (neighbours, after.errors - before.errors) == (3, 3)
    assert after.respawns - before.respawns == 1
    for slot in (3, 4, 5):
        assert equal(found[slot][0], direct(PUSH, STATES[slot]))
    assert gone(old[:1]) and pool.pids()[1] == old[1]
    again = play(pool, {slot: (BATCH, STATES[slot]) for slot in range(3)})
    assert all(equal(again[slot][0], direct(PUSH, STATES[slot])) for slot in range(3))


@pytest.mark.slow
def test_two_messages_to_a_busy_worker_do_not_wait_for_each_other() -> None:
    """The second is longer than the pipe holds, and the worker's answers to the first are not read meanwhile."""
    with VectorEnv(256, 1, batched=True) as pool:
        with pool.together():
            for slot in range(256):
                pool.reset(slot, BATCH, STATES[0])
        begun = 0
        while begun < 256:
            begun += len(pool.ready(60.0))

        def ask() -> None:
            for half in (range(128), range(128, 256)):
                with pool.together():
                    for slot in half:
                        pool.step(slot, np.zeros((175, 2)))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(120.0)
        assert not asking.is_alive(), "expected both messages to be sent, found them stuck"
        answered = 0
        while answered < 256:
            answered += len(pool.ready(60.0))


@pytest.mark.parametrize(("slots", "workers"), [(3, 2), (7, 2), (7, 3), (256, 2), (10, 4)])
def test_a_stage_is_a_batch(slots: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many stages as workers no row has to stay while others of its batch move."""
    monkeypatch.setattr(WorkerFleet, "_spawn", lambda self, worker: worker)
    monkeypatch.setattr(WorkerFleet, "_handshake", lambda self: None)
    fleet = WorkerFleet(slots, workers, PoolSettings(), neighbours=True)
    for worker, block in enumerate(Stages(slots, workers).blocks):
        assert {fleet.number_of(slot) for slot in block} == {worker}
    fleet.processes.clear()
    fleet.starter.close()


def test_rows_of_two_environments_go_out_one_environment_after_the_other(
    pool: VectorEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So each is played once, not in turns, each of which would hold the rows of the other turns."""
    other = EnvSpec("tiny", "reach", 12, 32, options=BATCHED)
    sent: list[list[int]] = []
    send = WorkerHandle.send
    monkeypatch.setattr(
        WorkerHandle, "send", lambda self, cs: (sent.append([c.slot for c in cs]), send(self, cs))
    )
    jobs = {slot: (other if slot in (1, 4) else BATCH, STATES[slot]) for slot in range(6)}
    found = play(pool, jobs)
    assert all(equal(found[slot][0], direct(*jobs[slot])) for slot in jobs)
    assert sent[0] in ([0, 2, 1], [1, 0, 2]) and sent[1] in ([3, 5, 4], [4, 3, 5])


class Late(TinySimulator):
    """Knows its own size only in an episode, and cannot begin that of state 1."""

    begun = False

    def reset(self, state: InitialState) -> None:
        if state.index == 1:
            raise ValueError("the physics exploded")
        super().reset(state)
        self.begun = True

    @property
    def proprio_dim(self) -> int:
        assert self.begun
        return super().proprio_dim


def test_a_reset_that_fails_alone_is_an_answer(pool: VectorEnv) -> None:
    late, respawns = replace(BATCH, suite=f"{__name__}:Late"), pool.stats().respawns
    assert "the physics exploded" in str(play(pool, {0: (late, STATES[1])})[0][1])
    assert equal(play(pool, {0: (late, STATES[2])})[0][0], direct(PUSH, STATES[2]))
    assert pool.stats().respawns == respawns


def test_what_waits_inside_together_would_wait_for_ever(pool: VectorEnv) -> None:
    with pytest.raises(AssertionError, match="no waiting inside `together`"), pool.together():
        pool.reset(0, BATCH, STATES[0])
        pool.ready()
