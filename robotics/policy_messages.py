"""What readers of policy servers' messages share, whichever protocol carries them: arrays rebuilt from a stranger's bytes.

    picture_HWC = array_view(data, "|u1", [224, 224, 3])

Nothing of the bytes is believed: types that hold objects, and sizes that do not match, are refused before anything is made of
them. mmrl.robotics.openpi_messages and mmrl.robotics.lerobot_pickles read with it.

Legend: H x W picture.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from mmrl.errors import MMRLError

__all__ = ["SHOWN", "MessageError", "array_view", "dtype_of"]

SHOWN = 80
"""Characters of a value that an error shows."""
_DTYPE = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")
_DIMENSIONS = 8


class MessageError(MMRLError, ValueError):
    """Bytes that are no message of the protocol, or a message that lacks what it must hold."""


def dtype_of(said: Any) -> np.dtype[Any]:
    """The type that numpy's string for it names. Raises MessageError for others than truth values, whole numbers and floats."""
    if not isinstance(said, str) or _DTYPE.fullmatch(said) is None:
        raise MessageError(
            f"expected an array of truth values, whole numbers or floats, found dtype {said!r:.{SHOWN}}; send pictures as "
            "uint8 and numbers as float32 or float64"
        )
    return np.dtype(said)


def array_view(data: Any, said_dtype: Any, shape: Any, order: str = "C") -> np.ndarray:
    """The array that `data` holds: a view into these bytes, which cannot be written, as they came. order: C or F, which index
    moves fastest. Raises MessageError."""
    dtype = dtype_of(said_dtype)
    if (
        not isinstance(shape, (list, tuple))
        or len(shape) > _DIMENSIONS
        or not all(type(n) is int and 0 <= n < 2**31 for n in shape)
    ):
        raise MessageError(
            f"expected a shape of at most {_DIMENSIONS} sizes from 0 to 2**31 - 1, found {shape!r:.{SHOWN}}"
        )
    count = math.prod(shape)
    if not isinstance(data, (bytes, memoryview)) or len(data) != count * dtype.itemsize:
        held = isinstance(data, (bytes, memoryview))
        found = f"{len(data):,} bytes" if held else type(data).__name__
        raise MessageError(
            f"expected {count * dtype.itemsize:,} bytes of an array {dtype} {tuple(shape)}, found {found}"
        )
    try:
        return np.frombuffer(data, dtype, count).reshape(shape, order="F" if order == "F" else "C")
    except ValueError as error:  # empty, with sizes that numpy cannot count
        raise MessageError(f"expected an array that numpy can hold, found {shape}") from error
