"""Alarms fire at once, once, and again only after they have cleared; their state survives a resume."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from mmrl.config import AlarmConfig
from mmrl.diagnostics.diagnosis import diagnose, signal_share, trained
from mmrl.training.alarms import AlarmBoard

HEALTHY = {
    "step": 1,
    "train/reward/mean": 0.4,
    "train/parse_rate": 0.9,
    "train/reward/part/accuracy": 0.3,
    "train/entropy": 0.8,
    "train/logprob_gap/mean": 1e-4,
    "train/loss": 0.0,
}


def names(board: AlarmBoard, step: int, **changes: float | None) -> list[str]:
    return [
        alarm.name
        for alarm in board.check(step, {**HEALTHY, **{f"train/{k}": v for k, v in changes.items()}})
    ]


def test_a_healthy_step_raises_none() -> None:
    board = AlarmBoard(AlarmConfig())
    assert all(names(board, step) == [] for step in range(1, 20))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss": math.nan}, "non_finite"),
        ({"grad_norm": math.inf}, "non_finite"),
        ({"entropy": 1e-4}, "entropy_collapse"),
        ({"logprob_gap/mean": 0.2}, "logprob_gap"),
    ],
)
def test_an_alarm_fires_once_until_it_has_cleared(changes: dict[str, float], expected: str) -> None:
    board = AlarmBoard(AlarmConfig())
    assert names(board, 1, **changes) == [expected]
    assert names(board, 2, **changes) == []
    assert names(board, 3) == []
    assert names(board, 4, **changes) == [expected]


def test_a_density_may_have_a_negative_entropy_and_rounding_a_collapsed_one() -> None:
    board = AlarmBoard(AlarmConfig())
    assert names(board, 1, entropy=-0.76) == []
    assert names(board, 2, entropy=-1e-8) == ["entropy_collapse"]


def test_a_critic_that_predicts_nothing_is_named_where_there_is_something_to_predict() -> None:
    off = {"critic/explained_variance": -1.5, "critic/value": 3.0, "critic/return": 0.4}
    board = AlarmBoard(AlarmConfig(steps=2))
    assert [names(board, s, **off) for s in (1, 2, 3)] == [[], ["critic"], []]
    [finding] = diagnose({**HEALTHY, **{f"train/{k}": v for k, v in off.items()}}, AlarmConfig())
    assert (
        "explain -1.5 of the variance" in finding.message
        and "mean value 3, mean return 0.4" in finding.message
    )
    quiet = AlarmBoard(AlarmConfig(steps=1))
    assert names(quiet, 1, **{**off, "reward/std": 0.001}) == []
    assert names(quiet, 2, **{**off, "critic/explained_variance": -0.4}) == []
    assert names(quiet, 3, **off) == ["critic"], "robots say no reward/std"


def test_a_non_finite_alarm_names_every_broken_value() -> None:
    [alarm] = AlarmBoard(AlarmConfig()).check(
        3, {**HEALTHY, "train/loss": math.nan, "train/kl": math.inf}
    )
    assert "train/loss is nan" in alarm.message and "train/kl is inf" in alarm.message
    assert (alarm.step, alarm.severity) == (3, "error")


def test_rewards_are_stuck_only_after_steps_in_a_row_in_which_answers_parse() -> None:
    stuck = {"reward/part/accuracy": 0.0}
    board = AlarmBoard(AlarmConfig(zero_reward_steps=3))
    assert [names(board, s, **stuck) for s in (1, 2)] == [[], []]
    assert names(board, 3) == []  # one good step starts the count again
    assert [names(board, s, **stuck) for s in (4, 5, 6)] == [[], [], ["reward_stuck"]]
    unreadable = AlarmBoard(AlarmConfig(zero_reward_steps=1))
    # nothing parses: another problem, seen in parse_rate
    assert names(unreadable, 1, parse_rate=0.5, **stuck) == []


def test_stuck_rewards_point_at_the_coordinate_frame() -> None:
    board = AlarmBoard(AlarmConfig(zero_reward_steps=1))
    row = {**HEALTHY, "train/reward/part/accuracy": 0.0, "train/outside_image": 0.75}
    [alarm] = board.check(1, row)
    assert "model.frame" in alarm.message and "75%" in alarm.message


def mixed(step: int, **accuracy: float | None) -> dict[str, float | None]:
    """A step's row of sources with these accuracies (None: the step holds nothing of the source)."""
    row: dict[str, float | None] = dict(HEALTHY)
    for source, value in accuracy.items():
        if value is not None:
            row |= {
                f"train/{source}/parse_rate": 0.95,
                f"train/{source}/reward/mean": 0.1 + value,
                f"train/{source}/reward/part/accuracy": value,
            }
    return row


