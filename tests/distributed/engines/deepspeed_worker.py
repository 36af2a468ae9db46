"""What two processes find when they drive DeepSpeed's engines themselves; a job of tests/kits/process_worker.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmrl.config import RunConfig, load_config
from mmrl.distributed.engines import TrainEngine, accelerator_options, build_train_engine
from mmrl.distributed.world import World
from mmrl.errors import NonFiniteError
from mmrl.policy.loading import load_policy
from mmrl.policy.pack import PackItem, pack
from mmrl.policy.policy import Policy
from mmrl.training.optim import build_optimizer
from tests.kits.engine_kit import Album, picture, sample_with
from tests.kits.process_worker import forget_plugin

__all__ = [
    "ALONE",
    "BF16",
    "KINDS",
    "SIZES",
    "alone",
    "exercise",
    "forget_plugin",
    "items_of",
    "policy_of",
]

KINDS = {
    "zero2": ["engine.train=deepspeed_zero2"],
    "zero2_offload": ["engine.train=deepspeed_zero2", "engine.deepspeed.offload=optimizer"],
    "zero3": ["engine.train=deepspeed_zero3"],
    # tiny weights count as too small to be sharded, unless told otherwise
    "zero3_sharded": [
        "engine.train=deepspeed_zero3",
        "engine.deepspeed.persist_below=0",
        "engine.deepspeed.max_live=0",
    ],
    "zero3_offload": [
        "engine.train=deepspeed_zero3",
        "engine.deepspeed.persist_below=0",
        "engine.deepspeed.offload=optimizer",
    ],
    "zero3_offload_all": [
        "engine.train=deepspeed_zero3",
        "engine.deepspeed.persist_below=0",
        "engine.deepspeed.offload=all",
    ],
}
# a base in bf16, adapters in fp32, autocast
BF16 = ["model.dtype=bf16", "model.lora={r: 4, alpha: 8}"]
ALONE = {
    **KINDS,
    "zero2_bf16": [*KINDS["zero2"], *BF16],
    "zero3_sharded_bf16": [*KINDS["zero3_sharded"], *BF16],
}
SIZES = (2, 9, 3, 17)  # tokens of each item's completion; processes take turns


def policy_of(config: RunConfig) -> Policy:
    """A policy that computes logits four tokens at a time."""
    policy = load_policy(config.model.model_copy(update={"gradient_checkpointing": True}))
    policy._logits_chunk = 4 * policy.base.lm_head.weight.shape[0]
    return policy


def items_of(policy: Policy) -> list[PackItem]:
    """Prompts with and without pictures, each with one completion."""
    samples = [sample_with([picture((56, 56))] * (i % 2), number=i) for i in range(len(SIZES))]
    return [
        PackItem(policy.encoder(sample, Album()), (tuple(range(5 + i, 5 + i + size)),))
        for i, (sample, size) in enumerate(zip(samples, SIZES, strict=True))
    ]


def add(engine: TrainEngine, policy: Policy, items: list[PackItem], factor: float = 1.0) -> None:
    """Forward and backward of a loss that weighs each token by its number; a pass without gradients comes between."""

    def forward(item: PackItem) -> tuple[torch.Tensor, ...]:
        batch = pack([item])
        found = policy.logp(batch)
        return found.logp_N, batch.target_N % 3 - 0.5

    for number, item in enumerate(items, 1):
        with torch.no_grad():
            engine.run(lambda: forward(item))  # noqa: B023
        logp_N, weight_N = engine.run(lambda: forward(item))  # noqa: B023
        engine.backward(-(logp_N * weight_N).sum() * factor, last=number == len(items))


def whole(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Copies of all weights."""
    return {name: tensor.clone() for name, tensor in engine.parameters(trainable=False)}


def exercise(engine: TrainEngine, policy: Policy, items: list[PackItem]) -> dict[str, Any]:
    """Two updates on this process's `items`, one of nothing, and one that is not finite."""
    total, told = float(sum(SIZES)), []
    state = engine.optimizer_state()
    found: dict[str, Any] = {
        "fresh": state and len(state["state"]),
        "steps": [],
        "before": whole(engine),
    }
    for update in range(2):
        engine.begin(total)
        add(engine, policy, items)
        found["steps"].append(engine.step(total, update, 3, str))
    found["weights"] = whole(engine)
    found["trained"] = [name for name, _ in engine.parameters(trainable=True)]
    found["state"] = engine.optimizer_state()
    engine.begin(0.0)
    add(engine, policy, items, 0.0)
    found["nothing"] = engine.step(0.0, 3, 3, str)
    engine.begin(total)
    try:
        add(engine, policy, items, float("inf"))
        engine.step(total, 3, 3, lambda norm: told.append(norm) or "the norm")  # type: ignore[func-returns-value]
    except NonFiniteError as error:
        found["error"] = (str(error), told)
    found["after"] = whole(engine)
    return found


def alone(path: str, out: str) -> None:
    """`exercise` for every kind of ALONE; OUT/KIND-RANK.pt holds what was found."""
    for kind, overrides in ALONE.items():
        config = load_config(path, overrides)
        world = World(torch.device("cpu"), **accelerator_options(config))
        policy = policy_of(config)
        engine = build_train_engine(
            config, world, policy, build_optimizer(policy.trainable(), config.optim)
        )
        torch.save(
            exercise(engine, policy, items_of(policy)[world.rank :: world.size]),
            Path(out) / f"{kind}-{world.rank}.pt",
        )
        forget_plugin()
