"""The folder of a run: what --overwrite removes from it, and what it leaves."""

from __future__ import annotations

from pathlib import Path

from mmrl.config import load_config
from mmrl.training.runlog import _WRITTEN, RunFolder


def test_overwrite_removes_the_run_and_nothing_else(tmp_path: Path) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    for name in _WRITTEN:
        entry = run / name
        if "." in name:
            entry.parent.mkdir(exist_ok=True)
            entry.write_text("of before\n")
        else:
            (entry / "step_000001").mkdir(parents=True)
    mine.mkdir()
    (mine / "kept.txt").write_text("kept")
    (run / "verdicts" / "step_000001").rmdir()
    (run / "verdicts").rmdir()
    (run / "verdicts").symlink_to(mine)
    (run / "figures").mkdir()
    for name in ("notes.txt", "train.log", "figures/loss.svg"):
        (run / name).write_text(name)
    folder = RunFolder(load_config(None, [f"dir={tmp_path}", "name=run"]))
    with folder.held(resume=False, overwrite=True):
        folder.start(total_steps=1, resumed_at=None)
    left = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert left == {
        ".reserve",
        "config.yaml",
        "run.json",
        "notes.txt",
        "train.log",
        "figures/loss.svg",
    }
    assert "of before" not in (run / "config.yaml").read_text()
    assert (mine / "kept.txt").read_text() == "kept", "a link is removed, not what it leads to"
