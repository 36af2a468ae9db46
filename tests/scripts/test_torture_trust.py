"""The table of attacks: what pytest reports of a run becomes rows, and other rows stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts._torture_trust import Attack, Outcome, record
from scripts._torture_trust_tests import outcome_of

_TESTS = '''"""Strangers of this test: who they are does not matter."""
import pytest

@pytest.mark.parametrize("n", [1, 2, 3])
def test_three_cases_hold(n):
    assert n

@pytest.mark.parametrize("n", [0, 1])
def test_one_case_gets_through(n):
    assert n, "it | got in"

def test_nothing_was_tried():
    pytest.skip("no such machine")

@pytest.mark.slow
def test_slow_ones_are_tried_too():
    pass
'''


def test_a_run_of_pytest_becomes_rows_and_a_table(tmp_path: Path) -> None:
    file = tmp_path / "test_strangers.py"
    file.write_text(_TESTS)
    outcome = outcome_of(str(file))
    assert not outcome.held and outcome.figures == {"tests": 4, "cases": 7}
    assert outcome.result == "4 tests: 2 held, 1 failed, 1 skipped"
    rows = {name.partition("::")[2]: row for name, row in outcome.tests.items()}
    assert rows["test_three_cases_hold"]["held"] is True
    assert rows["test_three_cases_hold"]["result"].startswith("3 of 3 cases passed")
    assert rows["test_three_cases_hold"]["attack"] == "Strangers of this test"
    assert rows["test_three_cases_hold"]["expected"] == "three cases hold"
    assert rows["test_one_case_gets_through"]["held"] is False
    assert "1 of 2 cases passed" in rows["test_one_case_gets_through"]["result"]
    assert "it | got in" in rows["test_one_case_gets_through"]["result"]
    assert rows["test_nothing_was_tried"]["held"] is None
    assert "no such machine" in rows["test_nothing_was_tried"]["result"]

    table = tmp_path / "table.json"
    for name in ("tests", "another_attack"):  # the second has no rows of tests
        tried = Attack(name, "what", "nothing", lambda options: outcome)
        record(table, tried, outcome if name == "tests" else Outcome(True, "nothing"))
    document = json.loads(table.read_text())
    assert len(document["tests"]) == 4 and document["tried"] == 2
    assert document["got_through"] == 1
    lines = table.with_suffix(".md").read_text().splitlines()
    assert "| Strangers of this test | nothing was tried | not tried: 0 of 1 case" in "\n".join(
        lines
    )
    assert all(line.replace("\\|", "").count("|") == 4 for line in lines if line.startswith("|"))


def test_a_run_that_tries_nothing_has_withstood_nothing(tmp_path: Path) -> None:
    file = tmp_path / "test_empty.py"
    file.write_text("import a_module_that_is_not_there\n")
    with pytest.raises(RuntimeError, match="found exit status 2"):
        outcome_of(str(file))
