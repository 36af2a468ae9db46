"""Attention for packed shared-prefix rows, registered with transformers as "mmrl_prefix".

Each prompt attends to itself once; each completion attends to [its prompt, itself] and to nothing else, so the cost is
P^2 + G * C * (P + C) per group instead of (P + G * C)^2 for a dense mask or G * (P + C)^2 for the usual batch.
Without a layout (rollout, evaluation, usual batch) it is transformers' own sdpa.

Legend: M prompts, B completions, H heads, T packed tokens, P / C padded lengths, D head width.
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
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    q_TH, k_TH, v_TH = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, D)

    def blocks(x_TH: torch.Tensor, index: torch.Tensor, repeat: int = 1) -> torch.Tensor:
        rows, columns = index.shape
        x = x_TH.index_select(0, index.flatten()).view(rows, columns, *x_TH.shape[1:]).transpose(1, 2)
        return x.repeat_interleave(repeat, 1) if repeat > 1 else x  # (rows, heads, width, D)

    q_M, q_B = blocks(q_TH, layout.prompt_MP), blocks(q_TH, layout.completion_BC)
    k_M, v_M = (blocks(x, layout.prompt_MP, groups) for x in (k_TH, v_TH))
    k_B, v_B = (blocks(x, layout.completion_BC, groups) for x in (k_TH, v_TH))
    # padding is on the right, so a causal mask already hides it from every real prompt token
    out_M = scaled_dot_product_attention(q_M, k_M, v_M, is_causal=True, scale=scaling)
    k_BK = torch.cat([k_M.index_select(0, layout.owner_B), k_B], 2)
    v_BK = torch.cat([v_M.index_select(0, layout.owner_B), v_B], 2)
    out_B = scaled_dot_product_attention(q_B, k_BK, v_BK, attn_mask=layout.mask_BCK, scale=scaling)
    slots = torch.cat([o.transpose(1, 2).reshape(-1, heads, query.shape[-1]) for o in (out_M, out_B)])
    return slots.index_select(0, layout.slot_T)[None]


def _attention_interface(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                         attention_mask: torch.Tensor | None, prefix_layout: PrefixLayout | None = None,
                         scaling: float | None = None, **kwargs: Any) -> tuple[torch.Tensor, None]:
    if prefix_layout is not None:
        return prefix_attention(query, key, value, prefix_layout, scaling), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def register_attention() -> str:
    """Make "mmrl_prefix" known to transformers (idempotent) and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, _attention_interface)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    return ATTENTION_NAME
