"""Metrics of a step: what is a share, what is a length, and that no failure leaves a denominator."""

from __future__ import annotations

from typing import Any

import pytest

from mmrl.algorithms import LossStats
from mmrl.rollout.group_generator import StepTally
from mmrl.training.metrics import completion_records, step_metrics
from mmrl.training.update_result import SourceStats, UpdateResult
from mmrl.types import Rollout, RolloutGroup, Sample, Score, StopReason, Turn


def trajectory(
    iou: float | None, length: int = 4, stop: StopReason = StopReason.EOS, measured: bool = True
) -> Rollout:
    """One completion of that IoU; None: nothing could be parsed. Not `measured`: its reward gave no metrics at all."""
    metrics = {"iou": iou or 0.0, "acc@0.5": float((iou or 0.0) >= 0.5)} if measured else {}
    score = Score.combine(
        {"accuracy": iou or 0.0},
        {"accuracy": 1.0},
        parsed=iou is not None,
        reason="no_answer" if iou is None else None,
        metrics=metrics,
    )
    return Rollout((Turn((1,) * length, "x", (0.0,) * length, stop),), score)


def group(source: str, *trajectories: Rollout, place: int = 0) -> RolloutGroup:
    return RolloutGroup(
        Sample(f"s{place}", "t", source, "?", None), trajectories, key=(1, place, 0)
    )


def row_of(*groups: RolloutGroup) -> dict[str, Any]:
    return step_metrics(completion_records(groups), StepTally(), UpdateResult(), {"total": 1.0})


def test_clipped_is_a_length_and_clipped_share_a_share() -> None:
    row = row_of(
        group(
            "a",
            trajectory(0.9, 4),
            trajectory(0.1, 10, StopReason.LENGTH),
            trajectory(0.9, 20, StopReason.LENGTH),
            trajectory(0.9, 6),
        )
    )
    assert (
        row["train/length/clipped"] == row["train/a/length/clipped"] == 15
        and row["train/clipped_share"] == 0.5
    )
    assert row["train/length/mean"] == 10
    row = row_of(group("a", trajectory(0.9), trajectory(0.1)))
    assert row["train/length/clipped"] is None and row["train/clipped_share"] == 0


def test_precision_counts_the_parsed_and_recall_all() -> None:
    row = row_of(
        group(
            "a",
            trajectory(0.9),
            trajectory(0.5),
            trajectory(0.2),
            trajectory(None),
            trajectory(None),
        ),
        group("b", trajectory(None), trajectory(None), place=1),
    )
    assert row["train/a/precision@0.5"] == pytest.approx(2 / 3) and row[
        "train/a/recall@0.5"
    ] == pytest.approx(2 / 5)
    assert row["train/b/precision@0.5"] is None and row["train/b/recall@0.5"] == 0
    assert row["train/precision@0.5"] == pytest.approx(2 / 3) and row[
        "train/recall@0.5"
    ] == pytest.approx(2 / 7)
    assert row["train/recall@0.5"] == row["train/acc@0.5"]


def test_sources_without_boxes_neither_have_precision_nor_dilute_it() -> None:
    other = group(
        "count", trajectory(1.0, measured=False), trajectory(None, measured=False), place=1
    )
    row = row_of(group("a", trajectory(0.9), trajectory(0.2)), other)
    assert "train/count/precision@0.5" not in row and "train/count/recall@0.5" not in row
    assert row["train/precision@0.5"] == row["train/recall@0.5"] == 0.5
    assert "train/recall@0.5" not in row_of(other)


def test_a_reward_that_failed_without_metrics_counts_as_missed() -> None:
    row = row_of(group("a", trajectory(0.9), trajectory(None, measured=False)))
    assert row["train/a/precision@0.5"] == 1 and row["train/a/recall@0.5"] == 0.5


def told(
    value: float,
    *,
    correct: float | None = None,
    length: int = 4,
    text: str = "x",
    parts: dict[str, float] | None = None,
    stop: StopReason = StopReason.EOS,
) -> Rollout:
    metrics = {} if correct is None else {"correct": correct}
    parts = parts or {"accuracy": value}
    score = Score(value, True, None, parts, dict.fromkeys(parts, 1.0), metrics)
    return Rollout((Turn((1,) * length, text, (0.0,) * length, stop),), score)


