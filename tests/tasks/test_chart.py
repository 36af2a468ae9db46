"""Charts: ChartQA's rule to the letter as a mode and a metric, and the named departures of the default.

Run: pytest tests/tasks/test_chart.py
"""

from __future__ import annotations

import json
import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.registry import task_from_spec
from mmrl.tasks.chart import Chart, chartqa_correct, read_number, relaxed_correct
from mmrl.types import RewardContext, Sample
from tests.kits.clock_kit import takes_less

CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG, num_tokens=9, max_tokens=100)


def _sample(answer: Any) -> Sample:
    return Sample("1", "chart", "s", "How many?", answer)


def _score(task: Chart, text: str, answer: Any) -> Any:
    return task.score(_sample(answer), f"<answer>{text}</answer>", CTX)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", (12, False)),
        ("-1.5", (-1.5, False)),
        ("+.5", (0.5, False)),
        ("1,234,567.8", (1234567.8, False)),
        ("12 %", (12, True)),
        ("$1,000", (1000, False)),
        ("-$5", (-5, False)),
        ("1e3", (1000, False)),
        ("3.", (3, False)),
        ("1,23", None),
        ("12,34,567", None),
        ("1 2", None),
        ("12 people", None),
        ("nan", None),
        ("inf", None),
        ("1e999", None),
        ("", None),
        ("%", None),
        ("--1", None),
        ("0x10", None),
        ("1" * 400, None),
        ("٣", None),
        ("1_000", None),
    ],
)
def test_numbers_are_read_strictly(text: str, value: tuple[float, bool] | None) -> None:
    assert read_number(text) == value


@pytest.mark.parametrize(
    ("said", "truth", "ours", "official"),
    [
        ("95", "100", 1, 1),
        ("94.9", "100", 0, 0),
        ("105", "100", 1, 1),
        ("105.1", "100", 0, 0),
        ("-100", "100", 0, 0),
        ("Yes", "yes", 1, 1),
        ("yes sir", "yes", 0, 0),
        ("12%", "0.12", 1, 1),
        ("0.12", "12%", 1, 1),
        ("12%", "12%", 1, 1),
        ("12%", "12", 1, 0),
        ("12", "12%", 1, 0),
        ("1,234", "1234", 1, 0),
        ("$5", "5", 1, 0),
        ("0.0", "0", 1, 0),
        ("0", "0", 1, 1),
        ("0.01", "0", 0, 0),
        ("nan", "5", 0, 0),
        ("5", "nan", 0, 0),
        ("yes.", "Yes", 1, 0),
        ("1950", "2017", 0, 1),
        ("2017.0", "2017", 1, 1),
        ("1950", "2,017", 1, 0),
        ("3 4", "3", 0, 0),
        ("inf", "5", 0, 0),
        ("120%", "12", 0, 0),
    ],
)
def test_the_rule_and_its_named_departures(said: str, truth: str, ours: int, official: int) -> None:
    assert relaxed_correct(said, truth) == ours and chartqa_correct(said, truth) == official
    score = _score(Chart(), said, truth)
    assert (
        score.metrics["correct"] == score.parts["accuracy"] == ours
        and score.metrics["chartqa"] == official
    )
    assert _score(Chart(preset="chartqa"), said, truth).parts["accuracy"] == official


def test_years_are_exact_unless_told_otherwise() -> None:
    task, loose = Chart(), Chart(accuracy={"exact_years": False})
    assert _score(loose, "1950", "2017").parts["accuracy"] == 1
    assert _score(Chart(preset="chartqa"), "1950", "2017").parts["accuracy"] == 1, "as published"
    assert (
        _score(task, "1950", "2017").parts["accuracy"] == 0
        and _score(task, "2017", "2017").parts["accuracy"] == 1
    )
    assert (
        _score(task, "2,010", "2,017").parts["accuracy"] == 1
        and _score(task, "98", "100").parts["accuracy"] == 1
    )
    assert _score(Chart(accuracy={"tolerance": 0}), "98", "100").metrics["correct"] == 0


