"""A frozen base in 4 bits under a LoRA adapter: QLoRA (Dettmers et al. 2023, arXiv 2305.14314; model.lora.quantize nf4).

The linear layers of the language model keep their weight as one of the 16 levels of NF4 per number, with a scale per 64 of them
that is itself quantized (bitsandbytes' kernels): 4.13 bits each. Every product dequantizes the weight into the forward's type,
again in backward, so that nothing of full size is kept. bitsandbytes' own layer takes other kernels for one row, and on some CPUs
packs the weight anew for inference; here rollout and training compute the same function.

What is trained is the adapter over the dequantized weight, and that sum is what a checkpoint's merged model holds.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from mmrl.errors import ConfigError, MissingExtraError, install_command
from mmrl.policy.families import family_of

__all__ = ["BYTES_PER_NUMBER", "NF4Linear", "quantize_language", "whole_weight"]

_BLOCK = 64
_LEAST_ROWS = 4
BYTES_PER_NUMBER = 0.5 + 1 / _BLOCK + 4 / (_BLOCK * 256)
"""Codes, their scales, and the scales of those."""


def _bitsandbytes() -> Any:
    # it asks for kernels of its own layer, which is not used here
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import bitsandbytes
    except ImportError as error:
        raise MissingExtraError(
            f"model.lora.quantize nf4 needs bitsandbytes, whose import fails with {type(error).__name__}: {error}; "
            f"{install_command('nf4')}, or set model.lora.quantize: null"
        ) from error
    return bitsandbytes.functional


class _Product(torch.autograd.Function):
    """x W^T with a weight that is there only while it is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: NF4Linear) -> torch.Tensor:
        """x (..., in) -> (..., out), in the type of x."""
        ctx.layer = layer
        return nn.functional.linear(x, layer.dequantized(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        """Of x alone: the weight is frozen."""
        (gradient,) = gradients
        return gradient @ ctx.layer.dequantized(gradient.dtype), None


class NF4Linear(nn.Linear):
    """A linear layer whose `weight` are codes, two in a byte; see the module. `dtype`: of the weight that was quantized."""

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.dtype = layer.weight.dtype
        codes, self._state = _bitsandbytes().quantize_4bit(
            layer.weight.detach().to(device).contiguous(),
            blocksize=_BLOCK,
            compress_statistics=True,
            quant_type="nf4",
        )
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias = layer.bias

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight (out, in)."""
        found: torch.Tensor = _bitsandbytes().dequantize_4bit(self.weight.data, self._state)
        return found.to(dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input (..., in) -> (..., out), under autocast in its type."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        rows = input.reshape(-1, self.in_features).to(dtype)
        count = len(rows)
        # see mmrl/policy/batch_invariance.py
        if kind == "cpu" and 0 < count < _LEAST_ROWS:
            rows = torch.cat([rows, rows.new_zeros(_LEAST_ROWS - count, self.in_features)])
        with torch.autocast(kind, enabled=False):
            found: torch.Tensor = _Product.apply(rows, self)[:count]
            if self.bias is not None:
                found = found + self.bias.to(dtype)
        return found.reshape(*input.shape[:-1], self.out_features)


def quantize_language(model: Any, device: torch.device) -> None:
    """Quantize the linear layers of the language model's blocks in place, one after the other, on `device`: it never holds the
    model whole.

    Raises MissingExtraError, and ConfigError for a model whose weights are mostly in other layers (a mixture's experts)."""
    family = family_of(model.config)
    blocks = list(family.parts.decoder_layers(family.body(model)))
    linear = {id(m.weight) for block in blocks for m in block.modules() if type(m) is nn.Linear}
    sizes = {id(p): p.numel() for block in blocks for p in block.parameters()}
    share = sum(size for key, size in sizes.items() if key in linear) / sum(sizes.values())
    if share < 0.5:
        raise ConfigError(
            f"model.lora.quantize nf4 quantizes linear layers, found {share:.0%} of the blocks' weights in them (experts are "
            "stored together in another kind of layer); set model.lora.quantize: null"
        )
    for block in blocks:
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if type(layer) is nn.Linear:
                    setattr(parent, name, NF4Linear(layer, device))


def whole_weight(layer: nn.Module) -> torch.Tensor:
    """The weight of a linear layer as it is multiplied, dequantized where it is quantized, in the type it was loaded in."""
    if isinstance(layer, NF4Linear):
        return layer.dequantized(layer.dtype)
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()
