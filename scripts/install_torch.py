"""Install torch and torchvision without ever pulling CUDA libraries onto a machine that has no NVIDIA GPU.

A plain `pip install torch` on Linux brings several GB of `nvidia-*` packages. So pip is first asked what it would
install (`--dry-run --report`): a build without CUDA is taken as it is, otherwise PyTorch's own CPU index is used.
A torch that is already there is kept. torchvision follows torch; beside a CPU torch it is installed with `--no-deps`,
because its usual wheel would drag the CUDA torch in. Such a wheel cannot be imported beside a CPU torch: mmrl/_torchvision_cpu.py
fixes that for processes that import mmrl, and a .pth file written here for every process of the environment, so that a plain
transformers reads the checkpoints of mmrl, too. torchcodec, one of four video decoders, is built for one torch release: beside
the pinned torch its pinned release is added, else it is left out.

Standard library only: it runs before anything else is installed. Used by scripts/setup.sh:

    python scripts/install_torch.py constraints.txt effective-constraints.txt
    python scripts/install_torch.py --has-gpu        # status 0 with an NVIDIA GPU, 1 without
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
PTH = "mmrl_torchvision.pth"
_LINE = (
    "import os, importlib.util as u; p = {path!r}; s = u.spec_from_file_location('_mmrl_torchvision', p); "
    "m = u.module_from_spec(s); os.path.exists(p) and (s.loader.exec_module(m), m.install())\n"
)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_PACKAGE = re.compile(r"(nvidia|cuda)[-_]", re.IGNORECASE)
OLDEST_TORCH = (2, 7)


def has_nvidia_gpu() -> bool:
    """True when `nvidia-smi -L` lists at least one GPU."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    found = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False)
    return found.returncode == 0 and "GPU" in found.stdout


def cuda_packages(report: Mapping[str, Any]) -> list[str]:
    """Names of the CUDA packages in a `pip install --report` report, sorted; empty for a CPU build."""
    names = (str(item["metadata"]["name"]) for item in report["install"])
    return sorted(name for name in names if CUDA_PACKAGE.match(name))


