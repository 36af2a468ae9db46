"""Versions of installed libraries, from their metadata: nothing is imported, so a light process stays light.

python -c "from mmrl.operations.versions import versions; print(versions())"
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata

__all__ = [
    "LIBRARIES",
    "NEWEST_TRANSFORMERS",
    "OLDEST_TRANSFORMERS",
    "TRANSFORMERS",
    "VERSION",
    "versions",
]

VERSION = "0.1.0"
"""mmrl's own, as in pyproject.toml."""

LIBRARIES = ("mmrl", "torch", "transformers", "accelerate", "peft", "numpy", "pillow", "tokenizers")
"""Distributions whose version can change a number of a run."""

# An older one's models take the features of a frozen vision tower without a word, and do not look at them; each release moves parts
# of some families (5.21 those of Qwen2.5-Omni, Qwen3.5, Idefics3 and SmolVLM).
OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS = (5, 18), (5, 24)
TRANSFORMERS = "transformers>=5.18,<5.25"
"""As pip is asked for it; the same in pyproject.toml."""


def versions(names: Iterable[str] = LIBRARIES) -> dict[str, str]:
    """Python's version and that of each named distribution; 'not installed' where it is missing."""
    found = {"python": platform.python_version()}
    for name in names:
        # the distribution is called mmrl-rft; a clone on PYTHONPATH has no metadata at all
        if name == "mmrl":
            found[name] = VERSION
            continue
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
