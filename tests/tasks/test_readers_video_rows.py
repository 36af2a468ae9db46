"""Training rows with videos: Video-R1 and EasyVideoR1, EasyR1, LLaMA-Factory, VLM-R1; truths of tasks about time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assets.make_video_task_fixtures import BLUE, SIZE, red_box
from mmrl.errors import ConfigError, DataError
from mmrl.tasks.readers import read_any
from mmrl.tasks.readers.common import RowError
from mmrl.tasks.readers.problem_types import check_by_task
from mmrl.tasks.readers.video_rows import TIMED, Media, Videos, ask, read_truth, videos_of
from mmrl.video.sampling import FrameSampling
from tests.tasks.video_sets_kit import by_id, change_first, copier


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Video-R1's rows in a folder that a test may change."""
    return copier(tmp_path)("video_rows")


def _rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


# Video-R1 and EasyVideoR1


def test_every_problem_type_goes_to_its_task_with_its_truth(own: Path) -> None:
    samples = by_id(read_any(own, task="mixed"))
    boxes = {str(second): list(map(float, red_box(4 * second))) for second in range(3)}
    assert {k: (s.task, s.answer) for k, s in samples.items()} == {
        "1": ("choice", "B"),
        "2": ("numeric", "2"),
        "3": ("numeric", "14"),
        "4": ("open_text", "A red square moves to the right, a blue one comes and goes."),
        "5": ("ocr", "nothing"),
        "6": ("temporal_grounding", [list(BLUE)]),
        "7": ("st_grounding", {"time": [0.0, 3.0], "boxes": boxes}),
        "8": ("tracking", {"boxes": boxes}),
        "9": ("boolean", False),
        "10": ("choice", "A"),
    }
    assert samples["2"].question == "How many squares are there at most?", (
        "the <video> placeholder is gone"
    )
    assert samples["3"].params["regression"] is True and "regression" not in samples["2"].params
    assert samples["10"].videos and samples["10"].images[0].endswith("scene.png")
    assert all(
        (s.params["width"], s.params["height"], s.params["duration"]) == (*SIZE, 3.0)
        for s in samples.values()
    )


def test_boxes_are_read_in_the_declared_frame(own: Path) -> None:
    rows = [
        r for r in _rows(own) if r["problem_type"] in ("tracking", "spatial-temporal grounding")
    ]
    for row in rows:
        truth = json.loads(row["solution"][8:-9])
        truth["boxes"] = {
            k: [b[0] / SIZE[0], b[1] / SIZE[1], b[2] / SIZE[0], b[3] / SIZE[1]]
            for k, b in truth["boxes"].items()
        }
        row["solution"] = f"<answer>{json.dumps(truth)}</answer>"
    own.write_text(json.dumps(rows))
    for sample in read_any(own, task="mixed", frame="rel1"):
        assert sample.answer["boxes"]["2"] == pytest.approx(red_box(8))
    with pytest.raises(DataError, match=r"row 1: .*declare frame rel1"):
        read_any(own, task="mixed")


@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        (
            5,
            {"solution": '<think>{"time": [24.3, 30.4], "boxes": {}}</think><[PLHD]>'},
            "read the official charades_sta_test.txt",
        ),
        (5, {"solution": "<answer>soon</answer>"}, "the truth of task temporal_grounding as JSON"),
        (5, {"solution": '<answer>{"when": [1, 2]}</answer>'}, 'for example {"time": [2.5, 7]}'),
        (5, {"solution": '<answer>{"time": [8, 9]}</answer>'}, "a span inside the video of 3.0 s"),
        (6, {"solution": '<answer>{"time": [0, 1]}</answer>'}, "the truth of task st_grounding"),
        (7, {"solution": '<answer>{"boxes": []}</answer>'}, "boxes as"),
        (7, {"solution": '<answer>{"boxes": {"x": [1, 2, 3, 4]}}</answer>'}, "key"),
        (7, {"solution": '<answer>{"boxes": {"0": [30, 2, 3, 4]}}</answer>'}, "x1 < x2"),
        (0, {"path": ""}, "'path' with the row's video"),
        (0, {"path": "none.mp4"}, "found none at"),
        (0, {"path": [3]}, "a path to a video"),
        (0, {"path": {"bytes": "x"}}, "a path to a video"),
        (
            1,
            {"problem": "<video><video>How many?"},
            "1 <video> placeholders, one per video, found 2",
        ),
        (0, {"data_type": "audio"}, "data_type"),
        (9, {"image_path": "none.png"}, "readable picture"),
        (0, {"path": "unified_video.json"}, "expected a video"),
        (0, {"problem": "<image>x"}, "0 <image>"),
    ],
)
def test_a_bad_row_is_named_and_the_others_are_kept(
    own: Path, number: int, change: dict[str, Any], words: str
) -> None:
    rows = _rows(own)
    rows[number] = {**rows[number], **change}
    own.write_text(json.dumps(rows))
    with pytest.raises(DataError, match=rf"unified_video\.json: row {number + 1}: ") as caught:
        read_any(own, task="mixed")
    assert words in str(caught.value)
    readout = read_any(own, task="mixed", on_error="record")
    assert len(readout) == 9 and [r.row for r in readout.rejected] == [number + 1]


