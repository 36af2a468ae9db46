"""Small operations of a layer in one kernel each, on a GPU (`model.fused_layers`): RMSNorm, SiLU times gate, a LoRA adapter's sum.

Written one by one, each of them reads and writes its activations several times (what that costs: docs/results.md, On a GPU).
RMSNorm and SiLU times gate are compiled (TorchInductor); the adapter's product B (A x) is added where the base product lies,
inside the matrix product (alpha and beta of GEMM), in the place of three operations. Formulas are those of transformers and peft;
what they round in between is rounded once here.

A class of transformers is replaced only where its own code is the formula, and no module but the one that is called changes: names
of weights, hooks and checkpoints stay. On a CPU the same classes compute without a compiler, for tests.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, silu

__all__ = ["fusable", "fuse_layers"]

# bodies of `forward`, without blanks, comments and types
_RMS_NORM = (
    "input_dtype=hidden_states.dtype|hidden_states=hidden_states.to(torch.float32)|"
    "variance=hidden_states.pow(2).mean(-1,keepdim=True)|"
    "hidden_states=hidden_states*torch.rsqrt(variance+self.variance_epsilon)|"
    "returnself.weight*hidden_states.to(input_dtype)"
)
_GATED = "down_proj=self.down_proj(self.act_fn(self.gate_proj(x))*self.up_proj(x))|returndown_proj"
_VARIANTS = 64  # of a compiled function: types, widths, with and without gradients


def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Zhang and Sennrich 2019; computed in fp32."""
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(hidden.dtype)


def _silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU (Shazeer 2020) before its last product."""
    return silu(gate) * up


@functools.cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function, dynamic=True, fullgraph=True)


def _run(function: Callable[..., torch.Tensor], first: torch.Tensor, *rest: Any) -> torch.Tensor:
    if first.device.type != "cuda":
        return function(first, *rest)
    limits: dict[str, Any] = {
        "recompile_limit": _VARIANTS,
        "accumulated_recompile_limit": 8 * _VARIANTS,
    }
    with torch._dynamo.config.patch(**limits):
        return _compiled(function)(first, *rest)


def _norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return _run(_rms_norm, hidden_states, self.weight, self.variance_epsilon)


def _gated_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(_run(_silu_times, self.gate_proj(x), self.up_proj(x)))


def _adapted_forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """base(x) + scale B (A x). Anything but one plain adapter goes peft's way."""
    name = self.active_adapters[0] if len(self.active_adapters) == 1 else None
    plain = (
        not args
        and not kwargs
        and not self.disable_adapters
        and not self.merged
        and name in self.lora_A
        and name not in self.lora_variant
        and isinstance(self.lora_dropout[name], nn.Identity)
        and self.lora_A[name].bias is None
        and self.lora_B[name].bias is None
    )
    if not plain:
        return self.plain_forward(x, *args, **kwargs)
    # as rows from the start: what is added to in place must be no view, whose gradient would be copied four times
    rows = x.flatten(0, -2)
    out = self.base_layer(rows)
    down, up = self.lora_A[name], self.lora_B[name].weight
    # autocast keeps its copy of the weight from token to token
    cast = torch.is_autocast_enabled(x.device.type)
    narrow = linear(rows if cast else rows.to(down.weight.dtype), down.weight).to(out.dtype)
    with torch.autocast(out.device.type, enabled=False):
        # in place where the base layer's product is nobody else's: a plain layer keeps its input, not what it returns
        product = torch.Tensor.addmm_ if type(self.base_layer) is nn.Linear else torch.addmm
        summed = product(out, narrow, up.to(out.dtype).t(), alpha=self.scaling[name])
    return summed.view(*x.shape[:-1], summed.shape[-1])


def _body(forward: Any) -> str:
    """The lines of a function without its head, blanks and comments."""
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return ""
    lines = [re.sub(r"\s+", "", line.split("#")[0]) for line in source.splitlines()]
    kept = [line for line in lines if line and not line.startswith("@")]
    return "|".join(kept[1:])


@functools.cache
def _fused(kind: Any) -> Any:
    """A subclass of `kind` that computes the same in fewer kernels; None where it is no class of these."""
    from peft.tuners.lora.layer import Linear as Adapted

    if kind is Adapted:
        forward: Any = _adapted_forward
    else:
        forward = {_RMS_NORM: _norm_forward, _GATED: _gated_forward}.get(_body(kind.forward))
    if forward is None:
        return None
    return type(
        f"Fused{kind.__name__}", (kind,), {"forward": forward, "plain_forward": kind.forward}
    )


def fuse_layers(model: nn.Module) -> int:
    """Give the model's RMSNorms, gated layers with SiLU and LoRA adapters fewer kernels, in place; how many layers there were."""
    count = 0
    for module in model.modules():
        kind = _fewer_kernels(module)
        if kind is None:
            continue
        module.__class__ = kind
        count += 1
    return count


def fusable(layer: nn.Module) -> bool:
    """Whether `fuse_layers` replaces all of a decoder layer's norms and gated layers, whatever adapters it has."""
    small = [
        module
        for module in layer.modules()
        if hasattr(module, "act_fn") or (_weighs(module) and not isinstance(module, nn.Linear))
    ]
    kinds = [_fewer_kernels(module) for module in small]
    return None not in kinds and any(kind.forward is _gated_forward for kind in kinds)


def _weighs(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _fewer_kernels(module: nn.Module) -> Any:
    """The class that takes the place of a module's; None where there is none."""
    own: Any = type(module)  # mypy takes a class with __hash__ for unhashable
    kind = _fused(own)
    if kind is not None and kind.forward is _gated_forward:
        return kind if _is_silu(getattr(module, "act_fn", None)) else None
    return kind


def _is_silu(activation: Any) -> bool:
    from transformers.activations import SiLUActivation

    return isinstance(activation, (nn.SiLU, SiLUActivation))
