"""FSDP2 in one process, and the copy of the policy that samples. Several processes: test_sharded_processes.py beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from mmrl.config import ModelConfig, load_config
from mmrl.distributed.engines import build_actor
from mmrl.distributed.engines.local import LocalEngine
from mmrl.distributed.world import World
from mmrl.policy.loading import load_policy
from mmrl.training.optim import build_optimizer
from mmrl.training.trainer import Trainer
from tests.distributed.engines.mixed_kit import mixed_run
from tests.distributed.test_distributed import compare
from tests.kits.engine_kit import config_file, fresh_policy
from tests.kits.process_worker import cut

pytestmark = pytest.mark.slow


def test_one_process_may_be_sharded(tmp_path: Path) -> None:
    """It takes over the checkpoint of a single process's first step."""
    config = config_file(
        tmp_path / "c.yaml", mixed_run(tmp_path, model={"gradient_checkpointing": True})
    )
    one = Trainer(load_config(config))
    one.fit()
    cut(one.folder.path, "two", 1)
    sharded = Trainer(load_config(config, ["name=two", "engine.train=fsdp2"]), resume=True)
    try:
        assert all(isinstance(p, DTensor) for _, p in sharded.policy.trainable())
        sharded.fit()
    finally:
        sharded.world.close()
    compare(one, sharded.folder.path)


def test_in_bf16_masters_are_saved_and_go_on(tmp_path: Path) -> None:
    """What samples is stored in bf16: a checkpoint of it would round the weights."""
    wider = {"alarms": {"logprob_gap": 1.0}, "model": {"dtype": "bf16"}}
    config = config_file(
        tmp_path / "c.yaml", mixed_run(tmp_path, engine={"train": "fsdp2"}, **wider)
    )
    run = Trainer(load_config(config))
    try:
        run.fit()
        assert {p.dtype for _, p in run.actor.trainable()} == {torch.bfloat16}
        trained = {n: t.clone() for n, t in run.training.parameters(trainable=False)}
        assert run.actor.version == run.policy.version
    finally:
        run.world.close()
    saved = load_policy(ModelConfig(path=str(run.checkpoints.path(3)), device="cpu", dtype="fp32"))
    for name, tensor in saved.named_parameters():
        assert torch.equal(tensor, trained[name]), name
    straight = {name: tensor.clone() for name, tensor in trained.items()}
    cut(run.folder.path, "again", 2)
    again = Trainer(load_config(config, ["name=again"]), resume=True)
    try:
        again.fit()
        for name, tensor in again.training.parameters(trainable=False):
            assert torch.equal(tensor, straight[name]), name
    finally:
        again.world.close()


def test_with_another_sampler_the_copy_is_only_kept_to_be_saved() -> None:
    config = load_config(None, ["engine.train=fsdp2", "engine.rollout=vllm"])
    policy = fresh_policy()
    world = World(torch.device("cpu"))
    kept = build_actor(config, world, policy)
    mine = dict(policy.model.named_parameters())
    for name, tensor in kept.model.named_parameters():
        assert torch.equal(tensor, mine[name]) and tensor.data_ptr() != mine[name].data_ptr(), name
    tied = policy.base.lm_head.weight is policy.base.model.language_model.embed_tokens.weight
    assert (kept.base.lm_head.weight is kept.base.model.language_model.embed_tokens.weight) == tied
    hollow = policy.full_replica(torch.device("meta"))
    LocalEngine(
        config.optim, world, policy, build_optimizer(policy.trainable(), config.optim)
    ).gather_into(hollow.model)
    assert all(p.is_meta for p in hollow.model.parameters())