def test_rows_with_videos_can_be_left_out_and_left_unopened(own: Path) -> None:
    assert read_any(own, task="mixed", images_only=True).skipped == {
        "not pictures only: a row with a video": 10
    }
    (own.parent / "videos/1.mp4").write_bytes(b"broken")
    rows = [
        r
        for r in _rows(own)
        if r["problem_type"] in ("multiple choice", "numerical", "boolean", "temporal grounding")
    ]
    own.write_text(json.dumps(rows))
    readout = read_any(own, task="mixed", probe=False, video={"fps": 1})
    assert len(readout) == len(rows) and all(s.params["video"] == {"fps": 1} for s in readout)
    assert "duration" not in readout.samples[0].params
    with pytest.raises(DataError, match="row 1: expected"):
        read_any(own, task="mixed")


def test_videos_may_lie_elsewhere_than_pictures(own: Path, tmp_path: Path) -> None:
    shutil.move(own.parent / "videos", tmp_path / "elsewhere/videos")
    readout = read_any(own, task="mixed", video_root=str(tmp_path / "elsewhere"))
    assert len(readout) == 10 and readout.samples[9].images[0] == str(own.parent / "scene.png")


# EasyR1, VLM-R1, LLaMA-Factory


def test_easyr1_rows_with_videos(own: Path) -> None:
    path = own.with_name("easyr1.json")
    rows = [
        {
            "problem": "<video>When is the blue square there?",
            "answer": json.dumps({"time": list(BLUE)}),
            "images": [],
            "videos": ["videos/1.mp4"],
            "problem_type": "temporal grounding",
            "data_type": "video",
            "id": "t",
        },
        {
            "problem": "<video><image>Is it a frame?",
            "answer": "A",
            "videos": [{"path": "videos/1.mp4"}],
            "images": ["scene.png"],
            "problem_type": "multiple choice",
            "options": ["yes", "no"],
            "data_type": "video",
            "id": "c",
        },
    ]
    path.write_text(json.dumps(rows))
    samples = by_id(read_any(path, "easyr1", task="mixed"))
    assert (
        samples["t"].answer == [list(BLUE)]
        and samples["t"].question == "When is the blue square there?"
    )
    assert (
        samples["c"].question == "Is it a frame?"
        and len(samples["c"].images) == len(samples["c"].videos) == 1
    )
    assert samples["c"].params["duration"] == 3.0
    assert read_any(path, "easyr1", task="mixed", images_only=True).skipped.total() == 2
    for change, words in (
        ({"videos": []}, "a path in 'videos', because data_type is video"),
        ({"videos": [b"x".hex()]}, "found none at"),
        (
            {"problem": "When?"},
            "1 <video> placeholders, one per video, found 0 placeholders and 1 videos",
        ),
        ({"videos": [{"bytes": "x"}]}, "frames and bytes inside rows are not read"),
    ):
        change_first(path, change)
        with pytest.raises(DataError, match=r"easyr1\.json: row 1: expected ") as caught:
            read_any(path, "easyr1", task="mixed")
        assert words in str(caught.value)
        path.write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match="four different column names"):
        read_any(path, "easyr1", videos_key="images")


