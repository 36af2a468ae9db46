"""Process reward: do the steps of the reasoning follow the reference steps, in their order? Dynamic time warping.

The steps of the thoughts (lines, or sentences of a text without lines) are aligned with `params.reference_steps` of the
sample. The cheapest alignment in order, over the distance 1 - token F1 (or the normalised edit distance) of two steps,
costs D; each step of either side is used at least once. The reward is

    max(0, 1 - D / number of reference steps)

so the reference itself earns 1, a repeated step costs nothing and gains nothing, and a foreign step costs up to 1.

    python -c "from mmrl.rewards.process import dtw_similarity as d; print(d(['look left', 'count 3'], ['look left', 'count 3']))"
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.rewards.text import check_names, check_number, normalise, words
from mmrl.types import RewardContext, Sample

__all__ = ["DISTANCES", "dtw_similarity", "process", "reasoning_steps", "split_steps"]

MAX_STEPS = 32
"""Steps compared on either side; each further step of a prediction counts as foreign."""
_STEP_CHARS = 200  # of a step are compared
# of the thoughts are read; what follows counts as one foreign step per _STEP_CHARS
_TEXT_CHARS = 16_384
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])")
_NUMBERING = re.compile(
    r"(?:step\s{0,3}\d{1,3}\s{0,3}[:.)]?|\d{1,3}[.)]|[-*•])\s{0,8}", re.IGNORECASE
)
_FORM = ("nfkc", "lower", "collapse", "strip")

Table = npt.NDArray[np.float64]  # (predicted steps, reference steps)


def split_steps(text: str) -> list[str]:
    """Lines with content, or the sentences of a text that is one line; numbering ('2.', 'Step 2:', '-') taken off."""
    lines = [line for line in text.splitlines() if line.strip()]
    raw = lines if len(lines) > 1 else _SENTENCE_END.split(text)
    steps = (
        _NUMBERING.sub("", part.strip(), count=1)
        if _NUMBERING.match(part.strip())
        else part.strip()
        for part in raw
    )
    return [step for step in steps if step]


def reasoning_steps(text: str) -> tuple[list[str], int]:
    """(steps of a completion's thoughts, number of further steps that are not looked at).

    The thoughts stand in <think>...</think>, or before the answer block of a text without them.
    """
    end = text.find("</think>")
    end = end if end >= 0 else text.find("<answer>")
    thoughts = (text[:end] if end >= 0 else "").replace("<think>", "")
    unread = -(-max(0, len(thoughts) - _TEXT_CHARS) // _STEP_CHARS)
    steps = split_steps(thoughts[:_TEXT_CHARS])
    return steps[:MAX_STEPS], len(steps[MAX_STEPS:]) + unread


def _one_minus_f1(predicted: Sequence[str], reference: Sequence[str]) -> Table:
    bags = [[Counter(words(step)) for step in steps] for steps in (predicted, reference)]
    columns = {word: i for i, word in enumerate(dict.fromkeys(w for bag in bags[1] for w in bag))}
    counts = [np.zeros((len(side), len(columns)), dtype=np.int32) for side in bags]
    for table, side in zip(counts, bags, strict=True):
        for row, bag in enumerate(side):
            for word, number in bag.items():
                if word in columns:
                    table[row, columns[word]] = number
    hits = np.stack([np.minimum(row, counts[1]).sum(axis=1) for row in counts[0]])
    sizes = np.add.outer(*([sum(bag.values()) for bag in side] for side in bags))
    equal = np.array([[a == b for b in reference] for a in predicted])
    return np.where(sizes > 0, 1.0 - 2.0 * hits / np.maximum(sizes, 1), 1.0 - equal)


def _edit_distances(predicted: Sequence[str], reference: Sequence[str]) -> Table:
    from rapidfuzz.distance import Levenshtein
    from rapidfuzz.process import cdist

    return np.asarray(
        cdist(predicted, reference, scorer=Levenshtein.normalized_distance, dtype=np.float64)
    )


DISTANCES: dict[str, Callable[[Sequence[str], Sequence[str]], Table]] = {
    "token_f1": _one_minus_f1,
    "ned": _edit_distances,
}
"""Distance of two steps in [0, 1]: 1 - F1 of their words, or the normalised edit distance of their characters."""


def _cheapest_path(costs: Table) -> float:
    """Least sum of costs from the first to the last pair, moving one step on either side or on both."""
    previous: list[float] = []
    for row in costs.tolist():
        current: list[float] = []
        for j, cost in enumerate(row):
            before = [current[j - 1]] if j else []
            if previous:
                before += previous[max(0, j - 1) : j + 1]
            current.append(cost + min(before, default=0.0))
        previous = current
    return previous[-1]


def dtw_similarity(
    predicted: Sequence[str], reference: Sequence[str], distance: str = "token_f1", unread: int = 0
) -> float:
    """max(0, 1 - D / len(reference)) in [0, 1], D the cost of the cheapest alignment plus `unread` foreign steps.

    0 without predicted steps. Raises DataError unless there are 1 to 32 reference steps.
    """
    if not 1 <= len(reference) <= MAX_STEPS:
        raise DataError(
            f"expected 1 to {MAX_STEPS} reference steps, found {len(reference)}; merge or add some"
        )
    if not predicted:
        return 0.0
    cut = [
        [normalise(step[:_STEP_CHARS], _FORM)[:_STEP_CHARS] for step in side]
        for side in (predicted, reference)
    ]
    extra = unread + len(predicted[MAX_STEPS:])
    total = _cheapest_path(DISTANCES[distance](cut[0][:MAX_STEPS], cut[1])) + extra
    return min(1.0, max(0.0, 1.0 - total / len(reference)))


def process(**params: Any) -> Callable[[Any, Sample, RewardContext], float]:
    """The part 'process': DTW similarity of the thoughts with the sample's params.reference_steps (texts), in [0, 1].

    distance    'token_f1' (default) or 'ned'
    min_steps   fewer steps than this earn 0 (default 1); max_steps  more than this earn 0 (default 32)

    A sample without reference steps raises DataError, which the rubric records as a reward_error: give the part a weight
    only for sources that have them (per_source). A text without thoughts earns 0.
    """
    check_names("part 'process'", _process, params)
    return _process(**params)


def _process(
    distance: str = "token_f1",
    min_steps: int = 1,
    max_steps: int = MAX_STEPS,
) -> Callable[[Any, Sample, RewardContext], float]:
    if distance not in DISTANCES:
        raise ConfigError(
            f"unknown step distance {distance!r}; expected one of {', '.join(DISTANCES)}."
            f"{did_you_mean(str(distance), DISTANCES)}"
        )
    least, most = (
        int(check_number(name, value, 1, MAX_STEPS))
        for name, value in (("min_steps", min_steps), ("max_steps", max_steps))
    )
    if least > most:
        raise ConfigError(f"expected min_steps <= max_steps, found {least} and {most}")

    def part(prediction: Any, sample: Sample, ctx: RewardContext) -> float:
        reference = sample.params.get("reference_steps")
        if (
            not isinstance(reference, (list, tuple))
            or not reference
            or not all(isinstance(step, str) and step.strip() for step in reference)
        ):
            raise DataError(
                f"expected params.reference_steps of sample {sample.id!r} as a list of texts, found "
                f"{reference!r:.80}; add them, or give the part 'process' no weight for this source"
            )
        steps, unread = reasoning_steps(prediction.text)
        if not least <= len(steps) + unread <= most:
            return 0.0
        return dtw_similarity(steps, reference, distance, unread)

    return part
