"""An accelerator made of host memory: tensors that say they are on `toy:0` and refuse to be mixed with those of the CPU.

    with toy_device() as device:
        model.to(device)(ids)                 # RuntimeError where `ids` are still on the CPU

Every operation is computed by the CPU's kernels on real numbers, so that whole runs (sampling, backward) go through. What holds on
a GPU holds here: an operation takes tensors of one device, but for CPU scalars, CPU index tensors and copies; autocast is a matter
of the device's own context, and casts matrix products, convolutions and attention. The device is torch's own provision for
backends in Python (torch.utils.backend_registration); it is invisible to whoever does not ask for it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import (
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

__all__ = ["toy_device"]

NAME = "toy"
aten = torch.ops.aten
_COPIES = {aten._to_copy.default, aten.copy_.default, aten.copy.default}
_INDEXED = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._unsafe_index.Tensor,
}
_CAST = (
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "conv2d",
    "conv3d",
    "scaled_dot_product_attention",
)


class _Tensor(torch.Tensor):
    """A tensor on the device; its numbers are in `inner`, on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"toy({self.inner!r})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Those among an operation's arguments: single ones, and lists of them. Torch's pytree takes ten times as long."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors(value)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of a value, or of each one in a list or tuple."""
    kind = type(value)
    return kind([_map(function, v) for v in value]) if kind in (list, tuple) else function(value)


def _host(x: Any) -> Any:
    if isinstance(x, _Tensor):
        return x.inner
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == NAME else x


def _placed(x: Any) -> Any:
    return _Tensor(x) if isinstance(x, torch.Tensor) else x


def _check(func: Any, args: Any, kwargs: Any) -> None:
    """Raises as CUDA does where tensors of two devices meet."""
    if func in _COPIES:
        return
    named = kwargs.values()
    found = list(_tensors((args[0], *args[2:], *named) if func in _INDEXED else (*args, *named)))
    if any(isinstance(t, _Tensor) for t in found):
        strange = [tuple(t.shape) for t in found if not isinstance(t, _Tensor) and t.ndim]
        if strange:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! "
                f"({func}: {strange})"
            )


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    _check(func, args, kwargs)
    device = kwargs.get("device")
    if func is aten.copy_.default:
        ours = isinstance(args[0], _Tensor)
    elif device is not None:
        ours = torch.device(device).type == NAME
    else:
        ours = any(isinstance(t, _Tensor) for t in _tensors((*args, *kwargs.values())))
    out = func(*_map(_host, args), **{name: _map(_host, value) for name, value in kwargs.items()})
    if not ours:
        return out
    out = _map(_placed, out)
    return return_and_correct_aliasing(func, args, kwargs, out)


class _Mode(TorchDispatchMode):
    """Sees the operations that make tensors of the device out of nothing, or out of the CPU's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Hook(_DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return False  # nobody is to choose it on its own account


def _autocast(name: str) -> Callable[..., Any]:
    """The operation with its floating-point tensors in autocast's type, as on a GPU."""

    def cast(*args: Any, **kwargs: Any) -> Any:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        dtype = torch.get_autocast_dtype(NAME)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            args, kwargs = tree_map(
                lambda x: (
                    x.to(dtype)
                    if isinstance(x, torch.Tensor)
                    and x.is_floating_point()
                    and x.device.type == NAME
                    else x
                ),
                (args, kwargs),
            )
            return getattr(torch.ops.aten, name)(*args, **kwargs)

    return cast


@functools.cache
def _register() -> tuple[torch.library.Library, ...]:
    module = types.ModuleType(f"torch.{NAME}")
    vars(module).update(
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        is_available=lambda: False,
        device_count=lambda: 0,
        current_device=lambda: 0,
        _lazy_init=lambda: None,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
    )
    _setup_privateuseone_for_python_backend(NAME, module, _Hook())
    # returned, so that both live as long as the process
    fallback = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel)
    library = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for name in _CAST:
        library.impl(name, _autocast(name))
    return fallback, library


@contextmanager
def toy_device() -> Iterator[torch.device]:
    """The device, for as long as the block lasts."""
    _register()
    before = torch._C._only_lift_cpu_tensors()
    # torch.tensor makes its numbers on the CPU and then copies, where modes see it
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Mode():
            yield torch.device(NAME, 0)
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
