"""What an update holds at once under FSDP2, moment by moment. Part of mmrl.diagnostics.memory.

mmrl's root group (embeddings, norms, output layer, projector) stays gathered from forward to backward, blocks come and go
(mmrl/distributed/engines/fsdp.py). What the backward pass needs beside it changes: the output layer's product first, then block
after block, then the embedding's gradient, then the root's gradients while they are shared out. These do not live at the same
time, so the largest counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.diagnostics.memory_parameters import ParameterBytes

__all__ = ["Passing", "fsdp2_update"]

_REDUCED = 4  # bytes of a number while gradients are shared out (reduce_dtype)


@dataclass(frozen=True)
class Passing:
    """Bytes of one micro-batch's update: kept from forward to backward; passing while one layer is differentiated; of the logits
    with the output layer's own gradient. `chunks`: whether the logits come in several; `again`: whether micro-batches of the
    same step came before, whose gradients are there already."""

    kept: float
    passing: float
    logits: float
    chunks: bool
    again: bool


def fsdp2_update(
    p: ParameterBytes, u: Passing, n: int, gathered: int, *, half: bool
) -> dict[str, float]:
    """Parts of the moment that needs most, of `n` processes. `gathered`: bytes of a number of gathered weights and their
    gradients; `half`: whether the output layer multiplies 16-bit numbers (mmrl/policy/output_layer.py)."""
    root = float(gathered * p.root_numbers)
    all_shards, shards = p.gradients / n, (p.gradients - p.root_gradients) / n
    before, after = (all_shards, all_shards) if u.again else (0.0, shards)
    learns = p.root_gradients / _REDUCED  # numbers of the root's that are trained
    head = p.head_numbers if p.head[1] else 0
    # one chunk's gradient in fp32, and its copy in the type of the gathered weight; where fp32 is multiplied, the weight's copy
    # lives at the same time as the first of them, not as the second
    cast = 0 if gathered == 4 else gathered if half else 4
    product = head * (4 + cast + (gathered if u.chunks else 0))
    # the output layer's waits for the end of the backward pass
    waits = float(gathered * head)
    # two blocks of weights; gradients of one, and those of the one before on their way to the other processes
    blocks = 2.0 * gathered * p.block_numbers
    reduced = float(p.block_gradients)
    # a tied one: both gradients and their sum
    embedding = gathered * p.embedding_trained * (2 if p.tied and head else 1)
    moments = (
        {
            "gradients": before,
            "gathered weights": root,
            "activations": u.kept,
            "logits": u.logits + product,
        },
        {
            "gradients": after,
            "gathered weights": root + blocks,
            "whole gradients": waits + reduced * (1 + gathered / _REDUCED),
            "activations": u.kept + u.passing,
        },
        {
            "gradients": after,
            "gathered weights": root,
            "whole gradients": waits + embedding + reduced,
        },
        {
            "gradients": all_shards + (p.root_gradients / n if u.again else 0.0),
            "gathered weights": root,
            "whole gradients": learns * (gathered + _REDUCED),
        },
    )
    return max(moments, key=lambda parts: sum(parts.values()))
