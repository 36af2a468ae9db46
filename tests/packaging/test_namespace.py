"""What is installed is one namespace, mmrl; the repository's folders tasks, rewards, robotics and video are parts of it and have no
second name. Each case runs a real Python in a real folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mmrl
from mmrl.errors import RegistryError
from mmrl.operations.versions import versions
from mmrl.registry import current_target, resolve_task
from mmrl.tasks.grounding import Grounding

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("tasks", "rewards", "robotics", "video")


def python(*arguments: str, cwd: Path, root: str = "") -> subprocess.CompletedProcess[str]:
    """Python in `cwd`, without the test runner's own path settings; `root`: before or after what it would find by itself."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=clean | ({"PYTHONPATH": root} if root else {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", PARTS)
def test_each_folder_is_a_link_that_git_holds_and_has_one_import_name(name: str) -> None:
    link = ROOT / "mmrl" / name
    assert link.is_symlink() and os.readlink(link) == f"../{name}", (
        "relative, so that a clone may be moved"
    )
    assert name not in sys.modules, f"some test imported `{name}` in place of mmrl.{name}"


@pytest.mark.check_takes(1)
@pytest.mark.parametrize("name", PARTS)
def test_the_bare_name_is_refused_with_the_name_to_write(name: str) -> None:
    done = python("-c", f"import {name}", cwd=ROOT)
    assert (
        done.returncode == 1
        and f"expected `import mmrl.{name}`, found an import as `{name}`"
        in done.stderr.splitlines()[-1]
    )
    done = python("-m", f"{name}.anything", cwd=ROOT)
    assert f"expected `import mmrl.{name}`" in done.stderr


def test_a_copy_that_lost_its_links_says_so(tmp_path: Path) -> None:
    """As git without core.symlinks and some zips leave it: the link is a text file that holds the path."""
    (tmp_path / "mmrl").mkdir()
    shutil.copy(ROOT / "mmrl" / "__init__.py", tmp_path / "mmrl")
    (tmp_path / "mmrl" / "tasks").write_text("../tasks")
    done = python("-c", "import mmrl", cwd=tmp_path, root=str(tmp_path))
    words = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and words.startswith("ImportError: expected ")
    assert "has lost its symbolic links" in words and "core.symlinks=true" in words


def test_a_users_own_packages_of_these_names_stand_beside_mmrl(tmp_path: Path) -> None:
    """Their folder comes first on sys.path, as it does with a script; mmrl's modules are imported beside theirs."""
    for name in ("tasks", "video"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"MINE = {name!r}\n")
    (tmp_path / "script.py").write_text(
        "import tasks, video\nfrom mmrl.tasks.grounding import Grounding\n"
        "from mmrl.video import sampling\n"
        "print(tasks.MINE, video.MINE, Grounding.__module__, sampling.__name__)\n"
    )
    done = python("script.py", cwd=tmp_path, root=str(ROOT))
    assert done.stdout.split() == [
        "tasks",
        "video",
        "mmrl.tasks.grounding",
        "mmrl.video.sampling",
    ], done.stderr


@pytest.mark.slow
def test_no_file_of_a_clone_is_loaded_under_two_names() -> None:
    """After imports by name and by path of a module's file (through the link and not), every file has one module."""
    code = """
import sys
from pathlib import Path
import scripts.demo, mmrl.robotics.tiny, mmrl.rewards.iou
from mmrl.registry import resolve_task
from mmrl.tasks.grounding import Grounding
assert resolve_task('tasks/grounding.py:Grounding') is resolve_task('mmrl/tasks/grounding.py:Grounding') is Grounding
files = {}
for name, module in list(sys.modules.items()):
    if getattr(module, '__file__', None) and name != '__main__':
        files.setdefault(str(Path(module.__file__).resolve()), []).append(name)
ours = {f: n for f, n in files.items() if f.startswith(str(Path.cwd()))}
assert len(ours) > 30
print({f: n for f, n in ours.items() if len(n) > 1})
"""
    done = python("-c", code, cwd=ROOT)
    assert done.stdout.strip() == "{}", done.stdout + done.stderr


def test_names_saved_by_an_older_version_are_mapped_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mmrl.robotics.contract import EnvSpec, make_simulator

    with pytest.warns(
        DeprecationWarning,
        match=r"'robotics.tiny:TinyArm' is called 'mmrl.robotics.tiny:TinyArm' now",
    ):
        assert current_target("robotics.tiny:TinyArm") == "mmrl.robotics.tiny:TinyArm"
    assert (
        current_target("mmrl.robotics.tiny:X") == "mmrl.robotics.tiny:X"
        and current_target("own:X") == "own:X"
    )
    with pytest.warns(DeprecationWarning), pytest.raises(AttributeError, match="Nothing"):
        make_simulator(EnvSpec("robotics.tiny:Nothing", "reach", 5))  # the module was found
    (tmp_path / "robotics").mkdir()
    (tmp_path / "robotics" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert current_target("robotics.arm:X") == "robotics.arm:X", "a package of the user's own"


def test_a_task_named_by_the_path_of_a_built_in_file_is_the_built_in_one(tmp_path: Path) -> None:
    assert resolve_task(f"{ROOT}/tasks/grounding.py:Grounding") is Grounding
    with pytest.raises(RegistryError, match=r"defines no 'Grunding'\. Did you mean 'Grounding'"):
        resolve_task(f"{ROOT}/tasks/grounding.py:Grunding")
    copy = tmp_path / "mine.py"
    plugin = (ROOT / "tests" / "plugin_package" / "shape_counting.py").read_text(encoding="utf-8")
    copy.write_text(plugin.replace('@register("count_circles")\n', ""), encoding="utf-8")
    assert resolve_task(f"{copy}:CountCircles").__module__.startswith("mmrl_user_mine")


def test_the_projects_files_agree_on_names() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'name = "mmrl-rft"' in project and f'version = "{mmrl.__version__}"' in project
    assert versions()["mmrl"] == mmrl.__version__
    [layers] = re.findall(r"\nlayers = \[\n(.*?)\n\]", project, flags=re.DOTALL)
    there = {
        f"mmrl.{p.stem}"
        for p in (ROOT / "mmrl").iterdir()
        if p.suffix == ".py" or (p / "__init__.py").is_file()
    }
    assert set(re.findall(r"mmrl\.\w+", layers)) == there - {
        "mmrl.__init__",
        "mmrl._torchvision_cpu",
    }, "a room without a place"
    assert len(list((ROOT / "mmrl").glob("*.py"))) <= 10, (
        "the top of mmrl/ is what users import; everything else has a room"
    )
