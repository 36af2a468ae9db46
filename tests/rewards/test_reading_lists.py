"""Lists and tracks keep what is readable and count the rest: one bad element of sixteen costs that element."""

from __future__ import annotations

import json

import pytest

from mmrl.coords import CoordFrame
from mmrl.registry import task_from_spec
from mmrl.rewards.objects import parse_objects, parse_points
from mmrl.rewards.parsing import load_json, parse_boxes
from mmrl.rewards.tracks import parse_track
from mmrl.types import ImageSize, RewardContext, Sample, Score

CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG, (ImageSize((1000, 1000), (1000, 1000)),))
BOXES = [[60 * n, 10, 60 * n + 50, 90] for n in range(16)]
BROKEN = [
    "[NaN, 1, 2, 3]",
    "[1, 2, 3]",
    "[1, 2, 3, 1e400]",
    '"none"',
    "null",
    "[1, 2, 3, 1e9]",
    "{}",
]


def score(task: str, truth: object, text: str, params: dict[str, object]) -> Score:
    video = task != "detection"
    sample = Sample(
        "1",
        task,
        "s",
        "q",
        truth,
        () if video else ("a.png",),
        videos=("a.mp4",) if video else (),
        params={"width": 1000, "height": 1000, **params},
    )
    return task_from_spec(task, {"answer_format": "bare"}).score(sample, text, CTX)


@pytest.mark.parametrize("bad", BROKEN)
def test_one_bad_box_of_sixteen_costs_that_box(bad: str) -> None:
    texts = [json.dumps(box) for box in BOXES]
    broken = [*texts[:3], bad, *texts[4:]]
    truth = [{"bbox": box, "label": "cat"} for box in BOXES]
    found = score("detection", truth, f"[{', '.join(broken)}]", {"categories": ["cat"]})
    assert found.parsed and found.metrics["unreadable"] == 1
    assert (
        found.metrics["recall@0.5"] == pytest.approx(15 / 16)
        and found.metrics["precision@0.5"] == 1
    )
    assert (
        score("detection", truth, f"[{', '.join(texts)}]", {"categories": ["cat"]}).metrics[
            "unreadable"
        ]
        == 0
    )

    keyed = {str(n): box for n, box in enumerate(BOXES)}
    table = "{" + ", ".join(f'"{n}": {text}' for n, text in enumerate(broken)) + "}"
    found = score("tracking", {"boxes": keyed}, f'{{"boxes": {table}}}', {"duration": 16})
    assert (
        found.parsed
        and found.metrics["unreadable"] == 1
        and found.metrics["iou"] == pytest.approx(15 / 16)
    )
    found = score(
        "st_grounding",
        {"time": [0, 16], "boxes": keyed},
        f'{{"time": [0, 16], "boxes": {table}}}',
        {"duration": 16},
    )
    assert (
        found.parsed
        and found.metrics["unreadable"] == 1
        and found.metrics["viou"] == pytest.approx(15 / 16)
    )


def test_a_key_that_is_no_time_costs_its_box_and_a_right_time_counts_alone() -> None:
    truth = {"time": [0, 2], "boxes": {"0": BOXES[0], "1": BOXES[1]}}
    text = json.dumps({"time": [0, 2], "boxes": {"0": BOXES[0], "frame3": BOXES[1]}})
    found = score("st_grounding", truth, text, {"duration": 4})
    assert (
        found.parsed
        and found.metrics["unreadable"] == 1
        and found.metrics["viou"] == pytest.approx(0.5)
    )
    found = score("st_grounding", truth, '{"time": [0, 2], "boxes": {}}', {"duration": 4})
    assert found.parsed and found.metrics["tiou"] == 1 and found.metrics["viou"] == 0
    assert found.parts["accuracy"] == pytest.approx(0.5), "half of the mean of time and boxes"
    assert (
        score("tracking", {"boxes": truth["boxes"]}, '{"boxes": {}}', {"duration": 4}).reason
        == "no_boxes"
    )


def test_nothing_readable_and_keys_given_twice_are_failures() -> None:
    assert parse_objects("[[1, 2, 3], [NaN, 1, 2, 3]]", "cat").reason == "wrong_count"
    assert (
        parse_track('{"0": [1, 2, 3]}').reason == "wrong_count"
        and parse_track('{"x": [1, 2, 3, 4]}').reason == "not_a_time"
    )
    assert parse_track('{"1": [1, 2, 3, 4], "1.0": [1, 2]}').reason == "duplicate_keys", (
        "also where one of them is unreadable"
    )
    assert (
        parse_points("[[1, 2], [3]]").points == ((1.0, 2.0),)
        and parse_points("[[1, 2], [3]]").unreadable == 1
    )
    assert parse_track("[[1, 2, 3, 4], [1]]").listed == ((1.0, 2.0, 3.0, 4.0), None)


def test_none_is_the_empty_list_of_objects() -> None:
    for text in ("None", "null", "[]"):
        assert (
            parse_objects(text, "cat") == parse_objects("[]", "cat")
            and parse_objects(text, "cat").reason is None
        )
    assert score("detection", [], "None", {"categories": ["cat"]}).parts["accuracy"] == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[1, 2, 3, 4,]", [1, 2, 3, 4]),
        ('{"a": [1, 2], }', {"a": [1, 2]}),
        ('["x", "y", ]', ["x", "y"]),
        ("(1,)", [1]),
        ('{"a": "b,]",}', {"a": "b,]"}),
    ],
)
def test_a_spare_comma_at_the_end_is_none(text: str, value: object) -> None:
    assert load_json(text) == value


@pytest.mark.parametrize("text", ["[,]", "[1,,]", "[1,,2]", "{,}", "[, 1]", ","])
def test_other_spare_commas_are_errors(text: str) -> None:
    with pytest.raises(ValueError):
        load_json(text)


def test_numbers_as_texts_in_a_box() -> None:
    assert parse_boxes('["1", "2.5", "3", "4"]').boxes == ((1.0, 2.5, 3.0, 4.0),)
    for text in (
        '["1", 2, "3", "4"]',
        '["1e3", "2", "3", "4"]',
        '["x", "2", "3", "4"]',
        '["", "2", "3", "4"]',
    ):
        assert parse_boxes(text).reason is not None, text
