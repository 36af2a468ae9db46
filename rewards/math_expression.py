r"""Do two mathematical expressions mean the same? math-verify, gold first, behind a deadline; plain numbers cost microseconds.

Three steps, the first that decides wins: equal texts; two plain numbers, compared in this process; sympy in a process
that is killed after `deadline_s` (mmrl.rewards.verifier_pool). Decimal numbers are equal to a millionth of the truth
(`close_values`), so that 0 is no small truth; 50% is both 50 and 0.5 to a truth without the sign. Texts go through
latex2sympy's LaTeX grammar only: the plain expressions of math-verify's own extraction would be given to sympy's
parse_expr, which is Python's eval.

    python -c "from mmrl.rewards.math_expression import verify_expression; print(verify_expression(r'\frac{1}{2}', '0.5'))"
"""

from __future__ import annotations

import cmath
import functools
import re
from fractions import Fraction
from typing import Any, NamedTuple

from mmrl.errors import RewardError
from mmrl.rewards.numeric import parse_number
from mmrl.rewards.verifier_pool import VerifierPool

__all__ = [
    "MAX_EXPRESSION_CHARS",
    "Expression",
    "MathVerdict",
    "close_values",
    "is_evaluated",
    "parse_expression",
    "shared_pool",
    "verify_expression",
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
_POWER = r"10 ?(?:\^|\*\*) ?(?:\{ ?(?P<braced>[+-]?[0-9]{1,3}) ?\}|(?P<bare>[+-]?[0-9]{1,3}))"
_SCIENTIFIC = re.compile(rf"(?:(?:\\times|\\cdot|\*|×) ?|^[+-]?){_POWER}$")
_SCIENTIFIC_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)(?:(?P<factor>[0-9]{{1,15}}(?:\.[0-9]{{1,30}})?|\.[0-9]{{1,30}}) ?(?:\\times|\\cdot|\*|×) ?)?{_POWER}"
)
_EXPONENT = re.compile(
    r"(?<![A-Za-z0-9.\\])([0-9]+(?:\.[0-9]+)?|\.[0-9]+)[eE]([+-]?[0-9]{1,3})(?![0-9.])"
)
_BARE_POWER = re.compile(r"(?<![0-9.])10 ?\^ ?([+-]?[0-9]{2,3}|[+-][0-9])(?![0-9])")
_DEGREES = re.compile(r"\^ ?(?:\{ ?\\circ ?\}|\\circ)")
_UNIT_POWER = re.compile(
    r"(?:\\(?:text|mathrm)\s*\{[^{}]*\}|(?<=[0-9 ])[A-Za-z]{1,3}) ?\^ ?(?:\{[23]\}|[23])$"
)
_UNIT = re.compile(r"(?<=[0-9}]) ?[A-Za-z]{1,3}(?:/[A-Za-z]{1,3})?$")
_FRACTION = re.compile(
    r"([+-]?)\\[dt]?frac ?\{ ?([+-]?[0-9]{1,15}) ?\} ?\{ ?([+-]?[0-9]{1,15}) ?\}"
)
# a sum, product, power, root, function or juxtaposition of numbers: something that still has to be computed
_FUNCTIONS = (
    "sqrt|sum|prod|int|binom|sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|lg|exp|lim|max|min|"
    "gcd|lcm|mod|bmod|pmod|abs|floor|ceil|det|cbrt|root|factorial"
)
_OPERATION = re.compile(
    r"[+*^!×÷√|⌊⌋⌈⌉]|(?<=[0-9A-Za-z)}\s])-|[0-9)}] ?\(|[0-9]\s+[0-9]|\)\s*[0-9]|(?<=[0-9)])[²³⁴-⁹⁰¹]|"
    rf"\\(?:times|cdot|div|pm|left|[lr]?vert|[lr]Vert|[lr]floor|[lr]ceil|operatorname|oint|iint|Gamma|zeta|{_FUNCTIONS})(?![A-Za-z])|"
    rf"(?<![A-Za-z\\])(?:{_FUNCTIONS}) ?[({{]"
)
_DIVISION = re.compile(r"\\[dtc]?frac(?![A-Za-z])|\\over(?![A-Za-z])|[0-9)}\]] ?/ ?[0-9({\[+-]")
_NAMED_FUNCTION = re.compile(
    r"\\(?:text|mathrm|operatorname|mathop)\s*\{[^{}]*\}\s*(?:\\left)?\s*\(\s*[0-9+-]"
)
_SUBSCRIPT = re.compile(r"(?:[0-9]|\{ ?[0-9.]+ ?\}) ?_ ?[{0-9A-Za-z\\]")
_ANY_SUBSCRIPT = re.compile(r"[0-9)\]}] ?_")


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
        if char in "{}" and text[index - 1 : index] != "\\":
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
        text = text[boxes[0].end() : end].strip()
    elif boxed:
        return Expression(None, "not_boxed")
    if len(text) > MAX_EXPRESSION_CHARS:
        return Expression(None, "expression_too_long")
    for left, right in _DELIMITERS:
        if len(text) >= len(left + right) and text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)].strip()
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


