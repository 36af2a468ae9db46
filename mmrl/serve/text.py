"""The text of tokens that arrive one by one: only whole characters, cut before the first stop string.

    stream = TextStream(tokenizer, ["\n"])
    piece = stream.add(token)        # text that no later token can change
    piece += stream.finish()
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["TextStream", "decode"]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what the bytes of half a character decode to


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of token ids as the rollout engine writes it: special tokens stay, spaces are left alone."""
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


class TextStream:
    """Text so far (`text`, cut before the first of `stops`) and whether one was met (`stopped`). The pieces given out are the
    text, and the text is that of all ids decoded at once."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.text, self.stopped = "", False
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._ids: list[int] = []
        self._context = self._done = self._given = 0  # ids before _done are in `text`; those from _context on give them context

    def add(self, token: int) -> str:
        """One more token; returns text that is certain by now."""
        self._ids.append(token)
        fresh = self._fresh()
        if not fresh.endswith(_UNFINISHED):
            self._take(fresh)
        return self._give(last=False)

    def finish(self) -> str:
        """No more tokens: the rest of the text, with half a character as the tokenizer shows it."""
        self._take(self._fresh())
        return self._give(last=True)

    def _fresh(self) -> str:
        known = decode(self._tokenizer, self._ids[self._context:self._done])
        return decode(self._tokenizer, self._ids[self._context:])[len(known):]

    def _take(self, fresh: str) -> None:
        if self.stopped or not fresh:
            return
        longest = max(map(len, self._stops), default=0)
        start = max(0, len(self.text) - longest)
        self.text += fresh
        self._context, self._done = self._done, len(self._ids)
        found = [at for at in (self.text.find(stop, start) for stop in self._stops) if at >= 0]
        if found:
            self.text, self.stopped = self.text[:min(found)], True

    def _give(self, *, last: bool) -> str:
        held = 0 if last or self.stopped else max((n for stop in self._stops for n in range(1, len(stop))
                                                   if self.text.endswith(stop[:n])), default=0)
        end = max(self._given, len(self.text) - held)
        piece, self._given = self.text[self._given:end], end
        return piece
