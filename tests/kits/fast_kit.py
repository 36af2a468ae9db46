"""Which parameters of a test `make check` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["first_fast"]


def first_fast(values: Sequence[Any]) -> list[Any]:
    """Parameters of a test, all but the first marked slow: `make check` takes one, `make test` every one."""
    return [
        values[0],
        *(
            pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.slow)
            for v in values[1:]
        ),
    ]
