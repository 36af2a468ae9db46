"""The lines a run prints: what is watched during training, and the table before and after."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mmrl.cli.display import fit_parts, step_parts
from mmrl.cli.evaluation import _print_parts, print_skipped
from mmrl.cli.run import _eval_note, _Teller, results_table
from mmrl.config import DataSource
from mmrl.data.sources import LoadedSource
from mmrl.evaluation.result import Evaluation
from mmrl.evaluation.tables import Judged
from mmrl.operations.console import Console
from mmrl.types import Sample, Score
from tests.kits.album_task import Album
from tests.report.mixed_run import SOURCES, make_mixed_run


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixed_run(tmp_path_factory.mktemp("run") / "mixed", prompts=6)


def results_of(run: Path, step: int) -> dict[str, Any]:
    return json.loads((run / f"eval/step_{step:06d}/results.json").read_text(encoding="utf-8"))


def test_a_mixed_run_has_one_row_per_source_with_its_headline(
    mixed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results_table(mixed)
    out = capsys.readouterr().out
    first, last = results_of(mixed, 0), results_of(mixed, 40)
    for source in SOURCES:
        before, after = (r["per_source"][source]["sampled/headline"] for r in (first, last))
        [line] = [x for x in out.splitlines() if f" {source} " in x]
        gain = f"{after['mean'] - before['mean']:+.3f}"
        for number in (
            f"{before['mean']:.3f} [{before['low']:.3f}",
            f"{after['mean']:.3f} [",
            gain,
        ):
            assert number in line, number
    assert (
        "(mean of sources)" in out and "iou (avg@2, T = 1)" in out and "correct, similarity" in out
    )


def test_a_long_name_is_folded_and_leaves_the_numbers_their_room(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results_table(mixed)
    usual = capsys.readouterr().out
    run, source, name = tmp_path / "run", next(iter(SOURCES)), "hub/" + "a_long_name_" * 12
    shutil.copytree(mixed, run)
    for file in (run / "eval").glob("*/results.json"):
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(f'"{source}"', f'"{name}"'), encoding="utf-8")
    results_table(run)
    folded = capsys.readouterr().out
    numbers = re.compile(r"│ +\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\] │ .* │ [+-]\d\.\d{3} │")
    assert sorted(numbers.findall(folded)) == sorted(numbers.findall(usual)) != []
    assert "".join(line[1:].partition("│")[0].strip() for line in folded.splitlines()).count(name)


def test_so_does_the_table_of_an_evaluation(
    mixed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = results_of(mixed, 40)
    rows = {f"{'a_long_name_' * 12}{source}": row for source, row in found["per_source"].items()}
    heads = dict.fromkeys(rows, "correct")
    _print_parts(Console(width=100), "source", rows, heads)
    out = capsys.readouterr().out
    assert all(f"│      {row['parse_rate']['mean']:.3f} │" in out for row in rows.values())
    assert all(f"{row['headline']['high']:.3f}] │" in out for row in rows.values())


def test_a_run_with_one_source_keeps_its_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    estimate = {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 9}
    for step, mean in ((0, 0.5), (10, 0.75)):
        table = {k: {**estimate, "mean": mean} for k in ("ned", "reward", "parse_rate", "macro")}
        results = {
            "step": step,
            "greedy": table,
            "per_source": {"pages": table},
            "protocol": {"samples_per_prompt": 0, "temperature": 1.0},
            "headlines": {"per_source": {"pages": "ned"}},
        }
        folder = tmp_path / "eval" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps(results))
    results_table(tmp_path)
    out = capsys.readouterr().out
    assert (
        "ned (greedy)" in out
        and "+0.250" in out
        and "parse_rate (greedy)" in out
        and "macro" not in out
    )
    results_table(tmp_path / "nothing")
    assert capsys.readouterr().out == ""


def test_results_of_an_earlier_version_still_print(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    estimate = {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 9}
    for step in (0, 10):
        folder = tmp_path / "eval" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(
            json.dumps(
                {
                    "step": step,
                    "sampled": {"iou": estimate},
                    "greedy": {"iou": estimate},
                    "per_source": {"a": {"iou": estimate}},
                    "protocol": {"samples_per_prompt": 8, "temperature": 1.0},
                }
            )
        )
    results_table(tmp_path)
    assert "mIoU (avg@8, T = 1)" in capsys.readouterr().out


def test_the_line_after_an_evaluation_names_the_watched_metric_and_every_source(
    mixed: Path,
) -> None:
    results = results_of(mixed, 40)
    note = _eval_note(results, "macro")
    assert note.startswith("held-out after step 40: sampled macro 0.") and "greedy reward" in note
    assert all(
        f"{source} {results['per_source'][source]['headline']['mean']:.3f}" in note
        for source in SOURCES
    )
    one = _eval_note({"step": 3, "greedy": {"ned": {"mean": 0.25}}, "per_source": {"a": {}}}, "ned")
    assert one == "held-out after step 3: greedy ned 0.250"


def test_a_run_says_how_many_held_out_samples_it_could_not_read() -> None:
    said: list[str] = []
    teller: Any = _Teller(
        cast(Any, None), cast(Any, SimpleNamespace(say=lambda text, style="": said.append(text)))
    )
    results = {"step": 3, "greedy": {"iou": {"mean": 0.25}}, "per_source": {"a": {}}}
    bad = Score.failure("input_error: no such picture", ("accuracy",))
    sample = Sample("1", "grounding", "s", "q", None)
    rows = [Judged({}, sample, bad if n < 2 else Score(0.0, True), 0, n, 0) for n in range(3)]
    teller("eval", Evaluation(results, rows))
    assert len(said) == 2 and said[1] == (
        "2 of 3 held-out samples could not be read and count as 0; first: no such picture"
    )
    teller("eval", Evaluation(results, rows[2:]))
    assert len(said) == 3


@pytest.mark.parametrize(
    ("row", "watched", "shown"),
    [
        ({"train/correct": 0.5}, "macro", "correct 0.500"),
        ({"train/iou": 0.25, "train/ned": 0.5}, "ned", "ned 0.500"),
        ({"train/iou": None}, "iou", "iou -"),
        ({}, "reward", "reward -  parsed -  signal -"),
    ],
)
def test_the_line_of_a_step_shows_a_metric_that_is_measured(
    row: dict[str, Any], watched: str, shown: str
) -> None:
    assert shown in fit_parts(step_parts(row, watched), None)


def test_rows_left_out_are_printed_with_their_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    kept = LoadedSource(DataSource(task="album", path="a.jsonl"), Album(), ())
    print_skipped(
        [
            kept,
            dataclasses.replace(
                kept, skipped={"other split": 1200, "no picture": 3}, rejected=("row 7",)
            ),
        ]
    )
    assert capsys.readouterr().out.splitlines() == [
        "a.jsonl: 1,203 rows left out: 3 no picture, 1,200 other split",
        "a.jsonl: 1 rows rejected (rejected.jsonl)",
    ]
