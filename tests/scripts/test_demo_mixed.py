"""The mixed demo end to end: eight tasks in one run, a table of all of them, a report with pictures of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmrl.config import load_config
from mmrl.tasks.playground import KINDS
from scripts.demo_mixed import before_and_after
from tests.kits.engine_kit import REPO, read_jsonl
from tests.kits.launch_kit import run_here


def test_the_recipe_names_every_generated_task_in_both_lists() -> None:
    config = load_config(REPO / "configs" / "mixed_tiny.yaml")
    assert [s.task for s in config.data.train] == [s.task for s in config.data.eval] == list(KINDS)
    warm = load_config(REPO / "configs" / "mixed_warmstart.yaml")
    assert [(s.task, s.params) for s in warm.data.train] == [
        (s.task, s.params) for s in config.data.train
    ]


@pytest.mark.slow
def test_the_mixed_demo_runs_and_reports_every_task(tmp_path: Path) -> None:
    few = [f"data.eval.{i}.limit=4" for i in range(len(KINDS))]
    done = run_here(
        "scripts.demo_mixed",
        f"dir={tmp_path}",
        "train.steps=2",
        "train.prompts_per_step=8",
        "eval.samples=2",
        *few,
    )
    # 1: two steps made some task fall, and the script says so
    assert done.returncode in (0, 1), done.stderr[-3000:]
    run = tmp_path / "mixed_tiny"
    assert "Traceback" not in done.stderr and (done.returncode == 1) == ("FELL" in done.stdout)
    table = before_and_after(run)
    assert set(table) == {"sampled", "greedy"} and all(
        set(rows) == set(KINDS) for rows in table.values()
    )
    assert all(
        0 <= r["before"] <= 1 and r["low"] <= r["gain"] <= r["high"]
        for rows in table.values()
        for r in rows.values()
    )
    keys = {key for row in read_jsonl(run / "metrics.jsonl") for key in row}
    seen = [task for task in KINDS if f"train/{task}/reward/mean" in keys]
    assert len(seen) >= 5, "sixteen draws, every task with the same chance"
    report = (run / "report.html").read_text(encoding="utf-8")
    assert all(task in report for task in KINDS) and report.count("<article") >= len(KINDS)
