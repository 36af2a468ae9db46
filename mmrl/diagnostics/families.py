"""Conformance of model families: what mmrl computes for each, held against transformers' own processor, forward and files.

    mmrl families check internvl:qwen3           # with another of its text models
    mmrl families check internvl                 # a tiny random model of the family's own classes, a minute on a CPU
    mmrl families check path/to/model            # a model of yours, whatever its size

A check passes, is refused with the family's reason, or fails with what was found. docs/families.md has the table of all families.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mmrl.config.rollout_engine import vllm_lacks
from mmrl.errors import ConfigError, MissingExtraError, MMRLError
from mmrl.policy.families import (
    ModelFamily,
    families,
    family_and_text,
    family_named,
    family_of,
)

if TYPE_CHECKING:
    from mmrl.diagnostics._family_subject import Subject

__all__ = ["FamilyCell", "check_family", "check_names", "model_of"]

_GAIN = 4.0
"""A freshly initialised model predicts almost the same whatever it reads: with larger weights it reacts to every pixel."""


Verdict = Literal["ok", "refused", "failed", "not run"]


@dataclass(frozen=True)
class FamilyCell:
    """One check of one family: `verdict` and what was found, or why it is refused. `family` is NAME:TEXT where another text model
    was asked for."""

    family: str
    check: str
    verdict: Verdict
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
        family, path = model_of(target, Path(work))
        called = target if target.partition(":")[0] in families() else family.name
        subject = Subject(family, path, Path(work))
        for name, check in CHECKS.items():
            if not only or name in only:
                yield FamilyCell(called, name, *_found(family, name, check, subject))


def model_of(target: str, work: Path) -> tuple[ModelFamily, str]:
    """The family that is meant, and a folder with a model of it: a tiny one in `work`, or `target` itself."""
    import torch

    if target.partition(":")[0] not in families():
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
    return family_and_text(target)[0], str(work / "model")


def _refusal(family: ModelFamily, name: str, path: str) -> str:
    """Why a check is not run of the model in `path`; "" where it is."""
    if name == "audio":
        return family.no_audio
    if name == "vllm" and not family.refused.get(name):
        return vllm_lacks(family, path).replace(path, "the model")
    return family.refused.get(name, "")


def _found(
    family: ModelFamily, name: str, check: Callable[[Subject], str], subject: Subject
) -> tuple[Verdict, str]:
    if reason := _refusal(family, name, subject.path):
        return "refused", reason
    try:
        return "ok", check(subject)
    except MissingExtraError as error:  # which says how to install it
        return "not run", str(error)
    except (AssertionError, MMRLError, RuntimeError, ValueError, TypeError, KeyError) as error:
        found = f"{type(error).__name__}: {error}".removeprefix("AssertionError: ")
        return "failed", found
