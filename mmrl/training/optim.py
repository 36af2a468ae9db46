"""AdamW with the run's learning-rate schedule, and gradients summed over processes and scaled once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mmrl.algorithms import gradient_scale
from mmrl.config import OptimConfig
from mmrl.errors import NonFiniteError
from mmrl.training.optim_states import (
    adamw_8bit,
    has_8bit_moments,
    quantize_moments,
    whole_precision,
)

__all__ = [
    "adamw_state",
    "build_optimizer",
    "build_policy_optimizer",
    "learning_rate",
    "load_adamw",
    "reduce_and_scale",
    "set_learning_rate",
    "take_step",
]


def build_optimizer(
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    config: OptimConfig,
    device: torch.device | None = None,
) -> torch.optim.Optimizer:
    """AdamW; biases, norms and other vectors are not decayed. torch's fused kernel (optim.fused) needs no copies of its own: the
    other one holds the square roots of all second moments while it steps. `device`: where parameters will be, if not where they
    are. Raises MissingExtraError (optim.states)."""
    decay = [p for _, p in parameters if p.ndim > 1]
    plain = [p for _, p in parameters if p.ndim <= 1]
    groups = [
        {"params": decay, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if config.states == "int8":
        return adamw_8bit(groups, config)
    on_gpu = any((device or p.device).type == "cuda" for _, p in parameters)
    fused = on_gpu if config.fused is None else config.fused
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        # None leaves the choice among the other kernels to torch
        fused=fused or None,
    )


def load_adamw(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Continue from the state of an AdamW that may have used another kernel, or moments of other bits: this one's stay."""
    # before loading: by the groups' kernels torch decides on which device each `step` has to be
    mine = ("fused", "foreach", "lr") if has_8bit_moments(optimizer) else ("fused", "foreach")
    groups = [
        {**ours, **saved, **{name: ours[name] for name in mine if name in ours}}
        for saved, ours in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": groups})
    if has_8bit_moments(optimizer):
        quantize_moments(optimizer)


def adamw_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state_dict() in the canonical form (mmrl/distributed/engines/base.py): moments in fp32, sharded where they are."""
    found = optimizer.state_dict()
    if not has_8bit_moments(optimizer):
        return found
    return {
        "state": {
            number: {name: whole_precision(value) for name, value in entries.items()}
            for number, entries in found["state"].items()
        },
        "param_groups": [{**group, "lr": float(group["lr"])} for group in found["param_groups"]],
    }


def build_policy_optimizer(
    policy: Any, config: OptimConfig, head_lr: float | None = None
) -> torch.optim.Optimizer:
    """That of what `policy` trains (mmrl.distributed.engines.base.Trained). Where `head_lr` is given its heads (a critic's) learn
    at that rate, which follows the schedule of the others, and are not decayed."""
    optimizer = build_optimizer(policy.trainable(), config, policy.device)
    mine = {id(p) for head in policy.heads.values() for p in head.parameters()}
    if mine and head_lr is not None:
        moved = [p for g in optimizer.param_groups for p in g["params"] if id(p) in mine]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in mine]
        optimizer.add_param_group(
            {"params": moved, "weight_decay": 0.0, "lr_scale": head_lr / config.lr}
        )
    return optimizer


def learning_rate(config: OptimConfig, update: int, total_updates: int) -> float:
    """Learning rate of update number `update` (from 0): linear warm-up, then constant, cosine or linear decay."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    span = max(1, total_updates - config.warmup_steps)
    done = min(1.0, (update - config.warmup_steps) / span)
    if config.schedule == "constant":
        return config.lr
    shape = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` in every parameter group, times the group's own factor `lr_scale` where it has one."""
    for group in optimizer.param_groups:
        rate = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            # what its compiled step reads
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def reduce_and_scale(
    parameters: Sequence[tuple[str, torch.nn.Parameter]], denominator: float, world_size: int = 1
) -> None:
    """Sum gradients over processes and divide them by the denominator really seen (tokens or sequences, all ranks).

    A parameter that no local micro-batch touched (the vision tower in a text-only batch) counts as zero. A denominator
    of 0 (nothing in the loss) leaves zero gradients.
    """
    gradients = []
    for _, parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    if world_size > 1:
        for bucket in _buckets(gradients):
            flat = torch.cat([g.flatten() for g in bucket])
            torch.distributed.all_reduce(flat)
            for gradient, piece in zip(
                bucket, flat.split([g.numel() for g in bucket]), strict=True
            ):
                gradient.copy_(piece.view_as(gradient))
    for gradient in gradients:
        gradient.mul_(gradient_scale(denominator))


def _buckets(tensors: Sequence[torch.Tensor], limit: int = 1 << 24) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.numel() > limit or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def take_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    config: OptimConfig,
    denominator: float,
    update: int,
    total_updates: int,
    failure: Callable[[float], str],
    *,
    world_size: int = 1,
) -> tuple[float, float]:
    """Scale the gradients summed so far (see `reduce_and_scale`), clip them, and take optimizer step number `update` (from 0) at
    its learning rate; returns (gradient norm before clipping, learning rate). Gradients are given back: what comes next, rollouts,
    needs their memory.

    Without anything in the loss (denominator 0) the weights stay: AdamW would still move them by its momentum. Raises
    NonFiniteError with the text of `failure(norm)`.
    """
    reduce_and_scale(parameters, denominator, world_size)
    norm = torch.nn.utils.clip_grad_norm_([p for _, p in parameters], config.max_grad_norm)
    if hasattr(norm, "full_tensor"):  # of sharded gradients: the same number on every process
        norm = norm.full_tensor()
    if not torch.isfinite(norm):
        raise NonFiniteError(failure(float(norm)))
    rate = learning_rate(config, update, total_updates)
    set_learning_rate(optimizer, rate)
    if denominator > 0:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm), rate
