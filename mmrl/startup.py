"""Start-up check: are `tasks`, `rewards`, `video` and `robotics` ours, or does a user's own folder hide them?

mmrl installs these four as top-level packages, and their names are common. A folder `video/` full of clips beside your
script is enough: with `python -m` or a script, Python looks there first, and the failure would come much later as
`No module named 'video.decode'`. The check only asks where Python *would* import from; it imports nothing.

    python -c "from mmrl.startup import check_shadowing; check_shadowing()"
"""
from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mmrl.errors import ConfigError

__all__ = ["COMPANION_PACKAGES", "Shadow", "check_shadowing", "find_shadows"]

COMPANION_PACKAGES = ("tasks", "rewards", "video", "robotics")


@dataclass(frozen=True)
class Shadow:
    """A companion package that would not be imported from mmrl's own root.

    `culprit` is the folder or file found instead, None when Python finds nothing at all; `expected` is our folder.
    """

    name: str
    culprit: Path | None
    expected: Path

    def message(self) -> str:
        """What was expected, what was found, and how to mend it."""
        if self.culprit is None:
            return (f"package '{self.name}': expected {self.expected}, found nothing. The installation of mmrl is "
                    f"incomplete: make install in the clone of mmrl's repository")
        kind = "folder" if self.culprit.is_dir() else "file"
        return (f"package '{self.name}': expected mmrl's own {self.expected}, found your {kind} {self.culprit}, which "
                f"hides it. {_mend(self.name, self.culprit)}")


def _mend(name: str, culprit: Path) -> str:
    parent = culprit.parent
    rename = f"rename it ({culprit.name} -> my_{culprit.name})"
    if {"site-packages", "dist-packages"} & set(culprit.parts):
        owners = importlib.metadata.packages_distributions().get(name, [])
        others = [owner for owner in owners if owner != "mmrl"]
        return f"Another distribution brings it: pip uninstall {' '.join(others) or name}, or use a fresh environment."
    in_pythonpath = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if any(Path(entry).resolve() == parent for entry in in_pythonpath):
        return f"Take {parent} out of PYTHONPATH, or {rename}."
    if parent == Path.cwd():
        return (f"`python -m` and `python -c` look into the current folder first: use the `mmrl` command, run from "
                f"another folder, or {rename}.")
    return f"{parent} is on sys.path: keep your script in another folder, or {rename}."


def _locations(name: str) -> list[Path]:
    """Where Python would import `name` from: the package folder (several for a namespace package), or the file."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # already imported, and by something that gave it no __spec__
        file = getattr(sys.modules[name], "__file__", None)
        return [Path(file).resolve()] if file else []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(location).resolve() for location in spec.submodule_search_locations]
    return [Path(spec.origin).resolve()] if spec.origin else []


def find_shadows(names: Sequence[str] = COMPANION_PACKAGES, root: Path | None = None) -> list[Shadow]:
    """The companion packages Python would take from elsewhere than `root` (default: the folder that holds mmrl)."""
    root = Path(__file__).resolve().parents[1] if root is None else root.resolve()
    shadows = []
    for name in names:
        expected = root / name
        locations = _locations(name)
        if not locations or locations[0] != expected:
            shadows.append(Shadow(name, locations[0] if locations else None, expected))
    return shadows


def check_shadowing() -> None:
    """Raise ConfigError naming every folder or file that hides one of mmrl's packages, and how to mend it."""
    shadows = find_shadows()
    if shadows:
        raise ConfigError("\n".join(shadow.message() for shadow in shadows))
