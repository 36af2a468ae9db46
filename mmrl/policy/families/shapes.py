"""What a family's layers are to an estimate of memory (mmrl/diagnostics/memory_activations.py): the widths that autograd keeps, not
the weights. Records say what their family has that others have not; the rest is read from a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Layer", "Mixer", "Tower"]

Mixer = Literal["attention", "latent", "delta"]


@dataclass(frozen=True)
class Layer:
    """A decoder layer.

    mixer: attention, attention of latents (DeepSeek-V3's), or a gated delta net. mlp: width of the MLP that every token goes
    through, experts: how many more, of of_experts, it is sent to, each expert_width wide; joint: gate and up are one layer. norms:
    over the hidden width; centred: they take off the mean, tensor by tensor. query_norms: queries and keys have norms of their own;
    output_gate: what attention finds is multiplied by a gate. parallel: attention and MLP read the same norm. masked: prompts have
    a mask of numbers (a window, or pictures that see themselves).
    """

    mixer: Mixer = "attention"
    mlp: int = 0
    experts: int = 0
    expert_width: int = 0
    of_experts: int = 0
    joint: bool = False
    norms: int = 2
    centred: bool = False
    query_norms: bool = False
    output_gate: bool = False
    parallel: bool = False
    masked: bool = False


@dataclass(frozen=True)
class Tower:
    """A vision tower of `depth` equal blocks (one of fewer rows counts for less).

    hidden, inner: widths of a block and its MLP. rms: RMSNorm computed in fp32, else torch's LayerNorm. attention: how many widths
    it keeps beside its input: 4 for queries, keys, values and output; 6 where they come out of one product and are rotated.
    products: how many have the block's input (3 where queries, keys and values are apart). mlp: how many inner widths are kept (4
    of a gated one, 3 of quick GELU, else 2); gated: its input has two products. scaled: sums of what a learned scale multiplies.
    masked: a picture has a mask of numbers, all rows by all. rows: of the tower to a row of pixels (1 where that is a patch),
    tokens: rows to a token of the language model.
    """

    hidden: int = 0
    inner: int = 0
    depth: float = 0
    rms: bool = False
    attention: int = 4
    products: int = 3
    mlp: int = 2
    gated: bool = False
    scaled: int = 0
    masked: bool = False
    rows: float = 1.0
    tokens: float = 1.0
