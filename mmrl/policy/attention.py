"""Attention for packed shared-prefix rows, registered with transformers as "mmrl_prefix".

Each prompt attends to itself once; each completion attends to [its prompt, itself] and to nothing else, so the cost is
P^2 + G * C * (P + C) per group instead of (P + G * C)^2 for a dense mask or G * (P + C)^2 for the usual batch.
Without a layout (prefill, usual batch) it is transformers' own sdpa; one token at a time (decoding) has a path of its
own, because transformers copies all cached keys and values once per query head before every masked sdpa call.

Legend: M prompts, B completions, R rows, H query heads, Hkv key heads, T packed tokens, P / C / K lengths, D head
width.
"""
from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from mmrl.policy.pack import PrefixLayout

__all__ = ["ATTENTION_NAME", "prefix_attention", "register_attention"]

ATTENTION_NAME = "mmrl_prefix"


def prefix_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PrefixLayout,
                     scaling: float | None = None) -> torch.Tensor:
    """query (1, H, T, D), key and value (1, Hkv, T, D) -> (1, T, H, D) under the visibility rules of `layout`."""
    heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[-1]
    (M, P), (B, C), groups = layout.prompt_MP.shape, layout.completion_BC.shape, heads // kv_heads
    # one gather for all three: forward and backward of a gather cost more than their bytes suggest
    qkv = torch.cat([query[0], key[0], value[0]]).transpose(0, 1)  # (T, H + 2 Hkv, D)
    slots = qkv.index_select(0, torch.cat([layout.prompt_MP.flatten(), layout.completion_BC.flatten()]))
    prompts, completions = slots.split([M * P, B * C])
    sizes = [heads, kv_heads, kv_heads]
    q_M, k_M, v_M = prompts.view(M, P, -1, width).transpose(1, 2).split(sizes, 1)  # (M, heads, P, D)
    q_B, k_B, v_B = completions.view(B, C, -1, width).transpose(1, 2).split(sizes, 1)
    # padding is on the right, so a causal mask already hides it from every real prompt token
    out_M = scaled_dot_product_attention(q_M, k_M.repeat_interleave(groups, 1), v_M.repeat_interleave(groups, 1),
                                         is_causal=True, scale=scaling)
    k_BK = torch.cat([k_M.index_select(0, layout.owner_B), k_B], 2)
    v_BK = torch.cat([v_M.index_select(0, layout.owner_B), v_B], 2)
    # query heads that share a key head become more queries of it, so that keys and values need no copy per query head
    out_B = scaled_dot_product_attention(q_B.reshape(B, kv_heads, groups * C, width), k_BK, v_BK, scale=scaling,
                                         attn_mask=layout.mask_BCK.repeat(1, 1, groups, 1)).reshape(B, heads, C, width)
    out = torch.cat([o.transpose(1, 2).reshape(-1, heads, width) for o in (out_M, out_B)])
    return out.index_select(0, layout.slot_T)[None]


def _one_token_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
                         scaling: float | None) -> torch.Tensor:
    """query (R, H, 1, D), key and value (R, Hkv, K, D) -> (R, 1, H, D); the cache is read as it is, never repeated."""
    rows, heads, _, width = query.shape
    folded = query.reshape(rows, key.shape[1], -1, width)  # heads of a key head become queries: no causal mask
    out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(rows, 1, heads, width)


def _attention_interface(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                         attention_mask: torch.Tensor | None, prefix_layout: PrefixLayout | None = None,
                         scaling: float | None = None, **kwargs: Any) -> tuple[torch.Tensor, None]:
    if prefix_layout is not None:
        return prefix_attention(query, key, value, prefix_layout, scaling), None
    if query.shape[2] == 1 and (attention_mask is None or attention_mask.shape[1:3] == (1, 1)):
        return _one_token_attention(query, key, value, attention_mask, scaling), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def register_attention() -> str:
    """Make "mmrl_prefix" known to transformers (idempotent) and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, _attention_interface)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    return ATTENTION_NAME
