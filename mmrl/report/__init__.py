"""The report of a run: `build_report(run)` writes one self-contained page.

`build_comparison(runs, out)` lays the curves of several runs over each other.
"""

from __future__ import annotations

from mmrl.report.build import build_comparison, build_report

__all__ = ["build_comparison", "build_report"]
