"""Families of models: one record each (mmrl.policy.families.contract), found by model_type or by the processor's class.

    mmrl families list                   # all of them, and what each cannot do
    mmrl families check internvl         # hold one against transformers, on a tiny random model of its own classes

An installed package adds a family through the entry-point group "mmrl.families", whose entries load a `ModelFamily`.
"""

from __future__ import annotations

import functools
from importlib.metadata import entry_points
from typing import Any

from mmrl.errors import ConfigError, did_you_mean
from mmrl.policy.families.aya import AyaVision
from mmrl.policy.families.contract import PARTS, ModelFamily, Parts
from mmrl.policy.families.gemma import Gemma3
from mmrl.policy.families.glm import Glm4V, Glm4VMoe
from mmrl.policy.families.idefics import Idefics3, SmolVLM
from mmrl.policy.families.kimi import KimiK25
from mmrl.policy.families.llava import LlavaOneVision
from mmrl.policy.families.minicpm import MiniCPMV46
from mmrl.policy.families.mistral import Mistral3
from mmrl.policy.families.omni import Qwen25Omni
from mmrl.policy.families.qwen import Qwen2VL, Qwen3VL, Qwen3VLMoe, Qwen25VL, Qwen35, Qwen35Moe
from mmrl.policy.families.tiles import InternVL

__all__ = [
    "BUILT_IN",
    "GROUP",
    "PARTS",
    "ModelFamily",
    "Parts",
    "all_variants",
    "families",
    "family_and_text",
    "family_named",
    "family_of",
    "family_of_processor",
    "part_config",
]

GROUP = "mmrl.families"
BUILT_IN: tuple[ModelFamily, ...] = (
    Qwen2VL(),
    Qwen25VL(),
    Qwen3VL(),
    Qwen3VLMoe(),
    Qwen35(),
    Qwen35Moe(),
    Qwen25Omni(),
    Glm4V(),
    Glm4VMoe(),
    InternVL(),
    Gemma3(),
    Idefics3(),
    SmolVLM(),
    LlavaOneVision(),
    AyaVision(),
    KimiK25(),
    MiniCPMV46(),
    Mistral3(),
)


@functools.cache
def families() -> dict[str, ModelFamily]:
    """All families by name, those of installed packages last. Raises ConfigError for an entry that is no family or a name taken."""
    found = {f.name: f for f in BUILT_IN}
    for entry in entry_points(group=GROUP):
        loaded = entry.load()
        family = loaded() if isinstance(loaded, type) else loaded
        if not isinstance(family, ModelFamily):
            raise ConfigError(
                f"expected a ModelFamily behind the entry point '{entry.name}' of group '{GROUP}', found "
                f"{type(family).__name__} ({entry.value}); see mmrl.policy.families.contract"
            )
        if family.name in found:
            raise ConfigError(
                f"expected a name of its own for the family of {entry.value}, found '{family.name}', which is taken; "
                "rename it, or remove the package"
            )
        found[family.name] = family
    return found


def family_named(name: str, key: str = "family") -> ModelFamily:
    """The family of that name. Raises ConfigError (`key`: what the user set)."""
    known = families()
    if name not in known:
        raise ConfigError(
            f"expected {key} to be one of {', '.join(known)}, found '{name}'.{did_you_mean(name, known)}"
        )
    return known[name]


def family_and_text(name: str, key: str = "family") -> tuple[ModelFamily, str]:
    """The family of NAME or NAME:TEXT, and TEXT ("": the family's first). Raises ConfigError (`key`: what was set)."""
    named, colon, text = name.partition(":")
    family = family_named(named, key)
    if colon and text not in family.texts:
        raise ConfigError(
            f"expected a text model of family {named} behind the colon ({', '.join(family.texts) or 'it has one alone: none'}), "
            f"found '{text}'"
        )
    return family, text


def all_variants() -> list[str]:
    """Names of the built-in families, each followed by those with another text model (NAME:TEXT)."""
    return [n for f in BUILT_IN for n in (f.name, *(f"{f.name}:{text}" for text in f.texts[1:]))]


def family_of(config: Any) -> ModelFamily:
    """The family of a model's configuration (transformers'). Raises ConfigError for one that mmrl does not know."""
    for family in families().values():
        if config.model_type in family.model_types:
            return family
    known = sorted(t for f in families().values() for t in f.model_types)
    raise ConfigError(
        f"expected a model of a known family (model_type {', '.join(known)}), found '{config.model_type}'; "
        "`mmrl families list` names them, and a package can add one (mmrl.policy.families.contract)"
    )


def part_config(config: Any) -> Any:
    """A checkpoint's configuration, or of it the part that its family trains (a thinker without what speaks for it); that of an
    unknown family as it is."""
    for family in families().values():
        if config.model_type in family.model_types:
            return family.part_config(config)
    return config


def family_of_processor(processor: Any) -> ModelFamily:
    """The first family whose processor is of this class; families that share one read pictures alike. Raises ConfigError."""
    names = {kind.__name__ for kind in type(processor).__mro__}
    for family in families().values():
        if names & set(family.processors):
            return family
    known = sorted({p for f in families().values() for p in f.processors})
    raise ConfigError(
        f"expected a processor of {', '.join(known)}, found {type(processor).__name__}; `mmrl families list` names the "
        "families that mmrl knows"
    )
