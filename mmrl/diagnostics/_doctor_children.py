"""Questions `mmrl doctor` asks in a child process, because answering them can crash, hang or take long.

Each function imports the real thing, uses it once, and returns a JSON-ready dictionary; whatever it raises, or a
signal that kills it, becomes a finding in the parent. `ask("torch_state")` runs one of them:

    python -c "from mmrl.diagnostics._doctor_children import ask; print(ask('torch_state'))"
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from typing import Any

from mmrl.workers.process import ChildError, Death, patience
from mmrl.workers.program import Program

__all__ = ["CHILD_SECONDS", "ChildFailure", "ask"]

CHILD_SECONDS = 180.0
_MARK = "mmrl-doctor-answer:"
_MOST_BYTES = 64 << 20  # of what a library prints beside the answer


class ChildFailure(RuntimeError):
    """A child raised, crashed or took too long; the text says which, in one line."""


def ask(question: str, *arguments: str, timeout: float = CHILD_SECONDS) -> dict[str, Any]:
    """Run the function `question` of this module in a fresh interpreter. ChildFailure when it gives no answer."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"from mmrl.diagnostics import _doctor_children as child; child.answer({question!r}, {list(arguments)!r})"
    )
    child = Program([sys.executable, "-c", code], question, group=True)
    try:
        said, death = _outcome(child, timeout)
    finally:
        child.kill()
    if death.cause == "timeout":
        raise ChildFailure(f"no answer within {timeout:.0f} s")
    for line in said.splitlines():
        if line.startswith(_MARK):
            return dict(json.loads(line[len(_MARK) :]))
    if death.cause == "message":
        raise ChildFailure(death.said)
    if death.signal:
        raise ChildFailure(f"crashed with {death.signal}")
    lines = [line for line in death.tail.splitlines() if line.strip()]
    raise ChildFailure(
        lines[-1].strip() if lines else f"ended with status {death.code} and printed nothing"
    )


def _outcome(child: Program, timeout: float) -> tuple[str, Death]:
    """What it printed, and how it ended: timeout where it still runs then."""
    child.begin(timeout)
    try:
        said = child.read_all(_MOST_BYTES)
        death = child.death(patience([child.deadline]) or 0.0)
    except ChildError as error:  # also where it is gone and what it started holds its pipe
        said, death = bytes(child.held), error.death
    return said.decode("utf-8", "replace"), replace(
        death, cause="timeout"
    ) if death.cause == "pipe" else death


def answer(question: str, arguments: list[str]) -> None:
    """In the child: call the function and print its answer on a line of its own."""
    result = globals()[question](*arguments)
    print("\n" + _MARK + json.dumps(result), flush=True)


def torch_state() -> dict[str, Any]:
    """The torch build, its GPUs, and whether sdpa and flex attention run (forward and backward on 8 tokens)."""
    import torch

    available = torch.cuda.is_available()
    device = "cuda" if available else "cpu"
    gpus = []
    for i in range(torch.cuda.device_count() if available else 0):
        properties = torch.cuda.get_device_properties(i)
        gpus.append({"name": properties.name, "memory_gb": properties.total_memory / 1e9})
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpus": gpus,
        "bf16": available and torch.cuda.is_bf16_supported(including_emulation=False),
        "sdpa": _attention_error("sdpa", device),
        "flex": _attention_error("flex", device),
    }


def _attention_error(kernel: str, device: str) -> str:
    """'' when the kernel gives finite values and gradients, else why not."""
    import torch

    q = torch.ones(1, 2, 8, 16, device=device, requires_grad=True)
    try:
        if kernel == "sdpa":
            mask = torch.ones(8, 8, dtype=torch.bool, device=device).tril()
            out = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            out.sum().backward()
        else:
            from torch.nn.attention.flex_attention import flex_attention

            q = q if device == "cuda" else q.detach()  # on the CPU flex attention has no backward
            out = flex_attention(q, q, q)
    except (ImportError, RuntimeError, NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return "" if bool(out.isfinite().all()) else "not finite"


def qwen_processor() -> dict[str, Any]:
    """Import torchvision as mmrl does and run transformers' Qwen-VL image processor on one picture."""
    from mmrl import _torchvision_cpu

    _torchvision_cpu.install()
    torchvision = importlib.import_module("torchvision")
    transformers = importlib.import_module("transformers")
    image = importlib.import_module("PIL.Image").new("RGB", (56, 56), (200, 30, 30))
    pixels = transformers.Qwen2VLImageProcessor()(images=[image], return_tensors="pt")[
        "pixel_values"
    ]
    for name in ("Qwen2_5_VLProcessor", "AutoProcessor", "AutoModelForImageTextToText"):
        getattr(transformers, name)
    return {
        "torchvision": torchvision.__version__,
        "transformers": transformers.__version__,
        "fixed": bool(_torchvision_cpu._declared),
        "shape": list(pixels.shape),
    }


def plain_torchvision() -> dict[str, Any]:
    """Import torchvision as any other program does: without what mmrl, or mmrl_torchvision.pth of this environment, declares."""
    in_environment = any(
        _ours(finder) and finder.__module__ != "mmrl._torchvision_cpu" for finder in sys.meta_path
    )
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _ours(finder)]
    try:
        importlib.import_module("torchvision")
    except Exception as error:
        return {
            "works": False,
            "error": f"{type(error).__name__}: {error}",
            "in_environment": in_environment,
        }
    return {"works": True, "error": "", "in_environment": in_environment}


def _ours(finder: Any) -> bool:
    return getattr(finder, "__name__", "") == "_TorchvisionFinder"


def import_module(name: str) -> dict[str, Any]:
    """Import a module; its version as it tells it itself, '' when it does not."""
    module = importlib.import_module(name)
    return {"version": str(getattr(module, "__version__", ""))}


def load_library(name: str) -> dict[str, Any]:
    """Load a shared library by its name."""
    import ctypes

    ctypes.CDLL(name)
    return {"loaded": name}


def vulkan_devices() -> dict[str, Any]:
    """Devices a Vulkan instance offers."""
    from mmrl.diagnostics._vulkan import devices

    return {"devices": devices()}
