"""Expressions equal in meaning, gold first; values asked for; hostile expressions end at the deadline; threads agree."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.errors import RewardError
from mmrl.rewards import math_expression
from mmrl.rewards.math_expression import (
    MathVerdict,
    is_evaluated,
    parse_expression,
    shared_pool,
    verify_texts,
)
from mmrl.rewards.math_expression import verify_expression as _verify_expression
from mmrl.rewards.verifier_pool import Verdict
from tests.kits.clock_kit import takes_less


def verify_expression(gold: str, predicted: str, **options: Any) -> MathVerdict:
    """With a deadline that a busy machine keeps too: these tests ask what is right, not how fast."""
    return _verify_expression(gold, predicted, **{"deadline_s": 30.0, **options})


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("5", "5"),
        (" $5$ ", "5"),
        (r"\boxed{5}", "5"),
        (r"The answer is \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\(x\)", "x"),
        (r"\[x + 1\]", "x + 1"),
        ("$$x$$", "x"),
        ("**5**", "5"),
        ("5.", "5"),
        (r"$\boxed{5}$", "5"),
        (r"\boxed{$5$}", "5"),
        ("x\n=  5", "x = 5"),
        (r"\boxed {7}", "7"),
        (r"\{1, 2\}", r"\{1, 2\}"),
        ("[1, 2)", "[1, 2)"),
        (r"\boxed{\{1\}}", r"\{1\}"),
    ],
)
def test_the_expression_of_an_answer(text: str, inside: str) -> None:
    assert parse_expression(text) == (inside, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r"\boxed{5} \boxed{6}", "several_boxed"),
        (r"\boxed{\boxed{5}}", "several_boxed"),
        (r"\boxed{5", "unbalanced_braces"),
        ("5}", "unbalanced_braces"),
        ("{5", "unbalanced_braces"),
        ("}{", "unbalanced_braces"),
        ("$5$ or $6$", "several_expressions"),
        (r"5 \) 6 \(", "several_expressions"),
        ("", "not_an_expression"),
        ("$$", "not_an_expression"),
        (r"\boxed{}", "not_an_expression"),
        ("(" * 100 + ")" * 100, "too_deep"),
        ("x" * 1001, "expression_too_long"),
        ("[" * 400_000, "expression_too_long"),
    ],
)
def test_texts_that_are_no_single_expression(text: str, reason: str) -> None:
    assert parse_expression(text) == (None, reason)


def test_a_box_can_be_required() -> None:
    assert parse_expression("5", boxed=True).reason == "not_boxed"
    assert parse_expression(r"so \boxed{5}", boxed=True).text == "5"


@pytest.mark.parametrize(
    ("gold", "predicted", "correct"),
    [
        ("1/2", "0.5", True),
        (r"\frac{1}{2}", "0.5", True),
        ("0.5", r"\frac{1}{2}", True),
        (r"-\frac{3}{4}", "-0.75", True),
        ("5", "5.0", True),
        ("1/3", "0.333333", True),
        ("1/3", "0.33", False),
        ("1,234", "1234", True),
        ("5", "5%", True),
        ("1000", "1e3", True),
        ("5", "6", False),
        ("0.1", "0.10", True),
        ("7", "-7", False),
        (r"\text{yes}", "yes", True),
    ],
)
def test_plain_numbers_and_equal_texts_never_leave_the_process(
    gold: str, predicted: str, correct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math_expression, "_ask", lambda *_: pytest.fail("asked the verifier"))
    assert verify_expression(gold, predicted) == MathVerdict(correct)


@pytest.mark.parametrize(
    ("gold", "predicted", "correct"),
    [
        (r"\frac12", r"\frac{2}{4}", True),
        ("2x", "x + x", True),
        ("x^2-1", "(x-1)(x+1)", True),
        ("5", "x = 5", True),
        ("5", "5 cm", True),
        ("25", r"25 \text{ cm}^2", True),
        (r"\frac{\pi}{2}", "pi/2", True),
        (r"\sqrt{3}", "sqrt(3)", True),
        (r"\{1, 2\}", "2, 1", True),
        ("300000", r"3 \times 10^5", True),
        ("30", r"30^\circ", True),
        ("x > 5", "5 < x", True),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", True),
        ("x**2", "x^2", True),
        ("5", "5 or 6", False),
        ("5", r"5 \text{ or } 6", False),
        ("5", "5, 6", False),
        ("5", "5; 6", False),
        ("5", "5 and 6", False),
        ("[1, 2]", "(1, 2)", False),
        ("x", "y", False),
        ("x + 1", "x - 1", False),
        ("5", "x = 6", False),
        (r"\{1, 2\}", "1", False),
        ("1", "1, 2", False),
    ],
)
def test_meaning_decides(gold: str, predicted: str, correct: bool) -> None:
    assert bool(verify_expression(gold, predicted).correct) is correct


def test_gold_comes_first_because_the_order_matters() -> None:
    """math-verify is not symmetric: an equation answers a number, a number does not answer an equation of two unknowns."""
    assert verify_texts("1", "2x + z = 1")["correct"] != verify_texts("2x + z = 1", "1")["correct"]
    assert verify_expression("2x + z = 1", "1").correct is False


SMALL = [
    ("1.6e-19", "0", False),
    ("6.62607e-34", "9.10938e-31", False),
    ("0.0000001", "0", False),
    ("0", "0.0000001", False),
    ("0", "0.0", True),
    ("0", "1e-13", True),
    ("0.0000001", "1e-7", True),
    ("1.6e-19", "1.6000001e-19", True),
    ("1.6e-19", "1.60001e-19", False),
    ("1.6e-19", "1.6e-20", False),
    ("-1.6e-19", "1.6e-19", False),
    ("1/3", "0.3333", False),
    (r"1.6\times 10^{-19}", "1.6e-19", True),
    ("1.6e-19", r"1.6\times 10^{-19}", True),
    (r"1.6\times 10^{-19}", "0", False),
    (r"1.6\times 10^{-19}", r"2\times 10^{-30}", False),
    (r"2\times 10^{-30}", "1.6e-19", False),
    ("1.6e-19", r"2 \cdot 10^{-30}", False),
    ("1.6*10^-19", "1.6e-19", True),
    ("10^{-7}", "0", False),
    ("10^{-7}", "1e-7", True),
    ("6.02e23", "6.02*10^{23}", True),
    ("12345678", "12345679.0", False),
    ("12345678.5", "12345679.5", False),
]


@pytest.mark.parametrize(("gold", "predicted", "correct"), SMALL)
def test_small_numbers_are_compared_by_their_digits(
    gold: str, predicted: str, correct: bool
) -> None:
    assert verify_expression(gold, predicted).correct is correct
    if "1e-13" not in predicted:  # there math-verify's 15 digits decide
        assert (
            verify_expression(f"{gold} m", f"x = {predicted}", evaluated=False).correct is correct
        ), "by the grammar as well"


@pytest.mark.parametrize(
    ("gold", "predicted", "correct"),
    [
        (r"\sqrt{2} \times 10^{-19}", "0", False),
        ("0", r"\sqrt{2} \times 10^{-19} - 1e-9", False),
        (r"\{1.6e-19, 1\}", r"\{0, 1\}", False),
        (r"\{1.6e-19, 1\}", r"\{1, 1.6 \times 10^{-19}\}", True),
        ("(1e-9, 2)", "(2e-9, 2)", False),
        ("(1e-9, 2)", "(1e-9, 2)", True),
        (r"\sqrt{2}", "1.414214", True),
        (r"\begin{pmatrix}1e-9\\2\end{pmatrix}", r"\begin{pmatrix}0\\2\end{pmatrix}", False),
        ("x = 1e-9", "x = 0", False),
        ("1.6e-19", "0 C", False),
        ("1.6e-19 C", "0 C", False),
        ("1.6e-19 q", "1.6*10^{-19} q", True),
        ("1e-9x", "10^{-9}x", True),
        ("1e-9x", "2e-9x", False),
        ("1e-9x", "0", False),
        ("a = b", "b = a", True),
        ("x = 1e-9", "1e-9 = x", True),
        ("x = 1e-9", "0 = x", False),
        ("x + 1", "1.0 + x", True),
        ("2x", "x + x", True),
        ("x^2 - 1", "(x-1)(x+1)", True),
        (r"\frac{x}{3}", r"\frac{2x}{6}", True),
    ],
)
def test_small_numbers_inside_other_values_too(gold: str, predicted: str, correct: bool) -> None:
    assert bool(verify_expression(gold, predicted, evaluated=False).correct) is correct


@pytest.mark.parametrize("sign", ["%", r"\%", " %", r" \%"])
def test_a_percent_sign_on_one_side_may_stand_for_a_hundredth(sign: str) -> None:
    for gold, predicted, correct in (
        (f"50{sign}", "0.5", True),
        ("0.5", f"50{sign}", True),
        (f"50{sign}", "50", True),
        ("50", f"50{sign}", True),
        (f"50{sign}", r"\frac{1}{2}", True),
        (f"50{sign}", "50%", True),
        (f"50{sign}", "0.5%", False),
        (f"50{sign}", "5", False),
        ("0.5", f"5{sign}", False),
        (f"50{sign}", "5000", False),
        ("1/3", f"33.33{sign}", False),
    ):
        assert verify_expression(gold, predicted) == MathVerdict(correct), (gold, predicted)
    assert verify_expression("0.5", f"x = 50{sign}").correct is True
    assert verify_expression("0.5", f"x = 5{sign}").correct is False


@pytest.mark.parametrize(
    "text",
    [
        "10/2",
        "x = 10/2",
        r"\frac{10}{2}",
        r"\dfrac{10}{2}",
        "5/1",
        r"10 \over 2",
        r"\lfloor 5.7\rfloor",
        r"\left\lfloor 5.7 \right\rfloor",
        r"\sin(\pi/4)",
        "sqrt(25)",
        "|-5|",
        r"\lvert -5\rvert",
        "√25",
        r"\operatorname{floor}(5.7)",
        r"\mathrm{floor}(5.7)",
        r"\lceil 4.2 \rceil",
        "abs(-5)",
        "5¹",
    ],
)
def test_a_whole_number_as_truth_asks_for_its_digits(text: str) -> None:
    assert verify_expression("5", text) == (None, "not_evaluated", True)


def test_divisions_are_values_of_truths_that_are_not_whole() -> None:
    assert verify_expression("2.5", "5/2").correct is True
    assert verify_expression("5/2", r"\frac{10}{4}").correct is True
    assert verify_expression("60", "60 km/h").reason != "not_evaluated"
    assert verify_expression(r"\frac{\sqrt{2}}{2}", r"\sin(\pi/4)").correct is True


@pytest.mark.parametrize("text", ["5_{7}", "5_7", "(5)_7", "{5}_{7}", "x = 5_{10}"])
def test_numbers_with_subscripts_are_refused(text: str) -> None:
    assert verify_expression("5", text).reason == "subscript"
    assert verify_expression("12_8", "12_{8}").correct is True
    assert verify_expression("12_8", "12_7").reason == "subscript"
    assert verify_expression("x_1 + 1", "1 + x_1").correct is True
    assert verify_expression("5", "x_1 = 5").correct is True


class _Scripted:
    """A pool that gives these verdicts, in their order."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts = list(verdicts)

    def call(self, *args: str) -> Verdict:
        return self.verdicts.pop(0)


