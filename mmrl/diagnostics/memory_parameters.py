"""Bytes of a run's parameters by what becomes of them, exactly: the model is made on torch's meta device, and frozen, adapted and
stored by the functions that load it. Part of mmrl.diagnostics.memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmrl.config import AlgorithmConfig, KLConfig, ModelConfig, RunConfig

if TYPE_CHECKING:
    from mmrl.policy.storage import Stored

__all__ = ["ParameterBytes", "parameter_bytes", "parameters_of", "storage"]


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes of parameters by what becomes of them; `gradients` also is half of AdamW's state.

    weights: all; tower: a vision tower in which nothing is trained; block: the largest decoder layer or vision block; root: what is
    in neither; head: (bytes per number, trained) of the output layer; largest: the largest trained tensor; products: trained
    weights of matrix products, which autocast casts; tied: whether the output layer is the embedding;
    numbers: parameters of the model; stored: how many of them are cast after they were read; vision: how many are in the vision
    tower; reference_tower: of the reference's bytes those of its tower; merged: the weights that adapters are merged into; experts:
    of these the experts of each decoder layer; copies: of a copy that only samples, without a tower in which nothing is trained, by
    how it is stored (mmrl.policy.storage).
    What a sharded engine gathers together (mmrl/distributed/engines/root.py), in numbers of weights and bytes of gradients:
    root_numbers and root_gradients; block_numbers and block_gradients of the largest block. head_numbers of the output layer;
    embedding_trained: of the embedding, where it is trained.
    fusable: whether model.fused_layers reaches all that it could in every decoder layer.
    For what goes to vLLM, in numbers: module, the most that one of its modules holds (an embedding, a layer's experts, or what it
    fuses: q, k and v, gate and up), with module_stored bytes per number; adapted_module, the most of those that adapters are merged
    into, and adapted_weight, the largest weight of them.
    """

    weights: int
    gradients: int
    reference: int
    tower: int
    block: int
    root: int
    head: tuple[int, bool]
    trained_vision: bool
    trained_language: bool
    adapted: frozenset[str]
    largest: int
    products: int
    tied: bool
    numbers: int
    stored: int
    vision: int
    reference_tower: int
    merged: int
    experts: tuple[int, ...]
    copies: dict[Stored, int]
    root_numbers: int
    root_gradients: int
    block_numbers: int
    block_gradients: int
    head_numbers: int
    embedding_trained: int
    module: int
    module_stored: int
    adapted_module: int
    adapted_weight: int
    fusable: bool


def storage(config: RunConfig, kind: str) -> tuple[Any, Any]:
    """(type that weights are loaded in, autocast's type or None), see load_policy."""
    import torch

    from mmrl.policy.loading import storage_types

    choice = (
        config.model.dtype
        if config.model.dtype != "auto"
        else ("bf16" if kind == "cuda" else "fp32")
    )
    return (torch.float32, None) if choice == "fp32" else storage_types(config.model)


def _size(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in {id(p): p for p in parameters}.values())


def _numbers(parameters: Any) -> int:
    return sum(p.numel() for p in {id(p): p for p in parameters}.values())


def _trained(module: Any) -> list[Any]:
    return [p for p in module.parameters() if p.requires_grad]


def _adapted_weights(model: Any) -> list[Any]:
    """What adapters are merged into: a layer's weight, or the parameter of a mixture's experts that PEFT has wrapped, in as many
    wrappers as there are such parameters."""
    found = []
    for layer in (m for m in model.modules() if hasattr(m, "lora_A")):
        found.append(getattr(_innermost(layer), getattr(layer, "parameter_name", "weight")))
    return found


def _innermost(layer: Any) -> Any:
    while hasattr(layer, "base_layer"):
        layer = layer.base_layer
    return layer


_FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})


def _as_vllm_fuses(base: Any) -> Iterator[tuple[bool, int, int]]:
    """(whether adapters are merged into it, numbers, bytes of one) of what each module holds itself, and of layers that vLLM makes
    one of."""
    for module in base.modules():
        children = dict(module.named_children())
        for layers in ([module], *([children[n] for n in names & {*children}] for names in _FUSED)):
            adapted = any(hasattr(layer, "lora_A") for layer in layers)
            # an adapter's layer holds what it adapts below it
            own = [p for layer in layers for p in _innermost(layer).parameters(recurse=False)]
            if own:
                yield adapted, _numbers(own), max(p.element_size() for p in own)


def _together(model: Any, base: Any, frozen: list[Any], blocks: list[Any]) -> dict[str, int]:
    """Fields of ParameterBytes by what is gathered, or sent, together; `frozen` encoders are never gathered."""
    away = {id(p) for e in frozen for p in e.parameters}
    away |= {id(p) for b in blocks for p in b.parameters()}
    root = [p for p in model.parameters() if id(p) not in away]
    embedding = base.get_input_embeddings().weight
    found = list(_as_vllm_fuses(base))
    # of a base in 4 bits an adapted one is the same: it passes in the type that it multiplies in
    module, stored = max(((n, size) for adapted, n, size in found if not adapted), default=(0, 0))
    return {
        "root_numbers": _numbers(root),
        "root_gradients": _size(p for p in root if p.requires_grad),
        "block_numbers": max(_numbers(b.parameters()) for b in blocks),
        "block_gradients": max(_size(_trained(b)) for b in blocks),
        "head_numbers": base.lm_head.weight.numel(),
        "embedding_trained": embedding.numel() if embedding.requires_grad else 0,
        "module": module,
        "module_stored": stored,
        "adapted_module": max((n for adapted, n, _ in found if adapted), default=0),
        "adapted_weight": max((w.numel() for w in _adapted_weights(model)), default=0),
    }


