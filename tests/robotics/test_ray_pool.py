"""Simulators as Ray actors: the pool's promises hold, whatever dies, and a run equals the local one bit for bit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mmrl.distributed.cluster.placement import Demand
from mmrl.distributed.cluster.session import Cluster
from mmrl.robotics.contract import ChunkResult, EnvSpec
from mmrl.robotics.pool import PoolSettings, Reply, VectorEnv
from mmrl.robotics.ray_host import boot_id
from mmrl.robotics.ray_pool import RayWorker, RayWorkers
from mmrl.training.trainer import Trainer
from tests.kits.pool_kit import PUSH, STATES, adds_up, direct, equal, faulty, gone, one, play
from tests.kits.ray_kit import Nodes, eventually, nodes
from tests.kits.robot_kit import config_of, saved_vla
from tests.robotics.test_embodied_run import rows, same, weights

pytestmark = pytest.mark.slow

KILLER = "tests.robotics.ray_faulty:HostKiller"


@pytest.fixture(scope="module")
def two() -> Iterator[Nodes]:
    """The trainer's node, and another one for four workers."""
    with nodes(4) as made:
        made.add(4)
        yield made


@pytest.fixture(scope="module")
def shared(two: Nodes) -> Iterator[VectorEnv]:
    with (
        Cluster(two.config(placement="disaggregated"), [Demand("simulators", 2, 1.0)]) as cluster,
        VectorEnv(4, 2, PoolSettings(respawns=1000, step_s=5.0), RayWorkers(cluster)) as pool,
    ):
        yield pool


@pytest.fixture
def pool(shared: VectorEnv) -> Iterator[VectorEnv]:
    yield shared
    shared.settle()
    assert adds_up(shared) and shared.stats().running == 0


def handle(pool: VectorEnv, worker: int) -> RayWorker:
    found = pool.fleet.current[worker]
    assert isinstance(found, RayWorker)
    return found


def waiting(pool: VectorEnv, *slots: int) -> None:
    """Episodes in these slots that wait for actions."""
    for slot in slots:
        pool.reset(slot, PUSH, STATES[slot])
    while {pool.state(slot) for slot in slots} != {"waiting"}:
        assert all(reply.error is None for reply in pool.ready(120.0))


def test_workers_are_on_the_other_node_and_return_what_direct_play_returns(
    pool: VectorEnv, two: Nodes
) -> None:
    jobs = {
        0: (PUSH, STATES[0]),
        1: (EnvSpec("tiny", "reach", 9, 40, ("wrist", "base")), STATES[1]),
        2: (EnvSpec("tiny", "pick", 14, 24, ("base", "wrist")), STATES[2]),
        3: (PUSH, STATES[3]),
    }
    for frames in (False, True):
        for slot, (found, error) in play(pool, jobs, frames).items():
            assert error is None and equal(found, direct(*jobs[slot], frames))
            assert all(
                row.observation.images["base"].flags.writeable
                for row in found
                if isinstance(row, ChunkResult)
            )
    here = two.ray.get_runtime_context().get_node_id()
    for worker in range(2):
        hello = handle(pool, worker).hello
        assert hello is not None and hello.node != here and hello.boot == boot_id()
        assert psutil.Process(hello.pid).ppid() == hello.host_pid
        loaded = Path(f"/proc/{hello.host_pid}/maps").read_text(encoding="utf-8")
        assert "libtorch" not in loaded, "a host that draws pictures does not load what trains"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill", "was killed by SIGKILL"),
        ("exit", "exited with status 3"),
        ("hang", "no answer to a chunk within 5 s"),
    ],
)
def test_a_process_that_dies_or_hangs_is_replaced_in_its_actor(
    pool: VectorEnv, fault: str, words: str
) -> None:
    before, pids = pool.stats(), pool.pids()
    waiting(pool, 1, 2)  # slot 2 shares the worker of slot 0
    host = handle(pool, 0).host
    pool.reset(0, faulty(fault), STATES[0])
    replies: dict[int, Reply] = {}
    while len(replies) < 2:
        for reply in pool.ready(120.0):
            if reply.error is None:
                pool.step(reply.slot, np.zeros((2, 2)))
            else:
                replies[reply.slot] = reply
    assert replies[0].cause == ("timeout" if fault == "hang" else "crash") and words in str(
        replies[0].error
    )
    assert {"exit": "the driver gave up", "hang": "in _do", "kill": ""}[fault] in str(
        replies[0].error
    )
    assert replies[2].cause == "neighbour" and pool.state(1) == "waiting"
    found = play(pool, {0: (PUSH, STATES[3]), 2: (PUSH, STATES[4])})
    assert [error for _, error in found.values()] == [None, None] and equal(
        found[2][0], direct(PUSH, STATES[4])
    )
    after = pool.stats()
    assert (after.respawns - before.respawns, after.errors - before.errors) == (1, 2) and adds_up(
        pool
    )
    assert (
        handle(pool, 0).host is host
        and not host.lost
        and pool.pids()[1] == pids[1]
        and gone(pids[:1])
    )


