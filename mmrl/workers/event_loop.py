"""An event loop beside the thread that asks, which may have one of its own (a notebook's)."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

__all__ = ["run_here"]

_LOOP = threading.Lock()


@functools.lru_cache(maxsize=1)
def _background() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="mmrl-rewards-loop").start()
    return loop


def run_here(work: Any) -> Any:
    """The result of a coroutine, from any thread of this process."""
    with _LOOP:
        loop = _background()
    return asyncio.run_coroutine_threadsafe(work, loop).result()
