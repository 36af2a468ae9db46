"""Pickles of lerobot's policy servers and clients: read without running anything, and written without lerobot or torch.

    data = write(Record("TimedAction", {"timestamp": 0.5, "timestep": 7, "action": Tensor(action_A)}))
    record = read(data)                                        # .fields["action"] is a numpy array

A pickle is a program: it may call whatever it names, so Python's own reader must not see one of a stranger. `read` is an
interpreter of our own for the few instructions that lerobot's messages are made of. It imports nothing and calls nothing by name:
known are the three classes of the protocol (`CLASSES`, which become a `Record`), numpy's arrays and scalars, and tensors of
torch, whose storage is a file in torch.save's older format within the pickle and is read here, too (torch's reader of it would
run code). Another name, an unknown instruction, sizes that do not match, deep nesting, and more than `_VALUES` values or `_STEPS`
instructions are refused; arrays are views into the message, so that reading takes little more memory than it.

`write` makes pickles that `pickle.loads` turns into lerobot's own classes where lerobot is installed (releases from 0.4 on, in
which they are in lerobot.async_inference.helpers).

Legend: A action dimensions.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmrl.robotics.policy_messages import SHOWN, MessageError, array_view

__all__ = ["CLASSES", "Record", "Tensor", "read", "write"]

CLASSES = ("TimedObservation", "TimedAction", "RemotePolicyConfig")
"""Names of the protocol's classes, in this module of lerobot's:"""
_HELPERS = "lerobot.async_inference.helpers"
_DEPTH = 8  # lists, tuples, maps and records within one another
_VALUES = 100_000
_STEPS = 200_000  # an action of a chunk takes about 150

_MAGIC = 0x1950A86A20F9469CFC6C  # of torch.save's format without a zip (torch/serialization.py), with its version
_FORMAT = 1001
_STORAGES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "|i1",
    "ByteStorage": "|u1",
    "BoolStorage": "|b1",
}


@dataclass
class Record:
    """An instance of one of `CLASSES`: its attributes by name."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tensor:
    """An array that the other side gets as a float32 tensor."""

    array: np.ndarray


# reading


@dataclass(frozen=True)
class _Name:
    """A class or function that a pickle asks for; it is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass
class _Dtype:
    """numpy's type of an array while it is read: "u1", "f4", and then its byte order."""

    kind: str
    order: str = "|"


@dataclass
class _Array:
    """An array while it is read: it is referred to before its content is there."""

    value: np.ndarray | None = None


@dataclass(frozen=True)
class _Storage:
    """A row of numbers that tensors are parts of."""

    values: np.ndarray


_MARK = object()
_ALLOWED = """PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE
    BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8 EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_DICT SETITEM SETITEMS MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID"""
