"""Lets the usual torchvision wheel be imported beside a CPU build of torch.

transformers' Qwen-VL processors import torchvision. The wheel on PyPI links CUDA's torch libraries; beside a CPU torch
its C++ part cannot be loaded, which torchvision tolerates, but then it registers shape functions for `nms` and `qnms`,
operators only the C++ part would have declared, and dies: `operator torchvision::nms does not exist`. Declaring the
two before torchvision runs is enough for all of it that is Python: transforms, so the image and video processors.
Calling `torchvision.ops.nms` or its C++ image decoders still fails; mmrl uses neither.

`mmrl/__init__.py` calls `install()`, which costs nothing until someone imports torchvision:

    python -c "import mmrl, torchvision; print(torchvision.__version__)"
"""

from __future__ import annotations

import importlib.util
import mmap
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["install", "links_cuda"]

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[Any] = []  # torch forgets declarations whose Library object dies


def links_cuda(package: Path) -> bool:
    """Whether torchvision's C++ part in folder `package` links CUDA. False when it has none.

    A torchvision built for CPU declares the operators itself, and a second declaration would break its import.
    """
    for library in package.glob("_C*.so"):
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if content.find(b"libtorch_cuda.so") >= 0:
                return True
    return False


def _declare_operators() -> None:
    """Declare torchvision's two operators to a torch without CUDA and ROCm, once per process."""
    import torch

    if _declared or torch.version.cuda is not None or torch.version.hip is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + _SCHEMA)
    _declared.append(library)


class _TorchvisionLoader(SourceFileLoader):
    """Loads torchvision's `__init__` after declaring the operators."""

    def exec_module(self, module: ModuleType) -> None:
        if links_cuda(Path(self.path).parent):
            _declare_operators()
        super().exec_module(module)


class _TorchvisionFinder:
    """Finds torchvision where Python would, and hands it our loader; merely being asked imports nothing."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name)
        if spec is None or spec.origin is None:
            return None
        return importlib.util.spec_from_file_location(
            name,
            spec.origin,
            loader=_TorchvisionLoader(name, spec.origin),
            submodule_search_locations=spec.submodule_search_locations,
        )


def install() -> None:
    """Put the finder on sys.meta_path, unless it is there or torchvision is already imported. Imports no torch."""
    if "torchvision" not in sys.modules and _TorchvisionFinder not in sys.meta_path:
        sys.meta_path.insert(0, _TorchvisionFinder)
