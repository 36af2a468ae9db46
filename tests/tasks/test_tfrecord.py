"""TFRecords without tensorflow: checksums of the RFC, examples equal to protobuf's own reading, hostile files."""

from __future__ import annotations

import contextlib
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.tasks.readers.common import RowError
from mmrl.tasks.readers.tfrecord import (
    crc32c,
    encode_example,
    masked_crc,
    parse_example,
    read_records,
    write_records,
)
from tests.kits.clock_kit import takes_less


def test_crc32c_of_rfc_3720_and_of_long_data() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA and crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E and crc32c(b"") == 0
    # lanes: must equal one register walking over every byte
    data = random.Random(0).randbytes(100_003)
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    for length in (1, 1023, 32_768, 32_769, 33_000, 65_536, 100_003):
        register = 0xFFFFFFFF
        for byte in data[:length]:
            register = table[(register ^ byte) & 0xFF] ^ (register >> 8)
        assert crc32c(data[:length]) == register ^ 0xFFFFFFFF, length


def test_a_screenshots_checksum_is_fast() -> None:
    data = random.Random(1).randbytes(4_000_000)
    takes_less(8, lambda: crc32c(data))


def _example_class() -> Any:
    """tf.train.Example as protobuf itself builds it from its published definition."""
    protobuf = pytest.importorskip(
        "google.protobuf.message_factory", reason="protobuf is the other reader here"
    )
    from google.protobuf import descriptor_pb2, descriptor_pool  # type: ignore[import-untyped]

    file = descriptor_pb2.FileDescriptorProto(
        name="example_of_mmrl.proto", package="tf_of_mmrl", syntax="proto3"
    )
    kind = descriptor_pb2.FieldDescriptorProto
    for name, number_type in (
        ("BytesList", kind.TYPE_BYTES),
        ("FloatList", kind.TYPE_FLOAT),
        ("Int64List", kind.TYPE_INT64),
    ):
        file.message_type.add(name=name).field.add(
            name="value", number=1, type=number_type, label=kind.LABEL_REPEATED
        )
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("BytesList", "FloatList", "Int64List"), 1):
        feature.field.add(
            name=name.lower(),
            number=number,
            type=kind.TYPE_MESSAGE,
            label=kind.LABEL_OPTIONAL,
            oneof_index=0,
            type_name=f".tf_of_mmrl.{name}",
        )
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kind.TYPE_STRING, label=kind.LABEL_OPTIONAL)
    entry.field.add(
        name="value",
        number=2,
        type=kind.TYPE_MESSAGE,
        label=kind.LABEL_OPTIONAL,
        type_name=".tf_of_mmrl.Feature",
    )
    features.field.add(
        name="feature",
        number=1,
        type=kind.TYPE_MESSAGE,
        label=kind.LABEL_REPEATED,
        type_name=".tf_of_mmrl.Features.FeatureEntry",
    )
    example = file.message_type.add(name="Example")
    example.field.add(
        name="features",
        number=1,
        type=kind.TYPE_MESSAGE,
        label=kind.LABEL_OPTIONAL,
        type_name=".tf_of_mmrl.Features",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return protobuf.GetMessageClass(pool.FindMessageTypeByName("tf_of_mmrl.Example"))


FEATURES = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=6),
    st.one_of(
        st.lists(st.binary(max_size=300), min_size=1, max_size=4),
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
        st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
    ),
    max_size=5,
)


@settings(deadline=None)
@given(FEATURES)
def test_examples_are_read_and_written_as_protobuf_does(features: dict[str, Any]) -> None:
    theirs = _example_class().FromString(encode_example(features))
    found = {
        key: list(getattr(value, value.WhichOneof("kind")).value)
        for key, value in theirs.features.feature.items()
    }
    assert found == features
    assert parse_example(theirs.SerializeToString()) == features
    assert parse_example(encode_example(features)) == features


@pytest.mark.slow
@given(st.binary(max_size=200))
def test_bytes_that_are_no_example_are_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(parse_example(data), dict)


def test_records_survive_the_way_through_a_file(tmp_path: Path) -> None:
    records = [b"", b"a", random.Random(2).randbytes(70_000)]
    for zipped in (True, False):
        write_records(tmp_path / "r", records, zipped=zipped)
        assert list(read_records(tmp_path / "r")) == list(enumerate(records, 1))
        assert (tmp_path / "r").read_bytes()[:2] == (b"\x1f\x8b" if zipped else b"\0\0")


def test_a_file_cut_or_changed_anywhere_gives_whole_records_and_then_an_error(
    tmp_path: Path,
) -> None:
    records = [b"first record", b"second", b"third one"]
    write_records(tmp_path / "whole", records, zipped=False)
    whole = (tmp_path / "whole").read_bytes()
    for end in range(1, len(whole)):
        for data in (whole[:end], whole[:end] + bytes([whole[end] ^ 0x40]) + whole[end + 1 :]):
            (tmp_path / "r").write_bytes(data)
            found = list(read_records(tmp_path / "r"))
            good = [data for _, data in found if isinstance(data, bytes)]
            assert all(data in records for data in good) and len(found) <= 3
            # nothing seems to be missing
            between = len(data) in (len(records[0]) + 16, len(records[0]) + len(records[1]) + 32)
            assert len(good) < 3 and (between or any(isinstance(d, RowError) for _, d in found))
    write_records(tmp_path / "zipped", records)
    data = (tmp_path / "zipped").read_bytes()
    for end in range(2, len(data)):
        (tmp_path / "r").write_bytes(data[:end])
        found = list(read_records(tmp_path / "r"))
        assert isinstance(found[-1][1], RowError) and "complete TFRecord file" in str(found[-1][1])


def test_a_length_is_not_believed_before_its_checksum(tmp_path: Path) -> None:
    head = struct.pack("<Q", 1 << 60)
    (tmp_path / "r").write_bytes(head + b"\0\0\0\0" + b"x" * 20)
    assert "agrees with its checksum" in str(next(read_records(tmp_path / "r"))[1])
    (tmp_path / "r").write_bytes(head + struct.pack("<I", masked_crc(head)) + b"x" * 20)
    assert "records of at most" in str(next(read_records(tmp_path / "r"))[1])
