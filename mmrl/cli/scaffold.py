"""`mmrl new task NAME`: a package with a task, its test and a recipe, which passes its checks as it is."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Callable
from pathlib import Path
from string import Template

from mmrl.errors import ConfigError
from mmrl.files import write_text, writing

__all__ = ["new_task_command"]

_TEMPLATES = Path(__file__).parent / "new_task"
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def new_task_command(name: str, parent: Path, say: Callable[[str], None] = print) -> Path:
    """Make the folder `parent`/NAME and return it. Raises ConfigError for a name that cannot be one, or a folder that exists."""
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(module):
        raise ConfigError(
            f"expected a name of small letters, digits and hyphens that begins with a letter, found {name!r}; for example "
            "blue-cars"
        )
    if module in sys.stdlib_module_names or importlib.util.find_spec(module) is not None:
        raise ConfigError(
            f"expected a name that no installed module has, found {name!r}: `import {module}` gives another one; choose another "
            "name"
        )
    folder = parent / name.replace("_", "-")
    if folder.exists():
        raise ConfigError(
            f"expected a new folder, found {folder}; remove it, or choose another name"
        )
    cls = "".join(part.capitalize() for part in module.split("_"))
    if keyword.iskeyword(cls) or re.search(rf"\b{cls}\b", _template("task.py")):
        cls += "Task"  # None, or a name that the file imports
    words = {
        "dist": folder.name,
        "module": module,
        "cls": cls,
        "installed": f"{folder.name}/{module}",
        "title": " ".join(module.split("_")).capitalize(),
    }
    files = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        "recipe.yaml": "recipe.yaml",
        "task.py": f"{module}.py",
        "test_task.py": f"test_{module}.py",
    }
    with writing(folder):
        folder.mkdir(parents=True)
    for template, target in files.items():
        write_text(folder / target, Template(_template(template)).substitute(words))
        say(str(folder / target))
    say(f"cd {folder} && mmrl tasks check {module}.py:{words['cls']} && pytest")
    return folder


def _template(name: str) -> str:
    return (_TEMPLATES / f"{name}.in").read_text(encoding="utf-8")
