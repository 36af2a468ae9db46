"""Subtitles as text in a question: SRT files (Video-MME) and LongVideoBench's JSON -> lines with seconds.

    [12.5-15] and then the bell rings

Times are seconds from the beginning of the shown part, as in every prompt. The official inputs differ: Video-MME shows the
lines that cover a sampled frame, LongVideoBench puts every line between the frames it belongs to.

    python -c "from mmrl.tasks.readers.subtitles import read_srt; print(read_srt('1\\n00:00:01,500 --> 00:00:02,000\\nhello\\n'))"
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmrl.data.bounds import read_bounded
from mmrl.tasks.readers.common import RowError

__all__ = ["Line", "read_json_lines", "read_srt", "shown_lines", "subtitle_text", "with_subtitles"]

_TIME = re.compile(r"(?:([0-9]{1,3}):)?([0-9]{1,2}):([0-9]{1,2}(?:[.,][0-9]{1,9})?)")
_TAG = re.compile(r"</?[A-Za-z][^<>]{0,200}>")
_ARROW = "-->"
_MAX_BYTES = 64 << 20


class Line(NamedTuple):
    """One subtitle: seconds and words. `end` is None where the file does not tell."""

    start: float
    end: float | None
    text: str


def _seconds(text: Any) -> float:
    """'00:01:02,500' or '1:02.5' -> 62.5. Raises RowError."""
    found = _TIME.fullmatch(text.strip()) if isinstance(text, str) else None
    if not found:
        raise RowError(
            "a time such as 00:01:02,500",
            repr(text)[:40],
            "correct the subtitle file, or set reader.subtitles=false",
        )
    return int(found[1] or 0) * 3600 + int(found[2]) * 60 + float(found[3].replace(",", "."))


def _words(text: Any) -> str:
    """The words without tags and line ends. Raises RowError."""
    if not isinstance(text, str):
        raise RowError(
            "the text of a subtitle",
            repr(text)[:40],
            "correct the subtitle file, or set reader.subtitles=false",
        )
    return " ".join(_TAG.sub("", text).split())


def read_srt(text: str) -> list[Line]:
    """Lines of an SRT file in its order; blocks without words are left out. Raises RowError for a broken time line."""
    lines: list[Line] = []
    block: list[str] = []
    times: tuple[float, float] | None = None

    def close(words: list[str]) -> None:
        if times is not None and (said := _words(" ".join(words))):
            lines.append(Line(times[0], times[1], said))

    for raw in text.removeprefix("\ufeff").splitlines():
        if _ARROW not in raw:
            block.append(raw.strip())
            continue
        close(block[:-1] if block and block[-1].isdigit() else block)
        start, _, end = raw.partition(_ARROW)
        times, block = (_seconds(start), _seconds(end.strip().split(" ")[0])), []
    close(block)
    return lines


def read_json_lines(value: Any) -> list[Line]:
    """Lines of a LongVideoBench subtitle file: [{"start": "00:00:01.0", "end": ..., "line": ...}] or
    [{"timestamp": [1.0, 2.5 or null], "text": ...}]. Raises RowError."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RowError(
            "a list of subtitles",
            repr(value)[:60],
            "correct the subtitle file, or set reader.subtitles=false",
        )
    lines = []
    for item in value:
        if "timestamp" in item:
            times = item["timestamp"]
            if (
                not isinstance(times, list)
                or len(times) != 2
                or not all(
                    t is None or (type(t) in (int, float) and math.isfinite(t)) for t in times
                )
                or times[0] is None
            ):
                raise RowError(
                    "'timestamp' of a subtitle as [start, end]",
                    repr(times)[:40],
                    "correct the subtitle file, or set reader.subtitles=false",
                )
            start, end, words = (
                float(times[0]),
                None if times[1] is None else float(times[1]),
                item.get("text"),
            )
        else:
            start, end, words = (
                _seconds(item.get("start")),
                _seconds(item.get("end")),
                item.get("line"),
            )
        if said := _words(words):
            lines.append(Line(start, end, said))
    return lines


def shown_lines(lines: Sequence[Line], duration: float, offset: float = 0.0) -> list[Line]:
    """The lines that are heard in a part of `duration` seconds that begins at `offset` of the lines' clock, on its own clock.

    A line without an end lasts to the end of the part; a line repeated at once is kept once.
    """
    kept: list[Line] = []
    for line in lines:
        start, end = (
            max(0.0, line.start - offset),
            duration if line.end is None else min(duration, line.end - offset),
        )
        if start < end and not (
            kept and kept[-1].text == line.text and start <= (kept[-1].end or 0.0)
        ):
            kept.append(Line(start, end, line.text))
    return kept


def subtitle_text(lines: Sequence[Line]) -> str:
    """One line of text per subtitle, `[12.5-15] words`; '' for none."""
    return "\n".join(
        f"[{line.start:.6g}-{(line.end or line.start):.6g}] {line.text}" for line in lines
    )


def with_subtitles(question: str, lines: Sequence[Line]) -> str:
    """The question behind the subtitles; without lines it says so, as the official prompt of Video-MME does."""
    listed = subtitle_text(lines) or "No subtitles available."
    return f"This video's subtitles, in seconds from its beginning:\n{listed}\n\n{question}"


def read_file(path: str | Path) -> list[Line]:
    """Lines of a .srt or .json file. Raises RowError for one that cannot be read."""
    try:
        text = read_bounded(path, _MAX_BYTES).decode("utf-8-sig")
        value = json.loads(text) if str(path).endswith(".json") else None
    except (OSError, ValueError, RecursionError) as err:
        raise RowError(
            f"subtitles in {path}",
            f"{type(err).__name__}: {err}"[:80],
            "check the download, or set reader.subtitles=false",
        ) from err
    return read_json_lines(value) if value is not None else read_srt(text)
