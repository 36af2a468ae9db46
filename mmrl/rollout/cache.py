"""A KV cache with room for the whole generation: each step writes one column instead of copying everything.

Works with any transformers model that calls `cache.update(keys, values, layer)`; layers that carry a state instead of keys and
values keep it here (mmrl.policy.delta_net). Legend: R rows, H heads, K length, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from mmrl.policy.delta_net import KeepsStates, StateLayer

__all__ = ["PreallocatedCache", "joined"]


class _Layer(DynamicLayer):
    """One layer's keys and values: buffers of full length, `keys` / `values` are views of the filled part."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.filled = capacity, 0
        self.key_buffer: torch.Tensor | None = None
        self.value_buffer: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (R, H, new, D) keys and values; returns views of everything so far."""
        if self.key_buffer is None:
            self.lazy_initialization(key_states, value_states)
            rows, heads, _, width = key_states.shape
            self.key_buffer = key_states.new_empty(rows, heads, self.capacity, width)
            self.value_buffer = value_states.new_empty(
                rows, heads, self.capacity, value_states.shape[-1]
            )
        assert self.value_buffer is not None
        end = self.filled + key_states.shape[-2]
        assert end <= self.capacity, f"KV cache of {self.capacity} positions asked for {end}"
        self.key_buffer[:, :, self.filled : end] = key_states
        self.value_buffer[:, :, self.filled : end] = value_states
        self.filled = end
        self._refresh()
        return self.keys, self.values

    def _refresh(self) -> None:
        assert self.key_buffer is not None and self.value_buffer is not None
        self.keys, self.values = (
            self.key_buffer[:, :, : self.filled],
            self.value_buffer[:, :, : self.filled],
        )

    def rearrange(self, index: torch.Tensor) -> None:
        """Rows `index` (repeats allowed) become the rows of this layer."""
        assert self.key_buffer is not None and self.value_buffer is not None
        key, value = self.keys, self.values
        rows = (len(index), key.shape[1], self.capacity)
        self.key_buffer, self.value_buffer = (
            key.new_empty(*rows, key.shape[-1]),
            value.new_empty(*rows, value.shape[-1]),
        )
        self.key_buffer[:, :, : self.filled] = key.index_select(0, index)
        self.value_buffer[:, :, : self.filled] = value.index_select(0, index)
        self._refresh()


class PreallocatedCache(KeepsStates, Cache):
    """Cache of `capacity` positions per row; rows can be repeated (prompt -> group) and retired. `lengths_R`: see KeepsStates."""

    def __init__(self, capacity: int, lengths_R: torch.Tensor | None = None) -> None:
        super().__init__(layer_class_to_replicate=lambda *args, **kwargs: _Layer(capacity))
        self.lengths_R = lengths_R

    def repeat_rows(self, counts_R: torch.Tensor) -> None:
        """Row r becomes counts_R[r] equal rows."""
        index = torch.repeat_interleave(
            torch.arange(len(counts_R), device=counts_R.device), counts_R
        )
        self.select_rows(index)

    def select_rows(self, index: torch.Tensor) -> None:
        """Keep the rows named by `index`, in that order."""
        for layer in self.layers:
            layer.rearrange(index)


def joined(
    parts: Sequence[tuple[PreallocatedCache, torch.Tensor, int]], capacity: int
) -> PreallocatedCache:
    """One cache of `capacity` positions with rows of several, aligned at their ends: of each the rows named by an index and the
    positions from a first one on. Positions that a shorter part lacks are zeros, to be masked."""
    cache = PreallocatedCache(capacity)
    width = max(part.get_seq_length() - first for part, _, first in parts)
    for number in range(len(parts[0][0].layers)):
        if isinstance(parts[0][0].layers[number], StateLayer):
            states = [(part.layers[number], index) for part, index, _ in parts]
            cache.layers.append(StateLayer.of(states))
            continue
        columns = []
        for name in ("keys", "values"):
            pieces = [
                getattr(part.layers[number], name)[:, :, first:].index_select(0, index)
                for part, index, first in parts
            ]
            columns.append(
                torch.cat(
                    [torch.nn.functional.pad(x, (0, 0, width - x.shape[2], 0)) for x in pieces]
                )
            )
        cache.update(columns[0], columns[1], number)
    return cache
