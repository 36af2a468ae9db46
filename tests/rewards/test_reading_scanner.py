"""The one scanner of brackets: strings, apostrophes, mismatched brackets, and what blocks, calls and cut lists make of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.rewards.objects import parse_objects
from mmrl.rewards.reading.blocks import blocks, json_block
from mmrl.rewards.reading.calls import one_call
from mmrl.rewards.reading.scanner import CLOSING, marks
from tests.kits.clock_kit import takes_less

VALUE = st.recursive(
    st.integers() | st.text("a'\"[]{}(),:\\ ", max_size=6),
    lambda x: (
        st.lists(x, max_size=3) | st.dictionaries(st.text("ab']}", max_size=3), x, max_size=3)
    ),
)


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("see [1, 2].", [(4, "[", 1), (6, ",", 1), (9, "]", 0)]),
        ("a, b (c)", [(5, "(", 1), (7, ")", 0)]),
        ('["]"]', [(0, "[", 1), (4, "]", 0)]),
        (r'["\"]"]', [(0, "[", 1), (6, "]", 0)]),
        ("['it's ]']", [(0, "[", 1), (9, "]", 0)]),
        ("[the dog's]", [(0, "[", 1), (10, "]", 0)]),
        ("[1}]", [(0, "[", 1), (3, "]", 0)]),
        ("it's [1]", [(5, "[", 1), (7, "]", 0)]),
    ],
)
def test_marks_outside_of_strings(text: str, places: list[tuple[int, str, int]]) -> None:
    assert list(marks(text)) == places


@settings(max_examples=200, deadline=None)
@given(st.lists(VALUE, max_size=4), st.sampled_from(["", "It's here: ", "the dogs' box is "]))
def test_the_block_of_any_json_is_found_in_prose(value: list[object], before: str) -> None:
    text = json.dumps(value)
    assert blocks(f"{before}{text} and that's all") == [(len(before), len(before) + len(text))]
    assert [depth for _, _, depth in marks(text)][-1:] == [0]


@pytest.mark.parametrize(
    "label", ["a [stop sign", "a smile :}", "it's (left", "dog's ]", 'a 5" pipe [']
)
def test_brackets_in_single_quotes_are_text(label: str) -> None:
    """A label in Python's quotes once made the list of a sentence unreadable: only double quotes were strings there."""
    item = f"{{'bbox_2d': [1, 2, 3, 4], 'label': {label!r}}}"
    block = json_block(f"These are all: [{item}] as you see.")
    assert block == f"[{item}]" and parse_objects(block).objects[0].box == (1, 2, 3, 4)
    cut = parse_objects(f"[{item}, {item}, {{'bbox_2d': [5, 6", cut=True)
    assert cut.truncated and len(cut.objects) == 2


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("type(content='it's (here', submit=[1, 2])", {"action": "type", "text": "it's (here"}),
        ("type(content='a: \\'b\\')')", {"action": "type", "text": "a: 'b')"}),
        ('click(point=(5, 4), note={"a)": 1})', {"action": "click", "point": [5, 4]}),
        ("click(point=(5, 4]", None),
        ("open_app(app, 16]] and more", None),
    ],
)
def test_a_call_ends_at_its_own_bracket(text: str, action: dict[str, object] | None) -> None:
    found = one_call(text)
    assert (None if found is None else json.loads(found)) == action


@pytest.mark.parametrize("piece", ["[", "['", '["', "]", "\\", "'", " '", "['a' ", "(,"])
def test_the_scan_is_linear(piece: str) -> None:
    text = piece * (200_000 // len(piece))
    # a quadratic scan takes minutes
    found = takes_less(2.0, lambda: list(marks(text)))
    assert all(char in "[{(,]})" and depth >= 0 for _, char, depth in found)
    assert set(CLOSING.values()) == set("]})")
