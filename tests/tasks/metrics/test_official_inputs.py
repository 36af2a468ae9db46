"""The golden numbers of official programs belong to the inputs that stand beside them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from assets.make_official_goldens import FOLDER, INPUTS, make_all


def test_the_generator_writes_the_inputs_that_stand_here(tmp_path: Path) -> None:
    written = make_all(tmp_path)
    assert {path.name: path.read_bytes() for path in written} == {
        path.name: (FOLDER / path.name).read_bytes() for path in written
    }
    assert {path.name for path in FOLDER.iterdir()} == {
        f"{name}{kind}.json" for name in INPUTS for kind in ("", ".golden")
    }


@pytest.mark.parametrize("name", sorted(INPUTS))
def test_every_golden_file_says_where_it_is_from_and_was_made_from_this_input(name: str) -> None:
    golden = json.loads((FOLDER / f"{name}.golden.json").read_text(encoding="utf-8"))
    assert (
        golden["source"]["input_sha256"]
        == hashlib.sha256((FOLDER / f"{name}.json").read_bytes()).hexdigest()
    )
    assert (
        golden["source"]["program"]
        and golden["source"]["date"] >= "2026-11-21"
        and golden["numbers"]
    )
