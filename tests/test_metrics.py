"""Metrics of a step: what is a share, what is a length, and that no failure leaves a denominator."""
from __future__ import annotations

from typing import Any

import pytest

from mmrl.metrics import completion_records, step_metrics
from mmrl.schedule import StepTally
from mmrl.types import Completion, Group, Sample, Score, StopReason, Trajectory
from mmrl.update import UpdateResult


def trajectory(iou: float | None, length: int = 4, stop: StopReason = StopReason.EOS, measured: bool = True) -> Trajectory:
    """One completion of that IoU; None: nothing could be parsed. Not `measured`: its reward gave no metrics at all."""
    metrics = {"iou": iou or 0.0, "acc@0.5": float((iou or 0.0) >= 0.5)} if measured else {}
    score = Score.combine({"accuracy": iou or 0.0}, {"accuracy": 1.0}, parsed=iou is not None,
                          reason="no_answer" if iou is None else None, metrics=metrics)
    return Trajectory((Completion((1,) * length, "x", (0.0,) * length, stop),), score)


def group(source: str, *trajectories: Trajectory, place: int = 0) -> Group:
    return Group(Sample(f"s{place}", "t", source, "?", None), trajectories, key=(1, place, 0))


def row_of(*groups: Group) -> dict[str, Any]:
    return step_metrics(completion_records(groups), StepTally(), UpdateResult(), {"total": 1.0})


def test_clipped_is_a_length_and_clipped_share_a_share() -> None:
    row = row_of(group("a", trajectory(0.9, 4), trajectory(0.1, 10, StopReason.LENGTH), trajectory(0.9, 20, StopReason.LENGTH),
                       trajectory(0.9, 6)))
    assert row["train/length/clipped"] == row["train/a/length/clipped"] == 15 and row["train/clipped_share"] == 0.5
    assert row["train/length/mean"] == 10
    row = row_of(group("a", trajectory(0.9), trajectory(0.1)))
    assert row["train/length/clipped"] is None and row["train/clipped_share"] == 0


def test_precision_counts_the_parsed_and_recall_all() -> None:
    row = row_of(group("a", trajectory(0.9), trajectory(0.5), trajectory(0.2), trajectory(None), trajectory(None)),
                 group("b", trajectory(None), trajectory(None), place=1))
    assert row["train/a/precision@0.5"] == pytest.approx(2 / 3) and row["train/a/recall@0.5"] == pytest.approx(2 / 5)
    assert row["train/b/precision@0.5"] is None and row["train/b/recall@0.5"] == 0
    assert row["train/precision@0.5"] == pytest.approx(2 / 3) and row["train/recall@0.5"] == pytest.approx(2 / 7)
    assert row["train/recall@0.5"] == row["train/acc@0.5"]


def test_sources_without_boxes_neither_have_precision_nor_dilute_it() -> None:
    other = group("count", trajectory(1.0, measured=False), trajectory(None, measured=False), place=1)
    row = row_of(group("a", trajectory(0.9), trajectory(0.2)), other)
    assert "train/count/precision@0.5" not in row and "train/count/recall@0.5" not in row
    assert row["train/precision@0.5"] == row["train/recall@0.5"] == 0.5
    assert "train/recall@0.5" not in row_of(other)


def test_a_reward_that_failed_without_metrics_counts_as_missed() -> None:
    row = row_of(group("a", trajectory(0.9), trajectory(None, measured=False)))
    assert row["train/a/precision@0.5"] == 1 and row["train/a/recall@0.5"] == 0.5
