"""torchvision and transformers' Qwen-VL processors import beside the torch that is here, whatever its build."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mmrl._torchvision_cpu import links_cuda

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_processors_work_and_operators_are_declared_only_where_torchvision_cannot_do_it_itself() -> (
    None
):
    """The declaration is for a C++ part that links CUDA, beside a torch without it: then and only then."""
    shape, as_needed, declared = run("""
import mmrl._torchvision_cpu as shim
shim.install()
import torch, torchvision
from pathlib import Path
from PIL import Image
from transformers import AutoProcessor, Qwen2VLImageProcessor, Qwen2_5_VLProcessor
pixels = Qwen2VLImageProcessor()(images=[Image.new("RGB", (56, 56))], return_tensors="pt")["pixel_values"]
print(tuple(pixels.shape))
needed = torch.version.cuda is None and torch.version.hip is None and shim.links_cuda(Path(torchvision.__file__).parent)
print(bool(shim._declared) == needed)
print(hasattr(torch.ops.torchvision, "nms"))
""").splitlines()
    assert (shape, as_needed, declared) == ("(16, 1176)", "True", "True")


def test_install_is_idempotent_and_imports_nothing_heavy() -> None:
    assert (
        run("""
import sys
import mmrl._torchvision_cpu as shim
before = len(sys.meta_path)
shim.install(); shim.install()
import importlib.util
found = importlib.util.find_spec("torchvision") is not None
print(len(sys.meta_path) - before <= 1, found, "torch" in sys.modules)
""")
        == "True True False"
    )


def test_links_cuda_reads_the_library(tmp_path: Path) -> None:
    assert not links_cuda(tmp_path)
    (tmp_path / "_C.so").write_bytes(b"\x7fELF libtorch_cpu.so libc10.so")
    assert not links_cuda(tmp_path)
    (tmp_path / "_C.so").write_bytes(
        b"\x7fELF" + b"\0" * 5000 + b"libtorch_cuda.so\0libc10_cuda.so\0"
    )
    assert links_cuda(tmp_path)