def is_evaluated(text: str, integer: bool = False) -> bool:
    """False for a text that still has to be computed (3/4 + 1/2, 2^5, 2 3, sin(1)); fractions and a * 10^b are values.

    With `integer`, when a whole number is asked for, a division is no value either: 10/2 repeats the question.
    """
    value = text.rpartition("=")[2]
    if _NAMED_FUNCTION.search(value):
        return False
    value = _UNIT.sub(
        "", _DEGREES.sub("", _TEXT.sub("", _UNIT_POWER.sub("", value.strip()))).strip()
    )
    value = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", _SCIENTIFIC.sub("", value))
    value = re.sub(r"(?<=[0-9])[eE][+-]?(?=[0-9])", "", value)
    if _OPERATION.search(value) or (integer and _DIVISION.search(value)):
        return False
    return value.count("/") + value.count("frac") <= 1


class _Number(NamedTuple):
    """A plain number: its exact value, whether it is a decimal number, whether a percent sign follows."""

    exact: Fraction
    decimal: bool
    percent: bool


def _plain_number(text: str) -> _Number | None:
    r"""The value of a plain number, fraction or a \times 10^{b}, with a percent sign or not; None for anything else."""
    text = text.replace(r"\%", "%")
    power = _SCIENTIFIC_NUMBER.fullmatch(text)
    if power:
        value = Fraction(f"{power['sign']}{power['factor'] or 1}") * Fraction(10) ** int(
            power["braced"] or power["bare"]
        )
        return _Number(value, True, False)
    fraction = _FRACTION.fullmatch(text)
    if fraction:
        text = (
            f"{fraction[1]}{fraction[2]}/{fraction[3]}"
            if not fraction[2].startswith(("+", "-"))
            else text
        )
    found = parse_number(text, percent="keep")
    return (
        None
        if found.exact is None
        else _Number(found.exact, "." in text or "e" in text.lower(), "%" in text)
    )


def close_values(gold: Any, predicted: Any) -> bool:
    """|p - g| <= 1e-6 * min(1, |g|): six decimals, and of a small truth six digits. A truth of 0 is met by 1e-12 at most."""
    if gold == 0:
        return bool(abs(predicted) <= _ZERO)
    return bool(abs(predicted - gold) <= _CLOSE * min(1, abs(gold)))


_CLOSE, _ZERO = Fraction(1, 10**6), Fraction(1, 10**12)


def _compare_numbers(gold: _Number, predicted: _Number) -> bool:
    """Exact, or `close_values` when one is a decimal number. A percent sign on one side only may stand for 1/100 or not."""
    golds, values = [gold.exact], [predicted.exact]
    if gold.percent != predicted.percent:
        (golds if gold.percent else values).append(
            (gold if gold.percent else predicted).exact / 100
        )
    rough = gold.decimal or predicted.decimal
    return any(
        value == true or (rough and close_values(true, value)) for true in golds for value in values
    )


