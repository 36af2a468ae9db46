"""Files of a run: written whole or not at all, of any text, and with words for a disk that is full or not writable.

    write_text(path, text)                    # atomic
    append(path, [json_line(row), ...])       # all lines or none
    with writing(path): ...                   # an OSError inside becomes a StorageError: what, where, how to fix it
    with optional("the report"): ...          # what a run can do without: said once, and the run goes on

JSON is UTF-8. A lone surrogate, half a character that Python can hold and UTF-8 cannot, would make the whole file unwritable: the
line that has one is written with escapes instead (\\ud800), which every JSON reader turns back into the same text (two halves
that stand side by side into the character they make). What has no JSON at all is left out of its line, which says so: it costs the
row its odd field and nobody else anything.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mmrl.errors import DataError, MMRLError, StorageError

__all__ = [
    "append",
    "check_text",
    "json_line",
    "optional",
    "printable",
    "storage_error",
    "usual_mode",
    "write_text",
    "writing",
]

_said: set[str] = set()
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def printable(text: str) -> str:
    """`text` as UTF-8 can hold it: a lone surrogate becomes its escape, \\ud800."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def check_text(text: str, where: str) -> None:
    """Raise DataError for a text with a lone surrogate, half a character that no tokenizer takes (and TypeError is all it says)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        around = ascii(text[max(0, error.start - 10) : error.end + 10])
        raise DataError(
            f"{where}: expected text, found half a character (a lone surrogate) at position {error.start}: {around}; "
            "fix the row, or write its file again as UTF-8"
        ) from error


def json_line(value: Any, indent: int | None = None) -> str:
    """`value` as JSON that UTF-8 can hold, readable where that is possible. What is not JSON is written as text (str), and what is
    not even that is left out, with a key `left_out` that says why."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str, indent=indent)
    except Exception as error:  # a cycle, a key that is no text, a __str__ that raises
        if not isinstance(value, Mapping):
            return json.dumps({"left_out": _why(error)}, indent=indent)
        kept, lost = {}, {}
        for name, part in value.items():
            try:
                json.dumps({name: part}, default=str)
                kept[name] = part
            except Exception as reason:  # the same, of this field
                lost[repr(name)[:200]] = _why(reason)
        return json_line({**kept, "left_out": lost}, indent)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, default=str, indent=indent)
    return text


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def storage_error(path: str | Path, error: OSError) -> StorageError:
    """`error` of a write to `path` in words: what was found, and the fix."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    found = f"{error.strerror or error}"
    with suppress(OSError):
        found += f", {shutil.disk_usage(place).free / 2**20:,.1f} MiB free"
    fix = (
        "make room on that disk (or raise the quota)"
        if error.errno in _NO_ROOM
        else "mount it writable"
        if error.errno == errno.EROFS
        else "let this user write there"
        if isinstance(error, PermissionError)
        else "fix the disk, or set dir= to another one"
    )
    return StorageError(
        f"cannot write {path}: expected a folder with room that can be written to, found: {found}; {fix}, then "
        "continue with --resume where a run has a checkpoint"
    )


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """An OSError inside is raised as a StorageError about `path`."""
    try:
        yield
    except MMRLError:
        raise
    except OSError as error:
        raise storage_error(path, error) from error


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: it has its old content, or none, until it has the new one. Raises StorageError."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
        except OSError:
            with suppress(OSError):  # half a file takes room that others need
                partial.unlink()
            raise


def usual_mode(path: Path) -> None:
    """Give what was made for its owner alone (by mkdtemp, safetensors) the mode that others get here. Raises OSError."""
    path.chmod((0o777 if path.is_dir() else 0o666) & ~_umask())


def _umask() -> int:
    # os.umask only tells it by setting another one, under which all threads would make their files meanwhile
    with (
        suppress(OSError),
        Path("/proc/self/status").open(encoding="ascii", errors="replace") as file,
    ):
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0)
    os.umask(mask)
    return mask


def append(path: Path, lines: Iterable[str]) -> None:
    """Append lines to a file: all of them or, where there is no room for all, none. Raises StorageError."""
    data = memoryview("".join(line + "\n" for line in lines).encode("utf-8"))
    with writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            before = os.fstat(descriptor).st_size
            try:
                while data:
                    data = data[os.write(descriptor, data) :]
            except OSError:
                os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)


@contextmanager
def optional(what: str) -> Iterator[None]:
    """What a run can do without: where it cannot be written, standard error says so, once for each `what`, and all goes on."""
    try:
        yield
    except OSError as error:
        if what not in _said:
            _said.add(what)
            print(
                f"warning: {what} could not be written: {error.strerror or error}; the run goes on without it (shown once)",
                file=sys.stderr,
                flush=True,
            )
