"""What a Learner asks of whatever computes gradients and takes optimizer steps.

All methods are collective: every process calls them, in the same order. The canonical optimizer state is that of
torch.optim.AdamW as `mmrl.training.optim.build_optimizer` makes it, whole: a checkpoint of any engine resumes under any other.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from mmrl.errors import NonFiniteError
from mmrl.policy.in_file import is_hollow, mark_filled
from mmrl.policy.sequence_parallel import SequenceGroup

__all__ = ["Named", "TrainEngine", "Trained", "head_parameters"]


class Named(Protocol):
    """A policy, or a module."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """All, in a fixed order. Of a policy: those of `model`, then those of each head, with its name before theirs."""


class Trained(Named, Protocol):
    """What an engine trains: a Policy, or a policy made of one (mmrl.robotics.vla.VLAPolicy)."""

    lockstep: bool
    """Forwards are collective; set by the engine."""

    @property
    def model(self) -> Any:
        """The transformers model, adapters included; another one while the reference runs."""

    @property
    def reference_model(self) -> Any:
        """The frozen copy for a KL term, or None."""

    @property
    def heads(self) -> Mapping[str, torch.nn.Module]:
        """What is trained beside `model` and read from its hidden states, by name: a value head."""

    @property
    def device(self) -> torch.device:
        """Where `model` is."""

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The type that forwards compute in where it is not that of the weights."""

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Those of `named_parameters` that receive gradients."""


def head_parameters(policy: Trained) -> list[torch.nn.Parameter]:
    """Of all heads."""
    return [p for head in policy.heads.values() for p in head.parameters()]


class TrainEngine(abc.ABC):
    """One run's training engine."""

    policy: Trained

    sharded: bool = False
    """The policy's parameters are not whole on this process: what samples needs a copy (`parameters`)."""

    lockstep: bool = False
    """Forward and backward are collective: processes must run the same modules in the same number of micro-batches."""

    sequence: SequenceGroup | None = None
    """The processes that compute a packed row together (engine.sequence_parallel); None: each computes rows of its own."""

    in_collective: bool = False
    """Inside a collective pass, to the end of which all processes come or none: an error of one cannot be told to the others."""

    @contextmanager
    def collective_section(self) -> Iterator[None]:
        """`in_collective` meanwhile, and from then on where an error of this process alone ends it."""
        self.in_collective = True
        try:
            yield
        except NonFiniteError:  # of a gradient: all processes raise it, at the end of the pass
            self.in_collective = False
            raise
        self.in_collective = False

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
    def step(
        self,
        denominator: float,
        update: int,
        total_updates: int,
        failure: Callable[[float], str],
        *,
        heads_only: bool = False,
    ) -> tuple[float, float]:
        """Sum over processes, divide by the denominator, clip, optimizer step number `update` (from 0): (norm before clipping, lr).

        With `heads_only` (a critic that warms up; no gradient of the model was taken) the model keeps its weights, and its
        optimizer state stays as if there had been no step. Raises NonFiniteError with the text of `failure(norm)`.
        """

    @abc.abstractmethod
    def parameters(self, *, trainable: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """(name as in policy.named_parameters, whole tensor) one after the other, all or those that are trained; each valid until
        the next."""

    @torch.no_grad()
    def gather_into(self, replica: Named) -> None:
        """Copy the trained weights into `replica`, a full replica of the policy or, where that has no heads, of its model (on any
        device); the first time all weights, where the replica was made before they had been read."""
        theirs = dict(replica.named_parameters())
        trainable = not any(map(is_hollow, theirs.values()))
        with self.collective_section():
            for name, tensor in self.parameters(trainable=trainable):
                theirs[name].copy_(tensor)
                mark_filled(theirs[name])

    @abc.abstractmethod
    def optimizer_state(self, mine: Callable[[int], bool] | None = None) -> dict[str, Any] | None:
        """The canonical optimizer state, whole, on the main process; None on the others. With `mine`, on every process the entries
        of those parameters (their numbers in it) that it chooses, copied to host memory."""

    @abc.abstractmethod
    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Continue from a canonical optimizer state, which every process has read."""
