"""Lets transformers be imported in half the time, with the same result.

Each process that imports transformers (5.16) first reads the list of files of every installed distribution, as one object per
file, to learn which of them brings which package (`importlib.metadata.packages_distributions`), and then every source file of its
520 folders of models, twice, line by line, to learn which names they export. With 300 distributions (Python 3.11) `import torch,
transformers` took 2.7 s of processor time, 1.3 of them torch's own; with this 2.0. The same functions, transformers' and Python's
own, are asked with less to read:

- of a list of files, one for each folder at the top and kind of file; of a distribution's metadata, its name;
- of a source file, what follows its last line that begins with `__all__`;
- the folder of models once: they remember it by the name it was asked for by.

And each configuration that is read (three times for a model) is written out for a log message that nobody asked for, which took as
long as building a tiny model: it is written out where messages of level INFO are shown.

Others import a library for one function that most programs never call: scipy for the losses of detectors, torchao to save models
that it quantized. There the function is imported when it is called. Loading a tiny model took 4.6 s with its imports, and 3.3 now.

After `import mmrl` Python finds these modules of transformers through mmrl/operations/startup.py, whoever imports it:

    python -X importtime -c "import mmrl, transformers"

A transformers in which one of these functions has gone is imported as it is.
"""

from __future__ import annotations

import ast
import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

__all__ = [
    "Configurations",
    "ImportUtils",
    "ImportedWhenCalled",
    "by_folder",
    "one_of_each",
    "packages_distributions",
    "tail_of_names",
    "when_called",
    "written_for_readers",
]

_TORCHAO = "torchao.prototype.safetensors.safetensors_support"
_usual = metadata.packages_distributions


def one_of_each(record: str) -> str:
    """The lines of a RECORD, less those of files of which one of the same top folder and ending stands before."""
    kept: list[str] = []
    seen: set[tuple[str, str]] = set()
    for line in record.splitlines():
        path = line.partition(",")[0]
        top, slash, _ = path.partition("/")
        # quoted, or not in its normal form: as it is
        if slash and path[0] not in '"./':
            kind = top, os.path.splitext(path)[1]
            if kind in seen:
                continue
            seen.add(kind)
        kept.append(line)
    return "\n".join(kept)


def _up_to_name(text: str) -> str:
    """The headers of a distribution's metadata up to its name; all of it where the name is not among the headers."""
    before, found, after = text.partition("\nName:")
    return before + found + after.partition("\n")[0] if found and "\n\n" not in before else text


class _Brief(metadata.Distribution):
    """A distribution that tells which packages it has, and its name."""

    def __init__(self, whole: metadata.Distribution) -> None:
        self._whole = whole
        self._path = getattr(whole, "_path", None)  # Python looks there for lists of eggs

    def read_text(self, filename: str) -> str | None:
        text = self._whole.read_text(filename)
        if text and filename == "RECORD":
            return one_of_each(text)
        return _up_to_name(text) if text and filename in ("METADATA", "PKG-INFO") else text

    def locate_file(self, path: Any) -> Any:
        return self._whole.locate_file(path)


def packages_distributions() -> Mapping[str, list[str]]:
    """importlib.metadata.packages_distributions: package at the top -> names of the distributions that bring it."""
    parts: list[Any] = [
        getattr(metadata, name, None) for name in ("_top_level_declared", "_top_level_inferred")
    ]
    if None in parts:  # Python 3.10 reads little anyway
        return _usual()
    declared, inferred = parts
    found: dict[str, list[str]] = {}
    for whole in metadata.distributions():
        brief = _Brief(whole)
        for package in declared(brief) or inferred(brief):
            found.setdefault(package, []).append(brief.metadata["Name"])
    return found


def tail_of_names(read: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """`fetch__all__` (the names in a source's last `__all__`) for a `read` that goes through all lines of what it is given."""

    def fetch(content: str) -> list[str]:
        return read(content[content.rfind("\n__all__") + 1 :])

    return fetch


def by_folder(read: Callable[[str], Any]) -> Callable[[Any], Any]:
    """`create_import_structure_from_path`, which remembers what it has read, asked for a folder by one name only: transformers
    names that of all models itself, and transformers.models by a file in it."""

    def structure(path: Any) -> Any:
        return read(os.path.dirname(path) if os.path.isfile(path) else os.fspath(path))

    return structure


class ImportUtils(SourceFileLoader):
    """Loads transformers' import_utils with these functions."""

    def exec_module(self, module: ModuleType) -> None:
        # asked while the module is executed; by another thread it may be, too: the answer is the same
        metadata.packages_distributions = packages_distributions
        try:
            super().exec_module(module)
        finally:
            metadata.packages_distributions = _usual
        for name, quicker in (
            ("fetch__all__", tail_of_names),
            ("create_import_structure_from_path", by_folder),
        ):
            if (theirs := getattr(module, name, None)) is not None:
                setattr(module, name, quicker(theirs))


def written_for_readers(config: Any, logger: logging.Logger) -> None:
    """Let `config.from_dict` (PreTrainedConfig) not write out what it made where `logger` would drop the message."""
    write, make, reading = config.__repr__, config.from_dict.__func__, threading.local()

    @functools.wraps(make)
    def from_dict(cls: Any, *arguments: Any, **settings: Any) -> Any:
        outer, reading.now = getattr(reading, "now", False), True
        try:
            return make(cls, *arguments, **settings)
        finally:
            reading.now = outer

    @functools.wraps(write)
    def __repr__(self: Any) -> str:
        if getattr(reading, "now", False) and not logger.isEnabledFor(logging.INFO):
            return type(self).__name__
        return str(write(self))

    config.from_dict, config.__repr__ = classmethod(from_dict), __repr__


class Configurations(SourceFileLoader):
    """Loads transformers' configuration_utils with that."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        config, logger = getattr(module, "PreTrainedConfig", None), getattr(module, "logger", None)
        if hasattr(config, "from_dict") and isinstance(logger, logging.Logger):
            written_for_readers(config, logger)


def when_called(source: str | bytes, module: str, path: str = "<source>") -> ast.Module:
    """The program `source`, in which each `from MODULE import NAME` is a function NAME that imports it and calls it."""

    class Later(ast.NodeTransformer):
        def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
            if node.module != module or node.level or any(name.asname for name in node.names):
                return node
            functions = [
                f"def {name.name}(*arguments, **settings):\n"
                f"    from {module} import {name.name} as function\n"
                "    return function(*arguments, **settings)\n"
                for name in node.names
            ]
            made = ast.parse("".join(functions)).body
            for each in made:
                for part in ast.walk(each):
                    ast.copy_location(part, node)
            return made

    return ast.fix_missing_locations(Later().visit(ast.parse(source, path)))


class ImportedWhenCalled(SourceFileLoader):
    """Loads a quantizer or a loss with `when_called`. Its bytecode is not kept: other programs would find it."""

    def get_code(self, fullname: str) -> Any:
        library = _TORCHAO if fullname.endswith("_torchao") else "scipy.optimize"
        tree = when_called(self.get_data(self.path), library, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)
