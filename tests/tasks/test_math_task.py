"""Math task: gold 1, wrong 0, boxes, presets, deadlines as recorded zeros, bad rows named."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError, RewardError
from mmrl.rewards.verifier_pool import Verdict, VerifierPool
from mmrl.task import Template
from mmrl.tasks.math_expression import Math
from mmrl.types import RewardContext, Sample
from mmrl.workers.scorer import Scorer
from mmrl.workers.scoring import ScoreJob, is_reward_failure

CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG)
DEEP = "(" * 50 + "x" + ")" * 50


def _sample(answer: str = r"\frac{5}{4}") -> Sample:
    return Sample("1", "math", "s", "Compute 3/4 + 1/2.", answer)


@pytest.mark.parametrize(
    "answer", [r"\frac{5}{4}", "x^2 - 1", "0.125", r"\{-3, 3\}", r"4\pi", "987654321", "-5"]
)
@pytest.mark.parametrize(
    "params", [{}, {"boxed": True}, {"preset": "v_triune"}, {"answer_format": "bare"}]
)
def test_gold_scores_one_and_wrong_zero(answer: str, params: dict[str, Any]) -> None:
    task, sample = Math(**params), _sample(answer)
    assert task.score(sample, task.gold(sample, CTX), CTX).value == pytest.approx(1)
    wrong = task.score(sample, task.wrong(sample, CTX), CTX)
    assert wrong.parsed and wrong.parts["accuracy"] == 0 and wrong.parts["format"] == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5/4", 1),
        ("1.25", 1),
        (r"\boxed{1\frac{1}{4}}", 1),
        (r"the sum is \boxed{5/4}", 1),
        ("$1.25$", 1),
        ("x = 5/4", 1),
        ("4/5", 0.1),
    ],
)
def test_spellings_of_the_truth(text: str, value: float) -> None:
    assert Math().score(_sample(), f"<answer>{text}</answer>", CTX).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<answer>3/4 + 1/2</answer>", "not_evaluated"),
        (r"<answer>\boxed{5/4} \boxed{5/4}</answer>", "several_boxed"),
        ("<answer>I do not know</answer>", "not_an_expression"),
        (r"\boxed{5/4}", "no_answer"),
        ("<answer>5/4</answer><answer>1</answer>", "several_answers"),
        ("<answer>" + "(" * 390_000 + "</answer>", "expression_too_long"),
        (r"<answer>5/4}</answer>", "unbalanced_braces"),
        ("<answer>$1$ or $5/4$</answer>", "several_expressions"),
    ],
)
def test_failures_are_recorded_zeros(text: str, reason: str) -> None:
    score = Math().score(_sample(), text, CTX)
    assert (score.value, score.parsed, score.reason, score.metrics) == (
        0,
        False,
        reason,
        {"correct": 0},
    )


def test_presets_are_the_papers_rules() -> None:
    text = "<think>x</think><answer>3/4 + 1/2</answer>"
    assert Math(preset="r1_v").score(_sample(), text, CTX).value == 2, (
        "math-verify pays for what is not computed"
    )
    assert Math(preset="r1_v").value_range == (0, 2)
    assert Math(preset="v_triune").score(_sample(), text, CTX).reason == "not_boxed"
    boxed = "<think>\nx\n</think>\n<answer>\n\\boxed{5/4}\n</answer>"
    assert Math(preset="v_triune").score(_sample(), boxed, CTX).value == pytest.approx(1)
    asked = Math(preset="v_triune").messages(_sample(), Template("t", CoordFrame.ABS_ORIG))[-1][
        "content"
    ][-1]["text"]
    assert "<answer>\n\\boxed{the expression}\n</answer>" in asked


@pytest.mark.slow
def test_a_hang_is_a_recorded_zero_and_counted() -> None:
    task = Math(deadline_s=3.0)
    start = time.monotonic()
    score = task.score(_sample("x"), f"<answer>{DEEP}</answer>", CTX)
    assert time.monotonic() - start < 40, "tried twice"
    assert (score.value, score.parsed, score.reason) == (0, False, "verifier_timeout")
    assert not is_reward_failure(score), "the text's fault, not the reward's"
    right = task.score(_sample("2x"), "<answer>x + x</answer>", CTX)
    assert right.value == 1
    assert task.summarize([score, right])["timeout_rate"] == 0.5
    assert task.summarize([]) == {}


@pytest.mark.slow
def test_reward_workers_are_daemonic_and_still_verify() -> None:
    specs = [("math", {"deadline_s": 5.0})]
    jobs = [
        ScoreJob(0, _sample(gold), f"<answer>{text}</answer>", CTX)
        for gold, text in (("2x", "x + x"), ("x", DEEP), ("x^2-1", "(x-1)(x+1)"), ("5", "5"))
    ]
    with Scorer(specs, [Math(deadline_s=5.0)], workers=1, timeout_s=60) as scorer:
        scores = scorer.score(jobs)
    assert [score.value for score in scores] == [1, 0, 1, 1]
    assert scores[1].reason == "verifier_timeout"


def test_a_verifier_that_cannot_start_is_a_reward_error_not_a_wrong_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: VerifierPool, *args: object) -> None:
        raise RewardError("expected the verifier to start")

    monkeypatch.setattr(VerifierPool, "call", broken)
    score = Math(deadline_s=0.7).score(_sample("2z"), "<answer>z + z</answer>", CTX)
    assert (
        score.value == 0
        and is_reward_failure(score)
        and "expected the verifier to start" in str(score.reason)
    )


def test_a_crash_of_the_verifier_is_a_reward_error_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(VerifierPool, "call", lambda self, *args: Verdict(None, "verifier_crash"))
    for _ in range(2):
        score = Math(deadline_s=0.6).score(_sample("2w"), "<answer>w + w</answer>", CTX)
        assert (
            is_reward_failure(score)
            and str(score.reason).startswith("reward_error")
            and "ended twice" in str(score.reason)
        )


def test_a_truth_sympy_cannot_read_is_counted() -> None:
    task = Math()
    score = task.score(_sample(r"5 \heartsuit &"), "<answer>5</answer>", CTX)
    assert score.value == pytest.approx(0.1) and score.detail["unverifiable"]
    assert task.summarize([score])["unverifiable_rate"] == 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (r"\boxed{1} or \boxed{2}", "several_boxed"),
        ("", "not_an_expression"),
        (None, "no text"),
        ("{5", "unbalanced_braces"),
        (["5"], "no text"),
        (True, "no text"),
    ],
)
def test_unusable_rows_say_what_to_fix(tmp_path: Path, value: Any, words: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"question": "What?", "answer": value}) + "\n")
    with pytest.raises(DataError, match="row 1: expected one mathematical expression") as error:
        Math().load(str(file))
    assert words in str(error.value)


def test_rows_may_hold_boxes_dollars_and_numbers(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(
        "".join(
            json.dumps({"question": "What?", "answer": value}) + "\n"
            for value in (r"$\boxed{5}$", 5, 2.5)
        )
    )
    assert [s.answer for s in Math().load(str(file))] == ["5", "5", "2.5"]
    assert len(list(Math().load(Math().example_data(str(tmp_path / "examples"))))) == 12


def test_wrong_parameters_are_refused() -> None:
    for params, words in (
        ({"boxed": "yes"}, "true or false"),
        ({"deadline_s": 0}, "above 0"),
        ({"deadline_s": True}, "above 0"),
        ({"mode": "sympy"}, "expected exact"),
        ({"box": True}, "Did you mean 'boxed'"),
    ):
        with pytest.raises(ConfigError, match=words):
            Math(**params)


def test_garbage_never_raises_the_reward_and_threads_agree() -> None:
    task = Math()
    tails = ["", " 5/4", " or 5/4", r" \boxed{5/4", "!", "$", " = 4", ", 5/4", "}"]
    texts = [
        (head, f"<answer>{head}{tail}</answer>") for head in ("5/4", "7", "x") for tail in tails
    ]
    line = [task.score(_sample(), text, CTX) for _, text in texts]
    for (head, _), score in zip(texts, line, strict=True):
        assert score.value <= max(task.score(_sample(), f"<answer>{head}</answer>", CTX).value, 0.1)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda item: task.score(_sample(), item[1], CTX), texts)) == line
