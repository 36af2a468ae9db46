"""Sentences: one value is read at `native` and not at `strict`; two, doubted or withdrawn ones are read at neither."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.registry import task_from_spec
from mmrl.rewards.format_rules import make_format_rule
from mmrl.rewards.gui import parse_point
from mmrl.rewards.gui_actions import parse_action
from mmrl.rewards.parsing import json_once, load_json
from mmrl.rewards.reading import Unread, words
from mmrl.rewards.reading.blocks import blocks, json_block
from mmrl.rewards.reading.calls import call_place, one_call
from mmrl.rewards.reading.choices import one_letter, yes_or_no
from mmrl.rewards.reading.numbers import none_of_them, one_number
from mmrl.rewards.reading.places import labelled_boxes, many_points, one_box, one_place
from mmrl.rewards.reading.times import spans_in
from mmrl.rewards.reading.tracks import track_in
from mmrl.rewards.reading.words import value_of_words
from mmrl.types import ImageSize, RewardContext, Sample, Score
from tests.kits.clock_kit import takes_less

CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG, (ImageSize((1000, 1000), (1000, 1000)),))
OPTIONS = ["dog", "red cat", "bird", "horse"]


def score(
    task: str, truth: object, text: str, level: str, params: dict[str, object] | None = None
) -> Score:
    video = task == "temporal_grounding"
    sample = Sample(
        "1",
        task,
        "s",
        "q",
        truth,
        () if video else ("a.png",),
        videos=("a.mp4",) if video else (),
        params={"width": 1000, "height": 1000, **(params or {})},
    )
    return task_from_spec(task, {"answer_format": "bare", "answers": level}).score(
        sample, text, CTX
    )


READ = [  # task, truth, params, texts
    (
        "numeric",
        5,
        {"unit": "m"},
        ["5 meters", "5 metres", "It is 5 m.", "The distance is 5 m", "x = 5"],
    ),
    (
        "numeric",
        5,
        {},
        ["$5", "5 dollars", "five", "x = 5", "The answer is 5.", "\\boxed{5}", "It costs $5."],
    ),
    ("numeric", 200, {}, ["two hundred", "two hundred apples", "There are two hundred of them"]),
    ("numeric", 0.5, {}, ["50%", "50 percent", "It is 50%."]),
    ("numeric", 50, {"unit": "%"}, ["50%", "It is 50 percent."]),
    ("numeric", 2500000, {}, ["2.5 million", "2.5 million people"]),
    ("numeric", 1234, {}, ["The total is 1,234."]),
    (
        "counting",
        0,
        {},
        [
            "There are no cats",
            "None",
            "There are no cats in the image.",
            "I see no cats",
            "There aren't any cats.",
        ],
    ),
    ("counting", 200, {}, ["two hundred", "There are two hundred."]),
    ("counting", 7, {}, ["seven", "\\boxed{7}", "Answer: 7", "x = 7"]),
    (
        "choice",
        "B",
        {"options": OPTIONS},
        [
            "The answer is B",
            "Option B",
            "The best answer is: B",
            "答案是B",
            "I am sure: B",
            "选B",
            "The correct option is **B**.",
            "(B) because it is red",
            "It is a red cat.",
            "B. The animal is a red cat",
            "\\boxed{\\text{B}}",
        ],
    ),
    (
        "boolean",
        True,
        {},
        [
            "Yes, there is a dog.",
            "Yes!",
            "The answer is yes.",
            "Yes it is",
            "是的",
            "**Yes**, clearly.",
        ],
    ),
    ("boolean", False, {}, ["No, the room is empty.", "No!", "The statement is false.", "否"]),
    (
        "temporal_grounding",
        [[10, 20]],
        {"duration": 100},
        [
            "in 10.0 - 20.0 seconds.",
            "between 10 and 20 seconds",
            "It starts at 10 s and ends at 20 s.",
            "The event happens from 00:10 to 00:20 in the video.",
            "It is [10, 20].",
        ],
    ),
    ("classification", "cat", {"labels": ["cat", "dog"]}, ["It is a cat.", "a photo of a cat"]),
    ("spatial", "left", {}, ["It is on the left of the table.", "The cup is to the left."]),
]
HEDGES = [
    (
        "numeric",
        5,
        {},
        [
            "5 or 6",
            "between 5 and 6",
            "about 5",
            "not 5",
            "5, maybe 6",
            "5-6",
            "at least 5",
            "5 and 6",
            "~5",
            "5k",
            "5th",
            "either 5 m or 6 m",
            "It could be 5",
            "5 (or 6)",
            "five or six",
            "more than five",
        ],
    ),
    ("numeric", 5, {"unit": "m"}, ["5 cm", "It is 5 km.", "$5"]),
    (
        "counting",
        3,
        {},
        [
            "3 or 4",
            "between 3 and 4",
            "about 3",
            "not 3",
            "at least three",
            "three, no, four",
            "3 4",
            "No more than 3",
        ],
    ),
    (
        "counting",
        0,
        {},
        [
            "No idea",
            "There is no way to tell",
            "no",
            "none or one",
            "There are no clear answers",
            "No answer",
        ],
    ),
    (
        "choice",
        "B",
        {"options": OPTIONS},
        [
            "B or C",
            "not B",
            "maybe B",
            "The answer is B or C",
            "B and C",
            "A, B, C, D",
            "It isn't B",
            "The answer is B. dog",
            "Either a dog or a red cat",
            "Option B, or option C",
            "B is wrong",
            "not a red cat",
            "B, no wait, C",
            "The answer is probably B",
            "a red cat, a dog",
        ],
    ),
    (
        "boolean",
        True,
        {},
        [
            "Yes and no",
            "Yes or no",
            "Yes, but maybe not",
            "Maybe yes",
            "Yes, or rather no",
            "Not yes",
            "yes/no",
            "Yes, it could be either",
            "No. Yes.",
        ],
    ),
    (
        "temporal_grounding",
        [[10, 20]],
        {"duration": 100},
        [
            "10 to 20 or 30 to 40",
            "maybe 10 to 20",
            "10 to 20, or at 50",
            "not 10 to 20",
            "[10, 20] or [30, 40]",
        ],
    ),
    (
        "grounding",
        [10, 20, 300, 400],
        {},
        [
            "[10, 20, 300, 400] or [1, 2, 3, 4]",
            "[10, 20, 300, 400] and [1, 2, 3, 4]",
            "maybe [10, 20, 300, 400]",
            "not [10, 20, 300, 400]",
            "[[10, 20, 300, 400], [1, 2, 3, 4]]",
            "<box>[[10, 20, 300, 400]]</box><box>[[1, 2, 3, 4]]</box>",
            "<box>10 20 300 400</box><box>1 2 3 4</box>",
            "10 20 300 400 or 1 2 3 4",
        ],
    ),
    (
        "gui_grounding",
        [10, 20, 300, 400],
        {},
        [
            "(15, 30) or (900, 900)",
            "click(15, 30) and click(900, 900)",
            "not (15, 30)",
            "<point>15 30</point><point>900 900</point>",
            "[[15, 30], [900, 900]]",
            "pyautogui.click(x=15, y=30)\npyautogui.click(x=900, y=900)",
            '<points x1="15" y1="30" x2="900" y2="900" alt="it">it</points>',
        ],
    ),
    (
        "gui_action",
        {"action": "click", "point": [15.0, 30.0]},
        {},
        [
            "click(15, 30) or press_back()",
            '[{"action": "click", "point": [15, 30]}, {"action": "wait"}]',
            '{"action": "click", "point": [15, 30]} {"action": "wait"}',
            "Action: click(point='<point>15 30</point>')\n\nclick(point='<point>90 90</point>')",
            '<tool_call>{"name": "mobile_use", "arguments": {"action": "click", "coordinate": [15, 30]}}</tool_call>'
            '<tool_call>{"name": "mobile_use", "arguments": {"action": "wait"}}</tool_call>',
            "<tool_call><function=computer_use><parameter=action>click</parameter><parameter=coordinate>[15, 30]</parameter>"
            "</function><function=computer_use><parameter=action>wait</parameter></function></tool_call>",
            "<tool_call><function=computer_use><parameter=action>click</parameter><parameter=coordinate>[15, 30]</parameter>"
            "<parameter=coordinate>[90, 90]</parameter></function></tool_call>",
        ],
    ),
    (
        "classification",
        "cat",
        {"labels": ["cat", "dog"]},
        ["a cat or a dog", "not a cat", "maybe a cat"],
    ),
    ("spatial", "left", {}, ["left or right", "not left", "It is left, or above it"]),
]


@pytest.mark.parametrize(("task", "truth", "params", "texts"), READ)
def test_one_value_is_read(
    task: str, truth: object, params: dict[str, object], texts: list[str]
) -> None:
    for text in texts:
        found = score(task, truth, text, "native", params)
        assert found.parsed and found.parts["accuracy"] == pytest.approx(1), (
            text,
            found.reason,
            dict(found.detail),
        )


@pytest.mark.parametrize(("task", "truth", "params", "texts"), HEDGES)
def test_hedges_pay_at_no_level(
    task: str, truth: object, params: dict[str, object], texts: list[str]
) -> None:
    for text in texts:
        for level in ("strict", "native"):
            found = score(task, truth, text, level, params)
            assert found.reason is not None and found.parts["accuracy"] == 0, (
                level,
                text,
                dict(found.detail),
            )


def test_the_level_that_reads_an_answer_is_told() -> None:
    task = task_from_spec("numeric", {"answer_format": "bare"})
    sample = Sample("1", "numeric", "s", "q", 5, ("a.png",), params={})
    assert [
        task.readable_at(sample, text, CTX) for text in ("5", "\\boxed{5}", "5 apples", "5 or 6")
    ] == [  # type: ignore[attr-defined]
        "strict",
        "strict",
        "native",
        None,
    ]


def test_number_words() -> None:
    for text, value in (
        ("seven", 7),
        ("twenty-one", 21),
        ("two hundred", 200),
        ("two hundred and five", 205),
        ("nineteen hundred", 1900),
        ("one million two hundred thousand", 1_200_000),
        ("three thousand", 3000),
        ("zero", 0),
    ):
        assert value_of_words(text) == value, text
    for text in (
        "two three",
        "hundred",
        "twenty eleven",
        "two thousand three million",
        "zero one",
        "and five",
        "five and",
        "",
        "cat",
    ):
        assert value_of_words(text) is None, text


READERS = [
    lambda t: one_call(t, "mobile"),
    call_place,
    lambda t: one_letter(t, OPTIONS, 4),
    yes_or_no,
    one_number,
    none_of_them,
    labelled_boxes,
    one_box,
    one_place,
    lambda t: many_points(t, (10, 10)),
    spans_in,
    track_in,
    json_block,
    blocks,
]


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=80)
    | st.lists(
        st.sampled_from(
            [
                "<point>",
                "</point>",
                "<box>",
                "</box>",
                "[1, 2, 3, 4]",
                "(1,2)",
                "click(",
                ")",
                "'",
                '"',
                "{",
                "}",
                "```",
                "Action: ",
                "5",
                "five",
                "B",
                " or ",
                "yes",
                "%",
                "$",
                "to ",
                "=",
                ",",
                "\n",
                "<tool_call>",
                "[",
                "]",
                'x="1" y="2"',
                "<points ",
                "frame",
                ":",
            ]
        ),
        max_size=14,
    ).map("".join)
)
def test_translators_are_total(text: str) -> None:
    for reader in READERS:
        try:
            reader(text)
        except Unread as refused:
            assert refused.reason.replace("_", "").isalpha()


@pytest.mark.parametrize(
    "text",
    [
        "(1,2)," * 660,
        "[" * 4000,
        "<ref>" * 800,
        "```" * 1300,
        "x=1, " * 800,
        "1 " * 2000,
        "<point " * 570,
        "dog" * 1300,
        "click(" * 660,
        "<action>" * 500,
        "\nAction:" * 500,
        "'" * 4000,
        "at the " * 570,
        "five " * 800,
        "<tool_call>" * 360,
        "<tool_call><function=f>" + "<parameter=a>" * 300,
        "A " * 2000,
        "1," * 2000,
        "answer is " * 400,
        "-1:" * 1300,
        "</point>" * 500,
    ],
)
def test_hostile_texts_take_no_time(text: str) -> None:
    def read(reader: Callable[[str], object]) -> None:
        with contextlib.suppress(Unread):
            reader(text)

    for reader in READERS:
        takes_less(0.1, partial(read, reader))


@pytest.mark.parametrize("pattern", [words.HEDGES, words.DOUBTS], ids=["hedges", "doubts"])
def test_every_hedge_is_found_by_its_first_letter(pattern: re.Pattern[str]) -> None:
    """The search looks at first letters before it compares words: one that is not among them would never be found."""
    inner = pattern.pattern.rpartition("(?:not|")[2].removesuffix(r")\b")
    # without endings that a word may have
    known = ["not", *re.sub(r"\(\?:[^)]*\)\?|\w\?", "", inner).split("|")]
    assert len(known) > 25 and not [
        word for word in known if not pattern.search(f"I say {word} this")
    ]
    assert all(
        pattern.search(f"it is{end} so") for end in ("n't", "n’t", "N'T")
    ) and not pattern.search("n't")


def test_a_value_is_read_once_for_its_content_and_its_form() -> None:
    text, form = (
        "[{'action': 'click', 'point': [3, 4], 'input_text': 'no input text'}]",
        make_format_rule("gui_r1", "think"),
    )
    json_once.cache_clear()
    assert (
        parse_point(text).point == (3, 4) and form(f"<think>x</think><answer>{text}</answer>") == 1
    )
    assert (json_once.cache_info().misses, json_once.cache_info().hits) == (1, 1)
    assert parse_action(text, "mobile").action is not None and json_once(text) == load_json(text), (
        "nobody changed what is shared"
    )
