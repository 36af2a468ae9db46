"""Whole suites from replies to numbers, against the benchmarks' own programs on the same replies (scripts.record_suites).

The data lies as the release has it, the shipped suite reads it, and the replies go through scoring, summing up, official scorers
and submission files as `mmrl eval` has them; `mmrl score` then gives the same again (tests/evaluation/suite_kit.py).
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmrl.evaluation.suites import DataSuite
from mmrl.types import StopReason
from scripts._extractor_runs import REPOSITORIES
from scripts.record_suites import RUNS
from scripts.record_suites import Golden as Run
from tests.evaluation.suite_kit import (
    BOOK,
    FIXTURES,
    agree,
    evaluate_suite,
    golden,
    put,
    put_parquet,
    told,
)


def picture_bytes(size: tuple[int, int] = (32, 32)) -> dict[str, Any]:
    """A picture as parquet holds it; width and height in pixels."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 10, 10)).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


OTHERWISE = {
    "got10k_frames": "a number of chosen frames, which no program of the benchmark computes: tests/tasks/test_tracking.py"
}
"""Suites whose numbers no official program gives."""


def test_every_shipped_suite_is_compared_with_its_program() -> None:
    """Itself, or another split or other frames of the same reader, task, metric and extractor."""
    files = Path(__file__).parent.glob("test_suite_goldens*.py")
    named = set(
        re.findall(r'"([\w+]+)"', "".join(file.read_text(encoding="utf-8") for file in files))
    )
    named |= {f"android_control_{level}" for level in ("low", "high")}

    def kind(suite: DataSuite) -> tuple[Any, ...]:
        return (
            suite.task,
            suite.params["reader"]["format"],
            suite.metric,
            suite.extractor,
            suite.answers,
        )

    compared = {
        kind(suite)
        for name, suite in BOOK.suites.items()
        if name in named and name not in OTHERWISE
    }
    assert {name for name, suite in BOOK.suites.items() if kind(suite) not in compared} == set(
        OTHERWISE
    )


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_fixtures_hold_the_rows_that_their_script_makes(run: Run) -> None:
    """In their order; those that a program decides nothing about are left out."""
    found, made = golden(run.name), iter(json.loads(json.dumps(run.rows())))
    assert all(
        any(case["row"] == row and case["reply"] == reply for case in made)
        for row, reply in zip(found.rows, found.replies, strict=True)
    ), "python -m scripts.record_suites --code FOLDER"
    recorded = json.loads((FIXTURES / "suites" / f"{run.name}.json").read_text(encoding="utf-8"))
    assert (recorded["note"], recorded["files"]) == (run.note, list(run.files)) and len(
        found.rows
    ) >= 25
    assert (
        run.folder not in REPOSITORIES
        or (recorded["repository"], recorded["commit"]) == REPOSITORIES[run.folder]
    )


@pytest.mark.slow
def test_mmmu(tmp_path: Path) -> None:
    """Subjects, all of them, and the verdict on each of the replies, by both scripts of the authors."""
    found = golden("mmmu")
    subjects: dict[str, list[dict[str, Any]]] = {}
    for row in found.rows:
        picture = {f"image_{n}": picture_bytes() if n == 1 else None for n in range(1, 8)}
        subjects.setdefault(row["id"].split("_", 1)[1].rpartition("_")[0], []).append(
            {**row, **picture}
        )
    for subject, rows in subjects.items():
        put_parquet(tmp_path / "MMMU" / subject / "validation-00000-of-00001.parquet", rows)
    ids = [row["id"] for row in found.rows]
    outcome = evaluate_suite("mmmu_val", tmp_path, told(found, ids), tmp_path / "out")
    agree(found, ids, outcome.values("correct"))
    printed = found.official["printed"]
    assert outcome.line.value == pytest.approx(
        sum(found.values) / len(ids), abs=1e-6
    ) and outcome.line.n == len(ids)
    assert round(outcome.line.value, 3) == printed["Overall"]["acc"]
    for subject, numbers in found.official["subjects"].items():
        assert outcome.results["per_source"][f"MMMU/{subject}"]["correct"]["mean"] == pytest.approx(
            numbers["acc"], abs=1e-6
        )
    assert Counter(row["source"] for row in outcome.predictions) == {
        f"MMMU/{subject}": numbers["num_example"]
        for subject, numbers in found.official["subjects"].items()
    }


@pytest.mark.slow
def test_mathvista(tmp_path: Path) -> None:
    """Its rules without the language model (--answers official), by calculate_score.py: all, by source, by kind of answer."""
    found = golden("mathvista")
    put_parquet(
        tmp_path / "MathVista" / "data" / "testmini-00000-of-00001.parquet",
        [
            {**row, "image": f"images/{row['pid']}.jpg", "decoded_image": picture_bytes()}
            for row in found.rows
        ],
    )
    ids = [row["pid"] for row in found.rows]
    outcome = evaluate_suite(
        "mathvista_rule", tmp_path, told(found, ids), tmp_path / "out", answers="official"
    )
    agree(found, ids, outcome.values("correct"))
    scores = found.official["scores"]
    assert outcome.line.value == pytest.approx(
        scores["average"]["accuracy"], abs=1e-6
    ) and outcome.line.n == len(ids)
    for source, numbers in scores["source"].items():
        assert outcome.results["per_source"][source]["correct"]["mean"] == pytest.approx(
            numbers["accuracy"], abs=1e-6
        )
    assert outcome.results["per_task"]["choice"]["correct"]["mean"] == pytest.approx(
        scores["question_type"]["multi_choice"]["accuracy"], abs=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("stop", [StopReason.EOS, StopReason.LENGTH])
def test_vsi_bench(stop: StopReason, tmp_path: Path) -> None:
    """The program does not know why a reply ended, so a cut one counts as far as it goes.

    Accuracy and mean relative accuracy of each reply, the eight types, and their mean, which is the suite's number."""
    found = golden("vsibench")
    put(tmp_path / "VSI-Bench" / "test.jsonl", found.rows)
    for row in found.rows:
        put(tmp_path / "VSI-Bench" / row["dataset"] / f"{row['scene_name']}.mp4", b"no video")
    ids = [str(row["id"]) for row in found.rows]
    outcome = evaluate_suite("vsibench", tmp_path, told(found, ids), tmp_path / "out", stop=stop)
    kinds = {row["id"]: row["task"] for row in outcome.predictions}
    agree(
        found,
        ids,
        {
            name: outcome.values("mra" if kinds[name] == "numeric" else "correct")[name]
            for name in ids
        },
    )
    numbers = found.official["numbers"]
    assert outcome.line.value == pytest.approx(numbers["overall"] / 100, abs=1e-6)
    tables = list(outcome.results["benchmark"].values())
    for name, value in numbers.items():
        if name != "overall":
            kind = name.removesuffix("_accuracy").removesuffix("_MRA:.5:.95:.05")
            [mine] = [table[f"vsibench/{kind}"] for table in tables if f"vsibench/{kind}" in table]
            assert mine == pytest.approx(value / 100, abs=1e-6), kind
