"""Answer extraction and box parsing: strict, total, fast, and nothing in the text is ever run."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.rewards.format import format_reward, wrap_answer
from mmrl.rewards.parsing import MAX_ANSWER_CHARS, extract_answer, load_json, parse_boxes
from tests.kits.clock_kit import takes_less

tags = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<answer>",
            "</answer>",
            "[1, 2, 3, 4]",
            "[5, 6, 7, 8]",
            " ",
            "x",
            "<",
            "<|im_end|>",
            "{",
        ]
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize(
    ("text", "answer", "reason"),
    [
        ("<answer>[1]</answer>", "[1]", None),
        ("<answer> [1]\n</answer> and so on <|im_end|>", "[1]", None),
        ("<think>a<answer>[9]</answer></think><answer>[1]</answer>", "[1]", None),
        ("hm</think><answer>[1]</answer>", "[1]", None),
        ("<think>a<answer>[9]</answer></think>", None, "empty"),
        ("<think>a<answer>[9]</answer></think> so", None, "no_answer"),
        ("<think>a<answer>[9]</answer>", None, "unclosed_think"),
        (
            "<answer>[1]</answer><think>a</think><answer>[2]</answer>",
            None,
            "answer_before_thoughts",
        ),
        ("<answer>[1]</answer><answer>[1]</answer>", None, "several_answers"),
        ("<answer><answer>[1]</answer>", None, "several_answers"),
        ("<answer>[1]</answer></answer>", None, "several_answers"),
        ("</answer>[1]<answer>", None, "answer_out_of_order"),
        ("</think>a<think><answer>[1]</answer>", None, "thoughts_out_of_order"),
        ("<think>a</think><think>b</think><answer>[1]</answer>", None, "several_thoughts"),
        ("<answer>[1, 2", None, "unclosed_answer"),
        ("[1, 2, 3, 4]", None, "no_answer"),
        ("<ANSWER>[1]</ANSWER>", None, "no_answer"),
        ("", None, "empty"),
        ("a" * 500_000, None, "too_long"),
    ],
)
def test_exactly_one_answer_outside_the_thoughts(
    text: str, answer: str | None, reason: str | None
) -> None:
    found = extract_answer(text)
    assert (found.answer, found.reason) == (answer, reason)


def test_bare_takes_everything_after_the_thoughts() -> None:
    assert extract_answer("<think>[9]</think> [1] <|im_end|>\n", "bare").answer == "[1]"
    assert extract_answer("<|im_end|>", "bare").reason == "empty"


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-9, 9)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_literals_in_both_languages(value: object) -> None:
    """Python's own spelling, quotes and escapes included, reads back as the same data."""
    assert load_json(json.dumps(value)) == value
    text = repr(value)
    if "\\U" not in text:  # the one escape left out
        assert load_json(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{'label': 'dog (left)', 'at': (1, [2])}", {"label": "dog (left)", "at": [1, [2]]}),
        ("""{'label': "a cat's tail", "n": None}""", {"label": "a cat's tail", "n": None}),
        (r"""['it\'s', 'a "b"', '\x41\n', True, 'None']""", ["it's", 'a "b"', "A\n", True, "None"]),
    ],
)
def test_strings_keep_their_characters(text: str, value: object) -> None:
    assert load_json(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "'",
        "['a]",
        '["a]',
        "[1, 2",
        "(1, NaN)",
        "[Infinity]",
        "{'a': 1, 'a': 2}",
        "{1: 2}",
        "[,]",
        "a",
        "__import__('os')",
        "'a' 'b'",
        "",
        "[0x10]",
        "'\\U0001F600'",
    ],
)
def test_what_is_no_literal_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        load_json(text)


@given(st.text(max_size=80) | st.text("[](){},:'\\\"TrueNone1. x", max_size=80))
def test_any_text_is_a_value_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError, RecursionError):
        json.dumps(load_json(text), allow_nan=False)


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3, 4]",
        " [1.0, 2, 3e0, 4.00]\n",
        "(1,2),(3,4)",
        "( 1 , 2 ) , ( 3 , 4 )",
        "(1, 2, 3, 4)",
        "[[1, 2, 3, 4]]",
        "<|box_start|>(1,2),(3,4)<|box_end|>",
        "<|object_ref_start|>a cat<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|>",
        '{"bbox_2d": [1, 2, 3, 4], "label": "a"}',
        '[{"bbox_2d": [1, 2, 3, 4], "label": "a (b)"}]',
        '```json\n[{"bbox_2d": [1, 2, 3, 4]}]\n```',
        "{'bbox': (1, 2, 3, 4)}",
        '{"boxes": [1, 2, 3, 4]}',
        '{"box": [[1, 2, 3, 4]]}',
    ],
)
def test_spellings_of_one_box(text: str) -> None:
    assert parse_boxes(text).boxes == ((1.0, 2.0, 3.0, 4.0),)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("the box is [1, 2, 3, 4]", "not_a_box"),
        ("[1, 2, 3, 4] [1, 2, 3, 4]", "not_a_box"),
        ("[1, 2, 3, 4", "not_a_box"),
        ("[1, 2, 3]", "wrong_count"),
        ("[1, 2, 3, 4, 5]", "wrong_count"),
        ("[]", "no_box"),
        ("[[]]", "no_box"),
        ('["1", "2", "3", 4]', "not_a_box"),
        ("[true, 2, 3, 4]", "not_a_box"),
        ("null", "not_a_box"),
        ("5", "not_a_box"),
        ("[1, 2, 3, NaN]", "not_finite"),
        ("[1, 2, 3, Infinity]", "not_finite"),
        ("[1, 2, 3, 1e400]", "not_finite"),
        ("[1, 2, 3, 1e9]", "out_of_range"),
        ("[1, 2, 3, " + "9" * 3000 + "]", "out_of_range"),
        ("[１, ２, ３, ４]", "not_a_box"),
        ("(١,٢),(٣,٤)", "not_a_box"),
        ("[1, 2, 3, 4]😀", "not_a_box"),
        ("1_0, 2, 3, 4", "not_a_box"),
        ('{"label": "a"}', "no_box_key"),
        ('{"bbox": [1,2,3,4], "bbox_2d": [5,6,7,8]}', "ambiguous_keys"),
        ("<|box_start|>(1,2),(3,4)", "not_a_box"),
        ("<|box_end|>", "not_a_box"),
        ("box_start|>(1,2),(3,4)", "not_a_box"),
        ("[" * 3000, "not_a_box"),
        ("1" * (MAX_ANSWER_CHARS + 1), "answer_too_long"),
        ("", "not_a_box"),
        ("``````", "not_a_box"),
        ("[1, 2, [3], 4]", "not_a_box"),
        ('{"bbox_2d": "1 2 3 4"}', "not_a_box"),
    ],
)
def test_everything_else_fails_with_its_reason(text: str, reason: str) -> None:
    parsed = parse_boxes(text)
    assert (parsed.boxes, parsed.reason) == ((), reason)


