"""Rows that a script holds in memory, as a data file: JSON Lines of mmrl's own form, pictures beside them.

    path = stored([{"image": picture, "question": "How many?", "answer": 3}], Path("runs"), "train")
    # runs/.data/1f0c.../train.jsonl

The folder is named by what the rows say and show, so that the same rows are the same file, in a resumed run as in another process.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from mmrl.errors import DataError, StorageError
from mmrl.files import usual_mode, writing
from mmrl.types import Sample

__all__ = ["Rows", "stored"]

Rows = str | Path | Iterable[Mapping[str, Any]] | Iterable[Sample]
"""A path, or rows: mappings, samples, a datasets.Dataset."""
_KEYS = (
    "id",
    "task",
    "question",
    "answer",
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
    "frame",
    "source",
    "params",
)
_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
"""Kinds of pixels that a PNG holds."""


def stored(data: Rows, folder: Path, name: str = "data") -> str | Path:
    """The path of `data`: itself where it is one, else of the file NAME.jsonl that the rows are written to, below `folder`/.data.
    `name` is also the rows' source, unless they name one.

    Raises DataError naming the row for what cannot be written: no question, an answer that is not JSON, a picture of no known kind.
    """
    if isinstance(data, (str, Path)):
        return data
    if isinstance(data, Mapping):
        raise DataError(
            f"expected rows or a path as data, found one mapping with the keys {', '.join(map(str, data))}; "
            "give a list"
        )
    home = folder / ".data"
    with writing(home):
        home.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=home))
    try:
        text = "\n".join(_lines(data, partial)) + "\n"
        # pictures are named by their content
        digest = xxhash.xxh3_128(f"{name}\n{text}".encode("utf-8", "surrogatepass"))
        file = home / digest.hexdigest() / f"{name}.jsonl"
        if not file.exists():
            with writing(file):
                (partial / file.name).write_text(text, encoding="utf-8", errors="surrogatepass")
                _put(partial, file)
        return file
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _lines(data: Iterable[Any], folder: Path) -> list[str]:
    """The rows as JSON, their pictures in memory written to `folder` one by one. Raises DataError and StorageError."""
    lines = []
    for number, row in enumerate(data):
        try:
            lines.append(
                json.dumps(
                    _row(row, number, folder), ensure_ascii=False, allow_nan=False, default=_plain
                )
            )
        except StorageError:
            raise
        except (OSError, TypeError, ValueError) as error:  # OSError: bytes that are no picture
            raise DataError(
                f"row {number}: expected a question, an answer and params that JSON holds, and pictures as paths, PIL "
                f"images, arrays or bytes, found {error}"
            ) from error
    if not lines:
        raise DataError("expected at least one row of data, found none")
    return lines


def _row(row: Any, number: int, folder: Path) -> dict[str, Any]:
    """A row as mmrl's own reader takes it; its pictures in memory are written to `folder`."""
    if isinstance(row, Sample):
        known = dataclasses.asdict(row)
        known["params"] = {k: v for k, v in known["params"].items() if k not in ("width", "height")}
        row = {
            k: list(v) if isinstance(v, tuple) else v
            for k, v in known.items()
            if v not in ((), [], "")
        }
    if not isinstance(row, Mapping):
        raise TypeError(f"a row of type {type(row).__name__}")
    found = {key: row[key] for key in _KEYS if key in row and row[key] is not None}
    found.setdefault("id", str(number))
    found["answer"] = row.get("answer")
    extra = {str(key): value for key, value in row.items() if key not in _KEYS}
    for key in extra:
        if close := difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.79):
            raise ValueError(
                f"the key '{key}', which is nearly '{close[0]}'; write that, or put it into 'params'"
            )
    if extra:
        found["params"] = {**extra, **found.get("params", {})}
    for key in ("image", "images"):
        if key in found:
            several = isinstance(found[key], Sequence) and not isinstance(found[key], (str, bytes))
            found[key] = (
                [_picture(one, folder) for one in found[key]]
                if several
                else _picture(found[key], folder)
            )
    for key in ("audio", "audios"):
        if key in found:
            several = isinstance(found[key], Sequence) and not isinstance(found[key], (str, bytes))
            found[key] = [_sound(one) for one in found[key]] if several else _sound(found[key])
    for key in ("video", "videos"):
        if key in found:
            several = not isinstance(found[key], (str, os.PathLike))
            found[key] = (
                [_absolute(one) for one in found[key]] if several else _absolute(found[key])
            )
    return found


def _plain(value: Any) -> Any:
    """numpy's and torch's numbers and arrays as JSON has them. Raises TypeError."""
    if hasattr(value, "tolist") and not hasattr(value, "mode"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}, which JSON does not hold")


def _absolute(path: Any) -> str:
    if isinstance(path, str) and (path.startswith("data:") or "://" in path):
        raise ValueError(f"'{path:.60}', which is no path; download it first")
    return str(Path(os.fspath(path)).expanduser().absolute())


def _sound(sound: Any) -> str:
    """The path of a sound, also of datasets' {"path", "array", "sampling_rate"}. Raises TypeError and ValueError."""
    path = sound.get("path") if isinstance(sound, Mapping) else sound
    if isinstance(sound, Mapping) and not (path and os.path.isfile(path)):
        raise ValueError(
            f"a sound in memory, with the keys {', '.join(map(str, sound))} and no file at 'path'; write it to a file and give "
            "its path"
        )
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"a sound of type {type(path).__name__}; write it to a file and give its path"
        )
    return _absolute(path)


def _picture(picture: Any, folder: Path) -> str:
    """The path of a picture; one in memory is written to `folder` under the name returned. Raises TypeError and ValueError."""
    from PIL import Image

    if isinstance(picture, (str, os.PathLike)):
        return _absolute(picture)
    # datasets' undecoded pictures
    if isinstance(picture, Mapping) and set(picture) <= {"bytes", "path"}:
        if picture.get("bytes") is None:
            return _absolute(picture["path"])
        picture = picture["bytes"]
    if isinstance(picture, bytes):
        with Image.open(io.BytesIO(picture)) as opened:
            content, suffix = picture, (opened.format or "png").lower()
    else:
        if not isinstance(picture, Image.Image):
            if not hasattr(picture, "__array_interface__"):
                raise TypeError(f"a picture of type {type(picture).__name__}")
            picture = Image.fromarray(picture)
        exif = picture.getexif()  # an orientation tag means the same as in a file
        if picture.mode not in _MODES:
            picture = picture.convert("RGB")
        buffer = io.BytesIO()
        picture.save(buffer, format="PNG", **({"exif": exif} if exif else {}))
        content, suffix = buffer.getvalue(), "png"
    name = f"{xxhash.xxh3_128_hexdigest(content)}.{suffix}"
    with writing(folder / name):
        (folder / name).write_bytes(content)
    return name


def _put(partial: Path, file: Path) -> None:
    """Give a finished folder its name, whole or not at all, also where several processes do so at once."""
    usual_mode(partial)
    try:
        os.rename(partial, file.parent)
    except OSError:
        if not file.exists():
            raise
