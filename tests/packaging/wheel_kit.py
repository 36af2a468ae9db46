"""A wheel of mmrl, built as a user's pip would: from a copy of the sources, without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["LINKED", "ROOT", "build_wheel", "copy_of_the_sources", "without_paths"]

ROOT = Path(__file__).resolve().parents[2]
# folders of the repository that are parts of mmrl
LINKED = ("tasks", "rewards", "video", "robotics")


def without_paths() -> dict[str, str]:
    """The environment without PYTHONPATH and its like: pip would take what lies there for installed."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}


def copy_of_the_sources(target: Path) -> Path:
    """What a release is built from, links as links; tests and scripts are there to be left out."""
    for name in ("mmrl", *LINKED, "configs", "scripts", "tests", "assets"):
        unneeded = shutil.ignore_patterns("__pycache__", "fixtures", "results")
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=unneeded)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    return target


def build_wheel(folder: Path) -> Path:
    """The wheel's file; the environment's own setuptools builds it."""
    source = copy_of_the_sources(folder / "source")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "-w",
            str(folder / "wheel"),
            str(source),
        ],
        check=True,
        timeout=180,
        env=without_paths(),
    )
    [built] = (folder / "wheel").glob("mmrl_rft-*.whl")
    return built
