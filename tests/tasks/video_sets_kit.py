"""Copies of the committed video fixtures for tests that read or break them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from assets.make_video_task_fixtures import MAKERS
from mmrl.types import Sample

__all__ = ["COMMITTED", "COUNTS", "FORMATS", "READ", "by_id", "change_first", "copied", "copier"]

COMMITTED = Path(__file__).parents[2] / "assets" / "fixtures"
FORMATS = {**{name: name for name in MAKERS}, "mlvu_test": "mlvu", "video_rows": "video_r1"}
"""Fixture -> its format."""
READ = {
    "charades_sta": "charades_sta_test.txt",
    "activitynet": "val_2.json",
    "qvhighlights": "highlight_val_release.jsonl",
    "nextgqa": "",
    "videomme": "videomme",
    "mvbench": "",
    "tempcompass": "questions",
    "vsibench": "test.jsonl",
    "videommmu": "",
    "longvideobench": "lvb_val.json",
    "mlvu": "",
    "mlvu_test": "test_question.json",
    "got10k": "val",
    "videochat_got": "got_val.json",
    "video_rows": "unified_video.json",
}
"""Fixture -> what a reader reads, below its folder."""
COUNTS = {
    "charades_sta": 3,
    "activitynet": 2,
    "qvhighlights": 2,
    "nextgqa": 2,
    "videomme": 2,
    "mvbench": 4,
    "tempcompass": 4,
    "vsibench": 5,
    "videommmu": 3,
    "longvideobench": 2,
    "mlvu": 2,
    "mlvu_test": 1,
    "got10k": 1,
    "videochat_got": 1,
    "video_rows": 10,
}
"""Fixture -> number of samples."""


def copied(root: Path) -> dict[str, str]:
    """Every fixture copied below `root`: name -> path to read."""
    for name in MAKERS:
        shutil.copytree(COMMITTED / name, root / name)
    return {name: str(root / name / path) for name, path in READ.items()}


def copier(folder: Path) -> Callable[[str], Path]:
    """copy(name) -> the path to read of a fixture copied into `folder`."""

    def copy(name: str) -> Path:
        shutil.copytree(COMMITTED / name, folder / name)
        return folder / name / READ[name]

    return copy


def by_id(samples: Any) -> dict[str, Sample]:
    """Samples by id."""
    return {s.id: s for s in samples}


def change_first(path: Path, changes: dict[str, Any]) -> Path:
    """The JSON (Lines) rows of `path` with their first row changed; None removes a key."""
    lines = path.suffix == ".jsonl"
    rows = (
        [json.loads(line) for line in path.read_text().splitlines()]
        if lines
        else json.loads(path.read_text())
    )
    rows[0] = {k: v for k, v in {**rows[0], **changes}.items() if v is not None}
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    return path
