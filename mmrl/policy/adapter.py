"""LoRA adapters (`model.lora`) through peft: what of a model they reach, and how a saved one goes on.

    adapted = add_adapter(model, config, weights=None, new_tokens=())

Linear layers are found by their names within the parts that are adapted. The experts of a mixture are parameters of all experts
together, (E, out, in): peft wraps the module that holds them once for each, and keeps A (E r, in) expert by expert and B (out, r E)
rank by rank.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmrl.errors import CheckpointError, ConfigError, MissingExtraError
from mmrl.policy.families import ModelFamily, family_of

if TYPE_CHECKING:
    from mmrl.config import ModelConfig

__all__ = ["add_adapter"]


def add_adapter(
    model: Any, config: ModelConfig, weights: Path | None, new_tokens: Sequence[int]
) -> Any:
    """The model with an adapter; rows of new tokens, in the embedding and the output layer (one table where they are tied), are
    trained whole: no adapter reaches them. It goes on with the adapter saved in `weights`.

    Raises MissingExtraError without peft, ConfigError where there is nothing to adapt, and CheckpointError where another adapter
    was saved.
    """
    # where it is installed, peft asks for it, and it says of each of its kernels for other GPUs that it cannot be loaded
    logging.getLogger("torchao").setLevel(logging.ERROR)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingExtraError(
            f"expected the package peft for model.lora, found none ({error}): pip install peft"
        ) from error
    assert config.lora is not None
    rows = {"embed_tokens": list(new_tokens), "lm_head": list(new_tokens)} if new_tokens else None
    family = family_of(model.config)
    with torch.random.fork_rng():
        torch.manual_seed(config.lora.seed)
        adapted = get_peft_model(
            model,
            LoraConfig(
                r=config.lora.r,
                lora_alpha=config.lora.alpha,
                bias="none",
                lora_dropout=config.lora.dropout,
                target_modules=_layers(model, family, config),
                target_parameters=_experts(model, family, config),
                task_type="CAUSAL_LM",
                trainable_token_indices=rows,
            ),
        )
    if Path(config.path).exists():
        # a relative folder in adapter_config.json would lead nowhere from another one
        adapted.peft_config["default"].base_model_name_or_path = str(Path(config.path).resolve())
    if weights is not None:
        _continue(adapted, weights / "adapter")
    return adapted


def _layers(model: Any, family: ModelFamily, config: ModelConfig) -> str | list[str]:
    """What peft is to take for the adapted linear layers: an expression for their names, or these names one by one."""
    assert config.lora is not None
    where = family.parts
    vision = where.vision[0] if len(where.vision) == 1 else f"({'|'.join(where.vision)})"
    scope = {"language": rf".*{where.language}.*", "vision": rf".*{vision}.*"}
    keep = [
        scope[p]
        for p in ("language", "vision")
        if p not in config.freeze and (p == "language" or config.lora.vision)
    ]
    if not keep:
        raise ConfigError(
            "model.lora adapts the language model (and the vision tower with lora.vision: true); "
            f"found model.freeze = {config.freeze}"
        )
    asked = config.lora.target_modules
    joint = [name for name, parts in family.joint_layers.items() if {*parts} <= {*asked}]
    pattern = f"({'|'.join(keep)})\\.({'|'.join([*asked, *joint])})"
    if not family.never_adapted:
        return pattern
    # peft would make bare names of an expression, without the part that they are to lie in, and experts of these
    names = [
        name
        for name, _ in model.named_modules()
        if re.fullmatch(pattern, name) and name.rsplit(".", 1)[-1] not in family.never_adapted
    ]
    if not names and not config.lora.experts:
        raise ConfigError(
            f"expected layers to adapt in model.lora.target_modules, found {config.lora.target_modules}, none of which peft "
            f"reaches in {family.name} (not {', '.join(family.never_adapted)}); add attention's (q_proj), or set experts: true"
        )
    return names


def _experts(model: Any, family: ModelFamily, config: ModelConfig) -> list[str] | None:
    """What peft is to take for the adapted parameters. Raises ConfigError for a model without experts, or with frozen ones."""
    assert config.lora is not None
    if not config.lora.experts:
        return None
    mend = "set model.lora.experts: false"
    if "language" in config.freeze:
        raise ConfigError(
            f"model.lora.experts adapts the language model's experts, found model.freeze = {config.freeze}; remove language there, "
            f"or {mend}"
        )
    held = [name for name, _ in model.named_parameters()]
    found = [e for e in family.experts if any(name.endswith(f".{e}") for name in held)]
    if not found:
        raise ConfigError(
            f"model.lora.experts adapts the experts of a mixture, found none in a model of family {family.name}; {mend}"
        )
    return found


def _continue(adapted: Any, folder: Path) -> None:
    """Read the adapter saved in `folder`. Raises CheckpointError where it is not one of the same layers."""
    from peft import load_peft_weights, set_peft_model_state_dict

    weights = load_peft_weights(str(folder), device=str(adapted.device))
    mend = "set r, target_modules, vision and experts as they were when it was saved"
    try:
        told = set_peft_model_state_dict(adapted, weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder}: expected the adapter that model.lora describes, found one of other shapes; {mend}: {error}"
        ) from error
    missing = sorted(name for name in told.missing_keys if ".lora_" in name)
    if missing or told.unexpected_keys:
        unknown = sorted(told.unexpected_keys)
        raise CheckpointError(
            f"{folder}: expected the adapter that model.lora describes, found one of other layers: missing "
            f"{missing[:2] or 'none'}, unknown {unknown[:2] or 'none'}; {mend}"
        )
