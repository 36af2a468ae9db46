"""`mmrl resume RUN`: no retyping, another run is refused, more steps give the run that was longer from the start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmrl.cli.resuming import resume_command, with_steps
from mmrl.config import load_config
from mmrl.errors import ConfigError, RegistryError
from mmrl.training.identity import extension_notes
from mmrl.training.trainer import Trainer
from scripts.torture_resume import differences
from tests.kits.engine_kit import REPO, album_data, config_file, picture, read_jsonl, small_run
from tests.kits.launch_kit import run_here
from tests.kits.prepared_kit import run_prepared

pytestmark = pytest.mark.slow


def make(tmp_path: Path, name: str, steps: int, **sections: Any) -> Any:
    data = album_data(tmp_path / "data", [[picture((56, 56), i)] * (i % 2) for i in range(5)])
    tree = small_run(
        tmp_path / "runs",
        data,
        name=name,
        **{
            "train": {"steps": steps, "prompts_per_step": 3, "save_every": 1, "keep_last": 9},
            "algorithm": {"epochs": 2},
            **sections,
        },
    )
    return load_config(config_file(tmp_path / f"{name}.yaml", tree))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, and one of five."""
    folder = tmp_path_factory.mktemp("runs")
    Trainer(make(folder, "short", 3)).fit()
    Trainer(make(folder, "long", 5)).fit()
    return folder / "runs"


def rows(run: Path, step: int) -> list[dict[str, Any]]:
    """Logged rollouts of a step, but for the length of the run that is written beside them."""
    return [
        {k: v for k, v in row.items() if k != "total_steps"}
        for row in read_jsonl(run / f"rollouts/step_{step:06d}.jsonl")
    ]


