"""Numbers out of replies, as the programs of VSI-Bench, MathVista and PixMo-Count take them.

python -c "from mmrl.rewards.official import Asked, extract; print(extract('vsibench', '3.5 m', Asked('numeric', 3)))"
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from mmrl.rewards.official.asked import NOTHING, Asked, Found
from mmrl.rewards.reading.words import ONES

__all__ = ["mathvista", "number", "pixmo_count", "plain", "quick", "vsibench"]

_QUOTE = 'The answer is "'
_WORDS = (*ONES, "twenty")
_TOTAL = re.compile(r"a total of ([0-9]{1,300})(?![0-9])")


def number(text: str) -> float | None:
    """Python's float of a text, which these programs call: also "1e3", "1_000", " 7 "; None for no number, nan and inf too."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def plain(value: float) -> str:
    """Digits without an exponent."""
    return format(Decimal(repr(value)), "f")


def vsibench(reply: str, asked: Asked) -> Found:
    """vision-x-nyu/thinking-in-space, lmms_eval/tasks/vsibench/utils.py, fuzzy_matching and to_float: the text before the first
    space, without full stops at its end, is a number. The mean relative accuracy of it is the task's."""
    value = number(reply.split(" ")[0].rstrip(".").strip())
    return NOTHING if value is None else Found(plain(value))


def quick(reply: str, params: Mapping[str, Any]) -> str:
    """MathVista's quick extraction by the row's answer_type: a whole number, a number, what stands in `The answer is "..."`; else
    the reply."""
    read = {"integer": int, "float": float}.get(str(params.get("answer_type")))
    if read is not None:
        with contextlib.suppress(ValueError, OverflowError):
            return str(read(reply))
    for line in reply.split("\n"):
        begin = line.find(_QUOTE) + len(_QUOTE)
        end = line.rfind('".', begin) if _QUOTE in line else -1
        if end >= 0:
            return line[begin:end]
    return reply


def mathvista(reply: str, asked: Asked) -> Found:
    """lupantech/MathVista, evaluation/extract_answer.py (quick_extract) and calculate_score.py: a whole number (cut, 5.7 is 5),
    or one rounded to the row's precision, equal to the truth as text. Where the program asks a language model, the reply stands
    for what that would extract."""
    value, decimals = number(quick(reply, asked.params)), asked.params.get("precision")
    if asked.params.get("answer_type") == "float":
        if value is None or decimals is None:
            return NOTHING
        said = str(round(value, int(decimals)))
    else:
        if value is None:
            return NOTHING
        said = str(int(value))
    return Found(plain(float(said)), said == str(asked.truth))


def pixmo_count(reply: str, asked: Asked) -> Found:
    """allenai/molmo, olmo/eval/evaluators.py, PointCountEval: the last word, without full stops, is a whole number or one of the
    words zero to twenty; else the last "a total of 7" of the first line. Its rule for "none" has a wrong escape: it never fits."""
    text = reply.strip().lower().rstrip(".").strip()
    last = text.split()[-1] if text else ""
    count = None
    with contextlib.suppress(ValueError):
        count = int(last)
    if count is None and last in _WORDS:
        count = _WORDS.index(last)
    totals = _TOTAL.findall(text.split("\n", 1)[0]) if count is None else []
    if totals:
        count = int(totals[-1])
    return Found(str(count)) if count is not None and 0 <= count < 10**12 else NOTHING
