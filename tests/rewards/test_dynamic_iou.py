"""Dynamic IoU and its variants: published constants, f(1) = 1, monotone, and wrong settings refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.errors import ConfigError
from mmrl.rewards.dynamic_iou import (
    AVERAGE_THRESHOLDS,
    DYNAMIC_SCHEDULE,
    MODES,
    make_iou_reward,
    threshold_at,
)

share = st.floats(0, 1)
TRUE = (0.0, 0.0, 100.0, 10.0)


def _with_iou(iou: float) -> tuple[float, ...]:
    return (0.0, 0.0, 100.0 * iou, 10.0)


@pytest.mark.parametrize(
    ("progress", "threshold"),
    [
        (-1, 0.85),
        (0, 0.85),
        (0.10, 0.85),
        (0.1001, 0.95),
        (0.25, 0.95),
        (0.2501, 0.99),
        (1, 0.99),
        (7, 0.99),
    ],
)
def test_published_schedule(progress: float, threshold: float) -> None:
    assert threshold_at(progress) == threshold
    assert make_iou_reward("dynamic").threshold(progress) == threshold
    reward = make_iou_reward("dynamic")
    assert reward(_with_iou(threshold + 0.005), TRUE, progress) == pytest.approx(threshold + 0.005)
    assert reward(_with_iou(threshold - 0.005), TRUE, progress) == 0


def test_average_is_the_mean_over_the_published_thresholds() -> None:
    assert len(AVERAGE_THRESHOLDS) == 11 and AVERAGE_THRESHOLDS[-1] == 0.99
    assert make_iou_reward("average")(_with_iou(0.72), TRUE) == pytest.approx(0.72 * 5 / 11)
    assert make_iou_reward("average", binary=True)(_with_iou(0.72), TRUE) == pytest.approx(5 / 11)


@settings(deadline=None)
@given(st.sampled_from(sorted(MODES)), share, share, share, st.floats(0.3, 1))
def test_every_mode_is_monotone_bounded_and_one_at_the_truth(
    mode: str, a: float, b: float, progress: float, ceiling: float
) -> None:
    reward = make_iou_reward(mode)
    low, high = sorted((a, b))
    assert (
        0 <= reward.of_iou(low, progress, ceiling) <= reward.of_iou(high, progress, ceiling) + 1e-12
    )
    assert reward.of_iou(high, progress, ceiling) <= 1
    assert reward(TRUE, TRUE, progress) == 1
    assert reward((500, 0, 600, 10), TRUE, progress) == 0 or mode == "giou"
    assert reward((5, 5, 5, 5), TRUE, progress) == 0


@settings(deadline=None)
@given(share, share)
def test_smooth_lies_below_iou_and_tends_to_dynamic(iou: float, progress: float) -> None:
    assert make_iou_reward("smooth").of_iou(iou, progress, 1.0) <= iou + 1e-12
    if abs(iou - threshold_at(progress)) > 0.02 and iou < 1:
        sharp, hard = make_iou_reward("smooth", width=0.001, floor=0), make_iou_reward("dynamic")
        assert sharp.of_iou(iou, progress, 1) == pytest.approx(
            hard.of_iou(iou, progress, 1), abs=1e-4
        )


def test_smooth_separates_predictions_far_below_the_threshold() -> None:
    smooth, hard = make_iou_reward("smooth"), make_iou_reward("dynamic")
    assert smooth(_with_iou(0.6), TRUE, 1.0) > smooth(_with_iou(0.5), TRUE, 1.0) > 0
    assert hard(_with_iou(0.6), TRUE, 1.0) == hard(_with_iou(0.5), TRUE, 1.0) == 0


def test_a_ceiling_lowers_thresholds_only() -> None:
    reward = make_iou_reward("dynamic")
    assert reward(_with_iou(0.93), TRUE, 1.0) == 0
    assert reward(_with_iou(0.93), TRUE, 1.0, ceiling=0.93) == pytest.approx(0.93)
    assert reward(_with_iou(0.92), TRUE, 1.0, ceiling=0.93) == 0
    assert reward(_with_iou(0.0), TRUE, 1.0, ceiling=0.0) == 0


def test_power_two_is_perception_r1() -> None:
    assert make_iou_reward("iou", power=2)(_with_iou(0.5), TRUE) == 0.25


@pytest.mark.parametrize(
    ("mode", "params", "message"),
    [
        ("dynamik", {}, "Did you mean 'dynamic'"),
        ("static", {"treshold": 0.5}, "Did you mean 'threshold'"),
        ("giou", {"threshold": 0.5}, "expected none"),
        ("static", {"threshold": 50}, r"threshold to be a number in \[0, 1\], found 50"),
        ("static", {"threshold": True}, "found True"),
        ("static", {"threshold": float("nan")}, "found nan"),
        ("dynamic", {"schedule": [[0.5, 0.5]]}, "end at 1.0"),
        ("dynamic", {"schedule": [[0.5, 0.5], [0.4, 0.6], [1.0, 0.9]]}, "to rise"),
        ("dynamic", {"schedule": [[1.0, 85]]}, "schedule threshold"),
        ("dynamic", {"schedule": 0.5}, "pairs"),
        ("dynamic", {"schedule": []}, "pairs"),
        ("dynamic", {"schedule": "x"}, "pairs"),
        ("dynamic", {"schedule": [0.5, 1.0]}, "pairs"),
        ("dynamic", {"schedule": [[0.5]]}, "pairs"),
        ("dynamic", {"schedule": [[0.5, 0.5, 0.5], [1.0, 0.9]]}, "pairs"),
        ("dynamic", {"schedule": ["ab", [1.0, 0.9]]}, "pairs"),
        ("average", {"thresholds": []}, "expected thresholds"),
        ("average", {"thresholds": ["0.5"]}, "found '0.5'"),
        ("smooth", {"width": 0}, "width"),
        ("iou", {"power": -1}, "power"),
    ],
)
def test_wrong_settings_are_named(mode: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_iou_reward(mode, **params)


def test_a_schedule_from_yaml_lists_equals_the_constant() -> None:
    listed = make_iou_reward("dynamic", schedule=[list(pair) for pair in DYNAMIC_SCHEDULE])
    assert [listed.threshold(p / 20) for p in range(21)] == [
        threshold_at(p / 20) for p in range(21)
    ]
