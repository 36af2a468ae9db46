r"""Do two mathematical expressions mean the same? math-verify, gold first, behind a deadline; plain numbers cost microseconds.

Three steps, the first that decides wins: equal texts; two plain numbers, compared in this process; sympy in a process
that is killed after `deadline_s` (rewards.verifier_pool). Texts go through latex2sympy's LaTeX grammar only: the plain
expressions of math-verify's own extraction would be given to sympy's parse_expr, which is Python's eval.

    python -c "from rewards.math_expression import verify_expression; print(verify_expression(r'\frac{1}{2}', '0.5'))"
"""
from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

from rewards.numeric import parse_number
from rewards.verifier_pool import VerifierPool

__all__ = [
    "MAX_EXPRESSION_CHARS", "Expression", "MathVerdict", "is_evaluated", "parse_expression", "shared_pool", "verify_expression",
    "verify_texts",
]

MAX_EXPRESSION_CHARS = 1000
MAX_DEPTH = 60
"""Brackets nested deeper are refused ('too_deep'): no real answer is."""

_BOX = re.compile(r"\\boxed\s*\{")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"))
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|operatorname)\s*\{([^{}]*)\}")
_SCIENTIFIC = re.compile(r"(?:(?:\\times|\\cdot|\*|×) ?|^[+-]?)10 ?\^ ?(?:\{ ?[+-]?[0-9]{1,3} ?\}|[+-]?[0-9])$")
_DEGREES = re.compile(r"\^ ?(?:\{ ?\\circ ?\}|\\circ)")
_UNIT_POWER = re.compile(r"(?:\\(?:text|mathrm)\s*\{[^{}]*\}|(?<=[0-9 ])[A-Za-z]{1,3}) ?\^ ?(?:\{[23]\}|[23])$")
_FRACTION = re.compile(r"([+-]?)\\[dt]?frac ?\{ ?([+-]?[0-9]{1,15}) ?\} ?\{ ?([+-]?[0-9]{1,15}) ?\}")
# a sum, product, power, root, function or juxtaposition of numbers: something that still has to be computed
_OPERATION = re.compile(
    r"[+*^!×÷]|(?<=[0-9A-Za-z)}\s])-|[0-9)}] ?\(|[0-9]\s+[0-9]|\)\s*[0-9]|"
    r"\\(?:times|cdot|div|sqrt|sum|prod|int|binom|sin|cos|tan|log|ln|exp|lim|pm|left|max|min|gcd)(?![A-Za-z])")


class Expression(NamedTuple):
    """The expression text of an answer, without box and delimiters, or None with the `reason`."""

    text: str | None
    reason: str | None = None


class MathVerdict(NamedTuple):
    """`correct`, or None with the reason; `gold_parsed` is False when the truth itself could not be read as mathematics."""

    correct: bool | None
    reason: str | None = None
    gold_parsed: bool = True


