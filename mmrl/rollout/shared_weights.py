"""The trained weights in memory that a training process writes and a generator process of the same machine reads.

    shared = SharedWeights(policy.trainable(), policy.copied_types("products"))     # sharded or not; an argument of a child process
    shared.write(version, engine.parameters(trainable=True))
    version = shared.read(policy.trainable())             # in the child: None while they are being written

There is one copy, of the version written last. The header names it and counts the writes; a reader that finds another header after
copying than before it copies again, so that what it ends up with is one version, whole. Nobody waits for a lock: the writer never
waits at all, and a reader only where it insists on the newest version while that is being written.

The memory belongs to a file without a name (memfd on Linux): it goes when the last process that has it is gone, however that ended.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch

from mmrl.errors import StorageError, WeightSyncError

__all__ = ["SharedWeights"]

_HEADER = 64  # bytes: version (-1 while it is written), number of writes
_ALIGN = 64


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of the shared bytes."""
        found = memory[self.offset : self.offset + self.nbytes]
        return found.view(self.dtype).view(self.shape)


class SharedWeights:
    """Room for tensors of these names and shapes; see the module. `types`: of those that the reader holds in another type than the
    writer, by name; they are cast when they are written. Raises StorageError where there is too little memory."""

    def __init__(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        types: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self._places: dict[str, _Place] = {}
        end = _HEADER
        for name, tensor in named:
            # ZeRO-3 leaves an empty tensor where a whole one was
            shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
            place = _Place(end, shape, (types or {}).get(name, tensor.dtype))
            self._places[name] = place
            end += (place.nbytes + _ALIGN - 1) // _ALIGN * _ALIGN
        self.nbytes = end
        self._descriptor = _nameless_file(end)
        self._map()
        self._header[0] = -1

    def _map(self) -> None:
        self._memory = torch.frombuffer(mmap.mmap(self._descriptor, self.nbytes), dtype=torch.uint8)
        self._header = self._memory[:16].view(torch.int64)

    def close(self) -> None:
        """Give the memory back, once the process that reads it has no more use for it. May be called more than once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._memory = self._header = torch.empty(0)

    def __getstate__(self) -> dict[str, Any]:
        # only for a process that is being started, which inherits the file
        popen = get_spawning_popen()
        assert popen is not None, "shared weights go to a child process when it is started"
        file = reduction.DupFd(self._descriptor)
        return {"_places": self._places, "nbytes": self.nbytes, "_file": file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._descriptor = state.pop("_file").detach()
        self.__dict__.update(state)
        self._map()
        os.close(self._descriptor)  # the mapping holds the file
        self._descriptor = -1

    @property
    def version(self) -> int:
        """Of the weights that are there; -1 while some are being written, and before the first."""
        return int(self._header[0])

    @torch.no_grad()
    def write(self, version: int, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all tensors; `named` is gone through to its end, as a collective generator wants. Raises WeightSyncError for
        other tensors than there is room for."""
        self._header[0] = -1
        self._header[1] += 1
        left, wrong = set(self._places), ""
        for name, tensor in named:
            place = self._places.get(name)
            if place is None or place.shape != tuple(tensor.shape):
                wrong = wrong or f"{name} of shape {tuple(tensor.shape)}"
                continue
            place.of(self._memory).copy_(tensor)
            left.discard(name)
        if wrong or left:
            raise WeightSyncError(
                f"the training engine names other weights than the policy has: unknown {wrong or 'none'}, missing "
                f"{sorted(left)[:4]}"
            )
        self._header[1] += 1
        self._header[0] = version

    @torch.no_grad()
    def read(self, named: Sequence[tuple[str, torch.Tensor]]) -> int | None:
        """Copy all tensors into those of these names; the version, or None when the tensors are not one version now: ask again.
        Raises WeightSyncError where a name or a shape is another one."""
        expected = {name: place.shape for name, place in self._places.items()}
        found = {name: tuple(tensor.shape) for name, tensor in named}
        if expected != found:
            names = sorted(n for n in {*expected, *found} if expected.get(n) != found.get(n))
            raise WeightSyncError(
                "expected the generator process to have the trainer's weights, found others: "
                + ", ".join(f"{n} {expected.get(n)} there, {found.get(n)} here" for n in names[:4])
            )
        before = self._header.clone()
        if before[0] < 0:
            return None
        for name, tensor in named:
            tensor.copy_(self._places[name].of(self._memory))
        return int(before[0]) if torch.equal(before, self._header) else None

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the tensors as they are now."""
        return ((name, place.of(self._memory)) for name, place in self._places.items())


def _nameless_file(size: int) -> int:
    """Descriptor of so many bytes of memory without a name."""
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("mmrl-weights")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        # else the first write beyond what there is would be a SIGBUS
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
    except OSError as error:
        raise StorageError(
            f"expected {size / 2**30:.1f} GiB of shared memory for the weights that the generator process reads, found "
            f"too little: {error}; train fewer parameters (model.lora), or set engine.generator.kind: inline"
        ) from error
    return descriptor
