"""The mutation score itself: mutants change behaviour, a run of tests tells a defect from none, and a hang is ended."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import mutation_score
from scripts._mutation_worker import Zygote
from scripts.mutation_score import EQUIVALENTS, TESTS, judge, mutants, reasons, summary
from tests.kits.engine_kit import REPO

MODULE = '''"""A module."""
from __future__ import annotations


def larger(a: int | None, b: int) -> int | None:
    """A docstring with 3 numbers."""
    if a is None or a < b:
        return b
    return a


def total(n: int) -> int:
    found = 0
    while n > 0:
        found, n = found + n, n - 1
    return found
'''
TEST = """from subject import larger, total


def test_larger():
    assert (larger(None, 1), larger(1, 2), larger(2, 1)) == (1, 2, 2)


def test_total():
    assert total(4) == 10 and total(-4) == 0
"""


def test_mutants_leave_annotations_alone_and_are_drawn_by_the_seed() -> None:
    found = mutants("subject.py", MODULE, seed=0)
    assert found == mutants("subject.py", MODULE, seed=0) != mutants("subject.py", MODULE, seed=1)
    assert {m.line for m in found} == {7, 13, 14, 15}  # not the annotations in lines 5 and 12
    for mutant in found:
        assert (
            ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(MODULE))
            and mutant.before != mutant.after
        )
    assert len(mutants("subject.py", MODULE, seed=0, limit=2)) == 2


@pytest.mark.slow
def test_a_defect_that_tests_see_is_killed_one_they_do_not_see_survives_and_a_hang_ends(
    tmp_path: Path,
) -> None:
    (tmp_path / "subject.py").write_text(MODULE)
    (tmp_path / "test_subject.py").write_text(TEST)
    (tmp_path / "test_weak.py").write_text(
        "import subject\n\n\ndef test_nothing():\n    assert subject\n"
    )
    zygote = Zygote(tmp_path, preload=["pytest"])
    try:
        found = mutants("subject.py", MODULE, seed=0, limit=6)
        strong = judge([zygote], "subject.py", found, ["test_subject.py"], least_timeout_s=2.0)
        weak = judge([zygote], "subject.py", found[:2], ["test_weak.py"])
        # a process that ends in the midst of its tests, as if all were well
        (tmp_path / "test_ends.py").write_text("import os\n\n\ndef test_ends():\n    os._exit(0)\n")
        assert zygote.run(["test_ends.py"], 30.0)[0] == 1
        (tmp_path / "test_broken.py").write_text("def test_broken():\n    assert False\n")
        with pytest.raises(
            SystemExit, match=r"expected the tests of subject\.py to pass without a defect"
        ):
            judge([zygote], "subject.py", found, ["test_broken.py"])
    finally:
        zygote.close()
    assert (tmp_path / "subject.py").read_text() == MODULE
    assert {v.outcome for v in strong} <= {"killed", "timeout", "survived"} and summary(strong)[
        "killed"
    ] >= 3
    assert {v.outcome for v in weak} == {"survived"} and summary(weak)["score"] == 0.0
    assert len(summary(weak)["survivors"]) == 2


def test_every_listed_equivalent_has_a_reason_and_names_lines_that_are_still_there() -> None:
    for (module, before, _), reason in reasons().items():
        assert module in TESTS and len(reason) > 20, f"{EQUIVALENTS.name}: {before}"
        lines = {line.strip() for line in (REPO / module).read_text(encoding="utf-8").splitlines()}
        assert set(before.split("\n")) <= lines, (
            f"{EQUIVALENTS.name}: {module} no longer holds {before!r}; remove the entry"
        )


def test_the_modules_and_tests_exist() -> None:
    for module, tests in TESTS.items():
        assert all(os.path.exists(REPO / name) for name in (module, *tests))


def test_each_module_is_recorded_when_it_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is ended keeps what it found, and beside it what another run has recorded meanwhile."""
    recorded: dict[str, Any] = {"mmrl/policy/manifest.py": "of another run"}

    def judged(zygotes: Any, module: str, found: Any, tests: Any) -> list[Any]:
        if module == "mmrl/workers/scoring.py":
            raise KeyboardInterrupt
        recorded["mmrl/training/checkpoint.py"] = "recorded meanwhile"
        return []

    def write(name: str, value: dict[str, Any], *libraries: str) -> str:
        recorded.update(value["modules"])
        return name

    for name, stand_in in (
        ("Zygote", lambda folder: SimpleNamespace(close=lambda: None)),
        ("_copy", lambda folder: folder),
        ("mutants", lambda *_: []),
        ("judge", judged),
        ("_recorded", lambda: dict(recorded)),
        ("write_results", write),
    ):
        monkeypatch.setattr(mutation_score, name, stand_in)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "mutation_score",
            "--only",
            "mmrl/training/alarms.py",
            "--only",
            "mmrl/workers/scoring.py",
        ],
    )
    with pytest.raises(KeyboardInterrupt):
        mutation_score.main()
    assert (
        recorded["mmrl/training/alarms.py"]["mutants"] == 0
        and "mmrl/workers/scoring.py" not in recorded
    )
    assert recorded["mmrl/policy/manifest.py"] == "of another run"
    assert recorded["mmrl/training/checkpoint.py"] == "recorded meanwhile"
