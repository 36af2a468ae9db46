"""Whole suites about clips from replies to numbers, against the benchmarks' own programs; see test_suite_goldens.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.suite_kit import (
    Outcome,
    agree,
    evaluate_suite,
    golden,
    put,
    put_parquet,
    told,
)

pytestmark = pytest.mark.slow
CLIP = b"no video: replies need none"


def numbers_of(outcome: Outcome) -> dict[str, float]:
    """Of the suite's one official table."""
    [table] = outcome.results["benchmark"].values()
    return dict(table)


def close(value: float) -> Any:
    return pytest.approx(value, abs=1e-6)


def test_video_mme(tmp_path: Path) -> None:
    """The authors' script leaves replies without a letter out; here they are wrong, so its shares are of fewer replies."""
    found = golden("videomme")
    put_parquet(tmp_path / "Video-MME" / "videomme" / "test-00000-of-00001.parquet", found.rows)
    for name in {row["videoID"] for row in found.rows}:
        put(tmp_path / "Video-MME" / "data" / f"{name}.mp4", CLIP)
    ids = [row["question_id"] for row in found.rows]
    outcome = evaluate_suite("videomme", tmp_path, told(found, ids), tmp_path / "out")
    agree(found, ids, outcome.values("correct"))
    mine, overall, left_out = (
        numbers_of(outcome),
        found.official["overall"],
        found.official["left_out"],
    )
    assert outcome.line.value == close(sum(found.values) / len(ids)) == mine["videomme/accuracy"]
    for length in ("short", "medium", "long"):
        asked = sum(row["duration"] == length for row in found.rows)
        share = 100 * mine[f"videomme/duration {length}"] * asked / (asked - left_out[length])
        assert f"{share:.1f}" == f"{overall[length]:.1f}" and left_out[length]
    assert (
        f"{100 * mine['videomme/accuracy'] * len(ids) / (len(ids) - sum(left_out.values())):.1f}"
        == f"{overall['all']:.1f}"
    )


def test_mvbench(tmp_path: Path) -> None:
    """All 20 tasks; their mean, which is the notebook's Avg where tasks have as many questions, and Avg itself."""
    from mmrl.tasks.readers.mvbench import TASKS

    found = golden("mvbench")
    rows: dict[str, list[Any]] = {}
    ids = []
    for row in found.rows:
        rows.setdefault(row["task"], []).append(
            {key: value for key, value in row.items() if key != "task"}
        )
        ids.append(f"{row['task']}-{len(rows[row['task']])}")
    for task, listed in rows.items():
        put(tmp_path / "MVBench" / "json" / f"{task}.json", listed)
        put(tmp_path / "MVBench" / "video" / TASKS[task][0].folder / "clip.mp4", CLIP)
    outcome = evaluate_suite("mvbench", tmp_path, told(found, ids), tmp_path / "out")
    agree(found, ids, outcome.values("correct"))
    mine, official = numbers_of(outcome), dict(found.official["numbers"])
    assert (
        100 * mine["mvbench/accuracy"] == close(official.pop("Avg"))
        and mine["mvbench/categories"] == len(official) == 20
    )
    assert {task: 100 * mine[f"mvbench/{task}"] for task in official} == {
        task: close(value) for task, value in official.items()
    }
    assert outcome.line.value == close(sum(official.values()) / 20 / 100)


@pytest.mark.parametrize(
    ("suite", "form"), [("tempcompass_mc", "multi-choice"), ("tempcompass_yes_no", "yes_no")]
)
def test_tempcompass(suite: str, form: str, tmp_path: Path) -> None:
    """Every rating of the whole script, and the shares by aspect that it prints, to a tenth of a percent."""
    found = golden(suite)
    questions: dict[str, dict[str, list[Any]]] = {}
    for number, row in enumerate(found.rows):
        questions.setdefault(row["video"], {}).setdefault(row["dim"], []).append(
            {"question": row["question"], "answer": row["answer"], "number": number}
        )
    order = [
        row.pop("number")
        for aspects in questions.values()
        for rows in aspects.values()
        for row in rows
    ]
    put(tmp_path / "TempCompass" / "questions" / f"{form}.json", questions)
    for name in questions:
        put(tmp_path / "TempCompass" / "videos" / f"{name}.mp4", CLIP)
    ids = [""] * len(order)
    for place, number in enumerate(order, 1):
        ids[number] = f"{form}-{place}"
    outcome = evaluate_suite(suite, tmp_path, told(found, ids), tmp_path / "out")
    agree(found, ids, outcome.values("correct"))
    mine, printed = numbers_of(outcome), dict(found.official["printed"])
    assert outcome.line.value == close(sum(found.values) / len(ids))
    assert round(100 * mine[f"tempcompass/{form}/accuracy"], 1) == printed.pop("avg")
    assert {
        aspect: round(100 * mine[f"tempcompass/{form}/{aspect}"], 1) for aspect in printed
    } == printed


