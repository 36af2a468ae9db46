"""Open answers out of replies and the verdict on them, as the programs of MMMU, Video-MMMU, MathVista and of OCR have it.

    python -c "from mmrl.rewards.official import Asked; from mmrl.rewards.official.texts import mmmu_open
    print(mmmu_open('So the mass is 12 kg', Asked('open_text', '12')))"

These programs keep several texts and numbers of one reply and call it right when any of them is: a list of guesses wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mmrl.rewards.official.asked import Asked, Found
from mmrl.rewards.official.numbers import quick

__all__ = ["mathvista", "mmmu_open", "videommmu_open", "whole"]

_MMMU_SIGNS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_VIDEOMMMU_SIGNS = (
    *_MMMU_SIGNS,
    "are ",
    "in total ",
    "total ",
    "identify ",
    "recognize ",
    "calculated as ",
    "counted as ",
    "measured as ",
    "observed as ",
    "concluded as ",
    "found to be ",
    "equals ",
    "determined to be ",
    "number of ",
    "value is ",
    "adds up to ",
    "have ",
    "has ",
)
_TRIVIAL = frozenset(":,.!?;'")
# more is no answer, and would cost more than linear time
_MOST_CHARS, _MOST_DIGITS = 20_000, re.compile(r"\d{300}")
_WITH_COMMAS = re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b")
_SCIENTIFIC = re.compile(r"-?\d+(?:\.\d+)?[eE][+-]?\d+")
_SIMPLE = re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])")


def _keys(reply: str, signs: Sequence[str]) -> list[str]:
    """Of each line the shortest text behind the last of a sign ("so ", "is " ...; in the last line also "="), of a reply without
    any the whole reply; in lower case, and without full stops at the reply's ends."""
    reply = reply.strip().strip(".").lower()
    lines = reply.split("\n")
    found = []
    for number, line in enumerate(lines):
        known = (*signs, "=") if number == len(lines) - 1 else signs
        tails = [line.rpartition(sign)[2].strip() for sign in known if sign in line]
        best = ""
        for tail in tails:  # an empty tail gives way to any other, as there
            best = tail if not best or len(tail) < len(best) else best
        if best and best not in _TRIVIAL:
            found.append(best)
    return found or [reply]


def _numbers(text: str) -> Iterator[str]:
    for pattern in (_WITH_COMMAS, _SCIENTIFIC, _SIMPLE):
        yield from pattern.findall(text)


def _normal(text: str) -> list[str | float]:
    """A number to two decimals, else the text in lower case; one letter only with a space beside it."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        low = text.lower()
        return [f" {low}", f"{low} "] if len(low) == 1 else [low]


def _same(said: Sequence[str | float], true: Sequence[str | float]) -> bool:
    """Any number is equal, or any true text is inside any said text."""
    words = [text for text in true if isinstance(text, str)]
    return any(
        any(word in one for word in words) if isinstance(one, str) else one in true for one in said
    )


def _open(reply: str, asked: Asked, signs: Sequence[str]) -> Found:
    if len(reply) > _MOST_CHARS or _MOST_DIGITS.search(reply):
        return Found(reply, False)
    keys = _keys(reply, signs)
    said = [
        value
        for text in (*keys, *(number for key in keys for number in _numbers(key)))
        for value in _normal(text)
    ]
    truths = asked.truth if isinstance(asked.truth, list) else [asked.truth]
    return Found(
        keys[-1], _same(said, [value for truth in truths for value in _normal(str(truth))])
    )


def mmmu_open(reply: str, asked: Asked) -> Found:
    """MMMU-Benchmark/MMMU, mmmu/utils/eval_utils.py, parse_open_response and eval_open: the texts behind signs such as "so " or
    "is ", and every number in them; right when the truth is inside one of the texts, or equal to one of the numbers."""
    return _open(reply, asked, _MMMU_SIGNS)


def videommmu_open(reply: str, asked: Asked) -> Found:
    """EvolvingLMMs-Lab/VideoMMMU, lmms_eval/tasks/videommmu/utils.py, parse_open_response and eval_open: MMMU's with more signs."""
    return Found("", False) if reply in ("", "API Error") else _open(reply, asked, _VIDEOMMMU_SIGNS)


def mathvista(reply: str, asked: Asked) -> Found:
    """lupantech/MathVista, evaluation/extract_answer.py (quick_extract) and calculate_score.py: lists and other texts are equal as
    they stand."""
    said = quick(reply, asked.params)
    truths = asked.truth if isinstance(asked.truth, list) else [asked.truth]
    return Found(said, said in [str(truth) for truth in truths])


def whole(reply: str, asked: Asked) -> Found:
    """Yuliang-Liu/MultimodalOCR, OCRBench/example.py, and ucaslcl/Fox, eval_tools/eval_ocr_test.py: the whole reply, also one that
    the length limit cut."""
    return Found(reply)
