"""FSDP2 (torch.distributed.fsdp.fully_shard): parameters, gradients and AdamW's moments are spread over the processes.

    torchrun --nproc_per_node 8 -m mmrl.cli.main train run.yaml engine.train=fsdp2

Each decoder layer and each block of a trained vision tower is a group: gathered before it runs, given back after, gathered again
for its backward; gradients are reduce-scattered after every micro-batch, so that no process ever holds a whole gradient. What is
left (embeddings, norms, output layer, projector, heads) is the root's group and stays in place from forward to backward.

Settings come from accelerate's plugin, which reads what `accelerate launch` or `accelerate config` say (offloading, resharding
after the forward). accelerate.prepare itself is not used: it shards on GPUs and in several processes only and leaves the model
alone elsewhere, where its numbers are to be the same ones; and it makes a group of the output layer that is gathered when that
layer is called, which mmrl does not do (mmrl/distributed/engines/root.py).

fully_shard averages gradients over processes. Losses here are sums, so the division is switched off.

Weights are read when they are shared out: each process reads its own rows of the model's files (mmrl.policy.in_file), so that none
holds the whole model, nor a whole reference, in host memory.

Where the run computes in bf16 (policy.autocast_dtype), weights are gathered in bf16 and gradients reduced in fp32 (FSDP2's
MixedPrecisionPolicy): shards, gradients and moments stay fp32. Autocast over weights gathered in fp32 would keep a bf16 copy of
each until the forward ends, so that every process held the whole model, and would send twice the bytes. Heads, which compute in
fp32, are gathered so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from mmrl.config import RunConfig
from mmrl.distributed.engines.base import Trained, TrainEngine, head_parameters
from mmrl.distributed.engines.root import Root
from mmrl.distributed.world import World
from mmrl.policy.finite import non_finite, refuse_loaded
from mmrl.policy.in_file import InFile, in_file
from mmrl.training.optim import adamw_state, load_adamw, take_step

__all__ = ["FSDPEngine"]


class FSDPEngine(TrainEngine):
    """Shards policy.model with the heads, and the frozen copy for a KL term, in place; `optimizer` goes on with the shards.

    After this, the policy's parameters are DTensors outside of `run`: nothing else may call its modules.
    """

    sharded = lockstep = True

    def __init__(
        self, config: RunConfig, world: World, policy: Trained, optimizer: torch.optim.Optimizer
    ) -> None:
        self.config, self.world, self.policy, self.optimizer = (
            config.optim,
            world,
            policy,
            optimizer,
        )
        if not torch.distributed.is_initialized():  # one process
            store = torch.distributed.HashStore()  # type: ignore[attr-defined]
            backend = "nccl" if policy.device.type == "cuda" else "gloo"
            torch.distributed.init_process_group(backend, rank=0, world_size=1, store=store)
        mesh = init_device_mesh(policy.device.type, (world.size,))
        whole = dict(policy.named_parameters())
        waiting = _Waiting(policy.model)
        dtype = policy.autocast_dtype
        root = _shard(Root(policy.model, policy.heads), mesh, dtype)
        self._roots = {id(policy.model): root}
        damaged = waiting.fill(root, mesh)
        if policy.reference_model is not None:
            waiting = _Waiting(policy.reference_model)
            other = _shard(Root(policy.reference_model), mesh, dtype)
            self._roots[id(policy.reference_model)] = other
            damaged += waiting.fill(other, mesh)
        # all processes end, whose ever share it was
        found = sorted(set(world.gather(damaged)))
        if found:
            refuse_loaded([name for name, _ in found], found[0][1])
        shards = dict(policy.named_parameters())
        moved = {whole[name]: shards[name] for name in whole}
        for group in optimizer.param_groups:
            group["params"] = [moved[p] for p in group["params"]]
        self._trained = policy.trainable()
        heads = {id(p) for p in head_parameters(policy)}
        self._heads = [(name, p) for name, p in self._trained if id(p) in heads]
        policy.lockstep = True

    def begin(self, denominator: float | None = None) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def run(self, forward: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        root = self._roots[id(self.policy.model)]
        try:
            # a view may lose its hooks
            return root(lambda: tuple(t.clone() if t._is_view() else t for t in forward()))
        finally:
            if not torch.is_grad_enabled():  # no backward will give back what the root gathered
                for module in root.modules():  # reshard() gives back a module's own group only
                    if isinstance(module, FSDPModule):
                        module.reshard()

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
        )

    def parameters(self, *, trainable: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.policy.named_parameters():
            if parameter.requires_grad or not trainable:
                yield name, _whole(parameter.detach())

    def optimizer_state(self, mine: Callable[[int], bool] | None = None) -> dict[str, Any] | None:
        found = adamw_state(self.optimizer)
        state: dict[int, dict[str, Any]] = {}
        with self.collective_section():
            for number, entries in found["state"].items():
                kept = self.world.is_main if mine is None else mine(number)
                for name, value in entries.items():
                    whole = _whole(value)
                    if kept:
                        state.setdefault(number, {})[name] = _on_host(whole, value)
        return {**found, "state": state} if self.world.is_main or mine is not None else None

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        load_adamw(
            self.optimizer,
            {
                **state,
                "state": {
                    number: {
                        name: _like(value, parameters[number]) for name, value in entries.items()
                    }
                    for number, entries in state["state"].items()
                },
            },
        )


class _Waiting:
    """The weights of a model that wait in their file (mmrl.policy.in_file), which become meta tensors: `fully_shard` splits those
    without numbers, and each process reads what it was given."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._found: dict[str, InFile] = {}
        for name, parameter in model.named_parameters():
            if (found := in_file(parameter)) is not None:
                self._found[name] = found
        made: dict[int, torch.nn.Parameter] = {}
        for module in model.modules() if self._found else ():
            for name, held in module._parameters.items():
                if held is not None and in_file(held) is not None:
                    meta = torch.empty(held.shape, dtype=held.dtype, device="meta")
                    # tied ones stay one
                    made.setdefault(id(held), torch.nn.Parameter(meta, held.requires_grad))
                    module._parameters[name] = made[id(held)]

    @torch.no_grad()
    def fill(self, root: Root, mesh: DeviceMesh) -> list[tuple[str, str]]:
        """Read this process's shards, when `root` has been sharded; (name, file) of those with NaN or infinity."""
        if not self._found:
            return []
        device = torch.device("cpu" if _offloads() else mesh.device_type)
        # FSDP2 looks for its shards again in _apply, as after to_empty
        root._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        parameters = dict(self.model.named_parameters())
        shards = []
        for name, found in self._found.items():
            shard = parameters[name]
            if isinstance(shard, DTensor):
                local = shard.to_local()
                local.copy_(found.rows(mesh.get_local_rank(), mesh.size()))
            else:  # of no part that is shared out
                local = found.tensor.to(device, shard.dtype, copy=True)
                owner, _, leaf = name.rpartition(".")
                made = torch.nn.Parameter(local, shard.requires_grad)
                self.model.get_submodule(owner)._parameters[leaf] = made
            shards.append((name, local))
        sources = {name: found.source for name, found in self._found.items()}
        self._found.clear()
        return [(name, sources[name]) for name in non_finite(shards)]