def _subscripts(text: str) -> str:
    """The text with one spelling of subscripts, to compare it with another."""
    return re.sub(r"_\{([^{}]*)\}", r"_\1", text.replace(" ", ""))


def _no_value(gold: str, predicted: str, number: _Number | None) -> str | None:
    """Why `predicted` is no value for a truth that asks for one: 'not_evaluated', 'subscript' (5_7, which the grammar reads
    as 5), or None. `number` is the truth as a plain number."""
    if number is not None:
        integer = (
            number.exact.denominator == 1 and not number.percent and not _DIVISION.search(gold)
        )
        if not is_evaluated(predicted, integer):
            return "not_evaluated"
        return (
            "subscript"
            if _ANY_SUBSCRIPT.search(_TEXT.sub("", predicted.rpartition("=")[2]))
            else None
        )
    return "subscript" if _SUBSCRIPT.search(predicted) else None


@functools.cache
def _pool(deadline_s: float) -> VerifierPool:
    return VerifierPool(
        "mmrl.rewards.math_expression:verify_texts", deadline_s=deadline_s, probe=("2x", "x + x")
    )


def shared_pool(deadline_s: float = 2.0) -> VerifierPool:
    """This process's pool of one verifier process for that deadline, started when a text first needs it."""
    return _pool(float(deadline_s))


class _Undecided(Exception):
    """The verifier gave no answer; the reason is the argument. Raised, so that it is not remembered."""


@functools.lru_cache(maxsize=8192)
def _decide(gold: str, predicted: str, deadline_s: float) -> MathVerdict:
    """One answer per pair of texts: completions of a group repeat each other. Only answers are remembered.

    A text that hangs or crashes the verifier is asked once more, of a fresh process. Raises _Undecided.
    """
    verdict = shared_pool(deadline_s).call(gold, predicted)
    if verdict.reason in ("verifier_timeout", "verifier_crash"):
        verdict = shared_pool(deadline_s).call(gold, predicted)
    if verdict.reason is not None:
        raise _Undecided(verdict.reason)
    if not verdict.value["predicted_parsed"]:
        return MathVerdict(None, "not_an_expression", verdict.value["gold_parsed"])
    return MathVerdict(verdict.value["correct"], None, verdict.value["gold_parsed"])


def _ask(gold: str, predicted: str, deadline_s: float) -> MathVerdict:
    try:
        return _decide(gold, predicted, deadline_s)
    except _Undecided as err:
        if str(err) == "verifier_crash":
            raise RewardError(
                f"expected an answer of the verifier, found that its process ended twice (truth {gold!r:.80}); "
                "is the machine short of memory?"
            ) from err
        return MathVerdict(None, str(err))


def verify_expression(
    gold: str, predicted: str, *, evaluated: bool = True, deadline_s: float = 2.0
) -> MathVerdict:
    """Whether `predicted` means `gold` (not symmetric: gold first); both as parse_expression gives them.

    With `evaluated`, a number as truth asks for a value, so that repeating the question's "3/4 + 1/2" earns nothing
    ('not_evaluated'; for a whole number "10/2" as well), and a number with a subscript is none ('subscript'). Further
    reasons: not_an_expression, verifier_timeout (twice, so at most 2 * deadline_s), verifier_error. Raises RewardError when
    the verifier cannot be started or crashes: that says nothing about the text.
    """
    if gold == predicted or _unwrap_text(gold) == _unwrap_text(predicted):
        return MathVerdict(True)
    number, said = _plain_number(gold), _plain_number(predicted)
    if evaluated:
        if "_" in predicted and _subscripts(gold) == _subscripts(predicted):
            return MathVerdict(True)
        reason = _no_value(gold, predicted, number)
        if reason is not None:
            return MathVerdict(None, reason)
    if number is not None and said is not None:
        return MathVerdict(_compare_numbers(number, said))
    if _is_prose(predicted):
        return MathVerdict(None, "not_an_expression")
    return _ask(gold, predicted, deadline_s)


