"""Choice and yes/no parsing: whole answers only, words with boundaries, nothing gained by hedging."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.rewards.choice import (
    LETTERS,
    nearest_option,
    normalise_text,
    parse_boolean,
    parse_choice,
    strip_letters,
)
from mmrl.rewards.text import _unicode_form
from tests.kits.clock_kit import takes_less

PETS = ["dog", "red cat", "bird", "A and B", "horse", "ant"]


@pytest.mark.parametrize(
    "text",
    [
        "B",
        "b",
        "(B)",
        "(b)",
        "B.",
        "B)",
        "B:",
        "(B).",
        "**B**",
        "**B.**",
        "**B**.",
        "`B`",
        '"B"',
        " B \n",
        "B. red cat",
        "B. Red  Cat.",
        "(B) red cat",
        "B) red cat",
        "B: red cat",
        "**B.** red cat",
        "**B. red cat**",
        "$B$",
        "red cat",
        "Red Cat",
        "red\ncat.",
        '"red cat"',
    ],
)
def test_spellings_of_option_b(text: str) -> None:
    assert parse_choice(text, PETS) == (1, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("A or B", "several_letters"),
        ("A, B", "several_letters"),
        ("A B", "several_letters"),
        ("(A) (B)", "several_letters"),
        ("B\n\nA", "several_letters"),
        ("A/B", "several_letters"),
        ("B or C.", "several_letters"),
        ("a cat", "not_a_choice"),
        ("Because it is B", "not_a_choice"),
        ("The answer is B", "not_a_choice"),
        ("I think B", "not_a_choice"),
        ("Bird cage", "not_a_choice"),
        ("", "not_a_choice"),
        ("()", "not_a_choice"),
        ("**", "not_a_choice"),
        ("B!", "not_a_choice"),
        ("Ｂ", "not_a_choice"),
        ("В", "not_a_choice"),  # full width, Cyrillic
        ("B. dog", "letter_and_text_disagree"),
        ("B. red cat or dog", "letter_and_text_disagree"),
        ("B. not A", "letter_and_text_disagree"),
        ("(B) A", "several_letters"),
        ("G", "letter_out_of_range"),
        ("(Z)", "letter_out_of_range"),
        ("B" * 4001, "answer_too_long"),
        ("__import__('os')", "not_a_choice"),
    ],
)
def test_everything_else_fails_with_its_reason(text: str, reason: str) -> None:
    assert parse_choice(text, PETS) == (None, reason)


def test_letters_go_as_far_as_the_options() -> None:
    for index, letter in enumerate(LETTERS[:6]):
        assert (
            parse_choice(letter, PETS).option
            == parse_choice(f"{letter}. {PETS[index]}", PETS).option
            == index
        )
    assert parse_choice("E", PETS[:4]).reason == "letter_out_of_range"
    assert parse_choice("F", [], 6).option == 5
    assert parse_choice("Z", [f"option {letter}" for letter in LETTERS]).option == 25


def test_an_option_that_looks_like_letters_can_be_named_by_its_text() -> None:
    assert parse_choice("A and B", PETS).option == 3
    assert parse_choice("10 a.m.", ["9 a.m.", "10 a.m."]).option == 1
    assert parse_choice("a.m.", ["p.m.", "a.m."]).option == 1
    assert parse_choice("B", ["B", "A"]).option == 1, "a lone letter is always the letter"


def test_case_decides_between_options_that_differ_in_nothing_else() -> None:
    assert [
        parse_choice(text, ["pA unit", "Pa unit"]).option for text in ("Pa unit", "pA unit")
    ] == [1, 0]
    assert parse_choice("PA UNIT", ["pA unit", "Pa unit"]).reason == "ambiguous_option"
    assert parse_choice("same", ["same", "same"]).reason == "ambiguous_option"


def test_without_options_a_text_beside_the_letter_cannot_be_checked_and_fails() -> None:
    assert parse_choice("B", []).option == 1
    assert parse_choice("B. red cat", []).reason == "letter_and_text_disagree"
    assert parse_choice("red cat", []).reason == "not_a_choice"


def test_letters_are_stripped_only_when_every_option_carries_its_own() -> None:
    assert strip_letters(["A. dog", "(B) cat", "c) ant", "D: cow"]) == ["dog", "cat", "ant", "cow"]
    for kept in (["A. dog", "cat"], ["B. dog", "A. cat"], ["A dog", "B cat"], ["A.", "B."], []):
        assert strip_letters(kept) == kept


def test_normalising_keeps_what_differs() -> None:
    assert normalise_text("  Red   CAT. ") == "red cat"
    assert normalise_text("m²") != normalise_text("m2")
    assert normalise_text("cafe\u0301") == normalise_text("café")


def test_nearest_option_is_levenshtein_and_a_tie_fails() -> None:
    assert nearest_option("145 degrees", ["145°", "35°", "90 degrees"]).option == 2
    assert nearest_option("red", ["read", "blue"]).option == 0
    assert nearest_option("ab", ["aa", "bb"]).reason == "ambiguous_option"
    assert nearest_option("", ["a", "b"]).reason == "not_a_choice"
    assert nearest_option("x" * 5000, ["a", "b"]).reason == "answer_too_long"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", True),
        ("Yes.", True),
        ("TRUE", True),
        ("**yes**", True),
        ('"Yes."', True),
        ("**Yes**.", True),
        ("no", False),
        ("No", False),
        ("false.", False),
        (" no\n", False),
    ],
)
def test_yes_and_no(text: str, value: bool) -> None:
    assert parse_boolean(text) == (value, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("yesterday", "not_yes_or_no"),
        ("I do not know", "not_yes_or_no"),
        ("know", "not_yes_or_no"),
        ("", "not_yes_or_no"),
        ("not", "not_yes_or_no"),
        ("y", "not_yes_or_no"),
        ("1", "not_yes_or_no"),
        ("yes it is", "not_yes_or_no"),
        ("ｙｅｓ", "not_yes_or_no"),
        ("yes or no", "both_answers"),
        ("Yes. No.", "both_answers"),
        ("true, false", "both_answers"),
        ("yes, not no", "both_answers"),
        ("no" * 3000, "answer_too_long"),
        (".", "not_yes_or_no"),
    ],
)
def test_word_boundaries_hold(text: str, reason: str) -> None:
    assert parse_boolean(text) == (None, reason)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60), st.lists(st.text(min_size=1, max_size=8), min_size=0, max_size=5))
def test_total_on_any_text(text: str, options: list[str]) -> None:
    for found in (parse_choice(text, options), nearest_option(text, options)):
        assert (found.option is None) == (found.reason is not None)
        assert found.option is None or found.option < (len(options) or 26)
    answer = parse_boolean(text)
    assert (answer.value is None) == (answer.reason is not None)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from("ABCDEF"),
    st.sampled_from(["", ".", ")", " ", "\n", ", ", " or ", " and ", ". "]),
    st.sampled_from([*"ABCDEF", *PETS, "x", "42", "!"]),
    st.sampled_from("ABCDEF"),
)
def test_text_behind_a_wrong_letter_never_makes_it_right(
    letter: str, glue: str, tail: str, gold: str
) -> None:
    found = parse_choice(letter + glue + tail, PETS)
    if letter != gold:
        assert found.option != LETTERS.index(gold) or normalise_text(
            letter + glue + tail
        ) == normalise_text(PETS[found.option])


HOSTILE = [
    "A" * 400_000,
    "*" * 4000,
    "(" * 4000,
    "A." + " " * 3990 + "x",
    "B. " + "a" * 3900,
    "A or " * 800,
    "\u0660" * 4000,
    "yes " * 1000,
    "`" * 3999,
    "é\u0301" * 2000,
    "B. " + "\u0301\u0323" * 2000,
    "😀" * 400_000,
    "[" * 400_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=[h[:6] for h in HOSTILE])
def test_hostile_text_takes_milliseconds(text: str) -> None:
    options = [*PETS, "x" * 300]

    def read() -> None:
        _unicode_form.cache_clear()  # or the second run asks its memory
        assert parse_choice(text, options).option is None
        assert parse_boolean(text).value is None

    takes_less(0.02, read)


def test_threads_agree_with_one_thread() -> None:
    texts = [f"{letter}{end}" for letter in LETTERS for end in (".", ")", " or A", "")]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda t: parse_choice(t, PETS), texts)) == [
            parse_choice(t, PETS) for t in texts
        ]
