"""Data files of strangers: small files that stand for more than memory holds, files that lead elsewhere, bytes that make no sense.
Each is an error with a name, before the work; nothing hangs and nothing outside the data set is read."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmrl.data.bounds import lines_bounded, open_parquet, parquet_rows
from mmrl.errors import DataError, MediaError
from mmrl.robotics.datasets.lerobot import LeRobotDataset
from mmrl.robotics.datasets.libero_hdf5 import LiberoHdf5
from mmrl.tasks.readers import read_any
from mmrl.tasks.readers.subtitles import read_file
from mmrl.tasks.readers.tfrecord import masked_crc, parse_example, read_records
from mmrl.video.decode import probe
from mmrl.video.media import image_size, open_image
from tests.robotics.lerobot_kit import write_set

# JSON


def sparse(path: Path, size: int = 1 << 40) -> Path:
    """A file of `size` zeros that takes no room on disk."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize(
    "name", [pytest.param("data.jsonl", marks=pytest.mark.slow), "data.json", "dataset_info.json"]
)
def test_a_sparse_file_of_a_tebibyte_is_not_read(name: str, tmp_path: Path) -> None:
    sparse(tmp_path / name)
    with pytest.raises(DataError, match=r"at most|found nothing|found '"):
        read_any(tmp_path / name)


def test_a_line_without_an_end_costs_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"id": "1"}\n' + b"x" * 5000)
    with path.open("rb") as file:
        found = list(lines_bounded(file, 1000))
    assert found[0] == (1, b'{"id": "1"}\n') and found[1][0] == 2 and len(found) == 2
    assert isinstance(found[1][1], DataError) and "the file is not read beyond it" in str(
        found[1][1]
    )
    sparse(path)
    readout = read_any(path, "own", task="counting", on_error="record")
    assert len(readout) == 0 and "at most 64 MiB" in readout.rejected[0].reason


@pytest.mark.parametrize(
    "text",
    [
        "[" * 10**6,
        "[" * 10**6 + "]" * 10**6,
        '{"a":' * 10**6,
        "9" * 10**5,
        '{"id": ' + "9" * 10**5 + "}",
    ],
)
def test_brackets_and_digits_without_number(text: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(text + "\n")
    readout = read_any(tmp_path / "data.jsonl", "own", task="counting", on_error="record")
    assert len(readout) == 0 and len(readout.rejected) == 1
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(DataError, match=r"data\.json"):
        read_any(tmp_path / "data.json")


@pytest.mark.parametrize(
    "tree",
    [
        {"images": {}, "annotations": [], "categories": []},
        {"images": [1], "annotations": [2], "categories": [3]},
        {
            "images": [{"id": [1], "file_name": 1}],
            "annotations": [{"image_id": {}, "bbox": "x"}],
            "categories": [{"id": 1.5, "name": []}],
        },
        {
            "images": [{"id": 1, "file_name": "a\0b"}],
            "annotations": [],
            "categories": [{"id": 1, "name": "c"}],
        },
        {
            "images": [
                {"id": 1, "file_name": "../../../../../../etc/passwd", "width": 9, "height": 9}
            ],
            "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1]}],
            "categories": [{"id": 1, "name": "c"}],
        },
        {
            "images": [{"id": 1, "file_name": "x.png", "width": 10**9, "height": 10**9}],
            "categories": [{"id": 1, "name": "c"}],
            "annotations": [
                {
                    "id": i,
                    "image_id": 1,
                    "category_id": 1,
                    "bbox": [float("nan"), 1e308, 1e308, 1e308],
                }
                for i in range(999)
            ],
        },
    ],
)
@pytest.mark.parametrize("kind", ["coco", "lvis", "ovdeval"])
def test_annotations_that_make_no_sense(tree: Any, kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(tree))
    with pytest.raises(DataError, match=r"expected"):
        read_any(tmp_path / "a.json", kind)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_row_that_names_a_pipe_or_a_device_does_not_wait(kind: str, tmp_path: Path) -> None:
    """Opening a pipe that nobody writes to never returns; /dev/zero never ends."""
    path = tmp_path / "pipe" if kind == "pipe" else Path("/dev/zero")
    if kind == "pipe":
        os.mkfifo(path)
    for read in (image_size, open_image, probe):
        with pytest.raises(MediaError, match="pipe or device") as caught:
            read(path)
        assert caught.value.kind == "unsupported"
    with pytest.raises(DataError, match="pipe or device"):
        read_file(path)


# parquet


def bomb(path: Path, kind: str) -> Path:
    n = 3_000_000 if kind == "rows" else 5000
    zeros = pa.array(np.zeros(n, np.int32))
    word = {"rows": "x", "values": "A" * (1 << 20), "list": "A" * (1 << 20)}[kind]
    column: Any = pa.DictionaryArray.from_arrays(zeros, pa.array([word]))
    if kind == "list":
        column = pa.ListArray.from_arrays(pa.array([0, n], pa.int32()), column)
    count = len(column)
    answers = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array(["1"]))
    table = pa.table(
        {
            "problem": column if kind != "list" else ["x"],
            "answer": answers,
            "images": column if kind == "list" else pa.nulls(count, pa.string()),
        }
    )
    pq.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 100_000
    return path


