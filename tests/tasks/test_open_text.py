"""Open text: gold 1, wrong 0, correct as declared (not ROUGE > 0.1), junk never pays, presets as published.

Run: pytest tests/tasks/test_open_text.py
"""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score import rouge_scorer

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.registry import task_from_spec
from mmrl.rewards.text import MODES
from mmrl.tasks.open_text import OpenText
from mmrl.types import RewardContext, Sample

CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG, num_tokens=9, max_tokens=100)
TRUTH = "a red circle and a blue square"


def _sample(answer: Any = TRUTH, **options: Any) -> Sample:
    return Sample("1", "open_text", "s", "What do you see?", answer, **options)


def _score(task: OpenText, text: str, answer: Any = TRUTH) -> Any:
    return task.score(_sample(answer), f"<answer>{text}</answer>", CTX)


_WORDS = ["red", "blue", "circle", "and", "a", "square", "eleven"]
sentences = st.lists(st.sampled_from(_WORDS), min_size=1, max_size=9).map(" ".join)


@settings(deadline=None, max_examples=100)
@given(
    st.one_of(sentences, st.sampled_from(["红色的圆", "yes", "12", "Ünïcode wörds"])),
    st.sampled_from(sorted(MODES)),
    st.sampled_from(["answer", "think", "bare"]),
)
def test_gold_scores_one_and_wrong_zero_in_every_mode(
    truth: str, mode: str, answer_format: str
) -> None:
    task, sample = OpenText(mode=mode, answer_format=answer_format), _sample([truth, "another"])
    gold, wrong = (
        task.score(sample, text, CTX) for text in (task.gold(sample, CTX), task.wrong(sample, CTX))
    )
    assert gold.value == pytest.approx(1) and gold.metrics["correct"] == 1
    assert (
        wrong.parsed
        and wrong.parts == {"accuracy": 0, "format": 1}
        and set(wrong.metrics.values()) == {0}
    )


def test_correct_is_declared_apart_from_the_reward() -> None:
    task = OpenText()
    vague = _score(task, "a picture and a frame")
    assert vague.metrics["rouge"] > 0.1 and vague.metrics["correct"] == 0, (
        "Video-R1 calls this one correct"
    )
    assert _score(task, "red circle, blue square").metrics["correct"] == 1
    assert (
        _score(OpenText(correct_by="exact", correct_from=1), "red circle, blue square").metrics[
            "correct"
        ]
        == 0
    )
    assert (
        _score(OpenText(correct_by="rouge", correct_from=0.1), "a picture and a frame").metrics[
            "correct"
        ]
        == 1
    )


def test_the_best_accepted_answer_counts() -> None:
    score = _score(OpenText(), "two shapes", [TRUTH, "two shapes"])
    assert score.value == pytest.approx(1) and score.detail["gold_text"] == f"{TRUTH} | two shapes"


@pytest.mark.parametrize("preset", ["video_r1", "easyvideo_r1"])
@pytest.mark.parametrize(
    "text", ["red circle", "red-circle & BLUE square", "two circles, squared", "yes"]
)
@pytest.mark.parametrize("truth", [TRUTH, "yes"])
def test_presets_equal_the_rouge_score_package(preset: str, text: str, truth: str) -> None:
    task = OpenText(preset=preset)
    score = task.score(_sample(truth), f"<think>t</think><answer>{text}</answer>", CTX)
    theirs = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True).score(
        truth, text
    )
    accuracy = sum(s.fmeasure for s in theirs.values()) / 3
    assert score.parts["accuracy"] == pytest.approx(accuracy)
    assert score.value == pytest.approx(
        accuracy + 1 if preset == "video_r1" else 0.9 * accuracy + 0.1
    )


@settings(deadline=None, max_examples=80)
@given(
    sentences,
    st.sampled_from(["☃☃☃", " zzz qqq zzz", "\n#####\n", " zzz" * 300]),
    st.sampled_from(["rouge", "token_f1"]),
)
def test_junk_never_pays(said: str, junk: str, mode: str) -> None:
    task = OpenText(mode=mode)
    value = _score(task, said).value
    assert _score(task, said + junk).value <= value + 1e-12
    assert task.score(_sample(), f"<answer>{said}</answer>{junk}", CTX).value <= value


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=200))
def test_any_text_gets_a_bounded_score(text: str) -> None:
    score = _score(OpenText(), text)
    assert 0 <= score.value <= 1 and (score.parsed or score.reason)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "empty"), ("[NaN, NaN, NaN, NaN]", "not_text"), ("w " * 5_000, "answer_too_long")],
)
def test_failures_are_zeros_that_stay(text: str, reason: str) -> None:
    task = OpenText()
    score = _score(task, text)
    assert (score.value, score.parsed, score.reason) == (0, False, reason) and set(
        score.metrics.values()
    ) == {0}
    assert (
        task.summarize([score, _score(task, TRUTH)])["parse_failure_rate"] == 0.5
        and task.summarize([]) == {}
    )


def test_code_answers_keep_their_spaces_on_request() -> None:
    task = OpenText(mode="exact", normalise_text=[])
    assert (
        _score(task, "a / b", "a / b").parts["accuracy"] == 1
        and _score(task, "a/b", "a / b").parts["accuracy"] == 0
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"mode": "token_f"}, "Did you mean 'token_f1'"),
        ({"correct_by": "rogue"}, "Did you mean 'rouge'"),
        ({"correct_from": 0}, "correct_from"),
        ({"normalise_text": "lower"}, "as a list"),
        ({"correctfrom": 1}, "Did you mean"),
    ],
)
def test_wrong_parameters_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenText(**params)


def test_rows_are_checked_and_the_examples_load(tmp_path: Path) -> None:
    task = task_from_spec("open_text", {})
    samples = list(task.load(str(task.example_data(str(tmp_path / "made")))))
    assert len(samples) == 16
    assert all(task.score(s, task.gold(s, CTX), CTX).value == pytest.approx(1) for s in samples)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"question": "q", "answer": {"a": 1}}))
    with pytest.raises(DataError, match="row 1: expected text in 'answer'"):
        list(task.load(str(tmp_path / "bad.jsonl")))


def test_scoring_works_in_threads_and_after_pickling() -> None:
    task = OpenText()
    texts = [f"<answer>red circle {i} square</answer>" for i in range(200)]
    copy = pickle.loads(pickle.dumps(task))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda t: copy.score(_sample(), t, CTX), texts)) == [
            task.score(_sample(), t, CTX) for t in texts
        ]
