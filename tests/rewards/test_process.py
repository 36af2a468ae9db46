"""Process reward: the reference itself earns 1, order matters, junk costs, repeats gain nothing; equal to a naive search.

Run: pytest tests/rewards/test_process.py
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.rewards.process import DISTANCES, dtw_similarity, process, reasoning_steps, split_steps
from mmrl.rewards.router import Rubric
from mmrl.rewards.text import normalised_edit_distance, token_f1
from mmrl.tasks.base import Prediction
from mmrl.types import RewardContext, Sample

CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG, num_tokens=10, max_tokens=100)
STEPS = ["find the red car", "count its wheels", "add the wheels of the bike"]
step = st.lists(
    st.sampled_from(["find", "red", "car", "count", "wheels"]), min_size=1, max_size=4
).map(" ".join)
steps = st.lists(step, min_size=1, max_size=4)


def _sample(reference: Any = STEPS) -> Sample:
    return Sample(
        "7",
        "math",
        "s",
        "q",
        "6",
        params={} if reference is None else {"reference_steps": reference},
    )


def _text(thoughts: list[str]) -> str:
    return "<think>" + "\n".join(thoughts) + "</think><answer>6</answer>"


def _earned(text: str, **params: Any) -> float:
    return process(**params)(Prediction(6, text, "6", True), _sample(), CTX)


def _paths(n: int, m: int) -> list[list[tuple[int, int]]]:
    """All monotone alignments of n with m steps."""
    if (n, m) == (1, 1):
        return [[(0, 0)]]
    before = [pair for pair in ((n - 1, m), (n, m - 1), (n - 1, m - 1)) if min(pair) >= 1]
    return [[*path, (n - 1, m - 1)] for pair in before for path in _paths(*pair)]


@settings(deadline=None, max_examples=60)
@given(steps, steps, st.sampled_from(sorted(DISTANCES)))
def test_the_cost_is_the_least_over_all_alignments(
    a: list[str], b: list[str], distance: str
) -> None:
    def cost(x: str, y: str) -> float:
        return 1 - token_f1(x, y) if distance == "token_f1" else normalised_edit_distance(x, y)

    np.testing.assert_allclose(
        DISTANCES[distance](a, b), [[cost(x, y) for y in b] for x in a], atol=1e-12
    )
    least = min(sum(cost(a[i], b[j]) for i, j in path) for path in _paths(len(a), len(b)))
    assert dtw_similarity(a, b, distance) == pytest.approx(max(0, 1 - least / len(b)))


@settings(deadline=None)
@given(steps, steps, st.integers(0, 3))
def test_foreign_steps_cost_and_repeated_steps_gain_nothing(
    a: list[str], b: list[str], at: int
) -> None:
    plain = dtw_similarity(a, b)
    assert 0 <= plain <= 1 and dtw_similarity(b, b) == pytest.approx(1)
    assert dtw_similarity([*a, "zzz qqq"], b) <= plain + 1e-12
    assert dtw_similarity([*a[:at], "zzz qqq", *a[at:]], b) <= plain + 1e-12
    here = min(at, len(a) - 1)
    assert dtw_similarity([*a[:here], a[here], *a[here:]], b) <= plain + 1e-12
    assert dtw_similarity([*b, "zzz qqq"], b) < 1


def test_the_order_of_the_steps_matters() -> None:
    values = {
        order: dtw_similarity([STEPS[i] for i in order], STEPS)
        for order in itertools.permutations(range(3))
    }
    assert values[0, 1, 2] == 1 and all(
        value < 1 for order, value in values.items() if order != (0, 1, 2)
    )
    assert values[2, 1, 0] < 0.6


def test_steps_are_lines_or_sentences_without_their_numbers() -> None:
    assert split_steps("1. Look.\n\nStep 2: count it\n- add 3.5") == [
        "Look.",
        "count it",
        "add 3.5",
    ]
    assert split_steps("Look left. Then count 3.5 cars! 好。再数") == [
        "Look left.",
        "Then count 3.5 cars!",
        "好。",
        "再数",
    ]
    assert split_steps(" \n ") == [] and split_steps("3 cars") == ["3 cars"]


def test_thoughts_are_what_stands_before_the_answer() -> None:
    assert reasoning_steps("<think>a\nb</think><answer>c\nd</answer>") == (["a", "b"], 0)
    assert reasoning_steps("a\nb\n<answer>c</answer>") == (["a", "b"], 0)
    assert reasoning_steps("only text") == ([], 0) == reasoning_steps("<answer>c</answer>")
    many, unread = reasoning_steps(_text([f"s{i}" for i in range(100)]))
    assert len(many) == 32 and unread == 68


def test_the_part_reads_the_thoughts_of_the_text() -> None:
    assert _earned(_text(STEPS)) == 1 and _earned(_text(STEPS), distance="ned") == 1
    assert _earned(_text([f"{i}. {s.upper()}" for i, s in enumerate(STEPS, 1)])) == 1
    assert _earned("<answer>6</answer>") == 0 == _earned(_text(["zzz"] * 3))
    assert _earned(_text(STEPS[:2])) < 1 and _earned(_text(STEPS), min_steps=4) == 0 == _earned(
        _text(STEPS), max_steps=2
    )
    assert _earned(_text(STEPS * 100)) == 0, "steps beyond the bound count as foreign"


@pytest.mark.parametrize("reference", [None, [], "find it", [3], ["a", " "]])
def test_a_sample_without_reference_steps_is_a_recorded_error(reference: Any) -> None:
    part = process()
    with pytest.raises(
        DataError, match=r"params\.reference_steps of sample '7' as a list of texts.*no weight"
    ):
        part(Prediction(6, _text(STEPS), "6", True), _sample(reference), CTX)
    score = Rubric({"process": process}, {"process": 1}).score(
        Prediction(6, "", "6", True), _sample(reference), CTX
    )
    assert not score.parsed and (score.reason or "").startswith(
        "reward_error: process: expected params.reference_steps"
    )


def test_too_many_reference_steps_are_an_error() -> None:
    with pytest.raises(DataError, match="1 to 32 reference steps, found 33"):
        dtw_similarity(["a"], ["b"] * 33)
    assert dtw_similarity([], ["b"]) == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"distance": "nde"}, "Did you mean 'ned'"),
        ({"min_steps": 0}, "min_steps"),
        ({"min_steps": 5, "max_steps": 2}, "found 5"),
        ({"steps": 1}, "unknown parameter 'steps'"),
    ],
)
def test_wrong_parameters_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        process(**params)
