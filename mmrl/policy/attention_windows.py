"""Attention among the patches of each window, picture or frame: one call for all sequences of one length.

transformers asks sdpa for one sequence after the other: 81 calls for a picture of 1,280 tokens in two layers of Qwen2.5-VL's tower,
two thousand in all of them. Sequences of one length are a batch, whose rows have the numbers that they have alone.

Legend: H heads, T patches, D head width, n sequences of length L.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["vision_sdpa"]


@dataclass(frozen=True)
class _Windows:
    """The sequences that `starts` bounds: their one length, or places (n, L) of each length and where each patch is in them."""

    starts: torch.Tensor
    length: int | None
    places_nL: tuple[torch.Tensor, ...] = ()
    slot_T: torch.Tensor | None = None


# of the latest forward: the tower's layers use two (windows, whole pictures)
_KNOWN: list[_Windows] = []


def _windows(starts: torch.Tensor) -> _Windows:
    """Read from the device once for each tensor of starts, kept while the next ones are in use."""
    for known in _KNOWN:
        if known.starts is starts:
            return known
    lengths = starts.diff()
    different = sorted(set(lengths.tolist()) - {0})
    if len(different) < 2:
        found = _Windows(starts, different[0] if different else 0)
    else:
        places = [
            starts[:-1][lengths == length][:, None] + torch.arange(length, device=starts.device)
            for length in different
        ]
        order = torch.cat([p.flatten() for p in places])
        found = _Windows(starts, None, tuple(places), order.argsort())
    _KNOWN[:] = [*_KNOWN[-1:], found]
    return found


def vision_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """query, key and value (1, H, T, D) of patches, `starts` their sequences' cumulative lengths -> (1, T, H, D)."""
    windows = _windows(starts)
    if windows.length is not None:
        # (n, H, L, D), nothing is copied
        q, k, v = (
            x[0].unflatten(1, (-1, max(1, windows.length))).transpose(0, 1)
            for x in (query, key, value)
        )
        out = scaled_dot_product_attention(q, k, v, scale=scaling)
        return out.transpose(1, 2).flatten(0, 1)[None]
    # (T, 3 H, D): one gather for all three
    qkv, heads = torch.cat([query[0], key[0], value[0]]).transpose(0, 1), query.shape[1]
    found = []
    for places_nL in windows.places_nL:
        q, k, v = qkv[places_nL].transpose(1, 2).split(heads, 1)
        out = scaled_dot_product_attention(q, k, v, scale=scaling)
        found.append(out.transpose(1, 2).flatten(0, 1))
    assert windows.slot_T is not None
    return torch.cat(found).index_select(0, windows.slot_T)[None]
