"""FlashAttention-2 (Dao 2023, package flash-attn) for packed shared-prefix rows, padded batches and the vision tower.

Everything is a call of one variable-length kernel: sequences one behind the other, no padding and no mask. Prompts are causal
sequences; a completion's queries meet the keys of [its prompt, itself], which flash-attn aligns at the end (from release 2.1 on),
so that its first token sees the whole prompt. The prompt's keys and values are copied once per completion for that call:
G * (P + C) of them per layer, Hkv heads wide, for as long as the layer needs them.

Legend: R rows, H / Hkv query / key heads, T packed tokens, K keys, D head width.
"""

from __future__ import annotations

import torch

from mmrl.errors import ConfigError, MissingExtraError, install_command
from mmrl.policy.attention_layout import PrefixLayout

__all__ = ["check_flash", "padded_flash", "prefix_flash", "varlen_attention", "vision_flash"]


def check_flash(device: torch.device, autocast: torch.dtype | None) -> None:
    """Raises ConfigError or MissingExtraError where flash_attention_2 cannot run."""
    if device.type != "cuda":
        raise ConfigError(
            f"model.attn flash_attention_2 needs an NVIDIA GPU, found model.device '{device}'; use sdpa or flex"
        )
    if autocast is None:
        raise ConfigError(
            "model.attn flash_attention_2 computes in bf16, found model.dtype fp32 (or auto on a GPU without bf16); "
            "set model.dtype: bf16, or model.attn: sdpa or flex"
        )
    try:
        import flash_attn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"model.attn flash_attention_2 needs the flash-attn package: {install_command('flash-attn')} "
            "--no-build-isolation (built from source, needs nvcc); or use sdpa or flex"
        ) from error


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_query: torch.Tensor,
    starts_key: torch.Tensor,
    longest_query: int,
    longest_key: int,
    *,
    causal: bool,
    scaling: float | None,
) -> torch.Tensor:
    """query (T, H, D), key and value (K, Hkv, D) -> (T, H, D): sequence i's queries meet sequence i's keys only.

    Where causal, the last query sees all keys and each earlier one a key less.
    """
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=starts_query,
        cu_seqlens_k=starts_key,
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_key,
        softmax_scale=scaling,
        causal=causal,
    )


def _half(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In autocast's type: rotary positions leave queries and keys in fp32, which the kernel refuses. Gathers come before it, so
    that gradients of a shared key are added up in fp32."""
    kind = query.device.type
    if not torch.is_autocast_enabled(kind):
        return query, key, value
    half = torch.get_autocast_dtype(kind)
    return query.to(half), key.to(half), value.to(half)


def prefix_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PrefixLayout,
    scaling: float | None,
) -> torch.Tensor:
    """query (1, H, T, D), key and value (1, Hkv, T, D) -> (1, T, H, D)."""
    index = layout.varlen
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    q_M, k_M, v_M = _half(
        q.index_select(0, index.prompt),
        k.index_select(0, index.prompt),
        v.index_select(0, index.prompt),
    )
    out_M = varlen_attention(
        q_M,
        k_M,
        v_M,
        index.starts_prompt,
        index.starts_prompt,
        index.longest_prompt,
        index.longest_prompt,
        causal=True,
        scaling=scaling,
    )
    q_B, k_B, v_B = _half(
        q.index_select(0, index.query), k.index_select(0, index.key), v.index_select(0, index.key)
    )
    out_B = varlen_attention(
        q_B,
        k_B,
        v_B,
        index.starts_query,
        index.starts_key,
        index.longest_query,
        index.longest_key,
        causal=layout.causal,
        scaling=scaling,
    )
    return torch.cat([out_M, out_B]).index_select(0, index.slot_T)[None]


def _unpadded(valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Flat places of valid tokens, cumulative lengths of the rows, the longest row."""
    lengths = valid.sum(1, dtype=torch.int32)
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return valid.flatten().nonzero()[:, 0], starts, int(lengths.max())


def padded_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid_RK: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """query (R, H, T, D), key and value (R, Hkv, K, D) -> (R, T, H, D), causal, padding left out; outputs of padding are 0.

    Queries are the last T of a row's K places.
    """
    rows, heads, length, width = query.shape
    if valid_RK is None:
        valid_RK = torch.ones(rows, key.shape[2], dtype=torch.bool, device=query.device)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    q_places, q_starts, q_longest = _unpadded(valid_RK[:, -length:].bool())
    k_places, k_starts, k_longest = _unpadded(valid_RK.bool())
    q, k, v = _half(
        q.index_select(0, q_places), k.index_select(0, k_places), v.index_select(0, k_places)
    )
    found = varlen_attention(
        q, k, v, q_starts, k_starts, q_longest, k_longest, causal=True, scaling=scaling
    )
    out = found.new_zeros(rows * length, heads, width).index_copy(0, q_places, found)
    return out.unflatten(0, (rows, length))


def vision_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scaling: float | None,
) -> torch.Tensor:
    """query, key and value (1, H, T, D) of patches, `starts` their sequences' cumulative lengths -> (1, T, H, D)."""
    q, k, v = _half(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    starts = starts.int()
    return varlen_attention(
        q, k, v, starts, starts, longest, longest, causal=False, scaling=scaling
    )[None]
