"""Named suites for `mmrl eval --suite`, of two kinds: questions on data files, and tasks of simulators that a policy plays.

    book = load_suites()                                # configs/suites.yaml and configs/robot_suites.yaml
    book.select("refcoco_val,tiny_reach")               # {"refcoco_val": DataSuite(...), "tiny_reach": EnvironmentSuite(...)}
    mmrl eval --list-suites

A suite with `env` is of a simulator. `--suites FILE` names another file, which may hold both kinds, in place of the shipped ones.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from mmrl.config.shipped import shipped
from mmrl.config.yaml_text import read_yaml
from mmrl.errors import ConfigError, did_you_mean

__all__ = ["Section", "Suite", "SuiteBook", "load_suites"]

_FILES = ("configs/suites.yaml", "configs/robot_suites.yaml")
# imported when a file has one: what simulators need stays away from those who have none
_KINDS = {False: "mmrl.evaluation.suites:DataSuite", True: "mmrl.robotics.suites:EnvironmentSuite"}


class Section(BaseModel):
    """A part of a suite; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Suite(Section):
    """What suites of both kinds have. `official`: whether it is a published benchmark's own protocol, so that its number may be
    compared."""

    acts: ClassVar[bool] = False
    """Whether a policy plays it in a simulator; else a model answers its questions in text."""

    official: bool = False
    notes: str = ""

    @property
    def listed(self) -> dict[str, str]:
        """What a list of suites says of it, by heading."""
        return {}


@dataclass(frozen=True)
class SuiteBook:
    """All suites of a file or several, and names for several at once."""

    files: Sequence[Path]
    suites: Mapping[str, Suite]
    groups: Mapping[str, tuple[str, ...]]

    def select(self, wanted: str) -> dict[str, Suite]:
        """'refcoco,tiny_reach' -> the suites, groups spelt out, each once, in the order asked for.

        Raises ConfigError with a suggestion for a name that is neither.
        """
        known, chosen = [*self.suites, *self.groups], dict[str, Suite]()
        for name in filter(None, (part.strip() for part in wanted.split(","))):
            if name not in known:
                raise ConfigError(
                    f"unknown suite '{name}'.{did_you_mean(name, known)} {self.described}"
                )
            for member in self.groups.get(name, (name,)):
                chosen[member] = self.suites[member]
        if not chosen:
            raise ConfigError(f"expected --suite NAME,..., found {wanted!r}. {self.described}")
        return chosen

    def of_kind(self, acts: bool) -> dict[str, Suite]:
        """The suites that are played, or those that are answered."""
        return {name: suite for name, suite in self.suites.items() if suite.acts is acts}

    @property
    def described(self) -> str:
        """Which names there are."""
        words = [
            f"{kind}: {', '.join(names)}"
            for kind, names in (
                ("answered in text", self.of_kind(False)),
                ("played in simulators", self.of_kind(True)),
                ("groups", self.groups),
            )
            if names
        ]
        return f"Known in {' and '.join(map(str, self.files))}: {'; '.join(words)}"


def load_suites(path: str | Path | None = None) -> SuiteBook:
    """Read a file of suites; default: those of mmrl, here or installed. Raises ConfigError naming every problem in it."""
    files = [shipped(file) for file in _FILES] if path is None else [Path(path)]
    suites: dict[str, Suite] = {}
    groups: dict[str, tuple[str, ...]] = {}
    for file in files:
        found, named = _read(file)
        suites |= found
        groups |= named
    return SuiteBook(files, suites, groups)


def _read(file: Path) -> tuple[dict[str, Suite], dict[str, tuple[str, ...]]]:
    """Suites and groups of a file. Raises ConfigError."""
    tree = _tree(file)
    suites: dict[str, Suite] = {}
    problems = [
        f"unknown key '{key}'.{did_you_mean(key, ('suites', 'groups'))} Known here: suites, groups, and names that "
        "begin with a dot for shared parts"
        for key in map(str, tree)
        if key not in ("suites", "groups") and not key.startswith(".")
    ]
    for name, values in tree["suites"].items():
        kind: type[Suite] = pkgutil.resolve_name(
            _KINDS[isinstance(values, dict) and "env" in values]
        )
        try:
            suites[str(name)] = kind.model_validate(values)
        except ValidationError as error:
            problems += _explain(str(name), kind, error)
        except ConfigError as error:
            problems.append(f"suite '{name}': {error}")
    groups = {str(k): tuple(map(str, v)) for k, v in (tree.get("groups") or {}).items()}
    problems += [
        f"group '{name}': unknown suite '{member}'.{did_you_mean(member, tree['suites'])}"
        for name, members in groups.items()
        for member in members
        if member not in tree["suites"]
    ]
    if problems:
        raise ConfigError(f"{file}: {len(problems)} problem(s)\n  " + "\n  ".join(problems))
    return suites, groups


def _tree(file: Path) -> dict[str, Any]:
    """The mapping in a suites file, which has suites. Raises ConfigError."""
    try:
        tree = read_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"expected a suites file, found '{file}': {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: expected YAML in UTF-8, found another content: {error}"
        ) from error
    if not isinstance(tree, dict) or not isinstance(tree.get("suites"), dict) or not tree["suites"]:
        raise ConfigError(
            f"{file}: expected a mapping 'suites' of names to suites, found "
            f"{sorted(map(str, tree)) if isinstance(tree, dict) else type(tree).__name__}"
        )
    return tree


def _explain(name: str, kind: type[Suite], error: ValidationError) -> Iterable[str]:
    for item in error.errors():
        where = ".".join(map(str, item["loc"])) or "it"
        if item["type"] == "extra_forbidden":
            key, known = str(item["loc"][-1]), list(_section(kind, item["loc"][:-1]).model_fields)
            yield f"suite '{name}': unknown key '{where}'.{did_you_mean(key, known)} Known here: {', '.join(known)}"
        else:
            # of a missing key the input is the whole suite
            found = "" if item["type"] == "missing" else f", found {item['input']!r}"
            yield f"suite '{name}': {where}: {item['msg']}{found}"[:300]


def _section(kind: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel]:
    """The model at a place of `kind`."""
    for part in loc:
        annotation: Any = kind.model_fields[str(part)].annotation
        inner = [c for c in (annotation, *get_args(annotation)) if isinstance(c, type)]
        kind = next((c for c in inner if issubclass(c, BaseModel)), kind)
    return kind
