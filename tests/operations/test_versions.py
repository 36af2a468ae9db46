"""Versions come from metadata: asking for them imports none of the libraries."""

from __future__ import annotations

import platform
import subprocess
import sys

import numpy as np

from mmrl.operations.versions import LIBRARIES, versions


def test_versions_name_python_and_every_library_asked_for() -> None:
    assert versions(("numpy", "no-such-library-1")) == {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "no-such-library-1": "not installed",
    }
    assert list(versions()) == ["python", *LIBRARIES] and versions(()) == {
        "python": platform.python_version()
    }


def test_benchmarks_and_versions_leave_heavy_libraries_alone() -> None:
    code = (
        "import sys, mmrl.operations.versions, scripts._bench; mmrl.operations.versions.versions(); "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
