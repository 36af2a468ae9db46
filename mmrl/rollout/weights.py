"""The trainer's weights under the names of a checkpoint, tensor by tensor, for a rollout engine that has a copy of its own.

    for name, tensor in SyncPlan(policy).weights(train_engine, everything=False): ...

The experts of a mixture, which transformers holds as one tensor, go one by one: vLLM's classes disagree on the layout of the tensor
of all (Qwen3-VL's checkpoints have it transposed), and agree on that of one. Buffers that a checkpoint holds go, too, in their own
type: the bias that GLM's routers choose experts by is one.

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
_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_ADAPTER = re.compile(r"(.*)\.(lora_A|lora_B)\.default\.weight")


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
        self._adapted: dict[str, str] = {}  # the weight, by the adapter's layer
        self._scales = self._adapters(policy.model)
        # a policy whose base is quantized is never sharded: its modules stay
        self._packed = {
            name: module
            for name, module in policy.model.named_modules()
            if isinstance(module, NF4Linear)
        }
        named = dict(policy.model.named_parameters())
        self._buffers = _saved_buffers(policy.model)  # their modules stay, sharded or not
        self._saved = {self._public(n) for n in self._buffers}
        self._lacks, self._renamed = policy.family.vllm_lacks, policy.family.vllm_names
        heads = [
            n
            for n, _ in policy.model.named_parameters(remove_duplicate=False)
            if self._public(n) == _HEAD
        ]
        self._tied = bool(heads) and heads[0] not in named
        text = policy.family.parts.language
        self._embedding = next(
            (n for n in named if self._public(n).endswith(f"{text}.embed_tokens.weight")),
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
        self.expected = {self._public(n) for n in named if ".lora_" not in n} | self._saved
        if self._tied:
            self.expected.add(_HEAD)
        self.held: dict[str, int] = {}
        """With `digests`: those of all weights as they were at the end of the last `weights`, in the type of the forward."""
        self._digests = digests
        self._frozen: dict[str, torch.Tensor] = {}  # digests of tensors that training never changes
        self.dtype = policy.autocast_dtype or torch.float32
        parts = policy.family.parts
        self.vision_changes = any(parts.part_of(name) != "language" for name in self._changed)

    def _adapters(self, model: Any) -> dict[str, float]:
        """Scale of each adapter, by the name of the weight that it adapts."""
        scales = {}
        for name, module in model.named_modules():
            if hasattr(module, "trainable_tokens_delta"):
                raise ConfigError(
                    "engine.rollout vllm does not take over single trained rows of the embedding (new tokens beside "
                    "a LoRA adapter); use engine.rollout: own"
                )
            if hasattr(module, "lora_A") and "default" in module.lora_A:
                self._adapted[name] = weight = _weight_of(name, module)
                scales[weight] = float(module.scaling["default"])
        return scales

    def _public(self, name: str) -> str:
        """The name in a checkpoint of the merged model."""
        return re.sub(r"(\.base_layer)+\.", ".", name.removeprefix(self._prefix))

    def _theirs(self, name: str) -> str:
        """The name that vLLM knows."""
        for ours, theirs in self._renamed.items():
            if name.startswith(ours) and not name.startswith(theirs):
                return theirs + name.removeprefix(ours)
        return name

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
            if any(part in name for part in self._lacks):
                continue
            number = self._number(digest, name, tensor)
            for each in names:
                digest.count(self._theirs(each), number)
            if wanted := [each for each in names if everything or block_of(each) in self._changed]:
                # one object under both names
                sent = tensor if name in self._saved else tensor.to(self.dtype)
                for each in wanted:
                    yield from _apart(self._theirs(each), sent)
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
        # first: they are a part of what vLLM packs when a layer's last parameter has come
        for name, (module, leaf) in self._buffers.items():
            yield self._public(name), getattr(module, leaf).detach()
        held: dict[str, dict[str, torch.Tensor]] = {}
        for name, live in source.parameters(trainable=False):
            if name.startswith(self._critic):
                continue
            tensor = live.detach().clone() if source.sharded else live.detach()
            if (packed := self._packed.get(name.removesuffix(".weight"))) is not None:
                tensor = whole_weight(packed)
            found = _ADAPTER.fullmatch(name)
            if found is not None:
                layer, part = found.groups()
                weight = self._adapted[layer]
            elif name in self._scales:
                weight, part = name, "base"
            else:
                yield self._public(name), tensor
                continue
            parts = held.setdefault(weight, {})
            parts[part] = tensor
            if len(parts) == 3:
                del held[weight]
                yield self._public(weight), _merge(parts, self._scales[weight])
        assert not held, f"adapters without a layer: {sorted(held)[:4]}"


def _saved_buffers(model: Any) -> dict[str, tuple[Any, str]]:
    """The module, and the name there, of each buffer that a checkpoint holds."""
    return {
        f"{path}.{leaf}": (module, leaf)
        for path, module in model.named_modules()
        for leaf, buffer in module.named_buffers(recurse=False)
        if leaf not in module._non_persistent_buffers_set and buffer is not None
    }


def _apart(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor under its name; that of all experts, gate_up_proj (E, 2 I, H) or down_proj (E, H, I), as the weights of each."""
    found = _EXPERTS.fullmatch(name)
    if found is None or tensor.ndim != 3:
        yield name, tensor
        return
    path, kind = found.groups()
    for number, weight in enumerate(tensor):
        if kind == "down_proj":
            yield f"{path}.{number}.down_proj.weight", weight
        else:
            gate, up = weight.chunk(2)
            yield f"{path}.{number}.gate_proj.weight", gate
            yield f"{path}.{number}.up_proj.weight", up


def _weight_of(name: str, layer: Any) -> str:
    """The weight that the adapter of `layer` adapts: a linear layer's, or the parameter that PEFT has wrapped for a mixture's
    experts, in as many wrappers as there are such parameters."""
    inside, path = layer.base_layer, f"{name}.base_layer"
    while hasattr(inside, "base_layer"):
        inside, path = inside.base_layer, f"{path}.base_layer"
    return f"{path}.{getattr(layer, 'parameter_name', 'weight')}"


def _merge(parts: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
    """W + scale * B A in fp32, as W's type. Raises ConfigError for other weights than matrices and experts (E, out, in)."""
    base, A, B = parts["base"], parts["lora_A"].float(), parts["lora_B"].float()
    delta = _delta(base, A, B) if A.ndim == 2 else None
    if delta is None or delta.shape != base.shape:
        raise ConfigError(
            f"expected LoRA on matrices, or on experts (E, out, in), found one on a weight of shape {tuple(base.shape)}; leave "
            "it out of model.lora.target_modules, or use engine.rollout: own"
        )
    return (base.float() + scale * delta).to(base.dtype)


def _delta(base: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """B A; of experts one product each: PEFT keeps A (E r, in) expert by expert, and B (out, r E) rank by rank."""
    if base.ndim < 3:
        return B @ A
    count = len(base)
    return torch.einsum("ore,eri->eoi", B.view(len(B), -1, count), A.view(count, -1, A.shape[1]))
