"""Reads a configuration: YAML, dotted overrides, and errors that name every problem. Part of mmrl.config."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from mmrl.config.peers import is_peer_section, peer_hint
from mmrl.config.renamed import warn_of_old_names, with_new_algorithm_names
from mmrl.config.yaml_text import read_yaml
from mmrl.errors import ConfigError, did_you_mean

__all__ = ["config_from", "load_config_as", "merge", "parse_overrides", "renamed"]

C = TypeVar("C", bound=BaseModel)


def parse_overrides(overrides: list[str]) -> dict[str, Any]:
    """['train.steps=50', 'data.train.0.limit=9'] -> nested dictionary. Raises ConfigError.

    A value is YAML where it is a number, true, false, null, a text in quotes, a list [a, b] or a mapping {a: 1}. Any other is
    text as it stands, also with ' #' or ': ' in it, and so is one that begins with a template's {word}.
    """
    tree: dict[str, Any] = {}
    for item in overrides:
        key, sep, value = item.partition("=")
        if not sep or not key:
            raise ConfigError(f"expected an override of the form section.key=value, found '{item}'")
        node = tree
        *parents, leaf = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(
                    f"override '{item}' goes below '{part}', which another override set to a value"
                )
        try:
            node[leaf] = _override_value(value.strip())
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"override '{item}': expected a list [a, b] or a mapping {{a: 1}} in YAML, or text in quotes "
                f"({key}='\"TEXT\"' in a shell), found what is neither: {error}"
            ) from error
    return tree


_PLACEHOLDER = re.compile(r"\{\w+\}")
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "null")}


def _override_value(text: str) -> Any:
    """What the value of an override says, by the rule of `parse_overrides`. Raises yaml.YAMLError for a broken list or mapping."""
    if not text:
        return None
    if text[0] in "[{" and not _PLACEHOLDER.match(text):
        return read_yaml(text)
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if isinstance(node, yaml.ScalarNode):
            if text[0] in "'\"" and node.end_mark.index == len(text):
                return node.value
            if node.value == text and node.tag in _PLAIN_TAGS:
                return read_yaml(text)
    except (yaml.YAMLError, ValueError):  # an open quote, @, *; more digits than int() takes
        return text
    return _number_or_text(text)


def _number_or_text(text: str) -> Any:
    if text[:1] not in "0123456789.-+" or "e" not in text.lower():
        return text  # also 'nan' and 'infinity', which float() would take
    try:
        return float(text)  # YAML 1.1 reads 1e-4 as text
    except ValueError:
        return text


def merge(base: Any, extra: Any) -> Any:
    """`base` with the nested values of `extra` put over it; {'0': ...} reaches into a list. Raises ConfigError."""
    if isinstance(base, list) and isinstance(extra, dict) and all(str(k).isdigit() for k in extra):
        merged = list(base)
        for key, value in extra.items():
            if int(key) >= len(merged):
                raise ConfigError(f"override index {key} is outside a list of {len(merged)}")
            merged[int(key)] = merge(merged[int(key)], value)
        return merged
    if isinstance(base, dict) and isinstance(extra, dict):
        return {**base, **{k: merge(base[k], v) if k in base else v for k, v in extra.items()}}
    return extra


# of a configuration: beyond these it is none
_MOST_BYTES, _MOST_VALUES, _DEEPEST = 4 << 20, 200_000, 64


def _fix_floats(node: Any, count: list[int], depth: int = 0) -> Any:
    """PyYAML reads `1e-4` as text (YAML 1.1): turn such text into numbers, leave all other text.

    Aliases are spelt out here, so that a few lines of them could stand for more values than memory holds, or for
    themselves: `count` [values so far] and `depth` are bounded. Raises ValueError.
    """
    count[0] += 1
    if count[0] > _MOST_VALUES or depth > _DEEPEST:
        raise ValueError(
            f"expected at most {_MOST_VALUES:,} values, nested at most {_DEEPEST} deep, found more (aliases count "
            "as what they stand for)"
        )
    if isinstance(node, dict):
        return {k: _fix_floats(v, count, depth + 1) for k, v in node.items()}
    if isinstance(node, list):
        return [_fix_floats(v, count, depth + 1) for v in node]
    return _number_or_text(node) if isinstance(node, str) else node


def _read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, without its shared parts: names at the top that begin with a dot or x- hold anchors. Raises
    ConfigError."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(
                f"{path}: expected a configuration of at most {_MOST_BYTES >> 20} MiB, found "
                f"{path.stat().st_size >> 20} MiB; give the YAML file of a run"
            )
        tree = _fix_floats(read_yaml(path.read_text(encoding="utf-8")) or {}, [0])
    except OSError as error:
        raise ConfigError(
            f"expected a configuration file, found '{path}': {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: expected a YAML file in UTF-8, found other bytes: {error}"
        ) from error
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: dates and integers that Python refuses
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(tree).__name__}")
    return {key: value for key, value in tree.items() if not str(key).startswith((".", "x-"))}


def _known_keys(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    for part in location:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        inner = next(
            (c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None
        )
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _peer_hints(where: str, value: Any) -> str:
    """What TRL, EasyR1, verl or LeRobot call so, also below a section of theirs (actor_rollout_ref.rollout.n)."""
    if not isinstance(value, dict):
        return peer_hint(where)
    found = (_peer_hints(f"{where}.{key}", below) for key, below in value.items())
    return "".join(dict.fromkeys(filter(None, found)))


def _explain(error: ValidationError, origin: str, kind: type[BaseModel]) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(p) for p in item["loc"])
        if item["type"] == "extra_forbidden":
            known = _known_keys(kind, item["loc"][:-1])
            meant = did_you_mean(str(item["loc"][-1]), known)
            theirs = _peer_hints(where, item["input"])
            # a name of another trainer says more than one that is spelled alike, the keys of a misspelt section less
            misspelt = isinstance(item["input"], dict) and not is_peer_section(where)
            hint = (meant or theirs) if misspelt else (theirs or meant)
            lines.append(f"  unknown key '{where}'.{hint} Known here: {', '.join(known)}")
        else:  # what a rule of a whole section says names its values: the section itself is no use
            whole = isinstance(item["input"], dict) and item["type"] in ("value_error", "missing")
            lines.append(
                f"  {where or 'config'}: {item['msg']}"
                + ("" if whole else f", found {item['input']!r}"[:300])
            )
    return f"{origin}: {len(lines)} problem(s) in the configuration\n" + "\n".join(lines)


def load_config_as(
    kind: type[C],
    path: str | Path | None = None,
    overrides: list[str] | None = None,
    *,
    keep: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> C:
    """`mmrl.config.load_config` for a configuration of `kind`. `keep` takes from the file's tree what may be used of it, before
    the overrides go over it. Raises ConfigError listing every problem."""
    tree = renamed({} if path is None else _read_yaml(Path(path)), str(path))
    over = renamed(parse_overrides(overrides or []), "the overrides")
    tree = merge(tree if keep is None else keep(tree), over)
    return config_from(
        kind,
        tree,
        str(path or "configuration")
        + (" with the overrides" if path is not None and overrides else ""),
    )


def renamed(tree: dict[str, Any], origin: str) -> dict[str, Any]:
    """`tree` with new names of the keys that have one, before another goes over it: each may use old names or new ones. Warns of
    old ones; raises ConfigError where both are given and differ."""
    try:
        tree, said = with_new_algorithm_names(tree)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from error
    warn_of_old_names(said)
    return tree


def config_from(kind: type[C], tree: Any, origin: str = "configuration") -> C:
    """The configuration that a nested mapping says. Raises ConfigError listing every problem of `origin`."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, origin, kind)) from error
