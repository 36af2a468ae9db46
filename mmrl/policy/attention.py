"""Attention of language model and vision tower by one setting, `model.attn`, registered with transformers.

In a packed shared-prefix row each prompt attends to itself once; each completion attends to [its prompt, itself] and to nothing
else, so the cost is P^2 + G * C * (P + C) per group instead of (P + G * C)^2 for a dense mask or G * (P + C)^2 for the usual batch.
A completion that branches from another one attends to [its prompt, what precedes the branch, itself].

    setting            packed row                                     padded batch, prefill      vision tower
    sdpa               padded blocks of prompts and completions       transformers' sdpa         a call per length of window
    eager              the same blocks, as plain matrix products      plain matrix products      transformers' eager
    flash_attention_2  two variable-length calls (attention_flash)    variable-length call       variable-length call
    flex               one block mask (attention_flex)                block mask                 block mask

`auto` is flash_attention_2 on a GPU that has the package, else flex there, and sdpa elsewhere.

One token at a time (decoding) and masks that are given whole (4-D) go through sdpa under every setting: decoding has a path of its
own, because transformers copies all cached keys and values once per query head before every masked sdpa call.

Legend: M prompts, B completions, R rows, H query heads, Hkv key heads, T packed tokens, P / C / K lengths, D head
width.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from mmrl.errors import ConfigError
from mmrl.policy.attention_flash import check_flash, padded_flash, prefix_flash, vision_flash
from mmrl.policy.attention_flex import flex, padded_block_mask, vision_flex
from mmrl.policy.attention_layout import PrefixLayout
from mmrl.policy.attention_windows import vision_sdpa
from mmrl.policy.delta_net import carry_states
from mmrl.policy.families import ModelFamily, family_of
from mmrl.policy.sequence_parallel import over_heads

__all__ = [
    "ATTENTIONS",
    "check_attention",
    "choose_attention",
    "prefix_attention",
    "register_attention",
    "say_attention",
    "set_attention",
]

_LOG = logging.getLogger(__name__)

# model.attn -> what transformers calls it in (language model, vision tower). The tower hands over whole packed patches, with their
# sequences' lengths, to implementations with "flash" in their name, and one sequence after the other to all others.
ATTENTIONS = {
    "sdpa": ("mmrl_prefix", "mmrl_flash_or_sdpa"),
    "eager": ("mmrl_prefix_eager", "eager"),
    "flash_attention_2": ("mmrl_prefix_varlen", "mmrl_flash_varlen"),
    "flex": ("mmrl_prefix_flex", "mmrl_flash_or_flex"),
}


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    *,
    causal: bool = False,
    eager: bool = False,
) -> torch.Tensor:
    """(R, H, T, D) and as many key heads -> (R, H, T, D); `mask` is True where a query may look."""
    if not eager:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scaling
        )
    if causal:
        mask = torch.ones(
            query.shape[2], key.shape[2], dtype=torch.bool, device=query.device
        ).tril()
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def prefix_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PrefixLayout,
    scaling: float | None = None,
    *,
    eager: bool = False,
    window: int | None = None,
) -> torch.Tensor:
    """query (1, H, T, D), key and value (1, Hkv, T, D) -> (1, T, H, D) under the visibility rules of `layout`; a token sees at most
    `window` tokens back, itself counted (None: all)."""
    blocks = layout.visible(window)
    heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[-1]
    (M, P), (B, C), groups = blocks.prompt_MP.shape, blocks.completion_BC.shape, heads // kv_heads
    # one gather for all three: forward and backward of a gather cost more than their bytes suggest
    qkv = torch.cat([query[0], key[0], value[0]]).transpose(0, 1)  # (T, H + 2 Hkv, D)
    slots = qkv.index_select(
        0, torch.cat([blocks.prompt_MP.flatten(), blocks.completion_BC.flatten()])
    )
    prompts, completions = slots.split([M * P, B * C])
    sizes = [heads, kv_heads, kv_heads]
    # (M, heads, P, D)
    q_M, k_M, v_M = prompts.view(M, P, -1, width).transpose(1, 2).split(sizes, 1)
    q_B, k_B, v_B = completions.view(B, C, -1, width).transpose(1, 2).split(sizes, 1)
    # padding is on the right, so a causal mask already hides it from every real prompt token
    out_M = _attend(
        q_M,
        k_M.repeat_interleave(groups, 1),
        v_M.repeat_interleave(groups, 1),
        blocks.mask_MPP,
        scaling,
        causal=blocks.mask_MPP is None,
        eager=eager,
    )
    # under autocast sdpa's own type is not that of its inputs
    plain = not eager and not torch.is_autocast_enabled(query.device.type)
    mask = (
        blocks.added_mask(groups, q_B.dtype) if plain else blocks.mask_BCK.repeat(1, 1, groups, 1)
    )
    if blocks.branches:
        paths = (
            qkv[:, heads:]
            .index_select(0, blocks.path_BA.flatten())
            .view(B, -1, 2 * kv_heads, width)
        )
        k_B, v_B = paths.transpose(1, 2).split(kv_heads, 1)
    k_BK = torch.cat([k_M.index_select(0, blocks.owner_B), k_B], 2)
    v_BK = torch.cat([v_M.index_select(0, blocks.owner_B), v_B], 2)
    # query heads that share a key head become more queries of it, so that keys and values need no copy per query head
    out_B = _attend(
        q_B.reshape(B, kv_heads, groups * C, width),
        k_BK,
        v_BK,
        mask,
        scaling,
        eager=eager,
    ).reshape(B, heads, C, width)
    out = torch.cat([o.transpose(1, 2).reshape(-1, heads, width) for o in (out_M, out_B)])
    return out.index_select(0, blocks.slot_T)[None]


def _one_token_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """query (R, H, 1, D), key and value (R, Hkv, K, D) -> (R, 1, H, D), or of the values' width where it is another; the cache is
    read as it is, never repeated."""
    rows, heads, _, width = query.shape
    # heads of a key head become queries: no causal mask
    folded = query.reshape(rows, key.shape[1], -1, width)
    out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(rows, 1, heads, value.shape[-1])


def _whole_mask(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    **kwargs: Any,
) -> torch.Tensor:
    """sdpa with a 4-D mask, or none."""
    if query.shape[2] == 1 and (mask is None or mask.shape[1:3] == (1, 1)):
        return _one_token_attention(query, key, value, mask, scaling)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)[0]


def _sdpa_interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    prefix_layout: PrefixLayout | None = None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if cu_seq_lens_q is not None:  # the vision tower is handed the language model's layout too
        return vision_sdpa(query, key, value, cu_seq_lens_q, scaling), None
    if prefix_layout is not None:
        out = prefix_attention(query, key, value, prefix_layout, scaling, window=sliding_window)
        return out, None
    return _whole_mask(module, query, key, value, attention_mask, scaling, **kwargs), None


def _eager_interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    prefix_layout: PrefixLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if prefix_layout is not None:
        out = prefix_attention(
            query, key, value, prefix_layout, scaling, eager=True, window=sliding_window
        )
        return out, None
    if query.shape[2] == 1:
        return _whole_mask(module, query, key, value, attention_mask, scaling, **kwargs), None
    groups = query.shape[1] // key.shape[1]
    out = _attend(
        query,
        key.repeat_interleave(groups, 1),
        value.repeat_interleave(groups, 1),
        attention_mask,
        scaling,
        causal=attention_mask is None,
        eager=True,
    )
    return out.transpose(1, 2), None


def _flash_interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    prefix_layout: PrefixLayout | None = None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if cu_seq_lens_q is not None:  # the vision tower is handed the language model's layout too
        return vision_flash(query, key, value, cu_seq_lens_q, int(max_length_q), scaling), None
    if prefix_layout is not None:
        return prefix_flash(query, key, value, prefix_layout, scaling), None
    if attention_mask is not None and attention_mask.ndim == 4:
        return _whole_mask(module, query, key, value, attention_mask, scaling, **kwargs), None
    return padded_flash(query, key, value, attention_mask, scaling), None


def _flex_interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    prefix_layout: PrefixLayout | None = None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if (
        prefix_layout is None
        and cu_seq_lens_q is None
        and (attention_mask is None or isinstance(attention_mask, torch.Tensor))
    ):
        return _whole_mask(module, query, key, value, attention_mask, scaling, **kwargs), None
    kind = query.device.type
    # which knows nothing of flex attention: rotary positions leave queries and keys in fp32
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    if cu_seq_lens_q is not None:
        return vision_flex(query, key, value, cu_seq_lens_q, scaling), None
    mask = prefix_layout.block_mask if prefix_layout is not None else attention_mask
    return flex(query, key, value, mask, scaling), None


def _in_slices(interface: Callable[..., tuple[torch.Tensor, Any]]) -> Callable[..., Any]:
    """`interface`, also where processes compute a packed row together, and where values are narrower than keys (latent attention,
    DeepSeek-AI, arXiv 2405.04434)."""

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        prefix_layout: PrefixLayout | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return interface(module, q, k, v, attention_mask, prefix_layout=prefix_layout, **kwargs)

        kept = value.shape[-1]
        if query.shape[2] > 1 and (missing := query.shape[-1] - kept) > 0:
            # zeros, whose sums are zeros: gathers and kernels take one width. Decoding copies no cache for it
            value = torch.nn.functional.pad(value, (0, missing))
        if prefix_layout is None or prefix_layout.sequence is None:
            out, weights = attend(query, key, value)
        else:
            out, weights = over_heads(
                attend, query, key, value, prefix_layout.num_tokens, prefix_layout.sequence
            )
        return out[..., :kept], weights

    return attention


def _padding_mask(
    *args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """The 2-D mask as it is."""
    return attention_mask


def register_attention() -> None:
    """Make the names of ATTENTIONS known to transformers (idempotent)."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    interfaces: dict[str, tuple[Callable[..., tuple[torch.Tensor, None]], Any]] = {
        "sdpa": (_sdpa_interface, sdpa_mask),
        "eager": (_eager_interface, sdpa_mask),
        "flash_attention_2": (_flash_interface, _padding_mask),
        "flex": (_flex_interface, padded_block_mask),
    }
    for attn, (interface, mask) in interfaces.items():
        for name in ATTENTIONS[attn]:
            if name.startswith("mmrl"):
                AttentionInterface.register(name, _in_slices(interface))
                AttentionMaskInterface.register(name, mask)


