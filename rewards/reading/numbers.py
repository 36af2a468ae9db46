"""Sentences with exactly one number -> that number: `The distance is 4.2 m.`, `x = 12`, `$5`, `two hundred`, `There are no cats`.

The number must be the only one of the text, in digits or in words, and nothing in the text may hedge it (`about 5`, `5 or 6`,
`not 5`). A unit behind it is fine; where the row declares its unit, only a spelling of that one is (`5 metres` for m, not `5 cm`).

    python -c "from mmrl.rewards.reading.numbers import one_number; print(one_number('The distance is 4.2 metres.', unit='m'))"
"""

from __future__ import annotations

import re
from fractions import Fraction

from mmrl.rewards.reading.words import HEDGES, LEADS, NUMBER_WORDS, SCALES, Unread, value_of_words

__all__ = ["UNITS", "none_of_them", "one_number"]

_MOST_CHARS = 400
UNITS: dict[str, tuple[str, ...]] = {
    "m": ("m", "meter", "meters", "metre", "metres"),
    "cm": ("cm", "centimeter", "centimeters", "centimetre", "centimetres"),
    "mm": ("mm", "millimeter", "millimeters", "millimetre", "millimetres"),
    "km": ("km", "kilometer", "kilometers", "kilometre", "kilometres"),
    "ft": ("ft", "foot", "feet"),
    "in": ("in", "inch", "inches"),
    "mi": ("mi", "mile", "miles"),
    "m2": ("m²", "square meters", "square metres", "square meter", "square metre", "sqm"),
    "s": ("s", "sec", "secs", "second", "seconds"),
    "min": ("min", "mins", "minute", "minutes"),
    "h": ("h", "hr", "hrs", "hour", "hours"),
    "kg": ("kg", "kilogram", "kilograms"),
    "g": ("g", "gram", "grams"),
    "px": ("px", "pixel", "pixels"),
    "°": ("°", "deg", "degree", "degrees"),
    "%": ("%", "percent", "per cent"),
    "$": ("$", "usd", "dollar", "dollars"),
    "€": ("€", "eur", "euro", "euros"),
    "£": ("£", "gbp", "pound", "pounds"),
    "¥": ("¥", "yuan", "yen", "rmb"),
}
"""Unit -> its spellings, in lower case."""
_UNIT_OF = {spelling: unit for unit, spellings in UNITS.items() for spelling in spellings}
_DIGITS = r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?"
_WORD = "|".join((*NUMBER_WORDS, *SCALES))
_TOKEN = re.compile(
    rf"(?P<digits>(?<![\w.,/])(?P<sign>-\s?)?(?P<money>[$€£¥]\s?)?(?=[0-9.+-])(?P<value>{_DIGITS})(?:\s?/\s?(?P<bottom>[0-9]+))?"
    rf"(?:\s(?P<scale>thousand|million|billion)\b)?(?P<unit>\s?(?:[%°€£]|[A-Za-z]+(?:\s(?:meters?|metres?|cent)\b)?²?)?)?(?![\w/]))"
    rf"|\b(?P<words>(?:{_WORD})(?:(?:[- ]|\sand\s)(?:{_WORD}))*)\b(?:\s(?P<word_unit>[A-Za-z]+))?",
    re.IGNORECASE,
)
_ANY_NUMBER = re.compile(rf"[0-9]|\b(?:{_WORD})\b", re.IGNORECASE)
_OTHER = re.compile(
    r"\b(?:dozens?|scores?|half|halves|quarters?|thirds?|minus|negative|googol|lakhs?|crores?|trillions?|k|bn|mn"
    r"|tn)\b",
    re.IGNORECASE,
)
_NOT_A_UNIT = ("k", "K", "M", "B", "st", "nd", "rd", "th")  # another size, or a place in a row
_NONE = re.compile(
    r"(?:there (?:are|is|were) (?:no|none|not any|zero)|there aren['’]t any|i (?:can )?see no|none|no)\b"
    r"(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_NO_COUNT = re.compile(
    r"\b(?:idea|way|doubt|answer|clue|information|image|picture|video|need|reason|telling|enough|clear|clearly"
    r"|sure|certain|count|can|know|see|only|one)\b",
    re.IGNORECASE,
)


def _unit(text: str | None, money: str | None) -> str:
    """The unit beside a number, '' for a word that is none."""
    if money:
        return _UNIT_OF[money.strip()]
    return _UNIT_OF.get(" ".join((text or "").lower().split()), "")


def _spelled(found: re.Match[str]) -> str | None:
    """The number of a match, as mmrl.rewards.numeric reads it."""
    if found["words"]:
        value = value_of_words(" ".join(found["words"].split()))
        return None if value is None else str(value)
    text = (
        ("-" if found["sign"] else "")
        + found["value"]
        + (f"/{found['bottom']}" if found["bottom"] else "")
    )
    if not found["scale"]:
        return text
    try:
        return str(Fraction(text.replace(",", "")) * SCALES[found["scale"].lower()])
    except (ValueError, ZeroDivisionError):
        return None


def one_number(text: str, unit: str = "", percent_of_one: bool = False) -> str | None:
    """The only number of a text of up to 400 characters in digits, None where there is none. Raises Unread: several_numbers,
    hedged, other_unit (another unit than the declared one). With `percent_of_one` 50% is 0.5, else 50."""
    if len(text) > _MOST_CHARS:
        return None
    found = _TOKEN.search(text.replace("\u2212", "-"))
    if not found or not any(found[k] for k in ("words", "value")):
        return None
    before, after = text[: found.start()], text[found.end() :]
    if _ANY_NUMBER.search(before) or _ANY_NUMBER.search(after):
        raise Unread("several_numbers")
    if HEDGES.search(before) or HEDGES.search(after) or LEADS.search(before) or _OTHER.search(text):
        raise Unread("hedged")
    if (found["unit"] or "") in _NOT_A_UNIT:
        raise Unread("hedged")
    said = _unit(found["unit"] or found["word_unit"], found["money"])
    wanted = _UNIT_OF.get(unit.strip().lower(), unit.strip()) if unit else ""
    if said and wanted and said != wanted:
        raise Unread("other_unit")
    number = _spelled(found)
    if number is not None and said == "%" and percent_of_one:
        number += "%" if "/" not in number else ""
    return number


def none_of_them(text: str) -> bool:
    """Whether a text says that nothing is there: `None`, `There are no cats.`; never `No idea` or a text with a number."""
    found = _NONE.fullmatch(" ".join(text.strip(" .!").split())) if len(text) <= 200 else None
    if not found or _ANY_NUMBER.search(found["rest"]):
        return False
    rest, alone = found["rest"], found[0].lower().startswith("none")
    if not rest.strip():
        return found[0].lower() not in (
            "no",
            "there are no",
            "there is no",
            "there were no",
            "i see no",
            "i can see no",
        )
    if _NO_COUNT.search(rest.partition(" in the ")[0]) or HEDGES.search(rest):
        return False
    return (
        alone
        or found[0].lower().startswith(("there", "i "))
        or rest.endswith(("visible", "present", "shown", "there", "here"))
    )
