"""Make a VLA policy: from a checkpoint that has vla.json, or from any Qwen-VL model, which gets action tokens.

vla = load_vla(load_embodied("configs/maniskill.yaml"))
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mmrl.errors import ConfigError
from mmrl.policy.batch_invariance import make_batch_invariant
from mmrl.policy.finite import check_loaded
from mmrl.policy.loading import Hold, load_policy
from mmrl.policy.storage import Stored
from mmrl.policy.value_head import ValueHead
from mmrl.robotics.acting import ActingPolicy
from mmrl.robotics.actions import ActionCodec, ActionStatistics
from mmrl.robotics.config import EmbodiedConfig, FlowConfig, VLAConfig, read_description
from mmrl.robotics.contract import ActionSpace
from mmrl.robotics.flow_load import is_flow, load_flow
from mmrl.robotics.oft_load import is_oft, load_oft, oft_codec
from mmrl.robotics.vla import VLAPolicy, add_action_tokens

__all__ = ["codec_for", "load_vla"]


def codec_for(config: EmbodiedConfig, space: ActionSpace) -> ActionCodec:
    """The action codec that the configuration asks for."""
    a = config.action
    options: dict[str, Any] = {"bins": a.bins, "chunk": a.chunk, "repeat": a.repeat}
    if a.statistics is not None:
        return ActionCodec.from_statistics(
            ActionStatistics.read(a.statistics),
            gripper=space.gripper,
            gripper_convention=a.gripper,
            **options,
        )
    return ActionCodec.from_space(space, gripper_convention=a.gripper, **options)


def _agree(
    config: EmbodiedConfig, settings: VLAConfig, codec: ActionCodec, trainable: bool
) -> VLAConfig:
    """The checkpoint's settings, with the value head the configuration asks for.

    What a checkpoint was made with (vla.json) holds wherever the configuration leaves it unset. Raises ConfigError where the
    configuration sets something else.
    """
    for section, found, names in (
        (config.action, codec, ("bins", "chunk", "repeat")),
        (config.vla, settings, ("decode", "cameras", "prompt", "proprio")),
    ):
        for name in names:
            if name in section.model_fields_set and getattr(section, name) != getattr(found, name):
                raise _contradiction(config, name, getattr(found, name), getattr(section, name))
    if (
        "gripper" in config.action.model_fields_set
        and config.action.gripper != codec.gripper_convention
    ):
        raise _contradiction(config, "gripper", codec.gripper_convention, config.action.gripper)
    if config.action.statistics is not None:
        _check_statistics(config, codec, trainable)
    return _critic_settings(config, settings, codec, trainable)


def _contradiction(config: EmbodiedConfig, name: str, found: Any, asked: Any) -> ConfigError:
    return ConfigError(
        f"{config.model.path} was made with {name} {found!r} (vla.json), the configuration asks for {asked!r}: "
        "remove it, or warm-start another model with mmrl sft"
    )


def _check_statistics(config: EmbodiedConfig, codec: ActionCodec, trainable: bool) -> None:
    """Raises ConfigError where action.statistics are not those of the checkpoint. A policy that only acts may be anywhere, without
    the file: the numbers are in its vla.json."""
    assert config.action.statistics is not None
    if not trainable and not Path(config.action.statistics).exists():
        return
    asked = ActionStatistics.read(config.action.statistics)
    for name, found, wanted in (
        ("low", codec.low, asked.q01),
        ("high", codec.high, asked.q99),
        ("mask", codec.mask, asked.mask),
    ):
        if tuple(found) != tuple(wanted):
            raise _contradiction(config, f"action bounds {name}", list(found), list(wanted))


def _critic_settings(
    config: EmbodiedConfig, settings: VLAConfig, codec: ActionCodec, trainable: bool
) -> VLAConfig:
    """`settings` with the critic: the checkpoint's where it has one, else the configuration's."""
    steps = codec.chunk if config.algorithm.critic.level == "action" else 1
    if not settings.value_head:
        return settings.model_copy(
            update={
                "value_head": config.vla.value_head,
                "value_hidden": config.vla.value_hidden,
                "value_steps": steps,
            }
        )
    if (
        "value_hidden" in config.vla.model_fields_set
        and config.vla.value_hidden != settings.value_hidden
    ):
        raise _contradiction(config, "value_hidden", settings.value_hidden, config.vla.value_hidden)
    if trainable and config.algorithm.advantage == "gae" and steps != settings.value_steps:
        level = config.algorithm.critic.level
        raise ConfigError(
            f"{config.model.path} has a critic with {settings.value_steps} values for each decision (vla.json), "
            f"algorithm.critic.level {level} needs {steps}: set it to {'action' if steps == 1 else 'turn'}, or start "
            "from a policy without a critic"
        )
    return settings


def load_vla(
    config: EmbodiedConfig,
    *,
    space: ActionSpace | None = None,
    proprio: tuple[list[float], list[float]] | None = None,
    trainable: bool = True,
    needs_reference: bool = False,
    device: torch.device | None = None,
    weights: Path | None = None,
    stored: Stored = "masters",
    hold: Mapping[str, Hold] | None = None,
) -> ActingPolicy:
    """The policy of config.model.path, or of the checkpoint folder `weights`. `stored`, `hold`: see load_policy; policies with a
    head of their own (flow, OFT), parts of which compute outside of autocast, are stored as they train, and no engine shards them.

    A model without vla.json needs `space` (and, with vla.proprio, the lowest and highest values of each number): it gets
    action tokens and must be trained before it acts well; a LoRA adapter then trains the rows of the new tokens as well. Raises
    ConfigError and CheckpointError.
    """
    flow, oft = is_flow(config.model.path), is_oft(config.model.path)
    known = read_description(weights or config.model.path) or read_description(config.model.path)
    if known is not None:
        settings, codec = _agree(config, *known, trainable), known[1]
    elif space is None:
        raise ConfigError(
            f"expected a VLA checkpoint (a folder with vla.json) as model.path, found '{config.model.path}'; make "
            "one with mmrl sft and this configuration"
        )
    else:
        codec = oft_codec(config, space) if oft else codec_for(config, space)
        settings = config.vla.model_copy(
            update={"value_steps": codec.chunk if config.algorithm.critic.level == "action" else 1}
        )
        if settings.proprio:
            assert proprio is not None, "a new policy with proprioception needs its range"
            settings = settings.model_copy(
                update={
                    "proprio_dim": len(proprio[0]),
                    "proprio_low": list(proprio[0]),
                    "proprio_high": list(proprio[1]),
                }
            )
    if trainable and not (flow or oft):  # those resize what they see to a size of their own
        settings = settings.model_copy(update={"image_size": config.env.image_size})
    if flow:
        return load_flow(
            config,
            settings,
            codec,
            trainable=trainable,
            needs_reference=needs_reference,
            device=device,
            weights=weights,
        )
    if oft and config.vla.flow == FlowConfig():
        return load_oft(
            config,
            settings,
            codec,
            trainable=trainable,
            needs_reference=needs_reference,
            device=device,
            weights=weights,
        )
    if config.vla.flow != FlowConfig():
        raise ConfigError(
            f"vla.flow is of a policy with a flow head, {config.model.path} has none: remove it, or name a SmolVLA or pi0"
        )
    if settings.decode == "flow":
        raise ConfigError(
            f"vla.decode flow is of a policy with a flow head, {config.model.path} has none: remove it, or name a SmolVLA or pi0"
        )
    described = read_description(config.model.path) is not None
    core = load_policy(
        config.model,
        config.data,
        needs_reference=needs_reference,
        trainable=trainable,
        device=device,
        weights=weights,
        stored=stored,
        # rows of new action tokens are written into tables that are there
        hold=hold if described else dict.fromkeys(hold or (), "host"),
        prepare=lambda model, processor: add_action_tokens(
            model, processor, codec.bins, codec.tokens
        ),
    )
    head = None
    if settings.value_head:
        width = core.family.hidden_width(core.base.config)
        head = ValueHead(width, settings.value_hidden, settings.value_steps, config.seed).to(
            core.device
        )
        make_batch_invariant(head, core.device)
    vla = VLAPolicy(core, codec, settings, head, batch_tokens=config.rollout.batch_tokens)
    if not (weights is not None and vla.load_value_head(weights)):
        vla.load_value_head(config.model.path)
    # the model's own were looked at when it was loaded, or will be when they are read
    if head is not None:
        named = ((f"value_head.{name}", p) for name, p in head.named_parameters())
        check_loaded(named, weights or config.model.path)
    return vla