def test_several_boxes_are_kept_in_order() -> None:
    assert parse_boxes('[{"bbox_2d": [1,2,3,4]}, {"bbox": [5,6,7,8]}]').boxes == (
        (1, 2, 3, 4),
        (5, 6, 7, 8),
    )


def test_text_is_never_run() -> None:
    for text in (
        "__import__('os').system('touch /tmp/x')",
        "[1, 2, 3, exit()]",
        "(lambda: 1)()",
        "[1,2,3,4]*9999999",
    ):
        assert parse_boxes(text).reason == "not_a_box"


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(max_size=200), tags))
def test_total_on_any_text(text: str) -> None:
    for answer_format in ("answer", "think", "bare"):
        found = extract_answer(text, answer_format)
        assert (found.answer is None) == (found.reason is not None)
        assert format_reward(text, answer_format) in (0.0, 1.0)
    parsed = parse_boxes(text)
    assert bool(parsed.boxes) == (parsed.reason is None)


HOSTILE = [
    "<" * 400_000,
    "(" * 4000,
    "(1,1)" + " " * 3990,
    "<think>" + "<a" * 190_000,
    "<answer>" + " " * 390_000,
    "(1,2),(3," + "1" * 3900,
    "<|object_ref_start|>" * 190,
    "</think>" + "\n" * 399_000,
    "[1," * 1300,
    "[" * 4000,
    '{"a":' * 700,
    "😀" * 100_000,
    "'" * 4000,
    "<|im_end|>" * 39_000,
    "<answer>" * 49_000,
    "-" * 4000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=[h[:12] for h in HOSTILE])
def test_hostile_text_takes_no_time(text: str) -> None:
    def read() -> None:
        for answer_format in ("answer", "think", "bare"):
            extract_answer(text, answer_format)
            format_reward(text, answer_format)
        parse_boxes(text)
        parse_boxes(text[:4000])

    takes_less(1.0, read)


@pytest.mark.parametrize(
    ("text", "answer_format", "value"),
    [
        ("<answer>[1]</answer>", "answer", 1),
        (" <answer>[1]</answer>\n<|im_end|>", "answer", 1),
        ("<answer>[1]</answer> bye", "answer", 0),
        ("well <answer>[1]</answer>", "answer", 0),
        ("<think>a</think><answer>[1]</answer>", "answer", 0),
        ("<answer>[1]", "answer", 0),
        ("<answer>a<answer>b</answer>", "answer", 0),
        ("<think>a</think>\n<answer>[1]</answer>", "think", 1),
        ("a</think><answer>[1]</answer>", "think", 1),
        ("<answer>[1]</answer>", "think", 0),
        ("<think>a</think>b<answer>[1]</answer>", "think", 0),
        ("<think>a<think>b</think><answer>[1]</answer>", "think", 0),
        ("<think>1 < 2 and <b></think><answer>[1]</answer>", "think", 1),
        ("<garbage", "answer", 0),
        ("object_ref_start", "answer", 0),
        ("<|object_ref_start|>", "answer", 0),
        ("<", "think", 0),
        ("[1]", "bare", 1),
        ("<answer>[1]</answer>", "bare", 0),
    ],
)
def test_format_reward_is_all_or_nothing(text: str, answer_format: str, value: float) -> None:
    assert format_reward(text, answer_format) == value


@settings(deadline=None)
@given(
    st.sampled_from(["answer", "think", "bare"]),
    st.from_regex(r"[a-z0-9,\[\] .]{1,30}", fullmatch=True),
)
def test_wrapped_answers_come_back(answer_format: str, answer: str) -> None:
    text = wrap_answer(answer, answer_format)
    assert format_reward(text, answer_format) == 1
    nothing = None if answer_format == "bare" else ""  # an empty text is no bare answer
    assert extract_answer(text, answer_format).answer == (answer.strip() or nothing)
