"""scripts/record_golden.py sees every difference between two runs, and to rounding only those that are more than rounding."""
from __future__ import annotations

import copy
from typing import Any

import pytest

from scripts.record_golden import differences

ROUNDING = 1e-3
RECORD: dict[str, Any] = {
    "steps": [{"train/loss": 0.125 * n, "train/grad_norm": 0.7, "rewards": [0.0, 0.5, 1.0]} for n in (1, 2, 3)],
    "weights": {"tensors": 2, "digest": "a", "norms": {"model/a": 3.5, "model/b": 0.25}}}


@pytest.mark.parametrize(("change", "beyond_rounding"), [
    ("loss", False), ("reward", True), ("rewards", True), ("norm", True), ("digest", False), ("missing", True), ("steps", True)])
def test_every_difference_is_found(change: str, beyond_rounding: bool) -> None:
    other = copy.deepcopy(RECORD)
    if change == "loss":
        other["steps"][1]["train/loss"] *= 1 + 2**-52
    elif change == "reward":
        other["steps"][2]["rewards"][0] += 0.5
    elif change == "rewards":
        other["steps"][2]["rewards"].append(0.0)
    elif change == "norm":
        other["weights"]["norms"]["model/a"] *= 1.01
    elif change == "digest":
        other["weights"]["digest"] = "b"
    elif change == "missing":
        del other["steps"][0]["train/grad_norm"]
    else:
        del other["steps"][2]
    assert len(differences(RECORD, other)) == 1 == len(differences(other, RECORD))
    assert len(differences(RECORD, other, ROUNDING)) == beyond_rounding
    assert differences(RECORD, copy.deepcopy(RECORD)) == []