def installed(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """'2.13.0+cpu' -> (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def pin(constraints: str, name: str) -> str:
    """The requirement for `name` in the text of a constraints file ('torch==2.13.0'), or the bare name."""
    for line in constraints.splitlines():
        requirement = line.split("#")[0].strip()
        if re.match(rf"{re.escape(name)}\s*[=<>!~]", requirement, re.IGNORECASE):
            return requirement
    return name


def with_installed(constraints: str, versions: Mapping[str, str]) -> str:
    """The constraints text with the lines of `versions` replaced by exactly those versions."""
    kept = [
        line
        for line in constraints.splitlines()
        if not any(
            re.match(rf"{re.escape(name)}\s*[=<>!~]", line, re.IGNORECASE) for name in versions
        )
    ]
    return "\n".join(kept + [f"{name}=={version}" for name, version in versions.items()]) + "\n"


def pip(*arguments: str) -> None:
    """Run pip of this interpreter; its output is shown, a failure ends the program with pip's status."""
    command = [sys.executable, "-m", "pip", *arguments]
    print("+ pip", *arguments, flush=True)
    status = subprocess.run(command, check=False).returncode
    if status:
        sys.exit(
            f"expected pip to succeed, it ended with status {status}. Fix what it printed above (network? disk?) "
            "and run the same command again; MMRL_TORCH_INDEX=URL names another package index for torch."
        )


def cpu_index_arguments(requirement: str) -> list[str]:
    """Extra pip arguments that give a CPU torch: none where the default index has one, else PyTorch's CPU index."""
    chosen = os.environ.get("MMRL_TORCH_INDEX")
    if chosen:
        return ["--index-url", chosen]
    if platform.system() != "Linux":
        return []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip("install", "--quiet", "--dry-run", "--report", str(report), requirement)
        brought = cuda_packages(json.loads(report.read_text()))
    if not brought:
        return []
    print(
        f"the default index would bring {len(brought)} CUDA packages ({brought[0]} ...) to a machine without an "
        f"NVIDIA GPU: using {CPU_INDEX}"
    )
    return ["--index-url", CPU_INDEX]


def torch_is_cpu_build() -> bool:
    """Whether the installed torch was built without CUDA and ROCm (asked in a fresh interpreter)."""
    code = "import torch; print(torch.version.cuda is None and torch.version.hip is None)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return answer.stdout.strip() == "True"


def torchvision_for(torch_version: str) -> str:
    """The torchvision requirement that belongs to a torch release: minor versions run 15 ahead (2.13 -> 0.28)."""
    return f"torchvision==0.{release(torch_version)[1] + 15}.*"


def install(constraints: str) -> dict[str, str]:
    """Install what is missing of torch and torchvision; returns the versions now installed, by name."""
    have = installed("torch")
    extra: list[str] = []
    if have is None or release(have) < OLDEST_TORCH:
        requirement = pin(constraints, "torch")
        extra = [] if has_nvidia_gpu() else cpu_index_arguments(requirement)
        pip("install", *extra, requirement)
    torch_version = installed("torch") or sys.exit(
        "expected torch after its installation, found none"
    )
    if installed("torchvision") is None:
        pinned = release(pin(constraints, "torch").partition("==")[2]) == release(torch_version)
        requirement = pin(constraints, "torchvision") if pinned else torchvision_for(torch_version)
        no_deps = ["--no-deps"] if torch_is_cpu_build() else []
        pip("install", *extra, *no_deps, requirement)
    if torch_is_cpu_build():
        write_pth()
    return {
        "torch": torch_version,
        "torchvision": installed("torchvision") or sys.exit("torchvision is missing"),
    }


def write_pth() -> bool:
    """Make torchvision importable in every process of this environment; whether anything changed.

    The line does nothing beside a torchvision that was built for the CPU, and once this repository is gone.
    """
    path = Path(sysconfig.get_paths()["purelib"]) / PTH
    line = _LINE.format(path=str(REPO / "mmrl" / "_torchvision_cpu.py"))
    if path.exists() and path.read_text() == line:
        return False
    path.write_text(line)
    return True


def wants_torchcodec(
    constraints: str, torch_version: str, platform_name: str, machine: str
) -> bool:
    """Whether the pinned torchcodec runs here: it has Linux x86-64 wheels and belongs to the pinned torch release."""
    return (
        (platform_name, machine) == ("Linux", "x86_64")
        and "==" in pin(constraints, "torchcodec")
        and (
            release(pin(constraints, "torch").partition("==")[2])[:2] == release(torch_version)[:2]
        )
    )


def install_torchcodec(constraints: str, torch_version: str) -> None:
    """Add the pinned torchcodec where it fits and none is there. A failure is told, not fatal: PyAV reads every video."""
    if installed("torchcodec") or not wants_torchcodec(
        constraints, torch_version, platform.system(), platform.machine()
    ):
        return
    command = ["install", "--no-deps", pin(constraints, "torchcodec")]  # later releases link CUDA
    print("+ pip", *command, flush=True)
    if subprocess.run([sys.executable, "-m", "pip", *command], check=False).returncode:
        print(
            "torchcodec could not be installed; videos are read by PyAV, decord or OpenCV",
            file=sys.stderr,
        )


def main(arguments: Sequence[str]) -> None:
    """Install, then write the constraints with the versions really there, for the `pip install -c` that follows."""
    if list(arguments) == ["--has-gpu"]:
        sys.exit(0 if has_nvidia_gpu() else 1)
    source, target = arguments
    constraints = Path(source).read_text()
    versions = install(constraints)
    install_torchcodec(constraints, versions["torch"])
    Path(target).write_text(with_installed(constraints, versions))
    print("torch and torchvision:", versions)


if __name__ == "__main__":
    main(sys.argv[1:])
