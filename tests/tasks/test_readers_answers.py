"""Texts of answers in data rows: literals, options behind a question, answers between tags; hostile ones are refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrl.tasks.readers.answers import answer_in_tags, parse_literal, read_answer, split_options
from mmrl.tasks.readers.common import RowError
from tests.kits.clock_kit import takes_less

WORDS = st.text(st.characters(codec="utf-8"), max_size=8)
LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=10,
)


@given(LITERALS)
def test_literals_of_python_and_json_are_read_as_written(value: Any) -> None:
    assert parse_literal(repr(value)) == value
    assert parse_literal(json.dumps(value)) == value


@given(st.text(max_size=60) | st.text("[](){}'\",: \\x1.eTrueNone-", max_size=80))
def test_any_text_is_a_value_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        parse_literal(text)


def test_hostile_literals_are_refused_in_linear_time() -> None:
    def read() -> None:
        for text in (
            "[" * 100_000,
            "[(" * 50_000,
            "'" + "\\" * 100_000,
            "[1, " * 30_000,
            "{'a':" * 20_000,
            "(" * 3 + ")" * 10_000,
            "9" * 150_000,
            "['a'" + " " * 100_000,
            "x" * 300_000,
            "'\\U99999999'",
        ):
            with pytest.raises(ValueError, match=r"."):
                parse_literal(text)

    takes_less(15, read)
    for text in (
        "__import__('os')",
        "open('x').read()",
        "[x for x in (1,)]",
        "lambda: 0",
        "{1: 2}",
        "1 + 1",
        "'a' 'b'",
    ):
        with pytest.raises(ValueError, match=r"."):
            parse_literal(text)


def test_options_behind_a_question() -> None:
    assert split_options("Q?\nOptions:\nA. x\nB. y") == ("Q?", ["A. x", "B. y"])
    assert split_options("Q?\n\n(A) x\n(B) y\n") == ("Q?", ["(A) x", "(B) y"])
    for text in (
        "Q?",
        "Q?\nA. x",
        "Q?\nA. x\nC. y",
        "Q?\nB. x\nA. y",
        "A. x\nB. y",
        "Q?\nA. x\nB. y\nExplain.",
        "A.x\nB.y",
    ):
        assert split_options(text) == (text, [])


def test_answers_are_read_as_the_task_needs_them() -> None:
    assert (
        read_answer("counting", "<answer> 12 </answer>") == 12
        and read_answer("numeric", "12") == "12"
    )
    assert read_answer("grounding", "It is at [1, 2, 3, 4].") == [1, 2, 3, 4]
    assert read_answer(
        "detection", "<answer>[{'bbox_2d': [1, 2, 3, 4], 'label': 'cat'}]</answer>"
    ) == [{"bbox": [1, 2, 3, 4], "label": "cat"}]
    assert (
        read_answer("detection", "none of them") == "none of them" and read_answer("choice", 3) == 3
    )
    assert (
        answer_in_tags("<think>a</think><answer>b</answer>") == "b" and answer_in_tags(" b ") == "b"
    )
    for text in (
        "",
        "<answer></answer>",
        "<answer>a",
        "a</answer>",
        "<answer>a</answer><answer>b</answer>",
    ):
        with pytest.raises(RowError):
            answer_in_tags(text)
    with pytest.raises(RowError, match=r"one answer"):
        answer_in_tags("b", required=True)
