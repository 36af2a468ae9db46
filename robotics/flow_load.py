"""Make a policy with a flow head: a SmolVLA, pi0 or pi0.5 that lerobot, openpi or mmrl saved.

    policy = load_vla(config)              # asks `is_flow(config.model.path)`

The originals' folders hold neither the VLM's configuration nor its tokenizer: they are read from the folder's own vlm/ where it has
one, else from the model that SmolVLA's config.json names (a folder, or the hub), or PaliGemma's tokenizer from the hub.
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
from mmrl.robotics.actions import ActionCodec
from mmrl.robotics.config import EmbodiedConfig, VLAConfig
from mmrl.robotics.flow_model import FlowModel, FlowShape
from mmrl.robotics.flow_policy import FlowPolicy
from mmrl.robotics.pi0 import TOKENIZER, Pi0, Pi0Shape, paligemma_config
from mmrl.robotics.smolvla import SmolVLA, SmolVLAShape

__all__ = ["is_flow", "load_flow", "read_shape"]


def is_flow(folder: str | Path) -> bool:
    """Whether a folder holds a policy with a flow head."""
    file = Path(folder) / "config.json"
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # what it is instead is for others to say
    if not isinstance(known, dict):
        return False
    openpi = {"paligemma_variant", "action_horizon", "action_dim"} <= set(known)
    return openpi or known.get("type") in ("smolvla", "pi0", "pi05")


def read_shape(folder: str | Path) -> SmolVLAShape | Pi0Shape:
    """Of a folder with a policy with a flow head. Raises CheckpointError and ConfigError."""
    try:
        known = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: expected the settings of a policy, found: {error}"
        ) from error
    return SmolVLAShape.read(folder) if known.get("type") == "smolvla" else Pi0Shape.read(folder)


def _check(config: EmbodiedConfig, shape: FlowShape, codec: ActionCodec) -> None:
    """Raises ConfigError for what a policy with a flow head cannot do."""
    m, width = config.model, shape.max_action_dim
    for wrong, text in (
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
            config.rollout.temperature != 1,
            "rollout.temperature is of tokens: the noise of a flow is vla.flow.noise_level; remove it",
        ),
        (
            config.engine.train in ("fsdp2", "deepspeed_zero3"),
            f"engine.train {config.engine.train} shards transformers' models: use ddp",
        ),
        (
            codec.chunk > shape.chunk_size,
            f"action.chunk {codec.chunk} is more than the model's chunk_size {shape.chunk_size}: lower it",
        ),
        (
            codec.dim > width,
            f"the robot has {codec.dim} action dimensions, the model max_action_dim {width}: take another model",
        ),
    ):
        if wrong:
            raise ConfigError(f"{m.path} is a policy with a flow head: {text}")


def _freeze(model: FlowModel, parts: list[str], *, critic: bool) -> None:
    """Freeze the named parts, and what no output depends on."""
    known = model.parts()
    for part in parts:
        if part not in known:
            raise ConfigError(
                f"expected model.freeze entries of {', '.join(known)}, found '{part}'.{did_you_mean(part, known)}"
            )
        known[part].requires_grad_(False)
    for module in model.idle(critic=critic):
        module.requires_grad_(False)


def _architecture(home: Path) -> tuple[FlowModel, Any]:
    """The model that config.json of `home` describes, with weights that are nothing yet, and its tokenizer."""
    from transformers import AutoConfig, AutoTokenizer

    shape = read_shape(home)
    named = shape.vlm_model_name if isinstance(shape, SmolVLAShape) else TOKENIZER
    vlm = str(home / "vlm") if (home / "vlm").is_dir() else named
    try:
        if isinstance(shape, Pi0Shape) and vlm == TOKENIZER:
            config = paligemma_config()
        else:
            config = AutoConfig.from_pretrained(vlm, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(vlm, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{home}: expected the VLM's configuration and tokenizer in its folder vlm/, or as {named}, "
            f"found: {error}; download that model's config.json and tokenizer files into {home / 'vlm'}"
        ) from error
    model = SmolVLA(shape, config) if isinstance(shape, SmolVLAShape) else Pi0(shape, config)
    return model, tokenizer


def _load(folder: Path, home: Path, *, learned_noise: bool) -> tuple[FlowModel, Any]:
    """The model with the weights of `folder`, and its tokenizer; shape, VLM configuration and tokenizer are those of `home`.
    `learned_noise`: with a head for the noise of its steps, new where the weights have none. Raises CheckpointError."""
    from safetensors.torch import load_file

    model, tokenizer = _architecture(home)
    file = folder / "model.safetensors"
    try:
        read = load_file(str(file))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file}: expected the weights of a {model.name}, found: {error}"
        ) from error
    state = {n: t.float() for n, t in model.from_files(read).items()}
    if learned_noise:
        model.add_noise_head()
    else:
        state = {n: t for n, t in state.items() if not n.startswith("noise_head.")}
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(
            f"{file}: expected weights of this shape (config.json): {error}"
        ) from error
    missing = [n for n in missing if not model.may_lack(n)]
    if missing or unexpected:
        raise CheckpointError(
            f"{file}: expected the weights that config.json describes, found {len(missing)} missing "
            f"({', '.join(missing[:3])}) and {len(unexpected)} unknown ({', '.join(unexpected[:3])})"
        )
    return model, tokenizer


def load_flow(
    config: EmbodiedConfig,
    settings: VLAConfig,
    codec: ActionCodec,
    *,
    trainable: bool = True,
    needs_reference: bool = False,
    device: torch.device | None = None,
    weights: Path | None = None,
) -> FlowPolicy:
    """See mmrl.robotics.load.load_vla."""
    home = Path(config.model.path)
    check_loadable(config.model.path)
    _check(config, read_shape(home), codec)
    settings = settings.model_copy(update={"decode": "flow", "flow": config.vla.flow})
    device, _, autocast = device_and_precision(config.model, device)
    learned = settings.flow.noise == "learned"
    model, tokenizer = _load(weights or home, home, learned_noise=learned)
    reference = None
    if trainable and needs_reference:
        reference = _load(home, home, learned_noise=learned)[0].requires_grad_(False)
    head = None
    if settings.value_head:
        head = ValueHead(
            model.critic_width, settings.value_hidden, settings.value_steps, config.seed
        )
    if trainable:
        _freeze(model, config.model.freeze, critic=head is not None)
    else:
        model.requires_grad_(False)
    placed: list[nn.Module] = [m for m in (model, reference, head) if m is not None]
    for module in placed:
        make_batch_invariant(module.to(device), device)
    policy = FlowPolicy(
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
