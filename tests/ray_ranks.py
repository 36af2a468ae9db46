"""What the processes of a run tell of their Ray workers; for tests, under torchrun.

    torchrun --nproc_per_node 2 -m tests.ray_ranks OUT

Every process writes OUT/RANK.json: its metrics after the second one has lost two reward workers and a rollout actor, and the
processes counted on this node. Ray itself is not started.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from mmrl.cluster.placement import Demand
from mmrl.cluster.run import cluster_metrics, local_processes
from mmrl.cluster.session import Cluster
from mmrl.config_engine import RayConfig
from mmrl.world import World


def main() -> None:
    world = World(torch.device("cpu"))
    cluster = Cluster(RayConfig(), [Demand("rollouts", 1, 1.0), Demand("rewards", 2, 1.0)])
    if world.rank == 1:
        for kind in ("rewards", "rollouts", "rewards"):
            cluster.count_restart(kind, "it was killed")
    told = {"metrics": cluster_metrics(cluster, world), "local": cluster_metrics(None, world), "here": local_processes(world.size)}
    (Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(told), encoding="utf-8")
    world.close()


if __name__ == "__main__":
    main()
