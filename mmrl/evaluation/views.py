"""How much does this policy use the video? The same questions with shuffled frames, mirrored or masked media, or without them.

    mmrl eval CHECKPOINT --task choice --data clips.jsonl "eval.views=[shuffle, question_only]"

A view is asked of exactly the samples whose input it changes (mmrl.rollout.views.changed_prompt; the seed is the sample's). Its
mean of the headline metric stands beside the plain mean over the same samples, with the paired gap plain - changed: near 0 when the
policy answers without what the view takes away. Answers are greedy, or sampled with the noise of the plain ones where greedy is
off. They are judged by the sizes and times of the plain prompt.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.evaluation.stats import describe, paired_gain
from mmrl.evaluation.tables import value_of

__all__ = ["MODE", "view_gaps"]

MODE = "view/"
"""Begins the mode of every answer in a view: view/shuffle ..."""


def _headlines(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Sample -> headline values of its answers."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        found[f"{row['source']}/{row['id']}"].append(value_of(row["score"], row["headline"]))
    return found


def view_gaps(
    plain: Sequence[Mapping[str, Any]],
    changed: Sequence[Mapping[str, Any]],
    views: Sequence[str],
    seed: int,
) -> dict[str, dict[str, Any]]:
    """Per view: n (samples it changes), mode (of the plain answers compared with), and estimates changed, plain and gap.

    Only n is there when it is 0. Intervals at 95 %: `describe` of each mean, a bootstrap over samples of the paired gap.
    """
    mode = "greedy" if any(row["mode"] == "greedy" for row in plain) else "sampled"
    before = _headlines([row for row in plain if row["mode"] == mode])
    out: dict[str, dict[str, Any]] = {}
    for view in views:
        after = _headlines([row for row in changed if row["mode"] == f"{MODE}{view}"])
        out[view] = {"n": len(after)}
        if not after:
            continue
        gap = paired_gain(after, {unit: before[unit] for unit in after}, seed=seed)
        assert gap is not None, "every sample answered in a view was also answered plainly"
        out[view] |= {"mode": mode, "gap": dataclasses.asdict(gap)}
        for name, table in (("changed", after), ("plain", before)):
            values = [(unit, value) for unit in after for value in table[unit]]
            out[view][name] = dataclasses.asdict(
                describe([v for _, v in values], [u for u, _ in values], seed=seed)
            )
    return out
