"""Curves of contrast groups: does the policy use what it is shown?

A contrast group is rolled out on a changed input (shuffled frames, a mirrored view, masked media, the question alone). Where
its accuracy is as high as that of the plain input, the policy does not use what the change destroys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mmrl.report.curves import Curve, draw_curves, per_source
from mmrl.report.load import Run

__all__ = ["configured_view", "contrast_curves", "contrast_names", "view_name"]

_NAME = re.compile(r"(?:train/)?(?:(.+)/)?contrast/(gap|plain|changed|rolled_out)")
_VIEWS = {
    "shuffle": "shuffled frames",
    "mirror": "mirrored frames",
    "mask": "masked media",
    "question_only": "the question alone",
}
_SHARE = (0.0, 1.0)


def view_name(kind: str) -> str:
    """A kind of change in words: 'shuffle' -> 'shuffled frames'."""
    return _VIEWS.get(kind, kind.replace("_", " ")) or "a changed input"


def configured_view(run: Run) -> str:
    """algorithm.contrast.kind of the run's configuration; '' where it cannot be read or is none."""
    import yaml

    try:
        value: Any = yaml.safe_load(run.config_text) or {}
        kind = str(value["algorithm"]["contrast"]["kind"])
    except (yaml.YAMLError, KeyError, TypeError):
        return ""
    return "" if kind == "none" else kind


def contrast_names(run: Run) -> list[str]:
    """The metrics of contrast groups that the run logged."""
    return [name for name in run.names() if _NAME.fullmatch(name)]


def _found(run: Run) -> dict[str, dict[str, str]]:
    """source ('' for all) -> measure -> metric."""
    found: dict[str, dict[str, str]] = {}
    for name in contrast_names(run):
        if match := _NAME.fullmatch(name):
            found.setdefault(match.group(1) or "", {})[match.group(2)] = name
    return found


def _curves(run: Run) -> Iterator[Curve]:
    """The gap first, then both accuracies (over all and per source), then the share that was rolled out."""
    found = _found(run)
    sources = sorted(s for s in found if s)
    places = [
        s for s in ("", *sources) if s in found and not (s and "" in found and len(sources) == 1)
    ]
    gaps = {found[s]["gap"]: s or "all" for s in places if "gap" in found[s]}
    for curve in per_source("Accuracy gap", gaps, "as it is − changed; near 0: not used"):
        yield replace(curve, zero=True)
    for s in places:
        words = {
            found[s][m]: w
            for m, w in (("plain", "as it is"), ("changed", "changed"))
            if m in found[s]
        }
        yield Curve(
            f"Accuracy as it is and changed{f': {s}' if s else ''}",
            words,
            "groups rolled out both ways",
            bounds=_SHARE,
        )
    rolled = {found[s]["rolled_out"]: s or "all" for s in places if "rolled_out" in found[s]}
    for curve in per_source(
        "Rolled out on the changed input", rolled, "groups; others could not matter"
    ):
        yield replace(curve, percent=True, zero=True, bounds=_SHARE)


def contrast_curves(run: Run) -> list[str]:
    """The charts of contrast groups; [] for a run without any."""
    return draw_curves(run, list(_curves(run)))
