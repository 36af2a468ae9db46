"""Whole nodes that are lost in the middle of a run: it goes on elsewhere, or stops and names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmrl.config import RayConfig
from mmrl.distributed.cluster.placement import ClusterError, Demand
from mmrl.distributed.cluster.session import Cluster
from mmrl.errors import ConfigError
from mmrl.robotics.ray_pool import RayWorker
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import read_jsonl
from tests.kits.pool_kit import adds_up, gone
from tests.kits.ray_kit import nodes
from tests.kits.robot_kit import config_of, saved_vla
from tests.robotics.test_embodied_run import rows, same, weights
from tests.robotics.test_ray_pool import training

pytestmark = pytest.mark.slow


def test_a_run_goes_on_after_a_lost_node_bit_for_bit_and_stops_with_the_name_of_the_last(
    tmp_path: Path,
) -> None:
    policy = saved_vla(tmp_path)
    common = [
        f"dir={tmp_path}",
        "env.slots=2",
        "env.workers=1",
        "schedule.kind=pipelined",
        "schedule.order=key",
        "train.steps=3",
    ]
    Trainer(config_of(policy, *common, "name=local")).fit()
    with nodes(1) as own:
        spare = [own.add(1), own.add(1)]
        trainer = Trainer(
            config_of(
                policy,
                *common,
                "name=ray",
                "engine.workers=ray",
                f"engine.ray.address={own.address}",
                "engine.ray.placement=disaggregated",
            )
        )
        lost: list[Any] = []

        def lose(kind: str, payload: Any) -> None:
            """After each step the node of the simulators is killed."""
            if kind == "step":
                worker = trainer.rollouts.pool.fleet.current[0]
                assert isinstance(worker, RayWorker) and worker.hello is not None
                (node,) = (n for n in spare if n.node_id == worker.hello.node)
                lost.append(node)
                own.remove(node)
                assert gone([worker.hello.pid, worker.hello.host_pid], 60.0)

        trainer.on_event = lose
        with pytest.raises(ClusterError) as error:
            trainer.fit()
        assert len(lost) == 2 and lost[0] is not lost[1]
        assert f"node {lost[1].node_id[:8]}" in str(error.value) and "found none left: lost" in str(
            error.value
        )
        with (
            Cluster(RayConfig(address=own.address), [Demand("rewards", 1, 1.0)]),
            pytest.raises(
                ConfigError, match="expected the cluster that this process is connected to"
            ),
            Cluster(RayConfig(address="127.0.0.1:1"), [Demand("rewards", 1, 1.0)]),
        ):
            pass
    assert same(weights(tmp_path, "local", 2), weights(tmp_path, "ray", 2)), (
        "the second step was played on the other node"
    )
    first, second = rows(tmp_path, "ray")
    assert [training(first), training(second)] == [
        training(row) for row in rows(tmp_path, "local")[:2]
    ]
    failed = [row["step"] for row in read_jsonl(tmp_path / "ray" / "failures.jsonl")]
    assert (
        first["train/failed_attempts"] == failed.count(1) == 0
        and second["train/failed_attempts"] == failed.count(2) > 0
    )
    assert second["train/ray/restarts/simulators"] >= 1 and adds_up(trainer.rollouts.pool)