# in the verifier's process


def _to_sympy(text: str) -> Any:
    """The sympy value of an expression text; None when the grammar refuses it."""
    from math_verify.grader import should_treat_as_complex
    from math_verify.parser import NormalizationConfig, latex2sympy, normalize_latex

    config = NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none"
    )
    text = _PI.sub(r"\\pi ", text.replace("**", "^").replace("\u2212", "-"))
    # 1.6e-19 is no product with e
    text = _EXPONENT.sub(r"\1 \\times 10^{\2}", _BARE_POWER.sub(r"10^{\1}", text))
    try:
        latex = normalize_latex(text, config)
        return latex2sympy(
            latex,
            is_real=not should_treat_as_complex(latex),
            convert_degrees=False,
            normalization_config=None,
        )
    except Exception:  # the grammar's own errors are plain Exceptions; a deadline or a lack of memory is not among them
        return None


def _values(value: Any) -> list[Any] | None:
    """The numbers a sympy value is made of, sets sorted, of x = number the number; None where there are none.

    Symbols stand for numbers that depend on their names alone: 1e-19 x is no 0 either.
    """
    from sympy import Eq, Expr, FiniteSet, Float, MatrixBase, Tuple

    if isinstance(value, Eq):
        # x = 5 or 5 = x; other equations are compared whole
        sides = sorted(value.args, key=lambda side: not side.is_Symbol)
        value = sides[1] if sides[0].is_Symbol and not sides[1].free_symbols else None
    if isinstance(value, (FiniteSet, Tuple, MatrixBase)):
        parts = [
            _values(part)
            for part in (value.flat() if isinstance(value, MatrixBase) else value.args)
        ]
        if any(part is None or len(part) != 1 for part in parts):
            return None
        numbers = [part[0] for part in parts if part is not None]
        return (
            sorted(numbers, key=lambda n: (n.real, n.imag))
            if isinstance(value, FiniteSet)
            else numbers
        )
    if not isinstance(value, Expr):
        return None
    try:
        known = {
            symbol: Float(1 + (sum(map(ord, symbol.name)) * 37 % 101) / 211)
            for symbol in value.free_symbols
        }
        number = complex(value.subs(known).doit().evalf(20))
        return [number] if cmath.isfinite(number) else None
    except (TypeError, ValueError, OverflowError):
        return None


def _far_apart(true: Any, found: Any, percent: bool) -> bool:
    """Numbers on both sides that are not `close_values`: math-verify rounds to 6 decimals, and there 1e-19 is 0."""
    golds, values = _values(true), _values(found)
    if golds is None or values is None or len(golds) != len(values):
        return False
    scales = (1.0, 0.01, 100.0) if percent else (1.0,)
    return not any(
        all(
            abs(v * scale - g) <= 1.0001e-6 * min(1, abs(g)) if g else abs(v) <= 1e-12
            for g, v in zip(golds, values, strict=True)
        )
        for scale in scales
    )


def verify_texts(gold: str, predicted: str) -> dict[str, bool]:
    """math-verify's `verify(gold, predicted)` without its SIGALRM timeouts, small numbers compared by their digits.

    Run it through the pool: it can hang.
    """
    from math_verify import verify

    true, found = _to_sympy(gold), _to_sympy(predicted)
    same = true is not None and found is not None and verify([true], [found], timeout_seconds=None)
    if same and _far_apart(true, found, ("%" in gold) != ("%" in predicted)):
        same = False
    return {
        "correct": bool(same),
        "gold_parsed": true is not None,
        "predicted_parsed": found is not None,
    }


def warm_up_verify_texts() -> None:
    """Load sympy and build the grammar's tables before the first deadline runs."""
    verify_texts(r"\frac{x}{2} + \sqrt{3}", r"\sqrt{3} + x/2")
