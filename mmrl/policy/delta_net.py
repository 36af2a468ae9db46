"""Gated delta nets under the shared prefix: layers that carry a state from token to token instead of looking at all of them.

Such a layer of Qwen3.5's convolves its last inputs and writes each token into a state, one matrix per head (Yang et al., Gated
Delta Networks, arXiv 2412.06464). Along a packed row that state would run from one completion into the next. Here each prompt is
run once, and each of its completions goes on from the prompt's last inputs and state: the numbers of separate rows, with the
gradient of every completion into the one prompt.

    carry_states(model)            # after loading; without a packed row or a cache of ours the layers compute as before

Rollouts keep the state behind each row of a cache (`StateLayer`): behind a prompt that is padded on the right it is that of its
last token, and a group's rows begin with copies of it.

Legend: R rows, T tokens, M prompts, B completions, P / C padded prompt / completion length, D channels, W inputs that the
convolution remembers, h heads.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch

from mmrl.errors import ConfigError
from mmrl.policy.attention_layout import PrefixLayout

__all__ = ["KeepsStates", "StateLayer", "carry_states"]


class StateLayer:
    """Of one layer, what each row of a cache goes on from: the last inputs of the convolution (R, W, D) and the states (R, h, key
    width, value width), or None before the first token."""

    def __init__(self) -> None:
        self.inputs_RWD: torch.Tensor | None = None
        self.states: torch.Tensor | None = None

    def keep(self, inputs_RWD: torch.Tensor, states: torch.Tensor) -> None:
        """Go on from these; written into the tensors that are there, which a CUDA graph may have recorded."""
        if self.inputs_RWD is None or self.states is None:
            self.inputs_RWD, self.states = inputs_RWD, states
        else:
            self.inputs_RWD.copy_(inputs_RWD)
            self.states.copy_(states)

    def rearrange(self, index: torch.Tensor) -> None:
        """Rows `index` (repeats allowed) become the rows of this layer."""
        self.inputs_RWD, self.states = (x.index_select(0, index) for x in self.now)

    def fill(self, at: torch.Tensor, source: StateLayer, which: torch.Tensor, size: int) -> None:
        """Of `size` rows those named by `at` begin with the rows `which` of another layer."""
        if self.inputs_RWD is None or self.states is None:
            self.inputs_RWD, self.states = (x.new_zeros(size, *x.shape[1:]) for x in source.now)
        for mine, theirs in zip(self.now, source.now, strict=True):
            mine[at] = theirs.index_select(0, which)

    @property
    def now(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and states of a layer that has run."""
        assert self.inputs_RWD is not None and self.states is not None
        return self.inputs_RWD, self.states

    @classmethod
    def of(cls, parts: Sequence[tuple[StateLayer, torch.Tensor]]) -> StateLayer:
        """The rows of several layers, of each those named by an index, one after the other."""
        made = cls()
        pieces = [[x.index_select(0, index) for x in layer.now] for layer, index in parts]
        made.inputs_RWD, made.states = (torch.cat(x) for x in zip(*pieces, strict=True))
        return made


class KeepsStates:
    """A cache of transformers' that holds a StateLayer for each layer without keys. `lengths_R`: how many tokens of each row the
    forward that fills it reads, where rows are padded on the right."""

    layers: list[Any]
    lengths_R: torch.Tensor | None = None

    def state_layer(self, number: int) -> StateLayer:
        """That of layer `number`; layers run in their order."""
        if number == len(self.layers):
            self.layers.append(StateLayer())
        return self.layers[number]


_Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Inputs of the convolution (R, T, D), decay in log space and writing strength (R, T, h)."""


class _CarriesState:
    """In front of transformers' class of the layer: packed rows, and caches that keep states; all else is left to it."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        prefix_layout: PrefixLayout | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """(R, T, H) -> (R, T, H)."""
        # `cache_params` until transformers 5.20, `cache` since
        cache = kwargs.get("cache", kwargs.get("cache_params"))
        if prefix_layout is not None:
            found = _packed(self, hidden_states, prefix_layout)
        elif isinstance(cache, KeepsStates):
            found = _remembered(self, hidden_states, cache, attention_mask)
        else:
            return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)  # type: ignore[misc]
        gate = self.in_proj_z(hidden_states).reshape(-1, self.head_v_dim)
        out = self.norm(found.reshape(-1, self.head_v_dim), gate)
        return self.out_proj(out.reshape(*hidden_states.shape[:2], -1))


@functools.cache
def _carrying(kind: type) -> type:
    return type(kind.__name__, (_CarriesState, kind), {"__module__": kind.__module__})


def carry_states(model: torch.nn.Module) -> None:
    """Let the gated delta nets of a transformers model take packed rows and caches of ours (idempotent)."""
    for module in model.modules():
        kind: Any = type(module)
        if kind.__name__.endswith("GatedDeltaNet") and not issubclass(kind, _CarriesState):
            module.__class__ = _carrying(kind)


