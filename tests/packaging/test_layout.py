"""How the code is laid out: what scripts/measure_house.py counts of a commit, held for the files as they are."""

from __future__ import annotations

import ast

import pytest

from scripts.measure_house import circles, sources
from tests.kits.engine_kit import REPO


@pytest.mark.slow
def test_no_modules_import_each_other() -> None:
    files = sources(REPO)
    parsed = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}
    assert len(files) > 500 and circles(files, parsed) == []
    # whether it would be seen, also inside a function
    contract = files["robotics.contract"].read_text(encoding="utf-8")
    code = f"{contract}\n\ndef late():\n    from mmrl.robotics.vector import make_vector\n"
    two = {"robotics.contract": ast.parse(code), "robotics.vector": parsed["robotics.vector"]}
    assert circles(files, two) == [list(two)]
