"""Whether two sides hold the same weights, to the last bit: a sum per block that knows nothing of layout, order and device.

    ours, theirs = WeightDigest(torch.bfloat16), HeldWeights(vllm_model, torch.bfloat16)
    ours.add("model.visual.merger.ln_q.weight", tensor)              # ... of every tensor
    differing(ours.result(), theirs.result())                        # [] or the names of the blocks

A block's number is the sum modulo 2^64 of a mixing function of each element's bits (the multiplications and shifts of splitmix64,
Steele et al. 2014) with zero for zero. q, k and v therefore count alike as three tensors and as one that fuses them, with or
without rows of padding; an exchange of elements within a block goes unnoticed (mmrl/rollout/probe.py sees such gross errors).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch

__all__ = ["PIECE_ON_GPU", "HeldWeights", "WeightDigest", "block_of", "differing"]

_FACTORS = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64)  # as signed numbers
PIECE_ON_GPU = 1 << 24
"""Numbers that are mixed at a time on a GPU, as two tensors of int64."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


def block_of(name: str) -> str:
    """The module two levels above a weight inside a decoder layer or vision block, else the weight's own."""
    found = re.match(r"((?:.*\.)?(?:layers?|blocks)\.\d+\.[^.]+)\.", name)
    return found.group(1) if found else name.rsplit(".", 1)[0]


def _short(name: str) -> str:
    """Without the prefixes that a checkpoint and vLLM have in another order."""
    return re.sub(r"^(?:(?:model|language_model)\.)+", "", name)


def differing(ours: dict[str, int], theirs: dict[str, int]) -> list[str]:
    """Blocks of two results that are not the same. Names that one side alone has are other ones for the same weights where their
    sums are equal; so are all where the sums of all are."""
    wrong = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    alone = ours.keys() ^ theirs.keys()
    if alone and _total(ours) == _total(theirs):
        return []
    if _total(ours, alone) != _total(theirs, alone):
        wrong |= alone
    return sorted(wrong)


def _total(sums: dict[str, int], names: Collection[str] | None = None) -> int:
    """Of these blocks; None: of all."""
    return sum(n for name, n in sums.items() if names is None or name in names) % 2**64


class WeightDigest:
    """Digests of tensors as they are in `dtype`, summed up by block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._sums: dict[str, list[torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's own number, on its device (int64, without dimension)."""
        bits_N = (
            tensor.detach().to(self.dtype).contiguous().view(_BITS[self.dtype.itemsize]).flatten()
        )
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for piece_n in bits_N.split(1 << 16 if tensor.device.type == "cpu" else PIECE_ON_GPU):
            mixed_n = piece_n.to(torch.int64)
            for factor, shift in zip(_FACTORS, (30, 27), strict=True):
                mixed_n = mixed_n.mul(factor)
                mixed_n = mixed_n.bitwise_xor_(mixed_n >> shift)
            total += mixed_n.sum()
        return total

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Count a tensor under its name in a checkpoint or in vLLM."""
        self.count(name, self.of(tensor))

    def count(self, name: str, number: torch.Tensor) -> None:
        """Count a tensor of which only its own number is left."""
        self._sums.setdefault(block_of(_short(name)), []).append(number)

    def result(self) -> dict[str, int]:
        """The number of each block."""
        return {
            block: sum(int(n) for n in numbers) % 2**64 for block, numbers in self._sums.items()
        }


class HeldWeights:
    """Digests of what a vLLM model computes with. To be made before the weights come.

    On a CPU vLLM packs the matrices of linear layers and of the output layer, and may drop the originals: their digests are taken
    just before. A matrix that is kept as well must still be the one that was packed, else it counts as nothing.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        self._packed: dict[int, dict[str, torch.Tensor]] = {}  # by layer
        self._packing = {id(module) for module in model.modules() if self._watch(module)}

    def _watch(self, layer: Any) -> bool:
        """Take digests of a layer's weights before they are packed; whether this layer packs any."""
        method: Any = getattr(layer, "quant_method", None)
        pack = getattr(method, "process_weights_after_loading", None)
        if pack is None:
            return False

        def watched(layer: Any) -> Any:
            digest = WeightDigest(self._dtype)
            self._packed[id(layer)] = {
                name: digest.of(p) for name, p in layer.named_parameters(recurse=False)
            }
            return pack(layer)

        method.process_weights_after_loading = watched
        return True

    def result(self) -> dict[str, int]:
        """See WeightDigest.result. A tensor with names in two blocks counts in each (tied embeddings), one with several names in a
        block once (a router, which vLLM's experts know, too)."""
        digest, zero = WeightDigest(self._dtype), torch.zeros((), dtype=torch.int64)
        counted: set[tuple[str, int]] = set()
        for path, module in self._model.named_modules(remove_duplicate=False):
            packed = self._packed.get(id(module), {})
            for name, parameter in module.named_parameters(recurse=False):
                place = (block_of(_short(f"{path}.{name}")), id(parameter))
                if place in counted:
                    continue
                counted.add(place)
                number = digest.of(parameter)
                if id(module) in self._packing:
                    was = packed.get(name, zero)
                    number = was if not parameter.numel() or int(was) == int(number) else zero
                digest.count(f"{path}.{name}", number)
        return digest.result()
