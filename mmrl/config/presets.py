"""Presets: settings of model, engine and batch sizes that fit a GPU, laid over any recipe before the user's own overrides.

    mmrl train configs/grounding.yaml --preset gpu_24g train.steps=50

A preset is a YAML file with sections of a run's configuration and a section `preset` that says what it is for (configs/presets/).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mmrl.config.shipped import SHIPPED
from mmrl.config.yaml_text import read_yaml
from mmrl.errors import ConfigError, did_you_mean

__all__ = ["Preset", "preset_names", "read_preset"]

_FOLDERS = (Path("configs/presets"), SHIPPED / "configs" / "presets")


@dataclass(frozen=True)
class Preset:
    """`overrides` in the order of the file; gpu_gib: memory of each of the `gpus` GPUs it is for, with which models and recipes."""

    name: str
    overrides: tuple[str, ...]
    gpu_gib: float
    gpus: int
    models: tuple[str, ...]
    recipes: tuple[str, ...]


def preset_names() -> list[str]:
    """Names of the presets that come with mmrl."""
    folder = next((f for f in _FOLDERS if f.is_dir()), None)
    return sorted(file.stem for file in folder.glob("*.yaml")) if folder else []


def read_preset(name: str) -> Preset:
    """A preset by its name, or by the path of a file of one's own. Raises ConfigError."""
    file = next(
        (f for f in (Path(name), *(folder / f"{name}.yaml" for folder in _FOLDERS)) if f.is_file()),
        None,
    )
    if file is None:
        raise ConfigError(
            f"expected a preset of {', '.join(preset_names())}, or a file, found '{name}'."
            f"{did_you_mean(name, preset_names())}"
        )
    try:
        tree = read_yaml(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    about = tree.pop("preset", None) if isinstance(tree, dict) else None
    wanted = {"gpu_gib", "gpus", "models", "recipes"}
    if (
        not isinstance(about, dict)
        or set(about) != wanted
        or not all(isinstance(section, dict) for section in tree.values())
    ):
        raise ConfigError(
            f"{file}: expected sections of a configuration and a section 'preset' with {', '.join(sorted(wanted))}"
        )
    return Preset(
        file.stem,
        tuple(_overrides(tree)),
        float(about["gpu_gib"]),
        int(about["gpus"]),
        tuple(about["models"]),
        tuple(about["recipes"]),
    )


def _overrides(tree: dict[str, Any]) -> list[str]:
    """section.key=value with JSON values, which are YAML: what the user gives may still go below them."""
    return [
        f"{section}.{key}={json.dumps(value)}"
        for section, values in tree.items()
        for key, value in values.items()
    ]
