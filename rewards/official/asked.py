"""What an extractor is told of the question, and what it gives back."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Asked", "Extractor", "Found", "NOTHING"]


class Asked(NamedTuple):
    """`task` that reads the answer, its `truth` (of a choice the letter as shown), texts of the `options` as shown and their
    `number`, the row's `params`; `extent`, width and height of the frame in which coordinates were asked for."""

    task: str
    truth: Any
    options: Sequence[str] = ()
    number: int = 0
    params: Mapping[str, Any] = {}
    extent: tuple[float, float] | None = None

    @property
    def letters(self) -> str:
        """The letters of the options, 'ABCD'; all 26 where nobody knows how many there are."""
        return string.ascii_uppercase[: self.number or len(self.options) or 26]


class Found(NamedTuple):
    """The `text` in the spelling that the task's strict parser reads, '' for nothing; `right`, where the benchmark compares by a
    rule of its own, is its verdict."""

    text: str
    right: bool | None = None


Extractor = Callable[[str, Asked], Found]
NOTHING = Found("")
