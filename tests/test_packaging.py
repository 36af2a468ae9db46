"""The wheel holds the five packages with their data and nothing else, and every folder has one import name."""
from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # kept out of `make check`, part of `make test`

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mmrl", "tasks", "rewards", "video", "robotics")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, without a network (the environment's own setuptools builds it)."""
    source = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, "configs", "scripts", "assets", "tests"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
                    "-w", str(target), str(source)], check=True, timeout=180)
    [built] = target.glob("mmrl-*.whl")
    return built


@pytest.fixture(scope="module")
def contents(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the unpacked wheel, as site-packages would."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def test_the_wheel_holds_the_five_packages_and_nothing_else(contents: list[str]) -> None:
    tops = {name.partition("/")[0] for name in contents}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert len(tops) == len(PACKAGES) + 1


def test_every_module_and_data_file_is_shipped(contents: list[str]) -> None:
    """Also what a template folder or py.typed adds: a file in a package that the wheel forgets fails only for users."""
    wanted = {str(path.relative_to(ROOT)) for path in sources()
              if path.suffix in (".py", ".html", ".css", ".js") or path.name == "py.typed"}
    assert {f"{package}/py.typed" for package in PACKAGES} <= wanted
    assert wanted - set(contents) == set()


def test_licence_and_command_are_in_the_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        [commands] = [n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt")]
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
        assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()
        assert "mmrl = mmrl.cli.main:main" in archive.read(commands).decode()


def test_folders_are_packages_all_the_way_down() -> None:
    """Without __init__.py a folder is a namespace package, which any installed package of that name would hide."""
    folders = {path.parent for path in sources() if path.suffix == ".py"}
    assert {folder for folder in folders if not (folder / "__init__.py").is_file()} == set()


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_each_folder_has_one_import_name(package: str) -> None:
    assert importlib.util.find_spec(package) is not None
    assert importlib.util.find_spec(f"mmrl.{package}") is None, f"mmrl.{package} would be a second name of {package}"


def test_no_file_is_loaded_under_two_names(site: Path) -> None:
    """Import every module of the installed wheel and compare the files behind them."""
    code = f"""
import sys; sys.path[:] = [{str(site)!r}, *[p for p in sys.path if p not in ('', {str(ROOT)!r})]]
import importlib, pkgutil
from pathlib import Path
for name in {PACKAGES!r}:
    package = importlib.import_module(name)
    assert Path(package.__file__).is_relative_to({str(site)!r}), package.__file__
    for module in pkgutil.walk_packages(package.__path__, name + '.'):
        if not module.name.endswith('__main__'):
            importlib.import_module(module.name)
files = {{}}
for name, module in list(sys.modules.items()):
    file = getattr(module, '__file__', None)
    if file and file.startswith({str(site)!r}):
        files.setdefault(file, []).append(name)
assert len(files) >= 5
print({{f: n for f, n in files.items() if len(n) > 1}})
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=site, capture_output=True, text=True, timeout=300,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{}"


def test_the_installed_wheel_passes_the_start_up_check(site: Path) -> None:
    code = (f"import sys; sys.path.insert(0, {str(site)!r}); from mmrl.startup import check_shadowing; "
            "check_shadowing(); import mmrl; print(mmrl.__file__)")
    done = subprocess.run([sys.executable, "-c", code], cwd=site.parent, capture_output=True, text=True, timeout=60,
                          check=False)
    assert done.stdout.strip() == str(site / "mmrl" / "__init__.py"), done.stderr
