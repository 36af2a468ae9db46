"""In CI a skipped test is a failure unless its reason names a missing GPU (the rule is in conftest.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # kept out of `make check`, part of `make test`
HERE = Path(__file__).resolve().parent
SUITE = """
import pytest
def test_passes(): pass
@pytest.mark.skip(reason="needs a GPU")
def test_on_gpu(): pass
@pytest.mark.xfail(strict=True)
def test_expected_failure(): assert False
"""
SKIPS = """
@pytest.mark.skipif(True, reason="no chromium")
def test_picture(): pass
def test_inside(): pytest.skip("not today")
@pytest.mark.render("no-such-program")
def test_needs_program(): pass
@pytest.mark.render("libno_such_library.so.1")
def test_needs_library(): pass
"""
SKIPPED = ("test_picture", "test_inside", "test_needs_program", "test_needs_library")
MODULE_SKIP = "import pytest\npytest.importorskip('no_such_module')\ndef test_never_seen(): pass\n"


def run(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status and output of pytest over `folder`, which gets our conftest."""
    shutil.copy(HERE / "conftest.py", folder)
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n  gpu: GPU\n  render: render\n  slow: slow\n  check_takes: n\n"
    )
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("CI", "MMRL_NO_SKIP") and not k.startswith("PYTEST_")
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *arguments, str(folder)],
        cwd=folder,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_missing_gpu_and_an_expected_failure_are_excused(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE)
    status, output = run(tmp_path, CI="1")
    assert status == 0 and "1 passed, 1 skipped, 1 xfailed" in output


def test_any_other_skip_turns_ci_red_and_is_listed(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE + SKIPS)
    status, output = run(tmp_path, MMRL_NO_SKIP="1")
    assert status == 1 and "1 passed, 1 skipped, 1 xfailed" in output
    for name in SKIPPED:
        assert f"test_it.py::{name}: skipped in CI" in output


def test_workers_of_xdist_keep_the_rule_for_tests_and_modules(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE + SKIPS)
    (tmp_path / "test_module.py").write_text(MODULE_SKIP)
    status, output = run(tmp_path, "-n", "2", "--continue-on-collection-errors", CI="true")
    assert status == 1 and "1 passed, 1 skipped, 1 xfailed" in output
    for name in ("test_module.py", *(f"test_it.py::{name}" for name in SKIPPED)):
        assert f"{name}: skipped in CI" in output


def test_outside_ci_a_skip_is_a_skip(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE + SKIPS)
    status, output = run(tmp_path, CI="false")
    assert status == 0 and "1 passed, 5 skipped, 1 xfailed" in output


def test_check_takes_as_many_parameters_as_it_is_told_evenly(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        + "".join(
            f"@pytest.mark.check_takes({n})\n@pytest.mark.parametrize('x', range(5))\ndef test_{n}(x): pass\n"
            for n in (1, 2, 5)
        )
    )
    status, output = run(tmp_path, "-m", "not slow", "-v")
    assert status == 0 and "8 passed, 7 deselected" in output
    assert all(
        f"test_it.py::test_{name} PASSED" in output for name in ("1[0]", "2[0]", "2[2]", "5[4]")
    )
    assert "15 passed" in run(tmp_path)[1], "all of them without it"


def test_a_module_that_skips_itself_turns_ci_red(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(MODULE_SKIP)
    (tmp_path / "test_other.py").write_text(SUITE)
    status, output = run(tmp_path, CI="true")
    assert status != 0 and "test_it.py: skipped in CI" in output and "no_such_module" in output
