"""Estimated activations of a family against what autograd really keeps, for the check `memory`. Part of
mmrl.diagnostics.families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mmrl.diagnostics.memory_activations import (
    Micro,
    Precision,
    update_bytes,
    vision_update_bytes,
)
from mmrl.policy.encode import Prompt
from mmrl.policy.pack import Batch, PackItem, pack
from mmrl.policy.policy import Policy

__all__ = ["kept_bytes", "language_apart", "tower_apart"]

APART = 0.1
_PROMPT, _COMPLETION, _SIZE, _GROUPS = 300, 64, 4, 3
_ROWS = 2048  # of a tower: pixels outweigh what is there once
_PICTURE = (448, 448, 3)


def kept_bytes(policy: Policy, function: Callable[[], Any]) -> int:
    """Bytes of distinct memory that autograd keeps for the backward pass of `function`, parameters left out."""
    found: dict[int, tuple[int, torch.Tensor]] = {}
    own = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # a result that its own graph keeps would keep the graph: a cycle that Python does not see, and never frees
        tensor = tensor.detach()
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            # kept alive: its address must stay its own
            found[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), policy.autocast():
        function()
    return sum(size for size, _ in found.values())


def _groups(policy: Policy) -> tuple[Batch, Micro]:
    """A packed batch of equal groups of text, and its description."""
    words = policy.processor.tokenizer(
        "the red circle left of the blue square", add_special_tokens=False
    )
    ids = torch.tensor(words["input_ids"]).repeat(_PROMPT)[:_PROMPT]
    kinds, positions = torch.zeros(_PROMPT, dtype=torch.long), torch.arange(_PROMPT).expand(3, -1)
    prompt = Prompt(ids, kinds, positions, _PROMPT)
    answers = tuple(tuple(ids[:_COMPLETION].tolist()) for _ in range(_SIZE))
    micro = Micro(_GROUPS, _PROMPT, _COMPLETION, _SIZE)
    return pack([PackItem(prompt, answers)] * _GROUPS), micro


def _near(estimated: float, measured: float, what: str) -> float:
    apart = estimated / measured - 1
    assert abs(apart) <= APART, (
        f"activations of the {what}: expected an estimate at most {APART:.0%} from what autograd keeps, found {estimated:,.0f} "
        f"bytes beside {measured:,}"
    )
    return apart


def language_apart(policy: Policy) -> float:
    """How far the estimate of the decoder layers' activations is from what is measured, in parts of it, where everything is trained
    in fp32. Raises AssertionError where that is over a tenth."""
    batch, micro = _groups(policy)
    config = policy.base.config
    estimated, _ = update_bytes(
        config.text_config,
        policy.family.layers(config.text_config),
        Precision(4, 4),
        micro,
        "sdpa",
        trained=True,
        adapted=frozenset(),
        checkpointing=False,
    )
    return _near(estimated, kept_bytes(policy, lambda: policy.hidden(batch)), "language model")


def tower_apart(policy: Policy) -> float:
    """As `language_apart`, of the vision tower."""
    visuals, config = policy.encoder.visuals, policy.base.config
    noise = np.random.default_rng(0).integers(0, 256, _PICTURE, dtype=np.uint8)
    visual = visuals.frame(noise)
    pixels = visuals.pixels(visual)
    tower = policy.family.tower_of(config)
    count = max(1, round(_ROWS / (len(pixels) * tower.rows)))
    joined, grids = torch.cat([pixels] * count), [visual.grid_thw] * count
    rows = len(joined) * tower.rows
    estimated = vision_update_bytes(
        tower,
        Precision(4, 4),
        rows,
        pixels.shape[1] / tower.rows,
        pictures=count,
        checkpointing=False,
    )
    measured = kept_bytes(
        policy, lambda: policy.family.features(policy.body, "image", joined, grids)
    )
    return _near(estimated, measured, "vision tower")