_OPERATIONS = {
    operation.code.encode("latin-1"): operation
    for operation in pickletools.opcodes
    if operation.name in _ALLOWED.split()
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read(data: bytes) -> Any:
    """What a pickle of the protocol holds: None, truth values, numbers, texts, bytes, lists, tuples, maps by text, arrays and
    `Record`s. Arrays are views into `data` and cannot be written. Raises MessageError."""
    try:
        return _Reader().read(data)
    except MessageError:
        raise
    # what instructions find that were put in a wrong order
    except (
        AttributeError,
        EOFError,
        IndexError,
        KeyError,
        OverflowError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        words = f"{type(error).__name__}: {error}"[:SHOWN]
        raise MessageError(
            f"expected a pickle of lerobot's protocol, found other bytes ({words})"
        ) from None


def _found(value: Any) -> str:
    """What an error says of a value: never more than its type, since to print one may take for ever."""
    return str(value) if isinstance(value, _Name) else type(value).__name__


class _Reader:
    """A stack machine for one message; its counts go on in the storages within it."""

    def __init__(self) -> None:
        self._steps = self._values = 0
        self._calls: dict[str, Callable[..., Any]] = {
            "numpy.core.multiarray._reconstruct": self._begun_array,
            "numpy._core.multiarray._reconstruct": self._begun_array,
            "numpy.core.multiarray.scalar": self._scalar,
            "numpy._core.multiarray.scalar": self._scalar,
            "numpy.core.numeric._frombuffer": self._buffer,
            "numpy._core.numeric._frombuffer": self._buffer,
            "numpy.dtype": self._dtype,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch.storage._load_from_bytes": self._storage,
            "collections.OrderedDict": self._hooks,
        }
        self._records = {f"{_HELPERS}.{name}" for name in CLASSES}
        self._names = {*self._calls, *self._records, "numpy.ndarray"}

    def read(self, data: bytes) -> Any:
        """The message."""
        file = io.BytesIO(data)
        value = self._run(file, self._names)
        if file.read(1):
            raise MessageError("expected one pickle, found more bytes after it")
        return self._finished(value, _DEPTH)

    # the machine

    def _operations(self, file: io.BytesIO) -> Iterator[tuple[str, Any]]:
        """(name, argument) of each instruction up to the last one, STOP."""
        while True:
            self._steps += 1
            if self._steps > _STEPS:
                raise MessageError(
                    f"expected a pickle of at most {_STEPS:,} instructions, found more; send numbers as arrays"
                )
            code = file.read(1)
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise MessageError(
                    f"expected a pickle of lerobot's protocol, found "
                    f"{'its end too soon' if not code else f'the byte {code!r} where an instruction stands'}"
                )
            if operation.name == "STOP":
                return
            argument = operation.arg.reader(file) if operation.arg is not None else None
            if isinstance(argument, str):
                argument.encode()  # half characters (surrogates), which nothing can print, are a ValueError
            yield operation.name, argument

    def _run(self, file: io.BytesIO, known: set[str]) -> Any:
        """The value of the pickle that begins here; names outside of `known` are refused."""
        stack: list[Any] = []
        memo: dict[int, Any] = {}
        for name, argument in self._operations(file):
            if name in ("PROTO", "FRAME"):
                continue
            if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name == "MARK":
                stack.append(_MARK)
            elif name in ("EMPTY_LIST", "EMPTY_DICT"):
                stack.append([] if name == "EMPTY_LIST" else {})
            elif name in _TUPLES or name == "TUPLE":
                count = _TUPLES.get(name)
                stack.append(tuple(_top(stack) if count is None else _last(stack, count)))
            elif name in ("APPEND", "APPENDS"):
                added = _last(stack, 1) if name == "APPEND" else _top(stack)
                _kind(stack[-1], list).extend(added)
            elif name in ("SETITEM", "SETITEMS"):
                pairs = _last(stack, 2) if name == "SETITEM" else _top(stack)
                _put(_kind(stack[-1], dict), pairs)
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name in ("GLOBAL", "STACK_GLOBAL"):
                # GLOBAL's argument is both words with a space between them
                words = argument.split(" ", 1) if name == "GLOBAL" else _last(stack, 2)
                stack.append(_known(words, known))
            elif name in ("REDUCE", "NEWOBJ"):
                called, arguments = _last(stack, 2)
                stack.append(self._called(called, _kind(arguments, tuple), name == "NEWOBJ"))
            elif name == "BUILD":
                [state] = _last(stack, 1)
                self._built(stack[-1], state)
            elif name == "BINPERSID":
                stack.append(_described(*_last(stack, 1)))
            else:  # numbers, texts, bytes
                stack.append(bytes(argument) if name == "BYTEARRAY8" else argument)
        [value] = stack
        return value

    def _called(self, called: Any, arguments: tuple[Any, ...], new: bool) -> Any:
        """What the other side would have called; new: for an empty instance of a class."""
        name = str(_kind(called, _Name))
        if new and name in self._records and not arguments:
            return Record(called.name)
        if new or name not in self._calls:
            raise MessageError(
                f"expected instances of {', '.join(CLASSES)}, found a call of {name}"
            )
        return self._calls[name](*arguments)

    def _built(self, value: Any, state: Any) -> None:
        """Give a value that was begun its content."""
        if isinstance(value, Record):
            _kind(state, dict)
            value.fields = state
        elif isinstance(value, _Dtype):
            value.order = _kind(_kind(state, tuple)[1], str)
        elif isinstance(value, _Array):
            _, shape, dtype, fortran, data = _kind(state, tuple)
            value.value = _array(data, dtype, shape, fortran is True)
        else:
            raise MessageError(
                f"expected content of a record or an array, found that of {_found(value)}"
            )

    def _finished(self, value: Any, left: int) -> Any:
        """A copy of what was read in plain values. What is referred to twice is counted, and copied, twice."""
        self._values += 1
        if self._values > _VALUES:
            raise MessageError(
                f"expected a message of at most {_VALUES:,} values, found more; send numbers as arrays"
            )
        if value is None or isinstance(value, (bool, int, float, str, bytes, np.generic)):
            return value
        if isinstance(value, _Array) and value.value is not None:
            return value.value
        if not left:
            raise MessageError(f"expected at most {_DEPTH} values within one another, found more")
        if isinstance(value, dict):
            return {key: self._finished(one, left - 1) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._finished(one, left - 1) for one in value)
        if isinstance(value, Record):
            return Record(value.name, self._finished(value.fields, left - 1))
        raise MessageError(
            f"expected numbers, texts, arrays, lists and maps, found {_found(value)}"
        )

    # calls

    def _hooks(self) -> dict[str, Any]:
        """Those of a tensor: none."""
        return {}

    def _begun_array(self, kind: Any, shape: Any, code: Any) -> _Array:
        if str(_kind(kind, _Name)) != "numpy.ndarray":
            raise MessageError(f"expected an array of numpy.ndarray, found {kind}")
        return _Array()

    def _dtype(self, kind: Any, align: Any = False, copy: Any = False) -> _Dtype:
        return _Dtype(_kind(kind, str))

    def _scalar(self, dtype: Any, data: Any) -> Any:
        return _array(data, dtype, (), False)[()]

    def _buffer(self, data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> _Array:
        if axes is not None:
            raise MessageError("expected an array in C or Fortran order, found another")
        return _Array(_array(data, dtype, shape, order == "F"))

    def _storage(self, data: Any) -> _Storage:
        """The numbers in torch.save's file of a storage."""
        file = io.BytesIO(_kind(data, bytes))
        inside = {f"torch.{name}" for name in _STORAGES}
        found = [self._run(file, inside) for _ in range(3)]
        if found[:2] != [_MAGIC, _FORMAT] or not _kind(found[2], dict).get("little_endian"):
            raise MessageError("expected a storage of torch in its format 1001, found another")
        described, keys = self._run(file, inside), self._run(file, set())
        name, key, count = _kind(described, _Described).parts
        if keys != [key] or file.read(8) != struct.pack("<q", count):
            raise MessageError("expected one storage of torch, found another number")
        # no copy: a message may refer to the same bytes many times
        values = array_view(memoryview(data)[file.tell() :], _STORAGES[name], (count,))
        return _Storage(values)

    def _tensor(
        self, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, *more: Any
    ) -> _Array:
        """A part of a storage. torch writes the whole storage with each."""
        shape, steps = _sizes(size), _sizes(stride)
        if type(offset) is not int or len(shape) != len(steps) or hooks or more:
            raise MessageError("expected a tensor with an offset, a size and strides, found others")
        count, wanted = math.prod(shape), 1
        for length, step in zip(reversed(shape), reversed(steps), strict=True):
            if length > 1 and count and step != wanted:
                raise MessageError(
                    f"expected a contiguous tensor, found strides {steps} of {shape}; send tensor.contiguous()"
                )
            wanted *= length
        values = _kind(storage, _Storage).values
        if not 0 <= offset <= len(values) - count:
            raise MessageError(
                f"expected a tensor within its storage of {len(values):,} numbers, found {offset:,} to {offset + count:,}"
            )
        return _Array(values[offset : offset + count].reshape(shape))


@dataclass(frozen=True)
class _Described:
    """What torch's file says of its storage: (name of its class, key, count of numbers)."""

    parts: tuple[str, str, int]


def _described(said: Any) -> _Described:
    """("storage", class, key, device, count, view of another storage). The device is of the sender."""
    word, storage, key, _, count, *view = _kind(said, tuple)
    name = _kind(storage, _Name).name
    if word != "storage" or view not in ([], [None]) or type(count) is not int or count < 0:
        raise MessageError("expected a storage of torch, found a reference to something else")
    return _Described((name, _kind(key, str), count))


def _known(words: list[Any], known: set[str]) -> _Name:
    module, name = words
    found = _Name(_kind(module, str), _kind(name, str))
    if str(found) not in known:
        raise MessageError(
            f"expected classes of lerobot's protocol, found a pickle that asks for {str(found)!r:.{SHOWN}}; it was not run"
        )
    return found


def _kind(value: Any, kind: type) -> Any:
    """`value`, which must be one of these. Raises MessageError."""
    if type(value) is not kind:
        raise MessageError(
            f"expected a pickle of lerobot's protocol with {kind.__name__.lstrip('_')} here, found {_found(value)}"
        )
    return value


def _last(stack: list[Any], count: int) -> list[Any]:
    """The topmost values, taken off."""
    if len(stack) < count or any(value is _MARK for value in stack[len(stack) - count :]):
        raise MessageError("expected a pickle of lerobot's protocol, found too few values in one")
    taken = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return taken


def _top(stack: list[Any]) -> list[Any]:
    """The values above the last mark, taken off with it."""
    taken = []
    while (value := stack.pop()) is not _MARK:
        taken.append(value)
    return taken[::-1]


def _put(target: dict[str, Any], pairs: list[Any]) -> None:
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        target[_kind(key, str)] = value


def _sizes(value: Any) -> tuple[int, ...]:
    """A tuple of whole numbers from 0 on: nothing else may reach an error that prints it."""
    if any(type(n) is not int or n < 0 for n in _kind(value, tuple)):
        raise MessageError("expected sizes as whole numbers from 0 on, found others")
    sizes: tuple[int, ...] = value
    return sizes


def _array(data: Any, dtype: Any, shape: Any, fortran: bool) -> np.ndarray:
    found = _kind(dtype, _Dtype)
    if found.order not in ("<", "|"):
        raise MessageError(
            f"expected numbers in little-endian order, found {found.order!r:.{SHOWN}}"
        )
    return array_view(data, found.order + found.kind, _sizes(shape), "F" if fortran else "C")


# writing


def write(value: Any) -> bytes:
    """A pickle (protocol 4) of records, tensors, arrays, lists, tuples, maps, texts, bytes, numbers, truth values and None.
    Raises TypeError for others."""
    return pickle.PROTO + b"\x04" + b"".join(_written(value)) + pickle.STOP


def _written(value: Any) -> Iterator[bytes]:
    """The instructions that make a value."""
    if isinstance(value, Record):
        yield _global(_HELPERS, value.name) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        yield from _written(value.fields)
        yield pickle.BUILD
    elif isinstance(value, Tensor):
        yield from _written_tensor(np.ascontiguousarray(value.array, "<f4"))
    elif isinstance(value, np.ndarray):
        yield from _written_array(value)
    elif isinstance(value, Mapping):
        yield pickle.EMPTY_DICT + pickle.MARK
        for key, one in value.items():
            yield from _written(key)
            yield from _written(one)
        yield pickle.SETITEMS
    elif isinstance(value, (list, tuple)):
        yield pickle.EMPTY_LIST + pickle.MARK if isinstance(value, list) else pickle.MARK
        for one in value:
            yield from _written(one)
        yield pickle.APPENDS if isinstance(value, list) else pickle.TUPLE
    elif value is None or type(value) in (bool, int, float, str, bytes):
        # Python's own instructions for a plain value, without the frame around them
        yield pickle.dumps(value, 3)[2:-1]
    else:
        raise TypeError(
            f"expected records, tensors, arrays, lists, maps, texts and numbers in a pickle, found {type(value).__name__}"
        )


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _written_array(array: np.ndarray) -> Iterator[bytes]:
    """As numpy pickles one (ndarray.__reduce__)."""
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"expected arrays of truth values, whole numbers or floats in a pickle, found {array.dtype}"
        )
    dtype = array.dtype.newbyteorder("<")
    order = "|" if dtype.itemsize == 1 else "<"
    yield _global("numpy._core.multiarray", "_reconstruct") + pickle.MARK
    yield _global("numpy", "ndarray")
    yield from _written((0,))
    yield from _written(b"b")
    yield pickle.TUPLE + pickle.REDUCE + pickle.MARK
    yield from _written(1)
    yield from _written(array.shape)
    yield _global("numpy", "dtype")
    yield from _written((dtype.str[1:], False, True))
    yield pickle.REDUCE
    yield from _written((3, order, None, None, None, -1, -1, 0))
    yield pickle.BUILD
    yield from _written(False)
    yield from _written(array.astype(dtype).tobytes())
    yield pickle.TUPLE + pickle.BUILD


def _written_tensor(array: np.ndarray) -> Iterator[bytes]:
    """As torch pickles one on the CPU (torch/_tensor.py, torch/storage.py)."""
    strides = tuple(step // array.itemsize for step in array.strides)
    yield _global("torch._utils", "_rebuild_tensor_v2") + pickle.MARK
    yield _global("torch.storage", "_load_from_bytes")
    yield from _written((_storage_file(array),))
    yield pickle.REDUCE
    for value in (0, array.shape, strides, False):
        yield from _written(value)
    yield _global("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
    yield pickle.TUPLE + pickle.REDUCE


def _storage_file(array: np.ndarray) -> bytes:
    """As torch.save writes a storage of float32 in its older format."""
    sizes = {"short": 2, "int": 4, "long": 4}
    system = {"protocol_version": _FORMAT, "little_endian": True, "type_sizes": sizes}
    plain = [pickle.dumps(value, 2) for value in (_MAGIC, _FORMAT, system)]
    storage = [pickle.PROTO + b"\x02" + pickle.MARK, *_written("storage")]
    storage += [_global("torch", "FloatStorage"), *_written("0"), *_written("cpu")]
    storage += [
        *_written(array.size),
        *_written(None),
        pickle.TUPLE + pickle.BINPERSID + pickle.STOP,
    ]
    keys = pickle.dumps(["0"], 2)
    return b"".join([*plain, *storage, keys, struct.pack("<q", array.size), array.tobytes()])
