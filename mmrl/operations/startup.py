"""Starts that take no longer than they must.

A garbage collector looks through everything loaded so far every 700 objects, and finds nothing. Of importing the trainer and a
model's family that was a seventh of the processor's time: 5.8 s, and 4.9 s after `loading` (torch 2.13, transformers 5.16, Python
3.11). What trains calls `loaded` before its first step, so that cycles which hold tensors are found as soon as ever.

transformers reads the files of every installed package and of every model that it has before it is asked for one: with
`quick_transformers` it is loaded by mmrl/operations/transformers_start.py.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from types import ModuleType

__all__ = ["loaded", "loading", "quick_transformers"]

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


_LATER = "ImportedWhenCalled"
_LOADERS = {
    "transformers.utils.import_utils": "ImportUtils",
    "transformers.configuration_utils": "Configurations",
    "transformers.quantizers.quantizer_torchao": _LATER,
    "transformers.loss.loss_deformable_detr": _LATER,
    "transformers.loss.loss_for_object_detection": _LATER,
    "transformers.loss.loss_grounding_dino": _LATER,
    "transformers.loss.loss_lw_detr": _LATER,
    "transformers.loss.loss_rf_detr": _LATER,
    "transformers.loss.loss_rt_detr": _LATER,
}
"""Modules that do too much when they are imported, and what loads them in mmrl/operations/transformers_start.py."""


class _Finder:
    """Finds these modules where Python would, and hands them our loaders."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _LOADERS:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        from mmrl.operations import transformers_start

        loader = getattr(transformers_start, _LOADERS[name])(name, spec.origin)
        return spec_from_file_location(name, spec.origin, loader=loader)


def quick_transformers() -> None:
    """Let transformers be imported quickly from now on; does nothing where it has been imported. Imports nothing."""
    if not _LOADERS.keys() & sys.modules.keys() and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
