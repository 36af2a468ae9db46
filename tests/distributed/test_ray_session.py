"""Clusters of our own, with real Ray: what they leave behind is nothing, however they end; what is not granted is said in time."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from mmrl.config import RayConfig
from mmrl.distributed.cluster.group import ActorGroup
from mmrl.distributed.cluster.placement import ClusterError, Demand
from mmrl.distributed.cluster.session import Cluster
from mmrl.errors import ConfigError
from tests.kits.ray_kit import eventually, services

pytestmark = pytest.mark.slow


class Echo:
    """An actor for tests."""

    def where(self) -> tuple[str, str]:
        import ray

        return str(ray.get_runtime_context().get_node_id()), os.environ.get("MMRL_TEST", "")


class Unready:
    """An actor whose model is not on its node."""

    def __init__(self, path: str) -> None:
        with open(path, encoding="utf-8") as file:
            self.text = file.read()

    def read(self) -> str:
        return self.text


def test_a_cluster_of_its_own_checks_serves_and_leaves_nothing() -> None:
    def handler(number: int, frame: Any) -> None:
        raise AssertionError("not called")

    before = signal.signal(signal.SIGTERM, handler)
    ours = {
        name: os.environ.get(name)
        for name in ("RAY_USAGE_STATS_ENABLED", "RAY_prestart_worker_first_driver", "PYTHONPATH")
    }
    try:
        with (
            pytest.raises(ZeroDivisionError),
            Cluster(
                RayConfig(cpus=2, environment={"MMRL_TEST": "here"}), [Demand("rewards", 2, 1.0)]
            ) as cluster,
        ):
            assert services() and signal.getsignal(signal.SIGTERM) is handler
            assert {name: os.environ.get(name) for name in ours} == ours, (
                "what Ray is told in variables is not left there"
            )
            (here,) = cluster.nodes()
            assert here.here and here.cpus == 2
            actor = cluster.start("rewards", 1, Echo)
            assert cluster.ray.get(actor.where.remote()) == (here.id, "here")
            cluster.check("rewards")
            unready = ActorGroup(cluster, "rewards", 1, Unready, "/models/not_here/config.json")
            with pytest.raises(
                ClusterError,
                match=r"(?s)expected reward workers to start on their nodes, found that one could "
                r"not; none is started again\..*FileNotFoundError: .*/not_here/config\.json",
            ):
                unready.call("read", [()])
            assert not cluster.restarts, "a second one would fail as the first"
            unready.close()
            with (
                pytest.raises(
                    ConfigError,
                    match=r"(?s)expected 1 simulator workers of 1 CPUs to be granted within start_s = 1 s, "
                    r"found the cluster .* with 0 CPUs and 0 GPUs free",
                ),
                Cluster(RayConfig(start_s=1.0), [Demand("simulators", 1, 1.0)]),
            ):
                pass
            with (
                pytest.raises(ConfigError, match="found room for 2"),
                Cluster(RayConfig(), [Demand("simulators", 3, 1.0)]),
            ):
                pass
            assert cluster.ray.is_initialized(), "a connection that was there before is left alone"
            with pytest.raises(ClusterError, match="expected at most 20 reward workers to be lost"):
                for _ in range(21):
                    cluster.count_restart("rewards", "it was killed")
            raise ZeroDivisionError
        assert not cluster.ray.is_initialized() and eventually(lambda: not services())
        with (
            pytest.raises(
                ConfigError, match=r"found room for 1: 1 node: .*the trainer here, 1 CPUs"
            ),
            Cluster(RayConfig(cpus=1), [Demand("rollouts", 2, 1.0)]),
        ):
            pass
        assert not cluster.ray.is_initialized() and eventually(lambda: not services())
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
