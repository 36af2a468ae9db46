"""Numeric task: declared rules per sample, presets of papers, official MRA, bad rows named."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.tasks.numeric import Numeric
from mmrl.types import RewardContext, Sample

CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG)
MODES = [
    {"mode": "exact"},
    {"mode": "mra"},
    {"mode": "mra", "accuracy": {"strict": True}},
    {"mode": "regression"},
    {"mode": "rounded"},
    {"mode": "tolerance", "accuracy": {"abs": 500.0}},
    {"preset": "easyvideo_r1"},
    {"preset": "vsi_bench"},
    {"preset": "mathvista_rule"},
]


def _sample(answer: Any = 42, **params: Any) -> Sample:
    return Sample("1", "numeric", "s", "How many?", answer, params=params)


def _score(task: Numeric, sample: Sample, answer: str) -> Any:
    return task.score(sample, f"<answer>{answer}</answer>", CTX)


def test_a_whole_number_is_asked_for_as_digits() -> None:
    for text in ("10/2", "5/1", " 10 / 2 ", "**10/2**"):
        for params in MODES[:2]:
            score = _score(Numeric(**params), _sample(5), text)
            assert (score.value, score.reason) == (0, "not_evaluated")
    assert _score(Numeric(), _sample("5.0"), "10/2").reason == "not_evaluated"
    assert (
        _score(Numeric(), _sample(2.5), "5/2").value == 1
        and _score(Numeric(), _sample("6/2"), "3/1").value == 1
    )
    assert _score(Numeric(), _sample(60, unit="km/h"), "60 km/h").value == 1, (
        "a unit is no division"
    )
    assert _score(Numeric(evaluated=False), _sample(5), "10/2").value == 1
    with pytest.raises(ConfigError, match="evaluated true or false"):
        Numeric(evaluated=1)


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(
        st.integers(-(10**9), 10**9),
        st.floats(-1e9, 1e9).map(lambda v: round(v, 3)),
        st.just("3/4"),
    ),
    st.sampled_from(MODES),
)
def test_gold_scores_one_and_wrong_zero(answer: Any, params: dict[str, Any]) -> None:
    task = Numeric(**params)
    if (
        params.get("mode") == "regression"
        and abs(float(answer if answer != "3/4" else 0.75)) < 0.001
    ):
        return  # Video-R1's formula gives a truth of 0 nothing
    if task.settings["parse"] == "first_token" and isinstance(answer, str):
        return
    sample = _sample(answer)
    assert task.score(sample, task.gold(sample, CTX), CTX).value == pytest.approx(1, abs=1e-4)
    wrong = task.score(sample, task.wrong(sample, CTX), CTX)
    assert wrong.parsed and wrong.parts["accuracy"] == 0


def test_video_r1_presets_add_up_as_the_paper_does() -> None:
    task = Numeric(preset="video_r1")
    for text, value in (("42", 2), ("42.0", 1), ("41", 1)):
        assert task.score(_sample(), f"<think>x</think><answer>{text}</answer>", CTX).value == value
    regression = Numeric(preset="video_r1_regression")
    assert regression.score(
        _sample(4), "<think>x</think><answer>5</answer>", CTX
    ).value == pytest.approx(1.75)


def _video_r1(said: float, true: float) -> float:
    """Their grpo.py, accuracy_reward of "regression"."""
    rel_diff = (abs(said - true) + 1e-9) / (abs(true) + 1e-9)
    return 1 - min(1.0, max(0.0, rel_diff))


def _easyvideo_r1(said: float, true: float) -> float:
    """The mean of their "regression" in video_reward.py over the thresholds 0.5, 0.55 .. 0.95."""
    rel_error = abs(said - true) / (abs(true) + 1e-8)
    return sum(rel_error < 1 - (0.5 + 0.05 * step) for step in range(10)) / 10


@pytest.mark.parametrize("said", ["3", "3.6", "3.5", "2", "9", "-3.5"])
def test_a_row_of_regression_is_scored_by_the_rule_of_the_preset(said: str) -> None:
    text, row = f"<think>x</think><answer>{said}</answer>", _sample(3.5, regression=True)

    def accuracy(row: Sample = row, **params: Any) -> float:
        return Numeric(answer_format="think", **params).score(row, text, CTX).parts["accuracy"]

    for preset in ("video_r1", "video_r1_regression"):
        assert accuracy(preset=preset) == pytest.approx(_video_r1(float(said), 3.5)), preset
    for preset in (
        {"preset": "easyvideo_r1"},
        {"preset": "easyvideo_r1_regression"},
        {"preset": "vsi_bench"},
        {},
    ):
        assert accuracy(**preset) == pytest.approx(_easyvideo_r1(float(said), 3.5)), preset
    exact = {"preset": "video_r1", "regression": {"mode": "tolerance", "abs": 0.2}}
    assert accuracy(**exact) == float(abs(float(said) - 3.5) <= 0.2)
    assert accuracy(_sample(3.5), preset="video_r1") == float(said == "3.5"), "no regression"


@pytest.mark.parametrize("rule", [{}, "mra", {"abs": 1}])
def test_a_rule_of_regression_names_its_mode(rule: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected numeric\.regression as a mode"):
        Numeric(regression=rule)


def test_the_sample_declares_its_own_precision_tolerance_unit_and_percent() -> None:
    task = Numeric()
    assert _score(task, _sample(1.23, precision=2), "1.2345").metrics["correct"] == 1
    assert _score(task, _sample(1.23, precision=2.0), "1.236").metrics["correct"] == 0
    assert _score(task, _sample(100, tolerance={"rel": 0.05}), "105").value == 1
    assert _score(task, _sample(100, tolerance={"abs": 1}), "102").parts["accuracy"] == 0
    assert _score(task, _sample(5, unit="cm"), "5 cm").value == 1
    assert _score(task, _sample(5, unit="cm"), "5 mm").reason == "not_a_number"
    assert _score(task, _sample(12, unit="%"), "12%").value == 1
    assert _score(task, _sample(12), "12%").reason == "unexpected_percent"
    assert _score(task, _sample("0.12", percent="fraction"), "12%").value == 1
    assert _score(Numeric(percent="keep"), _sample(12), "12%").value == 1
    of_one = Numeric(percent="fraction", answers="native")
    # a sentence means by % what the bare answer means
    for text in ("12%", "It is 12%.", "'12%' \u2603"):
        assert [
            _score(of_one, _sample(truth), text).parts["accuracy"] for truth in ("0.12", 12)
        ] == [1, 0], text


def test_correct_follows_the_tolerance_that_is_rewarded() -> None:
    task = Numeric(mode="tolerance", accuracy={"rel": 0.1})
    score = _score(task, _sample(100), "109")
    assert score.value == 1 and score.metrics["correct"] == 1


def test_mra_is_a_metric_of_every_mode_and_failures_stay_in_its_mean() -> None:
    task = Numeric(preset="vsi_bench")
    rows = [_score(task, _sample(4), text) for text in ("3", "4", "three")]
    assert [row.metrics["mra"] for row in rows] == pytest.approx([0.6, 1, 0])
    assert task.summarize(rows)["MRA"] == pytest.approx(1.6 / 3)
    assert _score(task, _sample(4), "4. metres").value == 1, (
        "first token, closing full stop removed"
    )
    assert Numeric().summarize([]) == {}
    assert Numeric(preset="mathvista_rule").summarize(rows)["mathvista_rule"] == pytest.approx(
        1 / 3
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<answer>41 or 42</answer>", "several_numbers"),
        ("<answer>forty two</answer>", "not_a_number"),
        ("<answer>٤٢</answer>", "not_a_number"),
        ("<answer>42</answer><answer>41</answer>", "several_answers"),
        ("42", "no_answer"),
        ("<answer>1e999</answer>", "not_finite"),
        ("<answer>" + "4" * 390_000 + "</answer>", "answer_too_long"),
    ],
)
def test_failures_are_recorded_zeros(text: str, reason: str) -> None:
    score = Numeric().score(_sample(), text, CTX)
    assert (score.value, score.parsed, score.reason, score.metrics) == (
        0,
        False,
        reason,
        {"correct": 0, "mra": 0},
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"answer": "12%", "params": {"unit": ""}}, 'declare params.unit "%"'),
        ({"answer": "5 cm"}, "belongs into params.unit"),
        ({"answer": None}, "a number, or its text"),
        ({"answer": True}, "a number, or its text"),
        ({"answer": "nan"}, "one finite"),
        ({"answer": 5, "params": {"precision": -1}}, "0 to 15"),
        ({"answer": 5, "params": {"precision": 1.5}}, "0 to 15"),
        ({"answer": 5, "params": {"tolerance": 0.1}}, "params.tolerance as"),
        ({"answer": 5, "params": {"tolerance": {"abs": "x"}}}, "params.tolerance as"),
        ({"answer": 5, "params": {"unit": 5}}, "params.unit as text"),
        ({"answer": 5, "params": {"percent": "yes"}}, "params.percent"),
    ],
)
def test_unusable_rows_say_what_to_fix(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"question": "How many?", **row}) + "\n")
    with pytest.raises(DataError, match="row 1: expected") as error:
        Numeric().load(str(file))
    assert words in str(error.value)


def test_wrong_parameters_are_refused_and_examples_load(tmp_path: Path) -> None:
    for params, words in (
        ({"mode": "mrs"}, "unknown mode"),
        ({"percent": "drop"}, "numeric.percent"),
        ({"parse": "last"}, "numeric.parse"),
        ({"accuracy": {"abs": 1}}, "unknown parameter"),
        ({"preset": "videor1"}, "Did you mean 'video_r1'"),
    ):
        with pytest.raises(ConfigError, match=words):
            Numeric(**params)
    assert len(list(Numeric().load(Numeric().example_data(str(tmp_path))))) == 12


def test_garbage_never_raises_the_reward_and_threads_agree() -> None:
    tails = ["", " 42", " or 42", "!", " (42)", ", 42", "\n42", "<42>"]
    texts = [
        (number, f"<answer>{number}{tail}</answer>{more}")
        for number in ("41", "42", "x")
        for tail in tails
        for more in ("", " 42", " 41")
    ]
    for params in MODES[:5]:
        task = Numeric(**params)
        line = [task.score(_sample(), text, CTX) for _, text in texts]
        for (number, _), score in zip(texts, line, strict=True):
            assert score.value <= _score(task, _sample(), number).value
        with ThreadPoolExecutor(8) as pool:
            assert (
                list(pool.map(lambda item, t=task: t.score(_sample(), item[1], CTX), texts)) == line
            )
