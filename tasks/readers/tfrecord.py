"""TFRecord files and the tf.train.Example messages in them, read and written without tensorflow.

A record is: length (8 bytes, little endian), masked CRC-32C of those bytes, data, masked CRC-32C of the data. Example is
a protobuf message of named lists of bytes, floats or whole numbers; its wire format is read here directly. Files may be
gzip streams as a whole. Hostile input is bounded: no length is believed before its checksum agrees, and none above
`max_record`; every error says which record.

    python -c "from mmrl.tasks.readers.tfrecord import crc32c; print(hex(crc32c(b'123456789')))"      # 0xe3069283

Sources: tensorflow/core/lib/io/record_writer.h (framing, mask), RFC 3720 appendix B.4 (CRC-32C, Castagnoli),
protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np

from mmrl.data.bounds import unpacks_too_far
from mmrl.errors import DataError
from mmrl.tasks.readers.common import RowError

__all__ = [
    "Feature",
    "crc32c",
    "encode_example",
    "fields",
    "masked_crc",
    "parse_example",
    "read_records",
    "write_records",
]

Feature = list[bytes] | list[int] | list[float]

MAX_RECORD = 1 << 28
"""Longest record that is read, 256 MiB: an episode of 50 screenshots has about 50 MiB."""
MAX_NUMBERS = 5_000_000
"""Most whole numbers of one feature: they need a byte each in the file, and 40 here."""
_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed
_MASK_DELTA = 0xA282EAD8
_LANES, _SMALL = 1024, 1 << 15  # data longer than _SMALL is read by _LANES lanes at once
_ONES = 0xFFFFFFFF


@lru_cache(maxsize=1)
def _table() -> np.ndarray:
    """uint32[256]: the register after one byte."""
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, (values >> 1) ^ np.uint32(_POLYNOMIAL), values >> 1)
    return values


@lru_cache(maxsize=1)
def _table_list() -> list[int]:
    return [int(v) for v in _table()]


def _by_byte(register: int, data: bytes | memoryview) -> int:
    table = _table_list()
    for byte in data:
        register = table[(register ^ byte) & 0xFF] ^ (register >> 8)
    return register


def _after_zeros(count: int) -> list[list[int]]:
    """Four tables of 256: what `count` zero bytes make of a register, byte by byte of the register (the step is linear)."""
    bits = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).astype(np.uint32)
    table = _table()
    for _ in range(count):
        bits = table[bits & 0xFF] ^ (bits >> 8)
    tables = np.zeros((4, 256), dtype=np.uint32)
    for place in range(4):
        for bit in range(8):
            chosen = (np.arange(256) >> bit) & 1 == 1
            tables[place, chosen] ^= bits[8 * place + bit]
    return [[int(v) for v in row] for row in tables]


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of `data`. Long data is split into equal lanes whose registers advance together in numpy."""
    register, start = _ONES, 0
    if len(data) > _SMALL:
        length = len(data) // _LANES
        lanes = np.frombuffer(data, dtype=np.uint8, count=length * _LANES).reshape(_LANES, length)
        columns, table = np.ascontiguousarray(lanes.T), _table()
        registers = np.zeros(_LANES, dtype=np.uint32)
        for column in columns:
            registers = table[(registers ^ column) & 0xFF] ^ (registers >> 8)
        a, b, c, d = _after_zeros(length)
        for own in registers.tolist():
            register = (
                a[register & 255]
                ^ b[register >> 8 & 255]
                ^ c[register >> 16 & 255]
                ^ d[register >> 24]
                ^ own
            )
        start = length * _LANES
    return _by_byte(register, memoryview(data)[start:]) ^ _ONES


def masked_crc(data: bytes) -> int:
    """The checksum as TFRecord stores it: rotated right by 15 bits, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & _ONES


def _open(path: Path) -> IO[bytes]:
    try:
        with open(path, "rb") as handle:
            zipped = handle.read(2) == b"\x1f\x8b"
        return gzip.open(path, "rb") if zipped else open(path, "rb")  # type: ignore[return-value]  # closed by the caller
    except OSError as err:
        raise DataError(
            f"expected a TFRecord file, found none to read at {path} ({err.strerror}); check the path"
        ) from err


def read_records(
    path: Path, *, max_record: int = MAX_RECORD, verify: bool = True
) -> Iterator[tuple[int, bytes | RowError]]:
    """(record number from 1, its data) of a TFRecord file, gzip or not.

    A record whose data fails its checksum is a RowError and the next one follows; when a length cannot be trusted, or the
    file ends inside a record, that RowError is the last item. `verify=False` leaves out the checksum of the data only.
    """
    number, size = 0, path.stat().st_size if path.is_file() else 0
    with _open(path) as stream:
        try:
            while head := stream.read(12):
                number += 1
                if unpacks_too_far(stream.tell(), size):
                    yield (
                        number,
                        RowError(
                            "a file that unpacks to what records of pictures may need",
                            f"{stream.tell():,} bytes from {size:,}",
                            "unpack it yourself if it is meant",
                        ),
                    )
                    return
                if len(head) < 12:
                    raise EOFError(f"{len(head)} of the 12 bytes before a record")
                length, check = struct.unpack("<QI", head)
                if masked_crc(head[:8]) != check:
                    yield (
                        number,
                        RowError(
                            "a record length that agrees with its checksum",
                            f"length {length}, checksum {check:#010x}",
                            "the rest of the file cannot be read: copy it again",
                        ),
                    )
                    return
                if length > max_record:
                    yield (
                        number,
                        RowError(
                            f"records of at most {max_record} bytes",
                            f"{length}",
                            "raise the limit if it is meant",
                        ),
                    )
                    return
                data, tail = stream.read(length), stream.read(4)
                if len(data) + len(tail) < length + 4:
                    raise EOFError(f"{len(data)} of {length} bytes of the record")
                if verify and masked_crc(data) != struct.unpack("<I", tail)[0]:
                    yield (
                        number,
                        RowError(
                            "data that agree with their checksum",
                            "other bytes",
                            "copy the file again",
                        ),
                    )
                    continue
                yield number, data
        except (EOFError, OSError, zlib.error) as err:
            yield (
                max(number, 1),
                RowError(
                    "a complete TFRecord file",
                    f"its end, or broken bytes, in record {max(number, 1)} ({err})",
                    "copy the file again",
                ),
            )


def write_records(path: Path, records: Iterable[bytes], *, zipped: bool = True) -> None:
    """Write TFRecords; the gzip stream carries no time, so equal records give equal files."""
    out = bytearray()
    for data in records:
        head = struct.pack("<Q", len(data))
        out += (
            head + struct.pack("<I", masked_crc(head)) + data + struct.pack("<I", masked_crc(data))
        )
    path.write_bytes(gzip.compress(bytes(out), mtime=0) if zipped else bytes(out))


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """(value, position behind it). Raises ValueError."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise ValueError("a number of more than 10 bytes")


