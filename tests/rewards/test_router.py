"""Rubric: the total is the weighted sum of its parts, layers override, failures are recorded, not raised."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError
from mmrl.rewards.router import Part, Rubric
from mmrl.types import RewardContext, Sample

CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG)


def _sample(source: str = "a", **params: Any) -> Sample:
    return Sample("1", "sums", source, "?", 3, params=params)


def _constant(value: float = 0.5) -> Part:
    if isinstance(value, str):
        raise ConfigError(f"expected a number, found {value!r}")
    return lambda prediction, sample, ctx: value


def _equal() -> Part:
    return lambda prediction, sample, ctx: float(prediction == sample.answer)


def _rubric(**options: Any) -> Rubric:
    return Rubric({"right": _equal, "bonus": _constant}, {"right": 3, "bonus": 1}, **options)


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(0, 5), st.floats(0.01, 5), st.booleans())
def test_total_is_the_weighted_sum_of_its_parts(
    value: float, w1: float, w2: float, right: bool
) -> None:
    rubric = Rubric(
        {"right": _equal, "bonus": _constant},
        {"right": w1, "bonus": w2},
        {"bonus": {"value": value}},
    )
    score = rubric.score(3 if right else 4, _sample(), CTX)
    assert score.value == math.fsum(score.parts[k] * score.weights[k] for k in score.parts)
    assert math.fsum(score.weights.values()) == pytest.approx(1)
    assert 0 <= score.value <= 1 + 1e-12 and score.parsed


def test_layers_override_in_order() -> None:
    layer = {"bonus": {"value": 0.5}, "weights": {"right": 1}}
    rubric = _rubric(params={"bonus": {"value": 0.25}}, per_source={"b": layer})
    assert rubric.score(3, _sample(), CTX).parts == {"right": 1, "bonus": 0.25}
    second = rubric.score(3, _sample("b"), CTX)
    assert second.parts["bonus"] == 0.5 and second.weights == {"right": 0.5, "bonus": 0.5}
    third = rubric.score(3, _sample("b", reward={"bonus": {"value": 1.0}}), CTX)
    assert third.parts["bonus"] == 1.0 and third.weights == second.weights


def test_a_part_that_raises_is_a_recorded_zero() -> None:
    def broken() -> Part:
        def part(prediction: Any, sample: Sample, ctx: RewardContext) -> float:
            raise ZeroDivisionError("no items")

        return part

    score = Rubric({"ok": _constant, "bad": broken}, {"ok": 1, "bad": 1}).score(
        3, _sample(), CTX, metrics={"m": 0.5}
    )
    assert (score.value, score.parsed) == (0, False)
    assert score.reason == "reward_error: bad: ZeroDivisionError: no items"
    assert score.parts == {"ok": 0, "bad": 0} and score.metrics == {"m": 0.5}


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 1.5])
def test_values_out_of_range_are_errors_not_rewards(value: float) -> None:
    score = Rubric({"x": _constant}, {"x": 1}, {"x": {"value": value}}).score(3, _sample(), CTX)
    assert score.value == 0 and "expected a value in [0, 1]" in (score.reason or "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": {"bonsu": {}}}, "Did you mean 'bonus'"),
        ({"per_source": {"b": {"bonsu": {}}}}, "Did you mean 'bonus'"),
        ({"per_source": {"b": {"weights": {"bonsu": 1}}}}, "Did you mean 'bonus'"),
        ({"per_source": {"b": {"bonus": 3}}}, "as a mapping"),
        ({"per_source": {"b": {"bonus": {"value": "x"}}}}, "found 'x'"),
        ({"per_source": {"b": {"weights": {"bonus": -1}}}}, ">= 0"),
        ({"per_source": {"b": {"weights": {"bonus": 0, "right": 0}}}}, "at least one positive"),
    ],
)
def test_wrong_settings_fail_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _rubric(**options)


def test_wrong_settings_of_a_sample_are_found_by_check_and_recorded_by_score() -> None:
    sample = _sample(reward={"bonsu": {}})
    with pytest.raises(ConfigError, match="Did you mean 'bonus'"):
        _rubric().check(sample)
    assert "Did you mean 'bonus'" in (_rubric().score(3, sample, CTX).reason or "")


def _punishing() -> Part:
    part = lambda predicted, sample, ctx: -0.5  # noqa: E731
    part.low, part.high = -1.0, 0.0  # type: ignore[attr-defined]
    return part


def test_an_unreadable_text_gets_the_least_its_parts_can_pay_and_a_broken_reward_nothing() -> None:
    rubric = Rubric(
        {"accuracy": lambda: _constant(0.0), "length": _punishing},
        {"accuracy": 1.0, "length": 0.5},
        normalise=False,
    )
    wrong = rubric.score("x", _sample(), CTX)
    unread = rubric.failure("no_answer", _sample())
    assert (wrong.value, unread.value) == (-0.25, -0.5), (
        "being unreadable never pays better than being wrong"
    )
    assert unread.parts == {"accuracy": 0.0, "length": -1.0} and not unread.parsed
    assert rubric.failure("reward_error: x", _sample()).value == 0.0, "the text is not to blame"
    assert rubric.value_range == (-0.5, 1.0)


def test_a_sample_may_not_leave_the_range_its_task_declares() -> None:
    rubric = Rubric({"accuracy": lambda: _constant(0.0), "length": _punishing}, {"accuracy": 1.0})
    assert rubric.value_range == (0.0, 1.0)
    with pytest.raises(
        ConfigError, match=r"stays within \[0\.0, 1\.0\].*reaches \[-0\.5, 0\.5\].*per_source"
    ):
        rubric.check(_sample(reward={"weights": {"length": 1.0}}))
    rubric.check(_sample(reward={"weights": {"accuracy": 2.0}}))
