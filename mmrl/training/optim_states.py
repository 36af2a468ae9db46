"""AdamW whose moments have 8 bits (optim.states int8), and their way into checkpoints and back.

Dettmers et al. 2022 (8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861): each moment is stored as one byte of a
dynamic map per number and one scale per block of 256, and computed with in fp32. The optimizer is torchao's, which also knows
FSDP2's shards; like bitsandbytes it leaves tensors of fewer than 4,096 numbers in fp32, and those that 256 does not divide. It
takes no block's scale below 1e-12: where all gradients of a block are below about 1e-6, levels are lost, and steps become longer.

Checkpoints hold moments in fp32, as any other engine writes and reads them. From there the same bytes are found again, so that a
resumed run equals the uninterrupted one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from mmrl.config import OptimConfig
from mmrl.errors import MissingExtraError, install_command

__all__ = ["adamw_8bit", "has_8bit_moments", "quantize_moments", "whole_precision"]

_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Name -> whether it has a sign."""


def adamw_8bit(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over these parameter groups. Raises MissingExtraError."""
    # it says of each of its kernels for other GPUs that it cannot be loaded
    logging.getLogger("torchao").setLevel(logging.ERROR)
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise MissingExtraError(
            f"optim.states int8 needs torchao, whose import fails with {type(error).__name__}: {error}; "
            f"{install_command('int8')}, or set optim.states: fp32"
        ) from error

    class Optimizer(AdamW8bit):
        """It compiles its step, which pays on a GPU; on a CPU a compiler may not be there."""

        def step(self, closure: Callable[[], float] | None = None) -> Any:
            first = next(p for group in self.param_groups for p in group["params"])
            on_gpu = first.device.type == "cuda"
            with nullcontext() if on_gpu else torch.compiler.set_stance("force_eager"):
                return super().step(closure)

    return cast(
        torch.optim.Optimizer,
        Optimizer(groups, lr=config.lr, betas=config.betas, eps=config.eps),
    )


def has_8bit_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` is one of `adamw_8bit`."""
    return hasattr(optimizer, "_subclass_zeros")


def whole_precision(value: Any) -> Any:
    """A moment in fp32, sharded as it was; anything else as it is."""
    local = value.to_local() if isinstance(value, DTensor) else value
    if not hasattr(local, "codes"):
        return value
    local = local.dequantize()
    if not isinstance(value, DTensor):
        return local
    return DTensor.from_local(
        local,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


@torch.no_grad()
def quantize_moments(optimizer: Any) -> None:
    """Give moments that were loaded in fp32 the form that `optimizer` keeps them in."""
    for parameter, entries in optimizer.state.items():
        for name, signed in _MOMENTS.items():
            # its own rule of which tensors have 8 bits
            kept, loaded = optimizer._new_buffer(parameter, signed), entries[name]
            here, there = (t.to_local() if isinstance(t, DTensor) else t for t in (kept, loaded))
            here.copy_(there)
            if signed and hasattr(here, "codes"):
                _restore_scales(here, there)
            entries[name] = kept


def _restore_scales(moment: Any, values: torch.Tensor) -> None:
    """Find the bytes that `values` were dequantized from, where they were.

    A block's scale is its largest size, which the map holds as 1 and as about -0.993: dequantized, a block whose largest size is
    negative has shrunk, and its own largest size is no longer the scale. Division rounds, so neighbours are tried as well.
    """
    from torchao.optim.quant_utils import quantize_8bit_with_qmap

    blocks = values.reshape(-1, moment.block_size)
    codes = moment.codes.view_as(blocks)
    scale = blocks.abs().amax(-1) / -moment.qmap[0]
    up, down = (torch.full_like(scale, end) for end in (torch.inf, -torch.inf))
    for tried in (scale, scale.nextafter(up), scale.nextafter(down)):
        other = (moment.qmap[codes.int()] * moment.scale[:, None] != blocks).any(-1)
        divisor = tried[:, None].clip(1e-12)
        found = quantize_8bit_with_qmap(blocks / divisor, moment.qmap)
        exact = other & (moment.qmap[found.int()] * tried[:, None] == blocks).all(-1)
        codes[exact] = found[exact]
        moment.scale[exact] = tried[exact]