def fields(data: memoryview) -> Iterator[tuple[int, int, Any]]:
    """(field number, wire type, value) of a protobuf message: 0 number, 1 and 5 raw bytes, 2 memoryview. Raises ValueError."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, wire, value
            continue
        if wire in (1, 5):
            size = 8 if wire == 1 else 4
        elif wire == 2:
            size, at = _varint(data, at)
        else:
            raise ValueError(f"wire type {wire}, which is no part of this message")
        if size > len(data) - at:
            raise ValueError(f"a field of {size} bytes where {len(data) - at} are left")
        yield tag >> 3, wire, data[at : at + size]
        at += size


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _numbers(value: Any, wire: int, kind: int) -> Iterator[int | float]:
    """Numbers of one field 1 of FloatList (kind 2) or Int64List (kind 3), packed or not."""
    if kind == 2:
        if wire not in (2, 5) or len(value) % 4:
            raise ValueError("floats that are no multiple of 4 bytes")
        yield from struct.unpack(f"<{len(value) // 4}f", value)
    elif wire == 0:
        yield _signed(value)
    elif wire == 2:
        at = 0
        if len(value) > 10 * MAX_NUMBERS:
            raise ValueError(
                f"{len(value):,} bytes of whole numbers, more than {MAX_NUMBERS:,} of them need"
            )
        for _ in range(MAX_NUMBERS):
            if at >= len(value):
                return
            number, at = _varint(value, at)
            yield _signed(number)
        if at < len(value):
            raise ValueError(f"more than {MAX_NUMBERS:,} whole numbers")
    else:
        raise ValueError("whole numbers in an unknown encoding")


def _feature(data: memoryview) -> Feature:
    """The values of a Feature message; [] when none of its lists is set."""
    values: list[Any] = []
    for kind, wire, content in fields(data):
        if kind not in (1, 2, 3) or wire != 2:
            continue  # an unknown field: readers of protobuf skip it
        values = []  # of a oneof, the last one counts
        for number, inner_wire, value in fields(content):
            if number != 1:
                continue
            if kind != 1:
                values.extend(_numbers(value, inner_wire, kind))
            elif inner_wire == 2:
                values.append(bytes(value))
            else:
                raise ValueError("bytes in an unknown encoding")
    return values


def parse_example(data: bytes) -> dict[str, Feature]:
    """{feature name: its values} of a serialized tf.train.Example. Raises ValueError for bytes that are none."""
    found: dict[str, Feature] = {}
    for number, wire, features in fields(memoryview(data)):
        if number != 1 or wire != 2:
            continue
        for inner, inner_wire, entry in fields(features):
            if inner != 1 or inner_wire != 2:
                continue
            pair = {n: v for n, w, v in fields(entry) if w == 2}
            name = bytes(pair.get(1, b"")).decode("utf-8")  # UnicodeDecodeError is a ValueError
            found[name] = _feature(pair[2]) if 2 in pair else []
    return found


def _spell_varint(value: int) -> bytes:
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _block(number: int, data: bytes) -> bytes:
    return _spell_varint(number << 3 | 2) + _spell_varint(len(data)) + data


def encode_example(
    features: Mapping[str, Sequence[bytes] | Sequence[int] | Sequence[float]],
) -> bytes:
    """A serialized tf.train.Example; lists of bytes, of whole numbers or of floats. For fixtures and tests."""
    entries = b""
    for name, values in features.items():
        if all(isinstance(v, bytes) for v in values):
            kind, content = 1, b"".join(_block(1, v) for v in values if isinstance(v, bytes))
        elif all(isinstance(v, int) for v in values):
            kind, content = 3, _block(1, b"".join(_spell_varint(int(v)) for v in values))
        else:
            kind, content = 2, _block(1, struct.pack(f"<{len(values)}f", *values))
        entries += _block(1, _block(1, name.encode()) + _block(2, _block(kind, content)))
    return _block(1, entries)
