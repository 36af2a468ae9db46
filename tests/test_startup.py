"""A user's own folder that hides one of our packages is named at start-up, with the way to mend it.

Each case runs a real Python in a real folder: what counts is what that Python would import.
"""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.startup import COMPANION_PACKAGES, check_shadowing, find_shadows

ROOT = Path(__file__).resolve().parents[1]
CHECK = "from mmrl.startup import check_shadowing; check_shadowing(); print('all ours')"
# Puts mmrl's root last on sys.path: where site-packages stands for an installed mmrl.
INSTALLED = f"import sys; sys.path.append({str(ROOT)!r}); "


def run(code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -c` in `cwd`, without the test runner's own path settings."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=clean | environment, capture_output=True,
                          text=True, timeout=60, check=False)


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_nothing_hides_ours_here() -> None:
    check_shadowing()
    assert find_shadows() == []


def test_a_clean_folder_passes_and_nothing_is_imported(tmp_path: Path) -> None:
    done = run(INSTALLED + CHECK + f"; print(sorted(set({COMPANION_PACKAGES!r}) & set(sys.modules)))", tmp_path)
    assert done.stdout.splitlines() == ["all ours", "[]"], done.stderr


@pytest.mark.check_takes(1)
@pytest.mark.parametrize("name", COMPANION_PACKAGES)
def test_a_package_in_the_current_folder_is_named(name: str, tmp_path: Path) -> None:
    write(tmp_path / name / "__init__.py")
    done = run(INSTALLED + CHECK, tmp_path)
    assert done.returncode != 0
    error = done.stderr.splitlines()[-1]
    assert error.startswith("mmrl.errors.ConfigError")
    assert f"expected mmrl's own {ROOT / name}, found your folder {tmp_path / name}" in error
    assert f"rename it ({name} -> my_{name})" in error and "use the `mmrl` command" in error


def test_a_module_file_is_named(tmp_path: Path) -> None:
    culprit = write(tmp_path / "tasks.py")
    error = run(INSTALLED + CHECK, tmp_path).stderr.splitlines()[-1]
    assert f"found your file {culprit}" in error and "rename it (tasks.py -> my_tasks.py)" in error


def test_a_folder_without_init_does_not_hide_a_package_on_the_path(tmp_path: Path) -> None:
    """Python prefers a regular package anywhere on sys.path over a namespace folder before it."""
    write(tmp_path / "tasks" / "notes.txt")
    done = run(INSTALLED + CHECK, tmp_path)
    assert done.stdout.strip() == "all ours", done.stderr


def test_a_folder_without_init_hides_an_editable_install(tmp_path: Path) -> None:
    """setuptools' editable finder comes after the path finder, so there even a folder of clips wins."""
    write(tmp_path / "video" / "clip.txt")
    finder = (
        "import sys, importlib.util\n"
        "class Editable:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        folder = {str(ROOT)!r} + '/' + name\n"
        f"        if name in ('mmrl', *{COMPANION_PACKAGES!r}):\n"
        "            return importlib.util.spec_from_file_location(name, folder + '/__init__.py')\n"
        "sys.meta_path = [m for m in sys.meta_path if 'editable' not in str(m).lower()] + [Editable]\n")
    error = run(finder + CHECK, tmp_path).stderr.splitlines()[-1]
    assert f"package 'video': expected mmrl's own {ROOT / 'video'}, found your folder {tmp_path / 'video'}" in error


def test_pythonpath_is_named_as_the_cause(tmp_path: Path) -> None:
    write(tmp_path / "lib" / "rewards" / "__init__.py")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    error = run(INSTALLED + CHECK, elsewhere, PYTHONPATH=str(tmp_path / "lib")).stderr.splitlines()[-1]
    assert f"Take {tmp_path / 'lib'} out of PYTHONPATH" in error


def test_every_culprit_is_named_at_once(tmp_path: Path) -> None:
    for name in ("tasks", "robotics"):
        write(tmp_path / name / "__init__.py")
    stderr = run(INSTALLED + CHECK, tmp_path).stderr
    assert str(tmp_path / "tasks") in stderr and str(tmp_path / "robotics") in stderr


def test_a_package_that_is_already_imported_from_elsewhere_is_noticed(tmp_path: Path) -> None:
    culprit = write(tmp_path / "x" / "video" / "__init__.py").parent
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'x')!r}); import video; sys.path.pop(0); {INSTALLED}{CHECK}"
    assert f"found your folder {culprit}" in run(code, ROOT.parent).stderr


def test_a_missing_package_asks_for_a_reinstallation(tmp_path: Path) -> None:
    [shadow] = find_shadows(["no_such_companion"], root=tmp_path)
    assert shadow.culprit is None
    assert f"expected {tmp_path / 'no_such_companion'}, found nothing" in shadow.message()
    assert "make install" in shadow.message() and "pip install" not in shadow.message()
