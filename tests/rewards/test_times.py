"""Times and spans out of text: every documented spelling, nothing else, never an exception, linear time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.rewards.times import MAX_SPANS, parse_spans, parse_time, spans_of
from tests.kits.clock_kit import takes_less


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12.5", 12.5),
        ("7", 7),
        ("12.5s", 12.5),
        ("12.5 seconds", 12.5),
        ("3 SEC", 3),
        ("00:02.50", 2.5),
        ("1:02", 62),
        ("75:00", 4500),
        ("1:02:03.5", 3723.5),
        ("  4  ", 4),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1:75",
        "1:2",
        "-3",
        "1e3",
        "nan",
        "12.5 sheep",
        "1:60:00",
        "12.",
        ".5",
        "\u0663",
        "1" * 70,
    ],
)
def test_what_is_no_time(text: str) -> None:
    assert parse_time(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "[2.5, 7]",
        "(2.5, 7)",
        "[[2.5, 7]]",
        "2.5 to 7",
        "From 2.5s to 7 seconds.",
        "2.5-7",
        "2.5 \u2013 7",
        "2.5 and 7",
        "00:02.50 to 00:07",
        "[00:02.50, 00:07.00]",
        '["00:02.50", "7"]',
        '{"time": [2.5, 7]}',
        "{'time': [2.5, 7]}",
        '{"start_time": "2.5", "end_time": "7"}',
        '{"start": 2.5, "end": "00:07"}',
        '[{"time": [2.5, 7]}]',
        "```json\n[2.5, 7]\n```",
        '{"timestamps": [["2.5 s", "7 s"]]}',
        "2.50\n to\t7.000",
    ],
)
def test_spellings_of_one_span(text: str) -> None:
    assert parse_spans(text).spans == ((2.5, 7.0),), parse_spans(text)


@pytest.mark.parametrize(
    "text",
    [
        "[[1, 2], [4, 6]]",
        "1 to 2, 4 to 6",
        "1 to 2; 4 - 6",
        "[(1, 2), (4, 6)]",
        '{"time": [[1, 2], [4, 6]]}',
        '[{"start": 1, "end": 2}, {"time": [4, 6]}]',
    ],
)
def test_spellings_of_several(text: str) -> None:
    assert parse_spans(text).spans == ((1.0, 2.0), (4.0, 6.0))


@pytest.mark.parametrize(
    "text",
    [
        "[-2.5, 7]",
        "-2.5 to 7",
        "from -2.5s to 7 s",
        "-2.5-7",
        "[[-2.5, 7]]",
        '["-2.5", "7 s"]',
        '{"start": "-00:02.50", "end": 7}',
        "[-00:02.5, 00:07]",
        "-0:02.5 - 0:07",
    ],
)
def test_a_minus_is_read_in_every_spelling(text: str) -> None:
    assert parse_spans(text).spans == ((-2.5, 7.0),), parse_spans(text)


@settings(max_examples=100, deadline=None)
@given(st.integers(-999, 999), st.integers(-999, 999))
def test_words_and_lists_are_one_rule(start: int, end: int) -> None:
    expected = ((start / 10, end / 10),)
    for text in ("{} to {}", "[{}, {}]", '["{}", "{}"]', '{{"start": {}, "end": "{}"}}'):
        assert parse_spans(text.format(start / 10, end / 10)).spans == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("--1 to 5", "not_spans"),
        ("- 1 to 5", "not_spans"),
        ('["--1", 5]', "not_a_time"),
        ("-1:75 to 3", "not_a_time"),
        ("-99999999 to 3", "out_of_range"),
        ("[-99999999, 3]", "out_of_range"),
        ("[-1e999, 3]", "out_of_range"),
        ("", "not_spans"),
        ("the event is at 1 to 2", "not_spans"),
        ("1 to 2 or 3 to 4", "not_spans"),
        ("[]", "no_span"),
        ("5", "not_spans"),
        ("[1, 2, 3, 4]", "wrong_count"),
        ("[1]", "wrong_count"),
        ('{"start": 1}', "wrong_count"),
        ("[true, 2]", "not_a_time"),
        ('["x", 2]', "not_a_time"),
        ("1:75 to 2:00", "not_a_time"),
        ("[NaN, 1]", "not_finite"),
        ("[1e999, 2]", "out_of_range"),
        ("[1" + "0" * 30 + ", 2]", "out_of_range"),
        ('{"time": [1, 2], "span": [3, 4]}', "ambiguous_keys"),
        ('{"time": [1, 2], "time": [3, 4]}', "ambiguous_keys"),
        ('{"x": [1, 2]}', "no_time_key"),
        ("[[[1, 2]]]", "not_spans"),
        ("[[1, 2], 3]", "not_spans"),
        (json.dumps([[1, 2]] * (MAX_SPANS + 1)), "too_many_spans"),
        (", ".join(["1 to 2"] * (MAX_SPANS + 1)), "too_many_spans"),
        ("[1, 2]" + " " * 5000, "answer_too_long"),
        ("__import__('os').system('x')", "not_spans"),
        ("1 to", "not_spans"),
        ("[1, 2] [1, 2]", "not_spans"),
    ],
)
def test_failures_have_names(text: str, reason: str) -> None:
    assert (
        parse_spans(text) == parse_spans(text)
        and parse_spans(text).reason == reason
        and parse_spans(text).spans == ()
    )


def test_a_clock_reading_is_marked() -> None:
    assert parse_spans("[1, 2]").clock is False
    assert (
        parse_spans('["00:01", 2]').clock
        and parse_spans("0:01 to 0:02").clock
        and parse_spans("[0:01, 0:02]").clock
    )


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.text(max_size=80),
        st.text("[](){}:,.-0123456789 tofrms\"'", max_size=80),
        st.recursive(
            st.floats() | st.integers() | st.text(max_size=6) | st.none() | st.booleans(),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(st.sampled_from(["time", "start", "end", "x"]), inner, max_size=3)
            ),
            max_leaves=10,
        ).map(json.dumps),
    )
)
def test_any_text_is_spans_or_a_reason(text: str) -> None:
    parsed = parse_spans(text)
    assert bool(parsed.spans) != bool(parsed.reason)
    assert all(type(v) is float and abs(v) <= 1e7 for span in parsed.spans for v in span)


def test_values_that_are_no_json_text() -> None:
    assert spans_of({"time": [1, 2]}).spans == ((1.0, 2.0),)
    assert spans_of(None).reason == "not_spans"


@pytest.mark.parametrize(
    "text",
    [
        "1 to 2, " * 480,
        "[" * 3900,
        "1:" * 1900,
        "1 to " * 780,
        "0" * 3900,
        "from " * 780,
        "[" + "00:01," * 650,
        "-1 to -1," * 430,
        "-" * 3900,
        "-0:" * 1300,
        '{"time":' * 480,
    ],
)
def test_hostile_texts_take_no_time(text: str) -> None:
    takes_less(0.1, lambda: parse_spans(text))
