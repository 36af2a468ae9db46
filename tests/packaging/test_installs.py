"""What is installed for whom: the core suffices for the demo, single tasks name their extra, set-up keeps what is there, one OpenCV
stays, and what mmrl saves is read by transformers alone."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrl.errors import MissingExtraError, install_command, need_package
from mmrl.policy.families import BUILT_IN
from mmrl.registry import task_from_spec
from mmrl.training.checkpoint import Checkpoints
from tests.kits.engine_kit import fresh_policy

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
CODE = [
    path
    for folder in ("mmrl", "tasks", "rewards", "video", "robotics")
    for path in (ROOT / folder).rglob("*.py")
]


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=;!~ ]", requirement)[0].lower().replace("_", "-")


def _calls(*functions: str) -> Iterator[tuple[Path, list[str | None]]]:
    """Calls of these functions in the code: the file, and the arguments by position, None for what is no text."""
    for path in CODE:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                continue
            if call.func.id in functions:
                found = [a.value if isinstance(a, ast.Constant) else None for a in call.args]
                yield path, [w if isinstance(w, str) else None for w in found]


def test_every_extra_that_a_message_names_exists_and_brings_its_package() -> None:
    named = {word for _, words in _calls("install_command") for word in words if word}
    for path, words in _calls("need_package"):
        module, extra = words[0], words[2] if len(words) > 2 else None
        if module and extra:
            brought = {_name(requirement) for requirement in EXTRAS[extra]}
            package = {"grpc": "grpcio"}.get(module, module.replace("_", "-"))
            assert package in brought, (path.name, module, extra)
            named.add(extra)
    assert {"text", "math", "lvis", "ocr", "hub", "serve", "video", "robotics", "ray"} <= named
    assert named <= set(EXTRAS), named - set(EXTRAS)


def test_the_extra_that_a_family_names_brings_what_its_processor_imports() -> None:
    for family in BUILT_IN:
        for module, extra in family.packages.items():
            assert module in {_name(requirement) for requirement in EXTRAS[extra]}, family.name


def test_the_extra_all_holds_every_room_and_dev_holds_all() -> None:
    inside = re.findall(r"[\w-]+", EXTRAS["all"][0].partition("[")[2])
    assert set(inside) == {
        *(
            "text",
            "math",
            "lvis",
            "smolvlm",
            "ocr",
            "hub",
            "video",
            "robotics",
            "openpi",
            "lerobot",
            "openenv",
            "serve",
            "judge",
            "view",
            "tensorboard",
            "metrics",
        )
    }
    assert EXTRAS["dev"][0].startswith("mmrl-rft[all,")
    core = {_name(requirement) for requirement in PROJECT["dependencies"]}
    optional = {_name(r) for requirements in EXTRAS.values() for r in requirements}
    assert core & optional <= {"cloudpickle", "transformers"}, "an extra adds what the core lacks"


@pytest.mark.parametrize(
    ("module", "task", "params", "extra"),
    [
        ("math_verify", "math", {}, "math"),
        ("rouge_score", "open_text", {"preset": "video_r1"}, "text"),
        pytest.param(
            *("pytesseract", "zoom", {"tools": ["zoom", "read"]}, "ocr"),
            marks=pytest.mark.render("tesseract"),
        ),
    ],
)
def test_a_task_without_its_package_says_so_when_it_is_made(
    module: str,
    task: str,
    params: dict[str, Any],
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task_from_spec(task, params)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        MissingExtraError, match=f"expected the package {module} for .*, found none"
    ) as info:
        task_from_spec(task, params)
    assert install_command(extra) in str(info.value)
    task_from_spec("open_text", {})  # ROUGE without stems needs nothing


def test_lvis_scores_say_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmrl.tasks.metrics.lvis import lvis_ap

    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(MissingExtraError, match=r"faster_coco_eval for LVIS.*\[lvis\]"):
        lvis_ap({"images": [], "annotations": [], "categories": []}, [])
    need_package("json", "this test", "text")


# ---- scripts/setup.sh, with a python that writes down what pip is asked for


def _environment(folder: Path, stamp: str | None, *, versions: tuple[str, ...] = ()) -> Path:
    """A folder that looks like a virtual environment to setup.sh; its python logs its arguments to `folder`/asked."""
    place = folder / "venv"
    (place / "bin").mkdir(parents=True)
    python = place / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >> "{folder}/asked"\n'
        'case "$*" in *m.version*) for last; do :; done\n'
        f'case " {" ".join(versions)} " in *" $last "*) exit 0;; *) exit 1;; esac;;\n'
        "*--has-gpu*) exit 1;; esac\n"
    )
    python.chmod(0o755)
    (place / "bin" / "mmrl").touch(mode=0o755)
    if stamp is not None:
        (place / ".mmrl-setup").write_text(stamp)
    return place


def _set_up(folder: Path, place: Path, *extras: str) -> tuple[str, str]:
    """(what python was asked, the stamp afterwards)."""
    subprocess.run(
        ["bash", str(ROOT / "scripts" / "setup.sh"), *extras],
        env={**os.environ, "VENV": str(place)},
        check=True,
        capture_output=True,
        timeout=60,
    )
    asked = folder / "asked"
    text = asked.read_text() if asked.exists() else ""
    asked.unlink(missing_ok=True)
    return text, (place / ".mmrl-setup").read_text()


@pytest.mark.parametrize(
    ("stamp", "asked", "installed"),
    [
        (None, ["core"], "-e ."),
        (None, [], "-e .[dev]"),
        (None, ["all"], "-e .[all]"),
        ("old", ["core"], "-e .[dev]"),
        ("old core", ["all"], "-e .[all]"),
        ("old all", ["core"], "-e .[all]"),
        ("old serve", ["video"], "-e .[serve,video]"),
    ],
)
def test_an_environment_keeps_its_extras(
    stamp: str | None, asked: list[str], installed: str, tmp_path: Path
) -> None:
    place = _environment(tmp_path, stamp)
    commands, after = _set_up(tmp_path, place, *asked)
    assert f"{installed}\n" in commands
    extras = installed.partition("[")[2].rstrip("]") or "core"
    assert after.split()[1] == extras
    assert ("hf-libero" in commands) == (extras in ("dev", "all")), "LIBERO comes with the robots"
    assert _set_up(tmp_path, place, *asked) == ("", after), "a blink the second time"


def test_of_two_opencvs_the_headless_one_stays(tmp_path: Path) -> None:
    place = _environment(tmp_path, None, versions=("opencv-python", "opencv-python-headless"))
    commands, _ = _set_up(tmp_path, place, "all")
    removed = commands.index("uninstall --quiet --yes opencv-python opencv-python-headless")
    again = commands.index("--no-deps opencv-python-headless")
    assert commands.index("-e .[all]") < removed < again
    one = _environment(tmp_path / "one", None, versions=("opencv-python-headless",))
    assert "--yes opencv" not in _set_up(tmp_path / "one", one, "all")[0]


def test_what_was_measured_of_fresh_environments() -> None:
    found = json.loads((ROOT / "assets/results/install.json").read_text(encoding="utf-8"))
    core = found["installs"]["core"]
    assert core["gb"] <= 1.7 and core["command"] == "make demo"
    for extras, row in found["installs"].items():
        assert row["demo_trains"] and len(row["opencv"]) <= 1, extras


# ---- a checkpoint is an ordinary model


@pytest.mark.slow
def test_a_checkpoint_is_read_by_transformers_alone(tmp_path: Path) -> None:
    """In this environment, by a program that does not know mmrl: the model answers as mmrl's policy does."""
    import torch

    policy = fresh_policy(path=str(ROOT / "assets" / "tiny_vlm"))
    optimizer = torch.optim.SGD([p for _, p in policy.trainable()], lr=0.1)
    folder = Checkpoints(tmp_path, keep_last=1).save(1, policy, optimizer.state_dict(), {})
    program = f"""
import sys
from PIL import Image
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor
assert not any(name == "mmrl" or name.startswith("mmrl.") for name in sys.modules)
processor = AutoProcessor.from_pretrained({str(folder)!r})
model = AutoModelForImageTextToText.from_pretrained({str(folder)!r}, dtype=torch.float32)
content = [{{"type": "image"}}, {{"type": "text", "text": "the red circle"}}]
text = processor.apply_chat_template([{{"role": "user", "content": content}}], add_generation_prompt=True)
inputs = processor(text=[text], images=[Image.new("RGB", (112, 112), "red")], return_tensors="pt")
made = model.generate(**inputs, max_new_tokens=8, do_sample=False)
assert made.shape[1] > inputs["input_ids"].shape[1]
print(type(model).__name__, sum(p.double().abs().sum().item() for p in model.parameters()))
"""
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kind, total = done.stdout.split()
    ours = sum(p.double().abs().sum().item() for p in policy.model.parameters())
    assert kind.startswith("Qwen2_5_VL") and float(total) == pytest.approx(ours, rel=1e-9)
