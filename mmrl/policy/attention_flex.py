"""FlexAttention (torch.nn.attention.flex_attention) for packed shared-prefix rows, padded batches and the vision tower.

Who sees whom is written as a few spans of keys per query: two, or more where completions branch from each other. The mask function
reads them, and the block mask is computed from them block by block: no (T, T) mask exists anywhere, so memory grows with T * T /
128 small integers for a moment and with T otherwise. Key heads are never repeated. On a GPU the kernel is compiled. torch has no
backward of flex attention on a CPU: there the same block mask, blocks and function, is written out as a (T, T) mask for sdpa,
which serves tests and small runs.

Legend: R rows, H / Hkv query / key heads, T queries, K keys, D head width, E ends of spans (begin, end, begin ..), S block size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention

__all__ = ["flex", "padded_block_mask", "span_block_mask", "vision_flex"]

_BLOCK = 128  # FlexAttention's own block size
_QUERIES = 64 * _BLOCK  # whose blocks are counted at once
_VARIANTS = 64  # of the compiled kernel: far more than the uses there are


def _visible(spans_ERT: torch.Tensor) -> Callable[..., torch.Tensor]:
    begins, ends = spans_ERT[0::2].unbind(0), spans_ERT[1::2].unbind(0)
    (begin, end), *others = zip(begins, ends, strict=True)

    def visible(r: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        found = (k >= begin[r, q]) & (k < end[r, q])
        for other_begin, other_end in others:
            found = found | ((k >= other_begin[r, q]) & (k < other_end[r, q]))
        return found

    return visible


def _counts(spans_ERT: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """(R, T, num_blocks): how many keys of each block a query sees; its spans do not overlap."""
    low = torch.arange(num_blocks, device=spans_ERT.device, dtype=torch.int32) * _BLOCK
    begin, end = spans_ERT[0::2, :, :, None], spans_ERT[1::2, :, :, None]
    return (
        (end.clamp(max=low + _BLOCK) - begin.clamp(min=low)).clamp_(min=0).sum(0, dtype=torch.int32)
    )


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A boolean (R, query blocks, key blocks) map as FlexAttention's (number, indices) with a head dimension of 1."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


def span_block_mask(spans_ERT: torch.Tensor, num_keys: int) -> BlockMask:
    """The block mask of queries that see some spans of keys each (int32: first begin, first end, second begin, second end, and so
    on; ends are exclusive, an empty span has begin >= end)."""
    length = spans_ERT.shape[-1]
    # no key: their blocks are never full
    padded = torch.nn.functional.pad(spans_ERT, (0, -length % _BLOCK))
    num_blocks = -(-num_keys // _BLOCK)
    seen, full = [], []
    for part in padded.split(_QUERIES, -1):
        counts = _counts(part, num_blocks).unflatten(1, (-1, _BLOCK))
        full.append((counts == _BLOCK).all(2))
        seen.append((counts > 0).any(2))
    whole = torch.cat(full, 1)
    partial = torch.cat(seen, 1) & ~whole
    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=_visible(spans_ERT),
        seq_lengths=(length, num_keys),
    )


def padded_block_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> BlockMask:
    """The causal block mask of a padded batch, whose rows are padded on the left or on the right; transformers calls it with the
    2-D mask (R, K), once per forward."""
    query = torch.arange(q_length, device=device, dtype=torch.int32)[None] + int(q_offset) + 1
    spans = torch.zeros(4, batch_size, q_length, dtype=torch.int32, device=device)
    spans[1] = query.expand(batch_size, -1)
    if attention_mask is not None:
        valid = attention_mask[:, :kv_length].to(device).int()
        first, count = valid.argmax(1), valid.sum(1)
        spans[0] = first[:, None]
        spans[1] = torch.minimum(query, (first + count)[:, None])
    return span_block_mask(spans, kv_length)


def dense_mask(mask: BlockMask) -> torch.Tensor:
    """(R, 1, T, K) booleans: what a kernel computes, which skips absent blocks and asks mask_mod in partial ones only."""
    length, keys = mask.seq_lengths
    rows, device = mask.kv_num_blocks.shape[0], mask.kv_num_blocks.device
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None

    def expanded(number: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        listed = torch.arange(indices.shape[-1], device=device) < number[..., None]
        blocks = torch.zeros_like(indices, dtype=torch.bool).scatter_(-1, indices.long(), listed)
        return blocks.repeat_interleave(_BLOCK, -2).repeat_interleave(_BLOCK, -1)[
            ..., :length, :keys
        ]

    asked = create_mask(mask.mask_mod, rows, 1, length, keys, device)
    return (expanded(mask.kv_num_blocks, mask.kv_indices) & asked) | expanded(
        mask.full_kv_num_blocks, mask.full_kv_indices
    )


@functools.cache
def _compiled(backend: str = "inductor") -> Callable[..., torch.Tensor]:
    return torch.compile(flex_attention, fullgraph=True, backend=backend)


def _fused(*args: Any, **options: Any) -> torch.Tensor:
    """The compiled kernel, and an error where it cannot be compiled: torch's own fallback computes dense (T, K) scores.

    Each use compiles anew (packed, padded, tower; with and without gradients; a type, a head width), and torch gives up at the
    eighth. The limits hold for the calls made here.
    """
    limits: dict[str, Any] = {
        "recompile_limit": _VARIANTS,
        "accumulated_recompile_limit": 8 * _VARIANTS,
        "fail_on_recompile_limit_hit": True,
    }
    with torch._dynamo.config.patch(**limits):
        return _compiled()(*args, **options)


def flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    scaling: float | None,
) -> torch.Tensor:
    """query (R, H, T, D), key and value (R, Hkv, K, D) -> (R, T, H, D)."""
    if query.device.type == "cpu":
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=dense_mask(mask), scale=scaling, enable_gqa=True
        )
    else:  # the kernel for short queries wants 2^n query heads per key head, of which Qwen2.5-VL-7B has 7
        out = _fused(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            block_mask=mask,
            scale=scaling,
            enable_gqa=True,
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )
    return out.transpose(1, 2)


# of the latest forward: the tower's layers use two (windows, whole pictures)
_PICTURES: list[tuple[torch.Tensor, BlockMask]] = []


def _picture_mask(starts: torch.Tensor, length: int) -> BlockMask:
    """Patches see those of their own sequence: one block mask per tensor of starts, kept while the next ones are in use."""
    for known, mask in _PICTURES:
        if known is starts and mask.seq_lengths[0] == length:
            return mask
    sizes = starts.diff()
    spans = torch.zeros(4, 1, length, dtype=torch.int32, device=starts.device)
    spans[0, 0] = starts[:-1].repeat_interleave(sizes, output_size=length)
    spans[1, 0] = starts[1:].repeat_interleave(sizes, output_size=length)
    mask = span_block_mask(spans, length)
    _PICTURES[:] = [*_PICTURES[-1:], (starts, mask)]
    return mask


def vision_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """query, key and value (1, H, T, D) of patches, `starts` their sequences' cumulative lengths -> (1, T, H, D)."""
    return flex(query, key, value, _picture_mask(starts, query.shape[2]), scaling)
