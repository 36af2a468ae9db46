"""View consistency: does the answer to a mirrored picture mirror the answer to the picture?

A model that looks answers "left" on one view and "right" on the other; one that guesses by habit says the same on both. The
measure needs no truth where words tell what a mirror does (left <-> right); where they do not (a yes/no question whose
truth flips, another object), an answer is consistent when it flips exactly as the truth does. A failed answer (None) is
consistent with nothing.

    python -c "from mmrl.rewards.views import view_consistency; print(view_consistency(['left', 'above'], ['right', 'below']))"
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["is_consistent", "swap_sides", "view_consistency"]

_PAIRS = {
    "left": "right",
    "leftmost": "rightmost",
    "leftward": "rightward",
    "leftwards": "rightwards",
    "lefthand": "righthand",
    "clockwise": "counterclockwise",
    "east": "west",
}
_SWAP = {**_PAIRS, **{b: a for a, b in _PAIRS.items()}}
_SIDE = re.compile(
    r"(?<![A-Za-z])(" + "|".join(sorted(_SWAP, key=len, reverse=True)) + r")(?![A-Za-z])",
    re.IGNORECASE,
)


def swap_sides(text: str) -> str:
    """`text` with left and right (and leftmost, clockwise, east ...) exchanged as whole words, their case kept.

    "bright" and "copyright" stay; so does "right" in the sense of "correct" not: keep such texts out of mirrored views.
    """

    def swapped(found: re.Match[str]) -> str:
        word = _SWAP[found[1].lower()]
        return (
            word.upper()
            if found[1].isupper()
            else word.capitalize()
            if found[1][0].isupper()
            else word
        )

    return _SIDE.sub(swapped, text)


def is_consistent(
    answer: str | None,
    mirrored: str | None,
    truth: str | None = None,
    mirrored_truth: str | None = None,
) -> bool:
    """Whether `mirrored`, the answer to the mirrored view, is what `answer` becomes in the mirror.

    Without truths, or where the truths are each other with left and right exchanged: mirrored == swap_sides(answer). Else
    the words do not tell: both answers must be right, or both wrong. Texts are compared as given; normalise them before.
    """
    if answer is None or mirrored is None:
        return False
    if truth is None or mirrored_truth is None or swap_sides(truth) == mirrored_truth:
        return mirrored == swap_sides(answer)
    return (answer == truth) == (mirrored == mirrored_truth)


def view_consistency(
    answers: Sequence[str | None],
    mirrored_answers: Sequence[str | None],
    truths: Sequence[str] | None = None,
    mirrored_truths: Sequence[str] | None = None,
) -> float:
    """Share of pairs that are consistent, in [0, 1]; 0 for no pairs. Raises ValueError for sequences of unequal length."""
    unknown: list[str | None] = [None] * len(answers)
    pairs = zip(
        answers, mirrored_answers, truths or unknown, mirrored_truths or unknown, strict=True
    )
    found = [is_consistent(*pair) for pair in pairs]
    return sum(found) / len(found) if found else 0.0
