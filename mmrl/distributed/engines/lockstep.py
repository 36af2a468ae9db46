"""Equal work for processes whose forwards and backwards are collective: the same number of micro-batches everywhere.

Every process packs its own groups, so numbers of micro-batches differ, and a process may have no group at all. Before each
optimizer step they agree on the largest number; who has fewer runs tokens that count for nothing in the rest.
"""

from __future__ import annotations

import torch

from mmrl.distributed.engines.base import TrainEngine
from mmrl.distributed.world import World
from mmrl.errors import NonFiniteError

__all__ = ["Losses", "agree"]


def agree(world: World, micro_batches: int, denominator: float) -> tuple[int, float]:
    """(micro-batches that every process runs, denominator of all processes), from those of this process. Collective."""
    found = world.gather([(micro_batches, denominator)])
    return max(count for count, _ in found), sum(share for _, share in found)


class Losses:
    """Sees to it that what is differentiated is finite, without a process leaving the others alone in a collective backward."""

    def __init__(self, engine: TrainEngine, world: World | None) -> None:
        self._engine, self._world = engine, world
        self._said: list[str] = []

    def finite(self, loss: torch.Tensor, text: str) -> torch.Tensor:
        """The loss. Raises NonFiniteError; where lockstep, whose backward the others wait for, the gradient norm becomes nan
        instead and every process raises it in the optimizer step."""
        if torch.isfinite(loss):
            return loss
        text = f"the loss is {float(loss.detach())}{text}"
        if not self._engine.lockstep:
            raise NonFiniteError(text)
        self._said.append(text)
        return loss * float("nan")

    def said(self) -> str:
        """What was wrong with losses, for the message of the optimizer step; where lockstep every process asks and hears of all."""
        if not self._engine.lockstep:
            return ""
        return "".join(
            f"{text}; "
            for text in (self._said if self._world is None else self._world.gather(self._said))
        )