def test_one_dead_source_is_named_however_well_the_others_do() -> None:
    board = AlarmBoard(AlarmConfig(zero_reward_steps=3))
    rows = [mixed(s, **{"good": 0.6, "MMMU/dead": 0.0}) for s in range(1, 6)]
    raised = [
        board.check(s, {**row, "train/MMMU/dead/outside_image": 0.5})
        for s, row in enumerate(rows, 1)
    ]
    assert [len(r) for r in raised] == [0, 0, 1, 0, 0], "once, not every step"
    [alarm] = raised[2]
    assert (
        alarm.name == "reward_stuck"
        and "'MMMU/dead'" in alarm.message
        and "good" not in alarm.message
    )
    assert "(95%)" in alarm.message and "3 steps" in alarm.message and "50%" in alarm.message
    assert AlarmBoard(AlarmConfig(stop=["reward_stuck"])).must_stop(raised[2]) is alarm


def test_a_source_is_counted_over_the_steps_that_hold_it_and_again_after_it_recovered() -> None:
    board = AlarmBoard(AlarmConfig(zero_reward_steps=2))
    values = [0.0, None, None, 0.0, None, 0.0, 0.3, 0.0, 0.0]
    raised = [
        [a.message for a in board.check(s, mixed(s, rare=v, often=0.5))]
        for s, v in enumerate(values, 1)
    ]
    assert [len(r) for r in raised] == [0, 0, 0, 1, 0, 0, 0, 0, 1]
    unreadable = AlarmBoard(AlarmConfig(zero_reward_steps=1))
    assert unreadable.check(1, {**mixed(1, odd=0.0), "train/odd/parse_rate": 0.5}) == []


def test_where_everything_is_stuck_one_alarm_names_the_sources_and_later_ones_get_their_own() -> (
    None
):
    board = AlarmBoard(AlarmConfig(zero_reward_steps=2))
    whole = {"train/reward/part/accuracy": 0.0}
    [] = board.check(1, {**mixed(1, a=0.0, b=0.0), **whole})
    [alarm] = board.check(2, {**mixed(2, a=0.0, b=0.0, late=0.0), **whole})
    assert "'a', 'b'" in alarm.message and "late" not in alarm.message
    [later] = board.check(3, {**mixed(3, a=0.0, late=0.0), **whole})
    assert "'late'" in later.message and "'a'" not in later.message
    assert board.check(4, mixed(4, a=0.0, late=0.0)) == [], (
        "named once, though the whole step has recovered"
    )


def test_a_board_saved_before_sources_were_counted_can_be_continued() -> None:
    board = AlarmBoard(AlarmConfig(zero_reward_steps=1))
    board.load_state_dict({"zero_steps": 0, "active": ["entropy_collapse"]})
    assert [a.name for a in board.check(1, {**mixed(1, a=0.0, b=0.2), "train/entropy": 0.0})] == [
        "reward_stuck"
    ]


def test_a_task_of_which_nothing_finishes_is_named_once_and_counted_over_the_steps_that_played_it() -> (
    None
):
    board = AlarmBoard(AlarmConfig(zero_reward_steps=2))
    shares = [1.0, None, 1.0, 1.0, 0.9, 1.0, None, 1.0]
    raised = []
    for step, share in enumerate(shares, 1):
        if step == 4:  # resumed
            board, state = (
                AlarmBoard(AlarmConfig(zero_reward_steps=2)),
                json.loads(json.dumps(board.state_dict())),
            )
            board.load_state_dict(state)
        raised.append(
            board.check(
                step,
                {
                    **HEALTHY,
                    "train/libero_object/3/failed": share,
                    "train/reach/failed": 0.5,
                    "train/groups/failed": 1.0,
                    "train/groups/asked": 4.0,
                },
            )
        )
    assert [len(r) for r in raised] == [0, 0, 1, 0, 0, 0, 0, 1], (
        "not for a number of failed groups that happens to be 1"
    )
    [alarm] = raised[2]
    assert (alarm.name, alarm.severity) == ("task_failed", "error")
    assert (
        "'libero_object/3'" in alarm.message
        and "2 steps" in alarm.message
        and "failures.jsonl says why" in alarm.message
    )


