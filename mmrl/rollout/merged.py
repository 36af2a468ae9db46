"""A LoRA policy that samples with its adapter merged: W + scale * B A once per version, not two more products per layer and token
(of a mixture's experts all their weights added up anew).

    merged = MergedAdapter(policy)
    PrefillOnceEngine(merged.now())               # a Policy that shares everything but the adapted layers' weights

Training goes on with base and adapter, which are never touched: merging into the base and taking it out again would round it each
time. What is sampled from is the sum, rounded to the type of the forward; training computes the two terms apart. Log-probs of the
two differ by that rounding, as with vLLM, whose copy is merged, too: behaviour log-probs are those of what sampled, and
train/logprob_gap/* shows the difference.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from mmrl.errors import ConfigError
from mmrl.policy.policy import Policy
from mmrl.policy.quantized import NF4Linear

__all__ = ["MergedAdapter"]


class MergedAdapter:
    """A merged copy of the adapted layers and experts of `policy`. Raises ConfigError for layers that cannot be merged."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        # the adapter, the merged copy of what it adapts, and the weight's name there
        self._layers: list[tuple[Any, torch.nn.Module, str]] = []
        dtype = policy.autocast_dtype
        base = policy.base
        memo: dict[int, Any] = {id(t): t for t in (*base.parameters(), *base.buffers())}
        for name, module in base.named_modules():
            if id(module) in memo:
                continue  # a wrapper within that of the same experts
            if hasattr(module, "parameter_name"):
                wrappers = _wrappers(module)
                plain: Any = _plain_experts(wrappers)
                memo |= {id(w): plain for w in wrappers}
                self._layers += [(w, plain, w.parameter_name) for w in wrappers]
            elif "default" in getattr(module, "lora_A", ()):
                memo[id(module)] = plain = _plain(name, module, dtype)
                self._layers.append((module, plain, "weight"))
            elif hasattr(module, "trainable_tokens_delta"):
                memo[id(module)] = module  # as it is: it reads rows, it does not multiply
        if not self._layers:
            raise ConfigError(
                "rollout.merge_adapter merges a LoRA adapter, found none in the policy; set model.lora, or merge_adapter: false"
            )
        self._merged = Policy(
            copy.deepcopy(base, memo),
            policy.processor,
            policy.template,
            policy.encoder,
            device=policy.device,
            autocast=dtype,
        )
        self._merged._towers[id(self._merged.body)] = policy.towers()
        self._seen: tuple[int, ...] = ()

    @torch.no_grad()
    def now(self) -> Policy:
        """The merged policy, with the adapter as it is now."""
        # torch counts what is written in place: an optimizer's step, a weight sync, a checkpoint that is loaded
        seen = tuple(
            p._version
            for layer, *_ in self._layers
            for p in (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
        )
        if seen != self._seen:
            for layer, plain, name in self._layers:
                delta = layer.get_delta_weight("default").float()
                whole = getattr(layer.get_base_layer(), name)
                plain.get_parameter(name).copy_(whole.float() + delta)
            self._seen = seen
        self._merged.version, self._merged.eos_ids = self._policy.version, self._policy.eos_ids
        return self._merged


def _wrappers(outermost: Any) -> list[Any]:
    """PEFT's wrappers of a mixture's experts, one around the other, each with the adapter of one parameter."""
    found = [outermost]
    while hasattr(found[-1].base_layer, "parameter_name"):
        found.append(found[-1].base_layer)
    return found


def _plain_experts(wrappers: list[Any]) -> torch.nn.Module:
    """The experts without their adapters, with weights of their own in the place of the adapted ones: grouped products have no
    autocast, so that the type stays the one in which they are stored."""
    experts = wrappers[0].get_base_layer()
    memo: dict[int, Any] = {id(t): t for t in (*experts.parameters(), *experts.buffers())}
    for wrapper in wrappers:
        whole = wrapper.get_param()
        memo[id(whole)] = torch.nn.Parameter(torch.empty_like(whole), requires_grad=False)
    plain: torch.nn.Module = copy.deepcopy(experts, memo)
    return plain.eval()


def _plain(name: str, layer: Any, dtype: torch.dtype | None) -> torch.nn.Linear:
    """The adapted layer without its adapter and with a weight of its own, of `dtype` or as it is stored."""
    base = layer.base_layer
    if not isinstance(base, torch.nn.Linear) or isinstance(base, NF4Linear):
        raise ConfigError(
            f"rollout.merge_adapter merges adapters of linear layers in full precision, found one on {name}, a "
            f"{type(base).__name__}; leave it out of model.lora.target_modules, or set merge_adapter: false"
        )
    plain = torch.nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
    plain.__class__ = type(base)  # batch-invariant where the base is
    weight = torch.empty_like(base.weight, dtype=dtype or base.weight.dtype)
    plain.weight, plain.bias = torch.nn.Parameter(weight, requires_grad=False), base.bias
    return plain.eval()
