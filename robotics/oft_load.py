"""Make a policy of OpenVLA-OFT's files.

    policy = load_vla(config)              # asks `is_oft(config.model.path)`

What is read: config.json, model*.safetensors, the tokenizer, proprio_projector*checkpoint.pt. No code of the folder is run. The L1
head (action_head*checkpoint.pt) gives actions without a probability, of which reinforcement learning could make nothing: such
checkpoints are refused, mmrl.robotics.openvla_server evaluates them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmrl.errors import CheckpointError, ConfigError, did_you_mean
from mmrl.policy.batch_invariance import make_batch_invariant
from mmrl.policy.finite import check_loaded
from mmrl.policy.loading import device_and_precision
from mmrl.policy.manifest import check_loadable
from mmrl.policy.value_head import ValueHead
from mmrl.robotics.actions import ActionCodec, ActionStatistics
from mmrl.robotics.config import EmbodiedConfig, VLAConfig
from mmrl.robotics.contract import ActionSpace
from mmrl.robotics.oft import OFTShape, OpenVLAOFT
from mmrl.robotics.oft_policy import OFTPolicy

__all__ = ["is_oft", "load_oft", "oft_codec"]


def is_oft(folder: str | Path) -> bool:
    """Whether a folder holds an OpenVLA-OFT. OpenVLA's own has the same config.json: vla.decode tells them apart."""
    try:
        known = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # what it is instead is for others to say
    return isinstance(known, dict) and known.get("model_type") == "openvla"


def oft_codec(config: EmbodiedConfig, space: ActionSpace) -> ActionCodec:
    """OpenVLA's bins over the statistics that the configuration names, or over the simulator's bounds."""
    a, bins = config.action, OFTShape.read(config.model.path).bins
    if "bins" in a.model_fields_set and a.bins != bins:
        raise ConfigError(
            f"expected action.bins {bins} (n_action_bins of {config.model.path}), found {a.bins}: remove it"
        )
    options: dict[str, Any] = {
        "bins": bins,
        "chunk": a.chunk,
        "repeat": a.repeat,
        "layout": "openvla",
        "gripper": space.gripper,
        "gripper_convention": a.gripper,
    }
    if a.statistics is not None:
        return ActionCodec.from_statistics(ActionStatistics.read(a.statistics), **options)
    return ActionCodec.from_space(space, **options)


def _check(config: EmbodiedConfig, settings: VLAConfig) -> None:
    """Raises ConfigError for what such a policy cannot do."""
    m = config.model
    for wrong, text in (
        (
            settings.decode != "parallel",
            f"vla.decode {settings.decode} is not its way: OpenVLA token by token acts from its own environment "
            "(robotics/openvla_server.py); for OpenVLA-OFT set parallel",
        ),
        (
            m.lora is not None,
            "model.lora adapts Qwen-VL models: remove it, or train parts (model.freeze)",
        ),
        (
            m.attn not in ("auto", "sdpa"),
            f"model.attn {m.attn} is of Qwen-VL models: set it to auto",
        ),
        (
            bool(m.gradient_checkpointing),
            "model.gradient_checkpointing is of Qwen-VL models: remove it",
        ),
        (
            config.engine.train in ("fsdp2", "deepspeed_zero3"),
            f"engine.train {config.engine.train} shards transformers' models: use ddp",
        ),
    ):
        if wrong:
            raise ConfigError(f"{m.path} is an OpenVLA-OFT: {text}")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Those of all of the folder's files of weights."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: expected model*.safetensors, found none")
    for file in files:
        try:
            found |= load_file(str(file))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{file}: expected weights of an OpenVLA-OFT, found: {error}"
            ) from error
    if heads := sorted(folder.glob("action_head*checkpoint.pt")):
        raise ConfigError(
            f"{heads[0]}: actions of this checkpoint are numbers of an L1 head, which have no probability that could be "
            "trained: take one that answers in action tokens (SimpleVLA-RL), or evaluate it with robotics/openvla_server.py"
        )
    for file in sorted(folder.glob("proprio_projector*checkpoint.pt")):
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{file}: expected tensors, found: {error}") from error
        for name, tensor in state.items():
            found[f"proprio_projector.{name.removeprefix('module.')}"] = tensor
    return found


def _load(folder: Path, home: Path) -> OpenVLAOFT:
    """The model with the weights of `folder`; its shape is that of `home`. Raises CheckpointError."""
    tensors = _tensors(folder)
    projector = tensors.get("proprio_projector.fc1.weight")
    shape = OFTShape.read(home, proprio_dim=0 if projector is None else projector.shape[1])
    model = OpenVLAOFT(shape)
    state = {n: t.float() for n, t in model.from_files(tensors).items()}
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder}: expected weights of this shape (config.json): {error}"
        ) from error
    if missing or unexpected:
        raise CheckpointError(
            f"{folder}: expected the weights that config.json describes, found {len(missing)} missing "
            f"({', '.join(missing[:3])}) and {len(unexpected)} unknown ({', '.join(unexpected[:3])})"
        )
    return model


def _freeze(model: OpenVLAOFT, parts: list[str]) -> None:
    known = model.parts()
    for part in parts:
        if part not in known:
            raise ConfigError(
                f"expected model.freeze entries of {', '.join(known)}, found '{part}'.{did_you_mean(part, known)}"
            )
        known[part].requires_grad_(False)


def _agree_on_proprio(settings: VLAConfig, model: OpenVLAOFT, path: str) -> None:
    expected = model.shape.proprio_dim
    found = settings.proprio_dim if settings.proprio else 0
    if found != expected:
        raise ConfigError(
            f"{path} was trained with {expected or 'no'} proprioception values, vla.proprio asks for {found or 'none'}: "
            f"set vla.proprio={'true' if expected else 'false'}, in a simulator with as many"
        )


def load_oft(
    config: EmbodiedConfig,
    settings: VLAConfig,
    codec: ActionCodec,
    *,
    trainable: bool = True,
    needs_reference: bool = False,
    device: torch.device | None = None,
    weights: Path | None = None,
) -> OFTPolicy:
    """See mmrl.robotics.load.load_vla."""
    from transformers import AutoTokenizer

    home = Path(config.model.path)
    check_loadable(config.model.path)
    _check(config, settings)
    device, _, autocast = device_and_precision(config.model, device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(home), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{home}: expected a tokenizer beside the weights, found: {error}"
        ) from error
    model = _load(weights or home, home)
    _agree_on_proprio(settings, model, config.model.path)
    reference = None
    if trainable and needs_reference:
        reference = _load(home, home).requires_grad_(False)
    head = None
    if settings.value_head:
        sizes = settings.value_hidden, settings.value_steps
        head = ValueHead(model.hidden_width, *sizes, config.seed)
    if trainable:
        _freeze(model, config.model.freeze)
    else:
        model.requires_grad_(False)
    placed: list[nn.Module] = [m for m in (model, reference, head) if m is not None]
    for module in placed:
        make_batch_invariant(module.to(device), device)
    policy = OFTPolicy(
        model,
        tokenizer,
        codec,
        settings,
        head,
        device=device,
        autocast=autocast,
        reference=reference,
        files=json.loads((home / "config.json").read_text(encoding="utf-8")),
    )
    if head is not None and not (weights is not None and head.load(weights)):
        head.load(home)
    check_loaded(policy.named_parameters(), weights or home)
    return policy
