"""scripts/record_golden.py sees every difference between two runs, and to rounding only those that are more than rounding."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from scripts import record_golden
from scripts.record_golden import differences

ROUNDING = 1e-3
RECORD: dict[str, Any] = {
    "steps": [
        {"train/loss": 0.125 * n, "train/grad_norm": 0.7, "rewards": [0.0, 0.5, 1.0]}
        for n in (1, 2, 3)
    ],
    "weights": {"tensors": 2, "digest": "a", "norms": {"model/a": 3.5, "model/b": 0.25}},
}


@pytest.mark.parametrize(
    ("change", "beyond_rounding"),
    [
        ("loss", False),
        ("reward", True),
        ("rewards", True),
        ("norm", True),
        ("digest", False),
        ("missing", True),
        ("steps", True),
    ],
)
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


def test_another_processor_is_compared_in_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_golden, "GOLDEN", tmp_path)
    record = {**RECORD, "processor": record_golden.processor()}
    (tmp_path / "here.json").write_text(json.dumps(record))
    (tmp_path / "elsewhere.json").write_text(json.dumps({**record, "processor": "another"}))
    late, early, renamed = (copy.deepcopy(RECORD) for _ in range(3))
    late["steps"][2]["rewards"][0] += 0.5
    early["steps"][0]["rewards"][0] += 0.5
    renamed["weights"]["norms"] = {"model/c": 3.5}
    found = {
        name: [
            bool(record_golden.against_record(name, run)) for run in (RECORD, late, early, renamed)
        ]
        for name in ("here", "elsewhere")
    }
    assert found == {"here": [False, True, True, True], "elsewhere": [False, False, True, True]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the runs read; they write elsewhere."""
    folder = tmp_path_factory.mktemp("data")
    record_golden.make_data(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grounding", "sft", "robots_grpo"])
def test_short_runs_compute_what_they_computed(kind: str, data: Path, tmp_path: Path) -> None:
    """The other kinds: `python -m scripts.record_golden`, before and after a change that is to change nothing."""
    new = record_golden.run_kind(
        record_golden.KINDS[kind], data, tmp_path / "out", record_golden.ROOT
    )
    assert record_golden.against_record(kind, new) == [], (
        "python -m scripts.record_golden --record, and say why in the commit"
    )
