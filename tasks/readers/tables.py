"""Files -> rows, and the small things every format has: ids, pictures, questions with <image> placeholders.

JSON lists, JSON Lines and parquet give the same pairs (row number from 1, row). A broken row is yielded as its RowError,
an unreadable file raises DataError. UTF-8 with or without a byte order mark is read; other encodings are named by the
reader's `encoding` option (LISA's JSON is cp1252), never guessed.

    python -c "from pathlib import Path; from mmrl.tasks.readers.tables import rows_of; print(next(rows_of(Path('a.json'))))"
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.data import bounds
from mmrl.data.json_lines import RowError, json_lines
from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.tasks.readers.common import Readout, Rejected, resolve_image, text_of
from mmrl.video.media import store_bytes

__all__ = [
    "LEADING",
    "data_files",
    "json_rows",
    "media_folder",
    "parquet_rows",
    "picture",
    "question_of",
    "read_files",
    "read_json",
    "refuse_saved_to_disk",
    "row_id",
    "rows_of",
    "size_params",
    "words_of",
]

LEADING = re.compile(r"(?:\s*<image>)+\s*")
"""Placeholders at the start of a question: they stand where the pictures do."""


def read_json(path: Path, encoding: str = "utf-8") -> Any:
    """The JSON value of a whole file. Raises DataError when it cannot be read, ConfigError for an unknown encoding."""
    try:
        name = codecs.lookup(encoding).name
    except (LookupError, TypeError, ValueError) as err:
        raise ConfigError(
            f"unknown encoding {encoding!r}; expected a name such as utf-8 or cp1252"
        ) from err
    try:
        text = bounds.read_bounded(path).decode("utf-8-sig" if name == "utf-8" else name)
        return json.loads(text)
    except OSError as err:
        raise DataError(
            f"expected a data file, found none to read at {path} ({err.strerror}); check the path"
        ) from err
    except UnicodeDecodeError as err:
        raise DataError(
            f"{path}: expected text in {name}, found byte 0x{err.object[err.start]:02x} at position {err.start}; "
            "name the file's encoding, for example reader.encoding=cp1252 (LISA's files)"
        ) from err
    except DataError:
        raise
    except (ValueError, RecursionError) as err:
        raise DataError(
            f"{path}: expected JSON, found {err}; is it JSON Lines? then name it .jsonl"
        ) from err


def json_rows(path: Path, encoding: str = "utf-8") -> Iterator[tuple[int, Any]]:
    """(row number from 1, row) of a JSON list or a JSON Lines file. Raises DataError when it cannot be read at all."""
    if path.suffix != ".json":
        yield from json_lines(path)
        return
    rows = read_json(path, encoding)
    if not isinstance(rows, list):
        raise DataError(
            f"{path}: expected a list of rows, found {type(rows).__name__}; give the file with the rows"
        )
    for number, row in enumerate(rows, 1):
        if isinstance(row, dict):
            yield number, row
        else:
            yield (
                number,
                RowError("a JSON object", f"{type(row).__name__} {row!r:.60}", "wrap it in {...}"),
            )


def parquet_rows(
    path: Path, needed: Sequence[str] = (), fix: str = "is it another format?"
) -> Iterator[tuple[int, Any]]:
    """(row number from 1, row) of one parquet file, read batch by batch. Raises DataError for a missing column."""
    import pyarrow as pa

    try:
        table = bounds.open_parquet(path)
        names = table.schema_arrow.names
        for key in needed:
            if key not in names:
                raise DataError(
                    f"{path}: expected a column '{key}', found {', '.join(names)}; {fix}.{did_you_mean(key, names)}"
                )
        yield from enumerate(bounds.parquet_rows(table, path), 1)
    except (pa.ArrowException, OSError, MemoryError, OverflowError) as err:
        raise DataError(
            f"{path}: expected a readable parquet file, found {err}; copy it again"
        ) from err


def rows_of(
    path: Path,
    needed: Sequence[str] = (),
    fix: str = "is it another format?",
    encoding: str = "utf-8",
) -> Iterator[tuple[int, Any]]:
    """Rows of a .parquet, .json or JSON Lines file; `needed` are columns a parquet file must have."""
    return (
        parquet_rows(path, needed, fix) if path.suffix == ".parquet" else json_rows(path, encoding)
    )


def refuse_saved_to_disk(folder: Path) -> None:
    """Raises DataError for what `datasets.Dataset.save_to_disk` wrote: a cache of one version of datasets, no format for rows."""
    if (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and any(folder.glob("*.arrow"))
    ):
        raise DataError(
            f"expected a file of rows, found a data set that datasets.save_to_disk wrote in {folder}; write it with "
            "load_from_disk(...).to_parquet('rows.parquet'), or give load_from_disk(...) to mmrl.Trainer as data"
        )


def data_files(path: Path, *patterns: str) -> list[Path]:
    """`path` itself when it is a file, else the files of the folder that fit the first pattern with any. Raises DataError."""
    if not path.is_dir():
        return [path]
    refuse_saved_to_disk(path)
    for pattern in patterns:
        found = sorted(file for file in path.glob(pattern) if file.is_file())
        if found:
            return found
    raise DataError(
        f"expected {' or '.join(patterns)} in {path}, found none; give the data file itself"
    )


def read_files(
    files: Iterable[Path], read_one: Callable[[Path], Readout], on_error: str = "raise"
) -> Readout:
    """Readouts of several files as one, in their order; an id that an earlier file has is an error of the later row."""
    total, first_file = Readout(), dict[str, Path]()
    for file in files:
        part = read_one(file)
        total.rejected += part.rejected
        total.skipped.update(part.skipped)
        total.notes.update(part.notes)
        for sample, row, name in zip(part.samples, part.rows, part.files, strict=True):
            if sample.id in first_file and first_file[sample.id] != file:
                rejected = Rejected(
                    name,
                    row,
                    f"expected unique ids, found id {sample.id!r} again, first in "
                    f"{first_file[sample.id]}; rename or remove one of the rows",
                )
                if on_error == "raise":
                    raise DataError(str(rejected))
                total.rejected.append(rejected)
                continue
            first_file[sample.id] = file
            total.samples.append(sample)
            total.rows.append(row)
            total.files.append(name)
    return total


def row_id(value: Any, default: str) -> str:
    """An id as text: text or a whole number of the file, `default` where it has none (None, ''). Raises RowError."""
    if value is None or value == "":
        return default
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value)
    raise RowError("an id that is text or a whole number", repr(value)[:60], "correct the id")


def media_folder(file: Path, media_dir: str | None) -> Path:
    """Where embedded pictures are written: `media_dir`, else '<file>.media' beside the file."""
    return Path(media_dir) if media_dir else file.with_name(file.name + ".media")


def picture(value: Any, root: Path, media: Path) -> str:
    """Path of a picture given as path, bytes or {"bytes", "path"}; embedded ones are written once to `media`."""
    if isinstance(value, Mapping):
        data = value.get("bytes")
        if data:
            if not isinstance(data, bytes):
                raise RowError(
                    "the bytes of a picture",
                    f"{type(data).__name__} {data!r:.40}",
                    "store encoded picture bytes",
                )
            return store_bytes(data, media)
        return resolve_image(value.get("path"), root)
    if isinstance(value, bytes):
        return store_bytes(value, media)
    return resolve_image(value, root)


def question_of(text: Any, num_images: int, name: str, *, exact: bool = True) -> str:
    """`text` without its <image> placeholders, whose number must be `num_images` (or, not `exact`, zero).

    Pictures stand before the text in a prompt, so placeholders at its start vanish; one inside the text becomes
    "(image 2)" when there are several pictures. Raises RowError.
    """
    words = text_of(text, name)
    found = words.count("<image>")
    if found != num_images and (exact or found):
        raise RowError(
            f"{num_images} <image> placeholders, one per picture",
            f"{found} placeholders and {num_images} pictures",
            f"add or remove <image> in '{name}'" + ("" if exact else ", one per picture or none"),
        )
    lead = LEADING.match(words)
    number = lead.group().count("<image>") if lead else 0
    parts = (words[lead.end() :] if lead else words).split("<image>")
    joined = parts[0]
    for part in parts[1:]:
        number += 1
        space = " " if part[:1].isalnum() else ""
        joined += (f"(image {number}){space}" if num_images > 1 else " ") + part
    return text_of(joined, name)


def words_of(content: Any) -> Any:
    """A message's content as text: its texts where it is a list of parts; anything else as it is."""
    if (
        isinstance(content, list)
        and content
        and all(isinstance(part, Mapping) and "type" in part for part in content)
    ):
        return "\n".join(
            part["text"]
            for part in content
            if part["type"] == "text" and isinstance(part.get("text"), str)
        )
    return content


def size_params(sizes: Sequence[tuple[int, int]], index: int = 0) -> dict[str, Any]:
    """{"width", "height"} of picture `index`, {} without pictures."""
    return {"width": sizes[index][0], "height": sizes[index][1]} if sizes else {}
