"""The module that sharded engines wrap: its forward runs a function, and everything trained hangs below it.

    root = Root(policy.model)
    logp_N, entropy_N = root(lambda: (policy.logp(batch).logp_N, policy.logp(batch).entropy_N))

FSDP2 and ZeRO-3 gather weights in hooks around a module's forward. mmrl never calls the transformers model's own forward: it
calls model.model for hidden states and uses lm_head.weight directly, in chunks that are computed again in backward. So the hooks
belong to a module that surrounds all of that. It returns plain tuples of tensors, which is what the hooks of backward look for.

A vision or audio tower of which nothing is trained stays outside, whole on every process: its features come from the cache or
are computed without asking anybody (mmrl/policy/vision.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from mmrl.errors import ConfigError
from mmrl.policy.families import family_of

__all__ = ["Root"]


class Root(nn.Module):
    """The language model, the output layer and, where something in them is trained, the towers of a policy's `model`; and
    its `heads`.

    These are the model's own modules, adapters included, under names of their own: `blocks` are those that may be gathered one
    after the other (decoder layers, vision blocks); the rest, which tied weights run through, belongs together.

    Raises ConfigError for a trained parameter that lies in none of these modules: it would be neither sharded nor summed up over
    the processes.
    """

    def __init__(self, model: Any, heads: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        family = family_of(base.config)
        parts, body = family.parts, family.body(base)
        self.language_model, self.lm_head = parts.decoder(body), base.lm_head
        self.blocks: list[nn.Module] = parts.decoder_layers(body)
        for encoders in parts.encoders(body):
            if any(p.requires_grad for p in encoders.parameters):
                for name, module in encoders.modules.items():
                    self.add_module(name, module)
                self.blocks += encoders.blocks
        self.heads = nn.ModuleDict(heads)
        within = {id(p) for p in self.parameters()}
        trained = (
            name for name, p in model.named_parameters() if p.requires_grad and id(p) not in within
        )
        if outside := list(trained):
            held = sorted({parts.part_of(name) for name in outside})
            raise ConfigError(
                f"expected engine.train single or ddp where {', '.join(outside[:3])} of {family.name} is trained, found an engine "
                f"that reaches what lies in the model's parts alone, not in the model itself; add {', '.join(held)} to model.freeze"
            )

    def forward(self, function: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        """What `function` returns, with every weight of the modules it calls in place."""
        return function()
