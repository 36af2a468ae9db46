"""LIBERO's hdf5 demonstrations, written here by hand in robomimic's layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import ConfigError, DataError
from mmrl.robotics.datasets import open_demonstrations
from mmrl.robotics.datasets.libero_hdf5 import LiberoHdf5

h5py = pytest.importorskip("h5py")
LENGTHS = {0: 4, 1: 6, 2: 3, 10: 5}
NAME = "KITCHEN_SCENE3_turn_on_the_stove_demo.hdf5"


def write(
    path: Path, instruction: object = "turn on the stove", failing: int = 2
) -> dict[int, dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    written: dict[int, dict[str, np.ndarray]] = {}
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        if instruction is not None:
            data.attrs["problem_info"] = json.dumps(
                {"problem_name": "x", "language_instruction": instruction}
            )
        for number, T in LENGTHS.items():
            demo = data.create_group(f"demo_{number}")
            values = {
                "actions": rng.uniform(-1, 1, (T, 7)),
                "ee_pos": rng.normal(size=(T, 3)),
                "ee_ori": rng.normal(size=(T, 3)),
                "gripper_states": rng.normal(size=(T, 2)),
                "base": rng.integers(0, 256, (T, 16, 16, 3)).astype(np.uint8),
                "wrist": rng.integers(0, 256, (T, 16, 16, 3)).astype(np.uint8),
            }
            demo["actions"] = values["actions"]
            demo["dones"] = demo["rewards"] = np.eye(1, T, T - 1, dtype=np.uint8)[0] * (
                number != failing
            )
            demo["states"] = rng.normal(size=(T, 11))
            for key in ("ee_pos", "ee_ori", "gripper_states"):
                demo[f"obs/{key}"] = values[key]
            demo["obs/agentview_rgb"], demo["obs/eye_in_hand_rgb"] = values["base"], values["wrist"]
            written[number] = values
    return written


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / NAME)
    return tmp_path / NAME


def test_demonstrations_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    written = write(tmp_path / NAME)
    demos = LiberoHdf5(tmp_path / NAME, rotate180=False)
    assert [len(demo) for demo in demos] == [4, 6, 3, 5] and len(demos) == 4
    for demo, number in zip(demos, LENGTHS, strict=True):
        values = written[number]
        np.testing.assert_allclose(demo.actions_TA, values["actions"], rtol=1e-6)
        proprio = np.concatenate(
            [values["ee_pos"], values["ee_ori"], values["gripper_states"]], axis=1
        )
        np.testing.assert_allclose(demo.proprio_TS, proprio, rtol=1e-6)
        assert (
            demo.actions_TA.dtype == demo.proprio_TS.dtype == np.float32
            and demo.proprio_TS.shape[1] == 8
        )
        np.testing.assert_array_equal(demo.pictures("base"), values["base"])
        np.testing.assert_array_equal(demo.pictures("wrist", [2, 0, 2]), values["wrist"][[2, 0, 2]])
        assert (
            demo.instruction == "turn on the stove"
            and demo.success == (number != 2)
            and demo.source.endswith(f"demo_{number}")
        )


def test_pictures_are_turned_by_180_degrees_unless_told_otherwise(tmp_path: Path) -> None:
    written = write(tmp_path / NAME)
    demo = LiberoHdf5(tmp_path / NAME)[0]
    np.testing.assert_array_equal(
        demo.pictures("base"), np.rot90(written[0]["base"], 2, axes=(1, 2))
    )
    np.testing.assert_array_equal(
        demo.observation(3).images["wrist"], np.rot90(written[0]["wrist"][3], 2)
    )


def test_only_successes_and_chosen_cameras(file: Path) -> None:
    demos = LiberoHdf5(file, keep="success", cameras=["wrist"])
    assert [len(demo) for demo in demos] == [4, 6, 5] and demos[0].cameras == ("wrist",)
    with pytest.raises(DataError, match="expected a camera of wrist"):
        demos[0].pictures("base")
    with pytest.raises(ConfigError, match="Did you mean 'wrist'"):
        LiberoHdf5(file, cameras=["wirst"])
    with pytest.raises(ConfigError, match="all or success"):
        LiberoHdf5(file, keep="some")


@pytest.mark.parametrize(
    "told, expected",
    [
        (["turn", " on"], "turn on"),
        ('"open the drawer"', "open the drawer"),
        ("", "turn on the stove"),
        (None, "turn on the stove"),
    ],
)
def test_instructions_in_all_their_spellings(tmp_path: Path, told: object, expected: str) -> None:
    write(tmp_path / NAME, told)
    assert LiberoHdf5(tmp_path / NAME)[0].instruction == expected


def test_a_folder_of_files_is_one_set(tmp_path: Path) -> None:
    write(tmp_path / "b_demo.hdf5", None)
    write(tmp_path / "a_task_demo.hdf5", None)
    demos = open_demonstrations(tmp_path)
    assert len(demos) == 8 and [demos[0].instruction, demos[4].instruction] == ["a task", "b"]
    assert len(open_demonstrations(tmp_path / "b_demo.hdf5", keep="success")) == 3


def test_files_that_are_damaged_or_of_another_layout(tmp_path: Path, file: Path) -> None:
    with pytest.raises(DataError, match=r"none\.hdf5, found none"):
        LiberoHdf5(tmp_path / "none.hdf5")
    short = tmp_path / "short.hdf5"
    short.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(DataError, match="expected an hdf5 file"):
        LiberoHdf5(short)
    with h5py.File(tmp_path / "other.hdf5", "w") as other:
        other["episodes"] = np.zeros(3)
    with pytest.raises(DataError, match=r"group data .* found episodes"):
        LiberoHdf5(tmp_path / "other.hdf5")
    with h5py.File(tmp_path / "empty.hdf5", "w") as empty:
        empty.create_group("data")
    with pytest.raises(DataError, match="demo_0 and so on"):
        LiberoHdf5(tmp_path / "empty.hdf5")


def replace(file: Path, key: str, value: np.ndarray | None) -> None:
    with h5py.File(file, "a") as opened:
        del opened["data/demo_0"][key]
        if value is not None:
            opened["data/demo_0"][key] = value


@pytest.mark.parametrize(
    "key, value, text",
    [
        ("actions", None, "expected actions, found"),
        ("actions", np.zeros((0, 7)), r"shape \(T, D\)"),
        ("actions", np.full((4, 7), np.nan), "finite actions"),
        ("obs", None, "expected a group obs"),
        ("obs/ee_pos", np.zeros((3, 3)), r"ee_pos of shape \(4, D\)"),
        ("obs/agentview_rgb", np.zeros((3, 16, 16, 3), np.uint8), r"pictures \(4, H, W, 3\)"),
        ("obs/agentview_rgb", np.zeros((4, 16, 16, 3), np.float32), "found float32"),
    ],
)
def test_demos_that_do_not_fit(file: Path, key: str, value: np.ndarray | None, text: str) -> None:
    replace(file, key, value)
    demos = LiberoHdf5(file)
    with pytest.raises(DataError, match=text):
        demos[0]
    assert len(demos[1]) == 6  # the others stay readable


def test_a_camera_that_is_not_in_the_file(file: Path) -> None:
    replace(file, "obs/eye_in_hand_rgb", None)
    assert LiberoHdf5(file)[0].cameras == ("base",)
    with pytest.raises(DataError, match="expected pictures obs/eye_in_hand_rgb"):
        LiberoHdf5(file, cameras=["wrist"])[0]
