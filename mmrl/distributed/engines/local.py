"""One process, or several with full replicas of the model (DDP): gradients are summed and reduced once per optimizer step.

torch's DistributedDataParallel reduces in buckets during the last backward and averages. Here processes have different numbers of
micro-batches, and nobody may wait for a backward that never comes: as under its `no_sync`, gradients add up locally and are then
reduced in buckets, once (mmrl.training.optim).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mmrl.config import OptimConfig
from mmrl.distributed.engines.base import Trained, TrainEngine, head_parameters
from mmrl.distributed.world import World
from mmrl.training.optim import adamw_state, load_adamw, take_step

__all__ = ["LocalEngine"]


class LocalEngine(TrainEngine):
    """`optimizer` holds the trained parameters of `policy`. `lockstep`: processes compute rows together."""

    def __init__(
        self,
        config: OptimConfig,
        world: World,
        policy: Trained,
        optimizer: torch.optim.Optimizer,
        *,
        lockstep: bool = False,
    ) -> None:
        self.config, self.world, self.policy, self.optimizer = config, world, policy, optimizer
        self.lockstep = lockstep
        self._trained = policy.trainable()
        heads = {id(p) for p in head_parameters(policy)}
        self._heads = [(name, p) for name, p in self._trained if id(p) in heads]

    def begin(self, denominator: float | None = None) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def run(self, forward: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        return forward()

    def backward(self, loss: torch.Tensor, *, last: bool = False) -> None:
        loss.backward()

    def step(
        self,
        denominator: float,
        update: int,
        total_updates: int,
        failure: Callable[[float], str],
        *,
        heads_only: bool = False,
    ) -> tuple[float, float]:
        return take_step(
            self.optimizer,
            self._heads if heads_only else self._trained,
            self.config,
            denominator,
            update,
            total_updates,
            failure,
            world_size=self.world.size,
        )

    def parameters(self, *, trainable: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.policy.named_parameters():
            if parameter.requires_grad or not trainable:
                yield name, parameter.detach()

    def optimizer_state(self, mine: Callable[[int], bool] | None = None) -> dict[str, Any] | None:
        if mine is None:
            return adamw_state(self.optimizer) if self.world.is_main else None
        found = adamw_state(self.optimizer)
        state = {
            number: {
                name: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                for name, value in entries.items()
            }
            for number, entries in found["state"].items()
            if mine(number)
        }
        return {**found, "state": state}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        # what is mapped from a file must not stay so
        load_adamw(self.optimizer, copy.deepcopy(state))
