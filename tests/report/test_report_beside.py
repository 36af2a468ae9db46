"""Reports of a run that goes on: written beside it, one at a time, ended with it, and there after a run that was asked to end.

pytest tests/report/test_report_beside.py
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrl.config import load_config
from mmrl.report import build_report
from mmrl.report.beside import ReportBeside
from tests.kits.engine_kit import album_data, config_file, picture, small_run

pytestmark = pytest.mark.slow


def test_it_writes_what_the_command_writes(new_run: Callable[..., Path]) -> None:
    run, reports = new_run(), ReportBeside(every_s=0)
    assert reports.begin(run)
    assert not reports.begin(run), "one at a time"
    reports.wait(120)
    written = (run / "report.html").read_bytes()
    build_report(run)
    assert (run / "report.html").read_bytes() == written
    assert reports.begin(run), "the next one, once it is done"
    reports.close()
    assert (run / "report.html").read_bytes() == written, "whole, whenever it was ended"


def test_short_runs_and_frequent_evaluations_do_not_pay(new_run: Callable[..., Path]) -> None:
    run = new_run()
    assert not ReportBeside().begin(run)
    assert not (run / "report.html").exists()


def test_a_run_has_its_report_while_it_goes_on_and_after_it_was_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmrl.cli import run as run_module

    monkeypatch.setattr(run_module, "ReportBeside", lambda: ReportBeside(every_s=0))
    rows = [[picture((112, 84), i)] * (i % 3) for i in range(7)]
    data, held = album_data(tmp_path, rows), album_data(tmp_path, rows[:3], "held")
    tree = small_run(tmp_path / "runs", data, held, eval={"every": 1}, train={"steps": 3})
    page, seen = tmp_path / "runs" / "run" / "report.html", list[bool]()

    def listen(kind: str, payload: Any) -> None:
        if kind == "step" and payload["step"] == 1:
            ends = time.monotonic() + 120
            while not page.exists() and time.monotonic() < ends:
                time.sleep(0.05)
            seen.append(page.exists())
            os.kill(os.getpid(), signal.SIGTERM)

    config = load_config(config_file(tmp_path / "run.yaml", tree))
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        run_module.run_training(config, resume=False, overwrite=False, quiet=True, on_event=listen)
    text = page.read_text(encoding="utf-8")
    assert seen == [True] and "interrupted" in text and "step 1" in text
    assert not list(page.parent.glob("*.partial"))
