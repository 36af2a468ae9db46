"""The recorded comparison with official programs on answers that overshoot: its table, its numbers, and that it would notice."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from mmrl.coords import CoordFrame
from mmrl.registry import task_from_spec
from mmrl.types import RewardContext, Sample
from scripts.official_times import RESULTS, SETS, answer_of, differences, main, markdown

RECORDED: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_table_belongs_to_the_numbers_and_they_agree(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out
    assert set(RECORDED["sets"]) == set(SETS) and not differences(RECORDED)
    for name, row in RECORDED["sets"].items():
        assert [program["numbers"] for program in row["programs"]] and row["numbers"][
            "num_outside"
        ] > 100, name
        assert min(row["numbers"]["num_reversed"], row["unreadable"]) > 20, (
            "overshoot, reversal and failures are all there"
        )


def test_a_number_that_differs_is_noticed() -> None:
    for name in SETS:
        changed = copy.deepcopy(RECORDED)
        program = changed["sets"][name]["programs"][0]
        key = next(iter(program["numbers"]))
        program["numbers"][key] += 0.02
        assert [text.split(":")[0] for text in differences(changed)] == [
            name
        ] and "| differ" not in markdown(RECORDED)
        assert "differ |" in markdown(changed)


def test_repairing_answers_would_have_raised_every_headline() -> None:
    """What was measured before: spans sorted and clipped first. The sign is the same in each set."""
    for name, row in RECORDED["sets"].items():
        for key in SETS[name]["headline"]:
            assert row["repaired"][key] > row["numbers"][key], (name, key)


@pytest.mark.parametrize(
    ("task", "form", "truth"),
    [
        ("temporal_grounding", "to", [[5.0, 20.0]]),
        ("temporal_grounding", "windows", [[5.0, 20.0], [30.0, 41.0]]),
        ("grounded_qa", "choice", {"choice": "B", "spans": [[5.0, 20.0]]}),
    ],
)
def test_answers_hold_every_kind_and_are_read(task: str, form: str, truth: Any) -> None:
    params: dict[str, Any] = {
        "answer_format": "bare",
        **({"spelling": "to", "spans": "one"} if form == "to" else {}),
    }
    scorer, rng = task_from_spec(task, params), random.Random(1)
    sample = Sample(
        "1",
        task,
        "s",
        "q",
        truth,
        videos=("a.mp4",),
        params={"duration": 40.0, "options": ["a", "b", "c", "d", "e"]},
    )
    scores = [
        scorer.score(sample, answer_of(rng, sample, form), RewardContext(1, 1, CoordFrame.REL1))
        for _ in range(300)
    ]
    spans = [score.detail["pred_spans"][0] for score in scores if score.parsed]
    assert any(start > end for start, end in spans) and any(start == end for start, end in spans)
    assert any(end == 1e6 for _, end in spans) and any(40 < end < 1e6 for _, end in spans)
    assert 0 < sum(not score.parsed for score in scores) < 50
