"""Alarms fire at once, once, and again only after they have cleared; their state survives a resume."""
from __future__ import annotations

import json
import math

import pytest

from mmrl.alarms import AlarmBoard
from mmrl.config import AlarmConfig

HEALTHY = {"step": 1, "train/reward/mean": 0.4, "train/parse_rate": 0.9, "train/reward/part/accuracy": 0.3,
           "train/entropy": 0.8, "train/logprob_gap/mean": 1e-4, "train/loss": 0.0}


def names(board: AlarmBoard, step: int, **changes: float | None) -> list[str]:
    return [alarm.name for alarm in board.check(step, {**HEALTHY, **{f"train/{k}": v for k, v in changes.items()}})]


def test_a_healthy_step_raises_none() -> None:
    board = AlarmBoard(AlarmConfig())
    assert all(names(board, step) == [] for step in range(1, 20))


@pytest.mark.parametrize(("changes", "expected"), [
    ({"loss": math.nan}, "non_finite"), ({"grad_norm": math.inf}, "non_finite"),
    ({"entropy": 1e-4}, "entropy_collapse"), ({"logprob_gap/mean": 0.2}, "logprob_gap"),
])
def test_an_alarm_fires_once_until_it_has_cleared(changes: dict[str, float], expected: str) -> None:
    board = AlarmBoard(AlarmConfig())
    assert names(board, 1, **changes) == [expected]
    assert names(board, 2, **changes) == []
    assert names(board, 3) == []
    assert names(board, 4, **changes) == [expected]


def test_a_non_finite_alarm_names_every_broken_value() -> None:
    [alarm] = AlarmBoard(AlarmConfig()).check(3, {**HEALTHY, "train/loss": math.nan, "train/kl": math.inf})
    assert "train/loss is nan" in alarm.message and "train/kl is inf" in alarm.message
    assert (alarm.step, alarm.severity) == (3, "error")


def test_rewards_are_stuck_only_after_steps_in_a_row_in_which_answers_parse() -> None:
    stuck = {"reward/part/accuracy": 0.0}
    board = AlarmBoard(AlarmConfig(zero_reward_steps=3))
    assert [names(board, s, **stuck) for s in (1, 2)] == [[], []]
    assert names(board, 3) == []  # one good step starts the count again
    assert [names(board, s, **stuck) for s in (4, 5, 6)] == [[], [], ["reward_stuck"]]
    unreadable = AlarmBoard(AlarmConfig(zero_reward_steps=1))
    assert names(unreadable, 1, parse_rate=0.5, **stuck) == []  # nothing parses: another problem, seen in parse_rate


def test_stuck_rewards_point_at_the_coordinate_frame() -> None:
    board = AlarmBoard(AlarmConfig(zero_reward_steps=1))
    row = {**HEALTHY, "train/reward/part/accuracy": 0.0, "train/outside_image": 0.75}
    [alarm] = board.check(1, row)
    assert "model.frame" in alarm.message and "75%" in alarm.message


def test_missing_measurements_raise_nothing() -> None:
    assert AlarmBoard(AlarmConfig()).check(1, {"step": 1, "train/entropy": None, "train/logprob_gap/mean": None}) == []


def test_only_listed_alarms_stop_the_run() -> None:
    board = AlarmBoard(AlarmConfig(stop=["entropy_collapse"]))
    alarms = board.check(1, {**HEALTHY, "train/loss": math.nan})
    assert board.must_stop(alarms) is None
    stopping = board.must_stop(board.check(2, {**HEALTHY, "train/entropy": 0.0}))
    assert stopping is not None and stopping.name == "entropy_collapse"


@pytest.mark.parametrize("cut", range(7))
def test_a_resumed_board_raises_what_the_uninterrupted_one_raises(cut: int) -> None:
    rows = [{**HEALTHY, "train/reward/part/accuracy": 0.0, "train/entropy": 0.001 if s in (2, 3, 6) else 1.0}
            for s in range(8)]
    whole = AlarmBoard(AlarmConfig(zero_reward_steps=4))
    expected = [[a.name for a in whole.check(s, row)] for s, row in enumerate(rows)]
    first = AlarmBoard(AlarmConfig(zero_reward_steps=4))
    found = [[a.name for a in first.check(s, row)] for s, row in enumerate(rows[:cut])]
    second = AlarmBoard(AlarmConfig(zero_reward_steps=4))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [[a.name for a in second.check(s, row)] for s, row in enumerate(rows[cut:], cut)]
    assert found == expected and ["reward_stuck"] in expected
