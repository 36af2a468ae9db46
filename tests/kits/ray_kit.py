"""Ray clusters of two nodes on this machine for tests, and what they leave behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from mmrl.config import RayConfig

SERVICES = ("raylet", "gcs_server")


class Nodes:
    """A cluster with the test on its head; `add` and `remove` further nodes. Dead ones are noticed within about two seconds."""

    def __init__(self, cpus: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.ray = ray
        health = {
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 500,
            "health_check_failure_threshold": 4,
            "prestart_worker_first_driver": False,
            "worker_niceness": 0,
        }
        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": cpus, "_system_config": health}
        )
        self.address = str(self.cluster.address)

    def add(self, cpus: int) -> Any:
        return self.cluster.add_node(num_cpus=cpus)

    def remove(self, node: Any) -> None:
        """Kill a node with everything on it."""
        self.cluster.remove_node(node, allow_graceful=False)

    def config(self, **options: Any) -> RayConfig:
        return RayConfig(address=self.address, **options)


@contextmanager
def nodes(cpus: int) -> Iterator[Nodes]:
    """A cluster whose head has so many CPUs; nothing of it is left afterwards."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # its 30 seconds were over once on a busy machine
    os.environ["RAY_gcs_server_port_wait_time_s"] = "120"  # noqa: SIM112 - Ray's own name
    made = Nodes(cpus)
    try:
        yield made
    finally:
        made.ray.shutdown()
        made.cluster.shutdown()


def services() -> set[int]:
    """Process ids of Ray's services that run for this process."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name() in SERVICES or any("ray::" in part for part in process.cmdline()):
                found.add(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def eventually(true: Any, seconds: float = 30.0) -> bool:
    """Whether `true()` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
