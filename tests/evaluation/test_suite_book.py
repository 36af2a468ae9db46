"""Suites of questions and of simulated tasks: one file may hold both, one table and one loop are theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmrl.cli.main import app
from mmrl.errors import ConfigError, DataError
from mmrl.evaluation.data_rows import DataRow
from mmrl.evaluation.suite_book import Suite, load_suites
from mmrl.evaluation.suite_table import markdown, run_suites
from mmrl.robotics.suite_table import EpisodesRow

BOTH = """
.pictures: &pictures {task: grounding, metric: iou, official: true, download: none needed, notes: Half of them.}
suites:
  near: {<<: *pictures, path: near.jsonl}
  far: {<<: *pictures, path: far.jsonl}
  reach: {env: tiny, tasks: [reach, push], horizon: 9}
groups: {all: [near, reach]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(BOTH, encoding="utf-8")
    return path


def test_a_file_may_hold_both_kinds(file: Path) -> None:
    book = load_suites(file)
    assert {name: suite.acts for name, suite in book.suites.items()} == {
        "near": False,
        "far": False,
        "reach": True,
    }
    assert list(book.select("all,far")) == ["near", "reach", "far"]
    with pytest.raises(ConfigError) as error:
        book.select("reech")
    assert "unknown suite 'reech'. Did you mean 'reach'?" in str(error.value)
    assert (
        "mine.yaml: answered in text: near, far; played in simulators: reach; groups: all"
        in str(error.value)
    )
    listed = CliRunner().invoke(app, ["eval", "--list-suites", "--suites", str(file)])
    assert listed.exit_code == 0 and "all = near,reach" in listed.stdout
    assert "control steps" in listed.stdout and "metric" in listed.stdout and "9" in listed.stdout


def test_problems_of_both_kinds_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(
        BOTH.replace("horizon: 9", "horizn: 9").replace(
            "path: far.jsonl", "path: far.jsonl, settings: {video: {fpz: 2}}"
        ),
        encoding="utf-8",
    )
    with pytest.raises(ConfigError) as error:
        load_suites(tmp_path / "bad.yaml")
    said = str(error.value)
    assert "3 problem(s)" in said and "suite 'reach': horizon: Field required" in said
    assert "suite 'reach': unknown key 'horizn'. Did you mean 'horizon'?" in said
    assert "suite 'far': unknown key 'settings.video.fpz'. Did you mean 'fps'? Known here:" in said


def test_the_shipped_files_are_one_book_without_a_name_twice() -> None:
    book = load_suites()
    apart = [load_suites(file) for file in book.files]
    assert len(apart) == 2 and sum(len(b.suites) for b in apart) == len(book.suites)
    assert sum(len(b.groups) for b in apart) == len(book.groups)
    assert {"refcoco_val", "tiny_reach"} <= set(book.suites) and not set(book.suites) & set(
        book.groups
    )


def test_lines_of_both_kinds_stand_in_a_table_each(file: Path) -> None:
    suites = load_suites(file).suites
    share = {"mean": 0.5, "low": 0.2, "high": 0.8, "n": 4}
    rows = [
        DataRow(suite="near", n=8, metric="iou", value=0.5, low=0.25, high=0.75),
        EpisodesRow(
            suite="reach",
            n=4,
            protocol="own",
            tasks=2,
            success_once=share,
            success_at_end=share,
            per_task={"push": {"success_once": share, "success_at_end": share}},
        ),
        DataRow(suite="far", n=8, metric="iou", error="no picture"),
    ]
    text = markdown(rows, suites, "c").splitlines()
    heads = [i for i, line in enumerate(text) if line.startswith("| suite |")]
    assert len(heads) == 2, "one for each kind"
    assert text[heads[0] + 2 : heads[0] + 4] == [
        "| near | 8 | iou | 0.500 [0.250, 0.750] | 0 | 0 | no |",
        "| far | 8 | iou | - | 0 | 0 | no |",
    ]
    assert (
        text[heads[1] + 2]
        == "| reach | own | greedy | 4 | 50.0 % [20.0, 80.0] | 50.0 % [20.0, 80.0] | no |"
    )
    assert "- near: task grounding; Half of them." in text and "  - error: no picture" in text
    assert "  - push, 4 states, 50.0 % [20.0, 80.0], at end 50.0 % [20.0, 80.0]" in text


def test_a_suite_that_cannot_run_costs_the_others_nothing(file: Path, tmp_path: Path) -> None:
    chosen = load_suites(file).select("near,far")
    written: list[int] = []

    def evaluate(name: str, suite: Suite) -> DataRow:
        table = tmp_path / "out" / "suites.json"
        written.append(len(json.loads(table.read_text())["suites"]) if table.exists() else 0)
        if name == "near":
            raise DataError("a broken picture")
        return DataRow(suite=name, n=3, metric="iou", value=1.0)

    def failed(name: str, suite: Suite, error: str) -> DataRow:
        return DataRow(suite=name, metric="iou", error=error)

    rows = run_suites(
        chosen,
        evaluate,
        failed,
        lambda name, suite: suite.model_dump(),
        checkpoint="c",
        folder=tmp_path / "out",
    )
    assert [(r.suite, r.error, r.value) for r in rows] == [
        ("near", "a broken picture", None),
        ("far", "", 1.0),
    ]
    assert written == [0, 1], "renewed after each"
    kept = json.loads((tmp_path / "out" / "suites.json").read_text())
    assert kept["protocols"]["far"]["path"] == "far.jsonl" and len(kept["suites"]) == 2
    with pytest.raises(DataError, match="a broken picture"):
        run_suites(
            {"near": chosen["near"]},
            evaluate,
            failed,
            lambda name, suite: {},
            checkpoint="c",
            folder=tmp_path / "one",
        )
