"""Which answer level (`answers: strict | native | official`) reads which spelling of a right answer. Part of
mmrl.diagnostics.conformance.

    levels = spellings_read(bench)   # {"in a sentence": {"native": 8}, "as asked": {"strict": 8}, ...}

Tasks that read answers at levels have a method `readable_at`; of others nothing is reported.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from mmrl.diagnostics._conformance_checks import Bench

__all__ = ["SPELLINGS", "level_lines", "spellings_read"]

SPELLINGS: Mapping[str, str] = {
    "as asked": "",
    "in a code fence": "```\n{}\n```",
    "in \\boxed{}": "\\boxed{{{}}}",
    "in bold": "**{}**",
    "behind 'Answer:'": "Answer: {}",
    "in a sentence": "The answer is {}.",
    "in a doubt": "I am not sure, maybe {}.",
    "without <answer>": "{}",
}
"""What is asked -> how the right answer stands there; "" is the task's own form."""

_SAMPLES = 8  # of each task
_OPEN, _CLOSE = "<answer>", "</answer>"


def _spelled(gold: str) -> Iterator[tuple[str, str]]:
    """Each spelling of a right answer, inside the envelope that `gold` has."""
    head, found, rest = gold.partition(_OPEN)
    inside, _, tail = rest.partition(_CLOSE) if found else (gold, "", "")
    for name, form in SPELLINGS.items():
        if not form:
            yield name, gold
        elif name == "without <answer>":
            yield from [(name, inside.strip())] if found else []
        else:
            said = form.format(inside.strip())
            yield name, f"{head}{_OPEN}{said}{_CLOSE}{tail}" if found else said


def spellings_read(bench: Bench) -> dict[str, dict[str, int]]:
    """How many right answers of a spelling each level reads first; 'none' where none does."""
    seen: Counter[str] = Counter()
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for sample, sizes in bench.usable:
        reads = None
        # a task's own code: what it breaks is a finding of the checks
        with contextlib.suppress(Exception):
            reads = getattr(bench.task.member(sample.task), "readable_at", None)
        if reads is None or seen[sample.task] >= _SAMPLES:
            continue
        seen[sample.task] += 1
        with contextlib.suppress(Exception):
            ctx = bench.context(sizes)
            for name, text in _spelled(bench.task.gold(sample, ctx)):
                found[name][reads(sample, text, ctx) or "none"] += 1
    return {name: dict(found[name]) for name in SPELLINGS if found[name]}


def level_lines(read: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """'strict    as asked, in a code fence' and so on, from strict to none; a spelling that several levels read says how many."""
    for level in ("strict", "native", "official", "none"):
        names = [
            f"{name} ({counts[level]} of {sum(counts.values())})" if len(counts) > 1 else name
            for name, counts in read.items()
            if level in counts
        ]
        if names:
            yield f"{level:9} {', '.join(names)}"
