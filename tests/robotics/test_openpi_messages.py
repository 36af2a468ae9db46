"""Messages of openpi's protocol: bytes of its own packer, and what strangers send."""

from __future__ import annotations

import contextlib
import json
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.robotics.openpi_messages import pack, unpack
from mmrl.robotics.policy_messages import MessageError
from scripts.check_openpi import FIXTURE, message
from tests.robotics.openpi_kit import (
    NESTED,
    array,
    same,
)


def test_bytes_are_those_of_openpis_packer() -> None:
    """FIXTURE was written by openpi-client itself (scripts/check_openpi.py)."""
    theirs = bytes.fromhex(json.loads(FIXTURE.read_text(encoding="utf-8"))["packed"])
    assert pack(message()) == theirs
    found = unpack(theirs)
    assert same(found, message())
    assert all(v.flags.writeable for v in found.values() if isinstance(v, np.ndarray))


def test_other_byte_orders_are_read_as_ours() -> None:
    numbers = np.arange(6, dtype=">i4").reshape(2, 3)
    found = unpack(pack({"numbers": numbers}))["numbers"]
    assert found.dtype.isnative and np.array_equal(found, numbers)


def scalar(data: Any, dtype: str) -> bytes:
    return pack({"a": {b"__npgeneric__": True, b"data": data, b"dtype": dtype}})


BAD = {
    "objects": (array(dtype="|O"), "found dtype '|O'"),
    "records": (array(dtype="|V8"), "found dtype '|V8'"),
    "fields": (array(dtype=[["a", "<f8"]]), r"found dtype \[\['a', '<f8'\]\]"),
    "texts": (array(dtype="<U2"), "found dtype '<U2'"),
    "complex": (array(dtype="<c8"), "found dtype '<c8'"),
    "dates": (array(dtype="<M8[s]"), r"found dtype '<M8\[s\]'"),
    "no dtype": (array(dtype=None), "expected an array with data, dtype and shape"),
    "one key more": (array(more=1), "expected an array with data, dtype and shape"),
    "too few bytes": (array(shape=[2]), "expected 16 bytes of an array float64"),
    "too many bytes": (array(dtype="<f4"), "expected 4 bytes of an array float32"),
    "text for bytes": (array(data="\0" * 8), "found str"),
    "negative": (array(shape=[-1]), "expected a shape of at most 8 sizes"),
    "truth": (array(shape=[True]), "expected a shape of at most 8 sizes"),
    "number": (array(shape=1), "expected a shape of at most 8 sizes"),
    "huge": (array(shape=[2**31 - 1] * 8), "expected 3,6.* bytes of an array"),
    "huger": (array(shape=[2**40]), "expected a shape of at most 8 sizes"),
    "huge and empty": (array(data=b"", shape=[2**31 - 1] * 7 + [0]), "that numpy can hold"),
    "many dimensions": (array(shape=[1] * 9), "expected a shape of at most 8 sizes"),
    "scalar of 300 in 8 bits": (scalar(300, "|u1"), "expected a number of uint8, found 300"),
    "scalar of text": (scalar("1", "<f4"), "expected a number of float32, found '1'"),
    "scalar of an object": (scalar(1, "|O"), "found dtype '|O'"),
    "nested": (NESTED, "within one another"),
    "nested maps": (b"\x81\xa1a" * 600 + b"\xc0", "within one another"),
    "nested without end": (b"\x91" * 10_000, "expected a MessagePack message"),
    "lists without content": (b"\xdc\x03\xe8" * 900, "expected a MessagePack message"),
    "long list": (pack({"a": [0] * 1001}), "exceeds max_array_len"),
    "many maps": (pack({"a": [{}] * 999, "b": [{}] * 999}), "at most 1,000 maps and lists"),
    "many values": (pack({"a": [[0] * 1000] * 200}), "100,000 values"),
    "extension": (b"\x81\xa1a\xd4\x01\x00", "max_ext_len"),
    "time": (b"\x81\xa1a\xd6\xff\0\0\0\0", "max_ext_len"),
    "no map": (pack([1]), "expected a message that is a map, found list"),  # type: ignore[arg-type]
    "number for a name": (b"\x81\x01\x02", "is not allowed for map key"),
    "cut": (array()[:-1], "expected a MessagePack message"),
    "more behind": (array() + b"\xc0", "extra data"),
    "no text": (b"\x81\xa1\xff\x01", "can't decode"),
    "nothing": (b"", "expected a MessagePack message"),
    "pickle": (b"\x80\x04\x95", "expected a MessagePack message"),
}


@pytest.mark.parametrize("name", BAD)
def test_messages_of_strangers_are_refused(name: str) -> None:
    data, said = BAD[name]
    began = time.monotonic()
    with pytest.raises(MessageError, match=said) as error:
        unpack(data)
    assert len(str(error.value)) < 600 and time.monotonic() - began < 5


def test_reading_takes_no_more_memory_than_said() -> None:
    for data in (
        b"\xdc\x03\xe8" * 1000,
        b"\x81\xa1a" + b"\x9a" * 5,
        b"\x82\xa1a\xdc\x03\xe7" + b"\x80" * 999 + b"\xa1b\xdc\x03\xe8" + b"\xc0" * 1000,
        pack({str(n): [0.5] * 99 for n in range(999)}),
        b"\x81\xa1a" + b"\xdc\x03\xe8" * 900 + b"\xcb" + bytes(900_000),
        pack({"picture": np.zeros((1000, 1000, 3), np.uint8)}),
    ):
        tracemalloc.start()
        try:
            with contextlib.suppress(MessageError):
                unpack(data)
            assert tracemalloc.get_traced_memory()[1] < 20e6 + 2 * len(data)
        finally:
            tracemalloc.stop()


@settings(max_examples=25)
@given(st.data())
def test_damaged_messages_are_read_or_refused(data: st.DataObject) -> None:
    bytes_ = bytearray(pack(message()))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(bytes_) - 1))
        bytes_[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(bytes_)))
    for damaged in (bytes(bytes_), bytes(bytes_[:cut])):
        with contextlib.suppress(MessageError):
            assert isinstance(unpack(damaged), dict)


def test_what_has_no_place_in_a_message_is_not_written() -> None:
    for value in (np.array([None]), np.array(["a"]), np.complex64(1), object()):
        with pytest.raises(TypeError, match="in a message, found"):
            pack({"a": value})
