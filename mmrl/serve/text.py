"""The text of tokens that arrive one by one: only whole characters, cut before the first stop string.

    stream = TextStream(tokenizer, StopTexts(["\n"]))
    piece = stream.add(token)        # text that no later token can change
    piece += stream.finish()

The time is linear in the length of the text, however long the stop strings are and whatever is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["StopTexts", "TextStream", "decode"]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what the bytes of half a character decode to
_MOST_PENDING = 16  # tokens held back for the rest of a character, which needs 4 bytes at most
_OVERLAP = 4  # so many tokens later, the character that a token began is whole


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of token ids as the rollout engine writes it: special tokens stay, spaces are left alone."""
    return tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


class StopTexts:
    """Stop strings prepared for matching (Knuth, Morris and Pratt 1977): `borders[i]` of a text is the length of the longest
    proper prefix of text[:i] that is also its suffix. Made once per request, shared by its choices."""

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self.texts = tuple(texts)
        self.borders = tuple(map(_borders, self.texts))


def _borders(text: str) -> list[int]:
    borders, known = [0, 0], 0
    for char in text[1:]:
        while known and text[known] != char:
            known = borders[known]
        known += text[known] == char
        borders.append(known)
    return borders


class _Matcher:
    """How much of each stop string the text ends with."""

    def __init__(self, stops: StopTexts) -> None:
        self._stops, self._known = stops, [0] * len(stops.texts)

    def find(self, fresh: str) -> int | None:
        """The next characters of the text: where in `fresh` the first stop string begins (below 0: before it), None without."""
        first: int | None = None
        for n, (text, borders) in enumerate(
            zip(self._stops.texts, self._stops.borders, strict=True)
        ):
            known = self._known[n]
            for at, char in enumerate(fresh):
                if known == len(text):
                    known = borders[known]
                while known and text[known] != char:
                    known = borders[known]
                known += text[known] == char
                if known == len(text):
                    start = at + 1 - len(text)
                    first = start if first is None else min(first, start)
                    break  # a later match of the same text does not begin earlier
            self._known[n] = known
        return first

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max(self._known, default=0)


class TextStream:
    """Text so far (`text`, cut before the first of `stops`) and whether one was met (`stopped`). The pieces given out are the
    text, and the text is that of all ids decoded at once."""

    def __init__(self, tokenizer: Any, stops: StopTexts | None = None) -> None:
        self.stopped = False
        self._tokenizer, self._matcher = tokenizer, _Matcher(stops or StopTexts())
        self._parts: list[str] = []  # given out
        self._kept = ""  # not yet: it may be the beginning of a stop string
        self._ids: list[int] = []
        # ids before _done are in the text; those from _context on give them context
        self._context = self._done = 0

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._parts) + self._kept

    def add(self, token: int) -> str:
        """One more token; returns text that is certain by now."""
        self._ids.append(token)
        fresh = self._fresh()
        if not fresh.endswith(_UNFINISHED):
            self._take(fresh, len(self._ids))
        elif len(self._ids) - self._done > _MOST_PENDING:
            self._take_settled()
        return self._give(last=False)

    def finish(self) -> str:
        """No more tokens: the rest of the text, with half a character as the tokenizer shows it."""
        self._take(self._fresh(), len(self._ids))
        return self._give(last=True)

    def _fresh(self) -> str:
        known = decode(self._tokenizer, self._ids[self._context : self._done])
        return decode(self._tokenizer, self._ids[self._context :])[len(known) :]

    def _take_settled(self) -> None:
        """A long row of broken characters, or of U+FFFD itself: what the latest tokens cannot change any more is taken, or
        each token would decode the whole row again."""
        end = len(self._ids) - _OVERLAP
        settled = decode(self._tokenizer, self._ids[self._context : end])
        if decode(self._tokenizer, self._ids[self._context :]).startswith(settled):
            self._take(
                settled[len(decode(self._tokenizer, self._ids[self._context : self._done])) :], end
            )

    def _take(self, fresh: str, end: int) -> None:
        if self.stopped or not fresh:
            return
        self._context, self._done = self._done, end
        found = self._matcher.find(fresh)
        self._kept += fresh
        if found is not None:
            self._kept, self.stopped = self._kept[: len(self._kept) - len(fresh) + found], True

    def _give(self, *, last: bool) -> str:
        held = 0 if last or self.stopped else self._matcher.held
        piece, self._kept = (
            self._kept[: len(self._kept) - held],
            self._kept[len(self._kept) - held :],
        )
        self._parts.append(piece)
        return piece
