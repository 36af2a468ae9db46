"""Versions of installed libraries, from their metadata: nothing is imported, so a light process stays light.

    python -c "from mmrl.operations.versions import versions; print(versions())"
"""
from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata

__all__ = ["LIBRARIES", "versions"]

LIBRARIES = ("mmrl", "torch", "transformers", "accelerate", "peft", "numpy", "pillow", "tokenizers")
"""Distributions whose version can change a number of a run."""


def versions(names: Iterable[str] = LIBRARIES) -> dict[str, str]:
    """Python's version and that of each named distribution; 'not installed' where it is missing."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