def test_a_lost_actor_is_a_lost_worker_and_another_takes_its_place(pool: VectorEnv) -> None:
    before, cluster = pool.stats(), handle(pool, 0)._cluster
    restarts = cluster.restarts["simulators"]
    waiting(pool, 0, 1, 2)
    hello = handle(pool, 0).hello
    assert hello is not None
    os.kill(hello.host_pid, signal.SIGKILL)
    pool.step(0, np.zeros((1, 2)))
    replies: dict[int, Reply] = {}
    while len(replies) < 2:
        replies.update({r.slot: r for r in pool.ready(120.0)})
    assert replies[
        0
    ].cause == "crash" and f"the Ray actor of the worker (process {hello.host_pid} on node" in str(
        replies[0].error
    )
    assert replies[2].cause == "neighbour" and "lost with its worker (slot 0)" in str(
        replies[2].error
    )
    assert pool.state(1) == "waiting" and gone([hello.pid]), "its worker process ends with it"
    found = play(pool, {0: (PUSH, STATES[3]), 2: (PUSH, STATES[4])})
    assert [error for _, error in found.values()] == [None, None] and equal(
        found[2][0], direct(PUSH, STATES[4])
    )
    assert (
        pool.stats().respawns == before.respawns + 1
        and cluster.restarts["simulators"] == restarts + 1
    )


def test_a_worker_replaced_between_episodes_leaves_the_others_theirs(pool: VectorEnv) -> None:
    """The old process finishes its episode in the same actor beside its successor."""
    waiting(pool, 0, 2)
    old = handle(pool, 0)
    old.retiring = True  # as a worker above memory_gib
    restarts = pool.stats().restarts
    pool.step(0, np.full((12, 2), 0.1))  # to the end of the episode
    assert one(pool).error is None and pool.state(0) == "idle"
    pool.reset(0, PUSH, STATES[5])
    reply = one(pool)
    assert (
        reply.error is None
        and handle(pool, 0) is not old
        and handle(pool, 0).host is old.host
        and pool.state(2) == "waiting"
    )
    pool.step(2, np.zeros((12, 2)))
    assert one(pool).error is None and pool.stats().restarts == restarts + 1
    pool.reset(2, PUSH, STATES[6])
    assert one(pool).error is None and gone([old.pid])


def test_many_pictures_leave_no_object_behind(pool: VectorEnv) -> None:
    """Frames larger than what Ray sends inline go through its store, and out of it."""
    spec = EnvSpec("tiny", "push", 12, 256)

    def used() -> float:
        ray = handle(pool, 0)._ray
        return float(
            ray.cluster_resources()["object_store_memory"]
            - ray.available_resources()["object_store_memory"]
        )

    assert play(pool, {0: (spec, STATES[0])}, True)[0][1] is None
    assert eventually(lambda: used() == 0.0)
    for state in STATES[:3]:
        assert play(pool, {slot: (spec, state) for slot in range(4)}, True)[0][1] is None
    assert eventually(lambda: used() == 0.0)


