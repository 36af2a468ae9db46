"""Choice and yes/no answers: one letter, one option's text or one word as the whole answer; everything else fails.

Accepted for option B of ["dog", "red cat", "bird"]: `B`, `b`, `(B)`, `B.`, `B)`, `B:`, `**B**`, `B. red cat`, `Red cat`.
Not accepted: a letter somewhere in a sentence, two letters, "A or B", a letter whose text is another option's. Words are
compared whole, so "yesterday" is no yes and "I do not know" is no no. Nothing is searched: hedging never pays.

    python -c "from mmrl.rewards.choice import parse_choice; print(parse_choice('(B) red cat', ['dog', 'red cat']))"
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import NamedTuple

from mmrl.rewards.parsing import MAX_ANSWER_CHARS
from mmrl.rewards.text import unicode_form

__all__ = [
    "BooleanParse",
    "ChoiceParse",
    "LETTERS",
    "nearest_option",
    "normalise_text",
    "parse_boolean",
    "parse_choice",
    "strip_letters",
]

LETTERS = string.ascii_uppercase
"""Letters of options in order; at most 26 options."""

_START = re.compile(r"(?:\(([A-Za-z])\)|([A-Za-z]))([.:)]?)(.*)", re.DOTALL)
_PREFIX = re.compile(r"(?:\(([A-Za-z])\)|([A-Za-z])[.:)])\s+(?=\S)")
_WORD = re.compile(r"\w+")
_WRAPPERS = ("**", "__", "`", '"', "'", "$")
_MARKS = frozenset(mark[0] for mark in _WRAPPERS)
_YES, _NO = ("yes", "true"), ("no", "false")


class ChoiceParse(NamedTuple):
    """The chosen `option`, counted from 0, or None with the `reason`."""

    option: int | None
    reason: str | None = None


class BooleanParse(NamedTuple):
    """The truth value, or None with the `reason`."""

    value: bool | None
    reason: str | None = None


def _unwrap(text: str) -> str:
    """`text` without white space and up to four pairs of quotes or emphasis marks around it."""
    text = text.strip()
    for _ in range(4):
        if text[:1] not in _MARKS:  # also for nothing at all
            break
        mark = next(
            (
                m
                for m in _WRAPPERS
                if len(text) > 2 * len(m) and text.startswith(m) and text.endswith(m)
            ),
            None,
        )
        if mark is None:
            break
        text = text[len(mark) : -len(mark)].strip()
    return text


def normalise_text(text: str) -> str:
    """Canonical Unicode, case folded, single spaces, no emphasis around it and no closing full stop. Linear time."""
    text = unicode_form(" ".join(_unwrap(text).split()), "NFC")
    return (_unwrap(text[:-1]) if text.endswith(".") and len(text) > 1 else text).casefold()


def strip_letters(options: Sequence[str]) -> list[str]:
    """Options without their letters, when every option starts with its own ("A. dog", "(B) cat"); else unchanged."""
    starts = [_PREFIX.match(option) for option in options]
    own = [
        m is not None and (m[1] or m[2]).upper() == letter
        for m, letter in zip(starts, LETTERS, strict=False)
    ]
    if not options or len(options) > len(LETTERS) or not all(own):
        return list(options)
    return [option[m.end() :] for option, m in zip(options, starts, strict=True) if m is not None]


def _by_text(text: str, options: Sequence[str]) -> ChoiceParse | None:
    """The option whose text this is: exactly, else normalised; None when it is no option's."""
    plain = " ".join(text.split())
    for form, wanted in (
        (lambda t: " ".join(t.split()), plain),
        (normalise_text, normalise_text(text)),
    ):
        found = [i for i, option in enumerate(options) if form(option) == wanted]
        if found:
            return (
                ChoiceParse(found[0]) if len(found) == 1 else ChoiceParse(None, "ambiguous_option")
            )
    return None


def _by_letter(text: str, options: Sequence[str], count: int) -> ChoiceParse | None:
    """`B`, `(B)`, `B.`, `B. red cat`; None when the text does not start like that."""
    found = _START.fullmatch(text.replace("**", "").strip())
    if not found:
        return None
    rest = found[4].strip()
    if rest and not (found[1] or found[3]):
        return None  # "A dog", "Because"
    index = LETTERS.index((found[1] or found[2]).upper())
    if index >= count:
        return ChoiceParse(None, "letter_out_of_range")
    if rest and (
        not options or normalise_text(rest) != normalise_text(options[index].replace("**", ""))
    ):
        return ChoiceParse(None, "letter_and_text_disagree")
    return ChoiceParse(index)


def parse_choice(answer: str, options: Sequence[str], count: int | None = None) -> ChoiceParse:
    """The option an answer text names; `options` are texts without letters, [] when only letters are known.

    `count` is the number of letters allowed when `options` is empty (default 26). A whole answer that is one letter is
    read as that letter, also where some option's text is a letter. Reasons: answer_too_long, not_a_choice,
    several_letters, letter_out_of_range, letter_and_text_disagree, ambiguous_option. Never raises on any text.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return ChoiceParse(None, "answer_too_long")
    text = _unwrap(answer)
    letter = _by_letter(text, options, len(options) or count or len(LETTERS))
    if letter is not None and letter.option is not None:
        return letter
    named = _by_text(text, options) if text else None
    if named is not None:
        return named
    words = [word.casefold() for word in _WORD.findall(text)]
    letters = [word for word in words if len(word) == 1 and word.upper() in LETTERS]
    if len(letters) > 1 and len(letters) + words.count("and") + words.count("or") == len(words):
        return ChoiceParse(None, "several_letters")
    return letter or ChoiceParse(None, "not_a_choice")


def nearest_option(answer: str, options: Sequence[str]) -> ChoiceParse:
    """The option with the smallest edit distance to the answer: MathVista's rule for texts that name no option.

    The official code takes the first of several nearest options; here a tie is a failure ('ambiguous_option'), as is an
    empty or overlong answer.
    """
    from rapidfuzz.distance import Levenshtein

    text = _unwrap(answer)
    if len(text) > MAX_ANSWER_CHARS:
        return ChoiceParse(None, "answer_too_long")
    if not text or not options:
        return ChoiceParse(None, "not_a_choice")
    distances = [Levenshtein.distance(text, option) for option in options]
    best = min(distances)
    return (
        ChoiceParse(distances.index(best))
        if distances.count(best) == 1
        else ChoiceParse(None, "ambiguous_option")
    )


def parse_boolean(answer: str) -> BooleanParse:
    """yes/true or no/false as the whole answer, in any case, with emphasis, quotes or a full stop around it.

    Reasons: answer_too_long, both_answers (a yes and a no in one text), not_yes_or_no. Never raises on any text.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return BooleanParse(None, "answer_too_long")
    word = normalise_text(answer)
    if word in _YES or word in _NO:
        return BooleanParse(word in _YES)
    words = {w.casefold() for w in _WORD.findall(answer)}
    both = not words.isdisjoint(_YES) and not words.isdisjoint(_NO)
    return BooleanParse(None, "both_answers" if both else "not_yes_or_no")
