"""The pool of simulators, with real processes: what it returns equals direct play, whatever dies; nothing is lost or left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mmrl.errors import ConfigError
from mmrl.robotics.contract import ChunkResult, EnvSpec, make_simulator
from mmrl.robotics.pool import PoolError, PoolSettings, Reply, VectorEnv
from mmrl.robotics.worker import Area
from tests.kits.pool_kit import PUSH, STATES, adds_up, direct, equal, faulty, gone, one, play, seen


@pytest.fixture(scope="module")
def shared() -> Iterator[VectorEnv]:
    """One pool for what does not need its own; every test leaves it settled."""
    with VectorEnv(4, 2, PoolSettings(respawns=1000)) as pool:
        yield pool


@pytest.fixture
def pool(shared: VectorEnv) -> Iterator[VectorEnv]:
    yield shared
    shared.settle()
    assert adds_up(shared) and shared.stats().running == 0


# what comes back


@pytest.mark.parametrize("frames", [False, True])
def test_the_pool_returns_what_direct_play_returns(pool: VectorEnv, frames: bool) -> None:
    jobs = {
        0: (PUSH, STATES[0]),
        1: (EnvSpec("tiny", "reach", 9, 40, ("wrist", "base")), STATES[1]),
        2: (EnvSpec("tiny", "pick", 14, 24, ("base", "wrist")), STATES[2]),
        3: (PUSH, STATES[3]),
    }
    for slot, (rows, error) in play(pool, jobs, frames).items():
        assert error is None and equal(rows, direct(*jobs[slot], frames))
        pictures = sum(len(row.frames) for row in rows if isinstance(row, ChunkResult))
        assert pictures >= len(rows) if frames else pictures == 0


def test_members_of_a_group_start_alike_in_every_worker(pool: VectorEnv) -> None:
    """Slots are used before for different things; the same state and actions give the same episode in all of them."""
    play(pool, {0: (PUSH, STATES[5]), 1: (EnvSpec("tiny", "pick", 5, 32), STATES[6])})
    found = play(pool, {slot: (PUSH, STATES[7]) for slot in range(4)})
    assert all(error is None and equal(rows, found[0][0]) for rows, error in found.values())
    again = play(pool, {slot: (PUSH, STATES[7]) for slot in (3, 0)})
    assert all(equal(rows, found[0][0]) for rows, _ in again.values())


def test_pictures_are_copies(pool: VectorEnv) -> None:
    pool.reset(0, PUSH, STATES[0])
    first = one(pool).observation
    assert first is not None
    kept = first.images["base"].copy()
    pool.step(0, np.full((4, 2), 0.7), frames=True)
    chunk = one(pool).chunk
    assert chunk is not None and np.array_equal(first.images["base"], kept)
    assert not np.array_equal(chunk.frames[0], chunk.frames[-1])
    assert np.array_equal(chunk.frames[-1], chunk.observation.images["base"])


def test_replies_carry_times_and_facts(pool: VectorEnv) -> None:
    spec = EnvSpec("tiny", "pick", 6, 32, options={"step_s": 0.02, "reset_s": 0.03})
    before = time.monotonic()
    pool.reset(2, spec, STATES[0])
    reply = one(pool)
    assert (
        reply.kind == "reset"
        and reply.slot == 2
        and reply.worker == 0
        and reply.chunk is None
        and reply.cause == ""
    )
    assert before <= reply.started < reply.ended <= time.monotonic() and reply.seconds >= 0.03
    facts = pool.facts[spec.key]
    assert facts.action_space == make_simulator(spec).action_space and facts.proprio_dim == 3
    assert facts.versions["render"] == "numpy"
    busy = pool.stats().busy_s
    pool.step(2, np.zeros((3, 3)))
    reply = one(pool)
    assert reply.kind == "chunk" and reply.observation is None and reply.seconds >= 0.06
    assert (
        pool.stats().busy_s[0] - busy[0] == pytest.approx(reply.seconds)
        and pool.stats().busy_s[1] == busy[1]
    )


@pytest.mark.slow
def test_slots_of_a_worker_queue_and_workers_overlap(pool: VectorEnv) -> None:
    spec = EnvSpec("tiny", "push", 12, 32, options={"step_s": 0.1})
    for slot in range(4):
        pool.reset(slot, spec, STATES[slot])
    replies: list[Reply] = []
    while len(replies) < 4:
        replies += pool.ready(60.0)
    for slot in range(4):
        pool.step(slot, np.zeros((4, 2)))
    replies = []
    while len(replies) < 4:
        replies += pool.ready(60.0)
    spans = {r.slot: (r.started, r.ended) for r in replies}
    for a, b in ((0, 2), (1, 3)):
        assert spans[a][1] <= spans[b][0]  # one after the other, in the order they were asked
    assert max(spans[0][0], spans[1][0]) < min(spans[0][1], spans[1][1])


def test_a_simulator_stays_while_the_spec_stays(pool: VectorEnv) -> None:
    other = EnvSpec("tiny", "push", 12, 48)
    play(pool, {0: (PUSH, STATES[0])})
    made = pool.stats().simulators
    play(pool, {0: (PUSH, STATES[1])})
    assert pool.stats().simulators == made
    found = play(pool, {0: (other, STATES[1])})
    assert pool.stats().simulators == made + 1 and equal(found[0][0], direct(other, STATES[1]))
    play(pool, {0: (EnvSpec("tiny", "push", 12, 48), STATES[0])})
    assert pool.stats().simulators == made + 1
    found = play(pool, {0: (PUSH, STATES[1])})  # smaller pictures again
    assert equal(found[0][0], direct(PUSH, STATES[1]))


# misuse


def test_a_slot_used_out_of_turn_is_refused_and_unharmed(pool: VectorEnv) -> None:
    with pytest.raises(
        PoolError, match=r"slot 0: expected state waiting, found idle; reset it first"
    ):
        play(pool, {0: (PUSH, STATES[0])})
        pool.step(0, np.zeros((1, 2)))
    pool.reset(0, PUSH, STATES[0])
    with pytest.raises(
        PoolError,
        match=r"slot 0: expected state waiting, found resetting; read its reply with ready\(\) first",
    ):
        pool.step(0, np.zeros((1, 2)))
    with pytest.raises(
        PoolError, match="expected state idle or waiting or broken, found resetting"
    ):
        pool.reset(0, PUSH, STATES[0])
    assert one(pool).error is None
    pool.step(0, np.zeros((1, 2)))
    with pytest.raises(PoolError, match="found stepping"):
        pool.step(0, np.zeros((1, 2)))
    reply = one(pool)
    assert reply.error is None and pool.state(0) == "waiting"
    with pytest.raises(PoolError, match="expected a slot from 0 to 3, found 4"):
        pool.reset(4, PUSH, STATES[0])


@pytest.mark.slow
def test_ready_without_work_returns_at_once_and_keeps_to_its_time(pool: VectorEnv) -> None:
    begin = time.monotonic()
    assert pool.ready() == [] == pool.ready(30.0)
    assert time.monotonic() - begin < 10
    pool.reset(0, EnvSpec("tiny", "push", 12, 32, options={"reset_s": 5.0}), STATES[0])
    begin = time.monotonic()
    assert pool.ready(0.1) == [] and 0.1 <= time.monotonic() - begin < 4.5
    assert one(pool).error is None


def test_resetting_a_running_episode_abandons_it(pool: VectorEnv) -> None:
    before = pool.stats()
    pool.reset(1, PUSH, STATES[0])
    assert one(pool).error is None
    found = play(pool, {1: (PUSH, STATES[1])})
    after = pool.stats()
    assert equal(found[1][0], direct(PUSH, STATES[1]))
    assert (
        after.abandoned - before.abandoned,
        after.finished - before.finished,
        after.episodes - before.episodes,
    ) == (1, 1, 2)


def test_settle_frees_all_slots(pool: VectorEnv) -> None:
    for slot in range(4):
        pool.reset(slot, PUSH, STATES[slot])
    pool.settle()
    assert (
        pool.ready() == [] and {pool.state(slot) for slot in range(4)} == {"idle"} and adds_up(pool)
    )
    assert all(
        error is None
        for _, error in play(pool, {slot: (PUSH, STATES[slot]) for slot in range(4)}).values()
    )


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (np.full((2, 2), np.nan), "expected finite actions, found nan in step 0, dimension 0 (dx)"),
        ([[0.0, 0.0], [0.0, float("inf")]], "found inf in step 1, dimension 1 (dy)"),
        (np.zeros((4, 3)), "expected actions of shape (C, 2) with C >= 1 (dx, dy), found (4, 3)"),
        (np.zeros(2), "found (2,)"),
        (np.zeros((0, 2)), "found (0, 2)"),
        ([[0.0], [0.0, 1.0]], "expected actions of shape (C, A)"),
        ("left", "found no array of numbers"),
        (None, "with C >= 1"),
    ],
)
@pytest.mark.parametrize("frames", [False, True])
def test_bad_actions_end_the_episode_not_the_worker(
    pool: VectorEnv, actions: Any, words: str, frames: bool
) -> None:
    pids, respawns = pool.pids(), pool.stats().respawns
    pool.reset(3, PUSH, STATES[0])
    assert one(pool).error is None
    pool.step(3, actions, frames=frames)
    reply = one(pool)
    assert (
        reply.cause == "action"
        and words in str(reply.error)
        and "Traceback" not in str(reply.error)
    )
    assert reply.kind == "chunk" and reply.chunk is None and pool.state(3) == "broken"
    assert play(pool, {3: (PUSH, STATES[1])})[3][1] is None
    assert pool.pids() == pids and pool.stats().respawns == respawns


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (EnvSpec("tiny", "psh", 12), "Did you mean 'push'?"),
        (EnvSpec("tny", "push", 12), "Did you mean 'tiny'?"),
        (EnvSpec("tiny", "push", 12, cameras=("top",)), "expected cameras base, wrist"),
        (
            EnvSpec("no_such_module:Simulator", "push", 12),
            "expected a module no_such_module, found none",
        ),
    ],
)
def test_an_environment_that_does_not_exist_is_named(
    pool: VectorEnv, spec: EnvSpec, words: str
) -> None:
    pool.reset(0, spec, STATES[0])
    reply = one(pool)
    assert (
        reply.cause == "setup" and words in str(reply.error) and "Traceback" not in str(reply.error)
    )
    assert reply.kind == "reset" and reply.observation is None
    assert play(pool, {0: (PUSH, STATES[0])})[0][1] is None


# faults


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("raise", "chunk", "the physics exploded"),
        ("raise_reset", "reset", "the physics exploded"),
        ("bad_picture", "chunk", "expected pictures uint8 (32, 32, 3), found uint8 (31, 32, 3)"),
    ],
)
def test_an_exception_is_an_answer_with_its_traceback(
    pool: VectorEnv, fault: str, kind: str, words: str
) -> None:
    pids = pool.pids()
    pool.reset(1, PUSH, STATES[0])
    assert one(pool).error is None
    rows, error = play(pool, {0: (faulty(fault, states=(4,), at=2), STATES[4])})[0]
    made = pool.stats().simulators
    assert (
        error is not None
        and words in error
        and "Traceback" in error
        and ("faulty.py" in error or fault == "bad_picture")
    )
    assert (
        len(rows) == (1 if kind == "chunk" else 0)
        and pool.state(0) == "broken"
        and pool.state(1) == "waiting"
    )
    spec = faulty(fault, states=(4,), at=2)
    rows, error = play(pool, {0: (spec, STATES[5])})[0]
    assert error is None and equal(rows, direct(EnvSpec("tiny", "push", 12, 32), STATES[5]))
    # thrown away after the exception
    assert pool.stats().simulators == made + 1 and pool.pids() == pids


@pytest.mark.check_takes(1)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill", "was killed by SIGKILL"),
        ("exit", "exited with status 3"),
        ("kill_reset", "was killed by SIGKILL"),
    ],
)
def test_a_worker_that_dies_is_replaced_and_its_episodes_are_recorded(
    pool: VectorEnv, fault: str, words: str
) -> None:
    before, pids = pool.stats(), pool.pids()
    for slot in (1, 2):  # slot 2 shares the worker of slot 0 and waits for actions
        pool.reset(slot, PUSH, STATES[slot])
    while {pool.state(1), pool.state(2)} != {"waiting"}:
        pool.ready(60.0)
    pool.reset(0, faulty(fault), STATES[0])
    replies: dict[int, Reply] = {}
    while len(replies) < 2:
        for reply in pool.ready(60.0):
            if reply.error is None:
                pool.step(reply.slot, np.zeros((2, 2)))
            else:
                replies[reply.slot] = reply
    assert replies[0].cause == "crash" and words in str(replies[0].error)
    assert fault != "exit" or "the driver gave up" in str(replies[0].error)
    assert replies[2].cause == "neighbour" and "lost with its worker (slot 0)" in str(
        replies[2].error
    )
    assert pool.state(1) == "waiting" and (pool.pids()[0] != pids[0], pool.pids()[1]) == (
        True,
        pids[1],
    )
    after = pool.stats()
    assert (after.respawns - before.respawns, after.errors - before.errors) == (1, 2) and adds_up(
        pool
    )
    found = play(pool, {0: (PUSH, STATES[3]), 2: (PUSH, STATES[4])})
    assert all(error is None for _, error in found.values()) and equal(
        found[2][0], direct(PUSH, STATES[4])
    )


def test_resets_behind_a_dying_command_are_done_by_its_successor(pool: VectorEnv) -> None:
    errors = pool.stats().errors
    pool.reset(0, faulty("kill_reset"), STATES[0])
    pool.reset(2, PUSH, STATES[2])  # queued behind it in the same worker
    replies: dict[int, Reply] = {}
    while len(replies) < 2:
        replies.update({r.slot: r for r in pool.ready(60.0)})
    assert (
        replies[0].cause == "crash"
        and replies[2].error is None
        and pool.stats().errors == errors + 1
    )
    observation = replies[2].observation
    assert observation is not None and seen(observation, direct(PUSH, STATES[2])[0])  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_idle_worker_killed_from_outside_is_replaced(pool: VectorEnv) -> None:
    pool.reset(0, PUSH, STATES[0])
    assert one(pool).error is None
    os.kill(pool.pids()[0], signal.SIGKILL)
    assert gone(pool.pids()[:1])
    pool.step(0, np.zeros((1, 2)))
    reply = one(pool)
    assert reply.cause == "crash" and "SIGKILL" in str(reply.error)
    assert play(pool, {0: (PUSH, STATES[0])})[0][1] is None


def test_simulators_may_print(pool: VectorEnv, capfd: pytest.CaptureFixture[str]) -> None:
    assert play(pool, {0: (faulty("noise"), STATES[0])})[0][1] is None
    assert capfd.readouterr() == ("", "")


def test_a_simulator_that_cannot_close_is_reported_with_its_slot(pool: VectorEnv) -> None:
    assert play(pool, {0: (faulty("raise_close"), STATES[0])})[0][1] is None
    error = play(pool, {0: (PUSH, STATES[0])})[0][1]
    assert error is not None and "cannot close" in error
    assert play(pool, {0: (PUSH, STATES[0])})[0][1] is None


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"step_s": 0}, "expected step_s > 0 seconds, found 0"),
        ({"reset_s": float("nan")}, "expected reset_s > 0"),
        ({"respawns": -1}, "expected respawns >= 0, found -1"),
        ({"memory_gib": -1.0}, "expected memory_gib >= 0"),
    ],
)
def test_wrong_settings_are_named(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PoolSettings(**kwargs)
    with pytest.raises(
        ConfigError, match="expected at least one slot and one worker, found 0 and 2"
    ):
        VectorEnv(0)


@pytest.mark.slow
def test_a_worker_that_dies_after_its_answer_takes_the_answer_along(pool: VectorEnv) -> None:
    """One reply per slot: an observation of an episode that is already lost is not handed out."""
    pool.reset(0, PUSH, STATES[1])
    one(pool)  # the worker has started: what can be read from it below is the answer
    pool.settle()
    pool.reset(0, PUSH, STATES[0])
    pid, errors = pool.pids()[0], pool.stats().errors
    deadline = time.monotonic() + 60
    while not pool.fleet.current[0].connection.poll() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert gone([pid])
    time.sleep(0.5)  # a process counts as gone while its last thread still holds the pipe
    reply = one(pool)
    assert (
        reply.cause == "crash"
        and reply.observation is None
        and pool.ready() == []
        and pool.stats().errors == errors + 1
    )


def test_area_round_trip_and_growth() -> None:
    fd = os.memfd_create("test")
    mine, other = Area(fd), Area(fd)
    pictures = [
        np.random.default_rng(k).integers(0, 256, (16, 16, 3), dtype=np.uint8) for k in range(5)
    ]
    other.attach(mine.grow(2 * 768))
    other.write(1, pictures[1])
    assert mine.grow(5 * 768) == 5 * 768 == mine.grow(768)
    other.attach(mine.size)
    for number, picture in enumerate(pictures):
        other.write(number, picture)
    copies = [mine.read(number, 16) for number in range(5)]
    mine.close()
    other.close()
    os.close(fd)
    assert all(np.array_equal(a, b) for a, b in zip(copies, pictures, strict=True))