def test_video_mmmu(tmp_path: Path) -> None:
    """Its tracks, choices and open answers. The program leaves empty replies out; here they are wrong."""
    found = golden("videommmu")
    tracks: dict[str, list[dict[str, Any]]] = {}
    for row in found.rows:
        kept = {key: value for key, value in row.items() if key != "track"}
        tracks.setdefault(row["track"], []).append({**kept, "link_selected": "https://example.org"})
        domain = {"Biology": "Science", "Art_Theory": "Art", "Finance": "Business"}[
            re.sub(r"^dev_|_\d+$", "", row["id"])
        ]
        put(tmp_path / "VideoMMMU" / domain / f"{row['id']}.mp4", CLIP)
    for track, rows in tracks.items():
        put_parquet(tmp_path / "VideoMMMU" / track / "test-00000-of-00001.parquet", rows)
    ids = [f"{row['track']}-{row['id']}" for row in found.rows]
    outcome = evaluate_suite("videommmu", tmp_path, told(found, ids), tmp_path / "out")
    agree(found, ids, outcome.values("correct"))
    assert outcome.line.value == close(sum(found.values) / len(ids))
    for track, numbers in found.official["tracks"].items():
        mine = outcome.results["per_source"][f"VideoMMMU/{track}"]["correct"]["mean"]
        answered = numbers["items"] - numbers["left_out"]
        assert round(mine * numbers["items"] / answered, 5) == numbers["overall"]


def test_long_video_bench(tmp_path: Path) -> None:
    """All of it and its four lengths."""
    found, root = golden("longvideobench"), tmp_path / "LongVideoBench"
    put(root / "lvb_val.json", found.rows)
    put(root / "videos" / "clip.mp4", CLIP)
    put(
        root / "subtitles" / "clip_en.json",
        [{"start": "00:00:00.000", "end": "00:00:02.000", "line": "now it is blue"}],
    )
    ids = [row["id"] for row in found.rows]
    outcome = evaluate_suite("longvideobench_val", tmp_path, told(found, ids), tmp_path / "out")
    agree(found, ids, outcome.values("correct"))
    mine = numbers_of(outcome)
    assert (
        outcome.line.value == mine["longvideobench/accuracy"] == close(sum(found.values) / len(ids))
    )
    assert round(outcome.line.value, 5) == found.official["overall"]
    lengths = found.official["lengths"]
    assert {
        name: round(mine[f"longvideobench/duration {name}"], 5) for name in lengths
    } == lengths and len(lengths) == 4


@pytest.mark.parametrize("suite", ["mlvu_dev", "mlvu_test"])
def test_mlvu(suite: str, tmp_path: Path) -> None:
    """The tasks' accuracies and their mean; on the test set with up to seven candidates."""
    from scripts._suite_clips import MLVU

    found = golden(suite)
    if suite == "mlvu_dev":
        for kind, name in MLVU.items():
            put(
                tmp_path / "MLVU" / "json" / f"{name}.json",
                [row for row in found.rows if row["question_type"] == kind],
            )
            put(tmp_path / "MLVU" / "video" / name / "clip.mp4", CLIP)
    else:
        put(tmp_path / "MLVU-Test" / "test_question.json", found.rows)
        put(tmp_path / "MLVU-Test" / "video" / "clip.mp4", CLIP)
    ids = [row["question_id"] for row in found.rows]
    outcome = evaluate_suite(suite, tmp_path, told(found, ids), tmp_path / "out")
    agree(found, ids, outcome.values("correct"))
    mine, official = numbers_of(outcome), dict(found.official["numbers"])
    assert 100 * (outcome.line.value or 0) == close(official.pop("Avg")) and mine[
        "mlvu/categories"
    ] == len(official)
    assert {kind: 100 * mine[f"mlvu/{kind}"] for kind in official} == {
        kind: close(value) for kind, value in official.items()
    }
