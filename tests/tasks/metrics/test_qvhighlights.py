"""QVHighlights: equal to a plain second writing of its rules, hand-made cases, submissions, nothing dropped."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import DataError
from mmrl.tasks.metrics.qvhighlights import LEVELS, evaluate, highlight_ap, moment_ap
from mmrl.tasks.temporal_grounding import TemporalGrounding
from mmrl.types import RewardContext, Sample

Window = tuple[float, float]


def _iou(a: Any, b: Any) -> float:
    common = max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
    union = a[1] - a[0] + b[1] - b[0] - common
    return common / union if union else 0.0


def plain_ap(windows: list[tuple[float, float, float]], true: list[Window], level: float) -> float:
    """AP by the definition: for each recall reached, the best precision from there on."""
    free, hits = list(true), []
    for window in sorted(windows[:10], key=lambda w: -w[2]):
        best = max(
            (t for t in free if _iou(window, t) >= level),
            key=lambda t: _iou(window, t),
            default=None,
        )
        hits.append(best is not None)
        if best is not None:
            free.remove(best)
    points = [(sum(hits[:k]) / len(true), sum(hits[:k]) / k) for k in range(1, len(hits) + 1)]
    total, last = 0.0, 0.0
    for recall, _ in points:
        total += (recall - last) * max((p for r, p in points if r >= recall), default=0.0)
        last = max(last, recall)
    return total


tick = st.integers(0, 75).map(lambda k: 2.0 * k)
window = st.tuples(tick, tick).filter(lambda p: p[0] < p[1])
scored = st.tuples(tick, tick, st.integers(0, 20).map(lambda k: k / 20)).filter(
    lambda p: p[0] < p[1]
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(scored, max_size=12, unique_by=lambda w: w[2]),
    st.lists(window, min_size=1, max_size=4, unique=True),
)
def test_moment_ap_is_the_plain_definition(windows: list[Any], true: list[Window]) -> None:
    # of two equally good truths either may be taken, and rounding decides
    for start, end, _ in windows:
        ious = [
            max(0.0, min(end, b) - max(start, a)) / (max(end, b) - min(start, a)) for a, b in true
        ]
        assume(all(abs(p - q) > 1e-9 or p == q == 0 for i, p in enumerate(ious) for q in ious[:i]))
    expected = [plain_ap(windows, true, level) for level in LEVELS]
    assert moment_ap(windows, true).tolist() == pytest.approx(expected)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), min_size=1, max_size=12))
def test_highlight_ap_is_the_plain_definition(clips: list[tuple[bool, int]]) -> None:
    true, scores = [float(t) for t, _ in clips], [s for _, s in clips]
    if len(set(true)) == 1:
        assert highlight_ap(true, scores) == true[0]
        return
    points = []
    for level in sorted(set(scores), reverse=True):
        chosen = [t for t, s in zip(true, scores, strict=True) if s >= level]
        points.append((sum(chosen), sum(chosen) / len(chosen)))
    reached = sorted({found for found, _ in points if found > 0})
    assert highlight_ap(true, scores) == pytest.approx(
        np.mean([max(p for f, p in points if f >= r) for r in reached])
    )


def test_highlight_scores_are_cut_and_filled() -> None:
    assert highlight_ap([1, 0, 0], [0.9, 0.1, 0.0, 99]) == 1
    assert highlight_ap([0, 0, 1], [0.5]) == pytest.approx(1 / 3), "a missing score is 0"
    assert highlight_ap([], []) == 0


def _truth(qid: int, *windows: Window, **more: Any) -> dict[str, Any]:
    return {"qid": qid, "duration": 150, "relevant_windows": [list(w) for w in windows], **more}


def test_by_hand() -> None:
    truths = [_truth(1, (0, 20)), _truth(2, (10, 14), (40, 100)), _truth(3, (0, 10))]
    found = [
        {"qid": 1, "pred_relevant_windows": [[0, 20, 1.0]]},
        {"qid": 2, "pred_relevant_windows": [[40, 100, 0.9], [10, 17, 0.5]]},
    ]
    numbers = evaluate(found, truths)
    assert numbers["MR-full-R1@0.5"] == 66.67 == numbers["MR-full-R1@0.7"]
    assert numbers["MR-full-mAP@0.5"] == 66.67 and numbers["MR-full-mAP@0.75"] == 50.0
    assert numbers["MR-middle-mAP"] == 100 and numbers["MR-long-mAP"] == 100
    # short: query 2 counts with (10, 14) only, IoU 4/7 up to t = 0.55, its first window a false positive; query 3 is missing
    assert numbers["MR-short-mAP"] == pytest.approx(100 * (2 * 0.5 / 10) / 2)
    assert not any(name.startswith("HL") for name in numbers)
    exact = evaluate(found, truths, decimals=None)
    assert exact["MR-full-R1@0.5"] == pytest.approx(200 / 3) and set(exact) == set(numbers)
    assert "MR-short-mAP" not in evaluate(found[:1], truths[:1])


def test_highlights() -> None:
    clips = {"relevant_clip_ids": [1, 2], "saliency_scores": [[4, 1, 0], [2, 2, 2]]}
    truths = [
        _truth(1, (2, 6), **clips) | {"duration": 8},
        _truth(2, (2, 6), **clips) | {"duration": 8},
    ]
    found = [
        {
            "qid": 1,
            "pred_relevant_windows": [[2, 6, 1]],
            "pred_saliency_scores": [0.1, 0.9, 0.5, 0.2],
        },
        {
            "qid": 2,
            "pred_relevant_windows": [[2, 6, 1]],
            "pred_saliency_scores": [0.9, 0.1, 0.5, 0.2, 5.0],
        },
    ]
    numbers = evaluate(found, truths, decimals=None)
    assert numbers["HL-min-VeryGood-Hit1"] == 50 and numbers["HL-min-Fair-Hit1"] == 50
    # VeryGood: only worker 0 has a relevant clip, first in query 1, last in query 2
    assert numbers["HL-min-VeryGood-mAP"] == pytest.approx(100 * (1 + 1 / 4) / 6)
    assert not any(
        name.startswith("HL")
        for name in evaluate([found[0], {"qid": 2, "pred_relevant_windows": []}], truths)
    )


def test_windows_are_taken_as_they_are_and_the_official_zero_over_zero_is_a_switch() -> None:
    """A window that ends before it starts and is as long as a true one: 0 / 0 there, which is not below any level."""
    truths = [_truth(1, (0, 20)), _truth(2, (0, 20))]
    said = [
        {"qid": 1, "pred_relevant_windows": [[60, 40, 1]]},
        {"qid": 2, "pred_relevant_windows": [[0, 200, 1], [15, 5, 0.5]]},
    ]
    ours, official = evaluate(said, truths), evaluate(said, truths, nan_hits=True)
    assert ours["MR-full-mAP"] == 0 == ours["MR-full-R1@0.5"] == official["MR-full-R1@0.5"]
    assert official["MR-full-mAP"] == 50


def test_queries_without_windows_are_zeros_and_unknown_ones_errors() -> None:
    truths = [_truth(1, (0, 20)), _truth(2, (0, 20))]
    row = {"qid": 1, "pred_relevant_windows": [[0, 20, 1]]}
    for missing in (
        [],
        [{"qid": 2, "pred_relevant_windows": []}],
        [{"qid": 2, "pred_relevant_windows": [[0, 0, 1]]}],
    ):
        numbers = evaluate([row, *missing], truths)
        assert numbers["MR-full-mAP"] == 50 == numbers["MR-full-R1@0.5"]
    for wrong in ([row, row], [{"qid": 9, "pred_relevant_windows": []}]):
        with pytest.raises(DataError, match="one row per qid"):
            evaluate(wrong, truths)
    assert evaluate([], []) == {}


def test_submissions_hold_one_line_per_query_and_score_the_same(tmp_path: Path) -> None:
    rng, task, pairs = random.Random(0), TemporalGrounding(), []
    for qid in range(12):
        start = 2.0 * rng.randrange(40)
        sample = Sample(
            str(qid),
            "temporal_grounding",
            "qvh",
            f"query {qid}",
            [[start, start + 20], [110.0, 116.0]],
            videos=(f"x/vid{qid}_0.0_150.0.mp4",),
            params={"duration": 150.0, "qid": qid},
        )
        said = json.dumps(
            [[start + rng.choice((0, 4, 9)), start + 20], [110, 118]][: rng.choice((1, 2))]
        )
        text = "nothing" if qid == 5 else f"<answer>{said}</answer>"
        pairs.append((sample, task.score(sample, text, RewardContext(1, 1, CoordFrame.REL1))))
    numbers = task.benchmark(pairs, tmp_path)
    rows = [
        json.loads(line) for line in (tmp_path / "hl_submission.jsonl").read_text().splitlines()
    ]
    assert [row["qid"] for row in rows] == list(range(12)) and rows[3]["vid"] == "vid3_0.0_150.0"
    assert rows[5]["pred_relevant_windows"] == [[0, 0, 1]], (
        "a failure is a window without length: the official program needs one"
    )
    assert all([w[2] for w in row["pred_relevant_windows"]] in ([1.0], [1.0, 0.5]) for row in rows)
    truths = [
        {"qid": s.params["qid"], "duration": 150, "relevant_windows": s.answer} for s, _ in pairs
    ]
    plain = evaluate(rows, truths)
    assert numbers == {
        **plain,
        **{f"official/{name}": value for name, value in plain.items()},
        "num_reversed": 0,
        "num_outside": 0,
        "num_truths_outside": 0,
    }
    assert numbers["MR-full-R1@0.5"] == round(
        100 * sum(score.metrics["r1@0.5"] for _, score in pairs) / 12, 2
    )