GOOD = Verdict({"correct": True, "gold_parsed": True, "predicted_parsed": True})


def test_failures_are_retried_once_never_remembered_and_a_crash_is_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late, gone = Verdict(None, "verifier_timeout"), Verdict(None, "verifier_crash")
    pool = _Scripted(late, late, gone, gone, late, gone, gone, GOOD)
    monkeypatch.setattr(math_expression, "shared_pool", lambda deadline_s: pool)
    assert verify_expression("3q", "q + 2q").reason == "verifier_timeout"
    for _ in range(2):
        with pytest.raises(RewardError, match="its process ended twice"):
            verify_expression("3q", "q + 2q")
    assert verify_expression("3q", "q + 2q").correct is True
    assert verify_expression("3q", "q + 2q").correct is True and not pool.verdicts, (
        "an answer is remembered"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", True),
        ("-5", True),
        ("x = -5", True),
        ("3/4", True),
        (r"-\frac{3}{4}", True),
        (r"\frac{-3}{4}", True),
        ("1,234", True),
        (r"3 \times 10^5", True),
        ("3*10^{-5}", True),
        (r"1.6 \times 10^{-19} C", True),
        ("60 km/h", True),
        ("2 + 3 m", False),
        ("10^5", True),
        ("5 cm", True),
        (r"25 \text{ cm}^2", True),
        ("25 cm^2", True),
        (r"30^\circ", True),
        (r"5\%", True),
        ("1e-5", True),
        (r"1\frac{1}{2}", True),
        (r"\text{five}", True),
        ("2+3", False),
        ("7 - 2", False),
        ("x = 7-2", False),
        ("2*3", False),
        (r"2 \cdot 3", False),
        ("2^5", False),
        ("3!", False),
        (r"\sqrt{25}", False),
        ("(2)(3)", False),
        ("2 3", False),
        ("2(3)", False),
        (r"\frac{1}{2}/3", False),
        (r"\sum_{k=1}^5 1", False),
        (r"\binom{5}{2}", False),
        ("10/2/1", False),
    ],
)
def test_a_value_is_told_from_what_still_has_to_be_computed(text: str, value: bool) -> None:
    assert is_evaluated(text) is value
    if not value:
        assert verify_expression("5", text) == (None, "not_evaluated", True)


