"""Whether a policy gives one answer whatever it is asked: the sign of a reward that can be guessed.

    same_answer   the largest share of the answers that are alike, each prompt counting the same
    same_truth    the same of the truths of these prompts

Answers are alike when they are the same text but for their numbers, and these differ by at most 2 % of the largest of them: a box
moved by a pixel is the same answer. One answer for nearly all prompts, where their truths differ, is a collapse
(mmrl.diagnostics.diagnosis)."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["FEWEST_PROMPTS", "AnswerKey", "answer_key", "common_share", "sameness"]

FEWEST_PROMPTS = 4
"""With fewer prompts of a step nothing is said of them."""
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_MOST_NUMBERS, _MOST_CANDIDATES = 64, 32
_LARGEST = 1e12  # of a number; larger ones are equal to it
_TOLERANCE = 0.02


class AnswerKey(NamedTuple):
    """A short stand-in for an answer: a digest of its text without its numbers, and these (the first 64)."""

    words: str
    numbers: tuple[float, ...]


def answer_key(text: str) -> AnswerKey:
    """What a text answers: its last <answer>, else what stands behind its thoughts; case and white space do not matter."""
    said = text.rpartition("</think>")[2]
    if found := _ANSWER.findall(said):
        said = found[-1]
    said = " ".join(said.casefold().split())
    numbers = tuple(
        min(max(float(number), -_LARGEST), _LARGEST)
        for number in _NUMBER.findall(said)[:_MOST_NUMBERS]
    )
    words = hashlib.blake2s(
        _NUMBER.sub("#", said).encode("utf-8", "surrogatepass"), digest_size=8
    ).hexdigest()
    return AnswerKey(words, numbers)


def common_share(keys: Mapping[Hashable, Sequence[AnswerKey | None]]) -> float | None:
    """The largest share of answers that are alike, each prompt counting the same; None with fewer than 4 prompts.

    keys: prompt -> the keys of its answers, None for one that could not be read, which is like no other.
    """
    if len(keys) < FEWEST_PROMPTS:
        return None
    tables: dict[tuple[str, int], list[tuple[tuple[float, ...], float]]] = defaultdict(list)
    counts: Counter[AnswerKey] = Counter()
    for answers in keys.values():
        for key in answers:
            if key is not None:
                tables[key.words, len(key.numbers)].append((key.numbers, 1 / len(answers)))
                counts[key] += 1
    best = 0.0
    arrays = {
        shape: (
            np.array([n for n, _ in rows], dtype=np.float64).reshape(len(rows), -1),
            np.array([w for _, w in rows]),
        )
        for shape, rows in tables.items()
    }
    for candidate, _ in counts.most_common(_MOST_CANDIDATES):
        numbers_NK, weights_N = arrays[candidate.words, len(candidate.numbers)]
        limit = _TOLERANCE * max(map(abs, candidate.numbers), default=0.0)
        alike_N = (np.abs(numbers_NK - np.asarray(candidate.numbers)) <= limit + 1e-12).all(1)
        best = max(best, float(weights_N[alike_N].sum()))
    return best / len(keys)


def sameness(records: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """same_answer and same_truth of the completions of a step (records of mmrl.training.metrics); {} where nothing can be said.

    same_truth is None where a prompt has no truth.
    """
    answers: dict[Hashable, list[AnswerKey | None]] = defaultdict(list)
    truths: dict[Hashable, list[AnswerKey | None]] = {}
    for record in records:
        prompt = record["source"], record["id"]
        answers[prompt].append(record["answer"] if record["parsed"] else None)
        truths[prompt] = [record["truth"]]
    share = common_share(answers)
    if share is None:
        return {}
    return {
        "same_answer": share,
        "same_truth": None
        if any(truth == [None] for truth in truths.values())
        else common_share(truths),
    }
