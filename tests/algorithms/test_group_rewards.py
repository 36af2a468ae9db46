"""What is added to a closed group's rewards: computed by hand here, from T-GRPO's and DAPO's words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmrl.algorithms.group_rewards import (
    GroupOutcome,
    accuracies,
    contrast_bonuses,
    contrast_settings,
    group_outcome,
    score_origin,
    training_parts,
    training_rewards,
    usable,
)
from mmrl.config import DataSource, RunConfig, load_config
from mmrl.types import ImageSize, Rollout, RolloutGroup, Sample, Score, StopReason, Turn, VideoSize
from tests.kits.medley_task import Medley

WEIGHTS = {"accuracy": 0.9, "style": 0.1}
FAILED = Score.failure("reward_error: it raised")


def trajectory(score: Score, tokens: int = 3, offline: bool = False) -> Rollout:
    turn = Turn((1,) * tokens, "x", (0.0,) * tokens, StopReason.EOS)
    return replace(Rollout((turn,), score), offline=offline)


def right(accuracy: float, style: float = 0.0, **options: object) -> Rollout:
    return trajectory(
        Score.combine({"accuracy": accuracy, "style": style}, WEIGHTS, parsed=True), **options
    )  # type: ignore[arg-type]


def group(
    *members: Rollout,
    contrast: tuple[Rollout, ...] = (),
    view: str = "shuffle",
    key: tuple[int, int, int] = (1, 2, 0),
) -> RolloutGroup:
    return RolloutGroup(
        Sample("s", "share", "src", "?", None), members, contrast=contrast, view=view, key=key
    )


def settings(*overrides: str) -> RunConfig:
    return load_config(None, list(overrides))


def test_the_bonus_goes_to_right_answers_of_a_group_that_beats_its_contrast() -> None:
    """Video-R1: r + 0.3 for the correct answers where p >= 0.8 * p of the shuffled frames."""
    members = (right(1.0), right(0.0), right(1.0), right(0.0))
    config = settings("algorithm.contrast={kind: shuffle, factor: 0.8, threshold: 0.1, bonus: 0.3}")
    beats, loses = (right(1.0), right(0.0)), (right(1.0), right(1.0))
    assert contrast_bonuses(group(*members, contrast=beats), config) == [0.3, 0.0, 0.3, 0.0], (
        "0.5 >= 0.8 * 0.5"
    )
    assert contrast_bonuses(group(*members, contrast=loses), config) == [0.0] * 4, "0.5 < 0.8 * 1.0"
    assert contrast_bonuses(group(*members, contrast=loses, view=""), config) == [0.0] * 4, (
        "no view applies"
    )
    assert contrast_bonuses(group(*members), config) == [0.3, 0.0, 0.3, 0.0], (
        "left out, because it was certain"
    )
    assert training_rewards(group(*members, contrast=beats), config) == pytest.approx(
        [1.2, 0.0, 1.2, 0.0]
    )
    parts, weights = training_parts(group(*members, contrast=beats), config)
    assert [p["contrast"] for p in parts] == [1.0, 0.0, 1.0, 0.0] and [
        w["contrast"] for w in weights
    ] == [0.3] * 4
    assert "contrast" not in training_parts(group(*members, view=""), config)[0][0]


def test_demonstrations_and_failed_rewards_get_no_bonus_and_do_not_count() -> None:
    members = (
        right(1.0, offline=True),
        trajectory(FAILED),
        right(1.0),
        right(0.0),
        right(0.0, offline=True),
    )
    config = settings("algorithm.contrast={kind: shuffle, factor: 1.0, bonus: 0.5}")
    found = contrast_bonuses(
        group(*members, contrast=(right(1.0), right(0.0), trajectory(FAILED))), config
    )
    assert found == [0.0, 0.0, 0.5, 0.0, 0.0], "0.5 of two >= 0.5 of two"
    assert usable(group(*members)) == [True, False, True, True, True]
    weights = training_parts(group(*members), config)[1]
    assert weights[1].get("contrast") is None and not any(weights[1].values()), (
        "a failure has no weights of its own"
    )


def test_accuracies_are_the_part_or_the_whole_reward() -> None:
    assert accuracies(
        (right(0.25, style=1.0), trajectory(FAILED), trajectory(Score.failure("no_answer")))
    ) == [0.25, 0.0]
    plain = Score.combine({"style": 0.5}, {"style": 1.0}, parsed=True)
    assert accuracies((trajectory(plain),)) == [0.5]


@pytest.mark.parametrize(
    ("overrides", "pooled"),
    [
        ((), False),
        (("algorithm.advantage_scale=ema",), True),
        (("algorithm.advantage_scale=batch_rewards",), True),
        (("algorithm.advantage_scale=batch",), False),
        (("algorithm.advantage_scale=ema", "algorithm.reward_aggregation=gdpo"), False),
    ],
)
def test_advantages_are_pooled_where_one_std_serves_several_groups(
    overrides: tuple[str, ...], pooled: bool
) -> None:
    try:
        config = settings(*overrides)
    except ValueError as refused:  # gdpo scales each part by itself
        assert "gdpo" in str(refused) and not pooled
        return
    assert contrast_settings(config).pooled is pooled


def test_shuffled_rewards_stay_in_their_group_and_go_with_their_parts() -> None:
    members = tuple(right(i / 8, style=1 - i / 8) for i in range(8))
    plain, shuffled = settings("seed=5"), settings("seed=5", "reward.shuffle=true")
    kept, moved = (training_rewards(group(*members, view=""), c) for c in (plain, shuffled))
    assert sorted(moved) == sorted(kept) and moved != kept
    parts, _ = training_parts(group(*members, view=""), shuffled)
    assert [0.9 * p["accuracy"] + 0.1 * p["style"] for p in parts] == pytest.approx(moved)
    assert training_rewards(group(*members, view="", key=(2, 2, 0)), shuffled) != moved, (
        "another group, another order"
    )
    assert (
        training_rewards(group(*members, view=""), settings("seed=6", "reward.shuffle=true"))
        != moved
    )
    assert [kept.index(v) for v in moved] == [1, 7, 5, 0, 2, 3, 4, 6], (
        "the order of recorded control experiments"
    )


def test_the_length_penalty_is_a_part_of_weight_overlong_weight() -> None:
    config = settings(
        "algorithm.overlong=soft",
        "rollout.max_new_tokens=10",
        "algorithm.overlong_buffer=4",
        "algorithm.overlong_weight=0.5",
    )
    long = group(right(1.0, tokens=8), right(0.0, tokens=6), view="")
    assert training_rewards(long, config) == pytest.approx([0.9 - 0.25, 0.0])
    parts, weights = training_parts(long, config)
    assert [p["overlong"] for p in parts] == [-0.5, 0.0] and [w["overlong"] for w in weights] == [
        0.5,
        0.5,
    ]


def test_a_logged_completion_knows_its_task_and_the_sizes_of_its_media() -> None:
    source = DataSource(task="grounding", path="x", params={"mode": "iou"})
    image = ImageSize((10, 20), (28, 28))
    assert score_origin(source, [image]) == {
        "task_spec": "grounding",
        "task_params": {"mode": "iou"},
        "image_sizes": [{"orig_wh": (10, 20), "resized_wh": (28, 28)}],
    }
    assert "video_sizes" not in score_origin(source, [])
    assert (
        len(score_origin(source, [], [VideoSize((8, 8), (28, 28), 2.0, (0.0, 1.0))])["video_sizes"])
        == 1
    )


def test_a_group_of_one_usable_completion_says_nothing() -> None:
    one = group_outcome(group(right(1.0), trajectory(FAILED)), settings(), Medley(bonus=0.5))
    assert (one.rewards, one.signal, one.low, one.high) == (None, False, 0.0, 1.5)
    assert GroupOutcome((0, 0, 0), None) == ((0, 0, 0), None, 0.0, 1.0, None, 1.0, False)
    two = group_outcome(group(right(1.0), right(0.0), trajectory(FAILED)), settings(), Medley())
    assert two.rewards == pytest.approx([0.9, 0.0]) and two.signal


def parted(*parts: dict[str, float], weights: dict[str, float] | None = None) -> RolloutGroup:
    return group(
        *(
            trajectory(Score.combine(p, weights or {k: WEIGHTS[k] for k in p}, parsed=True))
            for p in parts
        ),
        view="",
    )


def test_what_must_differ_is_the_part_of_the_key_and_the_reward() -> None:
    same_style = parted({"accuracy": 0.0, "style": 0.5}, {"accuracy": 1.0, "style": 0.5})
    assert not group_outcome(same_style, settings("algorithm.filter.key=style"), Medley()).signal
    assert group_outcome(same_style, settings("algorithm.filter.key=reward"), Medley()).signal
    halves = {"accuracy": 0.5, "style": 0.5}
    balanced = parted(
        {"accuracy": 0.0, "style": 1.0}, {"accuracy": 1.0, "style": 0.0}, weights=halves
    )
    assert not group_outcome(balanced, settings(), Medley()).signal, (
        "the reward is equal: nothing to learn"
    )
    assert group_outcome(
        balanced, settings("algorithm.reward_aggregation=gdpo"), Medley()
    ).signal, "its parts are not"
    missing = parted({"accuracy": 1.0, "style": 0.0}, {"accuracy": 1.0})
    assert not group_outcome(
        missing,
        settings("algorithm.reward_aggregation=gdpo", "algorithm.filter.key=reward"),
        Medley(),
    ).signal


def test_a_part_without_a_declared_range_reaches_one() -> None:
    task = Medley()
    task.part_ranges = {}
    assert group_outcome(parted({"accuracy": 1.0}, {"accuracy": 0.0}), settings(), task).top == 1.0
