"""mmrl as a user has it: its wheel in a fresh environment, an empty folder, and the user's own packages called `tasks` and `video`.

The environment is new and holds nothing but the wheel; libraries (torch, transformers ...) are found where the tests run.
"""

from __future__ import annotations

import json
import site
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.wheel_kit import build_wheel, without_paths

pytestmark = pytest.mark.slow  # `make wheel-test`, part of `make test`

Run = Callable[..., "subprocess.CompletedProcess[str]"]
SMALL = (
    "train.steps=1",
    "train.prompts_per_step=2",
    "rollout.group_size=2",
    "eval.limit=2",
    "eval.samples=1",
    "eval.gallery=1",
    "rollout.max_new_tokens=4",
    "--quiet",
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of a fresh virtual environment with mmrl's wheel."""
    folder = tmp_path_factory.mktemp("environment")
    wheel = build_wheel(folder)
    venv.create(folder / "venv", symlinks=True)
    program = folder / "venv" / "bin"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(program / "python"),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            str(wheel),
        ],
        check=True,
        timeout=180,
        env=without_paths(),
    )
    [own] = (folder / "venv" / "lib").glob("python*/site-packages")
    names = {path.name for path in own.iterdir()}
    assert "mmrl" in names and not {"tasks", "rewards", "robotics", "video"} & names
    (own / "libraries.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
    return program


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder far from the repository, with nothing in it but two packages of the user's own."""
    folder = tmp_path_factory.mktemp("empty")
    for name in ("tasks", "video"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"MINE = '{name}'\n")
        (folder / name / "decode.py").write_text("HERE = True\n")
    return folder


@pytest.fixture(scope="module")
def run(environment: Path, empty: Path) -> Run:
    """A command of the fresh environment in the user's folder; without a network and without anything of ours on a path."""
    offline = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    clean = without_paths() | offline

    def run(program: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(environment / program), *arguments],
            cwd=empty,
            env=clean,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


def test_a_script_imports_its_own_packages_beside_mmrl(
    run: Run, empty: Path, environment: Path
) -> None:
    (empty / "script.py").write_text("""import tasks, video, video.decode
import mmrl
from mmrl.rewards.iou import box_iou
from mmrl.tasks.grounding import Grounding
from mmrl.robotics.tiny import TinySimulator
from mmrl.video.sampling import FrameSampling
print(tasks.MINE, video.MINE, video.decode.HERE, box_iou((0, 0, 2, 2), (0, 0, 2, 2)), Grounding.__module__, mmrl.__file__)
""")
    *said, file = run("python", "script.py").stdout.split()
    assert said == ["tasks", "video", "True", "1.0", "mmrl.tasks.grounding"]
    assert Path(file).is_relative_to(environment.parent), "the wheel's, not the repository's"


def test_tasks_recipes_suites_and_presets_are_found_by_name(run: Run) -> None:
    listed = run("mmrl", "tasks", "list").stdout
    assert "grounding" in listed and "tracking" in listed
    names = [line.split()[0] for line in run("mmrl", "recipes").stdout.splitlines()]
    assert {"grounding", "demo", "libero", "video_tiny"} <= set(names) and "suites" not in names
    assert "name: grounding" in run("mmrl", "config", "grounding", "--preset", "gpu_24g").stdout
    assert "refcoco" in run("mmrl", "eval", "--list-suites").stdout
    error = run("mmrl", "train", "groundin", status=2).stderr
    assert (
        "expected a configuration file or a recipe of" in error
        and "Did you mean 'grounding'?" in error
    )


def test_a_tiny_model_is_trained_by_the_name_of_its_recipe(run: Run, empty: Path) -> None:
    run("mmrl", "demo", "--scenes", "20", *SMALL)
    run("mmrl", "train", "demo", "name=again", *SMALL)
    for name in ("demo", "again"):
        rows = [
            json.loads(line)
            for line in (empty / "runs" / name / "metrics.jsonl").read_text().splitlines()
        ]
        assert [row["step"] for row in rows] == [1] and rows[0]["train/grad_norm"] >= 0
        assert (empty / "runs" / name / "report.html").stat().st_size > 10_000