def choose_attention(
    attn: str,
    device: torch.device,
    autocast: torch.dtype | None,
    family: ModelFamily | None = None,
) -> str:
    """What `model.attn: auto` means for a policy of `family` on `device` that computes in `autocast`; others are themselves.

    Dense scores of a packed row or a long prompt would fill a GPU, and both kernels compute in 16 bits what they skip no block of.
    """
    if attn != "auto":
        return attn
    if device.type != "cuda" or autocast is None:
        return "sdpa"
    known = ATTENTIONS if family is None else family.tower_kernels
    if "flash_attention_2" in known and importlib.util.find_spec("flash_attn") is not None:
        return "flash_attention_2"
    # what torch compiles flex attention with
    triton = "flex" in known and importlib.util.find_spec("triton") is not None
    return "flex" if triton else "sdpa"


def say_attention(
    attn: str,
    device: torch.device,
    autocast: torch.dtype | None,
    family: ModelFamily | None = None,
) -> None:
    """Warn where `model.attn: auto` takes dense attention on a GPU, with the reason and what to do: once, in the main process."""
    if (
        attn == "auto"
        and device.type == "cuda"
        and choose_attention(attn, device, autocast, family) == "sdpa"
        and not int(os.environ.get("RANK", 0))
    ):
        _warn_once(_why_dense(autocast, family))


