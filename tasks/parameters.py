"""Checks of a task's parameters that are no answer's: of tasks whose rollouts are played in an environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmrl.errors import ConfigError, did_you_mean

__all__ = ["check_known", "check_number", "check_whole"]


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
