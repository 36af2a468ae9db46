"""R1, mIoU and NExT-GQA's numbers: by hand, against a second implementation, failures in every denominator, official files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import DataError
from mmrl.tasks.grounded_qa import GroundedQA
from mmrl.tasks.metrics import nextgqa, temporal
from mmrl.tasks.temporal_grounding import TemporalGrounding
from mmrl.types import RewardContext, Sample, Score

CTX = RewardContext(1, 1, CoordFrame.REL1000)
OPTIONS = ["dog", "cat", "cow"]
tick = st.integers(0, 60).map(lambda k: k / 2)
pair = st.tuples(tick, tick).filter(lambda p: p[0] < p[1])


def test_recall_counts_an_iou_on_the_threshold() -> None:
    found = temporal.recall_at([0.3, 0.5, 0.7, 0.69999])
    assert found == {"R1@0.3": 1.0, "R1@0.5": 0.75, "R1@0.7": 0.25} and temporal.recall_at([]) == {}
    assert temporal.recall_at([0.4], (0.1,)) == {"R1@0.1": 1}


def test_missing_predictions_stay_in_the_denominator() -> None:
    truths = {"a": [[2, 6]], "b": [10, 20], "c": [[0, 1], [5, 9]], "d": [3, 4]}
    numbers = temporal.evaluate({"a": [6, 2], "b": [], "c": [[5, 9], [0, 1]]}, truths)
    assert numbers == {"R1@0.3": 0.25, "R1@0.5": 0.25, "R1@0.7": 0.25, "mIoU": 0.25}, (
        "the first one ends before it starts"
    )
    assert temporal.evaluate({"a": [6, 2]}, truths, reversed_as="sorted")["mIoU"] == 0.25, (
        "lmms-eval sorts the two times"
    )
    assert temporal.evaluate({}, truths)["mIoU"] == 0 and temporal.evaluate({"x": [1, 2]}, {}) == {}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(pair, pair), min_size=1, max_size=8))
def test_ious_are_the_charades_formula(rows: list[tuple[Any, Any]]) -> None:
    ious = [
        max(0.0, min(p[1], g[1]) - max(p[0], g[0])) / (max(p[1], g[1]) - min(p[0], g[0]))
        for p, g in rows
    ]
    numbers = temporal.evaluate(
        {i: p for i, (p, _) in enumerate(rows)}, {i: [g] for i, (_, g) in enumerate(rows)}
    )
    assert numbers["mIoU"] == pytest.approx(sum(ious) / len(ious))
    assert numbers["R1@0.5"] == sum(v >= 0.5 for v in ious) / len(ious)


def _sample(name: str, spans: list[list[float]], **params: Any) -> Sample:
    return Sample(
        name,
        "temporal_grounding",
        "s",
        f" query  {name}",
        spans,
        videos=(f"clips/{name}.mp4",),
        params={"duration": 30.0, **params},
    )


def test_benchmark_writes_activitynet_and_charades_files(tmp_path: Path) -> None:
    task = TemporalGrounding()
    samples = [
        _sample("AAA", [[2.0, 6.0]]),
        _sample("BBB", [[1.0, 2.0], [10.0, 20.0]], video_id="v_1"),
        _sample("CCC", [[3.0, 4.0]]),
    ]
    texts = ["<answer>[2, 6]</answer>", "<answer>[[10, 15], [1, 2]]</answer>", "no idea"]
    pairs = [(s, task.score(s, text, CTX)) for s, text in zip(samples, texts, strict=True)]
    numbers = task.benchmark(pairs, tmp_path)
    assert numbers == pytest.approx(
        {
            "R1@0.3": 2 / 3,
            "R1@0.5": 2 / 3,
            "R1@0.7": 1 / 3,
            "mIoU": 0.5,
            "num_reversed": 0,
            "num_outside": 0,
            "num_truths_outside": 0,
        }
    )
    written = json.loads((tmp_path / "temporal_grounding.json").read_text())
    assert written["results"] == {
        "AAA": [{"sentence": " query  AAA", "timestamp": [2, 6]}],
        "v_1": [{"sentence": " query  BBB", "timestamp": [10, 15]}],
    }
    assert (
        tmp_path / "temporal_grounding.txt"
    ).read_text() == "AAA 2 6##query AAA\nv_1 10 15##query BBB\nCCC 0 0##query CCC\n"
    assert task.benchmark([], tmp_path) == {}
    mixed = task.benchmark([*pairs, (_sample("q", [[2, 6]], qid=7), pairs[0][1])], tmp_path)
    assert (
        mixed["temporal/mIoU"] == pytest.approx(0.5) and mixed["qvhighlights/MR-full-R1@0.5"] == 100
    )


def test_files_hold_what_was_said_and_the_numbers_say_how_often_it_lay_outside(
    tmp_path: Path,
) -> None:
    task, said = (
        TemporalGrounding(),
        ["[10.123456789, 90]", "[20, 10]", "[-1, 30]", "[[5, 6], [40, 20]]", "?"],
    )
    samples = [_sample(f"v{i}", [[10.0, 31.5 if i < 2 else 20.0]]) for i in range(len(said))]
    pairs = [
        (s, task.score(s, f"<answer>{text}</answer>", CTX))
        for s, text in zip(samples, said, strict=True)
    ]
    numbers = task.benchmark(pairs, tmp_path)
    assert {k: v for k, v in numbers.items() if k.startswith("num_")} == {
        "num_reversed": 2,
        "num_outside": 3,
        "num_truths_outside": 2,
    }
    written = json.loads((tmp_path / "temporal_grounding.json").read_text())["results"]
    assert [written[f"v{i}"][0]["timestamp"] for i in range(4)] == [
        [10.123456789, 90],
        [20, 10],
        [-1, 30],
        [5, 6],
    ]
    lines = [
        line.split("##")[0]
        for line in (tmp_path / "temporal_grounding.txt").read_text().splitlines()
    ]
    assert lines == ["v0 10.123456789 90", "v1 20 10", "v2 -1 30", "v3 5 6", "v4 0 0"]
    assert numbers["mIoU"] == pytest.approx(((31.5 - 10.123456789) / 80 + 10 / 31) / 5)
    assert numbers["mIoU"] == pytest.approx(
        sum(
            temporal.best_iou([float(v) for v in line.split()[1:]], s.answer)
            for line, s in zip(lines, samples, strict=True)
        )
        / 5
    )


# NExT-GQA

TRUTHS = {
    "v1": {"duration": 30.0, "location": {"0": [[2, 5], [8, 12]], "1": [[10, 20]]}},
    "v2": {"location": {"0": [[4, 8]]}},
}


def test_next_gqa_by_hand() -> None:
    spans = {"v1_0": [8, 12], "v1_1": [15, 25], "v2_0": [0, 2]}
    answers = {
        "v1_0": {"answer": 1, "prediction": 1},
        "v1_1": {"answer": 2, "prediction": 2},
        "v2_0": {"answer": 0, "prediction": 0},
    }
    numbers = nextgqa.evaluate(spans, TRUTHS, answers)
    assert numbers == pytest.approx(
        {
            "Acc@GQA": 200 / 3,
            "mIoP": 50,
            "IoP@0.3": 200 / 3,
            "IoP@0.5": 200 / 3,
            "mIoU": 100 * (1 + 1 / 3) / 3,
            "IoU@0.3": 200 / 3,
            "IoU@0.5": 100 / 3,
            "Acc@QA": 100,
        }
    )
    assert "Acc@GQA" not in nextgqa.evaluate(spans, TRUTHS) and nextgqa.evaluate(spans, {}) == {}


def test_missing_and_points_under_both_rules() -> None:
    spans: dict[str, Any] = {"v1_0": [8, 12], "v1_1": [15, 15], "v2_0": None}
    ours = nextgqa.evaluate(spans, TRUTHS)
    assert ours["mIoP"] == pytest.approx(100 / 3) == ours["mIoU"]
    theirs = nextgqa.evaluate(spans, TRUTHS, drop_missing=True, point_hits=True)
    assert theirs["mIoP"] == 100 and theirs["mIoU"] == 50
    assert (
        nextgqa.evaluate({}, TRUTHS)["mIoP"] == 0
        and nextgqa.evaluate({}, TRUTHS, drop_missing=True) == {}
    )
    assert (
        nextgqa.iou_iop((2, 6), (5, 3)) == (pytest.approx(0), 0)
        or nextgqa.iou_iop((2, 6), (5, 3))[1] == 0
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(pair, min_size=1, max_size=3), pair)
def test_the_best_truth_counts_for_each_number_by_itself(truths: list[Any], span: Any) -> None:
    numbers = nextgqa.evaluate({"v_0": span}, {"v": {"location": {"0": truths}}})
    common = [max(0.0, min(span[1], e) - max(span[0], s)) for s, e in truths]
    union = [
        max(span[1] - span[0] + e - s - c, 1e-9) for c, (s, e) in zip(common, truths, strict=True)
    ]
    assert numbers["mIoU"] == pytest.approx(
        100 * max(c / u for c, u in zip(common, union, strict=True))
    )
    assert numbers["mIoP"] == pytest.approx(100 * max(c / (span[1] - span[0]) for c in common))


def test_next_gqa_benchmark_files(tmp_path: Path) -> None:
    task = GroundedQA()
    samples = [
        Sample(
            f"s{i}",
            "grounded_qa",
            "s",
            "q",
            {"choice": "B", "spans": [[10, 20]]},
            videos=("clips/77.mp4",),
            params={"duration": 30.0, "options": OPTIONS, "qid": i},
        )
        for i in range(3)
    ]
    texts = [
        '<answer>{"answer": "B", "time": [10, 20]}</answer>',
        '<answer>{"answer": "C", "time": [12, 13]}</answer>',
        "none",
    ]
    pairs = [(s, task.score(s, text, CTX)) for s, text in zip(samples, texts, strict=True)]
    pairs[2] = (samples[2], Score.failure("no_answer"))
    numbers = task.benchmark(pairs, tmp_path)
    assert numbers["Acc@GQA"] == pytest.approx(100 / 3) and numbers["mIoP"] == pytest.approx(
        200 / 3
    )
    assert numbers["official/Acc@GQA"] == 50 and numbers["official/mIoP"] == 100
    assert json.loads((tmp_path / "nextgqa_ground.json").read_text()) == {
        "77_0": [10, 20],
        "77_1": [12, 13],
    }
    assert json.loads((tmp_path / "nextgqa_res.json").read_text())["77_2"] == {
        "prediction": -1,
        "answer": 1,
    }
    assert numbers["mIoU"] / 100 == pytest.approx(
        task.summarize([score for _, score in pairs])["mIoU"]
    )
    assert (numbers["num_reversed"], numbers["num_outside"]) == (0, 0)
    with pytest.raises(DataError, match="found '77_0' twice"):
        task.benchmark([*pairs, pairs[0]], tmp_path)
    assert task.benchmark([], tmp_path) == {}
