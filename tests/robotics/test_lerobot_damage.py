"""Damaged and foreign LeRobot data sets: every fault is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import DataError
from mmrl.robotics.datasets import open_demonstrations
from mmrl.robotics.datasets.layout import fill
from mmrl.robotics.datasets.lerobot import LeRobotDataset
from mmrl.robotics.datasets.writer import LeRobotWriter
from tests.robotics.lerobot_kit import EPISODES, as_v21, write_set


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("lerobot") / "set")


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "set")
    return tmp_path / "set"


def change_info(folder: Path, **changes: object) -> None:
    file = folder / "meta/info.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"codebase_version": "v4.2"}, "v2.0, v2.1 or v3.0, found 'v4.2'"),
        ({"codebase_version": 3}, "codebase_version"),
        ({"fps": 0}, "fps as a number"),
        ({"fps": None}, "fps"),
        ({"features": []}, "features as an object"),
        ({"features": {"actions": {"dtype": "float32", "shape": [3]}}}, "Did you mean 'actions'"),
        ({"data_path": "../../{chunk_index:03d}"}, "inside the data set"),
        ({"data_path": "/etc/{file_index}"}, "inside the data set"),
        ({"data_path": "{chunk_index.__class__}"}, "path template"),
        ({"data_path": "{nothing}"}, "path template of"),
        ({"video_path": None}, "path template"),
    ],
)
def test_wrong_info(copied: Path, changes: dict, text: str) -> None:
    change_info(copied, **changes)
    with pytest.raises(DataError, match=text):
        list(LeRobotDataset(copied))


@pytest.mark.parametrize(
    "missing, text",
    [
        ("meta/info.json", "meta/info.json, found none"),
        ("meta/tasks.parquet", "tasks.parquet, found none"),
        ("meta/episodes/chunk-000/file-000.parquet", "under meta/episodes, found none"),
        ("data/chunk-000/file-000.parquet", "found none; copy"),
    ],
)
def test_missing_files(copied: Path, missing: str, text: str) -> None:
    (copied / missing).unlink()
    with pytest.raises(DataError, match=text):
        list(LeRobotDataset(copied))


def test_files_that_were_cut_short(copied: Path) -> None:
    demos = LeRobotDataset(copied)
    for name, part in (("base", 0.5), ("wrist", 0.0)):
        video = copied / f"videos/observation.images.{name}/chunk-000/file-000.mp4"
        video.write_bytes(video.read_bytes()[: int(video.stat().st_size * part)])
        with pytest.raises(DataError, match="readable video"):
            demos[2].pictures(name)
    (copied / "videos/observation.images.base/chunk-000/file-000.mp4").unlink()
    with pytest.raises(DataError, match="readable video"):
        demos[0].pictures("base")
    data = copied / "data/chunk-000/file-000.parquet"
    data.write_bytes(data.read_bytes()[:-200])
    with pytest.raises(DataError, match="expected a parquet file"):
        LeRobotDataset(copied)[0]


def test_a_video_with_fewer_frames_than_rows(copied: Path, written: Path) -> None:
    """Another, shorter set's video in its place."""
    with LeRobotWriter(copied.parent / "short", fps=20) as writer:
        writer.add(EPISODES[0])
    name = "videos/observation.images.base/chunk-000/file-000.mp4"
    shutil.copy(copied.parent / "short" / name, copied / name)
    demos = LeRobotDataset(copied)
    np.testing.assert_array_equal(demos[0].pictures("base"), EPISODES[0].images["base"])
    with pytest.raises(DataError, match="expected a frame at"):
        demos[2].pictures("base")


def test_lengths_that_do_not_match(copied: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = copied / "data/chunk-000/file-000.parquet"
    table = pq.read_table(data)
    pq.write_table(table.slice(0, 18), data)
    demos = LeRobotDataset(copied)
    assert len(demos[0]) == 7
    with pytest.raises(DataError, match="found 18 rows"):
        demos[2]
    wrong = table.set_column(
        table.column_names.index("episode_index"),
        "episode_index",
        pa.array([0] * 8 + [1] * 4 + [2] * 9),
    )
    pq.write_table(wrong, data)
    with pytest.raises(DataError, match=r"expected only episode 1 .* found \[0, 1\]"):
        LeRobotDataset(copied)[1]
    ragged = table.set_column(
        table.column_names.index("action"),
        "action",
        pa.array([[0.0] * (3 - (i == 2)) for i in range(21)]),
    )
    pq.write_table(ragged, data)
    with pytest.raises(DataError, match="rows of equal length"):
        LeRobotDataset(copied)[0]
    nan = table.set_column(
        table.column_names.index("action"), "action", pa.array([[0.0, float("nan"), 0.0]] * 21)
    )
    pq.write_table(nan, data)
    with pytest.raises(DataError, match="finite action"):
        LeRobotDataset(copied)[0]


def test_jsonl_that_is_damaged(written: Path, tmp_path: Path) -> None:
    as_v21(written, tmp_path / "old", images=True)
    file = tmp_path / "old/meta/episodes.jsonl"
    for text, message in (
        ("{", "line 1: expected JSON"),
        ('{"episode_index": 0}', "expected keys"),
        ('{"episode_index": "0", "length": 6}', "whole numbers in episode_index"),
        ('{"episode_index": 0, "length": 6}', "expected rows 0 to 6"),
        ('{"episode_index": 0, "length": 0}', "at least one control step"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            LeRobotDataset(tmp_path / "old")[0]
    file.unlink()
    with pytest.raises(DataError, match=r"episodes\.jsonl, found none"):
        LeRobotDataset(tmp_path / "old")


def test_what_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing there"):
        open_demonstrations(tmp_path / "none")
    with pytest.raises(DataError, match="neither"):
        open_demonstrations(tmp_path)
    with pytest.raises(DataError, match="inside the data set"):
        fill("data/../../x", {}, "here")