def test_right_is_the_tasks_own_verdict_when_it_has_one() -> None:
    row = row_of(
        group(
            "a",
            told(0.9, correct=0.0, length=10),
            told(0.2, correct=1.0, length=2),
            told(0.3, correct=1.0, length=4, stop=StopReason.LENGTH),
        )
    )
    assert row["train/length/right"] == 3 and row["train/length/wrong"] == 10
    assert row["train/clipped_share/right"] == 0.5 and row["train/clipped_share/wrong"] == 0
    row = row_of(group("a", told(0.9, length=10), told(0.2, length=2)))
    assert row["train/length/right"] == 10 and row["train/length/wrong"] == 2, (
        "else a value above a half"
    )


def test_parts_and_metrics_are_means_over_the_tasks_that_have_them() -> None:
    answers = [
        ("count", told(0.5, parts={"accuracy": 0.5, "near": 0.8})),
        ("count", told(0.0)),
        ("ocr", told(1.0, correct=1.0)),
    ]
    mixed = [
        RolloutGroup(Sample(f"m{i}", task, "mixed", "?", None), (rollout,), key=(1, i, 0))
        for i, (task, rollout) in enumerate(answers)
    ]
    row = row_of(*mixed)
    assert row["train/mixed/reward/part/near"] == pytest.approx(0.4), (
        "a failure of its own task counts, another task does not"
    )
    assert row["train/reward/part/accuracy"] == pytest.approx(0.5) and row["train/correct"] == 1.0


def test_boxes_of_a_mixed_source_are_those_of_its_box_tasks() -> None:
    boxes = RolloutGroup(
        Sample("b", "grounding", "mixed", "?", None),
        (trajectory(0.9), trajectory(None, measured=False)),
        key=(1, 0, 0),
    )
    texts = RolloutGroup(
        Sample("t", "ocr", "mixed", "?", None), (told(0.0), told(0.0)), key=(1, 1, 0)
    )
    row = row_of(boxes, texts)
    assert row["train/mixed/precision@0.5"] == 1 and row["train/mixed/recall@0.5"] == 0.5


def test_groups_without_variance_are_a_share_per_source() -> None:
    row = row_of(
        group("a", told(0.5), told(0.5)),
        group("a", told(0.0), told(1.0), place=1),
        group("b", told(1), told(1), place=2),
    )
    assert row["train/a/zero_variance_share"] == 0.5 and row["train/b/zero_variance_share"] == 1
    assert row["train/zero_variance_share"] == pytest.approx(2 / 3)


def test_reflection_words_are_counted_on_request_with_word_boundaries() -> None:
    groups = [
        group(
            "a",
            told(1.0, text="Wait, let me re-check."),
            told(1.0, text="yesterday was fine"),
            told(0.0, text="I verify"),
            told(0.0, text="waiting, verified"),
        )
    ]
    assert not any("reflection" in key for key in row_of(*groups))
    row = step_metrics(
        completion_records(groups, reflection=True), StepTally(), UpdateResult(), {"total": 1.0}
    )
    assert row["train/reflection/share"] == 0.5
    assert row["train/a/reflection/share/right"] == row["train/a/reflection/share/wrong"] == 0.5
    assert row["train/a/reflection/right/with"] == row["train/a/reflection/right/without"] == 0.5


def test_update_statistics_are_per_source_and_add_up() -> None:
    update = UpdateResult(denominator=4.0)
    update.sources["a"] = SourceStats(
        LossStats(num_tokens=2, kl_ref=1.0, clip_high=1, policy_loss=2.0), 0.2, 0.15, 2, 3.0, 2
    )
    update.sources["b"] = SourceStats(
        LossStats(num_tokens=6, kl_ref=1.0, clip_low=3), 0.0, 0.0, 0, 1.0, 6
    )
    row = step_metrics([], StepTally(), update, {"total": 1.0})
    assert row["train/a/kl"] == 0.5 and row["train/kl"] == 0.25 and row["train/loss"] == 0.5
    assert (
        row["train/a/clip/high"] == 0.5
        and row["train/b/clip/high"] == 0
        and row["train/clip/low"] == 3 / 8
    )
    assert row["train/a/logprob_gap/mean"] == 0.1 and row["train/b/logprob_gap/mean"] is None
    assert (
        row["train/logprob_gap/max"] == 0.15
        and row["train/entropy"] == 0.5
        and row["train/a/entropy"] == 1.5
    )
