"""Means over tasks, types and lengths: equal to hand-made sums and to an independent rule, failures in every denominator."""

from __future__ import annotations

import random
from collections import defaultdict
from statistics import mean
from typing import Any

import pytest

from mmrl.registry import task_from_spec
from mmrl.tasks.metrics.video_suites import (
    SUITES,
    macro_mean,
    means,
    merge_directions,
    suite_numbers,
)
from mmrl.types import Sample, Score


def pair(value: float | None, **params: Any) -> tuple[Sample, Score]:
    """A sample of a suite and its score; None is an answer that could not be read."""
    sample = Sample("x", "choice", "s", "q", "A", params=params)
    metric = "mra" if params.get("mra") else "correct"
    score = (
        Score.failure("not_a_choice", ("accuracy",))
        if value is None
        else Score(value, True, metrics={metric: value})
    )
    return sample, score


def test_a_mean_over_tasks_is_not_the_mean_over_questions() -> None:
    pairs = [pair(1, suite="mlvu", category="plotQA")] * 8
    pairs += [pair(0, suite="mlvu", category="count"), pair(None, suite="mlvu", category="count")]
    numbers = suite_numbers(pairs)
    assert numbers["mlvu/accuracy"] == 0.8 and numbers["mlvu/M-Avg"] == 0.5
    assert numbers["mlvu/plotQA"] == 1.0 and numbers["mlvu/count"] == 0.0
    assert numbers["mlvu/categories"] == 2 and numbers["mlvu/items"] == 10


def test_one_right_and_one_unreadable_answer_are_half() -> None:
    numbers = suite_numbers(
        [pair(value, suite="mvbench", category="action_count") for value in (1, None)]
    )
    assert numbers["mvbench/average"] == numbers["mvbench/accuracy"] == 0.5


def vsi_official(rows: list[tuple[str, float]]) -> float:
    """The rule of thinking-in-space's scorer, written anew: three directions into one, then the mean of what is left."""
    table = defaultdict(list)
    for kind, value in rows:
        table[kind].append(value)
    values = {kind: mean(found) for kind, found in table.items()}
    directions = [
        values.pop(f"object_rel_direction_{level}") for level in ("easy", "medium", "hard")
    ]
    return mean([*values.values(), sum(directions) / 3])


def test_vsi_bench_halves_average_to_the_official_overall() -> None:
    from mmrl.tasks.readers.vsi_bench import TYPES

    rng = random.Random(1)
    for _ in range(20):
        rows = [
            (kind, rng.random() if task == "numeric" else float(rng.random() < 0.5))
            for kind, task in TYPES.items()
            for _ in range(rng.randrange(1, 9))
        ]
        halves = []
        for task, metric in (("choice", "correct"), ("numeric", "mra")):
            mine = [
                pair(value, suite="vsibench", category=kind, mra=metric == "mra")
                for kind, value in rows
                if TYPES[kind] == task
            ]
            halves.append(suite_numbers(mine, metric)["vsibench/macro"])
        assert mean(halves) == pytest.approx(vsi_official(rows), abs=1e-12)


def test_directions_count_once_also_where_some_are_missing() -> None:
    assert merge_directions(
        {"object_rel_direction_easy": 1.0, "object_rel_direction_hard": 0.0, "route_planning": 1.0}
    ) == {"object_rel_direction": 0.5, "route_planning": 1.0}
    assert merge_directions({"room_size_estimation": 0.3}) == {"room_size_estimation": 0.3}


def test_lengths_forms_and_other_samples() -> None:
    pairs = [
        pair(1, suite="videomme", category="OCR", duration_group="short"),
        pair(0, suite="videomme", category="OCR", duration_group="long"),
        pair(1, suite="tempcompass", category="speed", form="multi-choice"),
        pair(0, suite="tempcompass", category="speed", form="yes_no"),
        pair(1, category="no suite"),
        pair(1, suite="got10k"),
    ]
    numbers = suite_numbers(pairs)
    assert (
        numbers["videomme/duration short"],
        numbers["videomme/duration long"],
        numbers["videomme/macro"],
    ) == (1.0, 0.0, 0.5)
    assert (
        numbers["tempcompass/multi-choice/accuracy"] == 1.0
        and numbers["tempcompass/yes_no/accuracy"] == 0.0
    )
    assert {name.partition("/")[0] for name in numbers} == {"videomme", "tempcompass"}
    assert suite_numbers([]) == {} and set(SUITES) >= {"mvbench", "mlvu", "vsibench"}


def test_means_skip_empty_groups_and_need_one_with_values() -> None:
    assert (
        means({"a": [1, 0], "b": []}) == {"a": 0.5}
        and macro_mean({"a": [1, 0], "b": [1], "c": []}) == 0.75
    )
    with pytest.raises(ValueError, match="at least one group"):
        macro_mean({"a": []})


@pytest.mark.parametrize(
    ("task", "metric"), [("choice", "correct"), ("numeric", "mra"), ("boolean", "correct")]
)
def test_tasks_report_their_suites(task: str, metric: str, tmp_path: Any) -> None:
    sample = Sample(
        "x", task, "s", "q", "A", params={"suite": "vsibench", "category": "object_counting"}
    )
    score = Score(1.0, True, metrics={metric: 0.7})
    assert task_from_spec(task).benchmark([(sample, score)], tmp_path)[
        "vsibench/macro"
    ] == pytest.approx(0.7)
    plain = Sample("x", task, "s", "q", "A")
    assert task_from_spec(task).benchmark([(plain, score)], tmp_path) == {} and not list(
        tmp_path.iterdir()
    )
