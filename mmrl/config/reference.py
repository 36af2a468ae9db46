"""What the keys of a configuration mean, for people: `mmrl config --explain KEY`, docs/config.md. Part of mmrl.config.

    >>> print(explain(RunConfig, "algorithm.clip_high"))

Everything is read from the sections themselves: type, default, bounds, and the text below the key.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mmrl.config.peers import peer_hint
from mmrl.config.section import Section
from mmrl.errors import ConfigError, did_you_mean

__all__ = ["Key", "Place", "explain", "places"]

_BOUNDS = {
    annotated_types.Ge: (">=", "ge"),
    annotated_types.Gt: (">", "gt"),
    annotated_types.Le: ("<=", "le"),
    annotated_types.Lt: ("<", "lt"),
    annotated_types.MinLen: ("length >=", "min_length"),
}
_PLAIN = {bool: "true or false", int: "integer", float: "number", str: "text", Any: "any value"}


@dataclass(frozen=True)
class Key:
    """A key that is a value: dotted `name` ([] stands for the place in a list), `kind` (its type in words), `default` as YAML
    (None for a key that must be given), `bounds`, `description`."""

    name: str
    kind: str
    default: str | None
    bounds: str
    description: str


@dataclass(frozen=True)
class Place:
    """A section where it stands: its dotted `name` ('' for the whole), class, what it is there unless it is set (None for one of
    a list and for one that is left out), and what it is for."""

    name: str
    section: type[Section]
    default: Section | None
    about: str

    def values(self) -> list[Key]:
        """The keys that are values, not sections themselves."""
        return [
            _key(_below(self.name, key), field, getattr(self.default, key, ...))
            for key, field in self.section.model_fields.items()
            if _section_of(field.annotation) is None
        ]


def places(model: type[Section]) -> list[Place]:
    """`model` and all sections below it, in the order of the file."""
    return list(_places(model, "", None, ""))


def _places(model: type[Section], name: str, default: Section | None, note: str) -> Iterator[Place]:
    yield Place(
        name, model, default, " ".join(filter(None, (_line(inspect.getdoc(model) or ""), note)))
    )
    for key, field in model.model_fields.items():
        if (inner := _section_of(field.annotation)) is not None:
            value = getattr(default, key, None) if default is not None else _default(field)
            note = _line(field.description or "")
            if value is None and not field.is_required():
                note += " Left out by default (null)."
            listed = _is_list(field.annotation)
            yield from _places(
                inner, _below(name, key + "[]" * listed), None if listed else value, note.strip()
            )


def explain(model: type[Section], name: str) -> str:
    """What a key or a section means: its type, default, bounds and description; a section also with its keys.

    `name` is dotted; numbers stand for places in a list (data.train.0.path). Raises ConfigError for a name that is unknown.
    """
    found = places(model)
    parts = [part for part in name.replace("[]", "").split(".") if not part.isdigit()]
    for place in found:
        if place.name.replace("[]", "").split(".") == parts:
            return _section_text(place, found)
        for key in place.values():
            if key.name.replace("[]", "").split(".") == parts:
                return _key_text(key)
    known = [key.name for place in found for key in place.values()] + [
        place.name for place in found if place.name
    ]
    leaf = parts[-1] if parts else ""
    alike = [key for key in known if key.rpartition(".")[2] == leaf] or [
        key for key in known if leaf in key.rpartition(".")[2]
    ]
    hint = did_you_mean(name, known) or (
        f" Did you mean {' or '.join(alike[:4])}?" if alike else ""
    )
    hint += peer_hint(name)
    raise ConfigError(
        f"expected a key of the configuration, found '{name}'.{hint} `mmrl config --explain SECTION` lists a "
        f"section's keys; sections: {', '.join(sorted({key.partition('.')[0] for key in known}))}"
    )


def _below(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _arms(annotation: Any) -> Sequence[Any]:
    """The types that a union offers; the type itself where it is none."""
    return (
        typing.get_args(annotation)
        if typing.get_origin(annotation) in (typing.Union, types.UnionType)
        else (annotation,)
    )


def _is_list(annotation: Any) -> bool:
    return any(typing.get_origin(arm) is list for arm in _arms(annotation))


def _section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, alone or in a list; None for a value."""
    for arm in _arms(annotation):
        inner = typing.get_args(arm)[0] if typing.get_origin(arm) is list else arm
        if inspect.isclass(inner) and issubclass(inner, Section):
            return inner
    return None


def _kind(annotation: Any) -> str:
    """A type in words: 'number', 'one of a, b', 'list of text or null'."""
    arms = [arm for arm in _arms(annotation) if arm is not type(None)]
    words = " or ".join(_one_kind(arm) for arm in arms)
    return words + (" or null" if len(arms) < len(_arms(annotation)) else "")


def _one_kind(arm: Any) -> str:
    origin, inner = typing.get_origin(arm), typing.get_args(arm)
    if origin is typing.Annotated:
        return _kind(inner[0])
    if origin is Literal:
        return (
            "one of " + ", ".join(str(value) for value in inner)
            if len(inner) > 1
            else f"only {inner[0]}"
        )
    if inspect.isclass(arm) and issubclass(arm, Enum):
        return "one of " + ", ".join(str(member.value) for member in arm)
    if origin is list:
        return f"list of {_kind(inner[0])}"
    if origin is tuple:
        return "[" + ", ".join(_kind(part) for part in inner) + "]"
    if origin is dict:
        return "mapping"
    return _PLAIN[arm]


def _default(field: FieldInfo) -> Any:
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _key(name: str, field: FieldInfo, value: Any) -> Key:
    """`value`: what the section has there; ... where the field's own default counts."""
    bounds = [
        f"{_BOUNDS[type(rule)][0]} {getattr(rule, _BOUNDS[type(rule)][1]):,}"
        for rule in field.metadata
        if type(rule) in _BOUNDS
    ]
    required = field.is_required() and value is ...
    default = None if required else _yaml(_default(field) if value is ... else value)
    return Key(
        name, _kind(field.annotation), default, " and ".join(bounds), _line(field.description or "")
    )


def _yaml(value: Any) -> str:
    plain = (
        value.model_dump(mode="json")
        if isinstance(value, BaseModel)
        else list(value)
        if isinstance(value, tuple)
        else value
    )
    text = (
        yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    )
    return text if not isinstance(value, float) or "e" not in text else f"{value:g}"


def _line(text: str) -> str:
    return " ".join(text.split())


def _key_text(key: Key) -> str:
    about = key.kind + (f", {key.bounds}" if key.bounds else "")
    return f"{key.name}\n  {about}; {'must be given' if key.default is None else f'default: {key.default}'}\n  {key.description}"


def _section_text(place: Place, found: Sequence[Place]) -> str:
    head = f"{place.name or 'configuration'}\n  {place.about}"
    below = [
        f"{other.name}: a section"
        for other in found
        if other.name.rpartition(".")[0] == place.name and other.name != place.name
    ]
    return "\n".join([head, *(_key_text(key) for key in place.values()), *below])
