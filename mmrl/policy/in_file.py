"""Weights that stay in their file until a training engine shares them out over processes.

    model = from_pretrained(..., dtype=stored_type(folder))   # safetensors: tensors of a mapped file, nothing is read yet
    leave_in_file(model, torch.float32, folder)               # each parameter: its shape in float32, and where its numbers are
    in_file(parameter).rows(part=3, parts=8)                  # reads an eighth

A process that trains a share of a model needs a share of its numbers. transformers names and converts the weights as for any other
run; where the file's type is asked for and no conversion is needed, its tensors are views of the mapped file, so that a process
reads the pages of its own rows and no others, and what was read is given back with the last of them.

A parameter that waits holds one NaN, shown in the parameter's shape: who computes with it before it is filled will notice.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = [
    "InFile",
    "in_file",
    "is_hollow",
    "leave_in_file",
    "mark_filled",
    "recast",
    "replica_of",
    "stored_type",
]


class InFile(NamedTuple):
    """Where the numbers of a parameter are: `tensor`, in the type of the file, and the name of what it was read from."""

    tensor: torch.Tensor
    source: str

    def rows(self, part: int, parts: int) -> torch.Tensor:
        """Share `part` of `parts` of dimension 0, split as torch.chunk splits (the last shares may be smaller, or empty)."""
        chunks = self.tensor.chunk(parts)
        return chunks[part] if part < len(chunks) else self.tensor[:0]


def _hollow(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((1,) * len(shape), float("nan"), dtype=dtype).expand(shape)


def stored_type(path: str) -> torch.dtype | None:
    """The type to read the weights of a folder or hub name in, so that they stay in their files; None where they cannot.

    It is the one of all, or float32 where most numbers are: a checkpoint holds frozen weights in bf16 beside trained ones in
    float32, which the conversion of the few leaves as they are. None where they lie in no safetensors.
    """
    from safetensors import safe_open
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

    def found(name: str) -> str | None:
        at: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        return at

    names = [SAFE_WEIGHTS_NAME]
    if (index := found(SAFE_WEIGHTS_INDEX_NAME)) is not None:
        names = sorted(set(json.loads(Path(index).read_text("utf-8"))["weight_map"].values()))
    numbers: Counter[str] = Counter()
    for file in map(found, names):
        if file is None:
            return None
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                piece = opened.get_slice(key)
                numbers[piece.get_dtype()] += math.prod(piece.get_shape())
    types = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    if len(numbers) > 1:
        exact = numbers.keys() <= types.keys() and 2 * numbers["F32"] >= numbers.total()
        return torch.float32 if exact else None
    return next((types.get(kind) for kind in numbers), None)


@torch.no_grad()
def leave_in_file(
    model: torch.nn.Module, dtype: torch.dtype, source: str, taken: Collection[int] = ()
) -> None:
    """Let the parameters of `model` wait, as ones of `dtype`. Those whose id is in `taken` are read and cast at once."""
    for parameter in model.parameters():
        if id(parameter) in taken:
            parameter.data = parameter.data.to(dtype, copy=True)
            continue
        found = InFile(parameter.data, source)
        parameter.data = _hollow(parameter.shape, dtype)
        parameter.in_file = found  # type: ignore[attr-defined]


def in_file(parameter: torch.Tensor) -> InFile | None:
    """Where the numbers of a parameter that waits are; None for one that has them."""
    found: InFile | None = getattr(parameter, "in_file", None)
    return found


def recast(parameter: torch.nn.Parameter, dtype: torch.dtype) -> None:
    """Store a parameter in `dtype`, also one that waits."""
    if in_file(parameter) is None:
        parameter.data = parameter.data.to(dtype)
    else:
        parameter.data = _hollow(parameter.shape, dtype)


def replica_of(
    parameter: torch.nn.Parameter, device: torch.device | None, dtype: torch.dtype | None = None
) -> torch.nn.Parameter:
    """A copy with memory of its own, in `dtype` where one is given; of a parameter that waits one full of NaN, to be filled by a
    training engine."""
    device, dtype = device or parameter.device, dtype or parameter.dtype
    if in_file(parameter) is None:
        tensor = parameter.detach().to(device, dtype, copy=True)
        return torch.nn.Parameter(tensor, parameter.requires_grad)
    nan = torch.full(parameter.shape, float("nan"), dtype=dtype, device=device)
    copied = torch.nn.Parameter(nan, parameter.requires_grad)
    copied.hollow = True  # type: ignore[attr-defined]
    return copied


def is_hollow(parameter: Any) -> bool:
    """Whether it is a copy of a parameter that waited, and was not filled yet."""
    return getattr(parameter, "hollow", False)


def mark_filled(parameter: Any) -> None:
    """It has its numbers now."""
    if is_hollow(parameter):
        parameter.hollow = False
