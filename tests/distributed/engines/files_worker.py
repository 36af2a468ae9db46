"""What two processes find when weights wait in their files to be shared out; a job of tests/kits/process_worker.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from mmrl.config import ModelConfig, RunConfig
from mmrl.distributed.engines import (
    accelerator_options,
    build_actor,
    build_train_engine,
    deepspeed,
    held_back,
)
from mmrl.distributed.world import World
from mmrl.errors import CheckpointError
from mmrl.policy.loading import load_policy
from mmrl.training.optim import build_optimizer
from tests.kits.process_worker import forget_plugin

__all__ = ["in_files"]


def _config(kind: str, settings: ModelConfig) -> RunConfig:
    engine: dict[str, Any] = {"train": kind}
    if kind == "deepspeed_zero3":  # tiny weights count as too small to be sharded
        engine["deepspeed"] = {"persist_below": 0, "max_live": 0}
    return RunConfig.model_validate({"engine": engine}).model_copy(update={"model": settings})


def _started(
    world: World, kind: str, folder: str, *, whole: bool, **model: Any
) -> tuple[Any, Any, Any]:
    """Policy, what samples, and engine of a run that begins; with `whole` each process reads all weights first."""
    settings = ModelConfig(path=folder, device="cpu", **model)
    config = _config(kind, settings)
    hold = None if whole else held_back(config, world.size)
    policy = load_policy(settings, needs_reference=settings.lora is None, hold=hold)
    optimizer = build_optimizer(policy.trainable(), config.optim)
    actor = build_actor(config, world, policy)
    return policy, actor, build_train_engine(config, world, policy, optimizer)


def _numbers(policy: Any, actor: Any) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of this process's shards, reference and copy."""
    found = {}
    models = {"policy": policy.model, "reference": policy.reference_model, "actor": actor.model}
    for kind, model in models.items():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()) if model else ():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            # of DeepSpeed, which marks buffers, too
            local = tensor.ds_tensor if hasattr(tensor, "ds_tensor") else local
            found[f"{kind} {name}"] = local.detach().clone()
    return found


def _maps(folder: str) -> bool:
    """Whether this process has a file of weights in its address space."""
    return f"{folder}/model.safetensors" in Path("/proc/self/maps").read_text(encoding="utf-8")


@contextmanager
def _watched() -> Iterator[list[tuple[bool, int]]]:
    """Whenever ZeRO-3 needs a parameter: whether this process reads it, and how many of those before are still whole."""
    before: list[Any] = []
    seen: list[tuple[bool, int]] = []
    fill = deepspeed._Waiting._fill

    def watched(waiting: Any, name: str, parameter: Any, *, read_it: bool) -> None:
        seen.append((read_it, sum(p.ds_status.name == "AVAILABLE" for p in before)))
        fill(waiting, name, parameter, read_it=read_it)
        before.append(parameter)

    with patch.object(deepspeed._Waiting, "_fill", watched):
        yield seen


def in_files(kind: str, half: str, mixed: str, damaged: str) -> dict[str, Any]:
    """A start that reads shares of the files beside one that reads all: what differs, bit by bit; the bytes that parameters hold
    while they wait, whether the file is mapped then, and whether it still is when they have been shared out. And what is said of a
    file with NaN in the other process's rows, and how many parameters ZeRO-3 holds whole while it reads another."""
    config = _config(kind, ModelConfig(path=half))
    world = World(torch.device("cpu"), **accelerator_options(config))
    found: dict[str, Any] = {"apart": [], "held": {}, "mapped": {}, "read": []}
    frozen = {"dtype": "bf16", "freeze": ["vision", "projector"]}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "fp32": (half, {}),
        "bf16": (half, frozen),
        "lora": (half, {"dtype": "bf16", "lora": {"r": 4, "alpha": 8}}),
        # what such a run saved: trained weights in fp32, the tower in bf16
        "resumed": (mixed, frozen),
    }
    for case, (folder, model) in cases.items():
        kept = []
        for whole in (True, False):
            policy, actor, engine = _started(world, kind, folder, whole=whole, **model)
            engine.gather_into(actor)
            kept.append(_numbers(policy, actor))
            del policy, actor, engine
            gc.collect()
        assert kept[0].keys() == kept[1].keys()
        found["apart"] += [
            name
            for name, tensor in kept[0].items()
            if tensor.dtype != kept[1][name].dtype or not torch.equal(tensor, kept[1][name])
        ]
        settings = ModelConfig(path=folder, device="cpu", **model)
        config = _config(kind, settings)
        policy = load_policy(settings, hold=held_back(config, world.size))
        language = policy.base.model.language_model
        held = sum(
            p.untyped_storage().nbytes() for n, p in language.named_parameters() if "lora_" not in n
        )
        before = _maps(folder)
        optimizer = build_optimizer(policy.trainable(), config.optim)
        with _watched() as seen:
            engine = build_train_engine(config, world, policy, optimizer)
        found["read"] += seen
        gc.collect()
        found["held"][case] = held / sum(1 for _ in language.parameters())
        found["mapped"][case] = [before, _maps(folder)]
        del policy, engine, optimizer, language
        gc.collect()
    try:
        _started(world, kind, damaged, whole=False)
    except CheckpointError as error:
        found["said"] = str(error)
    if kind != "fsdp2":
        forget_plugin()
    return found
