"""A start without a garbage collector that looks through everything loaded so far every 700 objects, and finds nothing.

Of importing the trainer and a model's family that was a seventh of the processor's time: 5.8 s, and 4.9 s after `loading` (torch
2.13, transformers 5.16, Python 3.11). What trains calls `loaded` before its first step, so that cycles which hold tensors are found
as soon as ever.
"""

from __future__ import annotations

import gc

__all__ = ["loaded", "loading"]

_LOADING = (50_000, 20, 100)
_USUAL = gc.get_threshold()


def loading() -> None:
    """Look for garbage seldom from now on; a program that has set thresholds of its own keeps them."""
    if gc.get_threshold() == _USUAL:
        gc.set_threshold(*_LOADING)


def loaded() -> None:
    """Look for garbage as often as before `loading`."""
    if gc.get_threshold() == _LOADING:
        gc.set_threshold(*_USUAL)
