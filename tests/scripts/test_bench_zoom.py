"""The benchmark of looking again: its record keeps the claim, others would not, and seeds are added to the right record alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_zoom
from scripts._readme_turns import zoom
from tests.kits.engine_kit import REPO

RECORD = REPO / "assets" / "results" / "zoom.json"


@pytest.fixture
def found() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return loaded


def test_the_record_keeps_its_claim_and_others_would_not(found: dict[str, Any]) -> None:
    rows = found["seeds"]
    assert bench_zoom.verdict(rows) == []
    for row in rows:
        for name in ("real", "shuffled"):
            assert len(row[name]["curve"]) == row[name]["steps"] == 100
        assert row["without"]["after"]["sampled"].get("looked", [0.0])[0] == 0.0
    hasty = {**rows[0]["without"], "seconds": 0.9 * rows[0]["real"]["seconds"]}
    assert "without the tool it had" in bench_zoom.verdict([changed(rows[0], "without", hasty)])[0]
    [words] = bench_zoom.verdict([changed(rows[0], "shuffled", rows[0]["real"])])
    assert "permuted rewards gained +0" in words
    lost = bench_zoom.verdict([changed(rows[0], "without", rows[0]["real"])])
    assert len(lost) == 2 and all("over the run without the tool" in words for words in lost)
    assert zoom(found).count("\n| ") == 3 * len(rows)


def changed(row: dict[str, Any], name: str, run: dict[str, Any]) -> dict[str, Any]:
    """The row with another run under that name."""
    return {**copy.deepcopy(row), name: run}


def test_a_seed_is_added_to_a_record_of_the_same_settings_alone(
    found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_zoom, "results_folder", lambda: tmp_path)
    first = found["seeds"][0]
    other = {**first, "seed": 7}
    assert bench_zoom.together([other]) == [other], "there is no record yet"
    (tmp_path / "zoom.json").write_text(json.dumps({**found, "seeds": [other]}))
    assert bench_zoom.together([]) == [other]
    assert [row["seed"] for row in bench_zoom.together([first])] == [first["seed"], 7]
    again = {**other, "start_seconds": 1.0}
    assert bench_zoom.together([again]) == [again], "the newer one"
    short = changed(first, "real", {**first["real"], "steps": 20})
    with pytest.raises(ValueError, match=r"equal steps, found .* steps \[20, 100\]"):
        bench_zoom.together([short])
    (tmp_path / "zoom.json").write_text(json.dumps({**found, "pictures": 5, "seeds": [other]}))
    with pytest.raises(ValueError, match="'pictures': 5"):
        bench_zoom.together([first])
