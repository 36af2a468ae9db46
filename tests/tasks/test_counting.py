"""Counting: numbers and points, gold 1 and wrong 0 everywhere, errors in the summary, bad rows."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.registry import task_from_spec
from mmrl.rewards.counting import MODES
from mmrl.task import Template
from mmrl.tasks.counting import Counting
from mmrl.tasks.scenes import make_scenes
from mmrl.types import ImageSize, RewardContext, Sample, Score

SIZE = ImageSize((640, 480), (644, 476))
POINTS = [[100.0, 50.0], [320.0, 240.0], [600.0, 400.0]]


def _context(frame: str = "abs_orig") -> RewardContext:
    return RewardContext(1, 1, CoordFrame(frame), (SIZE,))


def _sample(points: list[list[float]], **params: Any) -> Sample:
    return Sample(
        "1", "counting", "s", "cats", len(points), ("a.png",), params={"points": points, **params}
    )


@pytest.mark.parametrize(
    "params", [{"mode": m} for m in MODES] + [{"preset": "perception_r1"}], ids=str
)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_gold_is_one_and_wrong_zero_in_every_frame(params: dict[str, Any], count: int) -> None:
    task, sample = Counting(**params), _sample(POINTS[:count])
    for frame in CoordFrame:
        ctx = _context(frame)
        gold, wrong = (
            task.score(sample, text, ctx)
            for text in (task.gold(sample, ctx), task.wrong(sample, ctx))
        )
        assert gold.value == pytest.approx(1, abs=2e-3) and gold.metrics == {
            "correct": 1,
            "close": 1,
        }
        assert (
            wrong.parsed
            and wrong.parts["accuracy"] == 0
            and wrong.metrics == {"correct": 0, "close": 0}
        )


def test_gold_is_just_the_number_unless_points_are_asked_for() -> None:
    sample, ctx = _sample(POINTS), _context("rel1000")
    assert Counting().gold_answer(sample, ctx) == "3"
    points = "[[156, 104], [500, 500], [938, 833]]"
    assert Counting(mode="points").gold_answer(sample, ctx) == points
    assert (
        Counting(per_source={"s": {"accuracy": {"mode": "points"}}}).gold_answer(sample, ctx)
        == points
    )
    own = _sample(POINTS, reward={"accuracy": {"mode": "exact"}})
    assert Counting(per_source={"s": {"accuracy": {"mode": "points"}}}).gold_answer(own, ctx) == "3"


def _asked(task: Counting, sample: Sample) -> str:
    return str(task.messages(sample, Template("t", CoordFrame.REL1000))[-1]["content"][-1]["text"])


def test_the_prompt_asks_for_what_the_mode_pays() -> None:
    plain, layer = _sample(POINTS), {"accuracy": {"mode": "points"}}
    number, points = _asked(Counting(), plain), _asked(Counting(mode="points"), plain)
    assert (
        number
        == "How many cats are in the image? Reply with nothing but <answer>the number</answer>."
    )
    assert (
        "<answer>[[x, y], ...], or [] if there is none</answer>" in points
        and "0-1000" in points
        and "cats" in points
    )
    by_source = Counting(per_source={"s": layer})
    assert _asked(by_source, plain) == _asked(Counting(), _sample(POINTS, reward=layer)) == points
    assert _asked(by_source, replace(plain, source="other")) == number
    assert _asked(by_source, _sample(POINTS, reward={"accuracy": {"mode": "smooth"}})) == number
    assert (
        _asked(Counting(mode="points"), _sample(POINTS, reward={"accuracy": {"mode": "exact"}}))
        == number
    )
    assert _asked(Counting(mode="points", prompt="Find {question}"), plain) == "Find cats", (
        "a prompt of one's own stays"
    )
    assert "<think>" in _asked(Counting(mode="points", answer_format="think"), plain)
    assert Counting(mode="points").prompt.startswith("Point at") and Counting().prompt.startswith(
        "How many"
    )


@pytest.mark.parametrize("where", ["task", "source", "sample"])
def test_rows_without_points_are_refused_where_points_are_paid(tmp_path: Path, where: str) -> None:
    layer, own = {"accuracy": {"mode": "points"}}, {"reward": {"accuracy": {"mode": "exact"}}}
    params = {"task": {"mode": "points"}, "source": {"per_source": {"here": layer}}, "sample": {}}[
        where
    ]
    row = {"source": "here", "params": {"reward": layer} if where == "sample" else {}}
    path = _row(tmp_path, **row)
    with pytest.raises(DataError, match=r"params\.points for mode 'points', found none; add"):
        Counting(**params).load(path)
    task = Counting(**params, reader={"on_error": "record"})
    assert list(task.load(path)) == [] and len(task.rejected) == 1
    with pytest.raises(DataError, match=r"params\.points for mode 'points'"):
        task_from_spec("mixed", {"tasks": {"counting": params}}).load(
            _row(tmp_path, **row, task="counting")
        )
    assert (
        len(
            list(
                Counting(**params).load(
                    _row(tmp_path, source="here", params={**row["params"], "points": [[3, 4]]})
                )
            )
        )
        == 1
    )
    assert len(list(Counting(**params).load(_row(tmp_path, source="here", params=own)))) == 1, (
        "nothing pays points here"
    )
    pickle.loads(pickle.dumps(Counting(**params))).rubric.check(_sample(POINTS))


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        ("3", 3),
        ("three", 3),
        ("**3**", 3),
        ("[[1, 2], [3, 4], [5, 6]]", 3),
        ("[[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 2, 2]]", 3),
        ('[{"point_2d": [1, 2]}, {"point_2d": [3, 4]}, {"point_2d": [5, 6]}]', 3),
        ("[]", 0),
        ("zero", 0),
        ("2", 2),
    ],
)
def test_numbers_and_lists_are_counted(answer: str, count: int) -> None:
    score = Counting().score(
        _sample(POINTS), f"<think>I see 5, no, 3.</think><answer>{answer}</answer>", _context()
    )
    assert score.detail["pred_count"] == count and score.parts["accuracy"] == (count == 3)
    assert score.metrics["close"] == count / 3 and (
        "pred_points" in score.detail
    ) == answer.startswith("[")


def test_a_sentence_with_one_number_is_native_as_in_every_task() -> None:
    for text in ("There are 3 cats.", "3 cats", "The answer is three", "there's 3"):
        strict, native = (
            Counting(answers=level).score(_sample(POINTS), f"<answer>{text}</answer>", _context())
            for level in ("strict", "native")
        )
        assert (strict.parsed, strict.reason) == (False, "not_only_a_number") and native.detail[
            "pred_count"
        ] == 3
        assert (
            Counting().readable_at(_sample(POINTS), f"<answer>{text}</answer>", _context())
            == "native"
        )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("3 or 4", "several_numbers"),
        ("many", "not_a_number"),
        ("-3", "not_a_count"),
        ("[[1, 2], [1, 2, 3, 4]]", "mixed_shapes"),
        ("[3]", "wrong_count"),
        ("not 3", "hedged"),
        ("3 or more", "hedged"),
        ("", "empty"),
        ("[" * 50, "not_a_box"),
    ],
)
def test_no_number_is_a_failure_that_counts_in_the_error(answer: str, reason: str) -> None:
    task = Counting()
    failed = task.score(_sample(POINTS), f"<answer>{answer}</answer>", _context())
    assert (failed.parsed, failed.reason, failed.value, failed.metrics) == (
        False,
        reason,
        0,
        {"correct": 0, "close": 0},
    )
    near = task.score(_sample(POINTS), "<answer>4</answer>", _context())
    assert task.summarize([near, failed]) == {
        "MAE": 2,
        "MAE_parsed": 1,
        "parse_failure_rate": 0.5,
        "truncated_rate": 0,
    }
    assert task.summarize([failed]) == {"MAE": 3, "parse_failure_rate": 1, "truncated_rate": 0}
    assert task.summarize([Score.failure("no_answer")]) == {
        "parse_failure_rate": 1,
        "truncated_rate": 0,
    }
    assert task.summarize([]) == {}


def test_a_point_given_again_is_not_counted_again() -> None:
    for answer in (
        "[[1, 2], [3, 4], [1, 2]]",
        "[[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4], [1.0, 2, 3, 4]]",
    ):
        score = Counting().score(_sample(POINTS), f"<answer>{answer}</answer>", _context())
        assert (
            score.detail["pred_count"] == 2
            and score.parts["accuracy"] == score.metrics["correct"] == 0
        )
    paid = Counting(mode="points").score(
        _sample(POINTS), "<answer>[[100, 50], [100, 50], [320, 240]]</answer>", _context()
    )
    assert paid.detail["pred_count"] == 3 and paid.parts["accuracy"] == pytest.approx(2 / 3), (
        "two of three points, and a copy"
    )


TOKENS = "<|object_ref_start|>cats<|object_ref_end|>{}"
BOX = "<|box_start|>({},{}),({},{})<|box_end|>"


def test_perception_r1_asks_for_boxes_and_pays_their_centres() -> None:
    task, sample, ctx = Counting(preset="perception_r1"), _sample(POINTS), _context()
    text = TOKENS.format(
        BOX.format(100, 60, 212, 148)
        + BOX.format(500, 500, 500, 500)
        + BOX.format(938, 833, 938, 833)
    )
    assert task.gold(sample, ctx) == TOKENS.format(
        "".join(
            BOX.format(x - 1, y - 1, x + 1, y + 1) for x, y in ((156, 104), (500, 500), (938, 833))
        )
    )
    paid = task.score(sample, text + "<|im_end|>", ctx)
    assert (
        paid.value == paid.parts["accuracy"] == pytest.approx(1, abs=1e-3)
        and paid.parts["format"] == 1
    )
    assert paid.detail["pred_points"][0] == pytest.approx([99.84, 49.92])
    prompt = _asked(task, sample)
    assert (
        prompt.startswith("Output all the bounding boxes of the cats,")
        and "0-1000" in prompt
        and "<|box_start|>" in prompt
    )
    corner = _sample([[0.0, 480.0], [640.0, 0.2]])
    assert task.gold(corner, ctx) == TOKENS.format(
        BOX.format(0, 1000, 0, 1000) + BOX.format(1000, 0, 1000, 0)
    )
    assert task.score(corner, task.gold(corner, ctx), ctx).value == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    "answer",
    [
        "3",
        "[[156, 104], [500, 500], [938, 833]]",
        "[[150, 100, 162, 108], [495, 495, 505, 505]]",
        BOX.format(1, 1, 2, 2),
        TOKENS.format(BOX.format(1, 1, 2, 2) + " is one"),
    ],
)
def test_perception_r1_pays_nothing_without_its_form(answer: str) -> None:
    """As pr1_counting_reward: where pr1_counting_format_reward is 0, so is the reward, whatever could be read."""
    sample = _sample(POINTS)
    assert Counting(preset="perception_r1").score(sample, answer, _context("rel1000")).value == 0
    read = Counting(preset="perception_r1", accuracy={"form": None}).score(
        sample, answer, _context("rel1000")
    )
    assert (read.value > 0) == (read.parsed and read.detail["pred_count"] > 0 and answer != "3")


def test_unknown_spellings_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown spelling 'token' of counting; expected points, tokens\. Did you mean 'tokens'",
    ):
        Counting(spelling="token")
    with pytest.raises(ConfigError, match="unknown format_rule 'perception'"):
        Counting(mode="points", accuracy={"form": "perception"})
    assert "<|box_start|>" in _asked(Counting(mode="points", spelling="tokens"), _sample(POINTS))
    assert "<|" not in _asked(Counting(mode="points"), _sample(POINTS)) + _asked(
        Counting(spelling="tokens"), _sample(POINTS)
    )


def test_points_are_compared_in_thousandths_of_the_picture() -> None:
    task, sample = Counting(mode="points", accuracy={"rule": "published"}), _sample(POINTS[1:2])
    for frame, x in (("abs_orig", 320), ("rel1000", 500), ("rel1", 0.5), ("abs_resized", 322)):
        score = task.score(sample, f"<answer>[[{x}, 0]]</answer>", _context(frame))
        assert score.parts["accuracy"] == pytest.approx(1 - 500 / (1000 * 2**0.5)) and score.detail[
            "pred_points"
        ] == [[320, 0]]
        assert (
            Counting(mode="points")
            .score(sample, f"<answer>[[{x}, 0]]</answer>", _context(frame))
            .parts["accuracy"]
            == 0
        )
    assert task.score(sample, "<answer>1</answer>", _context()).parts["accuracy"] == 0
    missing = Sample("1", "counting", "s", "cats", 1, ("a.png",))
    assert (task.score(missing, "<answer>[[1, 2]]</answer>", _context()).reason or "").startswith(
        "reward_error: accuracy"
    )


def _row(tmp_path: Path, **changes: Any) -> str:
    make_scenes(tmp_path, 1, seed=0)
    row = {
        **json.loads((tmp_path / "data.jsonl").read_text()),
        "answer": 1,
        "params": {"points": [[3, 4]]},
        **changes,
    }
    (tmp_path / "own.jsonl").write_text(json.dumps(row))
    return str(tmp_path / "own.jsonl")


@pytest.mark.parametrize(
    ("params", "changes", "message"),
    [
        ({}, {"answer": "3"}, "a whole number >= 0"),
        ({}, {"answer": 2.5}, "a whole number"),
        ({}, {"answer": -1}, "a whole number"),
        ({}, {"answer": True}, "a whole number"),
        ({}, {"answer": 2}, "as many points as the answer says, 2"),
        ({}, {"params": {"points": [[1, 2, 3]]}}, "points as"),
        ({}, {"params": {"points": [[1, 700]]}}, "inside the picture of 112 x 112"),
        ({}, {"frame": "rel1000"}, "points in pixels"),
        ({"mode": "points"}, {"params": {}}, "params.points for mode 'points'"),
    ],
)
def test_bad_rows_are_named(
    tmp_path: Path, params: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        Counting(**params).load(_row(tmp_path, **changes))


def test_examples_have_zeros_and_points(tmp_path: Path) -> None:
    task = task_from_spec("counting", {"mode": "points"})
    samples = list(task.load(task.example_data(str(tmp_path)) or ""))
    assert {0, 1, 2} <= {s.answer for s in samples} and all(
        len(s.params["points"]) == s.answer for s in samples
    )
    assert next(iter(Counting().load(_row(tmp_path, answer=1.0)))).answer == 1
