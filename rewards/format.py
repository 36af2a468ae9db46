"""Format reward: 1 when the whole completion is the envelope that was asked for, else 0. One compiled pattern each.

Special tokens are escaped, the whole text must match, and no partial credit is paid (a tag alone earns nothing).

    python -c "from mmrl.rewards.format import format_reward; print(format_reward('<answer>[1, 2, 3, 4]</answer>'))"
"""

from __future__ import annotations

import re

from mmrl.errors import ConfigError, did_you_mean
from mmrl.rewards.parsing import ANSWER_FORMATS, MAX_TEXT_CHARS, strip_end_tokens

__all__ = ["check_answer_format", "format_reward", "wrap_answer"]

# anything but our own tags, so none can hide inside a block; each character can match in one way only, hence linear
_BODY = r"[^<]*(?:<(?!/?(?:think|answer)>)[^<]*)*"
_PATTERNS = {
    "answer": re.compile(rf"<answer>{_BODY}</answer>"),
    "think": re.compile(rf"(?:<think>)?{_BODY}</think>\s*<answer>{_BODY}</answer>"),
    "think_lines": re.compile(rf"(?:<think>)?{_BODY}</think>\s*<answer>{_BODY}</answer>"),
    "bare": re.compile(_BODY),
}


def check_answer_format(answer_format: str) -> str:
    """`answer_format` when it is known; raises ConfigError otherwise."""
    if answer_format not in ANSWER_FORMATS:
        raise ConfigError(
            f"unknown answer_format {answer_format!r}; expected one of {', '.join(ANSWER_FORMATS)}."
            f"{did_you_mean(answer_format, ANSWER_FORMATS)}"
        )
    return answer_format


def format_reward(text: str, answer_format: str = "answer") -> float:
    """1.0 when `text` is exactly one envelope of `answer_format`, but for white space and end-of-turn tokens; else 0.0.

    'answer': <answer>..</answer>. 'think' and 'think_lines': <think>..</think> <answer>..</answer>, where <think> may be
    missing because the chat template wrote it. 'bare': any text without these tags.
    """
    if len(text) > MAX_TEXT_CHARS:
        return 0.0
    return 1.0 if _PATTERNS[answer_format].fullmatch(strip_end_tokens(text)) else 0.0


def wrap_answer(
    answer: str, answer_format: str = "answer", thought: str = "I look for it in the picture."
) -> str:
    """`answer` in the envelope of `answer_format`; its format reward is 1."""
    if answer_format == "bare":
        return answer
    if answer_format == "think_lines":
        return f"<think>\n{thought}\n</think>\n<answer>\n{answer}\n</answer>"
    block = f"<answer>{answer}</answer>"
    return f"<think>{thought}</think>\n{block}" if answer_format == "think" else block