def test_an_extended_run_equals_the_one_that_was_longer_from_the_start(
    runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = Path.cwd()
    resume_command(runs / "short", ["train.steps=+2"], quiet=False, trust_code=True)
    assert (
        Path.cwd() == before and "the run is extended from 3 to 5 steps" in capfd.readouterr().err
    )
    verdicts = differences(runs / "long", runs / "short")
    verdicts.pop("rollouts/*.jsonl")  # those of the first steps name another total
    assert all(verdicts.values()) and verdicts["weights and optimizer"] and verdicts["run state"], (
        verdicts
    )
    assert all(rows(runs / "long", step) == rows(runs / "short", step) for step in range(1, 6))
    info = json.loads((runs / "short" / "run.json").read_text())
    assert (info["total_steps"], info["resumed_at"], info["status"]) == (5, 3, "finished")
    with pytest.raises(
        ConfigError, match=r"all of its 5; add some: mmrl resume .*short train.steps=\+2"
    ):
        resume_command(runs / "short", [], quiet=True, trust_code=True)


def test_what_would_make_it_another_run_is_refused_with_the_list(runs: Path) -> None:
    text = {p: p.read_bytes() for p in (runs / "long").rglob("*") if p.is_file()}
    with pytest.raises(
        ConfigError,
        match=r"optim\.lr was 0\.002, now 0\.5; seed was 3, now 4; train\.steps was 5, now 4",
    ):
        resume_command(
            runs / "long",
            ["seed=4", "optim.lr=0.5", "train.steps=4", "eval.every=1"],
            quiet=True,
            trust_code=True,
        )
    with pytest.raises(ConfigError, match=r"expected the folder of a run with config\.yaml"):
        resume_command(runs / "longer", [], quiet=True)
    assert {p: p.read_bytes() for p in (runs / "long").rglob("*") if p.is_file()} == text


def test_a_strangers_run_brings_no_code(tmp_path: Path) -> None:
    """Its configuration was found in its folder: it may not name code to import."""
    mark, run = tmp_path / "was imported", tmp_path / "run"
    (tmp_path / "theirs.py").write_text(f"open({str(mark)!r}, 'w')\n")
    run.mkdir()
    (tmp_path / "data.jsonl").write_text("{}\n")
    tree = small_run(
        tmp_path,
        str(tmp_path / "data.jsonl"),
        data={
            "train": [
                {"task": f"{tmp_path / 'theirs.py'}:Task", "path": str(tmp_path / "data.jsonl")}
            ]
        },
    )
    (run / "config.yaml").write_text(Path(config_file(tmp_path / "c.yaml", tree)).read_text())
    (run / "run.json").write_text("{}")
    with pytest.raises(
        RegistryError, match=r"config\.yaml: expected the name of a built-in task.*--trust-code"
    ):
        resume_command(run, [], quiet=True)
    (run / "config.yaml").write_text("env: {suite: 'theirs:Simulator'}\n")
    with pytest.raises(RegistryError, match=r"env\.suite"):
        resume_command(run, [], quiet=True)
    assert not mark.exists()


def test_a_run_that_was_moved_is_resumed_from_anywhere_by_one_short_line(tmp_path: Path) -> None:
    """Relative paths in its configuration are those of the folder it was started from."""
    config = make(tmp_path, "begun", 2)
    relative = [
        f"data.train.0.path={os.path.relpath(config.data.train[0].path, tmp_path)}",
        "dir=runs",
    ]
    begun = run_here(
        "mmrl.cli.main", "train", str(tmp_path / "begun.yaml"), "--quiet", *relative, cwd=tmp_path
    )
    assert begun.returncode == 0, begun.stderr
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / "begun").rename(tmp_path / "elsewhere" / "renamed")
    run = tmp_path / "elsewhere" / "renamed"
    command = [
        "resume",
        str(run),
        "train.steps=+1",
        "eval.samples=0",
        "eval.best_metric=null",
        "--trust-code",
    ]
    done = run_prepared(
        [sys.executable, "-m", "mmrl.cli.main", *command],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    assert done.returncode == 0, done.stderr
    assert f"in {tmp_path}" in done.stderr and [
        r["step"] for r in read_jsonl(run / "metrics.jsonl")
    ] == [1, 2, 3]
    assert (
        not (tmp_path / "runs" / "begun").exists()
        and (run / "checkpoints" / "step_000003").is_dir()
    )


def test_a_schedule_is_laid_out_over_the_new_length_and_the_numbers_are_said(
    tmp_path: Path,
) -> None:
    config = make(
        tmp_path, "cosine", 20, optim={"lr": 1e-3, "schedule": "cosine"}, algorithm={"epochs": 1}
    )
    notes = extension_notes(config, 10, 10)
    assert notes[0] == "the run is extended from 10 to 20 steps" and len(notes) == 3
    assert (
        "the learning rate of step 11 is 0.0005, it was to be 0" in notes[1]
        and "not the run that would have been" in notes[2]
    )
    assert (
        len(extension_notes(make(tmp_path, "constant", 20), 10, 10)) == 1
        and extension_notes(config, 20, 10) == []
    )
    staged = make(tmp_path, "staged", 20, data={"curriculum": [{"until": 0.5}, {"until": 1.0}]})
    assert (
        "shares of the run are those of 20 steps from here on: data.curriculum"
        in extension_notes(staged, 10, 5)[1]
    )


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("train.steps=+7", "train.steps=12"),
        ("train.steps=9", "train.steps=9"),
        ("optim.lr=+1", "optim.lr=+1"),
    ],
)
def test_further_steps_are_counted_from_those_of_the_run(item: str, expected: str) -> None:
    assert with_steps([item], 5) == [expected]


@pytest.mark.parametrize(
    "item",
    ["train.steps=+", "train.steps=+x", "train.steps=+0", "train.steps=+-3", "train.steps=+1.5"],
)
def test_steps_that_are_no_number_are_refused(item: str) -> None:
    with pytest.raises(ConfigError, match="further steps"):
        with_steps([item], 5)


def test_the_version_says_which_mmrl_this_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mmrl.cli.main", "--version"],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    assert done.stdout.startswith("mmrl ") and str(REPO) in done.stdout