def test_missing_measurements_raise_nothing() -> None:
    assert (
        AlarmBoard(AlarmConfig()).check(
            1, {"step": 1, "train/entropy": None, "train/logprob_gap/mean": None}
        )
        == []
    )


def test_only_listed_alarms_stop_the_run() -> None:
    board = AlarmBoard(AlarmConfig(stop=["entropy_collapse"]))
    alarms = board.check(1, {**HEALTHY, "train/loss": math.nan})
    assert board.must_stop(alarms) is None
    stopping = board.must_stop(board.check(2, {**HEALTHY, "train/entropy": 0.0}))
    assert stopping is not None and stopping.name == "entropy_collapse"


@pytest.mark.parametrize("cut", range(7))
def test_a_resumed_board_raises_what_the_uninterrupted_one_raises(cut: int) -> None:
    rows = [
        {
            **mixed(s, dead=0.0, fine=0.4),
            "train/reward/part/accuracy": 0.0 if s < 6 else 0.4,
            "train/entropy": 0.001 if s in (2, 3, 6) else 1.0,
        }
        for s in range(8)
    ]
    whole = AlarmBoard(AlarmConfig(zero_reward_steps=4))
    expected = [[a.name for a in whole.check(s, row)] for s, row in enumerate(rows)]
    first = AlarmBoard(AlarmConfig(zero_reward_steps=4))
    found = [[a.name for a in first.check(s, row)] for s, row in enumerate(rows[:cut])]
    second = AlarmBoard(AlarmConfig(zero_reward_steps=4))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [[a.name for a in second.check(s, row)] for s, row in enumerate(rows[cut:], cut)]
    assert found == expected and ["reward_stuck"] in expected


def test_a_robot_that_never_succeeds_is_stuck_too() -> None:
    board = AlarmBoard(AlarmConfig(zero_reward_steps=2))
    dead = {
        "train/parse_rate": 1.0,
        "train/accuracy": 0.0,
        "train/reward": 0.0,
        "train/entropy": 1.0,
        "train/episodes": 32.0,
    }
    assert [a.name for step in (1, 2) for a in board.check(step, {"step": step, **dead})] == [
        "reward_stuck"
    ]
    message = AlarmBoard(AlarmConfig(zero_reward_steps=1)).check(1, {"step": 1, **dead})[0].message
    assert "succeeded" in message and "model.frame" not in message
    assert not AlarmBoard(AlarmConfig(zero_reward_steps=1)).check(
        1, {"step": 1, **dead, "train/accuracy": 0.1}
    )


# A row of a run in which nothing is learned, as `scripts/train_grounding.sh` gave it on a model that does not know the format.
DEAD = {
    "train/reward/mean": 0.0,
    "train/parse_rate": 0.0,
    "train/boxes/parse_rate": 0.0,
    "train/reward/part/accuracy": 0.0,
    "train/clipped_share": 0.99,
    "train/zero_variance_share": 1.0,
    "train/groups/asked": 192.0,
    "train/groups/kept": 0.0,
    "train/groups/no_signal": 192.0,
    "train/groups/failed": 0.0,
    "train/groups/all_zero": 192.0,
    "train/groups/all_one": 0.0,
    "train/grad_norm": 0.0,
    "train/loss": None,
    "train/entropy": None,
    "train/failed/no_box": 0.97,
    "train/failed/empty": 0.03,
}
LIVE = {
    **DEAD,
    "train/parse_rate": 0.4,
    "train/boxes/parse_rate": 0.4,
    "train/clipped_share": 0.2,
    "train/groups/kept": 12.0,
    "train/groups/no_signal": 180.0,
    "train/grad_norm": 0.3,
    "train/entropy": 1.0,
    "train/reward/part/accuracy": 0.1,
}


