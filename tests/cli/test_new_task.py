"""`mmrl new task NAME` as its user goes on: the checks and its own test pass, pip installs it, a run trains on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.cli.scaffold import new_task_command
from mmrl.errors import ConfigError
from tests.kits.engine_kit import ENVIRONMENT, REPO

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_task_command("blue-cars", tmp_path_factory.mktemp("new"), lambda line: None)


def run(folder: Path, *command: str, site: Path | None = None) -> str:
    path = os.pathsep.join([str(REPO), *([str(site)] if site else [])])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**ENVIRONMENT, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_own_test_passes_and_its_code_is_formatted(package: Path) -> None:
    assert "passed" in run(
        package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."
    )
    files = [str(f) for f in package.glob("*.py")]
    config = str(REPO / "pyproject.toml")
    run(package, "-m", "ruff", "check", "--config", config, *files)
    run(package, "-m", "ruff", "format", "--check", "--config", config, *files)


def test_it_trains_by_its_recipe(package: Path) -> None:
    run(
        package,
        "-c",
        "from blue_cars import BlueCars; t = BlueCars(); t.example_data('.')",
    )
    rows = (package / "rows.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (package / "train.jsonl").write_text("".join(rows[:8]), encoding="utf-8")
    (package / "val.jsonl").write_text("".join(rows[8:]), encoding="utf-8")
    said = run(
        package,
        "-m",
        "mmrl.cli.main",
        "train",
        "recipe.yaml",
        "model.path=assets/tiny_vlm",
        "train.steps=2",
        "train.prompts_per_step=2",
        "rollout.max_new_tokens=8",
        "reward.workers=0",
    )
    assert "report" in said
    assert (package / "runs" / "blue-cars" / "checkpoints" / "best" / "config.json").exists()


def test_pip_installs_it_under_its_name(package: Path, tmp_path: Path) -> None:
    run(
        package,
        *("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--target", str(tmp_path / "site"), "."),
    )
    listed = run(tmp_path, "-m", "mmrl.cli.main", "tasks", "list", site=tmp_path / "site")
    assert "blue-cars/blue_cars" in listed


@pytest.mark.parametrize("name", ["Blue", "2cars", "blue cars", "../x", "class", "", "a--b", "ä"])
def test_a_name_that_cannot_be_one_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a name of small letters"):
        new_task_command(name, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["json", "torch", "mmrl"])
def test_the_name_of_another_module_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no installed module has"):
        new_task_command(name, tmp_path)


def test_nothing_is_written_over(package: Path) -> None:
    before = {f.name: f.stat().st_mtime_ns for f in package.iterdir()}
    with pytest.raises(ConfigError, match="new folder"):
        new_task_command("blue-cars", package.parent)
    assert {f.name: f.stat().st_mtime_ns for f in package.iterdir()} == before


@pytest.mark.parametrize("name", ["none", "sample", "path"])
def test_a_name_whose_class_the_file_imports_gets_another(name: str, tmp_path: Path) -> None:
    folder = new_task_command(name, tmp_path, lambda line: None)
    text = (folder / f"{name}.py").read_text(encoding="utf-8")
    assert f"class {name.capitalize()}Task(Task):" in text
    compile(text, name, "exec")
    run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "-k", "rewards")
