"""What an Updater asks of whatever computes gradients and takes optimizer steps.

All methods are collective: every process calls them, in the same order. The canonical optimizer state is that of
torch.optim.AdamW as `mmrl.optim.build_optimizer` makes it, whole: a checkpoint of any engine resumes under any other.
"""
from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["TrainEngine"]


class TrainEngine(abc.ABC):
    """One run's training engine."""

    sharded: bool = False
    """Parameters of policy.model are not whole on this process: what samples needs a copy (`parameters`)."""

    lockstep: bool = False
    """Forward and backward are collective: processes must run the same modules in the same number of micro-batches."""

    @abc.abstractmethod
    def begin(self, denominator: float | None = None) -> None:
        """Forget earlier gradients. `denominator` (tokens or sequences in the loss, all processes) is given where lockstep."""

    @abc.abstractmethod
    def run(self, forward: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        """Call `forward`, which uses the policy's modules, with their weights in place; its tensors may be differentiated."""

    @abc.abstractmethod
    def backward(self, loss: torch.Tensor, *, last: bool = False) -> None:
        """Add the gradient of a summed (not averaged) loss; `last` on the last micro-batch of an optimizer step."""

    @abc.abstractmethod
    def step(self, denominator: float, update: int, total_updates: int, failure: Callable[[float], str]) -> tuple[float, float]:
        """Sum over processes, divide by the denominator, clip, optimizer step number `update` (from 0): (norm before clipping, lr).

        Raises NonFiniteError with the text of `failure(norm)`.
        """

    @abc.abstractmethod
    def parameters(self, *, trainable: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """(name as in policy.model, whole tensor) one after the other, all or those that are trained; each valid until the next."""

    @torch.no_grad()
    def fill(self, model: torch.nn.Module) -> None:
        """Copy the trained weights into `model`, a whole copy of the policy's (on any device)."""
        theirs = dict(model.named_parameters())
        for name, tensor in self.parameters(trainable=True):
            theirs[name].copy_(tensor)

    @abc.abstractmethod
    def optimizer_state(self) -> dict[str, Any] | None:
        """The canonical optimizer state, whole, on the main process; None on the others."""

    @abc.abstractmethod
    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Continue from a canonical optimizer state, which every process has read."""
