"""Bytes of activations, logits and the KV cache, by arithmetic from a model's shape.

Counted as in Korthikanti et al. 2022 (arXiv 2205.05198, section 4), tensor by tensor that autograd keeps for backward, for what the
Qwen-VL layers of transformers and mmrl's attention do: RMSNorm computed in fp32, gated MLP, grouped key heads, autocast that casts
the input of every matrix product by itself. tests/diagnostics/test_memory.py compares them with what autograd really keeps.

Legend: T tokens, P / C tokens of a prompt / completion, G completions per prompt, H hidden width, F width of the MLP, Q / K width
of all query / key heads, V vocabulary; `half` bytes of a number in matrix products, `full` of one in the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Micro",
    "Precision",
    "cache_bytes",
    "expanded_bytes",
    "logits_bytes",
    "rollout_work_bytes",
    "update_bytes",
    "vision_update_bytes",
]


@dataclass(frozen=True)
class Precision:
    """Bytes per number: `half` in matrix products, `full` in the residual stream; they differ under autocast over fp32 weights."""

    half: int
    full: int


@dataclass(frozen=True)
class Micro:
    """A micro-batch of equal groups: `groups` prompts of P tokens with G completions of C tokens each."""

    groups: float
    prompt: int
    completion: int
    group_size: int

    @property
    def completion_tokens(self) -> float:
        """Tokens of all completions."""
        return self.groups * self.group_size * self.completion

    @property
    def tokens(self) -> float:
        """T, each prompt counted once."""
        return self.groups * self.prompt + self.completion_tokens


def _widths(text: Any) -> tuple[int, int, int, int, int]:
    """H, F, Q, K, query heads."""
    # of latent attention: values are computed as wide as keys
    width = getattr(text, "qk_head_dim", None) or getattr(text, "head_dim", None)
    width = width or text.hidden_size // text.num_attention_heads
    inner = getattr(text, "intermediate_size", None)
    if inner is None:  # experts in every layer, one of them for all tokens
        inner = text.num_experts_per_tok * text.moe_intermediate_size
        inner += text.shared_expert_intermediate_size
    return (
        text.hidden_size,
        inner,
        text.num_attention_heads * width,
        text.num_key_value_heads * width,
        text.num_attention_heads,
    )


def _attention_bytes(text: Any, p: Precision, micro: Micro, attn: str) -> float:
    """Queries, keys, values and outputs that the attention kernels keep, with their masks or scores."""
    _, _, Q, K, heads = _widths(text)
    prompts, completions = micro.groups * micro.prompt, micro.completion_tokens
    sequences, keys = micro.groups * micro.group_size, micro.prompt + micro.completion
    # keys and values of [prompt, completion], once per completion
    gathered = 2 * K * p.half * sequences * keys
    if attn == "flex":
        return (2 * Q + 2 * K) * p.half * micro.tokens
    if attn == "flash_attention_2":
        return (2 * Q + 2 * K) * p.half * prompts + 2 * Q * p.half * completions + gathered
    # prompts' keys are repeated per query head
    blocks = 4 * Q * p.half * prompts + 2 * Q * p.half * completions + gathered
    if attn == "eager":
        scores = heads * (micro.groups * micro.prompt**2 + sequences * micro.completion * keys)
        # the softmax in fp32 and in the type of the values
        return blocks + scores * (4 + (p.half if p.half != 4 else 0))
    # queries of one key head
    folded = text.num_attention_heads // text.num_key_value_heads * micro.completion
    return blocks + sequences * folded * keys * (1 + p.half)  # the mask as booleans and as numbers


def layer_bytes(
    text: Any,
    p: Precision,
    micro: Micro,
    attn: str,
    *,
    trained: bool,
    adapted: frozenset[str] = frozenset(),
    fused: bool = False,
) -> float:
    """What autograd keeps of one decoder layer. `trained`: its weights get gradients; `adapted`: modules with a LoRA adapter;
    `fused`: model.fused_layers, which keeps what comes in as it is, and no intermediate."""
    H, F, Q, K, _ = _widths(text)
    # the fp32 input, and what the weight multiplies
    norm = p.full * H if fused else 4 * H + (p.full * H if trained else 0)
    cast = p.half != p.full
    kept = 2 * norm
    for members, width in (
        ({"q_proj", "k_proj", "v_proj"}, H),
        ({"gate_proj", "up_proj"}, H),
        ({"o_proj"}, Q),
        ({"down_proj"}, F),
    ):
        # inputs of matrix products: under autocast each has its own
        copies = len(members) if trained else len(members & adapted)
        shared = width == H and not cast and (fused or not (adapted and p.full != 4))
        kept += p.half * width * (min(copies, 1) if shared else copies)
    kept += (2 if fused else 3) * p.half * F  # gate, its activation, up
    if text.model_type.startswith("qwen3"):
        # norms of queries and keys
        kept += (p.full if fused else 4 + (p.full if trained else 0)) * (Q + K)
    return kept * micro.tokens + _attention_bytes(text, p, micro, attn)


def update_bytes(
    text: Any,
    p: Precision,
    micro: Micro,
    attn: str,
    *,
    trained: bool,
    adapted: frozenset[str],
    checkpointing: bool,
    fused: bool = False,
) -> tuple[float, float]:
    """(kept from forward to backward, held at most beside it while one layer is computed again and differentiated)."""
    H, F, *_ = _widths(text)
    layer = layer_bytes(text, p, micro, attn, trained=trained, adapted=adapted, fused=fused)
    residual = p.full * H * micro.tokens
    kept = (
        text.num_hidden_layers * (residual if checkpointing else layer)
        + 2 * residual
        + 4 * H * micro.tokens
    )
    passing = 3 * p.half * F * micro.tokens + 3 * residual  # gradients on their way
    return kept, passing + (layer if checkpointing else 0)


def adapted_experts_bytes(
    text: Any, p: Precision, micro: Micro, experts: Sequence[int]
) -> tuple[float, float]:
    """(in all layers, in the largest) what autograd keeps for adapters on a mixture's experts, `experts` bytes of them in each
    layer: their weights with B A added (peft's ParamWrapper), and what those multiply, for each expert that a token goes through.
    """
    if not any(experts):
        return 0.0, 0.0
    width = text.num_experts_per_tok * (text.hidden_size + text.moe_intermediate_size)
    # grouped products are in the type of the weights, whatever autocast says
    found = [size + p.full * width * micro.tokens for size in experts if size]
    return sum(found), max(found)


def vision_update_bytes(vision: Any, p: Precision, patches: float, *, checkpointing: bool) -> float:
    """What autograd keeps of a vision tower that is trained, one block computed again included."""
    kind = vision.model_type
    H = vision.embed_dim if kind.startswith("qwen2_vl") else vision.hidden_size
    F = H * vision.mlp_ratio if kind.startswith("qwen2_vl") else vision.intermediate_size
    gated = kind.startswith("qwen2_5")
    block = (
        2 * (4 + p.full) * H
        + p.half * H * (3 if gated else 2)
        + 8 * H
        + p.half * (5 * H + (4 if gated else 2) * F)
    )
    depth = vision.depth if hasattr(vision, "depth") else vision.num_hidden_layers
    kept = depth * (p.full * H if checkpointing else block)
    return patches * (kept + (block + 3 * p.half * F if checkpointing else 0))


def logits_bytes(
    text: Any,
    tokens: float,
    chunk: int,
    *,
    head_bytes: int,
    head_trained: bool,
    tied: bool = False,
    half: bool = False,
) -> float:
    """Log-probs of `tokens` tokens (mmrl/policy/output_layer.py): three fp32 copies of at most `chunk` logits (as they are,
    adjusted, gradient), a copy of a trained output layer stored otherwise than it multiplies (`half`: in bf16), and its gradients:
    one per chunk, and the embedding's where they are one tensor, are added up beside each other before they reach the parameter's.
    """
    H, V = text.hidden_size, text.vocab_size
    several = tied or tokens * V > max(chunk, V)
    copies = 3 * 4 * min(tokens * V, max(chunk, V))
    if not head_trained:
        return copies
    cast = (2 if half else 4) * H * V if head_bytes != (2 if half else 4) else 0
    return max(copies + cast + 4 * H * V * (not tied and several), 2 * 4 * H * V if several else 0)


def cache_bytes(text: Any, p: Precision, slots: float) -> float:
    """Keys and values of `slots` places in all layers. Rotary positions leave keys in the residual stream's type. One layer more
    while rows are repeated or retired. Latent attention keeps a latent and one rotated key in their place."""
    if rank := getattr(text, "kv_lora_rank", None):
        width = rank + text.qk_rope_head_dim
        return (text.num_hidden_layers + 1) * width * max(p.full, p.half) * slots
    K = _widths(text)[3]
    return (text.num_hidden_layers + 1) * K * (max(p.full, p.half) + p.half) * slots


def expanded_bytes(text: Any, p: Precision, slots: float) -> float:
    """Keys and values that one layer of latent attention makes of `slots` places of its cache in every step; 0 of any other."""
    if not getattr(text, "kv_lora_rank", None):
        return 0.0
    return text.num_key_value_heads * (text.qk_head_dim + text.v_head_dim) * p.half * slots


def rollout_work_bytes(
    text: Any, p: Precision, *, rows: float, prompt: int, group_size: int
) -> float:
    """The larger of prefilling rows / group_size prompts and of choosing a token for `rows` rows (logits in fp32, four copies;
    their cumulative sum in fp64, three)."""
    H, F, Q, _, _ = _widths(text)
    prompts = max(1.0, rows / group_size)
    prefill = prompts * prompt * (
        3 * p.half * F + 4 * p.full * H + 4 * Q * p.half
    ) + prompts * prompt**2 * (1 + p.half)
    return max(prefill, rows * text.vocab_size * (4 * 4 + 3 * 8))
