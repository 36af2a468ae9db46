"""Make a VLA policy: from a checkpoint that has vla.json, or from any Qwen-VL model, which gets action tokens.

    vla = load_vla(load_embodied("configs/maniskill.yaml"))
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from mmrl.errors import CheckpointError, ConfigError
from mmrl.policy.loading import load_policy
from robotics.actions import ActionCodec, ActionStatistics
from robotics.config import EmbodiedConfig, VLAConfig
from robotics.contract import ActionSpace
from robotics.vla import VLAPolicy, add_action_tokens

__all__ = ["codec_for", "load_vla", "read_description"]


def read_description(folder: str | Path) -> tuple[VLAConfig, ActionCodec] | None:
    """What vla.json of a checkpoint says; None where there is none. Raises CheckpointError for a damaged one."""
    file = Path(folder) / "vla.json"
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return VLAConfig.model_validate(data["vla"]), ActionCodec.from_dict(data["action"])
    except (OSError, KeyError, TypeError, ValueError, ValidationError) as error:
        raise CheckpointError(f"{file}: expected the action settings of a VLA checkpoint, found: {error}") from error


def codec_for(config: EmbodiedConfig, space: ActionSpace) -> ActionCodec:
    """The action codec that the configuration asks for."""
    a = config.action
    options: dict[str, Any] = {"bins": a.bins, "chunk": a.chunk, "repeat": a.repeat}
    if a.statistics is not None:
        return ActionCodec.from_statistics(ActionStatistics.read(a.statistics), gripper=space.gripper, gripper_convention=a.gripper,
                                           **options)
    return ActionCodec.from_space(space, gripper_convention=a.gripper, **options)


def _agree(config: EmbodiedConfig, settings: VLAConfig, codec: ActionCodec) -> VLAConfig:
    """The checkpoint's settings, with the value head the configuration asks for. Raises ConfigError where they contradict."""
    for section, found, names in ((config.action, codec, ("bins", "chunk", "repeat")),
                                  (config.vla, settings, ("decode", "cameras", "prompt", "proprio"))):
        for name in names:
            if name in section.model_fields_set and getattr(section, name) != getattr(found, name):
                raise ConfigError(f"{config.model.path} was made with {name} {getattr(found, name)!r} (vla.json), the "
                                  f"configuration asks for {getattr(section, name)!r}: remove it, or warm-start another model "
                                  "with mmrl sft")
    return settings.model_copy(update={"value_head": config.vla.value_head or settings.value_head})


def load_vla(config: EmbodiedConfig, *, space: ActionSpace | None = None, proprio: tuple[list[float], list[float]] | None = None,
             trainable: bool = True, needs_reference: bool = False, device: torch.device | None = None,
             weights: Path | None = None) -> VLAPolicy:
    """The policy of config.model.path, or of the checkpoint folder `weights`.

    A model without vla.json needs `space` (and, with vla.proprio, the lowest and highest values of each number): it gets
    action tokens and must be trained before it acts well. Raises ConfigError and CheckpointError.
    """
    known = read_description(weights or config.model.path) or read_description(config.model.path)
    if known is not None:
        settings, codec = _agree(config, *known), known[1]
    elif space is None:
        raise ConfigError(f"expected a VLA checkpoint (a folder with vla.json) as model.path, found '{config.model.path}'; make "
                          "one with mmrl sft and this configuration")
    else:
        if config.model.lora is not None:
            raise ConfigError("expected model.lora null for a model that gets new action tokens, found a LoRA adapter: adapters do "
                              "not reach the tokens' rows, which would stay random; clone without one (mmrl sft ... "
                              "model.lora=null) and use LoRA from then on")
        codec, settings = codec_for(config, space), config.vla
        if settings.proprio:
            assert proprio is not None, "a new policy with proprioception needs its range"
            settings = settings.model_copy(update={"proprio_dim": len(proprio[0]), "proprio_low": list(proprio[0]),
                                                   "proprio_high": list(proprio[1])})
    core = load_policy(config.model, config.data, needs_reference=needs_reference, trainable=trainable, device=device,
                       weights=weights,
                       prepare=lambda model, processor: add_action_tokens(model, processor, codec.bins, codec.tokens))
    head = None
    if settings.value_head:
        head = _value_head(core.base.config.get_text_config().hidden_size, settings.value_hidden, config.seed).to(core.device)
    vla = VLAPolicy(core, codec, settings, head)
    if not (weights is not None and vla.load_value_head(weights)):
        vla.load_value_head(config.model.path)
    return vla


def _value_head(width: int, hidden: int, seed: int) -> torch.nn.Module:
    """Two layers; the last starts at zero, so that every value does."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        last = torch.nn.Linear(hidden, 1)
        head = torch.nn.Sequential(torch.nn.Linear(width, hidden), torch.nn.GELU(), last)
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.zeros_(last.bias)
    return head
