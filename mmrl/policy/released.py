"""Weights in the order that a family's released checkpoints have, so that whatever reads those reads a trained one.

    model.save_pretrained(folder, **released_form(family, model))

transformers undoes its conversions when it saves, but for a transposition that depends on shapes: Qwen3-VL-MoE's experts are
(E, in, out) in released checkpoints, (E, out, in) in the model and in what save_pretrained writes. vLLM takes the first alone.
A square weight is left as it is: transformers, which tells the two by their shapes, would take it for its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mmrl.policy.families import ModelFamily

__all__ = ["as_released", "released_form"]


def as_released(
    family: ModelFamily, model: Any, weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`weights`, by the names of `model` (transformers' class), under the names and in the order of released checkpoints. What is
    transposed is copied to host memory."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, torch.Tensor] = dict(revert_weight_conversion(model, dict(weights)))
    for name, weight in found.items():
        if name.endswith(family.released_transposed) and weight.shape[1] != weight.shape[2]:
            found[name] = weight.detach().cpu().transpose(1, 2).contiguous()
    return found


def released_form(
    family: ModelFamily, model: Any, weights: Mapping[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    """Arguments of `model.save_pretrained` for its own weights, or for `weights`. transformers does all that it can by itself."""
    if not family.released_transposed:
        return {} if weights is None else {"state_dict": weights}
    state = as_released(family, model, model.state_dict() if weights is None else weights)
    return {"state_dict": state, "save_original_format": False}
