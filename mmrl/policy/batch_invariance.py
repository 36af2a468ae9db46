"""Batch invariance on the CPU: a row of a matrix product has the same bits whatever stands beside it.

A rollout's log-probs would otherwise depend on which requests happened to be answered together, and a pipelined, resumed or
served run would not equal the serial one bit for bit. Intel's MKL keeps to that where it is asked to (MKL_CBWR, see mmrl/__init__)
and on Intel's processors only: on AMD's it takes other kernels for one row and for two or three than for four and more.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["BatchInvariantLinear", "make_batch_invariant", "needs_batch_invariance"]

_LEAST = 4


class BatchInvariantLinear(nn.Linear):
    """A linear layer that computes fewer than four rows as four, so that MKL takes the kernel of all larger products."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // max(1, input.shape[-1])
        if not 0 < rows < _LEAST:
            return super().forward(input)
        flat = input.reshape(rows, -1)
        padded = torch.cat([flat, flat.new_zeros(_LEAST - rows, flat.shape[1])])
        return super().forward(padded)[:rows].reshape(*input.shape[:-1], self.out_features)


def needs_batch_invariance() -> bool:
    """Whether this process multiplies one, two or three rows otherwise than four."""
    drawn = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(128, 128, generator=drawn), torch.randn(_LEAST, 128, generator=drawn)
    whole = nn.functional.linear(rows, weight)
    return any(
        not torch.equal(nn.functional.linear(rows[:n].clone(), weight), whole[:n])
        for n in range(1, _LEAST)
    )


def make_batch_invariant(model: nn.Module, device: torch.device) -> None:
    """Make the model's linear layers batch-invariant, in place, on a CPU that needs it; elsewhere nothing changes."""
    if device.type != "cpu" or not needs_batch_invariance():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = BatchInvariantLinear