def raised(board: AlarmBoard, rows: list[dict[str, float | None]]) -> list[list[str]]:
    return [
        [a.name for a in board.check(step, {"step": step, **row})]
        for step, row in enumerate(rows, 1)
    ]


def test_a_dead_run_is_alarmed_within_three_steps_and_stopped_after_ten() -> None:
    board = AlarmBoard(AlarmConfig())
    assert raised(board, [DEAD] * 11) == [
        [],
        [],
        ["parse_rate", "truncated", "no_signal"],
        *[[]] * 6,
        ["never_trained"],
        [],
    ]
    board = AlarmBoard(AlarmConfig(steps=1, untrained_steps=4))
    first = board.check(1, {"step": 1, **DEAD})
    format_, *_ = first
    assert format_.severity == "error" and "0% of the answers keep the format" in format_.message
    assert "no_box 97%" in format_.message and "raise rollout.max_new_tokens" in format_.message
    assert board.must_stop(first) is None, "a cold start may keep the format rarely at first"
    assert AlarmBoard(AlarmConfig(stop=["parse_rate"])).must_stop(first) is format_
    [last] = [alarm for step in (2, 3, 4) for alarm in board.check(step, {"step": step, **DEAD})]
    assert (
        board.must_stop([last]) is last
        and "first 4 steps" in last.message
        and "mmrl try" in last.message
    )


def test_a_run_that_learned_something_is_never_stopped_for_having_learned_nothing() -> None:
    board = AlarmBoard(AlarmConfig())
    names_ = raised(board, [DEAD, DEAD, LIVE, *[DEAD] * 40])
    assert (
        names_.count(["parse_rate", "truncated", "no_signal"]) == 1 and sum(map(len, names_)) == 3
    )
    assert raised(AlarmBoard(AlarmConfig()), [LIVE] * 20) == [[]] * 20


def test_the_count_towards_never_trained_survives_a_resume_and_old_checkpoints_stop_nothing() -> (
    None
):
    first = AlarmBoard(AlarmConfig())
    raised(first, [DEAD] * 9)
    second = AlarmBoard(AlarmConfig())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert raised(second, [DEAD]) == [["never_trained"]]
    old = AlarmBoard(AlarmConfig())
    old.load_state_dict({"zero_steps": 0, "active": []})
    assert ["never_trained"] not in raised(old, [DEAD] * 30)


def resumed(board: AlarmBoard, **settings: int) -> AlarmBoard:
    """The board of a run that goes on from a checkpoint with other settings."""
    second = AlarmBoard(AlarmConfig(**settings))  # type: ignore[arg-type]
    second.load_state_dict(json.loads(json.dumps(board.state_dict())))
    return second


@pytest.mark.parametrize(
    ("setting", "row", "name"),
    [
        ("steps", {**LIVE, "train/clipped_share": 1.0}, "truncated"),
        ("untrained_steps", {"train/grad_norm": 0.0}, "never_trained"),
        ("zero_reward_steps", {"train/Reach/failed": 1.0}, "task_failed"),
    ],
)
def test_a_run_resumed_with_a_smaller_limit_is_alarmed_though_it_is_beyond_it(
    setting: str, row: dict[str, float], name: str
) -> None:
    first = AlarmBoard(AlarmConfig(**{setting: 20}))
    assert raised(first, [row] * 7) == [[]] * 7
    second = resumed(first, **{setting: 3})
    [alarm] = second.check(8, row)
    assert alarm.name == name and "8 steps" in alarm.message, (
        "for how long it has lasted, not how long it may"
    )
    assert raised(second, [row] * 3) == [[]] * 3, "once"
    assert raised(resumed(second, **{setting: 3}), [row] * 9) == [[]] * 9, "also over a resume"


def test_a_task_that_finished_once_is_alarmed_again_when_it_fails_again() -> None:
    board, dead, alive = (
        AlarmBoard(AlarmConfig(zero_reward_steps=2)),
        {"train/Reach/failed": 1.0},
        {"train/Reach/failed": 0.5},
    )
    assert raised(board, [dead, dead, dead, alive, dead, dead]) == [
        [],
        ["task_failed"],
        [],
        [],
        [],
        ["task_failed"],
    ]


