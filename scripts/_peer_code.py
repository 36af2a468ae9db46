"""The peers' own reward functions, taken out of their checkouts and run as they stand.

Their files import trainers, flash attention and clients of servers. `load` therefore runs, of one file, the imports that exist
here, the assignments that succeed and the functions and methods asked for, and nothing else; no line of theirs is kept in this
project. A checkout is `FOLDER/NAME` of the repository's last name, at the commit that `REPOSITORIES` names.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["REPOSITORIES", "load", "quiet"]

REPOSITORIES: Mapping[str, tuple[str, str]] = {
    "One-RL-to-See-Them-All": (
        "MiniMax-AI/One-RL-to-See-Them-All",
        "39bcf0d0537d7aa211d2f6ce73c8e51c396c1adb",
    ),
    "VideoChat-R1": ("OpenGVLab/VideoChat-R1", "73b2ea9ac83ad5c0bcd893bffd1cbb2e7c167068"),
    "EasyVideoR1": ("cyuQ1n/EasyVideoR1", "7ab338b33f29e18039e105daa61e9ebabe003c62"),
    "R1-SGG": ("gpt4vision/R1-SGG", "e4de64d4c4c97edec648021d012198b21a9b1864"),
    "PR1": ("linkangheng/PR1", "accb7cb952f88419c0f66be43b067490036a80a5"),
    "UI-R1": ("lll6gg/UI-R1", "2fe9bf00c8aae85fcedaf56eb3e2780dbfe8075e"),
    "VLM-R1": ("om-ai-lab/VLM-R1", "90052f478646e38bc67363862f699b7afca6b337"),
    "GUI-R1": ("ritzz-ai/GUI-R1", "d43eea2f1c52356077034ff2524642fc05e06c6a"),
    "OneThinker": ("tulerfeng/OneThinker", "768b20f3ede94a2b55f4c276f1f7556f411ed600"),
    "Video-R1": ("tulerfeng/Video-R1", "59d65c347e44efa71be27abf9d89b4a2bb7d1c05"),
    "Temporal-R1": ("appletea233/Temporal-R1", "f364f6c837db5b07c6cad17dbfb99a888bb4d151"),
    "R1-V": ("Deep-Agent/R1-V", "bbbbe3dc1ea6a74ce31c118c1722b1ee73e372ba"),
    "GUI-G2": ("ZJU-REAL/GUI-G2", "5c5c36581654364073385e37deca28f4d765aa94"),
}
"""Folder -> (repository, commit) that the recorded values come from."""

_IMPORTS = frozenset(
    (
        "abc",
        "ast",
        "copy",
        "collections",
        "dataclasses",
        "datetime",
        "functools",
        "itertools",
        "json",
        "logging",
        "math",
        "mathruler",
        "math_verify",
        "latex2sympy2_extended",
        "numpy",
        "os",
        "pathlib",
        "random",
        "re",
        "rouge_score",
        "scipy",
        "signal",
        "sys",
        "torch",
        "torchvision",
        "typing",
        "PIL",
        "warnings",
    )
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Their prints go nowhere."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        open(os.devnull, "w", encoding="utf-8") as null,
        contextlib.redirect_stderr(null),
    ):
        yield


def _import(node: ast.Import | ast.ImportFrom, space: dict[str, Any]) -> None:
    names = (
        [alias.name for alias in node.names]
        if isinstance(node, ast.Import)
        else [node.module or ""]
    )
    if (isinstance(node, ast.ImportFrom) and node.level) or not all(
        name.partition(".")[0] in _IMPORTS for name in names
    ):
        return
    for name in names:
        importlib.import_module(name)
    _run(node, space)


def _run(node: ast.stmt, space: dict[str, Any]) -> None:
    module = ast.Module([node], [])
    exec(compile(ast.fix_missing_locations(module), "<peer>", "exec"), space)


def _methods(node: ast.ClassDef, wanted: Sequence[str]) -> Iterator[ast.FunctionDef]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name in wanted:
            item.decorator_list = []
            yield item


def load(
    file: Path, names: Sequence[str] = (), classes: Sequence[str] = (), **given: Any
) -> dict[str, Any]:
    """The namespace of a peer's file: all its functions, the static methods `names`, the `classes`; `given` names stand first.

    Raises FileNotFoundError for a missing checkout and KeyError when a name is not in the file.
    """
    space: dict[str, Any] = dict(given)
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            _import(node, space)
        elif isinstance(node, ast.FunctionDef):
            node.decorator_list = []  # torch.jit.script wants a file to read, and changes no value
            _run(node, space)
        elif isinstance(node, ast.ClassDef):
            for method in _methods(node, names):
                _run(method, space)
            if node.name in classes:
                _run(node, space)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            with contextlib.suppress(Exception):  # a constant that needs what is not imported
                _run(node, space)
    missing = [name for name in (*names, *classes) if name not in space]
    if missing:
        raise KeyError(
            f"expected {', '.join(missing)} in {file}, found {', '.join(sorted(space))[:300]}; is the commit right?"
        )
    return space
