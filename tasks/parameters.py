"""Checks of a task's parameters that are no answer's: of tasks whose rollouts are played in an environment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.errors import ConfigError, did_you_mean

__all__ = [
    "check_known",
    "check_mapping",
    "check_names",
    "check_number",
    "check_whole",
    "reached",
    "reward_bounds",
]


def check_known(task: str, params: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raises ConfigError for a name that has no default."""
    unknown = sorted(set(params) - set(defaults))
    if unknown:
        raise ConfigError(
            f"task {task}: unknown parameter '{unknown[0]}'; expected {', '.join(defaults)}."
            f"{did_you_mean(unknown[0], defaults)}"
        )


def check_whole(name: str, value: Any, least: int) -> None:
    """Raises ConfigError for what is no whole number of at least `least`. `name`: TASK.PARAMETER."""
    if type(value) is not int or value < least:
        raise ConfigError(f"expected {name} as a whole number of at least {least}, found {value!r}")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Raises ConfigError for what is no number from `low` to `high`. `name`: TASK.PARAMETER."""
    if type(value) not in (int, float) or not low <= value <= high:
        raise ConfigError(f"expected {name} as a number from {low:g} to {high:g}, found {value!r}")


def check_mapping(name: str, value: Any) -> None:
    """Raises ConfigError for what is no mapping. `name`: TASK.PARAMETER."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"expected {name} as a mapping, found {value!r:.200}")


def check_names(name: str, value: Any, example: str) -> None:
    """Raises ConfigError for what is no list of texts or whole numbers: a text by itself would be taken for its letters, and YAML's
    yes, no, on and off for names that were never written. `name`: TASK.PARAMETER."""
    listed = list(value) if _is_list(value) else [None]
    if not all(isinstance(one, (str, int)) and not isinstance(one, bool) for one in listed):
        quoted = (
            "; YAML reads yes, no, on and off as truth values: put names in quotes"
            if any(isinstance(one, bool) for one in listed)
            else ""
        )
        raise ConfigError(
            f"expected {name} as a list of names such as {example}, found {value!r:.200}{quoted}"
        )


def reward_bounds(task: str, rewards: Any, success_at: Any) -> tuple[float, float, float]:
    """The lowest and highest sum of an episode's rewards, and the sum from which on it is a success. Raises ConfigError."""
    pair = list(rewards) if _is_list(rewards) else []
    if len(pair) != 2 or not all(_finite(r) for r in pair) or pair[0] >= pair[1]:
        raise ConfigError(
            f"expected {task}.rewards as (lowest, highest) sum of an episode, found {rewards!r:.200}"
        )
    at = pair[1] if success_at is None else success_at
    if not _finite(at):
        raise ConfigError(
            f"expected {task}.success_at as the sum of rewards of a success, found {success_at!r:.200}"
        )
    return float(pair[0]), float(pair[1]), float(at)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def reached(total: float, least: float) -> bool:
    """Whether a sum of rewards is at least `least`, but for what its rounding took: ten times 0.1 are 1."""
    return total >= least - 1e-9 * max(1.0, abs(least))