def test_closing_ends_actors_and_processes(two: Nodes) -> None:
    with Cluster(two.config(placement="disaggregated"), [Demand("simulators", 1, 1.0)]) as cluster:
        with VectorEnv(1, 1, starter=RayWorkers(cluster)) as pool:
            assert play(pool, {0: (PUSH, STATES[0])})[0][1] is None
            hello = handle(pool, 0).hello
            pool.reset(0, faulty("hang_reset"), STATES[0])
        assert hello is not None and gone([hello.pid, hello.host_pid])


@pytest.mark.render("libvulkan.so.1")
def test_a_real_simulator_on_ray_shows_what_it_shows_locally(two: Nodes) -> None:
    """One reset and one chunk of ManiSkill, whose GL is opened in the worker process on its node."""
    spec = EnvSpec("maniskill", "PushCube-v1", 16, 32)
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 7))
    limits = PoolSettings(handshake_s=300.0, reset_s=300.0, step_s=300.0)

    def shown(pool: VectorEnv) -> list[Reply]:
        pool.reset(0, spec, STATES[0])
        replies = [one(pool, 600.0)]
        pool.step(0, actions, frames=True)
        return [*replies, one(pool, 600.0)]

    with (
        Cluster(two.config(placement="disaggregated"), [Demand("simulators", 1, 1.0)]) as cluster,
        VectorEnv(1, 1, limits, RayWorkers(cluster)) as pool,
    ):
        remote, facts = shown(pool), pool.facts[spec.key]
    with VectorEnv(1, 1, limits) as pool:
        local = shown(pool)
        assert facts == pool.facts[spec.key]
    assert [r.error for r in remote] == [r.error for r in local] == [None, None]
    assert equal([remote[0].observation, remote[1].chunk], [local[0].observation, local[1].chunk])  # type: ignore[list-item]


# runs


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_vla(tmp_path_factory.mktemp("policy"))


def run(
    policy: Path, folder: Path, name: str, *overrides: str, ray: Nodes | None = None
) -> Trainer:
    """A run whose episodes are batches of their own, so that a lost attempt changes no other's last bit."""
    engine = (
        [
            "engine.workers=ray",
            f"engine.ray.address={ray.address}",
            "engine.ray.placement=disaggregated",
        ]
        if ray
        else []
    )
    trainer = Trainer(
        config_of(
            policy,
            f"dir={folder}",
            f"name={name}",
            "env.slots=2",
            "schedule.kind=pipelined",
            "schedule.order=key",
            "schedule.stages=2",
            *engine,
            *overrides,
        )
    )
    trainer.fit()
    return trainer


def training(row: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v
        for k, v in row.items()
        if k.startswith("train/") and not k.startswith(("train/ray/", "train/failed_attempts"))
    }


def test_a_run_equals_the_local_one_bit_for_bit_also_with_a_killed_actor(
    two: Nodes, policy: Path, tmp_path: Path
) -> None:
    run(policy, tmp_path, "local")
    options = json.dumps({"tolerance": 0.5, "kill_host": str(tmp_path / "kill.once")})
    trainer = run(
        policy, tmp_path, "killed", f"env.suite={KILLER}", f"env.options={options}", ray=two
    )
    assert (tmp_path / "kill.once").exists()
    assert same(weights(tmp_path, "local"), weights(tmp_path, "killed"))
    assert [training(row) for row in rows(tmp_path, "local")] == [
        training(row) for row in rows(tmp_path, "killed")
    ]
    found = rows(tmp_path, "killed")
    assert (
        sum(row["train/failed_attempts"] for row in found) == 1
        and found[-1]["train/ray/restarts/simulators"] == 1
    )
    stats = trainer.rollouts.pool.stats()
    assert (
        adds_up(trainer.rollouts.pool)
        and stats.respawns == 1
        and stats.error_causes == {"crash": 1}
        and stats.running == 0
    )
