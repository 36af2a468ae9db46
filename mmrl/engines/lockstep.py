"""Equal work for processes whose forwards and backwards are collective: the same number of micro-batches everywhere.

Every process packs its own groups, so numbers of micro-batches differ, and a process may have no group at all. Before each
optimizer step they agree on the largest number; who has fewer runs tokens that count for nothing in the rest.
"""
from __future__ import annotations

import torch

from mmrl.policy.encode import Prompt
from mmrl.policy.pack import PackItem
from mmrl.world import World

__all__ = ["agree", "idle_item"]


def agree(world: World, micro_batches: int, denominator: float) -> tuple[int, float]:
    """(micro-batches that every process runs, denominator of all processes), from those of this process. Collective."""
    found = world.gather([(micro_batches, denominator)])
    return max(count for count, _ in found), sum(share for _, share in found)


def idle_item(token: int) -> PackItem:
    """The smallest prompt with a completion: one `token` and once more that token; it must be one that can be sampled."""
    ids_P = torch.tensor([token])
    return PackItem(Prompt(ids_P, torch.zeros_like(ids_P), torch.zeros(3, 1, dtype=torch.long), 1), ((token,),))