LIVING = {k.removeprefix("train/"): v for k, v in LIVE.items()}
PARSED = {"parse_rate": 1.0, "boxes/parse_rate": 1.0, "clipped_share": 0.0}


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        (
            {"groups/kept": 5.0, "parse_rate": 0.9, "boxes/parse_rate": 0.9, "clipped_share": 0.0},
            "zero_gradient",
            "exactly 0",
        ),
        (
            {"groups/all_one": 192.0, "groups/all_zero": 0.0, **PARSED},
            "no_signal",
            "every answer is right",
        ),
        ({"groups/all_zero": 10.0, **PARSED}, "no_signal", "rollout.temperature"),
        ({**LIVING, "failed/reward_timeout": 0.1}, "reward_failures", "reward_timeout 10%"),
        ({**LIVING, "clipped_share": 0.96}, "truncated", "96% of the answers"),
        ({**LIVING, "boxes/parse_rate": 0.0}, "parse_rate", "source 'boxes'"),
    ],
)
def test_each_cause_has_an_alarm_of_its_own(
    changes: dict[str, float], name: str, words: str
) -> None:
    row = {**DEAD, **{f"train/{k}": v for k, v in changes.items()}}
    [alarm] = AlarmBoard(AlarmConfig(steps=1, zero_reward_steps=99)).check(1, {"step": 1, **row})
    assert alarm.name == name and words in alarm.message, alarm


def test_one_source_that_never_keeps_its_format_is_named_once_over_the_steps_that_hold_it() -> None:
    dead = {**LIVE, "train/json/parse_rate": 0.0}
    board = AlarmBoard(AlarmConfig())
    found = raised(
        board,
        [
            dead,
            LIVE,
            dead,
            LIVE,
            dead,
            dead,
            {**LIVE, "train/json/parse_rate": 0.5},
            dead,
            dead,
            dead,
        ],
    )
    assert found == [[], [], [], [], ["parse_rate"], [], [], [], [], ["parse_rate"]]
    both = raised(AlarmBoard(AlarmConfig()), [{**DEAD, "train/json/parse_rate": 0.0}] * 9)
    assert [
        step for step, names_ in enumerate(both, 1) for name in names_ if name == "parse_rate"
    ] == [3]


def test_a_robot_whose_groups_never_differ_has_no_signal_and_no_format() -> None:
    robot = {
        "train/parse_rate": 1.0,
        "train/accuracy": 0.0,
        "train/success_once": 0.0,
        "train/episodes": 32.0,
        "train/groups/asked": 8.0,
        "train/groups/trained": 0.0,
        "train/groups/failed": 0.0,
        "train/grad_norm": 0.0,
    }
    [alarm] = AlarmBoard(AlarmConfig(steps=1)).check(1, {"step": 1, **robot})
    assert (
        alarm.name == "no_signal"
        and "0% of the episodes succeed" in alarm.message
        and "env.horizon" in alarm.message
    )
    crashed = {**robot, "train/parse_rate": 0.0, "train/groups/failed": 8.0}
    assert raised(AlarmBoard(AlarmConfig(steps=1)), [crashed]) == [["prompts_failed"]]


def test_limits_are_as_their_comments_say() -> None:
    assert (
        names(AlarmBoard(AlarmConfig(logprob_gap=0.05)), 1, **{"logprob_gap/mean": 0.05}) == []
    ), "above the limit"
    assert names(AlarmBoard(AlarmConfig(entropy_floor=0.005)), 1, entropy=0.005) == [], (
        "below the floor"
    )
    at = AlarmConfig(steps=1, parse_rate=0.25, truncated=0.75, reward_failures=0.125)
    assert names(AlarmBoard(at), 1, parse_rate=0.25) == ["parse_rate"], "at most this share"
    assert names(AlarmBoard(at), 1, parse_rate=0.26) == []
    assert names(AlarmBoard(at), 1, clipped_share=0.75) == ["truncated"], "at least this share"
    assert names(AlarmBoard(at), 1, clipped_share=0.74) == []
    assert names(AlarmBoard(at), 1, **{"failed/reward_error": 0.125}) == [], "more than this share"
    assert names(
        AlarmBoard(at), 1, **{"failed/reward_error": 0.07, "failed/reward_timeout": 0.07}
    ) == ["reward_failures"]
    assert names(AlarmBoard(at), 1, **{"failed/no_box": 0.9}) == [], (
        "texts that cannot be read are not failures of the reward"
    )


