"""A limit on the processor time of a call: takes_less(0.1, lambda: parse_spans(text))."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["takes_less"]

T = TypeVar("T")


def takes_less(seconds: float, call: Callable[[], T], tries: int = 3) -> T:
    """What `call` returns, once a run of it takes less than `seconds` of this thread's processor time. Raises AssertionError with
    the times when none of `tries` runs does.

    A collection of all objects of a large test process takes a second, and a virtual machine may lose a slice of its processor:
    neither is the code's, so garbage collection is off during a run, and the quickest run counts. A quadratic reader is slow every
    time. A call whose answer is remembered needs a fresh text in each run, or the second one measures the memory.
    """
    collects, times = gc.isenabled(), []
    for _ in range(tries):
        gc.disable()
        try:
            began = time.thread_time()
            result = call()
            times.append(time.thread_time() - began)
        finally:
            if collects:
                gc.enable()
        if times[-1] < seconds:
            return result
    found = ", ".join(f"{taken:.3g}" for taken in times)
    raise AssertionError(
        f"expected less than {seconds:g} s of processor time, found {found} s: {call!a:.200}"
    )
