"""Numbers: one strict parser and the field's rules for closeness, official where there is an official one.

`parse_number` reads the whole text as one number: 12, -3.5, .5, 1,234.5, 3/4, 1.5e3, and 12% where percent is declared.
Words, several numbers ("3 or 4"), other scripts' digits, 1_000 and nan are failures. Every step is linear.

    python -c "from mmrl.rewards.numeric import mra, parse_number; print(parse_number('1,234.5'), mra(3, 4))"
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from mmrl.errors import ConfigError, did_you_mean
from mmrl.rewards.parsing import MAX_ANSWER_CHARS

__all__ = [
    "Closeness",
    "MAX_NUMBER_CHARS",
    "NumberParse",
    "PERCENT",
    "is_division",
    "make_closeness",
    "mra",
    "parse_first_token",
    "parse_number",
    "rounded_equal",
    "within",
]

MAX_NUMBER_CHARS = 100
"""Longer numbers are refused ('number_too_long')."""
PERCENT = ("refuse", "keep", "fraction")
"""What 12% means: nothing (a failure), 12, or 0.12."""

_PLAIN = r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,4})?"
_NUMBER = re.compile(rf"(?P<top>{_PLAIN})(?: ?/ ?(?P<bottom>{_PLAIN}))?(?P<percent> ?%)?")
_NUMBER_LIKE = re.compile(r"[0-9]+(?:[.,/][0-9]+)*")
_TOKEN = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_WRAPPERS = ("**", "__", "`", '"', "'", "$")
_MINUS = "\u2212"  # the typographic minus sign


class NumberParse(NamedTuple):
    """`value` as a float and `exact` as a fraction (12% kept or divided as declared), or None with the `reason`."""

    value: float | None
    reason: str | None = None
    exact: Fraction | None = None


Closeness = Callable[[NumberParse, NumberParse, str, str], float]
"""closeness(predicted, gold, predicted text, gold text) -> reward in [0, 1]."""


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", "") or "x")  # "" and "+" are no numbers: ValueError


def _clean(answer: str) -> str:
    text = answer.strip()
    for mark in _WRAPPERS:
        if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text[len(mark) : -len(mark)].strip()
    if len(text) > 1 and text.endswith(".") and text[-2] in "0123456789%":
        text = text[:-1]
    return text.replace(_MINUS, "-")


def parse_number(answer: str, percent: str = "refuse", unit: str = "") -> NumberParse:
    """The one number that `answer` is, with an optional `unit` behind it (compared as written).

    Reasons: answer_too_long, number_too_long, not_a_number, several_numbers, unexpected_percent, division_by_zero,
    not_finite. Never raises on any text.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return NumberParse(None, "answer_too_long")
    text = _clean(answer)
    if unit and unit != "%" and text.endswith(unit) and len(text) > len(unit):
        text = text[: -len(unit)].rstrip()
    if len(text) > MAX_NUMBER_CHARS:
        return NumberParse(
            None, "number_too_long" if text.lstrip("+-").isdecimal() else "not_a_number"
        )
    found = _NUMBER.fullmatch(text)
    if not found:
        return NumberParse(
            None, "several_numbers" if len(_NUMBER_LIKE.findall(text)) > 1 else "not_a_number"
        )
    mode = "keep" if unit == "%" and percent == "refuse" else percent
    if found["percent"] and mode == "refuse":
        return NumberParse(None, "unexpected_percent")
    scale = 100 if found["percent"] and mode == "fraction" else 1
    try:
        exact = (
            _fraction(found["top"])
            / (_fraction(found["bottom"]) if found["bottom"] is not None else 1)
            / scale
        )
        value = float(exact)
    except ZeroDivisionError:
        return NumberParse(None, "division_by_zero")
    except OverflowError:
        return NumberParse(None, "not_finite")
    except ValueError:
        return NumberParse(None, "not_a_number")
    return NumberParse(value, None, exact)


def is_division(answer: str, unit: str = "") -> bool:
    """Whether a text that `parse_number` reads is a division, 10/2, which leaves something to compute."""
    text = _clean(answer)
    return "/" in (text[: -len(unit)] if unit and text.endswith(unit) else text)


def parse_first_token(answer: str) -> NumberParse:
    """VSI-Bench's official reading: the first token between spaces, its closing full stops removed, as a float.

    Stricter than Python's float in what could be gamed: ASCII digits only, finite. Reasons: answer_too_long,
    not_a_number, not_finite.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return NumberParse(None, "answer_too_long")
    token = answer.split(" ", 1)[0].rstrip(".").strip()
    if len(token) > MAX_NUMBER_CHARS or not _TOKEN.fullmatch(token):
        return NumberParse(None, "not_a_number")
    value = float(token)
    return (
        NumberParse(value, None, Fraction(token))
        if math.isfinite(value)
        else NumberParse(None, "not_finite")
    )


def within(
    predicted: NumberParse, gold: NumberParse, abs_tol: float = 0.0, rel_tol: float = 0.0
) -> bool:
    """|p - g| <= max(abs_tol, rel_tol * |g|), in exact arithmetic: 1.05 is within 0.05 of 1. False without two numbers."""
    if predicted.exact is None or gold.exact is None:
        return False
    limit = max(Fraction(str(abs_tol)), Fraction(str(rel_tol)) * abs(gold.exact))
    return abs(predicted.exact - gold.exact) <= limit


def rounded_equal(predicted: NumberParse, gold: NumberParse, decimals: int) -> bool:
    """Equal after Python's round of both floats to `decimals`. False without two numbers."""
    if predicted.value is None or gold.value is None:
        return False
    return round(predicted.value, decimals) == round(gold.value, decimals)


