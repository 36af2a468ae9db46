"""What two processes find of the checkpoint that a run of sharded weights in bf16 wrote; a job of tests/kits/process_worker.py."""

from __future__ import annotations

from typing import Any

import torch

from mmrl.config import ModelConfig, load_config
from mmrl.policy.loading import load_policy
from mmrl.training.trainer import Trainer

__all__ = ["saved"]


def saved(path: str, overrides: list[str]) -> dict[str, Any]:
    """A whole run. Types and bytes of what samples in this process, where what is saved lies, versions, and the parameters whose
    weights in the last checkpoint are not those that train, to the last bit."""
    run = Trainer(load_config(path, overrides))
    run.fit()
    trained = {n: t.cpu().clone() for n, t in run.training.parameters(trainable=False)}
    apart: list[str] = []
    if run.world.is_main:
        folder = run.checkpoints.path(run.config.train.steps)
        again = load_policy(ModelConfig(path=str(folder), device="cpu", dtype="fp32"))
        apart = [n for n, p in again.named_parameters() if not torch.equal(p, trained[n])]
        apart += sorted(trained.keys() ^ dict(again.named_parameters()).keys())
    kept = run.saved.model.parameters()
    acts = dict(run.actor.model.named_parameters())
    return {
        "types": sorted({str(p.dtype) for p in acts.values()}),
        "share": sum(p.nbytes for p in acts.values()) / sum(t.nbytes for t in trained.values()),
        "saved": sorted({f"{p.device.type} {p.dtype}" for p in kept}),
        "versions": [run.policy.version, run.actor.version, run.saved.version],
        "equal": all(torch.equal(p, trained[n].to(p.dtype)) for n, p in acts.items()),
        "apart": apart,
    }
