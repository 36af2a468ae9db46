"""What a run takes from Ray, by its configuration; without engine.workers ray it takes nothing and imports nothing.

with run_cluster(config, world.size, prompt_demands(config)) as cluster, run_scorer(config, specs, tasks, cluster) as scorer:
    ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmrl.config import RunConfig
from mmrl.distributed.cluster.placement import Demand
from mmrl.distributed.cluster.rewards import RayScorer
from mmrl.distributed.cluster.session import Cluster
from mmrl.distributed.world import World
from mmrl.errors import ConfigError
from mmrl.policy.policy import Policy
from mmrl.rollout.engine import RolloutEngine
from mmrl.task import Task
from mmrl.workers.scorer import Scorer

__all__ = [
    "check_prompt_workers",
    "cluster_metrics",
    "local_processes",
    "prompt_demands",
    "run_cluster",
    "run_rollouts",
    "run_scorer",
    "simulator_demand",
]


def prompt_demands(config: RunConfig) -> list[Demand]:
    """The actors of a run on prompts."""
    r = config.engine.ray
    return [
        Demand("rewards", config.reward.workers, r.cpus_per_worker),
        Demand("rollouts", r.rollout_actors, r.cpus_per_rollout_actor, r.gpus_per_rollout_actor),
    ]


def check_prompt_workers(config: RunConfig, device_type: str) -> None:
    """What a run on prompts, trained on a device of that type (cuda, cpu ..), cannot take from Ray, said before a model is loaded.
    Raises ConfigError."""
    if config.engine.workers == "local":
        return
    r = config.engine.ray
    if not (config.reward.workers or r.rollout_actors):
        raise ConfigError(
            "engine.workers ray: expected reward.workers or engine.ray.rollout_actors above 0, found both 0: Ray "
            "would hold nothing; set one of them, or engine.workers: local"
        )
    if r.rollout_actors and device_type == "cuda" and not r.gpus_per_rollout_actor:
        raise ConfigError(
            f"engine.ray.gpus_per_rollout_actor: expected more than 0 for {r.rollout_actors} rollout actors of a run "
            "that trains on cuda, found 0: without a GPU they would sample on a CPU, in another precision than it "
            "trains in; set it to 1 (or a share of one), or rollout_actors: 0"
        )


def local_processes(processes: int) -> int:
    """How many of a run's training processes are on this node, as their launcher says ($LOCAL_WORLD_SIZE); 1 if it does not."""
    return min(processes, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def simulator_demand(config: RunConfig, workers: int) -> Demand:
    """The actors of an embodied run. Raises ConfigError for rollout actors, which it has not."""
    r = config.engine.ray
    if r.rollout_actors:
        raise ConfigError(
            f"engine.ray.rollout_actors: expected 0 in an embodied run, found {r.rollout_actors}: its policy decides "
            "in the training process, its simulators are what Ray places; remove it"
        )
    return Demand("simulators", workers, r.cpus_per_worker, r.gpus_per_worker)


@contextmanager
def run_cluster(
    config: RunConfig, processes: int, demands: Sequence[Demand]
) -> Iterator[Cluster | None]:
    """The Ray cluster of a run of so many training processes while it works; None with engine.workers local."""
    if config.engine.workers == "local":
        yield None
        return
    if processes > 1 and config.engine.ray.address is None:
        raise ConfigError(
            f"expected engine.ray.address in a run of {processes} processes, found none: each of them would start a "
            "cluster of its own; run `ray start --head` and set engine.ray.address: auto"
        )
    with Cluster(config.engine.ray, demands, local_processes(processes)) as cluster:
        yield cluster


def run_scorer(
    config: RunConfig,
    specs: Sequence[tuple[str, dict[str, Any]]],
    tasks: Sequence[Task],
    cluster: Cluster | None,
) -> Scorer:
    """The reward pool: local processes, or actors. With reward.workers 0 rewards run in the training process either way."""
    r = config.reward
    limits: dict[str, Any] = {
        "workers": r.workers,
        "timeout_s": r.timeout_s,
        "concurrency": r.concurrency,
        "verdicts": r.verdicts or str(Path(config.dir) / config.name / "verdicts"),
    }
    if cluster is None or not r.workers:
        return Scorer(specs, tasks, **limits)
    return RayScorer(specs, tasks, cluster, **limits)


@contextmanager
def run_rollouts(
    config: RunConfig, policy: Policy, own: RolloutEngine, cluster: Cluster | None
) -> Iterator[RolloutEngine]:
    """What generates: actors with copies of `policy` when there are any, else `own`, which may drive actors that hold vLLM."""
    if cluster is None or not config.engine.ray.rollout_actors:
        yield own
        return
    from mmrl.distributed.cluster.rollout import RemoteRollout
    from mmrl.distributed.cluster.vllm import RemoteVLLM
    from mmrl.rollout.vllm_engine import VLLMEngine

    engine = own
    if isinstance(own, VLLMEngine):
        assert isinstance(own.backend, RemoteVLLM), "see build_rollout_engine"
        own.backend.start(cluster)
    else:
        engine = RemoteRollout(policy, cluster, config, actors=config.engine.ray.rollout_actors)
    try:
        yield engine
    finally:
        engine.close()


def cluster_metrics(cluster: Cluster | None, world: World) -> dict[str, float]:
    """Actors started in place of lost ones since the run began, by kind, in all processes; nothing without Ray. Collective."""
    if cluster is None:
        return {}
    kinds = sorted(cluster.demands)
    return {
        f"train/ray/restarts/{kind}": count
        for kind, count in zip(
            kinds, world.sum([float(cluster.restarts[kind]) for kind in kinds]), strict=True
        )
    }