def test_vlm_r1_rows_with_videos(own: Path) -> None:
    path = own.with_name("vlm.jsonl")
    path.write_text(
        json.dumps(
            {
                "id": 1,
                "video": "videos/1.mp4",
                "accu_reward_method": "mcq",
                "conversations": [
                    {"from": "human", "value": "<video>Which way?\nA. left\nB. right"},
                    {"from": "gpt", "value": "<answer>B</answer>"},
                ],
            }
        )
        + "\n"
        + json.dumps(
            {
                "id": 2,
                "video": "videos/1.mp4",
                "problem": "a blue square",
                "solution": "1.0 to 2.0",
                "problem_type": "temporal grounding",
            }
        )
    )
    samples = by_id(read_any(path, "vlm_r1", task="mixed"))
    assert samples["1"].answer == "B" and samples["1"].question == "Which way?"
    assert samples["1"].params["options"] == ["left", "right"]
    assert samples["2"].answer == [[1.0, 2.0]] and samples["2"].params["duration"] == 3.0
    assert read_any(path, "vlm_r1", task="mixed", images_only=True).skipped.total() == 2


def test_llama_factory_rows_with_videos(own: Path) -> None:
    folder = own.parent
    row = {
        "conversations": [
            {"from": "human", "value": "<video>What moves?"},
            {"from": "gpt", "value": "a red square"},
        ],
        "videos": ["videos/1.mp4"],
    }
    (folder / "mine.json").write_text(json.dumps([row]))
    own.unlink()
    info = {
        "mine": {
            "file_name": "mine.json",
            "formatting": "sharegpt",
            "columns": {"messages": "conversations", "videos": "videos"},
        }
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    sample = read_any(folder).samples[0]
    assert (
        sample.task == "open_text"
        and sample.videos
        and sample.question == "What moves?"
        and sample.params["duration"] == 3.0
    )
    assert read_any(folder, images_only=True).skipped == {"not pictures only: a row with videos": 1}
    (folder / "mine.json").write_text(json.dumps([{**row, "audios": ["a.wav"]}]))
    assert len(read_any(folder)) == 1, "no column for sound is declared"
    info["mine"]["columns"]["audios"] = "audios"  # type: ignore[index]
    (folder / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(DataError, match=r"a row with audios; name its columns, reader\.columns"):
        read_any(folder)
    info["mine"]["columns"] = {"messages": "conversations"}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(
        DataError, match=r"columns\.videos in dataset_info\.json, because the text has <video>"
    ):
        read_any(folder)


# media under other names


def _messages(text: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "red"}]
    return {"messages": turns}


_TURNS = [{"from": "human", "value": "What moves?"}, {"from": "gpt", "value": "red"}]
_ROWS: dict[str, dict[str, Any]] = {
    "llama_factory": {"conversations": _TURNS},
    "ms_swift": _messages("What moves?"),
    "easyr1": {"problem": "What moves?", "answer": "red"},
    "vlm_r1": {"problem": "What moves?", "solution": "red"},
    "video_r1": {"problem": "What moves?", "solution": "<answer>red</answer>"},
}


def _read(own: Path, name: str, row: dict[str, Any], **options: Any) -> Any:
    """The sample of one row in the format `name`; EasyR1's is given the placeholders that it needs."""
    if name == "easyr1" and row["problem"] == _ROWS["easyr1"]["problem"]:
        marks = [
            f"<{key.removesuffix('s')}>"
            for key in ("image", "images", "video", "videos")
            if row.get(key)
        ]
        row = {**row, "problem": f"{''.join(marks[:1])}{row['problem']}"}
    path = own.with_name(f"{name}.jsonl")
    path.write_text(json.dumps(row))
    options = {"task": "open_text", "format": name.replace("ms_swift", "llama_factory"), **options}
    return read_any(path, **options)


@pytest.mark.parametrize("name", _ROWS)
def test_one_video_or_picture_may_stand_under_its_singular(own: Path, name: str) -> None:
    for key, value, shown in (
        ("video", "videos/1.mp4", "videos"),
        ("videos", ["videos/1.mp4"], "videos"),
        ("image", "scene.png", "images"),
        ("images", ["scene.png"], "images"),
    ):
        (sample,) = _read(own, name, {**_ROWS[name], key: value})
        names = [str(Path(path).relative_to(own.parent)) for path in getattr(sample, shown)]
        assert names == ([value] if isinstance(value, str) else value)
        assert sample.question == "What moves?"
    # as parquet has it, where a row lacks what another has
    (sample,) = _read(
        own, name, {**_ROWS[name], "images": None, "videos": [], "video": "videos/1.mp4"}
    )
    assert len(sample.videos) == 1 and not sample.images
    (sample,) = _read(own, name, {**_ROWS[name], "image": "scene.png", "images": ["scene.png"]})
    assert len(sample.images) == 1


@pytest.mark.parametrize("name", _ROWS)
def test_media_that_would_not_be_shown_are_errors(own: Path, name: str) -> None:
    row = {**_ROWS[name], "video": ["videos/1.mp4"], "videos": ["videos/1.mp4", "videos/2.mp4"]}
    if name == "easyr1":
        row["problem"] = "<video><video>What moves?"
    shutil.copy(own.with_name("videos") / "1.mp4", own.with_name("videos") / "2.mp4")
    (sample,) = _read(own, name, row)
    assert len(sample.videos) == 2
    row |= {"video": ["videos/3.mp4", "videos/2.mp4", "videos/1.mp4"], "videos": ["videos/4.mp4"]}
    if name == "vlm_r1":  # whose first column is the other one
        row |= {"video": row["videos"], "videos": row["video"]}
    with pytest.raises(DataError, match=r"row 1: .*found videos? and videos?, which differ"):
        _read(own, name, row)
    for key in ("audio", "audios"):
        with pytest.raises(DataError, match=r"row 1: .*found a row with audios"):
            _read(own, name, {**_ROWS[name], key: "a.wav"})


_NAN = float("nan")


@pytest.mark.parametrize("name", _ROWS)
def test_sounds_beside_a_video_or_picture_are_left_aside(own: Path, name: str) -> None:
    for audio, counted in (("a.wav", 1), (True, 1), ({"bytes": None, "path": None}, 0), (False, 0)):
        for media in ({"videos": ["videos/1.mp4"]}, {"images": ["scene.png"]}):
            readout = _read(own, name, {**_ROWS[name], **media, "audio": audio})
            assert [len(readout), readout.notes.total()] == [1, counted]
            assert all("sounds" in note for note in readout.notes)
    asked = json.loads(
        json.dumps({**_ROWS[name], "image": "scene.png"}).replace("What", "<audio>What")
    )
    for row in (asked, _ROWS[name]):
        with pytest.raises(DataError, match=r"row 1: .*found a row with audios; name its columns"):
            _read(own, name, {**row, "audio": "a.wav"})
        skipped = _read(own, name, {**row, "audio": "a.wav"}, images_only=True).skipped
        assert skipped == {"not pictures only: a row with audios": 1}


@pytest.mark.parametrize("name", _ROWS)
def test_one_medium_may_have_two_spellings_or_columns(own: Path, name: str) -> None:
    shutil.copy(own.with_name("scene.png"), own.with_name("other.png"))
    nothing = {"bytes": None, "path": None}
    two = ["scene.png", "other.png"]
    for media, images, videos, counted in (
        ({"video": "./videos/1.mp4", "videos": ["videos/1.mp4"]}, [], ["1.mp4"], 0),
        ({"video": "videos/1.mp4", "videos": [{"video": "videos/1.mp4"}]}, [], ["1.mp4"], 0),
        ({"image": "scene.png", "images": two}, two, [], 0),
        ({"images": ["scene.png"], "image": nothing}, ["scene.png"], [], 0),
        ({"images": ["scene.png"], "image": _NAN, "videos": [None]}, ["scene.png"], [], 0),
        ({"images": [None], "image": "scene.png", "video": _NAN}, ["scene.png"], [], 0),
        ({"images": ["scene.png"], "image": "other.png"}, ["scene.png"], [], 1),
    ):
        row = {**_ROWS[name], **media}
        if name == "vlm_r1" and counted:
            row |= {"images": "other.png", "image": "scene.png"}
        if name == "easyr1":
            marks = "<image>" * len(images) + "<video>" * len(videos)
            row["problem"] = f"{marks}What moves?"
        readout = _read(own, name, row)
        (sample,) = readout
        assert [Path(path).name for path in sample.images] == images
        assert [Path(path).name for path in sample.videos] == videos
        assert len(readout.notes) == counted and all("left aside" in n for n in readout.notes)
    # what one of them says of how it is shown is not lost
    row = {"video": "videos/1.mp4", "videos": [{"video": "videos/1.mp4", "fps": 1.0}]}
    (sample,) = _read(own, name, {**_ROWS[name], **row})
    assert sample.params["video"] == {"fps": 1.0}
    row["video"] = {"video": "videos/1.mp4", "fps": 2.0}
    with pytest.raises(DataError, match="which differ"):
        _read(own, name, {**_ROWS[name], **row})


def test_video_r1_takes_the_path_of_a_row_first(own: Path) -> None:
    shutil.copy(own.with_name("scene.png"), own.with_name("other.png"))
    row = {**_ROWS["video_r1"], "data_type": "image", "path": "scene.png"}
    for media in ({"image_path": "other.png"}, {"images": ["other.png"]}):
        readout = _read(own, "video_r1", {**row, **media, "video": _NAN})
        assert [Path(path).name for path in readout.samples[0].images] == ["scene.png"]
        assert "left aside: other media than in path" in next(iter(readout.notes))


def test_video_r1_takes_a_clip_for_none_but_a_video(own: Path) -> None:
    row = {**_ROWS["video_r1"], "data_type": "image", "path": "scene.png", "video": "videos/1.mp4"}
    with pytest.raises(DataError, match="data_type video, because the row names a video"):
        _read(own, "video_r1", row)
    (sample,) = _read(
        own, "video_r1", {**row, "data_type": "video", "path": "", "image": "scene.png"}
    )
    assert len(sample.videos) == len(sample.images) == 1


def test_a_message_goes_before_the_column_of_its_row(own: Path) -> None:
    asked = {"type": "text", "text": "What moves?"}
    row = _messages([{"type": "video", "video": "videos/1.mp4", "fps": 1.0}, asked])
    for path, counted in (("videos/1.mp4", 0), ("./videos/1.mp4", 0), ("videos/2.mp4", 1)):
        readout = _read(own, "ms_swift", {**row, "videos": [path]})
        (sample,) = readout
        assert [Path(path).name for path in sample.videos] == ["1.mp4"]
        assert sample.params["video"] == {"fps": 1.0} and len(readout.notes) == counted
    with pytest.raises(DataError, match=r"videos of the message and videos, which differ"):
        _read(own, "ms_swift", {**row, "videos": ["videos/2.mp4", "videos/3.mp4"]})
    row = _messages([{"type": "image", "image": "scene.png"}, asked])
    for images in ([{"path": "scene.png", "bytes": None}], [None]):
        readout = _read(own, "ms_swift", {**row, "images": images})
        assert len(readout.samples[0].images) == 1 and not readout.notes


# what is shown of a clip


@pytest.mark.parametrize(
    ("video", "words"),
    [
        ({"video_start": 2, "video_end": 4}, "unknown key 'video_start' in params.video"),
        ({"fps": 2, "num_frames": 8}, "contradict each other"),
        ({"fps": 0}, "video.fps as a number above 0"),
        ({"start": 2, "end": 1}, "video.start before video.end"),
        ({"use_audio_in_video": True}, "name the clip among the audio files"),
        ([2, 4], "params.video as an object"),
    ],
)
def test_a_params_video_that_no_run_can_show_is_an_error_of_its_row(
    own: Path, video: Any, words: str
) -> None:
    path = own.with_name("rows.jsonl")
    good = {"video": "videos/1.mp4", "question": "What moves?", "answer": "red"}
    facts = {"width": SIZE[0], "height": SIZE[1], "duration": 3.0}
    for params, media in (({}, {}), (facts, {}), ({}, {"image": "scene.png"})):
        bad = {**good, **media, "params": {**params, "video": video}}
        path.write_text("\n".join(map(json.dumps, (good, bad))))
        with pytest.raises(DataError, match=r"rows\.jsonl: row 2: ") as caught:
            read_any(path, task="open_text", check=check_by_task)
        assert words in str(caught.value)
        readout = read_any(path, task="open_text", check=check_by_task, on_error="record")
        assert [len(readout), *(r.row for r in readout.rejected)] == [1, 2]


@pytest.mark.parametrize(
    "video", [{"max_frames": 2}, {"min_frames": 1000}, {"kind": "uniform"}, {"num_frames": None}]
)
def test_what_some_run_can_show_is_no_error_of_a_row(own: Path, video: dict[str, Any]) -> None:
    row = {"video": "videos/1.mp4", "question": "What moves?", "answer": "red"}
    path = own.with_name("rows.jsonl")
    path.write_text(json.dumps({**row, "params": {"video": video}}))
    assert len(read_any(path, task="open_text", check=check_by_task)) == 1


def test_settings_of_a_reader_are_checked_before_any_row(own: Path) -> None:
    for probe in (True, False):
        with pytest.raises(ConfigError, match=r"expected video\.fps as a number above 0"):
            read_any(own, task="mixed", video={"fps": 0}, probe=probe, on_error="record")


_PART = {"video_start": 1, "video_end": 2.5, "fps": 1.0, "max_frames": 8, "nframes": None}
_SHOWN = {"start": 1, "end": 2.5, "fps": 1.0, "max_frames": 8}


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("name", _ROWS)
def test_what_qwen_vl_utils_reads_beside_a_video_is_shown(
    own: Path, name: str, probe: bool
) -> None:
    for entry in ({"video": "videos/1.mp4", **_PART}, {"path": "videos/1.mp4", **_SHOWN}):
        for value in (entry, [entry, entry]):
            row = {**_ROWS[name], "videos": value}
            if name == "easyr1" and value is not entry:
                row["problem"] = "<video><video>What moves?"
            (sample,) = _read(own, name, row, probe=probe)
            assert sample.params["video"] == _SHOWN and len(sample.videos) == (
                2 if isinstance(value, list) else 1
            )
            assert sample.params.get("duration") == (1.5 if probe else None)
    # at the top of a row, beside a set's own settings
    top = {
        **_ROWS[name],
        "video": "videos/1.mp4",
        "video_start": 1,
        "video_end": None,
        "nframes": 4000,
        "fps": 25,
        "min_frames": 4.0,
        "max_pixels": float("nan"),
    }
    readout = _read(own, name, top, video={"max_frames": 8})
    assert readout.samples[0].params["video"] == {"start": 1, "min_frames": 4, "max_frames": 8}
    assert readout.samples[0].params["duration"] == 2.0
    # facts of a file, perhaps: nframes would show all of its frames
    assert [note.split(" left")[0] for note in readout.notes] == [
        "fps of a row",
        "nframes of a row",
    ]
    # parquet writes whole numbers beside nulls as floats, pandas nulls as NaN
    nan = float("nan")
    entry = {"video": "videos/1.mp4", "nframes": 8.0, "video_start": nan, "max_pixels": nan}
    (sample,) = _read(own, name, {**_ROWS[name], "videos": [entry], "video_end": nan})
    assert sample.params["video"] == {"num_frames": 8}


@pytest.mark.parametrize(
    ("video", "said", "shown"),
    [
        ({"fps": 2, "max_frames": 64}, {"nframes": 8}, {"num_frames": 8, "max_frames": 64}),
        ({"num_frames": 8}, {"fps": 1.0}, {"fps": 1.0}),
        ({"kind": "uniform", "num_frames": 8}, {"fps": 1.0}, {"kind": "fps", "fps": 1.0}),
        ({"kind": "keyframes"}, {"nframes": 8}, {"kind": "keyframes", "num_frames": 8}),
        ({"min_frames": 16}, {"max_frames": 8}, {"min_frames": 8, "max_frames": 8}),
        ({"fps": 2}, {"video_start": 1}, {"fps": 2, "start": 1}),
    ],
)
def test_a_row_goes_before_the_settings_of_its_reader(
    own: Path, video: dict[str, Any], said: dict[str, Any], shown: dict[str, Any]
) -> None:
    row = {**_ROWS["easyr1"], "videos": [{"video": "videos/1.mp4", **said}]}
    for probe in (True, False):
        (sample,) = _read(own, "easyr1", row, video=video, probe=probe)
        assert sample.params["video"] == shown
        FrameSampling.from_mapping(shown, FrameSampling())  # as a run takes it


@pytest.mark.parametrize("name", _ROWS)
def test_other_keys_beside_a_video_are_left_aside(own: Path, name: str) -> None:
    file = {"id": "x", "name": "clip", "sample_fps": 1.0, "duration": 3.0}
    for said, shown, aside in (
        ({"type": "video", "path": None, "fps": [1.0]}, {"fps": 1.0}, []),
        ({**file, "nframes": 4}, {"num_frames": 4}, list(file)),
        ({"fps": 25, "nframes": 4000}, None, ["fps and nframes"]),
    ):
        entries: list[Any] = [[{"video": "videos/1.mp4", **said}]]
        if name == "ms_swift":
            part = {"type": "video", **entries[0][0]}
            entries.append([part, {"type": "text", "text": "What moves?"}])
        for entry in entries:
            row = {**_ROWS[name], "videos": entry}
            if entry is not entries[0]:
                row = _messages(entry)
            readout = _read(own, name, row)
            assert readout.samples[0].params.get("video") == shown
            assert [n.split(" of a video left")[0].strip("'") for n in readout.notes] == aside


def test_a_message_says_how_its_video_is_shown(own: Path) -> None:
    asked = {"type": "text", "text": "What moves?"}
    for part in (
        {"type": "video", "video": "videos/1.mp4", **_PART},
        {"type": "video_url", "video_url": {"url": "videos/1.mp4", **_PART}},
        {"type": "video", "video": {"path": "videos/1.mp4"}, **_PART},
    ):
        (sample,) = _read(own, "ms_swift", _messages([part, asked]))
        assert sample.params["video"] == _SHOWN and sample.params["duration"] == 1.5
    row = {**_messages([{"type": "video", "fps": 1.0}, asked]), "videos": ["videos/1.mp4"]}
    with pytest.raises(
        DataError, match="row 1: expected the name of a video beside fps in its message"
    ):
        _read(own, "ms_swift", row)
    with pytest.raises(
        DataError, match=r"row 1: .*'max_pixels' 50176; remove it, and set data\.max_pixels"
    ):
        _read(
            own,
            "ms_swift",
            _messages([{"type": "image", "image": "scene.png", "max_pixels": 50176}, asked]),
        )


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize(
    ("videos", "words"),
    [
        ({"max_pixels": 50176}, "'max_pixels' 50176; remove it, and set data.video.max_pixels"),
        ({"resized_height": 224}, "'resized_height' 224"),
        ({"vidoe_start": 2}, "Did you mean 'video_start'"),
        ({"video_start": 2, "video_end": 1}, "video.start before video.end"),
        ({"fps": 1, "num_frames": 4}, "contradict each other"),
        ({"max_frame": 4}, "correct the key, or remove it. Did you mean 'max_frames'"),
        ({"fps": [1.0, 2.0]}, "video.fps as a number above 0"),
        ({"video_start": 2, "start": 1}, "one 'start' of the row's videos"),
        ([{"fps": 1}, {"fps": 2}], "all videos of a row shown alike"),
    ],
)
def test_what_cannot_be_shown_of_a_video_is_an_error_of_its_row(
    own: Path, videos: Any, words: str, probe: bool
) -> None:
    entries = [
        {"path": "videos/1.mp4", **v} for v in (videos if isinstance(videos, list) else [videos])
    ]
    with pytest.raises(DataError, match=r"row 1: ") as caught:
        _read(own, "video_r1", {**_ROWS["video_r1"], "videos": entries}, probe=probe)
    assert words in str(caught.value) and str(caught.value).count("expected") <= 1
    row = {
        **_ROWS["video_r1"],
        "videos": [{"path": "videos/1.mp4", "video_start": 1}],
        "video_start": 2,
    }
    with pytest.raises(
        DataError, match=r"row 1: expected one 'start' of the row's videos, found 1 and 2"
    ):
        _read(own, "video_r1", row)


@pytest.mark.parametrize("name", ["vlm_r1", "llama_factory", "mapped"])
def test_rows_of_llava_video_mark_their_clip_as_a_picture(own: Path, name: str) -> None:
    options: dict[str, Any] = {}
    if name == "mapped":
        columns = {"question": "conversations.0.value", "answer": "conversations.1.value"}
        options = {"columns": {**columns, "video": "video"}}

    def read(text: str, **media: Any) -> Any:
        turns = [{"from": "human", "value": text}, {"from": "gpt", "value": "B. red"}]
        return _read(
            own, name, {"conversations": turns, "video": "videos/1.mp4", **media}, **options
        )

    readout = read("<image>\nWhat moves?")
    (sample,) = readout
    assert (sample.question, len(sample.videos), sample.images) == ("What moves?", 1, ())
    assert readout.notes == {
        "<image> at the start of a question about videos alone, taken for <video>": 1
    }
    both = "videos/1.mp4"
    assert (
        read("<image><image>\nWhat moves?", video=[both, both]).samples[0].question == "What moves?"
    )
    assert not read("<video>\nWhat moves?").notes
    for text, media in (
        ("What moves <image>?", {}),
        ("<image><image>What moves?", {}),
        ("<image>What moves, <image>?", {}),
        ("<image><video>What moves?", {}),
    ):
        with pytest.raises(DataError, match="row 1: expected 0 <image> placeholders"):
            read(text, **media)
    if name != "mapped":
        (sample,) = (
            read("<image>\nWhat moves?", image="scene.png")
            if name == "vlm_r1"
            else read("<video><image>\nWhat moves?", image="scene.png")
        )
        assert len(sample.videos) == len(sample.images) == 1 and "adjusted" not in sample.params


# the shared parts


@pytest.mark.parametrize(
    ("task", "text", "value"),
    [
        ("temporal_grounding", '{"time": [2.5, 7]}', [[2.5, 7]]),
        ("temporal_grounding", "[2.5, 7]", [[2.5, 7]]),
        ("temporal_grounding", "[[1, 2], [4, 6]]", [[1, 2], [4, 6]]),
        ("temporal_grounding", "2.5 to 7", [[2.5, 7.0]]),
        ("temporal_grounding", "<answer> 2.5 - 7 seconds </answer>", [[2.5, 7.0]]),
        ("temporal_grounding", '{"time": [[1, 2], [3, 4]]}', [[1, 2], [3, 4]]),
        ("tracking", "{'boxes': {'0': [1, 2, 3, 4]}}", {"boxes": {"0": [1, 2, 3, 4]}}),
        (
            "st_grounding",
            '{"time": [1, 2], "boxes": {"1": [1, 2, 3, 4]}, "label": "x"}',
            {"time": [1, 2], "boxes": {"1": [1, 2, 3, 4]}},
        ),
        ("grounded_qa", '{"answer": "B", "time": [1, 2]}', {"choice": "B", "spans": [[1, 2]]}),
        ("grounded_qa", '{"choice": "B", "spans": [[1, 2]]}', {"choice": "B", "spans": [[1, 2]]}),
        ("ocr", "<answer>x</answer>", "x"),
    ],
)
def test_truths(task: str, text: str, value: Any) -> None:
    assert read_truth(task, text) == value


@given(st.sampled_from(TIMED), st.text(max_size=60))
def test_any_other_text_is_a_row_error(task: str, text: str) -> None:
    try:
        value = read_truth(task, text)
    except RowError as err:
        assert "expected " in str(err)
    else:
        assert isinstance(value, (list, dict))


def test_placeholders_of_several_videos_are_numbered() -> None:
    media = Media(("a", "b"), ("c",), [], {})
    assert ask("<video><video><image>What differs?", media, "problem") == "What differs?"
    assert (
        ask("<image>Compare <video>with <video>.", media, "problem")
        == "Compare (video 1) with (video 2) ."
    )
    assert ask("What differs?", media, "problem", exact=False) == "What differs?"
    with pytest.raises(RowError, match="2 <video> placeholders, one per video, found 1"):
        ask("<video><image>x", media, "problem", exact=False)
    assert videos_of(None, {}) == videos_of([], {}) == Videos([], {})
    assert videos_of([{"video": "a", "fps": None}, "b"], {}) == Videos(["a", "b"], {})
