"""JSON Lines that a person wrote: one object per line, every key once, bounded, and what is wrong with a line in words.

    for number, row in json_lines(Path("data.jsonl")): ...      # a line that cannot be used comes as its RowError
    for number, row in json_rows(Path("data.jsonl")): ...       # ... is raised, with file and line

Lines end with a newline alone: str.splitlines would cut a text with U+2028 or another of Unicode's separators in two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmrl.data.bounds import lines_bounded
from mmrl.errors import DataError

__all__ = ["RowError", "TwiceError", "json_lines", "json_rows", "keys_once"]


_NO_LIST = "write one object per line, without [ ] around them"


class RowError(DataError):
    """One row cannot be used; whoever reads the file adds its name and the row's number."""

    def __init__(self, expected: str, found: str, fix: str) -> None:
        super().__init__(f"expected {expected}, found {found}; {fix}")


class TwiceError(ValueError):
    """A key that one JSON object has twice: json.loads would keep the last value and say nothing."""


def keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads (object_pairs_hook). Raises TwiceError."""
    table = dict(pairs)
    if len(table) < len(pairs):
        seen = set[str]()
        raise TwiceError(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return table


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number from 1, object) of a JSON Lines file; a broken line yields its RowError. Blank lines skipped.

    Raises DataError when the file cannot be opened.
    """
    try:
        handle = open(path, "rb")  # noqa: SIM115 - closed below; bytes, so that a bad byte spoils one line only
    except OSError as err:
        raise DataError(
            f"expected a data file, found none to read at {path} ({err.strerror}); check the path"
        ) from err
    with handle:
        for number, line in lines_bounded(handle):
            if isinstance(line, DataError):
                yield number, line
                return
            if not line.strip():
                continue
            try:
                row = json.loads(
                    line.decode("utf-8-sig" if number == 1 else "utf-8"),
                    object_pairs_hook=keys_once,
                )
            except TwiceError as err:
                yield (
                    number,
                    RowError(
                        "every key once",
                        f"{err.args[0]!r:.60} twice in one object",
                        "keep the one that is meant",
                    ),
                )
                continue
            except (ValueError, RecursionError) as err:
                shown = line[:60].decode("utf-8", "backslashreplace")
                yield (
                    number,
                    RowError(
                        "one JSON object per line",
                        f"{shown!r} ({err})",
                        _NO_LIST
                        if shown.lstrip("\ufeff \t").startswith("[")
                        else "fix or remove the line",
                    ),
                )
                continue
            if not isinstance(row, dict):
                yield (
                    number,
                    RowError(
                        "a JSON object",
                        f"{type(row).__name__} {row!r:.60}",
                        _NO_LIST if isinstance(row, list) else "wrap it in {...}",
                    ),
                )
                continue
            yield number, row


def json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of a JSON Lines file. Blank lines skipped. Raises DataError for the first broken line, with
    file and line."""
    for number, row in json_lines(path):
        if isinstance(row, DataError):
            raise DataError(f"{path}:{number}: {row}") from row
        yield number, row
