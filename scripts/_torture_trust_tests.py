"""The tests of tests/attacks, each a row of the table, by the report of a run of pytest. See scripts/torture_trust.py."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scripts._torture_trust import Outcome, attack

__all__ = ["ATTACKS", "outcome_of"]

ROOT = Path(__file__).resolve().parent.parent
_TESTS = "tests/attacks"


def _report(path: str, file: Path) -> ElementTree.Element:
    """JUnit's document of a run of all tests of `path`, written to `file`. Raises RuntimeError where pytest did not run them."""
    command = [sys.executable, "-m", "pytest", path, "-q", "-m", "", "-n", "0"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--junitxml={file}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(
            f"expected pytest to run {path}, found exit status {done.returncode}: {done.stdout[-2000:]}"
        )
    return ElementTree.parse(file).getroot()


def _subject(path: str, module: str) -> str:
    """What the tests of a module are about: the first words of its text."""
    name = f"{module.rpartition('.')[2]}.py"
    folder = ROOT / path
    file = folder / name if folder.is_dir() else folder
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or name
    return " ".join(text.split(":")[0].split(". ")[0].split()).rstrip(".")


def _row(subject: str, name: str, cases: Iterable[ElementTree.Element]) -> dict[str, Any]:
    """One test with all its parameters. `held` None: nothing was tried."""
    found = list(cases)
    ends = [next((e for e in c if e.tag in ("failure", "error", "skipped")), None) for c in found]
    failed = [e for e in ends if e is not None and e.tag != "skipped"]
    skipped = [e for e in ends if e is not None and e.tag == "skipped"]
    passed = len(found) - len(failed) - len(skipped)
    seconds = sum(float(c.get("time", "0")) for c in found)
    words = (
        f"{passed} of {len(found)} {'cases' if len(found) > 1 else 'case'} passed, {seconds:.1f} s"
    )
    for end in [*failed[:1], *skipped[:1]]:
        said = " ".join((end.get("message") or "").split())[:200]
        words += f"; {'skipped' if end.tag == 'skipped' else 'failed'}: {said}"
    return {
        "attack": subject,
        "expected": name.removeprefix("test_").replace("_", " "),
        "held": not failed if passed or failed else None,
        "result": words,
    }


def outcome_of(path: str) -> Outcome:
    """What the tests of a folder or file, below the project's root or absolute, say in a run of their own."""
    with tempfile.TemporaryDirectory() as folder:
        root = _report(path, Path(folder) / "report.xml")
    tests: dict[tuple[str, str], list[ElementTree.Element]] = {}
    for case in root.iter("testcase"):
        name = case.get("name", "").partition("[")[0]
        tests.setdefault((case.get("classname", ""), name), []).append(case)
    rows = {
        f"{module.rpartition('.')[2]}::{name}": _row(_subject(path, module), name, cases)
        for (module, name), cases in sorted(tests.items())
    }
    held = [row["held"] for row in rows.values()]
    return Outcome(
        bool(rows) and False not in held,
        f"{len(rows)} tests: {held.count(True)} held, {held.count(False)} failed, {held.count(None)} skipped",
        {"tests": len(rows), "cases": sum(map(len, tests.values()))},
        rows,
    )


@attack("the tests of tests/attacks, each in the table below", "all of them pass")
def tests(options: Any) -> Outcome:
    """Minutes; the other attacks need a server, a disk or memory of their own."""
    return outcome_of(_TESTS)


ATTACKS = [tests]
