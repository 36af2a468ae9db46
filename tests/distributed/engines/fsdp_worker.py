"""What two processes find when they drive FSDPEngine themselves; a job of tests/kits/process_worker.py."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mmrl.config import ModelConfig, RunConfig
from mmrl.distributed.engines import build_train_engine
from mmrl.distributed.world import World
from mmrl.errors import NonFiniteError
from mmrl.policy.loading import load_policy
from mmrl.policy.pack import idle_item, pack
from mmrl.training.optim import build_optimizer

__all__ = ["drive"]


def drive(folder: str) -> dict[str, Any]:
    """Gradients, norms, weights and optimizer state of the engine alone, whose blocks stay in place from forward to backward."""
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = "false"
    world = World(torch.device("cpu"))
    config = RunConfig.model_validate({"engine": {"train": "fsdp2"}, "optim": {"lr": 0.01}})
    policy = load_policy(ModelConfig(path=folder, device="cpu"))
    optimizer = build_optimizer(policy.trainable(), config.optim)
    batch = pack([idle_item(policy.eos_ids[0])])
    policy.logp(batch).logp_N.sum().backward()
    plain = policy.base.lm_head.weight.grad.clone()
    policy.model.zero_grad(set_to_none=True)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    engine = build_train_engine(config, world, policy, optimizer)
    numel = sum(p.numel() for p in before.values())
    found: dict[str, Any] = {
        "share": sum(p.to_local().numel() for _, p in policy.trainable() if isinstance(p, DTensor))
        / numel,
        "whole": all(
            torch.equal(t, before.pop(name)) for name, t in engine.parameters(trainable=False)
        )
        and not before,
    }

    def loss(factor: float) -> torch.Tensor:
        (logp_N,) = engine.run(lambda: (policy.logp(batch).logp_N,))
        return logp_N.sum() * factor

    with torch.no_grad():
        loss(1.0)
    found["given back"] = world.gather(
        [all(isinstance(p, DTensor) for p in policy.model.parameters())]
    )

    def gradient(*factors: float) -> torch.Tensor:
        engine.begin(1.0)
        for factor in factors:
            engine.backward(loss(factor))
        return policy.base.lm_head.weight.grad.full_tensor().clone()

    one = gradient(1.0 if world.is_main else 0.0)
    found["sums"] = {
        "of one process": float((one - plain).norm() / plain.norm()),
        "over processes": float((gradient(1.0) - 2 * one).norm() / one.norm()),
        "over micro-batches": float((gradient(1.0, 0.5) - 3 * one).norm() / one.norm()),
    }
    norms = [
        engine.step(2.0, n, 10, str)[0] for n in range(2) if n == 0 or gradient(1.0) is not None
    ]
    found["norms"] = world.gather(norms)
    state = engine.optimizer_state()
    found["main holds the state"] = world.gather([state is not None])
    steps = [float(s["step"]) for s in (state or {"state": {}})["state"].values()]
    engine.begin(1.0)
    engine.backward(loss(1.0 if world.is_main else float("inf")))
    try:
        engine.step(1.0, 2, 10, lambda norm: f"norm {norm}")
        found["non-finite"] = world.gather(["no error"])
    except NonFiniteError as error:
        found["non-finite"] = world.gather([str(error)])
    found["steps"] = sorted(set(steps))
    return found
