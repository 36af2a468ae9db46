"""One answer to every prompt: seen in the completions of a step whatever its spelling, told apart from prompts that are alike."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.config import AlarmConfig, load_config
from mmrl.errors import MMRLError
from mmrl.rollout.group_generator import StepTally
from mmrl.training.alarms import AlarmBoard
from mmrl.training.collapse import answer_key, common_share
from mmrl.training.metrics import completion_records, step_metrics
from mmrl.training.trainer import Trainer
from mmrl.training.update_result import UpdateResult
from mmrl.types import Rollout, RolloutGroup, Sample, Score, StopReason, Turn
from tests.kits.engine_kit import album_data, config_file, picture, read_jsonl, small_run

BOXES = [[30 * i, 20 * i, 30 * i + 90 + i, 20 * i + 60] for i in range(16)]


def group(
    place: int, truth: Any, texts: list[str | None], source: str = "boxes", reward: float = 0.4
) -> RolloutGroup:
    """A prompt with its truth and the texts that were answered; None: an answer that could not be read."""
    scores = [
        Score.combine({"accuracy": reward}, {"accuracy": 1.0}, parsed=text is not None)
        for text in texts
    ]
    answers = [Turn((1,), text or "", (0.0,), StopReason.EOS) for text in texts]
    return RolloutGroup(
        Sample(f"s{place}", "t", source, "?", truth),
        tuple(Rollout((answer,), score) for answer, score in zip(answers, scores, strict=True)),
        key=(1, place, 0),
    )


def row_of(groups: list[RolloutGroup]) -> dict[str, Any]:
    return {
        "step": 1,
        **step_metrics(completion_records(groups), StepTally(), UpdateResult(), {"total": 1.0}),
    }


def said(*boxes: list[int]) -> list[str]:
    return [f"<think>I look at {box}</think>\n<answer>{json.dumps(box)}</answer>" for box in boxes]


def raised(rows: list[dict[str, Any]], **limits: Any) -> list[list[str]]:
    board = AlarmBoard(AlarmConfig(steps=2, **limits))
    return [
        [a.name for a in board.check(step, row) if a.name == "same_answer"]
        for step, row in enumerate(rows, 1)
    ]


def test_one_box_for_sixteen_pictures_is_noticed_and_sixteen_boxes_are_not() -> None:
    rng = random.Random(0)
    right = row_of([group(i, box, said(box, box)) for i, box in enumerate(BOXES)])
    one = row_of(
        [
            group(i, box, said([250, 250, 750, 750], [250, 250, 750, 750]))
            for i, box in enumerate(BOXES)
        ]
    )
    near = row_of(
        [
            group(
                i,
                box,
                said(*([v + rng.randint(-3, 3) for v in (250, 250, 750, 750)] for _ in range(2))),
            )
            for i, box in enumerate(BOXES)
        ]
    )
    assert right["train/same_answer"] == right["train/same_truth"] == 1 / 16
    assert (
        one["train/same_answer"] == one["train/boxes/same_answer"] == 1
        and one["train/same_truth"] == 1 / 16
    )
    assert near["train/same_answer"] > 0.9, "moved by a pixel it is the same answer"
    assert raised([one, one, one, right, near, near]) == [
        [],
        ["same_answer"],
        [],
        [],
        [],
        ["same_answer"],
    ]
    assert raised([right] * 4) == [[]] * 4
    [alarm] = AlarmBoard(AlarmConfig(steps=1, stop=["same_answer"])).check(1, one)
    assert "100% of the different prompts" in alarm.message and "earns 0.4" in alarm.message
    assert AlarmBoard(AlarmConfig(stop=["same_answer"])).must_stop([alarm]) is alarm
    assert AlarmBoard(AlarmConfig()).must_stop([alarm]) is None, "it only warns unless it is listed"


def test_prompts_that_are_alike_and_rewards_of_nothing_raise_no_alarm() -> None:
    def yes(truths: list[bool], reward: float = 0.6) -> dict[str, Any]:
        return row_of(
            [
                group(i, truth, ["<answer>Yes</answer>", "<answer> yes\n</answer>"], reward=reward)
                for i, truth in enumerate(truths)
            ]
        )

    balanced, mostly = yes([True, False] * 6), yes([True] * 11 + [False])
    assert (balanced["train/same_answer"], balanced["train/same_truth"]) == (1, 0.5) and mostly[
        "train/same_truth"
    ] == 11 / 12
    assert raised([balanced] * 2)[1] == ["same_answer"], "yes to everything, where half is no"
    assert raised([mostly] * 2) == [[], []], "nearly every truth is yes"
    assert raised([yes([True, False] * 6, reward=0.0)] * 2) == [[], []], (
        "nothing is earned: that is reward_stuck"
    )
    assert raised([yes([True, False] * 6)] * 2, same_answer=1.0)[1] == ["same_answer"]
    half = row_of([group(i, i, ["<answer>7</answer>", f"<answer>{i}</answer>"]) for i in range(12)])
    assert half["train/same_answer"] == pytest.approx(6.5 / 12) and raised([half] * 2) == [[], []]


def test_label_free_groups_have_no_truth_to_excuse_them() -> None:
    row = row_of([group(i, None, ["[3, 3]"] * 8, reward=1.0) for i in range(6)])
    assert row["train/same_answer"] == 1 and row["train/same_truth"] is None
    assert raised([row] * 2)[1] == ["same_answer"]


def test_what_cannot_be_read_is_like_nothing_and_few_prompts_say_nothing() -> None:
    unread = row_of([group(i, i, [None, None]) for i in range(8)])
    assert unread["train/same_answer"] == 0
    few = row_of([group(i, i, ["1"]) for i in range(3)])
    assert "train/same_answer" not in few and raised([few] * 3) == [[]] * 3
    twice = row_of([group(i % 3, i % 3, ["1"]) for i in range(9)])
    assert "train/same_answer" not in twice, "three prompts asked three times are three prompts"


def test_a_source_is_named_where_only_it_has_collapsed_and_counted_over_the_steps_that_hold_it() -> (
    None
):
    fine = [group(i, box, said(box), "fine") for i, box in enumerate(BOXES)]
    both = row_of([*fine, *(group(20 + i, i, ["<answer>4</answer>"], "count") for i in range(8))])
    board = AlarmBoard(AlarmConfig(steps=2))
    rows = [both, row_of(fine), both]
    found = [
        [a for a in board.check(step, row) if a.name == "same_answer"]
        for step, row in enumerate(rows, 1)
    ]
    assert [len(alarms) for alarms in found] == [0, 0, 1] and "of source 'count'" in found[2][
        0
    ].message


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80), st.text("[](){}0123456789., -<answer>/", max_size=80))
def test_every_text_has_a_key_that_is_like_itself(text: str, other: str) -> None:
    for said_ in (text, other, f"<think>{other}</think>{text}"):
        key = answer_key(said_)
        assert common_share({i: [key] for i in range(4)}) == 1
    assert (
        answer_key(f"<think>{other.replace('<', '')}</think><answer>{7}</answer>")
        == answer_key("7")
        == answer_key(" 7\n")
    )


def test_keys_tell_answers_apart_that_differ_by_more_than_a_fiftieth() -> None:
    def alike(a: str, b: str) -> bool:
        return common_share({i: [answer_key(a if i % 2 else b)] for i in range(4)}) == 1

    assert alike("[500, 500]", "[510, 490]") and not alike("[500, 500]", "[500, 480]")
    assert not alike("3", "4") and alike("Red Car", "red  car") and not alike("red car", "blue car")
    assert not alike("[1, 2]", "[1, 2, 2]") and alike("9" * 400, "9" * 401) and alike("", " ")


@pytest.mark.slow
def test_a_run_that_learns_one_word_for_every_picture_is_alarmed_and_can_be_stopped(
    tmp_path: Path,
) -> None:
    """A real run: the reward pays a text for a letter, whatever was asked; the policy learns that, and the alarm says so."""
    rows = [[picture(((112, 84), (56, 56), (84, 112))[i % 3], i)] for i in range(12)]
    task = tmp_path / "letter_task.py"
    task.write_text(LETTER_TASK)
    tree = small_run(
        tmp_path / "runs",
        album_data(tmp_path / "data", rows),
        name="letter",
        data={
            "train": [{"task": f"{task}:Letter", "path": str(tmp_path / "data" / "album.jsonl")}]
        },
        rollout={"group_size": 8, "max_new_tokens": 1},
        optim={"lr": 0.003},
        alarms={"stop": ["same_answer"], "entropy_floor": 0.0},
        train={"steps": 60, "prompts_per_step": 6},
    )
    trainer = Trainer(load_config(config_file(tmp_path / "letter.yaml", tree)))
    with pytest.raises(MMRLError, match="by alarm 'same_answer': 3 steps in a row: one answer"):
        trainer.fit()
    metrics = read_jsonl(trainer.folder.path / "metrics.jsonl")
    assert metrics[0]["train/same_answer"] < 0.9 <= metrics[-1]["train/same_answer"]
    assert metrics[-1]["train/reward/mean"] > metrics[0]["train/reward/mean"]
    assert read_jsonl(trainer.folder.path / "alarms.jsonl")[-1]["name"] == "same_answer"


LETTER_TASK = '''
"""Pays an early first letter, whatever was asked."""
from dataclasses import replace

from mmrl.types import Score
from tests.kits.album_task import Album


class Letter(Album):
    def load(self, path):
        return [replace(sample, answer=sample.id) for sample in super().load(path)]

    def score(self, sample, text, ctx):
        value = (ord(text[0]) % 64) / 64 if text else 0.0
        return Score.combine({"accuracy": value}, {"accuracy": 1.0}, parsed=bool(text))
'''
