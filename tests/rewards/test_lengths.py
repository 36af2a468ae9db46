"""Parts about form: the papers' corners, declared ranges, recorded errors, linear time.

Run: pytest tests/rewards/test_lengths.py
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.algorithms import soft_overlong_penalty
from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.rewards.lengths import PARTS, cosine_value, overlong_penalty, repeated_share
from mmrl.rewards.router import Rubric
from mmrl.tasks.base import Prediction
from mmrl.tasks.ocr import OCR
from mmrl.types import RewardContext, Sample
from tests.kits.clock_kit import takes_less

SAMPLE = Sample(
    "1", "ocr", "s", "q", "text", params={"reference_steps": ["look at the sign", "read the word"]}
)


def _ctx(num_tokens: int = 10, max_tokens: int = 1000) -> RewardContext:
    return RewardContext(1, 1, CoordFrame.ABS_ORIG, num_tokens=num_tokens, max_tokens=max_tokens)


def _pred(text: str = "<answer>text</answer>", correct: bool = True) -> Prediction:
    return Prediction("text", text, "text", correct)


def _value(
    part: str, ctx: RewardContext, correct: bool = True, text: str = "some text", **params: Any
) -> float:
    return PARTS[part](**params)(_pred(text, correct), SAMPLE, ctx)


# overlong


def test_overlong_at_the_paper_s_corners() -> None:
    lengths = (1, 80, 85, 90, 100, 101, 500)
    assert [_value("overlong", _ctx(n), max_length=100, cache=20) for n in lengths] == [
        1,
        1,
        0.75,
        0.5,
        0,
        0,
        0,
    ]
    penalties = [
        _value("overlong", _ctx(n), max_length=100, cache=20, penalty=True) for n in lengths
    ]
    assert penalties == [soft_overlong_penalty(n, 100, 20) for n in lengths]
    assert (PARTS["overlong"](penalty=True).low, PARTS["overlong"](penalty=True).high) == (-1, 0)


@settings(deadline=None)
@given(st.integers(0, 3000), st.integers(1, 1000), st.data())
def test_overlong_equals_the_trainer_s(length: int, max_length: int, data: Any) -> None:
    cache = data.draw(st.integers(1, max_length))
    assert overlong_penalty(length, max_length, cache) == soft_overlong_penalty(
        length, max_length, cache
    )


def test_overlong_takes_the_run_s_limit() -> None:
    assert [_value("overlong", _ctx(n, 1000)) for n in (800, 900, 1000)] == [1, 0.5, 0]
    assert _value("overlong", _ctx(1, 3), cache=500) == pytest.approx(2 / 3), (
        "the cache is never longer than the limit"
    )
    with pytest.raises(DataError, match=r"set parts\.overlong\.max_length"):
        _value("overlong", _ctx(5, 0))


# cosine


def test_cosine_at_vlm_r1_s_constants_with_the_wrong_branch_for_wrong_answers() -> None:
    right = [_value("cosine_length", _ctx(n), True) for n in (1, 512, 1024, 5000)]
    wrong = [_value("cosine_length", _ctx(n), False) for n in (1, 512, 1024, 5000)]
    assert right == pytest.approx([1, 0.75, 0.5, 0.5], abs=1e-4)
    assert wrong == pytest.approx([0, -0.25, -0.5, -0.5], abs=1e-4)
    assert max(wrong) < min(right), "VLM-R1 gives wrong answers the right ones' values"
    part = PARTS["cosine_length"]()
    assert (part.low, part.high) == (-0.5, 1)


@settings(deadline=None)
@given(st.floats(0, 1e9), st.floats(1, 1e6), st.floats(-5, 5), st.floats(-5, 5))
def test_cosine_stays_between_its_ends_and_is_monotone(
    length: float, limit: float, start: float, end: float
) -> None:
    here, further = (
        cosine_value(length, limit, start, end),
        cosine_value(length + limit / 7, limit, start, end),
    )
    assert min(start, end) <= here <= max(start, end)
    assert (further - here) * (end - start) >= -1e-9
    share = min(1, length / limit)
    assert here == pytest.approx(
        end + (start - end) * (1 + math.cos(math.pi * share)) / 2, abs=1e-9
    )


# window


@pytest.mark.parametrize(
    ("tokens", "correct", "value"),
    [(319, True, 0), (320, True, 1), (512, True, 1), (513, True, 0), (400, False, 0)],
)
def test_the_window_pays_correct_answers_only(tokens: int, correct: bool, value: float) -> None:
    assert _value("length_window", _ctx(tokens), correct) == value


def test_the_window_is_a_parameter() -> None:
    assert _value("length_window", _ctx(7), low=5, high=9) == 1
    assert _value("length_window", _ctx(0), False) == 0, "a wrong answer needs no length"


@pytest.mark.parametrize("part", ["overlong", "cosine_length", "length_window"])
def test_unknown_lengths_are_errors_not_free_rewards(part: str) -> None:
    with pytest.raises(DataError, match=r"ctx\.num_tokens"):
        _value(part, _ctx(0))


# repetition


def test_repetition_counts_ngrams() -> None:
    assert _value("repetition", _ctx(), text="a b c d e f g h") == 1
    assert _value("repetition", _ctx(), text="one two") == 1, "shorter than one 6-gram"
    text = "go left " * 6  # 12 words, 7 6-grams, 2 different
    assert _value("repetition", _ctx(), text=text) == pytest.approx(2 / 7)
    assert _value("repetition", _ctx(), text=text, penalty=True) == pytest.approx(-(1 - 2 / 7))
    assert _value("repetition", _ctx(), text="a a b", ngram=1) == pytest.approx(2 / 3)
    assert _value("repetition", _ctx(), text="哈哈哈哈哈哈哈哈") == pytest.approx(1 / 3)
    assert _value("repetition", _ctx(), text="abab", ngram=2, unit="char") == pytest.approx(2 / 3)
    part = PARTS["repetition"](penalty=True)
    assert (part.low, part.high) == (-1, 0)


@settings(deadline=None)
@given(st.text("ab ", max_size=80), st.integers(1, 8), st.sampled_from(["word", "char"]))
def test_repeated_share_equals_a_naive_count(text: str, n: int, unit: str) -> None:
    units = text.split() if unit == "word" else list(text)
    grams = [tuple(units[i : i + n]) for i in range(len(units) - n + 1)]
    expected = 1 - len(set(grams)) / len(grams) if grams else 0
    assert repeated_share(text, n, unit) == pytest.approx(expected)
    assert repeated_share(text + " " + text, n, unit) >= 0


# tags


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("<answer>b</answer>", 0.5),
        ("<think>a<answer>b</answer>", 0.75),
        ("b", 0),
        ("<answer>a</answer><answer>b</answer>", 0),
        ("<think><think>a</think><answer>b</answer>", 0.75),
    ],
)
def test_tags_pay_a_quarter_each_when_they_stand_once(text: str, value: float) -> None:
    assert _value("tags", _ctx(), text=text) == value


def test_v_triune_wants_tags_on_their_lines() -> None:
    assert (
        _value("tags", _ctx(), lines=True, text="<think>\na\n</think>\n<answer>\nb\n</answer>") == 1
    )
    assert (
        _value("tags", _ctx(), lines=True, text="<think>\na\n</think> <answer>\nb\n</answer>")
        == 0.5
    )
    assert _value("tags", _ctx(), lines=True, text="<think>a</think><answer>b</answer>") == 0
    special = "<|object_ref_start|>"
    assert _value("tags", _ctx(), expected=[special], text="<garbage object_ref_start") == 0, (
        "bars are no alternation"
    )


# all


@pytest.mark.parametrize(
    ("part", "params", "message"),
    [
        ("overlong", {"cach": 3}, "Did you mean 'cache'"),
        ("overlong", {"max_length": 5, "cache": 6}, "cache <= max_length"),
        ("overlong", {"max_length": 0}, "max_length"),
        ("cosine_length", {"correct": [1]}, "correct as"),
        ("cosine_length", {"wrong": "x"}, "wrong as"),
        ("cosine_length", {"max_len": 3}, "Did you mean 'max_length'"),
        ("length_window", {"low": 9, "high": 5}, "low <= high"),
        ("repetition", {"ngram": 0}, "ngram"),
        ("repetition", {"unit": "line"}, "'word' or 'char'"),
        ("tags", {"expected": "<a>"}, "list of tags"),
        ("tags", {"expected": []}, "list of tags"),
        ("process", {"distanc": "ned"}, "Did you mean 'distance'"),
    ],
)
def test_wrong_parameters_are_named(part: str, params: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PARTS[part](**params)


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=200), st.booleans(), st.integers(1, 2000))
def test_every_part_stays_in_its_range(text: str, correct: bool, tokens: int) -> None:
    for name, factory in PARTS.items():
        for params in ({}, {"penalty": True}) if name in ("overlong", "repetition") else ({},):
            part = factory(**params)
            value = part(_pred(text, correct), SAMPLE, _ctx(tokens))
            assert getattr(part, "low", 0) <= value <= getattr(part, "high", 1), name


@pytest.mark.parametrize(
    "text",
    [
        "a b " * 100_000,
        "ab" * 200_000,
        "<think>" * 57_000,
        "\n" * 400_000,
        "🙂" * 200_000,
        "<think>" + "1. x\n" * 60_000 + "</think>",
        "<think>" + "a. " * 100_000 + "</think>",
    ],
)
def test_hostile_texts_take_a_few_milliseconds(text: str) -> None:
    for factory in PARTS.values():
        takes_less(0.03, partial(factory(), _pred(text), SAMPLE, _ctx()))


def test_parts_join_a_task_s_rubric_and_survive_pickling_and_threads() -> None:
    weights = {
        "accuracy": 1.0,
        "format": 0.1,
        "overlong": 0.2,
        "cosine_length": 0.3,
        "repetition": 0.1,
        "tags": 0.1,
    }
    task = OCR(
        weights=weights,
        normalise=False,
        parts={"overlong": {"cache": 100}, "repetition": {"penalty": True}},
    )
    assert task.value_range == pytest.approx((-0.25, 1.7))
    ctx = _ctx(950)
    score = task.score(SAMPLE, "<answer>text</answer>", ctx)
    assert (
        score.parsed
        and score.parts["overlong"] == pytest.approx(0.5)
        and score.parts["repetition"] == 0
    )
    assert score.value == pytest.approx(sum(weights[k] * v for k, v in score.parts.items()))
    wrong = task.score(SAMPLE, "<answer>zzzz</answer>", ctx)
    assert wrong.parts["cosine_length"] < 0 < score.parts["cosine_length"]
    copy = pickle.loads(pickle.dumps(task))
    with ThreadPoolExecutor(8) as pool:
        assert set(
            pool.map(lambda _: copy.score(SAMPLE, "<answer>text</answer>", ctx).value, range(50))
        ) == {score.value}
    assert set(PARTS) == {
        "overlong",
        "cosine_length",
        "length_window",
        "repetition",
        "tags",
        "process",
    }


def test_a_part_that_cannot_judge_is_a_recorded_error() -> None:
    rubric = Rubric({"overlong": PARTS["overlong"]}, {"overlong": 1.0})
    score = rubric.score(_pred(), SAMPLE, _ctx(0))
    assert not score.parsed and (score.reason or "").startswith(
        "reward_error: overlong: expected ctx.num_tokens"
    )