def _why_dense(autocast: torch.dtype | None, family: ModelFamily | None) -> str:
    """Reason and mend."""
    if autocast is None:
        return (
            "the run computes in fp32, and the kernels that skip blocks in 16 bits; set model.dtype: bf16 on a GPU that has it "
            "(compute capability 8.0 or later)"
        )
    if family is not None and "flex" not in family.tower_kernels:
        return (
            f"no kernel that skips blocks can show a model of family {family.name} what it sees (sliding windows, pictures that "
            "see themselves); lower train.token_budget or data.max_pixels where memory runs out"
        )
    return (
        "flex attention is compiled by Triton, which is not installed, nor is flash-attn; pip install triton (torch for CUDA on "
        "Linux brings it along), or pip install flash-attn"
    )


@functools.cache
def _warn_once(why: str) -> None:
    _LOG.warning(
        "model.attn auto: sdpa, whose scores of a packed row are dense (memory and time grow with its square): %s",
        why,
    )


def check_attention(
    attn: str,
    device: torch.device,
    autocast: torch.dtype | None,
    family: ModelFamily | None = None,
) -> None:
    """Raises ConfigError or MissingExtraError where `attn` cannot run on `device`, or for `family`."""
    if family is not None and attn not in family.tower_kernels:
        raise ConfigError(
            f"expected model.attn of {', '.join(family.tower_kernels)} or auto for a model of family {family.name}, found "
            f"{attn}, which cannot show it what it sees (sliding windows, pictures that see themselves)"
        )
    if attn == "flash_attention_2":
        check_flash(device, autocast)


def set_attention(model: Any, attn: str) -> None:
    """Use `attn` in language model and vision tower of a transformers model for conditional generation, of a known family; layers
    that carry a state have one way of their own (mmrl.policy.delta_net)."""
    register_attention()
    carry_states(model)
    kinds = {
        "": ATTENTIONS[attn][0],
        "text_config": ATTENTIONS[attn][0],
        "vision_config": family_of(model.config).tower_kernels[attn],
    }
    if family_of(model.config).parts.hearing:
        # within windows of two seconds or so
        kinds["audio_config"] = "eager" if attn == "eager" else "sdpa"
    model.config._attn_implementation = kinds
