"""How freely an answer's spelling is read: three levels, and translators from the dialects of released models.

    strict    the spellings that prompts ask for, and the wrappers of mmrl.rewards.reading.wrappers, the same around every kind of
              answer: fences, \\boxed{}, quotes, emphasis, "Answer:" in front, closing punctuation
    native    strict, and the dialects of released models: tool calls, special tokens, sentences with exactly one value
    official  the benchmark's own extractor (mmrl.rewards.official), which the task's parameter `extractor` or the suite names

A translator turns text into the canonical spelling, and the strict parser judges that: no level makes another value valid.
Where a text holds two values (letters, numbers, calls, boxes where one is asked for) every level but `official` refuses it, so
that hedging never pays. Every function is linear in the length of its text, runs nothing and never raises on any text.

    python -c "from mmrl.rewards.reading import unwrap; print(unwrap('**Answer:** \\\\boxed{7}.'))"
"""

from __future__ import annotations

from mmrl.errors import ConfigError, did_you_mean
from mmrl.rewards.reading.words import Unread
from mmrl.rewards.reading.wrappers import unwrap, unwrap_text

__all__ = ["LEVELS", "Unread", "check_level", "unwrap", "unwrap_text"]

LEVELS = ("strict", "native", "official")
"""How freely answers are read; see the module."""


def check_level(level: object) -> str:
    """`level` when it is one of LEVELS; raises ConfigError otherwise."""
    if level not in LEVELS:
        raise ConfigError(
            f"unknown answers {level!r}; expected one of {', '.join(LEVELS)}.{did_you_mean(str(level), LEVELS)}"
        )
    return str(level)
