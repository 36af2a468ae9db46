"""Batch invariance on the CPU: a row of a matrix product has the same bits whatever stands beside it.

A rollout's log-probs would otherwise depend on which requests happened to be answered together, and a pipelined, resumed or
served run would not equal the serial one bit for bit. Intel's MKL keeps to that where it is asked to (MKL_CBWR, see mmrl/__init__)
and on Intel's processors only: on AMD's it takes other kernels for one row and for two or three than for four and more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import nn

__all__ = [
    "BatchInvariantDecodeLinear",
    "BatchInvariantLinear",
    "DecodeLinear",
    "decoding",
    "make_batch_invariant",
    "needs_batch_invariance",
]

_LEAST = 4
_LARGE = (
    1 << 21
)  # numbers of a weight that does not stay in the processor's cache from one token to the next
_here = threading.local()


@contextlib.contextmanager
def decoding() -> Iterator[None]:
    """What this thread multiplies is one token of each row: large weights go by oneDNN (see DecodeLinear)."""
    before, _here.decoding = getattr(_here, "decoding", False), True
    try:
        yield
    finally:
        _here.decoding = before


class DecodeLinear(nn.Linear):
    """A large fp32 layer that multiplies by oneDNN while this thread is `decoding`.

    MKL packs the weight for every product, which for a few rows takes longer than to multiply: 8 rows took 1.8 times and 16 rows
    1.6 times oneDNN's time. A row's numbers are the same beside one other or a hundred; alone it is multiplied beside zeros.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        whole = input.dtype == self.weight.dtype == torch.float32
        if not getattr(_here, "decoding", False) or not whole:
            return super().forward(input)
        flat = input.reshape(-1, input.shape[-1])
        rows = torch.cat([flat, torch.zeros_like(flat)]) if len(flat) == 1 else flat
        found = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return found[: len(flat)].reshape(*input.shape[:-1], self.out_features)


def _onednn_is_invariant() -> bool:
    """Whether oneDNN is there and gives a row the same numbers beside one other as beside many."""
    if not torch.backends.mkldnn.is_available():
        return False
    drawn = torch.Generator().manual_seed(0)
    layer = DecodeLinear(2048, 256, bias=False)
    rows = torch.randn(33, 2048, generator=drawn)
    with torch.no_grad(), decoding():
        layer.weight.normal_(generator=drawn)
        whole = layer(rows)
        return all(torch.equal(layer(rows[:n].clone()), whole[:n]) for n in (1, 2, 3, 8, 16, 32))


class BatchInvariantLinear(nn.Linear):
    """A linear layer that computes fewer than four rows as four, so that MKL takes the kernel of all larger products."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // max(1, input.shape[-1])
        if not 0 < rows < _LEAST:
            return super().forward(input)
        flat = input.reshape(rows, -1)
        padded = torch.cat([flat, flat.new_zeros(_LEAST - rows, flat.shape[1])])
        return super().forward(padded)[:rows].reshape(*input.shape[:-1], self.out_features)


class BatchInvariantDecodeLinear(DecodeLinear, BatchInvariantLinear):
    """A large layer on a CPU that needs padding: by oneDNN while decoding, else as BatchInvariantLinear."""


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
    """Make the model's linear layers batch-invariant, in place, on a CPU that needs it, and on every CPU the large ones fast for a
    few rows, where oneDNN is. On other devices nothing changes."""
    if device.type != "cpu":
        return
    layers = [m for m in model.modules() if type(m) is nn.Linear]
    needed = needs_batch_invariance()
    by_onednn = any(m.weight.numel() >= _LARGE for m in layers) and _onednn_is_invariant()
    for module in layers:
        if by_onednn and module.weight.numel() >= _LARGE:
            module.__class__ = BatchInvariantDecodeLinear if needed else DecodeLinear
        elif needed:
            module.__class__ = BatchInvariantLinear
