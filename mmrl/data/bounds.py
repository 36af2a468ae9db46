"""Bounds on files that strangers wrote: how much is read before it is known to be sensible.

    text = read_bounded(Path("data.json"))
    for number, line in lines_bounded(Path("data.jsonl")): ...
    for row in parquet_rows(open_parquet("data.parquet"), "data.parquet"): ...

A small file can stand for more than memory holds: parquet repeats one value a billion times in a few bytes, a sparse file has
no bytes at all, a line need not end. Everything here is far beyond what data sets have (COCO's train annotations have 0.5 GB,
a row with pictures some MB) and raises DataError that says so.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mmrl.errors import DataError

__all__ = [
    "MAX_LINE",
    "MAX_ROW",
    "check_regular",
    "check_spelt_out",
    "lines_bounded",
    "open_parquet",
    "parquet_rows",
    "read_bounded",
    "unpacks_too_far",
]

MAX_FILE = 4 << 30  # bytes of a file that is read as a whole
MAX_LINE = 64 << 20  # of one line of JSON Lines
MAX_ROW = 1 << 30  # of one row of parquet, spelt out
FREE_ROWS = 1_000_000  # of a parquet file; more need a byte each in the file
# an archive may unpack to so many times its size, or to so many bytes
_MAX_RATIO, _FREE = 200, 256 << 20


def check_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """The facts of an ordinary file. Raises OSError where there is none, DataError for a pipe, a device or a folder: opening some
    of them waits for ever, reading others does not end."""
    facts = os.stat(path)
    if not stat.S_ISREG(facts.st_mode):
        raise DataError(
            f"expected an ordinary file, found a folder, pipe or device: {os.fspath(path)}; give the file itself"
        )
    return facts


def read_bounded(path: str | os.PathLike[str], limit: int = MAX_FILE) -> bytes:
    """The bytes of an ordinary file of at most `limit` bytes. Raises OSError, DataError."""
    facts = check_regular(path)
    if facts.st_size > limit:
        raise DataError(
            f"expected a file of at most {limit / 2**20:,.0f} MiB to read as a whole, found "
            f"{facts.st_size / 2**20:,.0f} MiB: {os.fspath(path)}; split it, or use JSON Lines or parquet"
        )
    return Path(path).read_bytes()


def lines_bounded(
    handle: IO[bytes], limit: int = MAX_LINE
) -> Iterator[tuple[int, bytes | DataError]]:
    """(number from 1, line) of an open file. A line beyond `limit` bytes is a DataError and the last item: what stands behind it
    would have to be read to be found."""
    number = 0
    while line := handle.readline(limit + 1):
        number += 1
        if len(line) > limit:
            yield (
                number,
                DataError(
                    f"expected lines of at most {limit >> 20} MiB, found a longer one, {line[:60]!r}...; the file "
                    "is not read beyond it: break it into lines, one JSON object each"
                ),
            )
            return
        yield number, line


def unpacks_too_far(produced: int, size: int) -> bool:
    """Whether an archive of `size` bytes has given more than pictures, texts and numbers ever do (200 times, beyond 256 MiB)."""
    return produced > max(_FREE, _MAX_RATIO * size)


def open_parquet(path: str | os.PathLike[str]) -> Any:
    """A pyarrow ParquetFile in which texts and bytes that repeat are held once. Raises DataError for more rows than bytes, and
    what pyarrow and the file system raise."""
    import pyarrow.parquet as pq

    size = check_regular(path).st_size
    # not its row_group(i).column(j): of a damaged file they abort the process (pyarrow 26)
    facts = pq.read_metadata(path)
    most = max(FREE_ROWS, size)
    if facts.num_rows > most:
        raise DataError(
            f"{os.fspath(path)}: expected at most {most:,} rows, found {facts.num_rows:,} in {size:,} bytes; split the "
            "file"
        )
    columns = [facts.schema.column(i) for i in range(facts.num_columns)]
    return pq.ParquetFile(
        path, read_dictionary=[c.path for c in columns if c.physical_type == "BYTE_ARRAY"]
    )


def _spelt_out(array: Any) -> int:
    """Bytes of an arrow array when every value stands for itself."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_dictionary(kind):
        if not len(array.dictionary) or pa.types.is_nested(kind.value_type):
            return 0
        lengths = (
            pc.binary_length(array.dictionary)
            if _is_bytes(kind.value_type)
            else pa.array([8] * len(array.dictionary))
        )
        return int(pc.sum(pc.cast(lengths.take(array.indices), pa.int64())).as_py() or 0) + 8 * len(
            array
        )
    if _is_bytes(kind):
        return int(pc.sum(pc.cast(pc.binary_length(array), pa.int64())).as_py() or 0) + 8 * len(
            array
        )
    if pa.types.is_struct(kind):
        return sum(_spelt_out(part) for part in array.flatten())
    if pa.types.is_map(kind):
        return 8 * len(array) + _spelt_out(array.keys) + _spelt_out(array.items)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return 8 * len(array) + _spelt_out(array.flatten())
    return 8 * len(array)


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    return any(
        is_kind(kind)
        for is_kind in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_fixed_size_binary,
        )
    )


def check_spelt_out(table: Any, path: object, limit: int = MAX_ROW) -> Any:
    """`table`, an arrow table that is about to become Python values. Raises DataError where they would need more than `limit`."""
    size = sum(_spelt_out(part) for column in table.columns for part in column.chunks)
    if size > limit:
        raise DataError(
            f"{path}: expected columns of at most {limit >> 20:,} MiB, found {size >> 20:,} MiB; is the file damaged?"
        )
    return table


def parquet_rows(
    file: Any, path: str | os.PathLike[str], limit: int = MAX_ROW
) -> Iterator[dict[str, Any]]:
    """The rows of `open_parquet(path)` as dictionaries, batch by batch. Raises DataError for a row of more than `limit` bytes, and
    where a small file turns out to hold far more than its size."""
    size, produced = os.path.getsize(path), 0
    for batch in file.iter_batches(batch_size=64):
        produced += sum(_spelt_out(column) for column in batch.columns)
        if unpacks_too_far(produced, size):
            raise DataError(
                f"{os.fspath(path)}: expected a file that holds at most {_MAX_RATIO} times its size, found "
                f"{produced:,} bytes in {size:,}; write it anew with fewer repetitions if it is meant"
            )
        yield from _python_rows(batch, path, limit)


def _python_rows(batch: Any, path: object, limit: int) -> Iterator[dict[str, Any]]:
    """The rows of an arrow RecordBatch, spelt out in parts of at most `limit` bytes."""
    if sum(_spelt_out(column) for column in batch.columns) <= limit:
        yield from batch.to_pylist()
    elif batch.num_rows == 1:
        raise DataError(
            f"{path}: expected rows of at most {limit >> 20:,} MiB, found a larger one; split what it holds over "
            "several rows"
        )
    else:
        half = batch.num_rows // 2
        yield from _python_rows(batch.slice(0, half), path, limit)
        yield from _python_rows(batch.slice(half), path, limit)