@pytest.mark.parametrize("kind", ["rows", pytest.param("values", marks=pytest.mark.slow), "list"])
def test_a_parquet_bomb_is_refused(kind: str, tmp_path: Path) -> None:
    """Tens of kilobytes that stand for millions of rows, 5 GB of texts, or 5 GB of pictures in one row."""
    path = bomb(tmp_path / "data.parquet", kind)
    with pytest.raises(
        DataError, match=r"expected at most|at most 200 times its size|rows of at most"
    ):
        read_any(path, task="math", on_error="record")


def test_parquet_with_repetitions_is_read_as_pyarrow_reads_it(tmp_path: Path) -> None:
    table = pa.table(
        {
            "problem": ["a", "b", None] * 50,
            "images": [[{"bytes": b"x" * 900, "path": None}], [], None] * 50,
            "number": list(range(150)),
            "kinds": pa.array(["k"] * 150).dictionary_encode(),
            "map": pa.array([[("a", "b")]] * 150, pa.map_(pa.string(), pa.string())),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    assert (
        list(parquet_rows(open_parquet(tmp_path / "x.parquet"), tmp_path / "x.parquet"))
        == table.to_pylist()
    )
    with pytest.raises(DataError, match="rows of at most"):
        list(parquet_rows(open_parquet(tmp_path / "x.parquet"), tmp_path / "x.parquet", limit=500))


def test_bits_of_a_parquet_file(tmp_path: Path) -> None:
    table = pa.table(
        {"problem": ["p"] * 60, "answer": ["1"] * 60, "images": pa.nulls(60, pa.string())}
    )
    pq.write_table(table, tmp_path / "x.parquet")
    data, rng = (tmp_path / "x.parquet").read_bytes(), np.random.default_rng(0)
    for _ in range(60):
        flipped = bytearray(data)
        flipped[int(rng.integers(4, len(data)))] ^= 1 << int(rng.integers(8))
        (tmp_path / "y.parquet").write_bytes(flipped)
        try:
            readout = read_any(tmp_path / "y.parquet", task="math", on_error="record")
        except DataError:
            continue
        assert len(readout) + len(readout.rejected) <= 60


# TFRecord


@pytest.mark.parametrize("length", [1 << 28 | 1, 1 << 40, (1 << 64) - 1])
def test_a_record_of_an_absurd_length_is_not_read(length: int, tmp_path: Path) -> None:
    head = struct.pack("<Q", length)
    (tmp_path / "x").write_bytes(head + struct.pack("<I", masked_crc(head)) + b"x" * 100)
    [(number, error)] = list(read_records(tmp_path / "x"))
    assert number == 1 and "records of at most" in str(error)


def test_an_archive_that_unpacks_without_end_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmrl.data.bounds._FREE", 1 << 20)
    data = bytes(1 << 18)
    head = struct.pack("<Q", len(data))
    one = head + struct.pack("<I", masked_crc(head)) + data + struct.pack("<I", masked_crc(data))
    (tmp_path / "x").write_bytes(gzip.compress(one * 100, 9))
    rows = list(read_records(tmp_path / "x"))
    assert len(rows) < 100 and "unpacks" in str(rows[-1][1])


@pytest.mark.slow
def test_a_feature_of_endless_numbers_is_refused() -> None:
    def field(number: int, data: bytes) -> bytes:
        size, out = len(data), b""
        while size > 127:
            out, size = out + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + out + bytes([size]) + data

    message = field(1, field(1, field(1, b"name") + field(2, field(3, field(1, bytes(6_000_000))))))
    with pytest.raises(ValueError, match="whole numbers"):
        parse_example(message)


# HDF5


def demos(path: Path) -> h5py.File:
    file = h5py.File(path, "w")
    data = file.create_group("data")
    data.attrs["problem_info"] = json.dumps({"language_instruction": "push"})
    demo = data.create_group("demo_0")
    demo.create_dataset("actions", data=np.zeros((4, 7), np.float32))
    demo.create_dataset("dones", data=np.ones(4, np.uint8))
    demo.create_dataset("obs/ee_pos", data=np.zeros((4, 3), np.float32))
    demo.create_dataset("obs/agentview_rgb", data=np.zeros((4, 8, 8, 3), np.uint8))
    return file


def replaced(file: h5py.File, key: str, value: Any = None, **made: Any) -> None:
    del file[key]
    if made:
        file.create_dataset(key, **made)
    else:
        file[key] = value


ACTIONS, PICTURES, DEMO = "data/demo_0/actions", "data/demo_0/obs/agentview_rgb", "data/demo_0"
UNLIMITED = h5py.h5f.UNLIMITED
HDF5 = {
    "external link to a file": lambda f: replaced(
        f, DEMO, h5py.ExternalLink("secret.hdf5", "/data/demo_0")
    ),
    "external link to actions": lambda f: replaced(
        f, ACTIONS, h5py.ExternalLink("secret.hdf5", "/data/demo_0/actions")
    ),
    "external link to data": lambda f: replaced(
        f, "data", h5py.ExternalLink("secret.hdf5", "/data")
    ),
    "soft link": lambda f: replaced(f, ACTIONS, h5py.SoftLink("/data/demo_0/obs/ee_pos")),
    "soft loop": lambda f: replaced(f, "data/demo_0/obs", h5py.SoftLink("/data/demo_0/obs")),
    "/etc/passwd as pictures": lambda f: replaced(
        f, PICTURES, shape=(4, 8, 8, 3), dtype="u1", external=[("/etc/passwd", 0, UNLIMITED)]
    ),
    "/etc/passwd as actions": lambda f: replaced(
        f, ACTIONS, shape=(4, 7), dtype="f4", external=[("/etc/passwd", 0, UNLIMITED)]
    ),
    "224 GiB of actions": lambda f: replaced(
        f, ACTIONS, shape=(1 << 33, 7), dtype="f4", chunks=(1024, 7)
    ),
    "a picture of 3 TiB": lambda f: replaced(
        f, PICTURES, shape=(4, 1 << 20, 1 << 20, 3), dtype="u1", chunks=(1, 64, 64, 3)
    ),
    "16 GiB of dones": lambda f: replaced(
        f, "data/demo_0/dones", shape=(1 << 34,), dtype="u1", chunks=(1024,)
    ),
    "texts for numbers": lambda f: replaced(f, ACTIONS, np.array([[b"a"] * 7] * 4)),
    "a group for numbers": lambda f: replaced(f, ACTIONS, f["data/demo_0/obs"]),
    "numbers for a group": lambda f: replaced(f, "data/demo_0/obs", np.zeros(3)),
    "nothing": lambda f: replaced(f, ACTIONS, h5py.Empty("f4")),
    "nested brackets": lambda f: f["data"].attrs.__setitem__("problem_info", "[" * 30_000),
    "numbers for JSON": lambda f: f["data"].attrs.__setitem__("problem_info", np.arange(3)),
    "a list of numbers for words": lambda f: f["data"].attrs.__setitem__(
        "problem_info", '{"language_instruction": [1]}'
    ),
}


@pytest.mark.parametrize("kind", HDF5)
def test_demonstrations_that_lead_elsewhere_or_have_no_end(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    demos(tmp_path / "secret.hdf5").close()
    with demos(tmp_path / "x_demo.hdf5") as file:
        HDF5[kind](file)
    with pytest.raises(DataError, match="expected"):
        LiberoHdf5(tmp_path / "x_demo.hdf5")[0].pictures("base", [0])


def test_a_virtual_dataset_is_refused(tmp_path: Path) -> None:
    demos(tmp_path / "secret.hdf5").close()
    with demos(tmp_path / "x_demo.hdf5") as file:
        layout = h5py.VirtualLayout(shape=(4, 7), dtype="f4")
        layout[:] = h5py.VirtualSource(str(tmp_path / "secret.hdf5"), ACTIONS, shape=(4, 7))
        del file[ACTIONS]
        file.create_virtual_dataset(ACTIONS, layout)
    with pytest.raises(DataError, match="stored in other files"):
        LiberoHdf5(tmp_path / "x_demo.hdf5")[0]


def test_bits_of_an_hdf5_file_give_demonstrations_or_an_error(tmp_path: Path) -> None:
    demos(tmp_path / "x_demo.hdf5").close()
    assert LiberoHdf5(tmp_path / "x_demo.hdf5")[0].instruction == "push"
    data, rng, refused = (tmp_path / "x_demo.hdf5").read_bytes(), np.random.default_rng(0), 0
    for _ in range(150):
        flipped = bytearray(data)
        for _ in range(3):
            flipped[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        (tmp_path / "y_demo.hdf5").write_bytes(flipped)
        try:
            LiberoHdf5(tmp_path / "y_demo.hdf5")[0].pictures("base", [0])
        except DataError:
            refused += 1
    assert 0 < refused < 150


# LeRobot


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("lerobot") / "set")


LEROBOT = {
    "a path out of the set": {"data_path": "../../../etc/{chunk_index}/{file_index}.parquet"},
    "an absolute path": {"data_path": "/etc/passwd"},
    "a path out by its key": {"video_path": "{video_key}/../../{chunk_index}/{file_index}"},
    "an attribute in a template": {"data_path": "{chunk_index.__class__}/{file_index}"},
    "a number of digits without end": {"data_path": "{chunk_index:09999999999d}/{file_index}"},
    "pictures per second: none": {"fps": 0},
    "NaN": {"fps": float("nan")},
    "infinite": {"fps": float("inf")},
    "huge": {"fps": 10**400},
    "text": {"fps": "9"},
    "features: list": {"features": []},
    "features: texts": {"features": {"action": "x"}},
    "a version of another kind": {"codebase_version": {"v": 3}},
    "a declared shape without end": {"features.action.shape": [10**9, 10**9]},
    "a declared shape of texts": {"features.action.shape": ["3"]},
}


@pytest.mark.parametrize("kind", LEROBOT)
def test_an_info_file_that_lies(kind: str, written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "set")
    file = tmp_path / "set" / "meta" / "info.json"
    info = json.loads(file.read_text())
    for key, value in LEROBOT[kind].items():
        *parents, leaf = key.split(".")
        node = info
        for part in parents:
            node = node[part]
        node[leaf] = value
    file.write_text(json.dumps(info))
    if kind == "a declared shape of texts":  # a shape that is none is not compared
        assert len(LeRobotDataset(tmp_path / "set")[0]) == 7
        return
    with pytest.raises(DataError, match="expected"):
        LeRobotDataset(tmp_path / "set")[0].pictures("base", [0])


@pytest.mark.parametrize(
    "values", [[float("nan")] * 3, [float("inf")] * 3, ["a"] * 3, None, 3, [], [1e308] * 3]
)
def test_statistics_that_are_no_numbers(values: Any, written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "set")
    file = tmp_path / "set" / "meta" / "stats.json"
    stats = json.loads(file.read_text())
    stats["action"]["q01"] = values
    file.write_text(json.dumps(stats))
    # DataError and ConfigError are ValueErrors
    with pytest.raises(ValueError, match=r"expected|finite"):
        LeRobotDataset(tmp_path / "set").action_statistics()
