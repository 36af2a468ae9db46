"""Text rewards: equal to the usual libraries and to a naive table, bounded, fast, and deaf to appended junk.

Run: pytest tests/rewards/test_text.py
"""

from __future__ import annotations

import itertools
import pickle
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jiwer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score import rouge_scorer

from mmrl.errors import ConfigError, DataError
from mmrl.rewards.text import (
    MAX_CHARS,
    MODES,
    TextReward,
    _unicode_form,
    anls,
    char_error_rate,
    edit_ratio,
    is_coordinates,
    make_text_reward,
    net_characters,
    normalise,
    normalised_edit_distance,
    rouge,
    stream_safe,
    token_f1,
    unicode_form,
    word_error_rate,
    words,
)
from tests.kits.clock_kit import takes_less

short = st.text("abc é一 ", max_size=12)
sentence = st.lists(st.sampled_from(["a", "cat", "sat", "on", "mat", "12"]), max_size=9).map(
    " ".join
)
hostile = [
    "a" * 400_000,
    "a " * 200_000,
    "🙂" * 100_000,
    "\ufdfa" * 8_000,
    "(" * MAX_CHARS,
    "é一" * (MAX_CHARS // 2),
    "\x00\u202e\u2028" * 2_000,
    "[NaN, " * 1_300,
    ("aaaaaaaaab" * 819),
    " " * MAX_CHARS,
    "",
    "<answer>",
    "\ud800",
    "a" + "\u0301\u0323" * 4_090,
]


def naive_distance(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Levenshtein distance by the textbook's table."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def naive_lcs(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common subsequence by the textbook's table."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


@settings(deadline=None)
@given(short, short)
def test_character_measures_equal_a_naive_table(a: str, b: str) -> None:
    distance, longer = naive_distance(a, b), max(len(a), len(b))
    assert normalised_edit_distance(a, b) == pytest.approx(distance / longer if longer else 0)
    assert normalised_edit_distance(a, b) == normalised_edit_distance(b, a)
    assert char_error_rate(a, b) == pytest.approx(distance / len(b) if b else float(bool(a)))
    lcs = naive_lcs(a, b)
    assert edit_ratio(a, b) == pytest.approx(2 * lcs / (len(a) + len(b)) if a or b else 1)
    assert net_characters(a, b) == pytest.approx(
        max(0, 2 * lcs - len(a)) / len(b) if b else float(not a)
    )
    assert net_characters(a, b) <= 1 - normalised_edit_distance(a, b) + 1e-12
    similarity = 1 - normalised_edit_distance(a, b)
    assert anls(a, b) == (similarity if similarity >= 0.5 else 0)


@settings(deadline=None)
@given(sentence, sentence)
def test_word_errors_equal_jiwer(a: str, b: str) -> None:
    assert word_error_rate(a, b) == pytest.approx(
        naive_distance(a.split(), b.split()) / len(b.split()) if b else float(bool(a))
    )
    if b:
        assert word_error_rate(a, b) == pytest.approx(jiwer.wer(b, a))
        assert make_text_reward("wer")(a, b) == pytest.approx(min(1, max(0, 1 - jiwer.wer(b, a))))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("dogs", "dog"),
        ("two dogs running", "the dog runs"),
        ("Relational organisations", "relate to the organization"),
        ("gas bus was yes", "ga bu wa ye"),
        ("dying skies", "die sky"),
        ("caresses 2000s", "caress 2000"),
    ],
)
def test_stems_are_the_rouge_score_packages(a: str, b: str) -> None:
    theirs = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True).score(b, a)
    expected = sum(score.fmeasure for score in theirs.values()) / 3
    assert rouge(a, b, ascii_words=True, skip_short=False, stem=True) == pytest.approx(expected)


def test_stems_are_asked_for_and_leave_other_scripts_alone() -> None:
    assert (
        make_text_reward("rouge", stem=True)("dogs", "dog") == 1
        and make_text_reward("rouge")("dogs", "dog") == 0
    )
    assert rouge("собаки", "собака", stem=True) == 0 and rouge("Größen", "größen", stem=True) == 1
    assert rouge("ational" * 1000, "cat", stem=True) == 0


@settings(deadline=None)
@given(
    st.one_of(sentence, st.text("aB1 .,-_", max_size=30)),
    st.one_of(sentence, st.text("aB1 .,-_", max_size=30)),
)
def test_rouge_equals_the_rouge_score_package(a: str, b: str) -> None:
    theirs = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"]).score(b, a)
    expected = sum(score.fmeasure for score in theirs.values()) / 3
    if words(b):
        assert rouge(a, b, ascii_words=True, skip_short=False) == pytest.approx(expected)
    if len(words(b)) >= 2 and "_" not in a + b:
        assert rouge(a, b) == pytest.approx(expected), (
            "with two words or more the default is the same"
        )


