"""LeRobot data sets: what is written comes back, others' readers agree, v2.1 and v3.0 say the same, damage is named."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import ConfigError, DataError
from mmrl.robotics.datasets import RecordedEpisode, open_demonstrations
from mmrl.robotics.datasets.lerobot import LeRobotDataset
from mmrl.robotics.datasets.mp4 import VIDEO_SETTINGS, video_settings
from mmrl.robotics.datasets.writer import LeRobotWriter
from tests.robotics.lerobot_kit import EPISODES, as_v21, episode, write_set


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("lerobot") / "set")


def test_what_was_written_comes_back(written: Path) -> None:
    demos = LeRobotDataset(written)
    assert len(demos) == 3 and demos.cameras == ("base", "wrist") and demos.fps == 20
    for demo, item in zip(demos, EPISODES, strict=True):
        assert (
            demo.instruction == item.instruction
            and demo.success == item.success
            and demo.state == item.state
        )
        np.testing.assert_array_equal(demo.actions_TA, item.actions_TA)
        np.testing.assert_array_equal(demo.executed_TA, item.executed_TA)
        np.testing.assert_array_equal(demo.steps_P, item.steps_P)
        np.testing.assert_array_equal(demo.proprio_TS[item.steps_P], item.proprio_PS)
        assert demo.actions_TA.dtype == demo.proprio_TS.dtype == np.float32


def test_pixels_are_exact_and_in_the_right_place(written: Path) -> None:
    for demo, item in zip(LeRobotDataset(written), EPISODES, strict=True):
        for camera in ("base", "wrist"):
            error = np.abs(demo.pictures(camera).astype(int) - item.images[camera])
            assert error.mean() == 0.0, f"lossless coding is off by {error.mean()}"


def test_pictures_come_in_any_order_and_stay_until_the_next_one(written: Path) -> None:
    demo = LeRobotDataset(written)[1]  # pictures at steps 0, 2, 4
    images = EPISODES[1].images["base"]
    np.testing.assert_array_equal(demo.pictures("base", [4, 1, 0, 3, 1]), images[[2, 0, 0, 1, 0]])
    observation = demo.observation(3)
    np.testing.assert_array_equal(observation.images["wrist"], EPISODES[1].images["wrist"][1])
    np.testing.assert_array_equal(observation.proprio, EPISODES[1].proprio_PS[1])
    with pytest.raises(DataError, match="steps from 0 to 4"):
        demo.pictures("base", [5])
    with pytest.raises(DataError, match="Did you mean 'wrist'"):
        demo.pictures("wirst")


@pytest.mark.parametrize("name, limit", [("lossless", 0.0), ("high", 3.0), ("small", 9.0)])
def test_the_error_of_each_video_setting(tmp_path: Path, name: str, limit: float) -> None:
    item = episode(5, 8)
    with LeRobotWriter(tmp_path / name, fps=10, video=name) as writer:
        writer.add(item)
    error = np.abs(
        LeRobotDataset(tmp_path / name)[0].pictures("base").astype(int) - item.images["base"]
    ).mean()
    assert error <= limit and (limit == 0.0) == VIDEO_SETTINGS[name].lossless
    info = json.loads((tmp_path / name / "meta/info.json").read_text())["features"][
        "observation.images.base"
    ]["info"]
    assert info["video.lossless"] == (limit == 0.0) and info["video.codec"] == "h264"


def test_layout_is_that_of_lerobot_v3(written: Path) -> None:
    info = json.loads((written / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0" and info["total_tasks"] == 2
    assert info["total_episodes"] == 3 and info["total_frames"] == 21
    assert info["data_path"] == "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    assert info["splits"] == {"train": "0:3"} and info["mmrl"] == {"by": "a test"}
    for path in (
        "data/chunk-000/file-000.parquet",
        "meta/stats.json",
        "meta/tasks.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "videos/observation.images.base/chunk-000/file-000.mp4",
    ):
        assert (written / path).is_file()
    assert not any(
        name.startswith(("observation", "action"))
        for name in info["features"]
        if name not in ("action", "observation.state")
        and not name.startswith("observation.images.")
    )


@pytest.mark.slow
def test_pandas_and_datasets_read_it_as_lerobot_does(written: Path) -> None:
    """lerobot: pd.read_parquet for tasks (index: the instruction); datasets with features made from info.json for rows."""
    pandas = pytest.importorskip("pandas")
    datasets = pytest.importorskip("datasets")
    tasks = pandas.read_parquet(written / "meta/tasks.parquet")
    assert tasks.index.name == "task" and int(tasks.loc["lift it"].task_index) == 1
    info = json.loads((written / "meta/info.json").read_text())
    features = {}
    for key, feature in info["features"].items():
        if feature["dtype"] != "video":
            value = datasets.Value(feature["dtype"])
            features[key] = (
                value
                if feature["shape"] == [1]
                else datasets.Sequence(value, length=feature["shape"][0])
            )
    rows = datasets.Dataset.from_parquet(
        str(written / "data/chunk-000/file-000.parquet"),
        features=datasets.Features(features),
        cache_dir=str(written.parent / "cache"),
    )
    np.testing.assert_allclose(rows[7]["action"], EPISODES[1].actions_TA[0])
    assert rows["episode_index"][:] == [0] * 7 + [1] * 5 + [2] * 9 and rows["index"][:] == list(
        range(21)
    )
    episodes = datasets.Dataset.from_parquet(
        str(written / "meta/episodes/chunk-000/file-000.parquet"),
        cache_dir=str(written.parent / "cache"),
    )
    assert (
        episodes[2]["dataset_from_index"] == 12
        and episodes[2]["dataset_to_index"] == 21
        and episodes[2]["tasks"] == ["lift it"]
    )
    assert episodes[1]["videos/observation.images.base/from_timestamp"] == pytest.approx(7 / 20)


@pytest.mark.slow
def test_torchcodec_finds_the_same_pictures_by_time(written: Path) -> None:
    """As lerobot queries them: frame round(time * fps) of the file."""
    decoders = pytest.importorskip("torchcodec.decoders")
    video = written / "videos/observation.images.wrist/chunk-000/file-000.mp4"
    decoder = decoders.VideoDecoder(str(video), seek_mode="approximate")
    frames = decoder.get_frames_at(
        indices=[round((7 / 20 + 2 / 20) * decoder.metadata.average_fps)]
    )
    np.testing.assert_array_equal(
        frames.data[0].permute(1, 2, 0).numpy(), EPISODES[1].images["wrist"][1]
    )
    assert frames.pts_seconds[0].item() == pytest.approx(9 / 20, abs=1e-4)


def test_statistics_are_those_of_all_rows(written: Path) -> None:
    stats = json.loads((written / "meta/stats.json").read_text())
    actions = np.concatenate([item.actions_TA for item in EPISODES]).astype(np.float64)
    np.testing.assert_allclose(stats["action"]["mean"], actions.mean(axis=0))
    np.testing.assert_allclose(stats["action"]["q99"], np.quantile(actions, 0.99, axis=0))
    shown = (
        np.concatenate(
            [
                item.images["base"][
                    np.searchsorted(item.steps_P, np.arange(len(item.actions_TA)), "right") - 1
                ]
                for item in EPISODES
            ]
        )
        / 255.0
    )
    np.testing.assert_allclose(
        np.ravel(stats["observation.images.base"]["mean"]), shown.mean(axis=(0, 1, 2))
    )
    np.testing.assert_allclose(
        np.ravel(stats["observation.images.base"]["std"]), shown.std(axis=(0, 1, 2))
    )
    np.testing.assert_allclose(
        np.ravel(stats["observation.images.base"]["q10"]),
        np.quantile(shown, 0.1, axis=(0, 1, 2)),
        atol=1 / 255,
    )
    assert np.shape(stats["observation.images.base"]["max"]) == (3, 1, 1) and stats[
        "observation.images.base"
    ]["count"] == [21]
    found = LeRobotDataset(written).action_statistics()
    np.testing.assert_allclose(found.q01, np.quantile(actions, 0.01, axis=0))
    assert found.transitions == 21 and found.trajectories == 3


def test_episodes_spread_over_files_when_they_get_large(tmp_path: Path) -> None:
    items = [episode(i, 6) for i in range(4)]
    with LeRobotWriter(tmp_path / "s", fps=20, data_mb=1e-6, video_mb=1e-6) as writer:
        for item in items:
            writer.add(item)
    assert len(list((tmp_path / "s/data/chunk-000").iterdir())) == 4
    assert len(list((tmp_path / "s/videos/observation.images.base/chunk-000").iterdir())) == 4
    for demo, item in zip(LeRobotDataset(tmp_path / "s"), items, strict=True):
        np.testing.assert_array_equal(demo.actions_TA, item.actions_TA)
        np.testing.assert_array_equal(demo.pictures("wrist", [5]), item.images["wrist"][[5]])


def test_only_successes_and_chosen_cameras(written: Path) -> None:
    demos = LeRobotDataset(written, keep="success", cameras=["wrist"])
    assert len(demos) == 2 and all(demo.success for demo in demos) and demos.cameras == ("wrist",)
    assert demos[-1].state == "train-1"
    with pytest.raises(ConfigError, match="Did you mean 'base'"):
        LeRobotDataset(written, cameras=["bas"])
    with pytest.raises(ConfigError, match="all or success"):
        LeRobotDataset(written, keep="none")
    with pytest.raises(IndexError):
        demos[2]
    assert len(open_demonstrations(written)) == 3


@pytest.mark.parametrize("images", [False, True])
def test_v21_and_v30_give_equal_demonstrations(written: Path, tmp_path: Path, images: bool) -> None:
    as_v21(written, tmp_path / "old", images)
    old = LeRobotDataset(tmp_path / "old")
    assert old.version == (2, 1) and len(old) == 3
    for a, b in zip(old, LeRobotDataset(written), strict=True):
        assert (a.instruction, a.success, a.cameras, a.fps) == (
            b.instruction,
            b.success,
            b.cameras,
            b.fps,
        )
        np.testing.assert_array_equal(a.actions_TA, b.actions_TA)
        np.testing.assert_array_equal(a.proprio_TS, b.proprio_TS)
        np.testing.assert_array_equal(a.steps_P, b.steps_P)
        np.testing.assert_array_equal(a.pictures("wrist"), b.pictures("wrist"))
    np.testing.assert_allclose(
        old.action_statistics().q99, LeRobotDataset(written).action_statistics().q99, rtol=1e-6
    )


# -- the writer's promises ----------------------------------------------------------------------------------------------------


def test_an_interrupted_recording_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), LeRobotWriter(tmp_path / "s", fps=20) as writer:
        writer.add(EPISODES[0])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_recording_leaves_no_data_set_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        LeRobotWriter(tmp_path / "s", fps=20)
        os._exit(9)
    os.waitpid(pid, 0)
    assert not (tmp_path / "s").exists() and len(list(tmp_path.iterdir())) == 1
    with LeRobotWriter(tmp_path / "s", fps=20) as writer:
        writer.add(EPISODES[0])
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_an_empty_recording_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="at least one episode"),
        LeRobotWriter(tmp_path / "s", fps=20),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_existing_data_are_kept_unless_told_otherwise(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "s")
    with pytest.raises(ConfigError, match="overwrite"):
        LeRobotWriter(tmp_path / "s", fps=20)
    with LeRobotWriter(tmp_path / "s", fps=20, overwrite=True) as writer:
        writer.add(EPISODES[2])
        assert len(LeRobotDataset(tmp_path / "s")) == 3  # the old one stays readable meanwhile
    assert len(LeRobotDataset(tmp_path / "s")) == 1 and [p.name for p in tmp_path.iterdir()] == [
        "s"
    ]
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.txt").write_text("do not lose me")
    with pytest.raises(ConfigError, match="no data set"):
        LeRobotWriter(tmp_path / "other", fps=20, overwrite=True)


def test_episodes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    good = episode(0, 4)
    change = pickle.loads(pickle.dumps(good.__dict__))
    cases = [
        ({"rewards_T": np.zeros(3, np.float32)}, "rewards_T 3"),
        ({"steps_P": np.array([0, 1, 2, 4])}, "ascending from 0"),
        ({"actions_TA": np.full((4, 3), np.nan, np.float32)}, "finite actions"),
        ({"images": {"base": good.images["base"].astype(np.float32)}}, "uint8 pictures"),
        ({"images": {"base": good.images["base"]}}, "shapes of the first episode"),
    ]
    with LeRobotWriter(tmp_path / "s", fps=20) as writer:
        writer.add(good)
        for values, text in cases:
            with pytest.raises(DataError, match=text):
                writer.add(RecordedEpisode(**{**change, **values}))
    assert len(LeRobotDataset(tmp_path / "s")) == 1


def test_wrong_settings_of_the_writer(tmp_path: Path) -> None:
    for fps in (0, 12.5, True):
        with pytest.raises(ConfigError, match="whole number"):
            LeRobotWriter(tmp_path / "s", fps=fps)
    with pytest.raises(ConfigError, match="Did you mean 'lossless'"):
        video_settings("losless")
    with (
        pytest.raises(DataError, match="camera names"),
        LeRobotWriter(tmp_path / "s", fps=20) as writer,
    ):
        item = episode(0, 3)
        writer.add(RecordedEpisode(**{**item.__dict__, "images": {"a/b": item.images["base"]}}))
