"""GUI formats: boxes by the format's convention, actions in one vocabulary, every bad step named."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assets.make_task_fixtures import BUTTONS, SCREEN, episode, make_all, screen_bytes, tree_of
from mmrl.errors import ConfigError, DataError
from mmrl.tasks.readers import read_any
from mmrl.tasks.readers.android_control import element_at
from mmrl.tasks.readers.common import RowError
from mmrl.tasks.readers.gui_steps import direction_of, step_answer
from mmrl.tasks.readers.tfrecord import encode_example, fields, write_records


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_all(tmp_path_factory.mktemp("fixtures"))


BOXES = [list(map(float, box)) for box in BUTTONS.values()]


# ScreenSpot


@pytest.mark.parametrize(
    "name", ["screenspot", "screenspot_v2", "screenspot_hf", "screenspot_pro", "ui_r1"]
)
def test_every_convention_gives_the_same_boxes(fixtures: dict[str, str], name: str) -> None:
    readout = read_any(fixtures[name], task="gui_grounding")
    expected = (
        [BOXES[0], BOXES[2]] if name == "ui_r1" else BOXES * (3 if name == "screenspot" else 1)
    )
    assert [s.answer for s in readout] == [pytest.approx(box) for box in expected]
    for sample in readout:
        assert (
            sample.task == "gui_grounding"
            and (sample.params["width"], sample.params["height"]) == SCREEN
        )
        if name != "ui_r1":
            assert sample.params["ui_type"] in ("text", "icon")


def test_what_is_kept_of_a_row(fixtures: dict[str, str]) -> None:
    v1 = {s.id: s for s in read_any(fixtures["screenspot"])}
    assert {s.params["platform"] for s in v1.values()} == {"mobile", "desktop", "web"}
    sample = v1["screenspot_mobile-1"]
    assert (sample.source, sample.params["data_source"], sample.question) == (
        "ScreenSpot/mobile",
        "android",
        "open search",
    )
    assert read_any(fixtures["screenspot_v2"]).samples[0].source == "ScreenSpot-v2/mobile"
    pro = read_any(fixtures["screenspot_pro"]).samples[0]
    assert pro.id == "android_studio_macos_0" and {**pro.params, "width": 0, "height": 0} == {
        "width": 0,
        "height": 0,
        "platform": "macos",
        "ui_type": "text",
        "application": "android_studio",
        "group": "Dev",
    }


def test_screenspot_v1_and_v2_are_never_taken_for_each_other(
    fixtures: dict[str, str], tmp_path: Path
) -> None:
    for name in ("screenspot", "screenspot_v2"):
        source = Path(fixtures[name])
        shutil.copytree(source if source.is_dir() else source.parent, tmp_path, dirs_exist_ok=True)
    files = sorted(path.name for path in tmp_path.glob("screenspot*.json"))
    with pytest.raises(
        DataError, match=r"expected ScreenSpot v1 or v2 in .*found both .*_v2\.json"
    ):
        read_any(tmp_path)
    for file in files:
        v2 = file.endswith("_v2.json")
        for sample in read_any(tmp_path / file):
            assert sample.source.split("/")[0] == ("ScreenSpot-v2" if v2 else "ScreenSpot")
            folder = "screenspotv2_image" if v2 else "screenspot_imgs"
            assert Path(sample.images[0]).parent.name == folder


def test_the_format_decides_the_convention_and_never_the_numbers(
    fixtures: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "screen.png").write_bytes(screen_bytes())
    row = {
        "id": "a",
        "img_filename": "screen.png",
        "bbox": [10, 8, 30, 40],
        "instruction": "x",
        "data_type": "text",
        "data_source": "windows",
        "file_name": "screen.png",
    }
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    assert read_any(tmp_path / "rows.json").samples[0].answer == [10, 8, 40, 48]
    assert read_any(tmp_path / "rows.json", "screenspot_pro").samples[0].answer == [10, 8, 30, 40]
    with pytest.raises(DataError, match=r"x1 < x2|box inside the picture"):
        read_any(tmp_path / "rows.json", "screenspot_hf", image_root=str(tmp_path))
    # corners of pixels read as [x, y, width, height] leave the picture: the error says which formats hold corners
    (tmp_path / "rows.json").write_text(json.dumps([{**row, "bbox": [50, 60, 80, 90]}]))
    with pytest.raises(
        DataError,
        match=r"rows\.json: row 1: expected a box \[x, y, width, height\] inside the picture.*"
        r"screenspot_pro or ui_r1",
    ):
        read_any(tmp_path / "rows.json")
    (tmp_path / "rows.json").write_text(json.dumps([{**row, "bbox": [0.1, 0.1, 0.2, 0.2]}]))
    with pytest.raises(DataError, match=r"look like shares: declare frame rel1"):
        read_any(tmp_path / "rows.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bbox": [[1, 2, 3, 4], [5, 6, 7, 8]]}, "'bbox' as 4 numbers"),
        ({"bbox": "[1, 2, 3, 4]"}, "'bbox' as 4 numbers"),
        ({"bbox": [1, 2, 3]}, "'bbox' as 4 numbers"),
        ({"bbox": [5, 5, 0, 4]}, "x1 < x2"),
        ({"bbox": [5, 5, float("nan"), 4]}, "finite"),
        ({"instruction": ""}, "text in 'instruction'"),
        ({"img_filename": None}, "a path to a picture"),
        ({"img_filename": "none.png"}, "reader.image_root"),
        ({"id": True}, "an id that is text"),
        (
            {"data_type": "txt"},
            "expected 'data_type' text or icon, found 'txt'; correct the row. Did you mean 'text'?",
        ),
        ({"data_type": "Icon"}, "'data_type' text or icon"),
        ({"data_type": ""}, "'data_type' text or icon"),
        (
            {"data_source": "amiga"},
            "'data_source' as one of ios, android, windows, macos, linux, gitlab, shop, forum, tool",
        ),
        ({"data_source": "windws"}, "Did you mean 'windows'?"),
    ],
)
def test_bad_screenspot_rows(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (tmp_path / "screen.png").write_bytes(screen_bytes())
    row = {
        "id": "a",
        "img_filename": "screen.png",
        "bbox": [10, 8, 30, 40],
        "instruction": "x",
        "data_type": "text",
    }
    (tmp_path / "rows.json").write_text(json.dumps([row, {**row, "id": "b", **change}]))
    with pytest.raises(DataError, match=r"rows\.json: row 2: ") as caught:
        read_any(tmp_path / "rows.json", "screenspot")
    assert words in str(caught.value)
    assert [s.id for s in read_any(tmp_path / "rows.json", "screenspot", on_error="record")] == [
        "a"
    ]


def test_rows_never_make_cells_of_the_mean_that_the_benchmark_has_not(
    fixtures: dict[str, str], tmp_path: Path
) -> None:
    """Where the file's name says the platform, any source will do; Pro's ui_type is text or icon as well."""
    (tmp_path / "screen.png").write_bytes(screen_bytes())
    row = {
        "id": "a",
        "img_filename": "screen.png",
        "bbox": [10, 8, 30, 40],
        "instruction": "x",
        "data_source": "amiga",
    }
    for name in ("screenspot_web.json", "rows.json"):
        (tmp_path / name).write_text(json.dumps([{**row, "data_type": "icon"}]))
    assert (
        read_any(tmp_path / "screenspot_web.json", "screenspot").samples[0].params["platform"]
        == "web"
    )
    with pytest.raises(
        DataError, match=r"rows\.json: row 1: expected 'data_source' as one of .*found 'amiga'"
    ):
        read_any(tmp_path / "rows.json", "screenspot")
    (tmp_path / "rows.json").write_text(json.dumps([{**row, "ui_type": "widget"}]))
    with pytest.raises(DataError, match=r"expected 'ui_type' text or icon, found 'widget'"):
        read_any(tmp_path / "rows.json", "screenspot_pro")


def test_img_size_of_screenspot_pro_must_be_the_pictures(fixtures: dict[str, str]) -> None:
    file = Path(fixtures["screenspot_pro"]) / "annotations/android_studio_macos.json"
    rows = json.loads(file.read_text())
    changed = file.with_name("changed.json")
    changed.write_text(json.dumps([{**rows[0], "img_size": [3840, 2160]}]))
    with pytest.raises(
        DataError, match=r"img_size as the picture has it, \[90, 160\], found \[3840, 2160\]"
    ):
        read_any(changed)
    changed.unlink()


# AndroidControl


def test_android_control_steps(fixtures: dict[str, str]) -> None:
    samples = {s.id: s for s in read_any(fixtures["android_control"])}
    assert len(samples) == 8
    assert samples["episode_140_screenshot_0"].answer == {"action": "open_app", "app": "Maps"}
    click = samples["episode_140_screenshot_1"]
    assert (
        click.answer == {"action": "click", "point": [45, 18]}
        and click.question == "Find a café in Maps"
    )
    assert (
        click.params["history"] == ["Open Maps"]
        and click.task == "gui_action"
        and click.params["level"] == "high"
    )
    assert samples["episode_140_screenshot_2"].answer == {"action": "type", "text": "café"}
    assert samples["episode_140_screenshot_4"].answer == {"action": "scroll", "direction": "down"}
    assert samples["episode_7_screenshot_1"].answer == {"action": "navigate_back"}
    low = read_any(fixtures["android_control"], level="low").samples[1]
    assert low.question == "Find a café in Maps\nStep: Tap the search bar"
    with pytest.raises(ConfigError, match=r"Did you mean 'low'"):
        read_any(fixtures["android_control"], level="lwo")


def test_android_control_splits(fixtures: dict[str, str]) -> None:
    test = read_any(fixtures["android_control"], split="test")
    assert {s.id.split("_")[1] for s in test} == {"140"} and test.skipped == {
        "episodes of other splits": 1
    }
    assert len(read_any(fixtures["android_control"], split="test", subsplit="IDD")) == 5
    assert len(read_any(fixtures["android_control"], split="train", subsplit="IDD")) == 0
    with pytest.raises(
        ConfigError, match=r"unknown subsplit 'app-unseen'.*Did you mean 'app_unseen'"
    ):
        read_any(fixtures["android_control"], subsplit="app-unseen")


def test_the_element_around_a_point(fixtures: dict[str, str]) -> None:
    clicks = {s.id: s.answer for s in read_any(fixtures["android_control"], elements=True)}
    assert (
        clicks["episode_140_screenshot_1"]["bbox"] == BOXES[0]
        and clicks["episode_7_screenshot_0"]["bbox"] == BOXES[2]
    )
    tree = tree_of([(0, 0, 300, 300), (10, 10, 20, 20), (10, 10, 50, 50)])
    assert element_at(tree, (15, 15)) == [10, 10, 20, 20] and element_at(tree, (30, 30)) == [
        10,
        10,
        50,
        50,
    ]
    assert element_at(tree, (200, 200)) == [0, 0, 300, 300]
    assert element_at(tree, (301, 5)) is None and element_at(b"", (1, 1)) is None
    # not visible to the user
    assert element_at(tree.replace(b"\xb8\x01\x01", b"\xb8\x01\x00"), (15, 15)) is None
    for end in range(1, len(tree)):
        with contextlib.suppress(ValueError):
            element_at(tree[:end], (15, 15))
    with pytest.raises(ValueError, match=r"wire type"):
        list(fields(memoryview(b"\x0b")))


def _write(folder: Path, *episodes: Mapping[str, Any]) -> Path:
    path = folder / "android_control-00000-of-00001"
    write_records(path, [encode_example(e) for e in episodes])
    return path


GOOD_STEP: tuple[dict[str, Any], str] = ({"action_type": "wait"}, "Wait")


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ({"action_type": "click", "x": 45}, "a point or a box for action click"),
        ({"action_type": "click", "x": "4", "y": 1}, "numbers"),
        ({"action_type": "scroll"}, "direction"),
        ({"action_type": "click", "x": 450, "y": 1}, "a point inside the picture of 90 x 160"),
        ({"action_type": "scroll", "direction": "sideways"}, "a direction of up, down"),
        ({"action_type": "input_text"}, "the text of"),
        ({"action_type": "open_app", "app_name": 3}, "the app of action open_app"),
        ({}, "text in 'action'"),
        ({"action_type": "fly"}, "an action of the mobile space"),
        ([1], "a JSON object"),
    ],
)
def test_bad_actions_name_record_episode_and_step(tmp_path: Path, action: Any, words: str) -> None:
    path = _write(
        tmp_path,
        episode(3, "g", [GOOD_STEP, (action, "x"), GOOD_STEP]),
        episode(4, "g", [GOOD_STEP]),
    )
    with pytest.raises(
        DataError, match=r"android_control-00000-of-00001: row 1: episode 3, step 1: expected "
    ) as caught:
        read_any(path)
    assert words in str(caught.value)
    readout = read_any(path, on_error="record")
    assert [s.id for s in readout] == [
        "episode_3_screenshot_0",
        "episode_3_screenshot_2",
        "episode_4_screenshot_0",
    ]
    assert len(readout.rejected) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"screenshots": [screen_bytes()]}, "2 values of 'screenshots' for 1 actions, found 1"),
        ({"screenshot_widths": [80, 90]}, "a screenshot of the size the record says"),
        ({"goal": [1]}, "'goal' as a list of bytes"),
        ({"episode_id": []}, "1 values of 'episode_id'"),
        ({"goal": [b"\xff"]}, "UTF-8 text in 'goal'"),
        ({"screenshots": [b"junk", screen_bytes()]}, "picture"),
        ({"actions": [b"{"]}, "an action as JSON"),
        ({"goal": None}, "feature 'goal'"),
        ({"goal": [b" "]}, "text in 'goal'"),
    ],
)
def test_bad_records(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    features = {
        k: v for k, v in {**episode(3, "g", [GOOD_STEP]), **change}.items() if v is not None
    }
    path = _write(tmp_path, features, episode(4, "g", [GOOD_STEP]))
    with pytest.raises(DataError, match=r"row 1: ") as caught:
        read_any(path)
    assert words in str(caught.value)
    assert [s.id for s in read_any(path, on_error="record")] == ["episode_4_screenshot_0"]


def test_a_broken_file_keeps_its_whole_records(tmp_path: Path) -> None:
    path = _write(tmp_path, episode(3, "g", [GOOD_STEP]), episode(4, "g", [GOOD_STEP]))
    plain = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(plain[:-10]))
    with pytest.raises(
        DataError,
        match=r"row 2: expected a complete TFRecord file, found its end.*copy the file again",
    ):
        read_any(path)
    readout = read_any(path, on_error="record")
    assert [s.id for s in readout] == ["episode_3_screenshot_0"] and [
        r.row for r in readout.rejected
    ] == [2]
    path.write_bytes(gzip.compress(plain[:40] + bytes([plain[40] ^ 1]) + plain[41:]))
    readout = read_any(path, on_error="record")
    assert [s.id for s in readout] == [
        "episode_4_screenshot_0"
    ] and "data that agree" in readout.rejected[0].reason
    write_records(path, [b"\xff\xff", encode_example({"a": [1]})])
    readout = read_any(path, on_error="record")
    assert [
        "tf.train.Example" in r.reason or "feature 'episode_id'" in r.reason
        for r in readout.rejected
    ] == [True, True]


def test_an_episode_twice_is_an_error(tmp_path: Path) -> None:
    path = _write(tmp_path, episode(3, "g", [GOOD_STEP]), episode(3, "g", [GOOD_STEP]))
    with pytest.raises(
        DataError,
        match=r"row 2: .*unique ids, found id 'episode_3_screenshot_0' again, first in row 1",
    ):
        read_any(path)


# GUI-Odyssey, GUI-R1, UI-R1


def test_gui_odyssey_steps(fixtures: dict[str, str]) -> None:
    samples = read_any(fixtures["gui_odyssey"], split="random").samples
    assert [s.answer["action"] for s in samples] == [
        "click",
        "navigate_home",
        "scroll",
        "type",
        "long_press",
        "recent_apps",
        "complete",
    ]
    click = samples[0].answer
    assert click["point"] == pytest.approx([22.5, 75.04]) and click["bbox"] == pytest.approx(
        [10.08, 60, 40.05, 90.08]
    )
    assert samples[2].answer["direction"] == "down", "the finger moves up, the view down"
    assert samples[3].answer["text"] == "hello" and samples[4].answer["point"] == pytest.approx(
        [64.98, 75.04]
    )
    assert samples[5].params["history"] == ["navigate_home", "swipe up", "type hello", "long_press"]
    assert samples[0].id == "0042-0" and samples[0].question == "Open Maps and say hello."
    assert read_any(fixtures["gui_odyssey"], split="app", part="train").samples == []
    assert len(read_any(fixtures["gui_odyssey"])) == 7
    assert "history" not in read_any(fixtures["gui_odyssey"], history=0).samples[5].params
    with pytest.raises(ConfigError, match=r"unknown split 'device_split'.*Did you mean 'device'"):
        read_any(fixtures["gui_odyssey"], split="device_split")


@given(st.tuples(*[st.integers(0, 1000)] * 4))
def test_a_direction_turns_around_with_its_points(points: tuple[int, int, int, int]) -> None:
    start, end = points[:2], points[2:]
    if start == end:
        with pytest.raises(RowError, match=r"two different points"):
            direction_of(start, end)
        return
    opposite = {"up": "down", "down": "up", "left": "right", "right": "left"}
    assert direction_of(end, start) == opposite[direction_of(start, end)]
    assert (
        direction_of((500, 900), (480, 100)) == "up" and direction_of((900, 5), (100, 6)) == "left"
    )


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"action": "CLICK", "info": [[1040, 5]]}, "a point inside the picture"),
        ({"action": "CLICK", "info": "KEY_VOLUME"}, "KEY_HOME"),
        ({"action": "CLICK", "info": [[1, 2], [3, 4]]}, "'info' as 2 numbers"),
        ({"action": "SCROLL", "info": [[1, 2]]}, "two points"),
        ({"action": "SCROLL", "info": [[1, 2], [1, 2]]}, "two different points"),
        ({"action": "TEXT", "info": ""}, "the text of"),
        ({"action": None, "info": ""}, "text in 'action'"),
        ({"action": "CLICK", "info": [[1, 2]], "screenshot": "no.png"}, "picture"),
        ({"action": "CLICK", "info": [[1, 2]], "sam2_bbox": [1, 2, 3]}, "'sam2_bbox' as 4 numbers"),
        (7, "a step that is an object"),
    ],
)
def test_bad_odyssey_steps(fixtures: dict[str, str], tmp_path: Path, step: Any, words: str) -> None:
    good = {"step": 0, "screenshot": "0042_0.png", "action": "COMPLETE", "info": ""}
    changed = {**good, "step": 1, **step} if isinstance(step, dict) else step
    file = tmp_path / "0042.json"
    file.write_text(
        json.dumps(
            {"episode_id": "0042", "task_info": {"instruction": "x"}, "steps": [good, changed]}
        )
    )
    shots = str(Path(fixtures["gui_odyssey"]) / "screenshots")
    with pytest.raises(DataError, match=r"0042\.json: row 2: ") as caught:
        read_any(file, "gui_odyssey", image_root=shots, history=0)
    assert words in str(caught.value)
    assert len(read_any(file, "gui_odyssey", image_root=shots, on_error="record")) == 1


def test_a_split_that_names_absent_episodes_is_refused(
    fixtures: dict[str, str], tmp_path: Path
) -> None:
    import shutil

    root = tmp_path / "odyssey"
    shutil.copytree(fixtures["gui_odyssey"], root)
    (root / "splits/task_split.json").write_text(
        json.dumps({"test": ["0042.json", "0043.json"], "train": 3})
    )
    with pytest.raises(DataError, match=r"found 1 missing, the first is 0043"):
        read_any(root, split="task")
    with pytest.raises(DataError, match=r"a list of file names in 'train'"):
        read_any(root, split="task", part="train")


def test_gui_r1_rows(fixtures: dict[str, str]) -> None:
    samples = read_any(fixtures["gui_r1"]).samples
    assert [s.answer for s in samples] == [
        {"action": "click", "bbox": pytest.approx(BOXES[1])},
        {"action": "click", "point": pytest.approx([45, 16])},
        {"action": "type", "text": "hello"},
        {"action": "scroll", "direction": "down"},
        {"action": "navigate_back"},
    ]
    assert samples[2].params["history"] == "click Search" and "history" not in samples[0].params
    assert samples[0].source == "android_control" and samples[0].params["ui_type"] == "text"
    grounding = read_any(fixtures["gui_r1"], task="gui_grounding", only_mine=True)
    assert [s.answer for s in grounding] == [
        pytest.approx(BOXES[1])
    ] and grounding.skipped.total() == 4
    with pytest.raises(
        DataError, match=r"row 2: expected a click on an element's box.*only_mine=true"
    ):
        read_any(fixtures["gui_r1"], task="gui_grounding")
    with pytest.raises(
        DataError, match=r"row 1: expected pixels of the original picture.*declare frame rel1"
    ):
        read_any(fixtures["gui_r1"], frame="abs_orig")


def test_ui_r1_actions_are_another_task(fixtures: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_bytes(screen_bytes())
    rows = [
        {"img_filename": "a.png", "bbox": [10, 8, 80, 28], "instruction": "search"},
        {
            "img_filename": "a.png",
            "bbox": [10, 8, 80, 28],
            "instruction": "tap it",
            "gt_action": "click",
        },
        {
            "img_filename": "a.png",
            "instruction": "go",
            "gt_action": "scroll",
            "gt_input_text": "up",
        },
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    samples = read_any(tmp_path / "rows.json", "ui_r1").samples
    assert [(s.task, s.answer) for s in samples] == [
        ("gui_grounding", [10, 8, 80, 28]),
        ("gui_action", {"action": "click", "bbox": [10, 8, 80, 28]}),
        ("gui_action", {"action": "scroll", "direction": "up"}),
    ]
    readout = read_any(tmp_path / "rows.json", "ui_r1", task="gui_grounding", only_mine=True)
    assert len(readout) == 1 and readout.skipped == {"task gui_action": 2}
    with pytest.raises(DataError, match=r"row 2: expected rows of task gui_grounding"):
        read_any(tmp_path / "rows.json", "ui_r1", task="gui_grounding")


def test_steps_in_one_vocabulary() -> None:
    assert (
        step_answer("CLICK", place=[1, 2])
        == step_answer("Tap", place=(1, 2))
        == {"action": "click", "point": [1, 2]}
    )
    assert step_answer("long-press", place=[1, 2, 3, 4]) == {
        "action": "long_press",
        "bbox": [1, 2, 3, 4],
    }
    assert step_answer("press back", words="unused", place=[1, 2]) == {"action": "navigate_back"}
    with pytest.raises(RowError, match=r"the text of action type"):
        step_answer("input_text", words=None)
