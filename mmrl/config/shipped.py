"""What is installed with mmrl and used by name from any folder: recipes, presets, lists of suites, tiny models.

    >>> recipe_file("grounding")       # what `mmrl train grounding` reads
    >>> shipped("assets/tiny_vlm")     # that folder where you are, else the installed one

They lie below mmrl/shipped, which in a clone holds symbolic links to the folders at the top.
"""

from __future__ import annotations

from pathlib import Path

from mmrl.errors import ConfigError, did_you_mean

__all__ = ["SHIPPED", "recipe_file", "recipes", "shipped"]

SHIPPED = Path(__file__).absolute().parents[1] / "shipped"


def shipped(path: str | Path) -> Path:
    """A relative `path` as it is where something lies there or nothing is installed under it; else the installed file or folder."""
    here, installed = Path(path), SHIPPED / path
    return (
        here
        if here.exists() or here.is_absolute() or not installed.exists()
        else installed.resolve()
    )


def recipes() -> dict[str, Path]:
    """Names of the recipes -> their files; lists of suites are none."""
    files = sorted((SHIPPED / "configs").glob("*.yaml"))
    return {file.stem: file.resolve() for file in files if not file.stem.endswith("suites")}


def recipe_file(name: str | Path) -> Path:
    """The configuration file that `name` stands for: a file, or a recipe by its name or as configs/NAME.yaml.

    Raises ConfigError for a bare word that is neither; a path is returned as it is, and whoever reads it says what is missing.
    """
    path, known = shipped(name), recipes()
    if path.is_file():
        return path
    if str(name) in known:
        return known[str(name)]
    if path.suffix or len(path.parts) != 1:
        return path
    raise ConfigError(
        f"expected a configuration file or a recipe of {', '.join(known)}, found '{name}'."
        f"{did_you_mean(str(name), known)}"
    )
