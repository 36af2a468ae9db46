"""What is read from a sample once and asked for by each of its completions: its true boxes, its number, its options.

A group's completions are scored one behind the other against the same sample, and parts, metrics and details all ask for its truth.
`of_sample` keeps what a function of a sample found for the samples that were asked about last. Samples are frozen, and they are
told apart by identity: an equal sample of another group is read again, a text is never remembered.

    @of_sample
    def true_boxes(sample): ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from mmrl.types import Sample

__all__ = ["MOST_KEPT", "of_sample"]

P = ParamSpec("P")
T = TypeVar("T")
MOST_KEPT = 256
"""Values kept per function; beyond it all are dropped and read again."""


def of_sample(function: Callable[Concatenate[Sample, P], T]) -> Callable[Concatenate[Sample, P], T]:
    """`function(sample, *settings)`, computed once per sample and settings (hashable; settings given by name are computed each
    time). The value is shared by all who ask: nobody may change it. What raises is not kept. Threads may compute a value twice."""
    kept: dict[Any, tuple[Sample, T]] = {}

    @functools.wraps(function)
    def once(sample: Sample, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (id(sample), *args)
        found = kept.get(key)
        # the entry holds its sample, so that no other one can have its id
        if found is not None and not kwargs:
            return found[1]
        value = function(sample, *args, **kwargs)
        if kwargs:
            return value
        if len(kept) >= MOST_KEPT:
            kept.clear()
        kept[key] = sample, value
        return value

    return once
