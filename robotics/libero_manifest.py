"""Which files of LIBERO's assets a task needs, and whether a folder's are LIBERO's own.

    python -c "from mmrl.robotics.libero_manifest import manifest; print(len(manifest()))"

robotics/libero_manifest.tsv lists the 585 files of LIBERO's repository by git blob hash, robotics/libero_needs.json which of them
each kind of object and each scene reads (scripts/libero_geometry.py wrote it). A result names what it was measured on:
'official' (every file of the task is LIBERO's), 'modified (n of m files)', or 'stand-in'. The data set lerobot/libero-assets is the
same tree. Importable without LIBERO.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mmrl.errors import MissingExtraError

__all__ = [
    "Verdict",
    "blob_sha1",
    "categories_of",
    "judge",
    "manifest",
    "needs_of",
    "problem_of",
]

_SHOWN = 3  # missing files that an error names


@functools.cache
def manifest() -> dict[str, str]:
    """Path below the assets folder -> git blob sha1, 585 files."""
    text = Path(__file__).with_name("libero_manifest.tsv").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in text.splitlines() if not line.startswith("#"))
    return {path: sha for sha, path in rows}


@functools.cache
def _needs() -> dict[str, dict[str, list[str]]]:
    path = Path(__file__).with_name("libero_needs.json")
    found: dict[str, dict[str, list[str]]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def categories_of(bddl: str) -> set[str]:
    """Categories of fixtures and objects that a task file names."""
    found: set[str] = set()
    for section in ("fixtures", "objects"):
        match = re.search(rf"\(:{section}(.*?)\)", bddl, re.DOTALL)
        found |= set(re.findall(r"-\s*(\S+)", match[1])) if match else set()
    return found


def problem_of(bddl: str) -> str:
    """Its scene: 'floor', 'kitchen_tabletop' and so on; '' where the file names none of LIBERO's."""
    match = re.search(r"\(problem\s+LIBERO_(\w+)_Manipulation\)", bddl, re.IGNORECASE)
    return match[1].lower() if match else ""


def needs_of(bddl: str) -> list[str]:
    """Files below the assets folder that the task of this file reads: of its scene and of everything in it."""
    known = _needs()
    found = set(known["problems"].get(problem_of(bddl), []))
    for category in categories_of(bddl):
        found |= set(known["categories"].get(category, []))
    return sorted(found)


def blob_sha1(data: bytes) -> str:
    """The name git gives a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@functools.lru_cache(maxsize=1024)
def _read(path: Path, size: int, time_ns: int) -> str:
    """Hash of a file; read again once its size or time has changed."""
    return blob_sha1(path.read_bytes())


@dataclass(frozen=True)
class Verdict:
    """Of `files` files, those that are missing and those that are not LIBERO's."""

    files: int
    missing: tuple[str, ...]
    modified: tuple[str, ...]

    @property
    def kind(self) -> str:
        """'official' or 'modified (2 of 57 files)'."""
        if not self.modified:
            return "official"
        return f"modified ({len(self.modified)} of {self.files} files)"

    def require_all(self, folder: Path, task: str) -> None:
        """Raises MissingExtraError naming files that are not there."""
        if not self.missing:
            return
        more = len(self.missing) - _SHOWN
        names = ", ".join(self.missing[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        raise MissingExtraError(
            f"{task}: expected the {self.files} asset files it needs in {folder}, found {len(self.missing)} missing: {names}. "
            "Complete the folder: python -m mmrl.robotics.libero_assets download FOLDER (needs a network), or use "
            "env.options.assets=stand-in"
        )


def judge(folder: Path, files: Iterable[str], known: Mapping[str, str] | None = None) -> Verdict:
    """Compare files of a folder to the manifest (`known`: another one)."""
    known, names = manifest() if known is None else known, list(files)
    missing, modified = [], []
    for name in names:
        path = folder / name
        if not path.is_file():
            missing.append(name)
            continue
        about = path.stat()
        if _read(path, about.st_size, about.st_mtime_ns) != known.get(name):
            modified.append(name)
    return Verdict(len(names), tuple(missing), tuple(modified))
