"""Rewards chosen by name: a table of factories, and one way of refusing a mode or a parameter that is not in it.

    python -c "from rewards.modes import by_mode; print(by_mode('toy', {'power': lambda exponent=2: exponent}, 'power', {}))"
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mmrl.errors import ConfigError, did_you_mean

__all__ = ["by_mode"]

Made = TypeVar("Made")


def by_mode(kind: str, modes: Mapping[str, Callable[..., Made]], mode: str, params: Mapping[str, Any]) -> Made:
    """What the factory of `mode` makes of `params`; `kind` names the rewards in messages (counting, detection ...).

    Raises ConfigError for an unknown mode or parameter; the factory may raise it for values out of range.
    """
    if mode not in modes:
        raise ConfigError(f"unknown {kind} mode {mode!r}; expected one of {', '.join(modes)}.{did_you_mean(str(mode), modes)}")
    known = list(inspect.signature(modes[mode]).parameters)
    for name in params:
        if name not in known:
            raise ConfigError(f"unknown parameter {name!r} of mode {mode}; expected {', '.join(known) or 'none'}."
                              f"{did_you_mean(name, known)}")
    return modes[mode](**params)
