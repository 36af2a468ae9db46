"""Placement is arithmetic: what fits passes, what does not is refused with the numbers and a fix, before anything starts."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from mmrl.config import EngineConfig, RayConfig, RewardConfig, RunConfig, VLLMConfig
from mmrl.distributed.cluster.objects import absolute
from mmrl.distributed.cluster.placement import Demand, Node, Placement, check, eligible, place_of
from mmrl.distributed.cluster.run import (
    check_prompt_workers,
    local_processes,
    prompt_demands,
    run_cluster,
    simulator_demand,
)
from mmrl.distributed.cluster.session import Cluster, code_paths, ending
from mmrl.errors import ConfigError, MissingExtraError
from tests.kits.engine_kit import REPO

HERE, THERE = Node("a" * 56, "10.0.0.1", 8, 1, True), Node("b" * 56, "10.0.0.2", 4, 2, False)


@pytest.mark.parametrize(
    ("placement", "demands"),
    [
        ("collocated", [Demand("simulators", 8, 1)]),
        ("collocated", [Demand("rewards", 6, 1), Demand("rollouts", 1, 2, 1)]),
        ("disaggregated", [Demand("simulators", 2, 2, 1)]),
        ("disaggregated", [Demand("simulators", 4, 1), Demand("rewards", 0, 9)]),
        ("hybrid", [Demand("rollouts", 3, 1, 1), Demand("rewards", 7, 1)]),
        ("hybrid", [Demand("simulators", 4, 1), Demand("rewards", 8, 1)]),
    ],
)  # the rewards need all of this node, so simulators go away
def test_what_fits_passes(placement: Placement, demands: list[Demand]) -> None:
    check(placement, demands, [HERE, THERE])


@pytest.mark.parametrize(
    ("placement", "demands", "nodes", "words"),
    [
        (
            "disaggregated",
            [Demand("simulators", 2, 1)],
            [HERE],
            [
                "expected at least one node other than the trainer's for 2 simulator workers",
                "10.0.0.1 (the trainer here, 8 CPUs, 1 GPUs",
                "ray start --address=HOST:PORT",
                "placement: collocated",
            ],
        ),
        (
            "collocated",
            [Demand("simulators", 9, 1)],
            [HERE, THERE],
            [
                "expected room for 9 simulator workers of 1 CPUs each on the trainer's node",
                "found room for 8",
                "lower env.workers",
            ],
        ),
        (
            "disaggregated",
            [Demand("simulators", 3, 1, 1)],
            [HERE, THERE],
            [
                "of 1 CPUs and 1 GPUs each on other nodes",
                "found room for 2",
                "10.0.0.2 (4 CPUs, 2 GPUs",
            ],
        ),
        (
            "collocated",
            [Demand("rewards", 7, 1), Demand("rollouts", 2, 1)],
            [HERE],
            [
                "2 rollout actors of 1 CPUs each",
                "beside 7 reward workers of 1 CPUs",
                "found room for 1",
                "engine.ray.rollout_actors",
            ],
        ),
        (
            "hybrid",
            [Demand("rewards", 9, 1)],
            [HERE, THERE],
            [
                "9 reward workers",
                "on the trainer's node",
                "found room for 8",
                "lower reward.workers",
            ],
        ),
        (
            "hybrid",
            [Demand("simulators", 1, 9)],
            [HERE, THERE],
            ["on any node", "found room for 0", "2 nodes: "],
        ),
    ],
)
def test_what_does_not_fit_says_what_was_expected_and_found(
    placement: Placement, demands: list[Demand], nodes: list[Node], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        check(placement, demands, nodes)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_room_is_counted_exactly() -> None:
    """For one kind of workers the number that fits is the sum over nodes of what each holds."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        nodes = [
            Node(f"{i}" * 56, f"n{i}", float(rng.integers(0, 9)), float(rng.integers(0, 5)), i == 0)
            for i in range(4)
        ]
        cpus, gpus = float(rng.choice([0.5, 1, 1.5, 2])), float(rng.choice([0, 0.5, 1]))
        for placement in ("collocated", "disaggregated", "hybrid"):
            allowed = eligible(place_of(placement, "simulators"), nodes)
            room = sum(int(min(n.cpus // cpus, n.gpus // gpus if gpus else 99)) for n in allowed)
            if room:
                check(placement, [Demand("simulators", room, cpus, gpus)], nodes)
            with pytest.raises(ConfigError, match=f"found room for {room}:"):
                check(placement, [Demand("simulators", room + 1, cpus, gpus)], nodes)


def test_processes_of_one_node_ask_for_their_workers_together() -> None:
    demands = [Demand("rewards", 3, 1), Demand("rollouts", 1, 1)]
    check("collocated", demands, [HERE], 2)  # 8 workers on 8 CPUs
    with pytest.raises(
        ConfigError,
        match=r"room for 9 reward workers .*\(3 for each of 3 processes, placement collocated, "
        r"beside 3 rollout actors .*found room for 8",
    ):
        check("collocated", demands, [HERE], 3)


def test_a_node_counts_no_more_processes_than_the_run_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert local_processes(8) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (local_processes(8), local_processes(1)) == (4, 1)


@pytest.mark.parametrize(
    ("device", "gpus", "actors", "refused"),
    [
        ("cuda", 0.0, 2, True),
        ("cuda", 0.5, 2, False),
        ("cuda", 0.0, 0, False),
        ("cpu", 0.0, 2, False),
        ("cpu", 1.0, 2, False),
    ],
)
def test_rollout_actors_of_a_run_on_a_gpu_need_one(
    device: str, gpus: float, actors: int, refused: bool
) -> None:
    ray = RayConfig(rollout_actors=actors, gpus_per_rollout_actor=gpus)
    config = RunConfig(engine=EngineConfig(workers="ray", ray=ray))
    if not refused:
        check_prompt_workers(config, device)
        return
    with pytest.raises(
        ConfigError,
        match=r"engine\.ray\.gpus_per_rollout_actor: expected more than 0 for 2 rollout actors",
    ):
        check_prompt_workers(config, device)


def test_ray_with_nothing_to_hold_is_refused() -> None:
    config = RunConfig(reward=RewardConfig(workers=0), engine=EngineConfig(workers="ray"))
    with pytest.raises(
        ConfigError,
        match=r"expected reward\.workers or engine\.ray\.rollout_actors above 0, found both 0",
    ):
        check_prompt_workers(config, "cpu")
    check_prompt_workers(config.model_copy(update={"engine": EngineConfig()}), "cpu")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        MissingExtraError, match=r"pip install -e '.*\[ray\]', or set engine.workers: local"
    ):
        Cluster(RayConfig(), [Demand("rewards", 1, 1)])


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ray://10.0.0.2:10001", "expected host:port or auto, found ray:"),
        ("cluster", "expected host:port or auto, found 'cluster'"),
        (
            "127.0.0.1:1",
            r"expected a Ray cluster at engine\.ray\.address 127\.0\.0\.1:1, found none",
        ),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(address: str, words: str) -> None:
    with (
        pytest.raises(ConfigError, match=words),
        Cluster(RayConfig(address=address), [Demand("rewards", 1, 1)]),
    ):
        pass


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"rollout_actors 2 needs engine\.workers: ray, found local"
    ):
        EngineConfig(ray=RayConfig(rollout_actors=2))
    refused: list[tuple[float, dict[str, Any], str]] = [
        (
            0.0,
            {"mode": "server", "url": "http://a:1"},
            "found two: .*server .http://a:1. and .*rollout_actors 2",
        ),
        (
            2.0,
            {},
            "at most 1 with engine.rollout: vllm, found 2: each actor holds one engine on one GPU",
        ),
        (
            0.25,
            {},
            "engine.vllm.memory: expected at most engine.ray.gpus_per_rollout_actor = 0.25, found 0.45",
        ),
    ]
    for gpus, vllm, words in refused:
        ray = RayConfig(rollout_actors=2, gpus_per_rollout_actor=gpus)
        with pytest.raises(ValidationError, match=words):
            EngineConfig(workers="ray", rollout="vllm", ray=ray, vllm=VLLMConfig(**vllm))
        EngineConfig(workers="ray", rollout="own", ray=ray)
        EngineConfig(
            workers="ray",
            rollout="vllm",
            ray=ray.model_copy(update={"rollout_actors": 0}),
            vllm=VLLMConfig(**vllm),
        )
    config = RunConfig(engine=EngineConfig(workers="ray", ray=RayConfig(rollout_actors=2)))
    with pytest.raises(ConfigError, match="expected 0 in an embodied run, found 2"):
        simulator_demand(config, 4)
    with (
        pytest.raises(ConfigError, match="in a run of 2 processes, found none"),
        run_cluster(config, 2, prompt_demands(config)),
    ):
        pass


def test_local_workers_take_nothing_from_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with run_cluster(RunConfig(), 1, prompt_demands(RunConfig())) as cluster:
        assert cluster is None


def test_actors_import_from_where_the_driver_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(sys, "path", ["", "/data/plugins", *sys.path])
    found = code_paths()
    assert (
        found[0] == str(REPO)
        and "/data/plugins" in found
        and not any("site-packages" in p or "python3" in p for p in found)
    )
    hub = "Qwen/Qwen2.5-VL-3B-Instruct"
    assert (absolute("assets/tiny_vlm"), absolute(hub)) == (
        str(REPO / "assets" / "tiny_vlm"),
        hub,
    ), "and read models there"


def test_how_an_actor_ended_is_told_without_advice() -> None:
    text = (
        "The actor died unexpectedly.\n\tclass_name: A\n\tactor_id: 2e9\n\tpid: 9618\n\tip: 10.0.0.2\n"
        "Worker exit detail: End of file. Some common causes include: (1) the OOM killer"
    )
    assert (
        ending(RuntimeError(text))
        == "The actor died unexpectedly. pid: 9618 ip: 10.0.0.2 Worker exit detail: End of file."
    )
