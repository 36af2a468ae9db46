"""The wheel holds one package, mmrl, with all its parts and their data, and every file of it has one import name."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.packaging.wheel_kit import LINKED, ROOT, build_wheel, copy_of_the_sources

pytestmark = pytest.mark.slow  # kept out of `make check`, part of `make test`


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("built"))


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


def sources() -> Iterator[tuple[Path, str]]:
    """Every file of the packages, and where it lies in the wheel."""
    for folder, inside in (
        (ROOT / "mmrl", "mmrl"),
        *((ROOT / name, f"mmrl/{name}") for name in LINKED),
    ):
        for path in folder.rglob("*"):
            if (
                path.is_file()
                and "__pycache__" not in path.parts
                and (folder.name != "mmrl" or not _linked(path))
            ):
                yield path, f"{inside}/{path.relative_to(folder)}"


def _linked(path: Path) -> bool:
    """Whether a path leads through a link, as old versions of `rglob` follow them."""
    return any(
        parent.is_symlink() for parent in path.parents if parent.is_relative_to(ROOT / "mmrl")
    )


def test_the_wheel_holds_one_package_and_nothing_else(contents: list[str]) -> None:
    tops = {name.partition("/")[0] for name in contents}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mmrl"} and len(tops) == 2
    assert len(contents) == len(set(contents)), "nothing twice"
    assert not [
        name
        for name in contents
        if "__pycache__" in name or name.startswith(("mmrl/scripts", "mmrl/tests"))
    ]


def test_every_module_and_data_file_is_shipped(contents: list[str]) -> None:
    """Also what a template folder or py.typed adds: a file in a package that the wheel forgets fails only for users."""
    wanted = {
        name
        for path, name in sources()
        if path.suffix in (".py", ".html", ".css", ".js") or path.name == "py.typed"
    }
    assert {"mmrl/py.typed", *(f"mmrl/{name}/py.typed" for name in LINKED)} <= wanted and len(
        wanted
    ) > 350
    assert wanted - set(contents) == set()


def test_recipes_and_tiny_models_are_shipped(contents: list[str]) -> None:
    recipes = {
        f"mmrl/shipped/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")
    }
    models = {
        f"mmrl/shipped/{path.relative_to(ROOT)}"
        for folder in (ROOT / "assets").glob("tiny_*")
        for path in folder.rglob("*")
    }
    assert len(recipes) > 25 and len(models) > 40
    assert {name for name in contents if name.startswith("mmrl/shipped/")} == recipes | models


def test_licence_and_command_are_in_the_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        [commands] = [n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt")]
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
        assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()
        assert "mmrl = mmrl.cli.main:main" in archive.read(commands).decode()


def test_folders_are_packages_all_the_way_down() -> None:
    """Without __init__.py a folder is a namespace package, which any installed package of that name would hide."""
    folders = {path.parent for path, _ in sources() if path.suffix == ".py"}
    assert {folder for folder in folders if not (folder / "__init__.py").is_file()} == set()


def test_a_source_release_holds_files_in_the_place_of_links(tmp_path: Path) -> None:
    """What is unpacked elsewhere, where a link might lead nowhere, builds the same wheel."""
    source = copy_of_the_sources(tmp_path / "source")
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, check=True, timeout=120
    )
    [made] = tmp_path.glob("mmrl_rft-*.tar.gz")
    with tarfile.open(made) as archive:
        held = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    wanted = (
        "mmrl/tasks/grounding.py",
        "mmrl/shipped/configs/demo.yaml",
        "mmrl/shipped/assets/tiny_vlm/config.json",
    )
    assert all(held[name].isreg() for name in wanted) and not any(
        member.issym() for member in held.values()
    )


def test_no_file_is_loaded_under_two_names(site: Path) -> None:
    """Import every module of the installed wheel and compare the files behind them."""
    code = f"""
import sys; sys.path[:] = [{str(site)!r}, *[p for p in sys.path if p not in ('', {str(ROOT)!r})]]
import importlib, pkgutil
from pathlib import Path
package = importlib.import_module('mmrl')
assert Path(package.__file__).is_relative_to({str(site)!r}), package.__file__
for module in pkgutil.walk_packages(package.__path__, 'mmrl.'):
    if not module.name.endswith('__main__'):
        importlib.import_module(module.name)
files = {{}}
for name, module in list(sys.modules.items()):
    file = getattr(module, '__file__', None)
    if file and file.startswith({str(site)!r}):
        files.setdefault(file, []).append(name)
assert len(files) >= 300
print({{f: n for f, n in files.items() if len(n) > 1}})
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=site,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{}"


@pytest.mark.parametrize("python", ["3.10.12", "3.11.2", "3.12.3", "3.13.1"])
def test_each_pin_is_for_the_pythons_that_its_release_is_for(python: str) -> None:
    """What the packages' own metadata say. 3.11.2 is Debian 12's, 3.10 the oldest that we support."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(text) for line in lines if (text := line.partition("#")[0].strip())]
    here = {"python_version": python.rpartition(".")[0], "python_full_version": python}
    looked_at = 0
    for pin in pins:
        try:
            metadata = distribution(pin.name)
        except PackageNotFoundError:  # of another machine
            continue
        if metadata.version not in pin.specifier or (pin.marker and not pin.marker.evaluate(here)):
            continue
        looked_at += 1
        needs = str(metadata.metadata["Requires-Python"] or "")
        assert python in SpecifierSet(needs), f"{pin}: its release asks for Python {needs}"
    assert looked_at > 100
