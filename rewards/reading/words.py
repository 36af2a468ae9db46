"""Words that every translator knows: hedges, which no level reads, number words, and the one error.

python -c "from mmrl.rewards.reading.words import value_of_words; print(value_of_words('two hundred and five'))"
"""

from __future__ import annotations

import re

__all__ = [
    "DOUBTS",
    "HEDGES",
    "LEADS",
    "NUMBER_WORDS",
    "ONES",
    "SCALES",
    "TENS",
    "Unread",
    "value_of_words",
]


class Unread(ValueError):
    """A text that no translator may read, by its `reason` in one snake_case word: it holds two answers, or takes its own back."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


ONES = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = {"hundred": 100, "thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000}
NUMBER_WORDS = {
    **{word: value for value, word in enumerate(ONES)},
    **{word: 10 * (i + 2) for i, word in enumerate(TENS)},
}

# `isn't` is found by its end, and a word is compared only where its first letter is one of theirs: these two searches are most of
# what a sentence costs
HEDGES = re.compile(  # next to these a number is not the answer, wherever they stand
    r"[~≈≃≅<>≤≥≦≧≲≳≠±+√¬]|(?<=\w)n['’]t\b|\b(?=[abcdefgilmnoprtuw])(?:not|cannot|isnt|arent|dont|doesnt|no|nor|neither|never|without|least|most|more|less"
    r"|fewer|than|plus|minimum|maximum|min|max|approximately|approx|roughly|circa|ca|almost|nearly|exceed(?:s|ing)?|estimated?"
    r"|maybe|perhaps|possibly|probably|likely|might|may|could|ish|or|either|others?|another|except|excluding|but|instead"
    r"|wrong|incorrect|false|unsure|unknown|guess(?:ing)?|if|unless)\b",
    re.IGNORECASE,
)
LEADS = re.compile(  # and behind these: '4 birds over the lake' is a count, 'over 4 birds' is none
    r"\b(?:about|around|over|under|above|below|beyond|to|near|between|within|past|many as|few as|some|up)\s+"
    r"(?:(?:the|a|an|only|just)\s+)?[^\w\s]*$",
    re.IGNORECASE,
)
DOUBTS = re.compile(  # with these a letter, a yes or a box is no answer, or is taken back
    r"(?<=\w)n['’]t\b|\b(?=[abcegimnopuw])(?:not|cannot|nor|neither|never|maybe|perhaps|possibly|probably|might|could|or|either|instead|except|unless"
    r"|wrong|incorrect|unsure|unknown|unclear|guess(?:ing)?|alternatively|otherwise|both|wait|actually)\b",
    re.IGNORECASE,
)


def value_of_words(text: str) -> int | None:
    """The number that English number words spell ('twenty-one', 'two hundred and five'); None for anything else."""
    words = text.lower().replace("-", " ").split()
    total = group = 0
    last = None  # the value of the word before, as far as it limits the next one
    for place, word in enumerate(words):
        if word == "and":
            if not place or words[place - 1] not in SCALES or place == len(words) - 1:
                return None
        elif word in SCALES:
            if last is None or group == 0:
                return None
            if word == "hundred":
                if group >= 100:
                    return None
                group *= 100
            else:
                if total and total % (1_000 * SCALES[word]):
                    return None
                total, group = total + group * SCALES[word], 0
            last = SCALES[word]
        elif word in NUMBER_WORDS:
            value = NUMBER_WORDS[word]
            fits = (
                last is None
                or last in SCALES.values()
                or (last >= 20 and last < 100 and last % 10 == 0 and 0 < value < 10)
            )
            if not fits or (value == 0 and len(words) > 1):
                return None
            group, last = group + value, value
        else:
            return None
    return total + group if words and last is not None else None
