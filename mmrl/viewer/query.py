"""Which rows of a table are asked for, and in which order.

wish = Wish.read({"mode": ["greedy"], "reward_max": ["0.2"], "q": ["red square"], "sort": ["reward"]})
matching(table, wish).rows[:50]
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.errors import DataError
from mmrl.viewer.index import NAMED, Table, flat_row

__all__ = ["Found", "Finder", "Wish", "words_of"]

SORTS = ("step", "reward", "headline", "file")
_MOST_WORDS = 500  # characters of a search
_SEARCH_S = 20.0
_BATCH = 512  # rows read at a time
_KEPT = 16


@dataclass(frozen=True)
class Wish:
    """Filters (several values of one: any of them), a text to search for, and an order."""

    named: tuple[tuple[str, tuple[str, ...]], ...] = ()
    step: tuple[float, float] = (-math.inf, math.inf)
    reward: tuple[float, float] = (-math.inf, math.inf)
    parsed: bool | None = None
    contrast: bool | None = None
    unit: int | None = None
    words: str = ""
    sort: str = "step"
    down: bool = True

    @classmethod
    def read(cls, query: Mapping[str, Sequence[str]]) -> Wish:
        """From the parameters of a request. Raises DataError for a value that is none."""
        named = [(n, tuple(dict.fromkeys(query[n]))) for n in NAMED if query.get(n)]
        sort = _one(query, "sort", "step")
        if sort not in SORTS:
            raise DataError(f"expected sort of {', '.join(SORTS)}, found {sort[:80]!r}")
        words = _one(query, "q", "")
        if len(words) > _MOST_WORDS:
            raise DataError(
                f"expected at most {_MOST_WORDS} characters to search for, found {len(words):,}"
            )
        return cls(
            tuple(named),
            (_number(query, "step_min", -math.inf), _number(query, "step_max", math.inf)),
            (_number(query, "reward_min", -math.inf), _number(query, "reward_max", math.inf)),
            _flag(query, "parsed"),
            _flag(query, "contrast"),
            _unit(query),
            words.strip(),
            sort,
            _one(query, "order", "down") != "up",
        )


def _one(query: Mapping[str, Sequence[str]], name: str, otherwise: str) -> str:
    return query[name][-1] if query.get(name) else otherwise


def _number(query: Mapping[str, Sequence[str]], name: str, otherwise: float) -> float:
    text = _one(query, name, "")
    if not text:
        return otherwise
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if found != found:
        raise DataError(f"expected a number for {name}, found {text[:80]!r}; such as {name}=0.5")
    return found


def _unit(query: Mapping[str, Sequence[str]]) -> int | None:
    text = _one(query, "unit", "")
    if text and not (text.isdecimal() and len(text) <= 20):
        raise DataError(f"expected the number of a prompt for unit, found {text[:80]!r}")
    return int(text) if text else None


def _flag(query: Mapping[str, Sequence[str]], name: str) -> bool | None:
    text = _one(query, name, "")
    if text not in ("", "0", "1"):
        raise DataError(f"expected 0 or 1 for {name}, found {text[:80]!r}")
    return None if not text else text == "1"


@dataclass
class Found:
    """Rows in the order asked for; `complete` is False where a search was broken off after its time."""

    rows: array[int] = field(default_factory=lambda: array("I"))
    complete: bool = True


class Finder:
    """Answers wishes about one table, and keeps the last answers: pages of one answer are asked for one after the other."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._kept: OrderedDict[tuple[Any, ...], Found] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, wish: Wish) -> Found:
        """The rows that were read so far and match."""
        table = self.table
        count = len(table)
        key = table.generation, count, wish
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        rows = _matching(table, wish, count)
        found = _search(table, rows, wish.words) if wish.words else Found(rows)
        found.rows = _ordered(table, found.rows, wish)
        with self._lock:
            if table.generation == key[0]:
                self._kept[key] = found
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return found


def _matching(table: Table, wish: Wish, count: int) -> array[int]:
    rows: Sequence[int] = range(count)
    for name, texts in wish.named:
        codes = {c for text in texts if (c := table.texts[name].find(text)) is not None}
        column = table.columns[name]
        rows = [r for r in rows if column[r] in codes]
    for (low, high), numbers in ((wish.step, table.steps), (wish.reward, table.rewards)):
        if low > -math.inf or high < math.inf:
            rows = [r for r in rows if low <= numbers[r] <= high]
    for asked, bit in ((wish.parsed, 1), (wish.contrast, 2)):
        if asked is not None:
            flags = table.flags
            rows = [r for r in rows if bool(flags[r] & bit) is asked]
    if wish.unit is not None:
        units = table.units
        rows = [r for r in rows if units[r] == wish.unit]
    return array("I", rows)


def _ordered(table: Table, rows: array[int], wish: Wish) -> array[int]:
    """Equal ones stay in the order of the files, also when sorted downwards."""
    if wish.sort == "file":
        return array("I", reversed(rows)) if wish.down else rows
    columns: dict[str, Sequence[float]] = {
        "step": table.steps,
        "reward": table.rewards,
        "headline": table.headlines,
    }
    return array("I", sorted(rows, key=columns[wish.sort].__getitem__, reverse=wish.down))


def words_of(row: Mapping[str, Any]) -> str:
    """The texts of a row that are searched: its id, question, every turn, what was not parsed."""
    turns = row.get("turns")
    score = row.get("score")
    parts = [row.get("id"), row.get("question"), row.get("text")]
    parts += turns if isinstance(turns, list) else []
    parts += [score.get("reason")] if isinstance(score, Mapping) else []
    return "\n".join(str(p) for p in parts if p is not None)


def _search(table: Table, rows: array[int], words: str) -> Found:
    """Rows whose texts hold the words, whatever the case of the letters."""
    wanted, ends, out = words.casefold(), time.monotonic() + _SEARCH_S, array("I")
    # a row of plain ASCII whose bytes do not hold the longest plain part cannot match; all others are read to tell
    plain = "".join(
        c if c.isascii() and c.isprintable() and c not in '"\\/' else " " for c in wanted
    )
    sieve = max(plain.split(" "), key=len).encode("ascii")
    for start in range(0, len(rows), _BATCH):
        part = list(rows[start : start + _BATCH])
        for number, line in zip(part, table.lines(part), strict=True):
            if sieve and sieve not in line.lower() and b"\\u" not in line and line.isascii():
                continue
            row = flat_row(line)
            if row is not None and wanted in words_of(row).casefold():
                out.append(number)
        if time.monotonic() > ends:
            return Found(out, complete=False)
    return Found(out)