def _closing(text: str, start: int) -> int:
    """Index of the brace that closes the one before `start`, or -1."""
    depth = 1
    for index in range(start, len(text)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return index
    return -1


def _bracket_problem(text: str) -> str | None:
    depth = curly = 0
    for index, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if char in "{}" and text[index - 1:index] != "\\":
            curly += 1 if char == "{" else -1
            if curly < 0:
                return "unbalanced_braces"
        if depth > MAX_DEPTH:
            return "too_deep"
    return "unbalanced_braces" if curly else None


def parse_expression(answer: str, boxed: bool = False) -> Expression:
    r"""The expression an answer text is: inside its only \boxed{}, or the whole text, without $, \( \) and the like.

    With `boxed` a missing \boxed{} is a failure. Reasons: expression_too_long, several_boxed, not_boxed, too_deep,
    unbalanced_braces, several_expressions, not_an_expression (nothing, or prose). Linear time; never raises.
    """
    text = answer.strip()
    boxes = list(_BOX.finditer(text[:100_000]))
    if len(boxes) > 1:
        return Expression(None, "several_boxed")
    if boxes:
        end = _closing(text, boxes[0].end())
        if end < 0:
            return Expression(None, "unbalanced_braces")
        text = text[boxes[0].end():end].strip()
    elif boxed:
        return Expression(None, "not_boxed")
    if len(text) > MAX_EXPRESSION_CHARS:
        return Expression(None, "expression_too_long")
    for left, right in _DELIMITERS:
        if len(text) >= len(left + right) and text.startswith(left) and text.endswith(right):
            text = text[len(left):-len(right)].strip()
    if any(mark in text.replace(r"\$", "") for mark in ("$", r"\(", r"\)", r"\[", r"\boxed")):
        return Expression(None, "several_expressions")
    text = " ".join(text.split())
    if len(text) > 1 and text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    problem = _bracket_problem(text)
    if problem or not text:
        return Expression(None, problem or "not_an_expression")
    return Expression(text)


def _unwrap_text(text: str) -> str:
    return " ".join(_TEXT.sub(lambda found: found[1], text).split())


def _is_prose(text: str) -> bool:
    """Three words or more outside \\text{}, or a float's name, which the grammar would read as products of letters."""
    words = _WORD.findall(_TEXT.sub(" ", text))
    return len(words) >= 3 or any(word.lower() in ("infinity", "inf", "nan") for word in words)


def is_evaluated(text: str) -> bool:
    """False for a text that still has to be computed (3/4 + 1/2, 2^5, 2 3); fractions and a * 10^b are values."""
    value = text.rpartition("=")[2]
    value = _DEGREES.sub("", _TEXT.sub("", _UNIT_POWER.sub("", value.strip()))).strip()
    value = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", _SCIENTIFIC.sub("", value))
    value = re.sub(r"(?<=[0-9])[eE][+-]?(?=[0-9])", "", value)
    return not _OPERATION.search(value) and value.count("/") + value.count("frac") <= 1


def _plain_number(text: str) -> tuple[Any, bool] | None:
    """(exact value, has a decimal point) of a plain number or fraction; None for anything else."""
    fraction = _FRACTION.fullmatch(text)
    if fraction:
        text = f"{fraction[1]}{fraction[2]}/{fraction[3]}" if not fraction[2].startswith(("+", "-")) else text
    found = parse_number(text, percent="keep")
    return None if found.exact is None else (found.exact, "." in text or "e" in text.lower())


def _compare_numbers(gold: tuple[Any, bool], predicted: tuple[Any, bool]) -> bool:
    """math-verify's rule: exact, or equal after rounding to 6 decimals when one is a decimal number."""
    if gold[0] == predicted[0]:
        return True
    return (gold[1] or predicted[1]) and round(gold[0], 6) == round(predicted[0], 6)


@functools.cache
def _pool(deadline_s: float) -> VerifierPool:
    return VerifierPool("rewards.math_expression:verify_texts", deadline_s=deadline_s)


def shared_pool(deadline_s: float = 2.0) -> VerifierPool:
    """This process's pool of one verifier process for that deadline, started when a text first needs it."""
    return _pool(float(deadline_s))


@functools.lru_cache(maxsize=8192)
def _ask(gold: str, predicted: str, deadline_s: float) -> MathVerdict:
    """One answer per pair of texts: completions of a group repeat each other. Timeouts are remembered as well."""
    verdict = shared_pool(deadline_s).call(gold, predicted)
    if verdict.reason is not None:
        return MathVerdict(None, verdict.reason)
    if not verdict.value["predicted_parsed"]:
        return MathVerdict(None, "not_an_expression", verdict.value["gold_parsed"])
    return MathVerdict(verdict.value["correct"], None, verdict.value["gold_parsed"])


def verify_expression(gold: str, predicted: str, *, evaluated: bool = True, deadline_s: float = 2.0) -> MathVerdict:
    """Whether `predicted` means `gold` (not symmetric: gold first); both as parse_expression gives them.

    With `evaluated`, a number as truth asks for a value, so that repeating the question's "3/4 + 1/2" earns nothing
    ('not_evaluated'). Further reasons: not_an_expression, verifier_timeout, verifier_crash, verifier_error. Raises
    RewardError when the verifier cannot be started.
    """
    if gold == predicted or _unwrap_text(gold) == _unwrap_text(predicted):
        return MathVerdict(True)
    numbers = _plain_number(gold), _plain_number(predicted)
    if numbers[0] is not None and numbers[1] is not None:
        return MathVerdict(_compare_numbers(numbers[0], numbers[1]))
    if numbers[0] is not None and evaluated and not is_evaluated(predicted):
        return MathVerdict(None, "not_evaluated")
    if _is_prose(predicted):
        return MathVerdict(None, "not_an_expression")
    return _ask(gold, predicted, deadline_s)


# in the verifier's process


def _to_sympy(text: str) -> Any:
    """The sympy value of an expression text; None when the grammar refuses it."""
    from math_verify.grader import should_treat_as_complex
    from math_verify.parser import NormalizationConfig, latex2sympy, normalize_latex

    config = NormalizationConfig(basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none")
    text = _PI.sub(r"\\pi ", text.replace("**", "^").replace("\u2212", "-"))
    try:
        latex = normalize_latex(text, config)
        return latex2sympy(latex, is_real=not should_treat_as_complex(latex), convert_degrees=False,
                           normalization_config=None)
    except Exception:  # the grammar's own errors are plain Exceptions; a deadline or a lack of memory is not among them
        return None


def verify_texts(gold: str, predicted: str) -> dict[str, bool]:
    """math-verify's `verify(gold, predicted)` without its SIGALRM timeouts. Run it through the pool: it can hang."""
    from math_verify import verify

    true, found = _to_sympy(gold), _to_sympy(predicted)
    same = true is not None and found is not None and verify([true], [found], timeout_seconds=None)
    return {"correct": bool(same), "gold_parsed": true is not None, "predicted_parsed": found is not None}


def warm_up_verify_texts() -> None:
    """Load sympy and build the grammar's tables before the first deadline runs."""
    verify_texts(r"\frac{x}{2} + \sqrt{3}", r"\sqrt{3} + x/2")
