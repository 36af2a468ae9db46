"""Settings that were found, in a checkpoint or a log, and what they may say.

    base = checkpoint_settings(RunConfig, "some/checkpoint", overrides)     # what its config.yaml may set, and nothing else
    with no_new_code("rollouts/step_000010.jsonl"):
        task_from_spec(row["task_spec"], params_found(row["task_params"]).kept)

A command line and the YAML file it names are the user's. A checkpoint's trainer/config.yaml, the task names and parameters of a
logged rollout, and the rows of a data file may come from a stranger: they may name tasks that are built in or installed, and
set numbers and texts of the kinds listed here. They never name code to import, folders or files to open, or hosts to ask.
`--trust-code` says that they are the user's own after all. SECURITY.md has the whole picture.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from mmrl.config.model import RolloutConfig
from mmrl.config.read import load_config_as
from mmrl.registry import check_code, no_new_code

__all__ = [
    "ALL",
    "CHECKPOINT_KEYS",
    "LEAVE_OUT",
    "Found",
    "at_most",
    "check_code",
    "checkpoint_settings",
    "fixed",
    "is_place",
    "no_new_code",
    "params_found",
]

C = TypeVar("C", bound=BaseModel)
Rule = Any  # ALL, LEAVE_OUT, at_most(..), fixed(..), a mapping of keys to rules, or [rule] for each entry of a list


@dataclass(frozen=True)
class _Rule:
    limit: float | None = None
    value: Any = None


ALL = _Rule()  # everything below a key, as far as `params_found` lets it pass
LEAVE_OUT = _Rule()  # nothing, and it is said


def at_most(limit: float) -> _Rule:
    """A number that is lowered to `limit` where it is above: what a stranger may ask of this machine has a bound."""
    return _Rule(limit=limit)


def fixed(value: Any) -> _Rule:
    """`value` in place of whatever was found: a key the configuration needs and an evaluation does not read."""
    return _Rule(value=value)


_CPUS = os.cpu_count() or 1

CHECKPOINT_KEYS: Mapping[str, Rule] = {
    "seed": ALL,
    "threads": at_most(_CPUS),
    "model": dict.fromkeys(
        (
            "template",
            "frame",
            "system",
            "freeze",
            "lora",
            "dtype",
            "attn",
            "max_prompt_tokens",
            "device",
        ),
        ALL,
    ),
    "data": {
        "min_pixels": ALL,
        "max_pixels": ALL,
        "image": ALL,
        "video": ALL,
        "on_error": ALL,
        "media_timeout_s": ALL,
        "prompt_cache_gib": at_most(4.0),
        "cache": {"dir": LEAVE_OUT},
        "workers": LEAVE_OUT,
        **{
            part: [{"task": ALL, "params": ALL, "path": fixed("(not read)")}]
            for part in ("train", "eval")
        },
    },
    # a group of one goes with PPO, whose algorithm section stays behind: an evaluation has no groups
    "rollout": {key: ALL for key in RolloutConfig.model_fields if key != "group_size"},
    "reward": {"timeout_s": ALL, "workers": at_most(_CPUS)},
    "eval": ALL,
}
"""What an evaluation takes from a checkpoint's trainer/config.yaml: how the model was shown things and asked. Its cache, output
folder, trackers, engines and servers belong to the machine it was trained on."""

# Names of parameters that hold a folder, a file, an address or a program (mmrl.tasks.readers': image_root, media_dir, durations ..)
_PLACE_KEY = re.compile(
    r"(^|_)(root|dir|folder|file|path|url|uri|host|server|command|cache|durations)s?$"
)
# ... and values that are one by themselves, under whatever name: /etc, ~/x, C:\\x, http://x, a/../b
_PLACE = re.compile(
    r"/[^/\s]+/\S*|~[\w.-]*/\S*|\\\\\S+|[A-Za-z]:[\\/]\S*|[A-Za-z][A-Za-z0-9+.-]*://\S*|(?:\S*[/\\])?\.\.[/\\]\S*"
)
_LONGEST_PLACE, _DEPTH = 4096, 64


@dataclass(frozen=True)
class Found:
    """Settings without what a stranger may not set, and the names of what was left out."""

    kept: dict[str, Any]
    left_out: tuple[str, ...] = ()


def is_place(value: Any) -> bool:
    """Whether a value of found settings is a folder, a file or an address, by its form."""
    return (
        isinstance(value, str)
        and len(value) <= _LONGEST_PLACE
        and _PLACE.fullmatch(value.strip()) is not None
    )


def params_found(params: Any, name: str = "params") -> Found:
    """Parameters of a task, or options of a simulator, without folders, files, addresses and programs."""
    left_out: list[str] = []

    def clean(value: Any, at: str, depth: int) -> Any:
        if depth > _DEPTH:
            left_out.append(at)
            return None
        if isinstance(value, Mapping):
            kept = {}
            for key, below in value.items():
                place = f"{at}.{key}"
                named = _PLACE_KEY.search(str(key).lower()) and not isinstance(
                    below, (bool, int, float, type(None))
                )
                if named or is_place(below):
                    left_out.append(place)
                else:
                    kept[key] = clean(below, place, depth + 1)
            return kept
        if isinstance(value, (list, tuple)):
            places = [i for i, item in enumerate(value) if is_place(item)]
            left_out.extend(f"{at}.{i}" for i in places)
            return [
                clean(item, f"{at}.{i}", depth + 1)
                for i, item in enumerate(value)
                if i not in places
            ]
        return value

    found = clean(params, name, 0)
    return Found(found if isinstance(found, dict) else {}, tuple(left_out))


def _allowed(value: Any, rule: Rule, at: str, left_out: list[str]) -> Any:
    """`value` as far as `rule` lets it pass; places, and numbers that were lowered, are named in `left_out`."""
    if isinstance(rule, Mapping):
        if not isinstance(value, Mapping):
            return value  # the configuration's own check names it
        left_out += [f"{at}{key}" for key in value if rule.get(key) is LEAVE_OUT and value[key]]
        return {
            key: _allowed(value[key], rule[key], f"{at}{key}.", left_out)
            for key in value
            if key in rule and rule[key] is not LEAVE_OUT
        }
    if isinstance(rule, list):
        rows = value if isinstance(value, list) else []
        return [_allowed(row, rule[0], f"{at}{i}.", left_out) for i, row in enumerate(rows)]
    if rule.value is not None:
        return rule.value
    if rule.limit is not None:
        over = (
            isinstance(value, (int, float)) and not isinstance(value, bool) and value > rule.limit
        )
        if over:
            left_out.append(f"{at[:-1]} beyond {rule.limit:g}")
        return type(value)(rule.limit) if over else value
    if not isinstance(value, (Mapping, list)):
        return value
    found = params_found({"": value}, at[:-1])
    left_out += [name.replace("..", ".", 1) for name in found.left_out]
    return found.kept.get("")


def checkpoint_settings(
    kind: type[C],
    checkpoint: str,
    overrides: Sequence[str],
    config: Path | None = None,
    *,
    keys: Mapping[str, Rule] = CHECKPOINT_KEYS,
    trust_code: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> C:
    """The configuration for a checkpoint: `config`, a file the user named, else what `keys` take from its trainer/config.yaml,
    else defaults; `overrides` go over each of them. `say` is told which file was read and what was left out of it.

    Raises ConfigError.
    """
    # in quotes: a folder may be called 7
    typed = [f"model.path={json.dumps(checkpoint)}", *overrides]
    trained = Path(checkpoint) / "trainer" / "config.yaml"
    if config is not None or not trained.is_file():
        return load_config_as(kind, config, typed)
    if trust_code:
        say(f"settings: {trained} (all of them: --trust-code)")
        return load_config_as(kind, trained, typed)
    left_out: list[str] = []
    loaded = load_config_as(
        kind, trained, typed, keep=lambda tree: _allowed(tree, keys, "", left_out)
    )
    say(
        f"settings: {trained}"
        + (
            f" without {', '.join(left_out)}: give these yourself if you want them, or --trust-code"
            if left_out
            else ""
        )
    )
    return loaded
