"""What an answer's client has not taken yet, bounded in size and in age.

    unread = Unread(limits)
    unread.put(event)                     # False from the moment on at which there was too much: whoever writes may stop
    event = await unread.get(0.25)        # None when nothing came for so long; Failed once its client was too slow

The engine writes for all clients at once and waits for none: what one does not take lies here. A client that takes nothing at all
loses its connection (mmrl.serve.guard); one that takes a little now and then would keep that and make this grow.
"""

from __future__ import annotations

import asyncio
import time

from mmrl.serve.decode import Piece
from mmrl.serve.engine import Event, Failed
from mmrl.serve.errors import RequestError
from mmrl.serve.limits import Limits

__all__ = ["Unread"]


class Unread:
    """Events of one request, oldest first. For the event loop's thread."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._events = limits, asyncio.Queue[tuple[float, Event]]()
        self._waiting, self._lost = 0, False

    def put(self, event: Event) -> bool:
        """Take in an event; False when it was dropped, with all that waited: it was more than limits.unread."""
        if self._lost:
            return False
        self._waiting += _weight(event)
        if self._waiting > self._limits.unread:
            self._lost = True
            while not self._events.empty():
                self._events.get_nowait()
            event = Failed(
                _slow(
                    f"found more than {self._limits.unread:,} pieces and log-probs of it that wait",
                    "--max-unread",
                )
            )
        self._events.put_nowait((time.monotonic(), event))
        return not self._lost

    async def get(self, patience_s: float) -> Event | None:
        """The next event, or None when none came within `patience_s`; a Failed in the place of one that has waited too long."""
        try:
            came, event = await asyncio.wait_for(self._events.get(), patience_s)
        except asyncio.TimeoutError:
            return None
        self._waiting -= _weight(event)
        age = time.monotonic() - came
        if age <= self._limits.send_s or isinstance(event, Failed):
            return event
        return Failed(
            _slow(f"found a piece of it that has waited for {age:.0f} s", "--send-timeout")
        )


def _weight(event: Event) -> int:
    """Pieces and log-probs in an event: each holds a text."""
    return (
        1 + sum(1 + len(token.top) for token in event.logprobs) if isinstance(event, Piece) else 1
    )


def _slow(found: str, option: str) -> RequestError:
    return RequestError(
        f"expected a client that takes its answer while it is written, {found}; read it faster, ask for less "
        f"(n, max_tokens, top_logprobs), or start the server with a larger {option}",
        status=408,
        code="timeout",
    )
