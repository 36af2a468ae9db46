"""Somebody else's task, pip-installed or in a file of their own, is listed, checked, trained and scored by the real
command line. It imports nothing of mmrl but `from mmrl import ...`. So is their family of models, listed and checked.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmrl.diagnostics.families import check_names
from mmrl.policy.tiny import TinySpec, build_tiny
from mmrl.registry import task_from_spec
from tests.kits.launch_kit import run_here

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).parents[1] / "plugin_package"
INSTALLED = "shape-counting/circles"
FILE = f"{PACKAGE}/shape_counting.py:CountCircles"
CONFIG = """
name: run
dir: {folder}/runs
model: {{path: {folder}/model}}
data:
  train: [{{task: none, path: {folder}/circles/circles.jsonl}}]
  eval: [{{task: none, path: {folder}/circles/circles.jsonl, limit: 4}}]
rollout: {{group_size: 6, max_new_tokens: 8}}
optim: {{lr: 1e-4}}
train: {{steps: 2, prompts_per_step: 4, save_every: 0}}
eval: {{samples: 2, best_metric: sampled/exact}}
"""


SEVERAL = """
import json, sys
from mmrl.cli.main import app
for arguments in json.loads(sys.argv[1]):
    assert not app(arguments, standalone_mode=False), "exit status"  # it returns the one that a shell would get
    print(chr(0))
"""


def where_it_is_installed(site: Path, *command: str) -> str:
    """Run Python in a process of its own, in which the package is installed; returns what it printed."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=site,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def mmrl(*arguments: str) -> str:
    """Run the command in this process, where the package is not installed; returns what it printed."""
    done = run_here("mmrl.cli.main", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed by pip, without a network."""
    source = tmp_path_factory.mktemp("source") / "package"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("site")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--disable-pip-version-check",
            "--target",
            str(target),
            str(source),
        ],
        check=True,
        timeout=180,
    )
    return target


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures, a configuration, and a tiny model that was shown the answers for a moment."""
    folder = tmp_path_factory.mktemp("workshop")
    task_from_spec(FILE).example_data(str(folder / "circles"))
    build_tiny(TinySpec(), folder / "tiny")
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder), encoding="utf-8")
    mmrl(
        "sft",
        str(folder / "config.yaml"),
        f"model.path={folder}/tiny",
        f"data.train.0.task={FILE}",
        "train.steps=30",
        "optim.lr=3e-3",
        "--out",
        str(folder / "model"),
        "--quiet",
    )
    return folder


def test_the_plugin_needs_nothing_of_mmrl_but_its_front_door() -> None:
    tree = ast.parse((PACKAGE / "shape_counting.py").read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert {
        m for m in modules if m and m.split(".")[0] in ("mmrl", "tasks", "rewards", "video")
    } == {"mmrl"}


@pytest.mark.slow
def test_installed_tasks_are_listed(site: Path) -> None:
    listed = where_it_is_installed(site, "-m", "mmrl.cli.main", "tasks", "list")
    assert f"{INSTALLED} " in listed and "installed (shape_counting:CountCircles)" in listed
    assert "grounding" in listed


def training(workshop: Path, name: str, spec: str) -> list[str]:
    """The command that trains two steps; its run's folder is WORKSHOP/runs/NAME."""
    return [
        "train",
        str(workshop / "config.yaml"),
        f"name={name}",
        f"data.train.0.task={spec}",
        f"data.eval.0.task={spec}",
        "--quiet",
    ]


@pytest.fixture(scope="module")
def said(site: Path, workshop: Path) -> list[str]:
    """What commands printed that name the installed task, one after the other in one process: train, score twice, check."""
    run = workshop / "runs" / "package"
    commands = [
        training(workshop, "package", INSTALLED),
        ["score", str(run / "eval" / "step_000002" / "predictions.jsonl")],
        ["score", str(run / "rollouts" / "step_000002.jsonl")],
        [
            "tasks",
            "check",
            INSTALLED,
            "--model",
            str(workshop / "model"),
            "--data",
            str(workshop / "circles" / "circles.jsonl"),
            "--out",
            str(workshop / "check"),
        ],
    ]
    return where_it_is_installed(site, "-c", SEVERAL, json.dumps(commands)).split("\0")


def metrics(run: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


@pytest.mark.slow
def test_a_foreign_task_is_trained_and_scored_in_both_forms(
    workshop: Path, said: list[str]
) -> None:
    run = workshop / "runs" / "package"
    rows = metrics(run)
    assert [row["step"] for row in rows] == [1, 2]
    # it really learned
    assert all(row["train/parse_rate"] > 0 and row["train/grad_norm"] > 0 for row in rows)
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["status"] == "finished"
    results = json.loads(
        (run / "eval" / "step_000002" / "results.json").read_text(encoding="utf-8")
    )
    assert results["greedy"]["parse_rate"]["mean"] > 0 and results["sampled"]["exact"]["n"] == 4
    assert (run / "report.html").stat().st_size > 10_000
    assert "0 of 12 scores changed" in said[1]
    assert "0 of 12 scores changed" in said[2] and "part/accuracy" in said[2]
    mmrl(*training(workshop, "file", FILE))
    # the same task, whatever form names it
    for a, b in zip(rows, metrics(workshop / "runs" / "file"), strict=True):
        names = [name for name in a if name.startswith(("train/", "eval/"))]
        assert len(names) > 20 and [a[name] for name in names] == [b[name] for name in names]


@pytest.mark.slow
def test_a_foreign_task_is_checked_by_the_command_line(workshop: Path, said: list[str]) -> None:
    assert "failed" not in said[3] and said[3].count("passed") >= 16
    assert len(list((workshop / "check").glob("check_*.png"))) == 12


@pytest.mark.slow
def test_an_installed_family_keeps_its_contract(site: Path, workshop: Path) -> None:
    """Every check by the command that its author would type, sharded ones in two processes of their own included."""
    commands = [["families", "list"], ["families", "check", "pixtral", "--json"]]
    listed, checked = where_it_is_installed(site, "-c", SEVERAL, json.dumps(commands)).split("\0")[
        :2
    ]
    assert "pixtral        model_type llava; frame set model.frame" in listed
    cells = [json.loads(line) for line in checked.splitlines() if line.startswith("{")]
    verdicts = {cell["check"]: cell["verdict"] for cell in cells}
    assert verdicts == {
        name: "refused" if name in ("video", "audio", "vllm") else "ok" for name in check_names()
    }, cells
