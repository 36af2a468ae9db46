"""Text -> labelled boxes and points: strict, total, bounded, and cut answers keep what is complete."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.rewards.objects import (
    MAX_OBJECT_CHARS,
    MAX_OBJECTS,
    normalise_label,
    parse_objects,
    parse_points,
)
from mmrl.rewards.parsing import load_json, parse_boxes
from tests.kits.clock_kit import takes_less

CAT = ("cat", (1.0, 2.0, 3.0, 4.0))
DOG = ("dog", (5.0, 6.0, 7.0, 8.0))
coordinate = st.integers(-50, 1000)
objects = st.lists(
    st.tuples(
        st.sampled_from(["cat", "red dog", "it's", 'a "b"', "x]},{[y"]),
        st.tuples(coordinate, coordinate, coordinate, coordinate),
    ),
    max_size=8,
)


@pytest.mark.parametrize(
    "text",
    [
        '[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}, {"bbox_2d": [5, 6, 7, 8], "label": "dog"}]',
        "[{'bbox_2d': [1, 2, 3, 4], 'label': ' Cat'}, {'bbox': (5, 6, 7, 8), 'category': 'DOG\\t'}]",
        '```json\n[{"label": "cat", "box": [1.0, 2, 3, 4], "score": 0.3}, {"bbox_2d": [5, 6, 7, 8], "label": "dog"}]\n```',
        "<|object_ref_start|>cat<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|>\n"
        "<|object_ref_start|>dog<|object_ref_end|><|box_start|>(5, 6), (7, 8)<|box_end|>",
    ],
)
def test_spellings_of_two_objects(text: str) -> None:
    assert parse_objects(text).objects == (CAT, DOG)


@pytest.mark.parametrize(
    "text",
    [
        "[[1, 2, 3, 4]]",
        "[1, 2, 3, 4]",
        '{"bbox_2d": [1, 2, 3, 4]}',
        '[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}]',
        "(1, 2), (3, 4)",
        "(1, 2, 3, 4)",
        "<|box_start|>(1,2),(3,4)<|box_end|>",
        '{"boxes": [[1, 2, 3, 4]]}',
        "((1, 2, 3, 4))",
    ],
)
def test_one_asked_label_is_implied(text: str) -> None:
    assert parse_objects(text, label="Cat ").objects == (CAT,)


@pytest.mark.parametrize(
    "broken", ["(5,6),(7)", "(5,6,7,8)", "here", "", "(5,6),(7,8),(9,9)", "(5,6),(nan,8)"]
)
def test_a_box_of_special_tokens_that_cannot_be_read_costs_itself(broken: str) -> None:
    good, bad = "<|box_start|>(1,2),(3,4)<|box_end|>", f"<|box_start|>{broken}<|box_end|>"
    name = "<|object_ref_start|>cat<|object_ref_end|>"
    for text in (name + good + name + bad, name + bad + name + good):
        found = parse_objects(text)
        assert (found.objects, found.unreadable, found.reason) == ((CAT,), 1, None)
    assert (
        parse_points(name + good + bad).points == ((2, 3),)
        and parse_points(name + bad).reason == "not_a_box"
    )


def test_a_key_given_twice_is_refused_everywhere() -> None:
    for text in (
        '{"bbox_2d": [1, 2, 3, 4], "bbox_2d": [1, 2, 3, 4]}',
        "{'bbox_2d': [1, 2, 3, 4], 'bbox_2d': [5, 6, 7, 8]}",
    ):
        assert (
            parse_boxes(text).reason
            == parse_objects(text, "cat").reason
            == parse_points(text).reason
            == "not_a_box"
        )
        with pytest.raises(ValueError, match="duplicate keys"):
            load_json(text)
    assert parse_objects(
        '[{"bbox_2d": [1,2,3,4], "label": "cat"}, {"bbox_2d": [5,6,7,8], "label": "dog"}]'
    ).objects == (CAT, DOG)
    assert (
        parse_objects(
            '[[1, 2, 3, 4], {"box": [1, 2, 3, 4], "box": [5, 6, 7, 8]}, [1', "cat", cut=True
        ).reason
        == "not_a_box"
    )


def test_nothing_there_is_an_answer() -> None:
    for text in ("[]", " [ ]\n", "```json\n[]\n```"):
        assert (
            parse_objects(text) == parse_objects(text, "cat") and parse_objects(text).reason is None
        )
        assert parse_points(text).points == () and parse_points(text).reason is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"bbox_2d": [1, 2, 3, 4], "bbox_2d": [5, 6, 7, 8], "label": "a"}]', "not_a_box"),
        ("[{'bbox_2d': (1, 2, 3, 4), 'label': 'a', 'label': 'b'}]", "not_a_box"),
        ('{"boxes": [], "boxes": [[1, 2, 3, 4]]}', "not_a_box"),
        ('[{"bbox_2d": [1, 2, 3, 4], "label": "_"}]', "no_label"),
        ("[[1, 2, 3, 4]]", "no_label"),
        ('[{"bbox_2d": [1, 2, 3, 4]}]', "no_label"),
        ('[{"label": "cat"}]', "no_box_key"),
        ('[{"bbox_2d": [1,2,3,4], "bbox": [1,2,3,4], "label": "a"}]', "ambiguous_keys"),
        ('[{"bbox_2d": [1,2,3,4], "label": "a", "category": "b"}]', "ambiguous_keys"),
        ('[{"bbox_2d": [1, 2, 3, 4], "label": 7}]', "no_label"),
        ('[{"bbox_2d": [1, 2, 3, 4], "label": " "}]', "no_label"),
        ('[{"bbox_2d": [1, 2, 3], "label": "a"}]', "wrong_count"),
        ('[{"bbox_2d": "1 2 3 4", "label": "a"}]', "not_a_box"),
        ('[{"bbox_2d": [1, 2, 3, 1e9], "label": "a"}]', "out_of_range"),
        ('[{"bbox_2d": [1, 2, 3, NaN], "label": "a"}]', "out_of_range"),
        ('[{"bbox_2d": [1, 2, 3, 1e400], "label": "a"}]', "out_of_range"),
        ('[{"bbox_2d": [true, 2, 3, 4], "label": "a"}]', "not_a_box"),
        ("a cat at [1, 2, 3, 4]", "not_a_box"),
        ("true", "not_a_box"),
        ("7", "not_a_box"),
        ("", "not_a_box"),
        ("none", "not_a_box"),
        ("__import__('os').system('true')", "not_a_box"),
        ("<|box_start|>(1,2),(3,4)", "not_a_box"),
        ("<|box_start|>(1,2),(3,4)<|box_end|>", "no_label"),
        ("[" * 3000, "not_a_box"),
        (str([[1, 2, 3, 4]] * (MAX_OBJECTS + 1)), "too_many_objects"),
        ("<|box_start|>(1,2),(3,4)<|box_end|>" * (MAX_OBJECTS + 1), "too_many_objects"),
        ("[" + " " * MAX_OBJECT_CHARS, "answer_too_long"),
        ('[{"bbox_2d": [1, 2, 3, 4], "label": "' + "a" * 300 + '"}]', "no_label"),
    ],
)
def test_everything_else_fails_with_its_reason(text: str, reason: str) -> None:
    parsed = parse_objects(text)
    assert (parsed.objects, parsed.reason, parsed.truncated) == ((), reason, False)


@settings(deadline=None)
@given(objects, st.integers(0, 600), st.booleans())
def test_a_cut_answer_keeps_exactly_its_complete_objects(
    truth: list[tuple[str, tuple[int, ...]]], end: int, fence: bool
) -> None:
    pieces = [json.dumps({"bbox_2d": list(box), "label": label}) for label, box in truth]
    text = ("```json\n" if fence else "") + "[" + ", ".join(pieces) + "]"
    cut = text[: min(end, len(text) - 1)]
    complete, place = 0, text.index("[") + 1
    for piece in pieces:
        complete += len(cut) >= place + len(piece)
        place += len(piece) + 2
    parsed = parse_objects(cut, cut=True)
    assert len(parsed.objects) == complete and parsed.truncated == (complete > 0)
    assert [tuple(map(int, box)) for _, box in parsed.objects] == [
        box for _, box in truth[:complete]
    ]
    assert complete or parsed.reason == "truncated"
    assert parse_objects(cut).reason == "not_a_box", "complete text is never repaired"


def test_cut_lists_of_bare_boxes_keep_them_and_a_cut_number_is_not_trusted() -> None:
    assert parse_objects("[[1, 2, 3, 4], [5, 6, 7, 8", "cat", cut=True).objects == (CAT,)
    assert parse_objects("[[5, 6, 7", "cat", cut=True).reason == "truncated"
    assert parse_objects("[5, 6, 7, 8", "cat", cut=True).reason == "truncated", (
        "8 may have become 800"
    )
    assert parse_objects("[[1, 2, 3], [5", "cat", cut=True).reason == "wrong_count"
    assert parse_objects("[[1, 2, 3, 4]]", "cat", cut=True).truncated is False, (
        "the list was complete"
    )
    assert (
        parse_objects("[" + "[1,2,3,4]," * (MAX_OBJECTS + 1), "cat", cut=True).reason
        == "too_many_objects"
    )


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("[[1, 2], [3, 4]]", ((1, 2), (3, 4))),
        ("[1, 2]", ((1, 2),)),
        ('[{"point_2d": [1, 2], "label": "a"}]', ((1, 2),)),
        ("[[0, 0, 2, 4]]", ((1, 2),)),
        ('[{"bbox_2d": [0, 0, 2, 4]}]', ((1, 2),)),
        ("(1, 2)", ((1, 2),)),
        ("<|box_start|>(0,0),(2,4)<|box_end|>", ((1, 2),)),
    ],
)
def test_points_and_boxes_stand_for_centres(
    text: str, points: tuple[tuple[float, float], ...]
) -> None:
    assert parse_points(text).points == points


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[1, 2], [0, 0, 2, 4]]", "mixed_shapes"),
        ("[[1]]", "wrong_count"),
        ('[{"label": "a"}]', "no_point_key"),
        ('[{"point": [1, 2], "bbox": [1, 2, 3, 4]}]', "ambiguous_keys"),
        ("3", "not_a_box"),
        ('[{"point_2d": {"point": [1, 2]}}]', None),
    ],
)
def test_what_is_no_list_of_points_fails(text: str, reason: str | None) -> None:
    assert parse_points(text).reason == reason


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.text(max_size=200),
        st.text("[](){},.:-0123456789 \"'bl<|>", max_size=200),
        st.recursive(
            st.floats() | st.integers() | st.text(max_size=8) | st.none(),
            lambda x: (
                st.lists(x, max_size=5)
                | st.dictionaries(
                    st.sampled_from(["bbox_2d", "label", "point_2d", "boxes"]), x, max_size=4
                )
            ),
        ).map(json.dumps),
    ),
    st.booleans(),
    st.sampled_from([None, "cat", " "]),
)
def test_total_on_any_text(text: str, cut: bool, label: str | None) -> None:
    parsed = parse_objects(text, label, cut)
    assert not (parsed.objects and parsed.reason) and (not parsed.truncated or parsed.objects)
    assert all(
        normalise_label(name) == name != "" and len(box) == 4 for name, box in parsed.objects
    )
    points = parse_points(text)
    assert not (points.points and points.reason)


HOSTILE = [
    "[" * 40_000,
    "{" * 40_000,
    '[{"a":' * 6000,
    "[[1,2,3,4]," * 3600,
    "'" * 39_999,
    '"' * 39_999,
    "[" + "\\" * 39_000,
    "<|object_ref_start|>" * 1900,
    "<|box_start|>(" + "1" * 39_000,
    "<|box_start|>(1,2),(3,4)<|box_end|>" * 1100,
    "(" * 39_999,
    "(1,1)" + " " * 39_000,
    "[" + "9" * 39_000,
    "[[" + "]" * 39_000,
    " " * 39_999,
    "😀" * 39_999,
]


@pytest.mark.parametrize("text", HOSTILE, ids=[h[:12] for h in HOSTILE])
def test_hostile_text_takes_no_time(text: str) -> None:
    # measured: under 10 ms
    takes_less(1, lambda: (parse_objects(text, "cat", False), parse_points(text)))
    takes_less(1, lambda: (parse_objects(text, "cat", True), parse_points(text)))