@settings(deadline=None)
@given(st.floats(1e-3, 1e6), st.floats(-0.2, 0.2))
def test_both_rules_follow_the_tolerance(truth: float, share: float) -> None:
    said = repr(truth * (1 + share))
    if abs(abs(share) - 0.05) > 1e-9:
        assert (
            relaxed_correct(said, repr(truth))
            == chartqa_correct(said, repr(truth))
            == (abs(share) < 0.05)
        )


@settings(deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_texts_give_an_answer(said: str, truth: str) -> None:
    assert relaxed_correct(said, truth) in (True, False) and chartqa_correct(said, truth) in (
        True,
        False,
    )
    assert relaxed_correct(said, said)
    number = read_number(said)
    assert number is None or math.isfinite(number[0])


@settings(deadline=None, max_examples=100)
@given(
    st.one_of(
        st.integers(-(10**6), 10**6).map(str),
        st.floats(0, 1e5).map(lambda x: f"{x:.2f}%"),
        st.sampled_from(["Yes", "é", "0"]),
    ),
    st.sampled_from(["relaxed", "chartqa"]),
    st.booleans(),
)
def test_gold_scores_one_and_wrong_zero(truth: str, mode: str, several: bool) -> None:
    task, sample = Chart(mode=mode), _sample([truth, "7 apples"] if several else truth)
    assert task.score(sample, task.gold(sample, CTX), CTX).value == pytest.approx(1)
    wrong = task.score(sample, task.wrong(sample, CTX), CTX)
    assert wrong.parsed and wrong.parts == {"accuracy": 0, "format": 1}


@pytest.mark.parametrize("said", ["42 43", "42 or 50", "42, 50", "it is 42", "42" * 200])
def test_hedging_and_floods_earn_nothing(said: str) -> None:
    assert _score(Chart(), said, "42").parts["accuracy"] == 0


def test_several_accepted_answers_and_lists() -> None:
    assert _score(Chart(), "blue", ["Blue", "navy"]).value == pytest.approx(1)
    assert _score(Chart(), "[1, 2]", "[1, 2]").value == pytest.approx(1)
    assert _score(Chart(), "[1, 2]", "12").reason == "not_text"


@pytest.mark.parametrize(
    ("text", "reason"), [("", "empty"), ("9" * 501, "answer_too_long"), ("[NaN]", "not_text")]
)
def test_failures_are_zeros_that_stay(text: str, reason: str) -> None:
    task = Chart()
    score = _score(task, text, "9")
    assert (score.value, score.parsed, score.reason) == (0, False, reason) and set(
        score.metrics.values()
    ) == {0}
    assert (
        task.summarize([score, _score(task, "9", "9")])["relaxed_accuracy"] == 0.5
        and task.summarize([]) == {}
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"mode": "relaxd"}, "Did you mean 'relaxed'"),
        ({"accuracy": {"tolerance": 2}}, r"tolerance to be a number in \[0, 1\]"),
        ({"accuracy": {"tolerence": 0}}, "Did you mean 'tolerance'"),
        ({"mode": "chartqa", "accuracy": {"exact_years": True}}, "expected tolerance"),
    ],
)
def test_wrong_parameters_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Chart(**params)


def test_rows_are_checked_and_the_examples_load(tmp_path: Path) -> None:
    task = task_from_spec("chart", {})
    samples = list(task.load(str(task.example_data(str(tmp_path / "made")))))
    assert len(samples) == 16 and {s.question[:5] for s in samples} == {"Which", "What "}
    rows = [task.score(s, task.gold(s, CTX), CTX) for s in samples]
    assert {r.value for r in rows} == {1} and task.summarize(rows)["relaxed_accuracy"] == 1
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(json.dumps({"question": "q", "answer": a}) for a in (12, 1.5, [3, "three"]))
    )
    assert [s.answer for s in task.load(str(path))] == ["12", "1.5", ["3", "three"]]
    path.write_text(json.dumps({"question": "q", "answer": True}))
    with pytest.raises(DataError, match="row 1: expected text in 'answer', found True"):
        list(task.load(str(path)))


def test_the_task_survives_pickling_and_hostile_answers() -> None:
    task = pickle.loads(pickle.dumps(Chart()))
    for text in ("1," * 200, "9" * 400_000, "1e" * 200, "." * 499, " " * 499 + "1", "$" * 400):
        assert takes_less(0.02, partial(_score, task, text, "42")).value <= 0.1
