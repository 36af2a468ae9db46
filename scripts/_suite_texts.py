"""Replies of a bad student: what models write beside plain answers, for the goldens of whole suites.

    python -c "from scripts._suite_texts import choice_replies; print(choice_replies('B', 'C', ('cat', 'dog', 'bird')))"

Overshoot, reversal, ties, empties, duplicates, cut replies, hedges, two answers, wrong units, other names, options that do not
exist. Nothing in them is an envelope or an end-of-turn token: those are no part of a reply in mmrl, and the programs know none.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from mmrl.rewards.parsing import strip_end_tokens

__all__ = ["LETTERS", "choice_replies", "number_replies", "plain", "truth_near"]

LETTERS = "ABCDEFGHI"


def plain(text: str) -> bool:
    """Whether a reply is the same for mmrl and for a program: no end-of-turn token or white space at its ends, no envelope."""
    return strip_end_tokens(text) == text == text.strip() and "<answer>" not in text


def choice_replies(right: str, other: str, options: Sequence[str]) -> list[str]:
    """Replies to a question with options, of which `right` and `other` are letters."""
    named, unlike = options[LETTERS.index(right)], options[LETTERS.index(other)]
    return [
        right,
        right.lower(),
        f"({right})",
        f"{right}.",
        f"{right})",
        f"**{right}**",
        f"\\boxed{{{right}}}",
        f"{right}. {named}",
        f"({right}) {named}",
        named,
        named.upper(),
        f"The answer is {right}",
        f"The answer is ({right}).",
        f"Answer: {right}",
        f"({right}) ({right})",
        f"{right}, {right}, {right}",
        f"{right} {other}",
        f"{other} {right}",
        f"({right}) or ({other})",
        f"({other})? No: ({right})",
        f"({right})? No: ({other})",
        f"Not {right}. The answer is {other}.",
        f"I would not say that it is {unlike}, because it is {named} after all",
        "",
        ".",
        "I cannot tell.",
        "none of them",
        "Both are right, I would say after long thought",
        f"The answer is ({right}",
        "The answer is (",
        "(Z)",
        "Z",
        "I",
        "42",
        f"{right}{other}",
        f"{right}/{other}",
        f"{right} and also maybe {other}",
        f"{named} {unlike}",
        named[: len(named) // 2],
        f"{right}\n{other}",
        f"{other}\n({right})",
        f"Option {right}",
        f"option {right.lower()}",
        f"{right}: {named}",
        " ".join(f"({letter})" for letter in LETTERS[: len(options)]),
        " ".join(f"({letter})" for letter in reversed(LETTERS[: len(options)])),
        f"Let me see. {named} fits, {unlike} does not. So I take {right} here",
        f"First {right} seems right. On second thoughts {other} is better, but in the end {right} it is",
    ]


def number_replies(truth: float, unit: str = "meters") -> list[str]:
    """Replies to a question whose answer is the number `truth`: near and far, with units, twice, as words, none."""
    shown = f"{truth:g}"
    return [
        shown,
        f"{truth:.2f}",
        f"{shown}.",
        f"{shown} {unit}",
        f"{shown}{unit[:1]}",
        f"{truth * 100:g} cm",
        f"about {shown}",
        f"{truth * 1.5:g}",
        f"{truth * 0.5:g}",
        f"{truth * 0.9:g}",
        f"{truth * 1.05:g}",
        f"{truth * 1.1:g} {unit}",
        f"{truth * 3:g}",
        f"-{shown}",
        f"+{shown}",
        "0",
        f"{shown} or {truth * 2:g}",
        f"{truth * 2:g} {shown}",
        f"{shown} {shown}",
        "",
        "?",
        "three",
        "nan",
        "inf",
        "1e400",
        f"{truth:.1e}",
        f"The answer is {shown}",
        f"{shown}, I think",
        f"{shown}..",
        f"({shown})",
        f"{shown}-{truth * 2:g}",
        f"**{shown}**",
        "I see",
        f"{shown}\n{truth * 2:g}",
        f"{truth * 1.5000001:.7f}",
        "1_0",
        "A",
    ]


def truth_near(rng: random.Random, reply: str, letters: str) -> str:
    """A letter for a truth: in two of three cases one that stands in the reply, where one does."""
    said = [letter for letter in letters if letter in reply]
    return rng.choice(said if said and rng.random() < 2 / 3 else list(letters))