def test_a_non_finite_alarm_names_five_values_and_cannot_be_changed_afterwards() -> None:
    [alarm] = AlarmBoard(AlarmConfig()).check(1, {f"train/x{i}": math.nan for i in range(6)})
    assert alarm.message.split(", ") == [f"train/x{i} is nan" for i in range(5)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        alarm.step = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("count", "whose"),
    [
        (1, "answers of source 's0' parse"),
        (2, "answers of sources 's0', 's1' parse"),
        (5, "of sources 's0', 's1', 's2', 's3', 's4' parse"),
        (6, "'s3', 's4' and 1 more parse"),
        (7, "'s3', 's4' and 2 more parse"),
    ],
)
def test_a_message_names_up_to_five_stuck_sources(count: int, whose: str) -> None:
    row = mixed(1, **{f"s{i}": 0.0 for i in range(count)})
    [alarm] = AlarmBoard(AlarmConfig(zero_reward_steps=1)).check(
        1, {**row, "train/reward/part/accuracy": 0.0}
    )
    assert whose in alarm.message


def test_only_sources_are_counted() -> None:
    board = AlarmBoard(AlarmConfig())
    board.check(1, mixed(1, a=0.0))
    assert board.state_dict()["zero_by_source"] == {"a": 1}


def test_a_source_goes_on_being_counted_while_no_source_keeps_its_format() -> None:
    source = {**LIVE, "train/json/parse_rate": 0.0}
    everything = {**source, "train/parse_rate": 0.0}
    assert raised(AlarmBoard(AlarmConfig(steps=3)), [source, everything, source]) == [
        [],
        [],
        ["parse_rate"],
    ]
    cut = {**LIVE, "train/clipped_share": 1.0}
    unparsed = {**LIVE, "train/parse_rate": 0.0}
    assert raised(AlarmBoard(AlarmConfig(steps=3)), [cut, unparsed, cut, cut, cut]) == [
        [],
        [],
        [],
        [],
        ["truncated"],
    ], "in a row: steps without it start the count again"


@pytest.mark.parametrize(("steps", "said"), [(1, "1 step in a row"), (2, "2 steps in a row")])
def test_a_lasting_alarm_says_for_how_long(steps: int, said: str) -> None:
    board = AlarmBoard(AlarmConfig(steps=steps))
    found = [
        alarm
        for step in range(1, steps + 1)
        for alarm in board.check(step, {**LIVE, "train/clipped_share": 1.0})
    ]
    assert [a.name for a in found] == ["truncated"] and found[0].message.startswith(said)


def test_never_trained_gives_the_first_cause_or_says_that_there_was_none() -> None:
    board = AlarmBoard(AlarmConfig(untrained_steps=1, steps=99))
    [alarm] = board.check(
        1, {**LIVE, "train/clipped_share": 1.0, "train/groups/kept": 0.0, "train/grad_norm": 0.0}
    )
    assert "100% of the answers are cut" in alarm.message
    [alarm] = AlarmBoard(AlarmConfig(untrained_steps=1)).check(1, {"train/grad_norm": 0.0})
    assert "the steps had nothing in their loss" in alarm.message


@pytest.mark.parametrize(
    ("easy", "hard", "weak", "words"),
    [
        (6.0, 4.0, 0.0, "every answer is right"),
        (4.0, 6.0, 0.0, "every answer scores 0"),
        (5.0, 5.0, 0.0, "Raise rollout.temperature"),
        (6.0, 1.0, 3.0, "in 3 of them the rewards differ, and algorithm.filter"),
    ],
)
def test_no_signal_names_the_side_that_most_prompts_are_on(
    easy: float, hard: float, weak: float, words: str
) -> None:
    asked = 10.0
    row = {
        **DEAD,
        **{f"train/{k}": v for k, v in PARSED.items()},
        "train/groups/asked": asked,
        "train/groups/no_signal": asked,
        "train/groups/all_one": easy,
        "train/groups/all_zero": hard,
        "train/groups/weak": weak,
    }
    [finding] = diagnose(row, AlarmConfig())
    assert (
        finding.name == "no_signal"
        and words in finding.message
        and "none of the 10 groups" in finding.message
    )


