"""Where an evaluation is written when no folder is named: with the run, never into its checkpoint, never over another."""

import json
import os
from pathlib import Path

import pytest

from mmrl.errors import ConfigError
from mmrl.evaluation.places import data_name, evaluation_place, suites_name
from mmrl.evaluation.progress import Asked


def evaluation_folder(*given, **options):
    """The folder of an evaluation that has begun."""
    with evaluation_place(*given, **options).begin({"": Asked({}, 1)}) as progress:
        (progress.folder / "predictions.jsonl").write_text("")
        progress.complete = True
    return progress.folder


@pytest.fixture
def run(tmp_path):
    """A run with two checkpoints; `best` links to one of them, as a run's does."""
    folder = tmp_path / "runs" / "demo"
    for step in (20, 40):
        (folder / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"status": "finished"}))
    os.symlink("step_000040", folder / "checkpoints" / "best")
    return folder


def test_it_lies_in_the_run_and_names_data_and_step(run):
    name = data_name("grounding", [Path("a/val.jsonl")])
    found = evaluation_folder(str(run / "checkpoints" / "best"), name)
    assert found == run / "eval" / "grounding-val@step_000040"
    earlier = evaluation_folder(str(run / "checkpoints" / "step_000020"), name)
    assert earlier == run / "eval" / "grounding-val@step_000020"
    assert not list((run / "checkpoints" / "step_000040").iterdir())


def test_no_result_is_overwritten(run):
    checkpoint = str(run / "checkpoints" / "best")
    for _ in range(3):
        evaluation_folder(checkpoint, "val")
    assert sorted(p.name for p in (run / "eval").iterdir()) == [
        "val@step_000040",
        "val@step_000040-2",
        "val@step_000040-3",
    ]
    assert evaluation_place(checkpoint, "val", Path("mine")).folder == Path("mine")


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-VL-3B-Instruct", "a\x00b/../../etc"])
def test_models_without_a_run_go_below_the_working_folder(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = evaluation_folder(model.replace("\x00", ""), "val").resolve()
    assert found.is_relative_to(tmp_path / "runs" / "eval")
    (tmp_path / "model").mkdir()
    assert evaluation_folder("model", "val") == Path("runs/eval/model/val")


def test_names_are_folders_of_any_data_task_and_suites():
    assert data_name("tasks/mine.py:Zoom", [Path("x/a b.jsonl"), Path("c.parquet")]) == "Zoom-a_b+c"
    assert data_name("own/zoom", [Path("/data/")]) == "own_zoom-data"
    assert "/" not in data_name("..", [Path("..")]) and data_name("..", [Path("..")])
    assert suites_name(["refcoco_val", "screenspot_v2"]) == "refcoco_val+screenspot_v2"
    assert suites_name(list("abcd")) == "4_suites"


def test_never_into_the_checkpoint_itself(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint.parent / "best").symlink_to(checkpoint.name)
    for out in (checkpoint, checkpoint.parent / "best"):
        with pytest.raises(ConfigError, match="another folder than the checkpoint"):
            evaluation_place(str(checkpoint.parent / "best"), "x", out)
    within = evaluation_place(str(checkpoint), "x", checkpoint / "eval")
    assert within.folder == checkpoint / "eval"
