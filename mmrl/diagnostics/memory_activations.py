"""Bytes of activations, logits and the KV cache, by arithmetic from a model's shape.

Counted as in Korthikanti et al. 2022 (arXiv 2205.05198, section 4), tensor by tensor that autograd keeps for backward, for what
layers of transformers and mmrl's attention do: RMSNorm computed in fp32, gated MLP, grouped key heads, autocast that casts the
input of every matrix product by itself. What a family's layers have beside these its record says (mmrl/policy/families/shapes.py).
tests/diagnostics/test_memory.py and the check `memory` of `mmrl families check` compare them with what autograd really keeps.

Legend: T tokens, P / C tokens of a prompt / completion, G completions per prompt, H hidden width, F width of the MLP, Q / K width
of all query / key heads, V vocabulary; `half` bytes of a number in matrix products, `full` of one in the residual stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.policy.families.shapes import Layer, Tower

__all__ = [
    "Micro",
    "Precision",
    "cache_bytes",
    "choice_bytes",
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
    # completions: queries of one key head side by side, which need no copy where each has its own, and outputs
    several = text.num_attention_heads > text.num_key_value_heads
    own = (2 if several else 1) * Q * p.half * completions
    if attn == "eager":
        blocks = 4 * Q * p.half * prompts + 2 * Q * p.half * completions + gathered
        scores = heads * (micro.groups * micro.prompt**2 + sequences * micro.completion * keys)
        # the softmax in fp32 and in the type of the values
        return blocks + scores * (4 + (p.half if p.half != 4 else 0))
    if p.half == p.full:
        # queries, keys and values in one tensor; prompts' keys and values are repeated per query head
        return (Q + 2 * K) * p.half * micro.tokens + 3 * Q * p.half * prompts + own + gathered
    # cast one by one; the mask as booleans and as numbers
    blocks = 4 * Q * p.half * prompts + own + gathered
    return blocks + _folded(text, micro) * (1 + p.half)


def _folded(text: Any, micro: Micro) -> float:
    """Places of the mask of completions: queries of one key head are rows of it."""
    rows = text.num_attention_heads // text.num_key_value_heads * micro.completion
    return micro.groups * micro.group_size * rows * (micro.prompt + micro.completion)


def _inputs(
    p: Precision,
    products: tuple[tuple[set[str], float], ...],
    *,
    trained: bool,
    adapted: frozenset[str],
    fused: bool,
) -> float:
    """Bytes per token of what layers multiply with their weights: (their names, width) of those that share an input. Under autocast
    each has its own copy."""
    kept, cast = 0.0, p.half != p.full
    for members, width in products:
        copies = len(members) if trained else len(members & adapted)
        shared = len(members) > 1 and not cast and (fused or not (adapted and p.full != 4))
        kept += p.half * width * (min(copies, 1) if shared else copies)
    return kept


_QKV = {"q_proj", "k_proj", "v_proj"}
_CHUNK = (
    64  # tokens that the delta rule computes at a time (transformers' torch_chunk_gated_delta_rule)
)


def _mixer(
    text: Any, layer: Layer, p: Precision, micro: Micro, attn: str, trained: bool
) -> tuple[float, tuple[tuple[set[str], float], ...]]:
    """(bytes that attention, or what is in its place, keeps of a micro-batch; its products)."""
    H, _, Q, *_ = _widths(text)
    if layer.mixer == "delta":
        return _delta_bytes(text, p, micro, trained=trained), (
            ({"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}, H),
            ({"out_proj"}, text.linear_num_value_heads * text.linear_value_head_dim),
        )
    kept = _attention_bytes(text, p, micro, attn)
    if layer.output_gate:
        # queries and their gates come as one tensor; the gate's sigmoid, and what it multiplies
        kept += 3 * p.half * Q * micro.tokens
    if layer.masked and attn in ("sdpa", "eager"):
        kept += micro.groups * micro.prompt**2 * p.half
    if layer.mixer == "attention":
        return kept, ((_QKV, H), ({"o_proj"}, Q))
    q, kv = text.q_lora_rank, text.kv_lora_rank
    # latents and what their norms keep of them; one product's output holds that of keys and their rotated part
    latents = (4 + (p.full if trained else 0)) * (q + kv) + p.full * text.qk_rope_head_dim
    return kept + latents * micro.tokens, (
        ({"q_a_proj", "kv_a_proj_with_mqa"}, H),
        ({"q_b_proj"}, q),
        ({"kv_b_proj"}, kv),
        ({"o_proj"}, text.num_attention_heads * text.v_head_dim),
    )


def _delta_bytes(text: Any, p: Precision, micro: Micro, *, trained: bool) -> float:
    """A gated delta net by torch's operations (a kernel keeps less): the rule computes in fp32, in whole chunks. Fitted to what
    autograd keeps at six pairs of head widths, where it is a sum of four kinds to the last byte: of values with their gates, of
    keys, of pairs of places in a chunk, and of one state per chunk; around them the convolution's input and output."""
    heads, key, value = (
        text.linear_num_value_heads,
        text.linear_key_head_dim,
        text.linear_value_head_dim,
    )
    convolved = heads * value + 2 * text.linear_num_key_heads * key
    chunks = micro.groups * -(-micro.prompt // _CHUNK) + (
        micro.groups * micro.group_size * -(-micro.completion // _CHUNK)
    )
    # what comes in 16 bits is not kept twice; the gated norm's weight multiplies what it normalised
    keys, values = 9.75 if p.half == 4 else 8.25, 7.9 if trained else 6.4
    rule = values * value + keys * key + 5.25 * _CHUNK + key * value / _CHUNK
    return 4 * heads * rule * chunks * _CHUNK + 2 * p.half * convolved * micro.tokens


def layer_bytes(
    text: Any,
    layer: Layer,
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
    H, _, Q, K, _ = _widths(text)
    mixed, products = _mixer(text, layer, p, micro, attn, trained)
    weight = p.full if trained else 0
    # the fp32 input (twice where its mean is taken off), and what the weight multiplies
    norm = p.full * H if fused else (8 if layer.centred else 4) * H + weight * H
    kept = float(layer.norms * norm)
    joint = {"gate_up_proj"} if layer.joint else {"gate_proj", "up_proj"}
    if layer.parallel:
        products = ((products[0][0] | joint, H), *products[1:])
    elif layer.mlp:
        products = (*products, (joint, H))
    if layer.mlp:
        products = (*products, ({"down_proj"}, layer.mlp))
    kept += _inputs(p, products, trained=trained, adapted=adapted, fused=fused)
    kept += (2 if fused else 3) * p.half * layer.mlp  # gate, its activation, up
    kept += _expert_bytes(H, layer, p, trained=trained, adapted="experts" in adapted)
    if layer.query_norms and layer.mixer == "attention":
        kept += (p.full if fused else 4 + weight) * (Q + K)
    if layer.experts and "experts" in adapted:  # PEFT adds each expert's product to its weights
        mixed += 3 * p.full * layer.of_experts * H * layer.expert_width
    return kept * micro.tokens + mixed


def _expert_bytes(H: int, layer: Layer, p: Precision, *, trained: bool, adapted: bool) -> float:
    """Of the experts that a token is sent to: what comes in and the down product's input where they learn, gate and up, the
    activation, what comes out and is weighed; the router's input, where it is trained. Groups of
    tokens are not autocast."""
    if not layer.experts:
        return 0.0
    each = p.full * (H + 3 * layer.expert_width)
    if trained or adapted:
        each += p.full * (H + layer.expert_width)
    return layer.experts * each + (p.full * H if trained else 0)


def update_bytes(
    text: Any,
    layers: Sequence[Layer],
    p: Precision,
    micro: Micro,
    attn: str,
    *,
    trained: bool,
    adapted: frozenset[str],
    checkpointing: bool,
    fused: bool = False,
) -> tuple[float, float]:
    """(kept from forward to backward, held at most beside it while one layer is computed again and differentiated). `layers`: those
    of the family's record (ModelFamily.layers)."""
    H = text.hidden_size
    each = [
        (
            layer_bytes(text, kind, p, micro, attn, trained=trained, adapted=adapted, fused=fused),
            count,
        )
        for kind, count in Counter(layers).items()
    ]
    largest = max(size for size, _ in each)
    mixed, products = _mixer(text, layers[0], p, micro, attn, trained)
    # the first layer reads embeddings that want no gradient, where nothing is trained that its mixer's inputs come from
    unread = not trained and not adapted & set().union(*(names for names, _ in products[:-1]))
    residual = p.full * H * micro.tokens
    kept = (
        len(layers) * residual
        if checkpointing
        else sum(size * count for size, count in each) - (mixed if unread else 0)
    ) + (2 * residual + 4 * H * micro.tokens)
    if attn == "sdpa" and p.half == p.full:
        # a mask for all layers, and one for those that have their own
        kept += 4 * _folded(text, micro) * (1 + any(layer.masked for layer in layers))
    inner = max(layer.mlp + layer.experts * layer.expert_width for layer in layers)
    passing = 3 * p.half * inner * micro.tokens + 3 * residual  # gradients on their way
    return kept, passing + (largest if checkpointing else 0)


def vision_update_bytes(
    tower: Tower,
    p: Precision,
    rows: float,
    pixels: float,
    *,
    pictures: float,
    checkpointing: bool,
) -> float:
    """What autograd keeps of a vision tower that is trained, one block computed again included. `rows` of the tower (patches, class
    tokens), `pixels`: numbers of a row; of `pictures` of the same size."""
    H, F, cast = tower.hidden, tower.inner, p.half != p.full
    # an RMSNorm's weight multiplies another tensor than the one that comes in; LayerNorm's kernel keeps what comes in alone
    norms = 2 * (4 + (p.full if tower.rms else 0)) * H
    # under autocast every product has an input of its own
    inputs = (tower.products if cast else 1) + (2 if cast and tower.gated else 1)
    block = norms + p.half * (inputs + tower.attention) * H + p.full * tower.scaled * H
    block += p.half * tower.mlp * F
    kept = tower.depth * (p.full * H if checkpointing else block)
    # pixels, and what the projector reads and keeps
    kept += p.half * pixels + 4 * p.full * H
    mask = (
        p.half * rows**2 / pictures if tower.masked else 0.0
    )  # of each picture one, for all blocks
    return rows * (kept + (block + 3 * p.half * F if checkpointing else 0)) + mask


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


def choice_bytes(
    text: Any, tokens: float, classes: int, *, head_trained: bool, tied: bool
) -> float:
    """Log-probs of `tokens` action tokens among `classes` (VLAPolicy): three fp32 copies of their logits. The gradient of the
    output layer's few rows has the size of all, and from the second micro-batch on is made beside the one that is there; so is the
    embedding's, where they are one tensor."""
    gradients = 4 * text.hidden_size * text.vocab_size * (1 + tied) if head_trained else 0
    return 3 * 4 * tokens * classes + gradients


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
    text: Any,
    p: Precision,
    *,
    rows: float,
    prompt: int,
    group_size: int,
    classes: int | None = None,
) -> float:
    """The larger of prefilling rows / group_size prompts and of choosing a token of `classes` (None: of the vocabulary) for `rows`
    rows (logits in fp32, four copies; their cumulative sum in fp64, three)."""
    H, F, Q, _, _ = _widths(text)
    prompts = max(1.0, rows / group_size)
    prefill = prompts * prompt * (
        3 * p.half * F + 4 * p.full * H + 4 * Q * p.half
    ) + prompts * prompt**2 * (1 + p.half)
    return max(prefill, rows * (classes or text.vocab_size) * (4 * 4 + 3 * 8))
