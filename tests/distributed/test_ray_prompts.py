"""Rewards and rollouts as Ray actors: the same scores, tokens and weights as without Ray, also when actors are killed."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import RunConfig, load_config
from mmrl.distributed.cluster.objects import MediaStore, shares, tensors_of
from mmrl.distributed.cluster.placement import ClusterError, Demand
from mmrl.distributed.cluster.rewards import RayScorer
from mmrl.distributed.cluster.rollout import RemoteRollout
from mmrl.distributed.cluster.session import Cluster
from mmrl.errors import RewardError
from mmrl.policy.policy import Policy
from mmrl.registry import task_from_spec
from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
from mmrl.training.trainer import Trainer
from mmrl.types import Turn
from mmrl.workers.scorer import Scorer
from tests.kits.engine_kit import (
    ALBUM,
    Album,
    album_data,
    config_file,
    fresh_policy,
    merge,
    picture,
    read_jsonl,
    sample_with,
    small_run,
    tiny_folder,
)
from tests.kits.pool_kit import gone
from tests.kits.ray_kit import Nodes, nodes
from tests.workers.test_scoring import (
    GOOD,
    GROUPED,
    HOSTILE,
    WRONG,
    among_good,
    check,
    groups,
    jobs,
)

pytestmark = pytest.mark.slow

SETTINGS = SamplingSettings(max_new_tokens=6)
LONE = SamplingSettings(max_new_tokens=6, batch_tokens=1)
"""Every completion in a batch of its own: batches are then the same on any number of actors."""


@pytest.fixture(scope="module")
def head() -> Iterator[Nodes]:
    with nodes(6) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(head: Nodes) -> Iterator[Cluster]:
    demands = [Demand("rewards", 2, 0.5), Demand("rollouts", 2, 1.0)]
    with Cluster(head.config(restarts=3), demands) as made:
        yield made


def pids(group: Any) -> list[int]:
    """Process ids of the actors of a group."""
    return [
        int(p)
        for p in group.cluster.ray.get(
            [a.__ray_call__.remote(lambda self: os.getpid()) for a in group.actors]
        )
    ]


def spec_of(folder: Path, source: str, name: str) -> str:
    path = folder / f"{name.lower()}.py"
    path.write_text(source, encoding="utf-8")
    return f"{path}:{name}"


# rewards


def test_rewards_on_ray_are_the_local_ones_whatever_they_do_and_a_lost_actor_costs_no_score(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(tmp_path, HOSTILE, "Hostile")
    reasons = {**WRONG, "sleep": "reward_timeout: no answer within 4 s", "die": "exit code 7"}
    texts = among_good([*WRONG, "die", "sleep"])
    with RayScorer(
        [(spec, {})], [task_from_spec(spec)], cluster, workers=2, timeout_s=4.0
    ) as scorer:
        check(texts, scorer.score(jobs(texts)), reasons)
        assert scorer.score([]) == [] and scorer.score(jobs(["0.5"]))[0].value == 0.5
        hosts = pids(scorer.group)
        killer = threading.Timer(2.0, os.kill, (hosts[0], signal.SIGKILL))
        killer.start()
        # the actor with "sleep" is killed meanwhile
        check(["sleep", *GOOD], scorer.score(jobs(["sleep", *GOOD])), reasons)
        killer.join()
        assert cluster.restarts["rewards"] == 1 and pids(scorer.group)[1] == hosts[1]
        (said,) = [r.message for r in caplog.records if "was lost" in r.message]
        assert re.search(
            r"one of the reward workers was lost, .*\(1 of engine\.ray\.restarts 3\): .*worker process has died",
            said,
        ), said
        with Scorer([(spec, {})], [task_from_spec(spec)], workers=0) as local:
            assert scorer.score(jobs(GOOD)) == local.score(jobs(GOOD))
        hosts = pids(scorer.group)
    assert gone(hosts)


def test_groups_are_scored_together_and_a_task_that_does_not_start_stops_the_run(
    cluster: Cluster, tmp_path: Path
) -> None:
    grouped, hostile = spec_of(tmp_path, GROUPED, "Grouped"), spec_of(tmp_path, HOSTILE, "Hostile")
    with RayScorer([(grouped, {})], [task_from_spec(grouped)], cluster, workers=1) as scorer:
        found = scorer.score_groups(
            groups(["0.1", "0.9", "0.5", "0.9"], ["0.3"], [], ["0.2", "raise alone", "0.0"])
        )
    assert [[x.value for x in row] for row in found] == [
        [0.0, 0.5, 0.25, 0.5],
        [0.0],
        [],
        [2 / 3, 0.0, 0.0],
    ]
    refuse = {"refuse_in_worker": True}
    with (
        RayScorer(
            [(hostile, refuse)], [task_from_spec(hostile, refuse)], cluster, workers=1
        ) as scorer,
        pytest.raises(RewardError, match="OSError: no licence on this machine"),
    ):
        scorer.score(jobs(["0.5"]))


# rollouts


def config_of(**model: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": tiny_folder(), "device": "cpu", **model}})


def told(results: list[list[Turn]]) -> list[list[tuple[Any, ...]]]:
    return [
        [(c.token_ids, c.text, c.logprobs, c.stop, c.policy_version) for c in group]
        for group in results
    ]


def requests(policy: Policy) -> list[Request]:
    """Two pictures, none, one, of which one twice greedily, and one in a mirror."""
    samples = [
        sample_with([picture(size, 3) for size in sizes], number=n)
        for n, sizes in enumerate((((56, 56), (37, 211)), (), ((112, 84),)))
    ]
    asked = [Request(policy.encoder(s, Album()), 2, (7, n)) for n, s in enumerate(samples)]
    mirrored = tuple(policy.encoder.visuals.changed(v, "mirror") for v in asked[0].prompt.visuals)
    return [
        *asked,
        Request(asked[2].prompt, 1, greedy=True),
        Request(replace(asked[0].prompt, visuals=mirrored), 1, (9,)),
    ]


def test_rollout_actors_generate_what_the_policy_would_and_follow_its_weights(
    cluster: Cluster,
) -> None:
    torch.set_num_threads(1)
    policy = fresh_policy()
    asked = requests(policy)
    own = PrefillOnceEngine(policy)
    engine = RemoteRollout(policy, cluster, config_of(), actors=2)
    before = told(own.generate(asked, LONE))
    assert told(engine.generate(asked, LONE)) == before and engine.sent == 1
    together, local = engine.generate(asked, SETTINGS), own.generate(asked, SETTINGS)
    assert [[c.token_ids for c in group] for group in together] == [
        [c.token_ids for c in group] for group in local
    ]
    assert all(
        a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        for x, y in zip(together, local, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    assert engine.sent == 1, "weights that did not change are not sent again"
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.data.mul_(0.9)  # as an optimizer might that bypasses torch's version counters
    policy.publish()
    after = told(own.generate(asked, LONE))
    assert after != before and told(engine.generate(asked, LONE)) == after and engine.sent == 2
    hosts = pids(engine.group)
    os.kill(hosts[0], signal.SIGKILL)
    assert (
        told(engine.generate(asked, LONE)) == after
        and cluster.restarts["rollouts"] == 1
        and engine.sent == 2
    )
    assert pids(engine.group)[0] != hosts[0] and pids(engine.group)[1] == hosts[1]
    assert engine.generate([], SETTINGS) == []
    hosts = pids(engine.group)
    engine.close()
    assert gone(hosts)


def test_actors_that_are_lost_too_often_stop_the_run(
    head: Nodes, cluster: Cluster, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, HOSTILE, "Hostile")
    with (
        Cluster(head.config(restarts=0), [Demand("rewards", 1, 0.5)]) as own,
        RayScorer([(spec, {})], [task_from_spec(spec)], own, workers=1) as scorer,
    ):
        os.kill(pids(scorer.group)[0], signal.SIGKILL)
        with pytest.raises(
            ClusterError,
            match=r"expected at most 0 reward workers to be lost \(engine\.ray\.restarts\)",
        ):
            scorer.score(jobs(GOOD))


@pytest.mark.parametrize(
    ("costs", "parts", "expected"),
    [
        ([8, 8, 8, 8], 2, [2, 2]),
        ([8, 8, 8], 4, [1, 1, 1]),
        ([900, 8, 8], 2, [1, 2]),
        ([8], 3, [1]),
        ([], 2, []),
    ],
)
def test_shares_are_consecutive_and_about_equal(
    costs: list[int], parts: int, expected: list[int]
) -> None:
    found = shares(costs, parts)
    assert [len(part) for part in found] == expected and [
        i for part in found for i in part
    ] == list(range(len(costs)))


def test_media_are_put_once_and_the_least_recently_used_go(cluster: Cluster) -> None:
    made = {
        "a": torch.rand(3, 4).to(torch.bfloat16),
        "b": torch.tensor(2.5),
        "c": torch.arange(12).view(2, 6)[:, ::2],
    }
    store = MediaStore(cluster.ray, limit=30)
    refs = {key: store.put(key, tensor) for key, tensor in made.items()}
    found = tensors_of(refs)
    assert all(
        torch.equal(found[k], t) and found[k].dtype == t.dtype and found[k].shape == t.shape
        for k, t in made.items()
    )
    assert store.put("a", None) == refs["a"] and all(key in store for key in made), (
        "nothing goes while a rollout is prepared"
    )
    store.trim()  # of 24 + 4 + 48 bytes, "a" used last
    assert [key in store for key in made] == [True, False, False] and store.put(
        "c", made["c"]
    ) != refs["c"]


# runs


def trainer_of(folder: Path, name: str, *changes: dict[str, Any]) -> Trainer:
    rows = [[picture(((112, 84), (56, 56), (84, 112))[i % 3], i)] * (i % 3) for i in range(6)]
    data = album_data(folder / "data", rows)
    tree = small_run(
        folder / "runs",
        data,
        data,
        name=name,
        data={"train": [{"task": ALBUM, "path": data}]},
        model={"freeze": ["vision", "projector"]},
        eval={"samples": 1, "limit": 2},
        reward={"workers": 1},
    )
    for change in changes:
        merge(tree, change)
    return Trainer(load_config(config_file(folder / f"{name}.yaml", tree)))


def same(a: Trainer, b: Trainer) -> bool:
    theirs = dict(b.policy.model.named_parameters())
    return all(torch.equal(p, theirs[n]) for n, p in a.policy.model.named_parameters())


def history(trainer: Trainer) -> list[dict[str, Any]]:
    return [
        {
            k: v
            for k, v in row.items()
            if not k.startswith(("time/", "speed/", "memory/", "perf/", "train/ray/"))
        }
        for row in read_jsonl(trainer.folder.path / "metrics.jsonl")
    ]


def test_a_run_on_ray_equals_the_local_one_bit_for_bit_also_when_actors_of_each_kind_are_killed(
    head: Nodes, cluster: Cluster, tmp_path: Path
) -> None:
    ray = {
        "engine": {
            "workers": "ray",
            "ray": {"address": head.address, "rollout_actors": 1, "cpus_per_worker": 0.5},
        }
    }
    local = trainer_of(tmp_path, "local")
    local.fit()
    remote = trainer_of(tmp_path, "ray", ray)
    killed: list[int] = []

    def kill(kind: str, payload: Any) -> None:
        if kind == "step" and payload["step"] == 1:
            assert isinstance(remote.rollouts.engine, RemoteRollout) and isinstance(
                remote.rollouts.scorer, RayScorer
            )
            killed.extend(
                [*pids(remote.rollouts.engine.group), *pids(remote.rollouts.scorer.group)]
            )
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.5)

    remote.on_event = kill
    remote.fit()
    assert len(killed) == 2 and same(local, remote) and history(local) == history(remote)
    rows = read_jsonl(remote.folder.path / "metrics.jsonl")
    assert [(r["train/ray/restarts/rewards"], r["train/ray/restarts/rollouts"]) for r in rows] == [
        (0.0, 0.0),
        (1.0, 1.0),
    ]
    assert any(
        not torch.equal(p, q)
        for (_, p), (_, q) in zip(
            local.policy.trainable(),
            fresh_policy(path=tiny_folder(window_vision=False)).trainable(),
            strict=False,
        )
    )