@functools.lru_cache(maxsize=1)
def _official_limits() -> tuple[float, ...]:
    import numpy as np

    return tuple(float(v) for v in 1 - np.linspace(0.5, 0.95, 10))


def mra(predicted: float, gold: float, strict: bool = False) -> float:
    """Mean relative accuracy: share of t in linspace(.5, .95, 10) with |p - g| / |g| <= 1 - t (thinking-in-space).

    The official rule divides by g and is undefined at 0: here a truth of 0 gives 1 for 0 and 0 for all else, and the
    size of a negative truth counts. `strict` reproduces Video-R1 instead: `<`, |g| + 1e-8, float32.
    """
    if strict:
        return _mra_float32(predicted, gold)
    if gold == 0:
        return float(predicted == 0)
    error = abs(predicted - gold) / abs(gold)
    return sum(error <= limit for limit in _official_limits()) / 10


def _mra_float32(predicted: float, gold: float) -> float:
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        p, g = np.float32(predicted), np.float32(gold)
        error = np.abs(p - g) / (np.abs(g) + np.float32(1e-8))
        limits = np.float32(1) - (0.5 + 0.05 * np.arange(10)).astype(np.float32)
        return float(np.mean(error < limits))


# the rules by name; each factory refuses wrong parameters


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"expected {name} to be a number >= 0, found {value!r}")
    return float(value)


def _exact() -> Closeness:
    return lambda p, g, p_text, g_text: float(p.exact == g.exact)


def _tolerance(abs: float = 0.0, rel: float = 0.0) -> Closeness:
    abs_tol, rel_tol = _number("tolerance.abs", abs), _number("tolerance.rel", rel)
    if abs_tol == rel_tol == 0:
        raise ConfigError(
            "expected tolerance.abs or tolerance.rel above 0, found neither; use mode exact for none"
        )
    return lambda p, g, p_text, g_text: float(within(p, g, abs_tol, rel_tol))


def _mra_double(predicted: float, gold: float) -> float:
    """EasyVideoR1's loop: `<`, |g| + 1e-8, thresholds by adding 0.05 to 0.5, all in double precision."""
    error, level, met = abs(predicted - gold) / (abs(gold) + 1e-8), 0.5, 0
    for _ in range(10):
        met += error < 1 - level
        level += 0.05
    return met / 10


def _mra(strict: bool | str = False) -> Closeness:
    if not isinstance(strict, bool) and strict != "double":
        raise ConfigError(f"expected mra.strict true or false, or 'double', found {strict!r}")
    if strict == "double":
        return lambda p, g, p_text, g_text: _mra_double(_float(p), _float(g))
    return lambda p, g, p_text, g_text: mra(_float(p), _float(g), bool(strict))


def _regression() -> Closeness:
    """Video-R1's training reward 1 - min(1, (|p - g| + 1e-9) / (|g| + 1e-9)); a truth of 0 always earns 0."""

    def closeness(p: NumberParse, g: NumberParse, p_text: str, g_text: str) -> float:
        return 1 - min(1.0, (abs(_float(p) - _float(g)) + 1e-9) / (abs(_float(g)) + 1e-9))

    return closeness


def _rounded(decimals: int = 2, same_form: bool = True, slack: float = 0.0) -> Closeness:
    """Equal after rounding, or nearer than `slack`. `same_form`: both or neither of the texts have a decimal point."""
    if type(decimals) is not int or not 0 <= decimals <= 15:
        raise ConfigError(f"expected rounded.decimals from 0 to 15, found {decimals!r}")
    limit = _number("rounded.slack", slack)

    def closeness(p: NumberParse, g: NumberParse, p_text: str, g_text: str) -> float:
        if same_form and ("." in p_text) != ("." in g_text):
            return 0.0
        return float(rounded_equal(p, g, decimals) or abs(_float(p) - _float(g)) < limit)

    return closeness


def _float(number: NumberParse) -> float:
    assert number.value is not None, "closeness is asked of parsed numbers only"
    return number.value


_RULES: Mapping[str, Callable[..., Closeness]] = {
    "exact": _exact,
    "tolerance": _tolerance,
    "mra": _mra,
    "regression": _regression,
    "rounded": _rounded,
}


def make_closeness(mode: str, **params: Any) -> Closeness:
    """The rule `mode` with its parameters. Raises ConfigError for an unknown mode or parameter.

    exact       equal as fractions
    tolerance   abs, rel: |p - g| <= max(abs, rel * |g|)
    mra         strict=False: see `mra`; 'double' for EasyVideoR1's
    regression  Video-R1's 1 - min(1, (|p - g| + 1e-9) / (|g| + 1e-9))
    rounded     decimals=2, same_form=True, slack=0: Video-R1; decimals=4, same_form=False, slack=0.015: EasyVideoR1
    """
    if mode not in _RULES:
        raise ConfigError(
            f"unknown mode {mode!r} of a numeric reward; expected one of {', '.join(_RULES)}."
            f"{did_you_mean(str(mode), _RULES)}"
        )
    try:
        return _RULES[mode](**params)
    except TypeError as err:
        names = _RULES[mode].__code__.co_varnames[: _RULES[mode].__code__.co_argcount]
        raise ConfigError(
            f"unknown parameter of numeric mode {mode}: found {', '.join(params)}; expected "
            f"{', '.join(names) or 'none'}"
        ) from err