def test_one_word_and_other_scripts_can_reach_one() -> None:
    assert rouge("cat", "cat") == 1 and rouge("cat", "cat", skip_short=False) == pytest.approx(
        2 / 3
    )
    assert rouge("Größe", "grösse") == 0 == rouge("", "cat") and rouge("", "") == 1
    assert rouge("红色的猫", "红色的狗") == pytest.approx((3 / 4 + 2 / 3 + 3 / 4) / 3)
    assert words("it's 12 kg_m 红猫 กข") == ["it", "s", "12", "kg", "m", "红", "猫", "ก", "ข"]


def test_hand_values_of_token_f1_and_anls() -> None:
    reward = make_text_reward("token_f1")
    assert reward("The red car!", "a red car") == 1
    assert reward("the car is red", "red car") == pytest.approx(0.8)
    assert reward("blue", "red car") == 0 and token_f1("", "") == 1 and token_f1("?", "!") == 0
    assert make_text_reward("anls")("Hallo", "hello") == pytest.approx(0.8)
    assert (
        make_text_reward("anls")("abcx", "abyy") == 0.5
        and make_text_reward("anls")("axxx", "abyy") == 0
    )
    assert make_text_reward("anls", threshold=0.9)("hallo", "hello") == 0


@settings(deadline=None)
@given(
    st.sampled_from(sorted(MODES)),
    st.text(max_size=40),
    st.lists(st.text(max_size=40), min_size=1, max_size=3),
)
def test_every_mode_is_bounded_and_takes_the_best_of_the_accepted(
    mode: str, said: str, truths: list[str]
) -> None:
    reward = make_text_reward(mode)
    value = reward(said, truths)
    assert 0 <= value <= 1 and value == max(reward(said, truth) for truth in truths)
    if mode != "contains":
        assert reward(truths[-1], truths) == 1


@settings(deadline=None)
@given(
    st.sampled_from(sorted(MODES)),
    st.text("abc de", max_size=25),
    st.text("abc de", min_size=1, max_size=25),
    st.sampled_from([" zq", "☃☃☃", " xyz" * 30, "\n\nzq xyz", "#", "ｚ"]),
)
def test_appended_junk_never_raises_the_reward(mode: str, said: str, truth: str, junk: str) -> None:
    reward = make_text_reward(mode)
    # a space at the end is stripped, and counts as one that is right once something follows it: "a " is worth less than "a ☃"
    said = said.rstrip()
    if mode in ("indel", "cer", "wer", "ratio", "rouge", "token_f1", "exact") and (
        " " not in junk or " " not in truth
    ):
        assert reward(said + junk, truth) <= reward(said, truth) + 1e-12
    if mode != "contains":
        assert reward(truth + junk, truth) <= reward(truth, truth)


@settings(deadline=None)
@given(
    st.text("abcd ", max_size=25),
    st.text("abcd ", max_size=25),
    st.text("abcd ", min_size=1, max_size=10),
)
def test_indel_pays_for_an_addition_only_when_more_than_half_of_it_is_right(
    said: str, truth: str, more: str
) -> None:
    right = naive_lcs(said + more, truth) - naive_lcs(said, truth)
    if 2 * right <= len(more):
        assert net_characters(said + more, truth) <= net_characters(said, truth) + 1e-12


def test_guessing_the_rest_of_a_page_pays_with_ned_but_not_with_indel() -> None:
    truth = "the cat sat on the mat and looked at the rain"
    read, guess = truth[:20], " e " * 8
    assert make_text_reward("ned")(read + guess, truth) > make_text_reward("ned")(read, truth)
    assert make_text_reward("indel")(read + guess, truth) < make_text_reward("indel")(read, truth)


def test_contains_caps_the_length() -> None:
    reward = make_text_reward("contains", max_extra=10)
    assert reward("The sign: STOP.", "stop") == 0 and reward("sign: STOP.", "stop") == 1
    assert reward("stop" + " go" * 100, "stop") == 0 and reward("anything", "") == 0


@pytest.mark.parametrize("mode", sorted(MODES))
def test_hostile_texts_take_a_few_milliseconds(mode: str) -> None:
    reward, truth = make_text_reward(mode), ["the cat sat on the mat " * 20, "一只猫 é" * 100]

    def score(text: str) -> float:
        _unicode_form.cache_clear()  # or the second run asks its memory
        return reward(text, truth)

    for text in hostile:
        # rouge takes 10 ms of a machine at half its speed: beside other work three tries may all be slow
        assert 0 <= takes_less(0.02, partial(score, text), tries=10) < 1


MARKS = [
    "a" + "\u0301\u0323" * 4_090,
    "\u0323\u0301" * 4_096,
    "\uff9e\u0323" * 4_096,
    "\u0f73\u0f71" * 4_096,
    ("a" + "\u0301\u0323" * 100) * 40,
]


@pytest.mark.parametrize("text", MARKS)
def test_runs_of_combining_marks_are_normalised_in_linear_time(text: str) -> None:
    turns = itertools.count()

    def fresh_in(form: str) -> None:
        # what was normalised before is remembered
        unicode_form(f"{next(turns)}{text}", form)  # type: ignore[arg-type]

    for form in ("NFC", "NFKC", "NFD", "NFKD"):
        takes_less(0.03, partial(fresh_in, form))
    assert stream_safe(stream_safe(text)) == stream_safe(text)
    assert stream_safe(text).replace("\u034f", "") == text


