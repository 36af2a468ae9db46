"""Messages of openpi's policy servers and clients: MessagePack with arrays, read without believing anything of the bytes.

    sent = pack({"observation/image": picture_HWC, "observation/state": state_S, "prompt": "pick up the cup"})
    message = unpack(sent)

openpi (packages/openpi-client, msgpack_numpy.py) writes an array as a map with the binary keys __ndarray__ (true), data (its bytes
in C order), dtype (numpy's string for it) and shape, and a scalar of numpy as one with __npgeneric__, data (a number) and dtype.
`pack` writes the same bytes as it does, for arrays and scalars of truth values, whole numbers and floats; there is no pickle on
either side.

`unpack` takes bytes of strangers: other types (objects, records, texts, complex numbers, dates), sizes that do not match, deep
nesting, and more than 1,000 maps and lists or 100,000 values in them are refused. Reading takes at most twice the memory of the
arrays and some 20 MB.

Legend: H x W picture, S state values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmrl.errors import need_package
from mmrl.robotics.policy_messages import SHOWN, MessageError, array_view, dtype_of

__all__ = ["EXTRA", "PROTOCOL", "need_packages", "pack", "picture_name", "unpack"]

EXTRA = "mmrl"
"""Name of what only servers and clients of mmrl say, in metadata and observations."""
PROTOCOL = 1
"""Version of that."""
_KINDS = "biuf"
_ARRAY = {b"__ndarray__", b"data", b"dtype", b"shape"}
_SCALAR = {b"__npgeneric__", b"data", b"dtype"}
_DEPTH = 8  # maps and lists within one another
_CONTAINERS = 1000  # maps (an array is one) and lists of a message
_LENGTH = 1000  # entries of one of them: room for a list is made before its entries are there
_VALUES = 100_000  # of all of them


def picture_name(camera: str) -> str:
    """Under which name a camera's picture is sent: observation/image for base, observation/NAME_image for others."""
    return "observation/image" if camera == "base" else f"observation/{camera}_image"


def need_packages(purpose: str) -> None:
    """Raises MissingExtraError without msgpack or websockets."""
    need_package("msgpack", purpose, "openpi")
    need_package("websockets", purpose, "openpi")


def _written(value: Any) -> Any:
    """An array or scalar of numpy as a map."""
    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(
            f"expected arrays, numbers, texts, lists and maps in a message, found {type(value).__name__}"
        )
    if value.dtype.kind not in _KINDS:
        raise TypeError(
            f"expected arrays of truth values, whole numbers or floats in a message, found {value.dtype}"
        )
    if isinstance(value, np.ndarray):
        content = {b"__ndarray__": True, b"data": value.tobytes()}
        return {**content, b"dtype": value.dtype.str, b"shape": value.shape}
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}


def pack(message: Mapping[str, Any]) -> bytes:
    """`message` as openpi writes it. Raises TypeError for a value that it has no place for."""
    import msgpack

    return bytes(msgpack.packb(message, default=_written))


def unpack(data: bytes) -> dict[Any, Any]:
    """The map that `data` holds; its arrays are writable, in this machine's byte order. Raises MessageError."""
    import msgpack

    reader = _Reader()
    try:
        found = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_hook=reader.mapped,
            list_hook=reader.listed,
            ext_hook=_extension,
            max_array_len=_LENGTH,
            max_map_len=_LENGTH,
            max_ext_len=0,
        )
    except MessageError:
        raise
    # StackError, FormatError, UnicodeDecodeError and others are ValueErrors; a reader in Python recurses
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        words = str(error)[:SHOWN] or type(error).__name__
        raise MessageError(
            f"expected a MessagePack message of openpi's protocol, found other bytes ({words})"
        ) from None
    if not isinstance(found, dict):
        raise MessageError(
            f"expected a message that is a map, found {type(found).__name__}; send observations by name"
        )
    _check_depth(found, _DEPTH)
    return found


def _extension(code: int, data: bytes) -> Any:
    raise MessageError(f"expected no extension types in a message, found number {code}")


def _check_depth(value: Any, left: int) -> None:
    """Raises MessageError; recurses no deeper than that."""
    if not isinstance(value, (dict, list)):
        return
    if not left:
        raise MessageError(
            f"expected at most {_DEPTH} maps and lists within one another, found more"
        )
    for one in value.values() if isinstance(value, dict) else value:
        _check_depth(one, left - 1)


class _Reader:
    """Counts what a message is made of while it is read: each map and list is told when it is complete."""

    def __init__(self) -> None:
        self._containers = self._values = 0

    def _count(self, value: dict[Any, Any] | list[Any]) -> None:
        self._containers += 1
        self._values += len(value)
        if self._containers > _CONTAINERS or self._values > _VALUES:
            raise MessageError(
                f"expected a message of at most {_CONTAINERS:,} maps and lists with {_VALUES:,} values, found more; send "
                "numbers as arrays"
            )

    def listed(self, value: list[Any]) -> list[Any]:
        self._count(value)
        return value

    def mapped(self, value: dict[Any, Any]) -> Any:
        self._count(value)
        if b"__ndarray__" in value:
            return _array(value)
        return _scalar(value) if b"__npgeneric__" in value else value


def _array(said: dict[Any, Any]) -> np.ndarray:
    if set(said) != _ARRAY:
        raise MessageError(
            f"expected an array with data, dtype and shape, found {sorted(map(str, said))!r:.{SHOWN}}"
        )
    view = array_view(said[b"data"], said[b"dtype"], said[b"shape"])
    # a copy: what is read from bytes cannot be written
    return view.astype(view.dtype.newbyteorder("="))


def _scalar(said: dict[Any, Any]) -> np.generic:
    if set(said) != _SCALAR:
        raise MessageError(
            f"expected a scalar with data and dtype, found {sorted(map(str, said))!r:.{SHOWN}}"
        )
    value, dtype = said[b"data"], dtype_of(said[b"dtype"])
    kinds: tuple[type, ...] = {"b": (bool,), "f": (int, float)}.get(dtype.kind, (int,))
    good = type(value) in kinds
    if good and dtype.kind in "iu":
        good = np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    if not good:
        raise MessageError(f"expected a number of {dtype}, found {value!r:.{SHOWN}}")
    with np.errstate(over="ignore"):  # an infinite number is for its user to refuse
        scalar: np.generic = dtype.type(value)
    return scalar