def test_shares_of_signal_leave_out_groups_that_failed() -> None:
    row = {"train/groups/asked": 10.0, "train/groups/failed": 4.0, "train/groups/kept": 3.0}
    assert signal_share(row) == 0.5
    assert (
        signal_share({**row, "train/groups/failed": 10.0}) is None
        and signal_share({"train/groups/asked": 4.0}) is None
    )
    assert signal_share({"train/groups/asked": 8.0, "train/groups/trained": 2.0}) == 0.25, (
        "episodes call it trained"
    )


def test_the_reasons_of_unreadable_answers_are_the_three_commonest_and_a_robot_is_told_whether_it_succeeds() -> (
    None
):
    row = {
        **DEAD,
        "train/failed/no_box": 0.5,
        "train/failed/empty": 0.3,
        "train/failed/x": 0.15,
        "train/failed/y": 0.05,
        "train/clipped_share": 0.5,
    }
    message = diagnose(row, AlarmConfig())[0].message
    assert (
        "(no_box 50%, empty 30%, x 15%)" in message
        and "50% are cut before they are complete" in message
    )
    assert "mmrl sft" in diagnose({**row, "train/clipped_share": 0.49}, AlarmConfig())[0].message
    robot = {"train/episodes": 8.0, "train/groups/asked": 4.0, "train/groups/trained": 0.0}
    for rate, words in ((0.5, "Judge the warm start"), (0.51, "choose harder ones")):
        [finding] = diagnose({**robot, "train/success_once": rate}, AlarmConfig())
        assert words in finding.message


def test_a_source_that_has_long_been_stuck_is_named_when_all_is() -> None:
    board = AlarmBoard(AlarmConfig(zero_reward_steps=2))
    all_zero = {"train/reward/part/accuracy": 0.0}
    rows = [
        *(mixed(s, a=0.0, b=0.5) for s in range(4)),
        *({**mixed(s, a=0.0, b=0.0), **all_zero} for s in (4, 5)),
    ]
    *_, [last] = [board.check(s, row) for s, row in enumerate(rows)]
    assert last.name == "reward_stuck" and "sources 'a', 'b' parse" in last.message


def test_what_a_step_does_not_say_is_taken_for_nothing() -> None:
    assert (
        trained({"train/grad_norm": 0.1})
        and not trained({})
        and not trained({"train/grad_norm": math.nan})
    )
    robot = {"train/episodes": 8.0, "train/groups/asked": 4.0, "train/groups/trained": 0.0}
    [finding] = diagnose(robot, AlarmConfig())
    assert ": 0% of the episodes succeed" in finding.message
    with pytest.raises(dataclasses.FrozenInstanceError):
        finding.name = "x"  # type: ignore[misc]
    one = {"train/groups/asked": 1.0, "train/groups/kept": 0.0}
    [finding] = diagnose(one, AlarmConfig())
    assert (
        finding.message.startswith("in none of the 1 groups")
        and "trained on. Raise rollout.temperature" in finding.message
    )
    [finding] = diagnose({**one, "train/reward/mean": 0.25}, AlarmConfig())
    assert "(mean reward 0.25). Raise" in finding.message


def test_a_source_keeps_its_count_over_a_step_that_does_not_say_whether_it_collapsed() -> None:
    collapsed = {
        **LIVE,
        "train/boxes/same_answer": 1.0,
        "train/boxes/same_truth": 0.1,
        "train/boxes/reward/mean": 0.5,
    }
    assert "train/boxes/parse_rate" in LIVE, (
        "few prompts of a source have a parse rate and no commonest answer"
    )
    assert raised(AlarmBoard(AlarmConfig(steps=2)), [collapsed, LIVE, collapsed]) == [
        [],
        [],
        ["same_answer"],
    ]