@given(st.text(st.sampled_from("ae\u0301\u0323\uff9e가ᄀ\u1161ﬁ①"), max_size=30))
def test_ordinary_text_is_normalised_as_unicode_says(text: str) -> None:
    assert stream_safe(text) == text
    assert unicode_form(text) == unicodedata.normalize("NFKC", text)
    assert unicode_form(text, "NFC") == unicodedata.normalize("NFC", text)


def test_every_character_that_starts_with_a_mark_is_known() -> None:
    for code in range(0x80, 0x110000):
        char = chr(code)
        if 0xD800 <= code < 0xE000 or not unicodedata.combining(
            unicodedata.normalize("NFKD", char)[0]
        ):
            continue
        assert len(stream_safe(char * 31)) == 32, hex(code)


def test_length_is_bounded_before_anything_is_computed() -> None:
    reward = make_text_reward("ned", max_chars=10)
    assert reward("a" * 10, "a" * 10) == 1 and reward("a" * 11, "a" * 10) == 0
    assert reward("\ufdfa", "a") == 0, "NFKC makes 18 characters of it"
    with pytest.raises(DataError, match="up to 10 characters, found 11; raise max_chars"):
        reward("a", "a" * 11)
    assert make_text_reward("ned", max_chars=20_000)("a" * 15_000, "a" * 15_000) == 1


@pytest.mark.parametrize("truth", [[], [3], None, 3])
def test_a_truth_that_is_no_text_is_an_error(truth: Any) -> None:
    with pytest.raises((DataError, TypeError)):
        make_text_reward("ned")("a", truth)


def test_normalisation_is_declared_never_global() -> None:
    code = "def f(x):\n    return x / 2"
    assert make_text_reward("exact", normalise=[])("def f(x):\n return x/2", code) == 0
    assert make_text_reward("ned", normalise=[])(code.replace("    ", " "), code) < 1
    assert make_text_reward("ned")("def f(x):  return x / 2", code) == 1, (
        "a page's line ends are spaces"
    )
    assert make_text_reward("ned")("def f(x): return x/2", code) < 1, "spaces around signs stay"
    assert make_text_reward("exact")("ＡＢＣ  d", "abc D") == 1
    assert make_text_reward("exact", normalise=["strip"])(" Abc", "Abc") == 1
    assert normalise("The  cat!", ("lower", "punctuation", "articles", "collapse")) == "cat"


@pytest.mark.parametrize(
    ("mode", "params", "message"),
    [
        ("rogue", {}, "Did you mean 'rouge'"),
        ("anls", {"treshold": 1}, "Did you mean 'threshold'"),
        ("anls", {"threshold": 2}, r"threshold to be a number in \[0, 1\], found 2"),
        ("ned", {"power": 2}, "expected none"),
        ("ned", {"normalise": "lower"}, "as a list of"),
        ("ned", {"normalise": ["lowr"]}, "Did you mean 'lower'"),
        ("ned", {"max_chars": 0}, r"\[1, 65536\]"),
        ("contains", {"max_extra": True}, "max_extra"),
        ("indel", {"wrong_cost": "much"}, "wrong_cost"),
    ],
)
def test_wrong_parameters_are_named(mode: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_text_reward(mode, **params)


@pytest.mark.parametrize(
    "text", ["[1, 2, 3, 4]", "[NaN, NaN]", "[-Infinity, 0, 1e999]", "[[[[", "[(1,2),(3,4)]", "[]"]
)
def test_numbers_in_brackets_are_no_text(text: str) -> None:
    assert is_coordinates(text)


@pytest.mark.parametrize(
    "text", ["", "12", "1, 2", "[a]", "[E]", "[1e]", "[nancy]", "x [1]", "[1] see", "(1, 2)"]
)
def test_everything_else_is(text: str) -> None:
    assert not is_coordinates(text)


def test_brackets_are_read_in_linear_time() -> None:
    for text in ("[1, " * 100_000 + "x", "[" + "nan" * 100_000 + "x", "[" + "1e" * 150_000):
        assert not takes_less(0.5, partial(is_coordinates, text))


def test_rewards_work_in_threads_and_are_picklable_by_mode() -> None:
    texts = ["".join(pair) for pair in itertools.product("abcdefgh", repeat=3)]
    for mode in MODES:
        reward = make_text_reward(mode)
        assert isinstance(reward, TextReward)
        serial = [reward(text, ["abc", "hgf"]) for text in texts]
        with ThreadPoolExecutor(8) as pool:
            assert (
                list(pool.map(lambda text, reward=reward: reward(text, ["abc", "hgf"]), texts))
                == serial
            )
    assert (
        pickle.loads(pickle.dumps(make_text_reward("anls", threshold=0.7)))("abcx", "abcd") == 0.75
    )
