"""Conformance of model families: what mmrl computes for each, held against transformers' own processor, forward and files.

    mmrl families check internvl                 # a tiny random model of the family's own classes, a minute on a CPU
    mmrl families check path/to/model            # a model of yours, whatever its size

A check passes, is refused with the family's reason, or fails with what was found. docs/families.md has the table of all families.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmrl.errors import ConfigError, MissingExtraError, MMRLError
from mmrl.policy.families import ModelFamily, families, family_named, family_of

__all__ = ["FamilyCell", "check_family", "check_names"]

_GAIN = 4.0
"""A freshly initialised model predicts almost the same whatever it reads: with larger weights it reacts to every pixel."""


@dataclass(frozen=True)
class FamilyCell:
    """One check of one family: `verdict` and what was found, or why it is refused."""

    family: str
    check: str
    verdict: Literal["ok", "refused", "failed", "not run"]
    found: str


def check_names() -> tuple[str, ...]:
    """Names of the checks, in the order of the table."""
    from mmrl.diagnostics._family_checks import CHECKS

    return tuple(CHECKS)


def check_family(target: str, only: Sequence[str] = ()) -> Iterator[FamilyCell]:
    """The cells of a family by name, or of the model in a folder, as they are found; `only` these checks. Raises ConfigError."""
    from mmrl.diagnostics._family_checks import CHECKS
    from mmrl.diagnostics._family_subject import Subject

    if unknown := sorted(set(only) - set(check_names())):
        raise ConfigError(
            f"expected checks of {', '.join(check_names())}, found {', '.join(unknown)}"
        )
    with tempfile.TemporaryDirectory(prefix="mmrl-family-") as work:
        family, path = _model(target, Path(work))
        subject = Subject(family, path, Path(work))
        for name, check in CHECKS.items():
            if not only or name in only:
                yield _cell(family, name, check, subject)


def _model(target: str, work: Path) -> tuple[ModelFamily, str]:
    """The family that is meant, and a folder with a model of it."""
    import torch

    if target not in families():
        if not (Path(target) / "config.json").is_file():
            # says which names there are
            family_named(target, "a family's name or a folder with config.json")
        from transformers import AutoConfig

        return family_of(AutoConfig.from_pretrained(target, trust_remote_code=False)), target
    from mmrl.policy.tiny import TinySpec, build_tiny

    spec = TinySpec(arch=target, hidden=64, heads=2, kv=1, vision_hidden=32, vision_heads=2)
    model, processor = build_tiny(spec)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():
                # Gemma 3's projector begins at zero: its pictures would not be seen
                parameter.normal_(0, 0.02, generator=noise)
            if parameter.ndim > 1:
                parameter.mul_(_GAIN)
    model.save_pretrained(work / "model")
    processor.save_pretrained(work / "model")
    return family_named(target), str(work / "model")


def _cell(family: ModelFamily, name: str, check: Any, subject: Any) -> FamilyCell:
    if reason := family.no_audio if name == "audio" else family.refused.get(name):
        return FamilyCell(family.name, name, "refused", reason)
    try:
        return FamilyCell(family.name, name, "ok", check(subject))
    except MissingExtraError as error:  # which says how to install it
        return FamilyCell(family.name, name, "not run", str(error))
    except (AssertionError, MMRLError, RuntimeError, ValueError, TypeError, KeyError) as error:
        found = f"{type(error).__name__}: {error}".removeprefix("AssertionError: ")
        return FamilyCell(family.name, name, "failed", found)