def _plugin() -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(fsdp_version=2)


def _offloads() -> bool:
    return isinstance(_plugin().cpu_offload, CPUOffloadPolicy)


def _shard(root: Root, mesh: DeviceMesh, dtype: torch.dtype | None) -> Root:
    """`root` sharded, its weights gathered in `dtype` where one is given."""
    settings = _plugin()
    options: dict[str, Any] = {"mesh": mesh}
    if settings.cpu_offload:
        options["offload_policy"] = settings.cpu_offload
    if dtype is not None:
        for head in root.heads.values():
            fully_shard(head, **options)
        # inputs are left as they are: what a block is called with holds more than activations
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for block in root.blocks:
        fully_shard(block, reshard_after_forward=settings.reshard_after_forward, **options)
    fully_shard(root, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a plain sum, which every back end has
    return root


def _whole(value: Any) -> Any:
    """The whole tensor of a shard; anything else as it is. Collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _on_host(whole: Any, value: Any) -> Any:
    """`whole`, gathered from `value`, in host memory that nobody else has: it is written while training goes on."""
    if not isinstance(whole, torch.Tensor):
        return whole
    shard = value.to_local() if isinstance(value, DTensor) else value
    shared = whole.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
    return whole.to("cpu", copy=shared)


def _like(value: Any, parameter: torch.Tensor) -> Any:
    """A tensor of the parameter's shape, sharded as the parameter is; anything else (AdamW's step) as it is."""
    if not (
        isinstance(value, torch.Tensor)
        and isinstance(parameter, DTensor)
        and value.shape == parameter.shape
    ):
        return value
    return distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