def _projected(layer: Any, hidden_RTH: torch.Tensor) -> _Tokens:
    """What the layer makes of each token alone."""
    strength = layer.in_proj_b(hidden_RTH).sigmoid()
    step = torch.nn.functional.softplus(layer.in_proj_a(hidden_RTH).float() + layer.dt_bias)
    return layer.in_proj_qkv(hidden_RTH), -layer.A_log.float().exp() * step, strength


def _mixed(
    layer: Any,
    tokens: _Tokens,
    before: tuple[torch.Tensor, torch.Tensor] | None = None,
    lengths_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """What rows read from their states (R, T, h, value width), and the inputs and states behind them. `before`: those to go on
    from, none at the beginning of a text; `lengths_R`: what lies behind them is padding, which is not written into a state."""
    inputs_RTD, decay_RTh, strength_RTh = tokens
    R, T, D = inputs_RTD.shape
    W = layer.conv_kernel_size - 1
    first_RWD = inputs_RTD.new_zeros(R, W, D) if before is None else before[0].to(inputs_RTD.dtype)
    whole = torch.cat([first_RWD, inputs_RTD], 1)
    if lengths_R is None:
        last_RWD = whole[:, T:]
    else:
        behind_RW = lengths_R[:, None] + torch.arange(W, device=whole.device)
        last_RWD = whole.gather(1, behind_RW[:, :, None].expand(-1, -1, D))
        written_RT1 = (torch.arange(T, device=whole.device) < lengths_R[:, None])[:, :, None]
        decay_RTh, strength_RTh = decay_RTh * written_RT1, strength_RTh * written_RT1
    convolved = torch.nn.functional.conv1d(
        whole.transpose(1, 2).to(layer.conv1d.weight.dtype),
        layer.conv1d.weight,
        layer.conv1d.bias,
        groups=D,
    )
    seen_RTD = torch.nn.functional.silu(convolved).transpose(1, 2).to(inputs_RTD.dtype)
    widths = [layer.key_dim, layer.key_dim, layer.value_dim]
    query, key, value = seen_RTD.split(widths, -1)
    query, key = (x.reshape(R, T, -1, layer.head_k_dim) for x in (query, key))
    groups = layer.num_v_heads // layer.num_k_heads
    if groups > 1:
        query, key = (x.repeat_interleave(groups, 2) for x in (query, key))
    # of the installed kernels that of single tokens has no backward
    rule = _rule(layer, "recurrent" if T == 1 and not torch.is_grad_enabled() else "chunk")
    # states are sums over the whole text: they are kept and added up in fp32
    with torch.autocast(inputs_RTD.device.type, enabled=False):
        out, states = rule(
            query,
            key,
            value.reshape(R, T, -1, layer.head_v_dim),
            g=decay_RTh,
            beta=strength_RTh,
            initial_state=None if before is None else before[1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
    return out, (last_RWD, states)


def _rule(layer: Any, name: str) -> Any:
    """transformers' own function of the delta rule, or what it puts in its place where a faster one is installed."""
    return getattr(
        importlib.import_module(type(layer).__module__), f"torch_{name}_gated_delta_rule"
    )


def _packed(layer: Any, hidden_1TH: torch.Tensor, layout: PrefixLayout) -> torch.Tensor:
    """(T, h, value width). Raises ConfigError for a row that is computed in slices, or whose completions see their end."""
    if layout.sequence is not None or not layout.causal:
        raise ConfigError(
            "expected a packed row in one process, token after token, for layers that carry a state (Qwen3.5), found "
            + ("engine.sequence_parallel; set it to 1" if layout.causal else "parallel decoding")
        )
    blocks = layout.blocks
    inputs, decay, strength = _projected(layer, hidden_1TH)

    def at(index: torch.Tensor) -> _Tokens:
        return inputs[0][index], decay[0][index], strength[0][index]

    lengths_M = layout.prompt_length_M.to(hidden_1TH.device)
    out_M, (last_M, states_M) = _mixed(layer, at(blocks.prompt_MP), lengths_R=lengths_M)
    before = last_M.index_select(0, blocks.owner_B), states_M.index_select(0, blocks.owner_B)
    out_B, _ = _mixed(layer, at(blocks.path_BA), before)
    if blocks.branches:  # what was written before a branch is written into its state once more
        out_B = out_B[torch.arange(len(out_B), device=out_B.device)[:, None], blocks.own_BC]
    both = torch.cat([out_M.flatten(0, 1), out_B.flatten(0, 1)])
    return both.index_select(0, blocks.slot_T)


def _remembered(
    layer: Any, hidden_RTH: torch.Tensor, cache: KeepsStates, mask_RT: torch.Tensor | None
) -> torch.Tensor:
    """(R, T, h, value width); the cache's rows go on from their last tokens. `mask_RT` is 0 where a row is padded on the left."""
    if mask_RT is not None:
        hidden_RTH = hidden_RTH * mask_RT[:, :, None].to(hidden_RTH.dtype)
    state = cache.state_layer(layer.layer_idx)
    begun = state.inputs_RWD is not None
    out, behind = _mixed(
        layer,
        _projected(layer, hidden_RTH),
        state.now if begun else None,
        None if begun else cache.lengths_R,
    )
    state.keep(*behind)
    return out
