"""The trainer's weights under the names of a checkpoint, tensor by tensor, for a rollout engine that has a copy of its own.

    for name, tensor in SyncPlan(policy).weights(train_engine, everything=False): ...

LoRA adapters are merged on the way (W + scale * B A in fp32, then rounded to W's type): the live weights stay as they are. Tied
embeddings are named twice, as `embed_tokens` and as `lm_head`: vLLM packs the output layer separately and would keep the old one.
After the first time only blocks in which something is trained are sent; vLLM fuses a block's q, k and v (gate and up), so that a
block goes whole or not at all. `held` then says what the other side must hold, whether it was sent now or earlier.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from mmrl.errors import ConfigError
from mmrl.policy.policy import Policy
from mmrl.policy.quantized import NF4Linear, whole_weight
from mmrl.rollout.digest import WeightDigest, block_of

__all__ = ["SyncPlan", "WeightSource"]

_HEAD = "lm_head.weight"
_ADAPTER = re.compile(r"(.*)\.(base_layer|lora_A\.default|lora_B\.default)\.(weight|bias)")


class WeightSource(Protocol):
    """What a sync needs of a training engine (mmrl.distributed.engines.base.TrainEngine)."""

    sharded: bool

    def parameters(self, *, trainable: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """See TrainEngine.parameters."""

    def run(self, forward: Any) -> tuple[torch.Tensor, ...]:
        """See TrainEngine.run."""


class SyncPlan:
    """Which tensors a sync sends, from the names and the frozen parts of a policy that has not been sharded yet."""

    def __init__(self, policy: Policy, *, digests: bool = True) -> None:
        self._prefix = "base_model.model." if policy.has_adapter else ""
        self._critic = tuple(f"{name}." for name in policy.heads)  # what samples has no use for it
        self._scales = self._adapters(policy.model)
        # a policy whose base is quantized is never sharded: its modules stay
        self._packed = {
            name: module
            for name, module in policy.model.named_modules()
            if isinstance(module, NF4Linear)
        }
        named = dict(policy.model.named_parameters())
        heads = [
            n
            for n, _ in policy.model.named_parameters(remove_duplicate=False)
            if self._public(n) == _HEAD
        ]
        self._tied = bool(heads) and heads[0] not in named
        self._embedding = next(
            (n for n in named if self._public(n).endswith("language_model.embed_tokens.weight")),
            None,
        )
        self._changed = {block_of(self._public(n)) for n, p in named.items() if p.requires_grad}
        if (
            self._tied
            and block_of(_HEAD) not in self._changed
            and self._embedding
            and named[self._embedding].requires_grad
        ):
            self._changed.add(block_of(_HEAD))
        self.expected = {self._public(n) for n in named if ".lora_" not in n} | (
            {_HEAD} if self._tied else set()
        )
        self.held: dict[str, int] = {}
        """With `digests`: those of all weights as they were at the end of the last `weights`, in the type of the forward."""
        self._digests = digests
        self._frozen: dict[str, torch.Tensor] = {}  # digests of tensors that training never changes
        self.dtype = policy.autocast_dtype or torch.float32
        parts = policy.family.parts
        self.vision_changes = any(parts.part_of(name) != "language" for name in self._changed)

    def _adapters(self, model: Any) -> dict[str, float]:
        """Scale of the adapter of each adapted layer, by the layer's name."""
        scales = {}
        for name, module in model.named_modules():
            if hasattr(module, "trainable_tokens_delta"):
                raise ConfigError(
                    "engine.rollout vllm does not take over single trained rows of the embedding (new tokens beside "
                    "a LoRA adapter); use engine.rollout: own"
                )
            if hasattr(module, "lora_A") and "default" in module.lora_A:
                scales[name] = float(module.scaling["default"])
        return scales

    def _public(self, name: str) -> str:
        """The name in a checkpoint of the merged model."""
        return name.removeprefix(self._prefix).replace(".base_layer.", ".")

    def weights(
        self, source: WeightSource, *, everything: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of all weights, or of the blocks that training changes, in the type that the forward computes in.
        Collective; every process must go to the end.

        A tensor may be held beyond the next one. Raises ConfigError when the engine names other weights than the policy had.
        """
        seen: set[str] = set()
        digest = WeightDigest(self.dtype)
        for name, tensor in self._merged(source):
            names = (
                [name, _HEAD]
                if self._tied and name == self._public(self._embedding or "")
                else [name]
            )
            seen.update(names)
            number = self._number(digest, name, tensor)
            for each in names:
                digest.count(each, number)
            if wanted := [each for each in names if everything or block_of(each) in self._changed]:
                sent = tensor.to(self.dtype)  # one object under both names
                yield from ((each, sent) for each in wanted)
        if seen != self.expected:
            missing, extra = sorted(self.expected - seen)[:4], sorted(seen - self.expected)[:4]
            raise ConfigError(
                f"the training engine names other weights than the policy has: missing {missing}, unknown {extra}"
            )
        self.held = digest.result()

    def _number(self, digest: WeightDigest, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not self._digests:
            return torch.zeros((), dtype=torch.int64)
        if block_of(name) in self._changed:
            return digest.of(tensor)
        if name not in self._frozen:
            self._frozen[name] = digest.of(tensor)
        return self._frozen[name]

    def _merged(self, source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
        held: dict[str, dict[str, torch.Tensor]] = {}
        for name, live in source.parameters(trainable=False):
            if name.startswith(self._critic):
                continue
            tensor = live.detach().clone() if source.sharded else live.detach()
            if (packed := self._packed.get(name.removesuffix(".weight"))) is not None:
                tensor = whole_weight(packed)
            found = _ADAPTER.fullmatch(name)
            if found is None:
                yield self._public(name), tensor
                continue
            layer, part, kind = found.groups()
            if part == "base_layer" and kind == "bias":
                yield self._public(name), tensor
                continue
            parts = held.setdefault(layer, {})
            parts[part] = tensor
            if len(parts) == 3:
                del held[layer]
                yield self._public(f"{layer}.weight"), _merge(parts, self._scales[layer])
        assert not held, f"adapters without a layer: {sorted(held)[:4]}"


def _merge(parts: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
    """W + scale * B A in fp32, as W's type."""
    base = parts["base_layer"]
    delta = parts["lora_B.default"].float() @ parts["lora_A.default"].float()
    if base.ndim > 2:
        raise ConfigError(
            f"expected LoRA on matrices, found one on a weight of shape {tuple(base.shape)}; leave it out of "
            "model.lora.target_modules, or use engine.rollout: own"
        )
    return (base.float() + scale * delta).to(base.dtype)
