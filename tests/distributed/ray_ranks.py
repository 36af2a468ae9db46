"""What the processes of a run tell of their Ray workers; a job of tests/kits/process_worker.py. Ray itself is not started."""

from __future__ import annotations

from typing import Any

import torch

from mmrl.config import RayConfig
from mmrl.distributed.cluster.placement import Demand
from mmrl.distributed.cluster.run import cluster_metrics, local_processes
from mmrl.distributed.cluster.session import Cluster
from mmrl.distributed.world import World

__all__ = ["tell"]


def tell() -> dict[str, Any]:
    """This process's metrics after the second one lost two reward workers and a rollout actor; the processes counted here."""
    world = World(torch.device("cpu"))
    cluster = Cluster(RayConfig(), [Demand("rollouts", 1, 1.0), Demand("rewards", 2, 1.0)])
    if world.rank == 1:
        for kind in ("rewards", "rollouts", "rewards"):
            cluster.count_restart(kind, "it was killed")
    return {
        "metrics": cluster_metrics(cluster, world),
        "local": cluster_metrics(None, world),
        "here": local_processes(world.size),
    }
