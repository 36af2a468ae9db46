"""Tensors in Ray's object store, and requests dealt among the actors that read them.

media = {digest: MediaStore(ray).put(digest, pixels)}    # once; in an actor: tensors_of(media)
shares([120, 80, 95], 2)                                 # [range(0, 1), range(1, 3)]
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

__all__ = ["Array", "MediaStore", "absolute", "actor_threads", "shares", "tensors_of"]

_MEDIA_BYTES = 1 << 30  # of media kept in the object store between rollouts


@dataclass(frozen=True)
class Array:
    """A tensor as bytes that Ray moves without copying."""

    data: np.ndarray
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Array:
        """Of a tensor on any device; shares its memory on a CPU."""
        flat = tensor.detach().to("cpu").contiguous().view(-1)
        return cls(flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))

    def tensor(self) -> torch.Tensor:
        """A copy: what Ray hands out may not be written to, and is freed with its last reader."""
        return torch.from_numpy(self.data.copy()).view(self.dtype).view(self.shape)


class MediaStore:
    """Tensors put into the object store once each, by key. `trim`, between rollouts, lets the least recently used go."""

    def __init__(self, ray: Any, limit: int = _MEDIA_BYTES) -> None:
        self._ray, self._limit = ray, limit
        self._kept: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def put(self, key: str, tensor: torch.Tensor | None) -> Any:
        """Reference to the tensor of `key`, which is needed only if it is not there."""
        if key not in self._kept:
            assert tensor is not None, "whoever leaves it out has looked"
            array = Array.of(tensor)
            self._kept[key] = self._ray.put(array), array.data.nbytes
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def trim(self) -> None:
        """Let the least recently used go until the rest is within the limit."""
        held = sum(size for _, size in self._kept.values())
        while held > self._limit:
            held -= self._kept.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Let all go."""
        self._kept.clear()


def tensors_of(media: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """In an actor: the tensors that references stand for, by key."""
    import ray

    return {
        key: array.tensor() for key, array in zip(media, ray.get(list(media.values())), strict=True)
    }


def shares(costs: Sequence[float], parts: int) -> list[range]:
    """Consecutive ranges of what costs so much each, at most `parts` and none empty, of about equal costs.

    They depend on the arguments alone, never on which actor is quick or lost.
    """
    if not costs:
        return []
    costs_N = np.array(costs, dtype=float)
    middles_N = np.cumsum(costs_N) - costs_N / 2
    places_N = (middles_N * parts // costs_N.sum()).astype(int)
    edges = [0, *(np.flatnonzero(np.diff(places_N)) + 1).tolist(), len(costs)]
    return [range(a, b) for a, b in pairwise(edges)]


def actor_threads(cpus: float) -> int:
    """Threads of an actor with so many CPUs; with one or less those of this process, so that results equal its own."""
    return round(cpus) if cpus > 1 else torch.get_num_threads()


def absolute(path: str) -> str:
    """A folder as actors find it, who work in another one; the name of a hub stays."""
    return os.path.abspath(path) if os.path.isdir(path) else path
