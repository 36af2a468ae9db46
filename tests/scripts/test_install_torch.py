"""What set-up decides about torch before installing: no CUDA without a GPU, and a torch that is there stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.install_torch import (
    cuda_packages,
    pin,
    release,
    torchvision_for,
    wants_torchcodec,
    with_installed,
)

ROOT = Path(__file__).resolve().parents[2]


def report(*names: str) -> dict[str, Any]:
    """The part of pip's installation report (version 1) that is read."""
    return {
        "version": "1",
        "install": [{"metadata": {"name": name, "version": "1"}} for name in names],
    }


def test_a_cuda_build_is_recognised_by_what_it_brings() -> None:
    assert cuda_packages(report("torch", "filelock", "sympy")) == []
    assert cuda_packages(report("torch", "nvidia-cublas-cu12", "triton", "nvidia_nccl_cu12")) == [
        "nvidia-cublas-cu12",
        "nvidia_nccl_cu12",
    ]
    assert cuda_packages(report("torch", "cuda-bindings", "cuda-toolkit")) == [
        "cuda-bindings",
        "cuda-toolkit",
    ]


def test_pins_are_read_from_the_real_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    torch, torchvision = pin(constraints, "torch"), pin(constraints, "torchvision")
    assert torch.startswith("torch==") and torchvision.startswith("torchvision==")
    wanted = torchvision_for(torch.partition("==")[2]).removesuffix("*")
    assert torchvision.startswith(wanted), "the two pins belong to different releases"
    assert pin(constraints, "not-listed") == "not-listed"
    assert pin("mujoco>=3.3,<3.4  # why", "mujoco") == "mujoco>=3.3,<3.4"


def test_installed_versions_replace_their_pins_and_only_those() -> None:
    text = with_installed(
        "torch==2.13.0\ntorchvision==0.28.0\ntorchcodec==0.13.0\n", {"torch": "2.11.0+cu128"}
    )
    assert text.splitlines() == ["torchvision==0.28.0", "torchcodec==0.13.0", "torch==2.11.0+cu128"]


@pytest.mark.parametrize(
    ("torch", "torchvision"),
    [
        ("2.6.0", "torchvision==0.21.*"),
        ("2.11.0+cu128", "torchvision==0.26.*"),
        ("2.13.0+cpu", "torchvision==0.28.*"),
    ],
)
def test_torchvision_releases_follow_torch(torch: str, torchvision: str) -> None:
    assert torchvision_for(torch) == torchvision


def test_release_reads_numbers_only() -> None:
    assert release("2.13.0+cpu") == (2, 13, 0) and release("2.6") == (2, 6) and release("") == ()


def test_torchcodec_is_added_only_beside_the_torch_it_was_built_for() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    pinned = pin(constraints, "torch").partition("==")[2]
    assert wants_torchcodec(constraints, pinned + "+cpu", "Linux", "x86_64")
    assert not wants_torchcodec(constraints, "2.11.0+cu128", "Linux", "x86_64")
    assert not wants_torchcodec(constraints, pinned, "Darwin", "arm64")
    assert not wants_torchcodec("torch==2.13.0\n", "2.13.0", "Linux", "x86_64"), (
        "without a pin nothing is added"
    )
