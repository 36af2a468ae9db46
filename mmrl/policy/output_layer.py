"""The output layer: fp32 logits of hidden states, and from them log-probs and entropies without copies of (n, V).

With a vocabulary of 150,000 the logits of 441 tokens fill a quarter of a GiB. What follows them is computed for a few rows at a
time, and the backward pass writes the one gradient that the matrix product needs.

Legend: n tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["HalfProduct", "OutputLayer", "TokenScores"]

_BLOCK = 1 << 22  # logits worked on at a time: 16 MiB


def _blocks(logits_nV: torch.Tensor) -> Iterator[slice]:
    rows = max(1, _BLOCK // logits_nV.shape[-1])
    # also one of no rows: of a few tokens the share of a process may be empty (mmrl.policy.sequence_parallel)
    yield from (slice(i, i + rows) for i in range(0, max(1, len(logits_nV)), rows))


def _entropies(logits_nV: torch.Tensor, log_z_n: torch.Tensor) -> torch.Tensor:
    """Entropies (n,) in nats from logits and their logsumexp; an impossible token (-inf) adds 0."""
    entropy_n = torch.empty_like(log_z_n)
    for rows in _blocks(logits_nV):
        logits, log_z = logits_nV[rows], log_z_n[rows]
        p = (logits - log_z[:, None]).exp_()
        # 0 * -inf
        entropy_n[rows] = log_z - p.mul_(logits.masked_fill(p == 0, 0.0)).sum(-1)
    return entropy_n


class TokenScores(torch.autograd.Function):
    """(logp_n of the tokens target_n, entropy_n of the distributions in nats), both of logits (n, V) and differentiable, the
    entropies only where `entropy_gradient`.

    d logp / d l_i = 1[i = target] - p_i and dH / d l_i = -p_i (log p_i + H) need the logits alone: the backward pass makes one copy
    of (n, V), where autograd would keep five.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_nV: torch.Tensor, target_n: torch.Tensor, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the class."""
        log_z_n = torch.cat([logits_nV[rows].logsumexp(-1) for rows in _blocks(logits_nV)])
        entropy_n = _entropies(logits_nV, log_z_n)
        ctx.save_for_backward(logits_nV, target_n, log_z_n, entropy_n)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_n)
        return logits_nV.gather(-1, target_n[:, None])[:, 0] - log_z_n, entropy_n

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """See the class."""
        logits_nV, target_n, log_z_n, entropy_n = ctx.saved_tensors
        slope_nV = torch.empty_like(logits_nV)
        for rows in _blocks(logits_nV):
            logp = logits_nV[rows] - log_z_n[rows, None]
            p = torch.exp(logp, out=slope_nV[rows])
            if ctx.entropy_gradient:
                # 0 * -inf
                more = logp.add_(entropy_n[rows, None]).mul_(p).masked_fill_(p == 0, 0.0)
                more.mul_(-gradients[1][rows, None])
                p.mul_(-gradients[0][rows, None]).add_(more)
            else:
                p.mul_(-gradients[0][rows, None])
        return slope_nV.scatter_add_(-1, target_n[:, None], gradients[0][:, None]), None, None


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The matrix product of two tensors of 16-bit numbers, added up and returned in fp32."""
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


class HalfProduct(torch.autograd.Function):
    """fp32 logits (n, V) of hidden states and weight as they are in `half`: tensor cores multiply, sums are fp32. fp32 inputs would
    run outside of the tensor cores, at a fifteenth of an H100's speed. Gradients are computed in `half` as every layer's under
    autocast."""

    @staticmethod
    def forward(
        ctx: Any, hidden_nH: torch.Tensor, weight_VH: torch.Tensor, half: torch.dtype
    ) -> torch.Tensor:
        """See the class."""
        ctx.save_for_backward(hidden_nH, weight_VH)
        ctx.half = half
        return _product(hidden_nH.to(half), weight_VH.to(half).t())

    @staticmethod
    def backward(
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """See the class."""
        hidden_nH, weight_VH = ctx.saved_tensors
        slope_nV = gradients[0].to(ctx.half)
        hidden = weight = None
        if ctx.needs_input_grad[0]:
            hidden = _product(slope_nV, weight_VH.to(ctx.half)).to(hidden_nH.dtype)
        if ctx.needs_input_grad[1]:
            weight = _product(slope_nV.t(), hidden_nH.to(ctx.half)).to(weight_VH.dtype)
        return hidden, weight, None


class OutputLayer:
    """fp32 logits of an output layer that is stored in another type than it multiplies in, without a copy of it per call.

    The copy of a weight that is not trained is kept until the weight changes; that of a trained one lives for a call.
    """

    def __init__(self) -> None:
        self._of: weakref.ref[torch.Tensor] | None = None
        self._version = -1
        self._copy: torch.Tensor | None = None

    def __call__(
        self, hidden_nH: torch.Tensor, weight_VH: torch.Tensor, half: torch.dtype | None
    ) -> torch.Tensor:
        """(n, V) fp32. `half`: the type the rest of the model computes in, None: fp32."""
        if half is not None and hidden_nH.device.type == "cuda":
            return HalfProduct.apply(hidden_nH, self._in(weight_VH, half), half)
        return torch.nn.functional.linear(hidden_nH.float(), self._in(weight_VH, torch.float32))

    def _in(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if weight.dtype == dtype or weight.requires_grad:
            return weight.to(dtype)
        copy, known = self._copy, self._of is not None and self._of() is weight
        if not known or copy is None or copy.dtype != dtype or self._version != weight._version:
            self._copy = None  # the old one goes first
            copy = self._copy = weight.detach().to(dtype)
            self._of, self._version = weakref.ref(weight), weight._version
        return copy