def parameter_bytes(config: RunConfig, shape: Any, kind: str) -> ParameterBytes:
    """Bytes of the run's parameters on a device of `kind`, as load_policy would store them. `shape`: the model's configuration."""
    import torch

    from mmrl.diagnostics.shapes import meta_model
    from mmrl.policy.adapter import add_adapter
    from mmrl.policy.families import family_of
    from mmrl.policy.fused_layers import fusable
    from mmrl.policy.loading import freeze_parts, store_frozen

    dtype, autocast = storage(config, kind)
    model = meta_model(shape, dtype)
    freeze_parts(model, config.model.freeze)
    numbers, stored = sum(p.numel() for p in model.parameters()), 0
    reference, reference_tower, lora = 0, 0, config.model.lora
    if lora is None and config.algorithm.kl.coef > 0:
        other = meta_model(shape, dtype).requires_grad_(False)
        if autocast is not None:
            store_frozen(other, autocast)
        reference = _size(other.parameters())
        family = family_of(shape)
        reference_tower = _size(
            p for e in family.parts.encoders(family.body(other)) for p in e.parameters
        )
    if lora is not None:
        model = add_adapter(model, config.model, None, ())
    elif autocast is not None:
        stored = store_frozen(model, autocast)
    base = model.get_base_model() if lora is not None else model
    parts, body = family_of(shape).parts, family_of(shape).body(base)
    visual, layers = parts.vision_parameters(body), parts.decoder_layers(body)
    frozen = parts.frozen_encoders(body)
    trained = [e for e in parts.encoders(body) if e.sense not in {f.sense for f in frozen}]
    blocks = [*layers, *(b for e in trained for b in e.blocks)]
    tower = sum(_size(e.parameters) for e in frozen)
    weights = _size(model.parameters()) - _saved_by_quantizing(config, base)
    adapted = {
        name.rsplit(".", 1)[-1]
        for layer in layers  # not all have the same modules
        for name, m in layer.named_modules()
        if hasattr(m, "lora_A")
    }
    return ParameterBytes(
        weights=weights,
        gradients=_size(p for p in model.parameters() if p.requires_grad),
        reference=reference,
        tower=tower,
        block=max(_size(b.parameters()) for b in blocks),
        root=weights - tower - sum(_size(b.parameters()) for b in blocks),
        head=(base.lm_head.weight.element_size(), base.lm_head.weight.requires_grad),
        trained_vision=any(p.requires_grad for b in parts.blocks(body) for p in b.parameters()),
        trained_language=any(
            p.requires_grad for n, p in layers[0].named_parameters() if "lora_" not in n
        ),
        adapted=frozenset(adapted),
        largest=max((_size([p]) for p in model.parameters() if p.requires_grad), default=0),
        products=_size(
            p
            for m in model.modules()
            if isinstance(m, (torch.nn.Linear, torch.nn.Conv3d)) and m is not base.lm_head
            for p in m.parameters(recurse=False)
            if p.requires_grad
        ),
        tied=base.lm_head.weight is base.get_input_embeddings().weight,
        numbers=numbers,
        stored=stored,
        vision=sum(p.numel() for p in visual),
        reference_tower=reference_tower,
        merged=_size(_adapted_weights(model)),
        experts=tuple(_size(w for w in _adapted_weights(layer) if w.ndim == 3) for layer in layers),
        copies=_copies(model, autocast, weights - tower),
        **_together(model, base, frozen, blocks),
        fusable=all(map(fusable, layers)),
    )


def _copies(model: Any, autocast: Any, whole: int) -> dict[Stored, int]:
    """Bytes of a copy that samples by how it is stored; `whole`: those of what it is a copy of."""
    from mmrl.policy.storage import narrowed

    found: dict[Stored, int] = {"masters": whole, "products": whole, "all": whole}
    for stored in found:
        narrow = {id(p): p for p in narrowed(model, autocast, stored)}.values()
        found[stored] -= sum(p.numel() * (p.element_size() - autocast.itemsize) for p in narrow)
    return found


def _saved_by_quantizing(config: RunConfig, base: Any) -> int:
    """What the language model's linear layers need less in 4 bits (mmrl/policy/quantized.py)."""
    import torch

    from mmrl.policy.families import family_of
    from mmrl.policy.quantized import BYTES_PER_NUMBER

    if config.model.lora is None or config.model.lora.quantize is None:
        return 0
    layers = [
        module.weight
        for layer in family_of(base.config).parts.decoder_layers(family_of(base.config).body(base))
        for name, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear) and ".lora_" not in name
    ]
    return int(sum(w.numel() * (w.element_size() - BYTES_PER_NUMBER) for w in layers))


@functools.lru_cache(maxsize=16)
def parameters_of(model: str, reference: bool, kind: str) -> ParameterBytes:
    """`parameter_bytes` of a model section: everything else in a configuration leaves them alone."""
    from mmrl.diagnostics.shapes import config_of

    section = ModelConfig.model_validate_json(model)
    run = RunConfig(
        model=section, algorithm=AlgorithmConfig(kl=KLConfig(coef=1.0 if reference else 0.0))
    )
    return parameter_bytes(run, config_of(section.path), kind)