def test_without_evaluated_the_rule_is_math_verifys_own() -> None:
    assert verify_expression("5", "2+3", evaluated=False).correct is True
    assert verify_expression("x^2", "x*x").correct is True, (
        "an expression as truth may be met by any spelling"
    )


@pytest.mark.parametrize(
    "text",
    [
        "I do not know",
        "the answer is 5",
        "Infinity",
        "[nan, 1]",
        "__import__('os').system('x')",
        "5 )(",
        "&&&",
        "5 _",
        "５",
    ],
)
def test_what_is_no_mathematics_fails_or_is_wrong(text: str) -> None:
    verdict = verify_expression("x + 5", text)
    assert verdict.correct is not True
    assert verdict.correct is False or verdict.reason == "not_an_expression"


def test_a_truth_that_is_no_mathematics_is_met_by_its_own_spelling_only() -> None:
    assert verify_expression(r"5 \heartsuit &", r"5 \heartsuit &").correct is True
    assert verify_expression(r"5 \heartsuit &", "5") == (False, None, False)


@pytest.mark.slow
def test_hostile_expressions_end_at_the_deadline_and_the_next_answer_is_right() -> None:
    deadline = 3.0
    before = shared_pool(deadline).stats
    assert verify_expression("x + 1", "1 + x", deadline_s=deadline).correct is True
    deep = "(" * 50 + "x" + ")" * 50  # the grammar backtracks for minutes
    start = time.monotonic()
    assert verify_expression("x", deep, deadline_s=deadline).reason == "verifier_timeout"
    assert time.monotonic() - start < 2 * deadline + 20, "two deadlines and two starts"
    assert verify_expression("2y", "y + y", deadline_s=deadline).correct is True
    assert shared_pool(deadline).stats.timeouts == before.timeouts + 2, (
        "once more, of a fresh process"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "9^{9^{9}}",
        "999999999!",
        r"\sum_{k=1}^{10^{12}} \frac{1}{k}",
        "((9^9)^9)^9",
        r"10^{10^{10}} + 1",
        r"\frac{9^{9^9}}{9^{9^9} - 1}",
    ],
)
def test_huge_numbers_are_never_a_hang(text: str) -> None:
    assert verify_expression("5", text).reason == "not_evaluated", (
        "nothing is computed where a number is asked for"
    )
    start = time.monotonic()
    verdict = verify_expression("x", text, evaluated=False, deadline_s=1.0)
    assert time.monotonic() - start < 30, "two deadlines and two starts of the verifier"
    assert verdict.correct is not True


