"""In which type the weights of a copy that only samples are stored: the one that the forward computes with.

    policy.full_replica(device, "products")             # a copy of what is about to be sharded
    load_policy(config, stored="products")              # in a process that does not train

Masters are fp32, because most AdamW updates vanish in bf16. What samples needs no masters: every forward under bf16 autocast rounds
them, and a copy that holds what they are rounded to computes the same numbers from half of the bytes.

"products": weights of linear layers and convolutions, which autocast casts in every call. Log-probs are those of the masters under
autocast, bit for bit. Left as they are: embeddings and norms, which autocast does not cast; the output layer, whose logits are fp32
(mmrl/policy/output_layer.py); experts of a mixture, whose grouped product autocast does not know (log-probs differed by 0.01 nats).

"all": every weight, as FSDP2 gathers them for its forwards (MixedPrecisionPolicy(param_dtype), mmrl/distributed/engines/fsdp.py)
and as vLLM computes. Log-probs are those of that forward, bit for bit; masters under autocast differ from it by 0.01 to 0.03 nats.

Heads of a critic stay fp32, and so do adapters (LoRA): their frozen base is bf16 already. Without autocast nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from mmrl.policy.families import family_of

__all__ = ["Stored", "narrowed", "product_weights"]

Stored = Literal["masters", "products", "all"]
"""How a copy is stored; "masters": as what it is a copy of."""

_PRODUCTS = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)


def product_weights(model: Any) -> Iterator[torch.nn.Parameter]:
    """Weights and biases of the linear layers and convolutions of `model`, but those of the output layer and of what an embedding
    shares."""
    apart = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    shared = {id(p) for module in (*apart, model.lm_head) for p in module.parameters()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False) if isinstance(module, _PRODUCTS) else ():
            if id(parameter) not in shared:
                yield parameter


def narrowed(model: Any, dtype: torch.dtype | None, stored: Stored) -> list[torch.nn.Parameter]:
    """The parameters of `model` that a copy of it holds in `dtype`, the type of the forward: none without one, and none where an
    adapter is trained. Towers in which nothing is trained stay as they are: they compute in their own types, by which their
    features are cached."""
    if stored == "masters" or dtype is None or hasattr(model, "disable_adapter"):
        return []
    family = family_of(model.config)
    parts, body = family.parts, family.body(model)
    if stored == "products":
        found = list(product_weights(model))
    else:
        # what FSDP2 gathers (mmrl/distributed/engines/root.py); what lies in the model itself it leaves alone
        towers = [m for e in parts.encoders(body) for m in e.modules.values()]
        gathered = (parts.decoder(body), model.lm_head, *towers)
        found = [p for module in gathered for p in module.parameters()]
    apart = {id(p) for e in parts.frozen_encoders(body) for p in e.parameters}
    return [p for p in found if id(p) not in apart]
