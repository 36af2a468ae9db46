"""The shipped video suites: named, grouped, and each with a number on the layout of its download."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmrl.cli.main import app
from mmrl.errors import DataError
from mmrl.evaluation.suite_book import load_suites
from mmrl.evaluation.suites import check_files
from tests.kits.engine_kit import tiny_folder
from tests.tasks.video_sets_kit import COMMITTED

BOOK = load_suites(Path(__file__).parents[2] / "configs" / "suites.yaml")
FOLDERS = {
    "charades_sta": "Charades-STA",
    "activitynet": "ActivityNet",
    "qvhighlights": "QVHighlights",
    "nextgqa": "NExT-GQA",
    "videomme": "Video-MME",
    "mvbench": "MVBench",
    "tempcompass": "TempCompass",
    "vsibench": "VSI-Bench",
    "videommmu": "VideoMMMU",
    "longvideobench": "LongVideoBench",
    "mlvu": "MLVU",
    "mlvu_test": "MLVU-Test",
    "got10k": "GOT-10k",
}
NAMES = (
    "charades_sta",
    "activitynet_captions",
    "qvhighlights_val",
    "nextgqa",
    "videomme",
    "videomme_subtitles",
    "mvbench",
    "tempcompass_mc",
    "tempcompass_yes_no",
    "tempcompass_matching",
    "vsibench",
    "videommmu",
    "longvideobench_val",
    "mlvu_dev",
    "mlvu_test",
    "got10k_frames",
)


def make_root(root: Path) -> Path:
    """The fixtures under the names that the shipped suites expect."""
    for name, folder in FOLDERS.items():
        shutil.copytree(COMMITTED / name, root / folder)
    for empty in ("VSI-Bench/arkitscenes", "VSI-Bench/scannetpp", "VideoMMMU/Comprehension"):
        (root / empty).mkdir()
    return root


def test_every_video_suite_is_there_and_finds_its_files(tmp_path: Path) -> None:
    assert [n for n in NAMES if n not in BOOK.suites] == []
    assert set(BOOK.select("moments,video_qa,tempcompass")) | {
        "videomme_subtitles",
        "got10k_frames",
    } == set(NAMES)
    chosen = BOOK.select(",".join(NAMES))
    with pytest.raises(DataError) as error:
        check_files(chosen, tmp_path)
    assert all(f"suite '{name}': expected below" in str(error.value) for name in NAMES)
    check_files(chosen, make_root(tmp_path / "data"))


@pytest.mark.slow
def test_every_video_suite_gives_a_number_on_its_format(tmp_path: Path) -> None:
    root = make_root(tmp_path / "data")
    done = CliRunner().invoke(
        app,
        [
            "eval",
            str(tiny_folder()),
            "--suite",
            ",".join(NAMES),
            "--data-root",
            str(root),
            "--out",
            str(tmp_path / "out"),
            "--limit",
            "5",
            "model.device=cpu",
            "reward.workers=0",
            "rollout.max_new_tokens=2",
            "data.max_pixels=12544",
        ],
    )
    table = json.loads((tmp_path / "out" / "suites.json").read_text())["suites"]
    assert {s["suite"]: s["error"] for s in table if s["error"] or s["value"] is None} == {}
    assert [s["suite"] for s in table] == list(NAMES) and done.exit_code == 0, done.output