@settings(max_examples=80, deadline=None)
@given(st.one_of(st.text(max_size=60), st.text(r"\{}$()[]0123456789xfrac^+-*/=., ", max_size=40)))
def test_parsing_is_total(text: str) -> None:
    found = parse_expression(text)
    assert (found.text is None) == (found.reason is not None)
    if found.text is not None:
        assert parse_expression(f"${found.text}$").text is not None or "$" in found.text
        assert is_evaluated(found.text) in (True, False)


HOSTILE = [
    "{" * 400_000,
    r"\boxed{" * 60_000,
    "$" * 400_000,
    "9^" * 200_000,
    r"\frac" * 80_000,
    "1 " * 200_000,
    "١" * 1000,
    "(" * 1000,
    r"\text{" * 150,
    "=" * 1000,
    "a " * 500,
    "-" * 1000,
    r"\\" * 500,
]


@pytest.mark.parametrize("text", HOSTILE, ids=[h[:6] for h in HOSTILE])
def test_reading_hostile_text_takes_milliseconds(text: str) -> None:
    takes_less(0.03, lambda: is_evaluated(parse_expression(text).text or text[:1000]))


def test_plain_answers_cost_microseconds() -> None:
    # measured: about 20 microseconds each
    takes_less(
        2000 * 5e-3, lambda: [verify_expression("1234", str(number)) for number in range(2000)]
    )


def test_threads_agree_with_one_thread() -> None:
    pairs = [("x + 1", f"1 + x + {n} - {n}") for n in range(10)] + [
        ("5", str(n)) for n in range(10)
    ]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda pair: verify_expression(*pair), pairs))
    assert [v.correct for v in found] == [True] * 10 + [n == 5 for n in range(10)]
