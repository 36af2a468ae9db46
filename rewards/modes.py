"""Rewards chosen by name: a table of factories, and one way of refusing a mode or a parameter that is not in it.

python -c "from mmrl.rewards.modes import by_mode; print(by_mode('toy', {'power': lambda exponent=2: exponent}, 'power', {}))"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mmrl.errors import ConfigError, did_you_mean

__all__ = ["by_mode", "check_shares"]

Made = TypeVar("Made")


def by_mode(
    kind: str, modes: Mapping[str, Callable[..., Made]], mode: str, params: Mapping[str, Any]
) -> Made:
    """What the factory of `mode` makes of `params`; `kind` names the rewards in messages (counting, detection ...).

    Raises ConfigError for an unknown mode or parameter; the factory may raise it for values out of range.
    """
    if mode not in modes:
        raise ConfigError(
            f"unknown {kind} mode {mode!r}; expected one of {', '.join(modes)}.{did_you_mean(str(mode), modes)}"
        )
    known = list(inspect.signature(modes[mode]).parameters)
    for name in params:
        if name not in known:
            raise ConfigError(
                f"unknown parameter {name!r} of mode {mode}; expected {', '.join(known) or 'none'}."
                f"{did_you_mean(name, known)}"
            )
    return modes[mode](**params)


def check_shares(shares: Any, names: Sequence[str]) -> Mapping[str, float]:
    """`shares` when it maps some of `names` to numbers in [0, 1e6] with a positive sum; raises ConfigError."""
    if not isinstance(shares, Mapping):
        raise ConfigError(
            f"expected weights as a mapping of {', '.join(names)} to numbers, found {shares!r}"
        )
    for name, value in shares.items():
        if name not in names:
            raise ConfigError(
                f"unknown term {name!r} in weights; expected {', '.join(names)}.{did_you_mean(name, names)}"
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e6:
            raise ConfigError(
                f"expected weights.{name} to be a number in [0, 1e+06], found {value!r}"
            )
    if sum(shares.values()) <= 0:
        raise ConfigError(f"expected a positive weight, found {dict(shares)}")
    return shares
