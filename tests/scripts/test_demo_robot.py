"""What scripts/demo_robot.py says of two evaluations of a suite."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scripts.demo_robot import gained


def evaluation(folder: Path, successes: dict[tuple[str, int], list[float]]) -> Path:
    """The files of an evaluation: (task, state) -> success of its sampled episodes."""
    folder.mkdir()
    (folder / "results.json").write_text('{"protocol": {}}', encoding="utf-8")
    rows = [
        {
            "id": f"eval-{state}",
            "source": f"libero/{task}",
            "task": task,
            "mode": "sampled",
            "score": {"value": value, "parsed": True, "metrics": {"success_once": value}},
            "headline": "success_once",
        }
        for (task, state), values in successes.items()
        for value in values
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "predictions.jsonl").write_text(lines, encoding="utf-8")
    return folder


def test_gains_are_paired_by_state(tmp_path: Path) -> None:
    """States differ by much and gain the same: the gain is beyond chance, though the intervals of the means overlap."""
    hard, easy = [("a", n) for n in range(8)], [("b", n) for n in range(8)]
    nothing, some, most, everything = (
        [0.0] * 4,
        [1.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0, 0.0],
        [1.0] * 4,
    )
    before = {**{key: nothing for key in hard}, **{key: most for key in easy}}
    after = {**{key: some for key in hard}, **{key: everything for key in easy}}
    found = gained(evaluation(tmp_path / "0", before), evaluation(tmp_path / "1", after))
    gain = found["held_out"]["sampled"]
    assert (gain["mean"], gain["n"]) == (0.25, 16)
    assert 0 < gain["low"] < 0.25 < gain["high"] < 0.4, (
        "of all states alike, and not certain for that"
    )
    assert list(found["tasks"]) == ["a", "b"]
    rng = np.random.default_rng(0)
    lucky = {key: list(rng.integers(0, 2, 4).astype(float)) for key in before}
    found = gained(tmp_path / "0", evaluation(tmp_path / "2", lucky))
    by_hand = [np.mean(lucky[key]) - np.mean(before[key]) for key in easy]
    gain = found["tasks"]["b"]["sampled"]
    assert gain["mean"] == pytest.approx(np.mean(by_hand)) and gain["low"] < gain["mean"]
