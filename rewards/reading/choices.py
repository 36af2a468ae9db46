"""Sentences with exactly one option, or one yes or no -> its letter, or the word.

    The best answer is: B     Option B     I am sure: B     答案是B     (B) because it barks     It is a red cat.
    Yes, there is a dog.      The answer is no.      是

Two letters, another option's text beside the letter, a doubt (`maybe B`, `not B`, `B or C`) are refused: hedging never pays.

    python -c "from mmrl.rewards.reading.choices import one_letter; print(one_letter('The best answer is: B', ['dog', 'cat'], 2))"
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from mmrl.rewards.reading.words import DOUBTS, Unread

__all__ = ["one_letter", "one_mention", "yes_or_no"]

_MOST_CHARS = 1_000
_MOST_WORDS_OF_TEXT = 200
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CALLED = re.compile(  # a letter that is called the answer; a small one only right behind the word
    r"\b(?:answer|option|choice|letter|choose|select|pick|sure)\b(?:\s+(?:is|would be|should be|must be))?\s*[:\uff1a=]?\s*"
    r"(?:(?:the\s+)?(?:option|choice|letter|answer)\s*[:\uff1a]?\s*)?[\"'`*(\[\\$]*(?:boxed\{)?([A-Z])(?![\w'\u2019])"
    r"|(?:\u7b54\u6848|\u9009\u62e9|\u9009\u9879|\u9009)(?:\u662f|\u4e3a|\u9009|\u5e94\u4e3a|\u5e94\u9009)?\s*[:\uff1a]?\s*[(\uff08\"*]*"
    r"([A-Z])(?![A-Za-z0-9_'])",
    re.IGNORECASE,
)
_ALONE = re.compile(r"(?<![\w'\u2019-])\(?([A-Z])\)?(?![\w'\u2019]|-\w)")
_ARTICLE = re.compile(r"[AI](?= (?!(?:and|or|is|because|as|since)\b)[a-z])")
_YES = re.compile(r"(?:yes|true)\b", re.IGNORECASE)
_NO = re.compile(r"(?:no|false)\b", re.IGNORECASE)
_SAID = re.compile(
    r"(?:(?:so|therefore|thus|hence),? )?(?:the )?(?:(?:final|correct|right|best) )?"
    r"(?:answer|statement|claim|description) (?:is|would be)[: ]+[\"'*]*(yes|no|true|false)\b[\"'*.! ]*",
    re.IGNORECASE,
)
_SUBJECT = re.compile(r"(?:it|there|the|this|that|he|she|they|you|i)\b", re.IGNORECASE)
_TAKES_BACK = re.compile(
    r"\b(?:maybe|perhaps|possibly|probably|or|either|unsure|unclear|but|however|not sure|both|wait"
    r"|actually)\b",
    re.IGNORECASE,
)
_CHINESE = {
    "\u662f": True,
    "\u662f\u7684": True,
    "\u5bf9": True,
    "\u6b63\u786e": True,
    "\u5426": False,
    "\u4e0d\u662f": False,
    "\u4e0d\u5bf9": False,
    "\u9519\u8bef": False,
    "\u6ca1\u6709": False,
}


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .")


@functools.lru_cache(maxsize=256)
def _longest_first(names: tuple[str, ...]) -> list[tuple[int, str]]:
    """(index, plain name) of a row's names, which each of its completions asks for."""
    return [
        (index, _plain(names[index]))
        for index in sorted(range(len(names)), key=lambda i: -len(names[i]))
    ]


def one_mention(text: str, names: Sequence[str]) -> int | None:
    """Index of the only one of `names` that stands in `text` as whole words, a longer name before the shorter ones inside it; None
    without any. Raises Unread(several_options) for more. Linear in the length of the text for each name."""
    rest, found = f" {_plain(text)} ", []
    for index, name in _longest_first(tuple(names)):
        if not name or name not in rest:
            continue
        cut = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "\0", rest)
        if cut != rest:
            found.append(index)
            rest = cut
    if len(found) > 1:
        raise Unread("several_options")
    return found[0] if found else None


def _letters(text: str) -> set[str]:
    """Letters that a text calls the answer, else those that stand alone in it; small ones only where they are called so."""
    called = {(found[1] or found[2]) for found in _CALLED.finditer(text)}
    alone = {
        found[1]
        for found in _ALONE.finditer(text)
        if not _ARTICLE.match(text, found.start(1)) or found[0][0] == "("
    }
    big = {letter for letter in called if letter.isupper() and letter not in "AI"} | alone
    if big:
        return big | {
            letter for letter in called if letter.isupper() and not _article_behind(text, letter)
        }
    return {
        letter.upper()
        for letter in called
        if letter.isupper() and not _article_behind(text, letter)
    }


def _article_behind(text: str, letter: str) -> bool:
    """Whether every `letter` of the text is an article or a pronoun: 'the answer is A dog'."""
    places = [found.start(1) for found in _ALONE.finditer(text) if found[1] == letter]
    return letter in "AI" and all(
        _ARTICLE.match(text, place) and text[place - 1 : place] != "(" for place in places
    )


def one_letter(text: str, options: Sequence[str], count: int) -> str | None:
    """The letter of the only option that a text names, by its letter or else by its words; None where it names none.

    `options` are their texts without letters ([] when only letters are known), `count` how many letters there are. Raises Unread:
    several_letters, several_options, letter_and_text_disagree, hedged.
    """
    if len(text) > _MOST_CHARS:
        return None
    letters = _letters(text)
    if len(letters) > 1:
        raise Unread("several_letters")
    own = ""
    if letters:
        (letter,) = letters
        index = _LETTERS.index(letter)
        if index >= count:
            return letter  # the strict parser says so
        named = _others(text, options, index)
        if named is not None and named != index:
            raise Unread("letter_and_text_disagree")
        own = options[index] if options else ""
    elif options and len(text) <= _MOST_WORDS_OF_TEXT:
        said = one_mention(text, options)
        if said is None:
            return None
        letter, own = _LETTERS[said], options[said]
    else:
        return None
    words = _plain(text).replace(_plain(own), " ") if own else text
    if DOUBTS.search(words):
        raise Unread("hedged")
    return letter


def _others(text: str, options: Sequence[str], index: int) -> int | None:
    """The option whose words stand in a text that has a letter; the letter's own wins over one inside it."""
    long = [option if len(_plain(option)) > 2 else "" for option in options]
    return one_mention(text, long) if long else index


def yes_or_no(text: str) -> str | None:
    """'yes' or 'no' where a text says so at its beginning, or says that it is the answer; None for any other. Raises Unread(hedged)
    where it takes it back."""
    text = text.strip(" \"'*`.")
    if len(text) > _MOST_CHARS or not text:
        return None
    if text.strip("\u3002\uff01") in _CHINESE:
        return "yes" if _CHINESE[text.strip("\u3002\uff01")] else "no"
    said = _SAID.fullmatch(text)
    start = _YES.match(text) or _NO.match(text)
    if said is None and start is None:
        return None
    word = (said[1] if said else start[0] if start else "").lower()
    rest = "" if said else text[len(word) :].lstrip("\"'*` ")
    if rest and rest[0] not in ",.;:!-\u2013\u2014(" and not _SUBJECT.match(rest):
        return None  # "no idea", "true blue"
    if _TAKES_BACK.search(rest):
        raise Unread("hedged")
    return "yes" if word in ("yes", "true") else "no"
