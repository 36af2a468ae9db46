"""Whether weights are finite: looked at when they are loaded and before they are saved."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from mmrl.errors import CheckpointError, NonFiniteError

__all__ = ["check_loaded", "check_saved", "non_finite", "refuse_loaded"]


@torch.no_grad()
def non_finite(named: Iterable[tuple[str, Any]]) -> list[str]:
    """Names of the tensors that hold NaN or infinity. One pass over each, without a copy, and one wait for the device."""
    names, bounds = [], []
    for name, tensor in named:
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.is_floating_point()
            and tensor.numel()
            and not tensor.is_meta
        ):
            names.append(name)
            # NaN wins over every number, in both
            bounds.append(torch.stack(torch.aminmax(tensor.detach())).float())
    if not names:
        return []
    sound = torch.isfinite(torch.stack([b.to(bounds[0].device) for b in bounds])).all(-1).tolist()
    return [name for name, good in zip(names, sound, strict=True) if not good]


def _which(found: list[str]) -> str:
    return f"NaN or infinity in {len(found)} tensor{'s' * (len(found) > 1)} ({', '.join(found[:3])}{' ...' * (len(found) > 3)})"


def check_loaded(named: Iterable[tuple[str, Any]], source: str | Path) -> None:
    """Raise CheckpointError when weights read from `source` are not finite."""
    refuse_loaded(non_finite(named), source)


def refuse_loaded(found: list[str], source: str | Path) -> None:
    """Raise CheckpointError for weights of these names, read from `source`, that are not finite; none, no error."""
    if found:
        raise CheckpointError(
            f"expected finite weights in {source}, found {_which(found)}; take another checkpoint, or copy this "
            "one again from where it came from"
        )


def check_saved(
    weights: Iterable[tuple[str, Any]], optimizer: dict[str, Any], step: int, kept: str
) -> None:
    """Raise NonFiniteError when what is to be saved after `step` is not finite. `kept` names what is left untouched."""
    moments = (
        (f"optimizer state {number}.{name}", value)
        for number, entries in optimizer.get("state", {}).items()
        for name, value in entries.items()
    )
    if found := [*non_finite(weights), *non_finite(moments)]:
        raise NonFiniteError(
            f"step {step}: expected finite weights to save, found {_which(found)}; nothing was saved. Earlier "
            f"checkpoints ({kept}) are untouched: lower optim.lr or optim.max_grad_norm in a new run "
            "(name=...), which may begin with one of them (model.path=...)"
        )
