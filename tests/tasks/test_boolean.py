"""Yes/no questions: whole words only, gold 1, the other word 0, bad rows named."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.tasks.boolean import Boolean, read_truth
from mmrl.types import RewardContext, Sample, StopReason

CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG)


def _sample(answer: bool = True) -> Sample:
    return Sample("1", "boolean", "s", "Is it red?", answer)


@pytest.mark.parametrize("truth", [True, False])
@pytest.mark.parametrize("answer_format", ["answer", "think", "bare"])
def test_gold_scores_one_and_wrong_zero(truth: bool, answer_format: str) -> None:
    task = Boolean(answer_format=answer_format)
    assert task.gold_answer(_sample(truth), CTX) == ("yes" if truth else "no")
    assert task.score(_sample(truth), task.gold(_sample(truth), CTX), CTX).value == 1
    wrong = task.score(_sample(truth), task.wrong(_sample(truth), CTX), CTX)
    assert wrong.parsed and wrong.parts == {"accuracy": 0, "format": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<answer>yesterday</answer>", "not_yes_or_no"),
        ("<answer>I do not know</answer>", "not_yes_or_no"),
        ("<answer>yes no</answer>", "both_answers"),
        ("<answer>Yes, it is red.</answer>", "not_yes_or_no"),
        ("yes", "no_answer"),
        ("<think>yes</think><answer>maybe</answer>", "not_yes_or_no"),
        ("<answer>yes</answer><answer>no</answer>", "several_answers"),
        ("<answer>" + "yes " * 90_000 + "</answer>", "answer_too_long"),
        ("<answer></answer>", "not_yes_or_no"),
    ],
)
def test_failures_earn_nothing_for_either_truth(text: str, reason: str) -> None:
    for truth in (True, False):
        score = Boolean().score(_sample(truth), text, CTX)
        assert (score.value, score.parsed, score.reason, score.metrics) == (
            0,
            False,
            reason,
            {"correct": 0},
        )


def test_neither_word_on_both_sides_is_no_match() -> None:
    with pytest.raises(ValueError, match='expected true, false, "yes" or "no"'):
        read_truth("maybe")


def test_a_cut_answer_is_called_truncated() -> None:
    cut = RewardContext(1, 1, CoordFrame.ABS_ORIG, stop=StopReason.LENGTH)
    assert Boolean().score(_sample(), "<answer>ye", cut).reason == "truncated"


@pytest.mark.parametrize(
    ("value", "truth"),
    [(True, True), ("Yes", True), ("true.", True), (False, False), ("no", False)],
)
def test_files_hold_booleans_or_words(value: Any, truth: bool) -> None:
    assert read_truth(value) is truth


@pytest.mark.parametrize("value", [1, 0, None, "y", "", ["yes"], "yesterday"])
def test_other_truths_are_row_errors(tmp_path: Path, value: Any) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(
        json.dumps({"question": "Is it?", "answer": True})
        + "\n"
        + json.dumps({"question": "Is it?", "answer": value})
        + "\n"
    )
    with pytest.raises(DataError, match="row 2: expected true, false"):
        Boolean().load(str(file))


def test_examples_are_balanced_and_the_summary_shows_a_constant_policy(tmp_path: Path) -> None:
    task = Boolean()
    samples = list(task.load(task.example_data(str(tmp_path))))
    assert len(samples) == 12 and sum(s.answer for s in samples) == 6
    always = [task.score(s, "<answer>yes</answer>", CTX) for s in samples]
    failed = task.score(samples[0], "well", CTX)
    summary = task.summarize([*always, failed])
    assert summary["yes_rate"] == 1 and summary["parse_failure_rate"] == pytest.approx(1 / 13)
    assert task.summarize([]) == {} and task.summarize([failed])["yes_rate"] == 0
    with pytest.raises(ConfigError, match="expected exact"):
        Boolean(mode="fuzzy")


def test_garbage_behind_an_answer_never_raises_the_reward_and_threads_agree() -> None:
    task = Boolean()
    texts = [
        f"<answer>{word}{tail}</answer>{more}"
        for word in ("yes", "no", "well")
        for tail in ("", " yes", ".", " no", "🙂")
        for more in ("", " yes", " no")
    ]
    line = [task.score(_sample(), text, CTX) for text in texts]
    for text, score in zip(texts, line, strict=True):
        word = text[8:].split("<")[0][:4].rstrip(" .🙂")
        assert score.value <= task.score(_sample(), f"<answer>{word}</answer>", CTX).value
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: task.score(_sample(), text, CTX), texts)) == line
