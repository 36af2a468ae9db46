"""Video sets of questions: letters, parts, pictures and subtitles, and the traps of their protocols."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.registry import task_from_spec
from mmrl.task import Template
from mmrl.tasks.readers import detect_format, read_any
from mmrl.tasks.readers.common import RowError, SkipRow
from mmrl.tasks.readers.mvbench import TASKS
from mmrl.tasks.readers.subtitles import (
    Line,
    read_json_lines,
    read_srt,
    shown_lines,
    with_subtitles,
)
from mmrl.tasks.readers.videos import adjusted, clip_facts, letter_of, spans_of
from mmrl.types import RewardContext
from tests.kits.clock_kit import takes_less
from tests.tasks.video_sets_kit import by_id, change_first

_FRAME = CoordFrame.ABS_ORIG


def test_videomme_options_lose_their_letters_and_subtitles_are_a_protocol_of_their_own(
    fixtures: dict[str, str],
) -> None:
    plain, said = (by_id(read_any(fixtures["videomme"], subtitles=flag)) for flag in (False, True))
    assert (
        plain["001-1"].params["options"] == ["1.", "2.", "3.", "4."]
        and plain["001-1"].answer == "B"
    )
    assert (
        plain["001-1"].params["duration_group"] == "short"
        and plain["001-1"].params["category"] == "Counting Problem"
    )
    assert said["001-1"].question == (
        "This video's subtitles, in seconds from its beginning:\n[0.5-1] here it comes\n[1-2] the "
        "blue square\n\nHow many squares are there at most?"
    ), "the line after the end is left out"
    assert said["002-1"].question.startswith(
        "This video's subtitles, in seconds from its beginning:\nNo subtitles available."
    )
    with pytest.raises(ConfigError, match=r"reader\.subtitles true or false"):
        read_any(fixtures["videomme"], subtitles="yes")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"duration": "tiny"}, "duration short, medium or long"),
        ({"options": ["A. x"]}, "2 to 26 options"),
        ({"answer": "E"}, "one of A."),
        ({"videoID": None}, "text in 'videoID'"),
        ({"task_type": ""}, "text in 'task_type'"),
        ({"options": [1, 2]}, "options as a list"),
    ],
)
def test_bad_videomme_rows(own: Any, change: dict[str, Any], words: str) -> None:
    folder = own("videomme")
    rows = pq.read_table(next(folder.glob("*.parquet"))).to_pylist()
    path = folder / "rows.json"
    path.write_text(json.dumps(rows))
    change_first(path, change)
    with pytest.raises(DataError, match="row 1: expected ") as caught:
        read_any(path, "videomme")
    assert words in str(caught.value)
    assert len(read_any(path, "videomme", on_error="record")) == 1


def test_mvbench_letters_parts_and_folders_of_frames(fixtures: dict[str, str]) -> None:
    assert len(TASKS) == 20
    samples = by_id(read_any(fixtures["mvbench"]))
    assert {k: s.answer for k, s in samples.items()} == {
        "action_sequence-1": "B",
        "character_order-1": "B",
        "episodic_reasoning-1": "A",
        "episodic_reasoning-2": "A",
    }
    assert samples["character_order-1"].params["options"] == ["B", "A"], (
        "the option 'A' is the second: its letter is B"
    )
    assert samples["action_sequence-1"].params["duration"] == 2.0
    assert samples["episodic_reasoning-1"].params["video"] == {
        "folder_fps": 3.0,
        "start": 1.0,
        "end": 2.0,
    }
    assert samples["episodic_reasoning-2"].params["duration"] == 2.0, "six frames at 3 per second"
    assert adjusted(samples.values()) == {"part outside the clip, all of it is shown": 1}
    one = read_any(fixtures["mvbench"], tasks=["character_order"])
    assert [s.id for s in one] == ["character_order-1"]
    with pytest.raises(
        ConfigError, match=r"unknown MVBench task 'action_seq'.*Did you mean 'action_"
    ):
        read_any(fixtures["mvbench"], tasks=["action_seq"])


def test_mvbench_parts_that_are_cut_already_are_shown_whole(own: Any) -> None:
    path = own("mvbench")
    shutil.move(path / "video/star/Charades_v1_480", path / "video/star/Charades_segment")
    sample = read_any(path, tasks=["action_sequence"]).samples[0]
    assert "video" not in sample.params and sample.params["duration"] == 3.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answer": "A dog."}, "one of the options"),
        ({"candidates": "x"}, "'candidates' as a list"),
        ({"start": 2.0, "end": 1.0}, "start before"),
        ({"start": None}, "'start' in seconds"),
        ({"video": "none.mp4"}, "the video 'none.mp4' in"),
        ({"question": 3}, "text in 'question'"),
        ({"candidates": ["The blue square."]}, "2 to 26 options"),
    ],
)
def test_bad_mvbench_rows(own: Any, change: dict[str, Any], words: str) -> None:
    path = change_first(own("mvbench") / "json/action_sequence.json", change)
    with pytest.raises(DataError, match=r"action_sequence\.json: row 1: expected ") as caught:
        read_any(path)
    assert words in str(caught.value)
    path.rename(path.with_name("actions.json"))
    with pytest.raises(
        DataError, match=r"a file named after its task, for example action_sequence\.json"
    ):
        read_any(path.with_name("actions.json"), "mvbench")


def test_equal_options_are_counted_and_the_first_is_right(own: Any) -> None:
    path = change_first(
        own("mvbench") / "json/character_order.json", {"candidates": ["A", "B", "A"]}
    )
    assert read_any(path).samples[0].answer == "A" and adjusted(read_any(path)) == {
        "equal options, the first counts": 1
    }


def test_the_four_forms_of_tempcompass(fixtures: dict[str, str]) -> None:
    samples = by_id(read_any(fixtures["tempcompass"], task="mixed"))
    assert {k: (s.task, s.answer) for k, s in samples.items()} == {
        "multi-choice-1": ("choice", "B"),
        "yes_no-1": ("boolean", False),
        "caption_matching-1": ("choice", "B"),
        "captioning-1": ("open_text", "right"),
    }
    matching = samples["caption_matching-1"]
    assert matching.question == "Which description is a more suitable match for the video?"
    assert matching.params["options"] == ["The blue square stays.", "A blue square comes and goes."]
    assert matching.params["category"] == "order" and matching.params["form"] == "caption_matching"
    choice = read_any(fixtures["tempcompass"], task="choice", only_mine=True)
    assert len(choice) == 2 and choice.skipped == {"task boolean": 1, "task open_text": 1}
    assert [s.id for s in read_any(fixtures["tempcompass"], task="boolean", form="yes_no")] == [
        "yes_no-1"
    ]
    with pytest.raises(ConfigError, match=r"unknown form 'yes-no'.*Did you mean 'yes_no'"):
        read_any(fixtures["tempcompass"], task="mixed", form="yes-no")


@pytest.mark.parametrize(
    ("form", "row", "words"),
    [
        (
            "multi-choice",
            {"question": "Which?", "answer": "A. x"},
            "lines 'A. ...' behind the question",
        ),
        ("multi-choice", {"question": "Which?\nA. x\nB. y", "answer": "C. z"}, "one of A. x; B. y"),
        ("yes_no", {"question": "Is it?", "answer": "perhaps"}, 'true, false, "yes" or "no"'),
        (
            "caption_matching",
            {"question": "Which?\nOption 1: x\nOption 2: y", "answer": "Option 3: z"},
            "one of them as the answer",
        ),
        ("caption_matching", {"question": "Which?", "answer": "Option 1: x"}, "captions such as"),
        ("yes_no", "x", "for video '1034419625'"),
        ("captioning", {"question": "Write.", "answer": None}, "text in 'answer'"),
    ],
)
def test_bad_tempcompass_rows(own: Any, form: str, row: Any, words: str) -> None:
    path = own("tempcompass") / f"{form}.json"
    good = json.loads(path.read_text())
    good["1034419625"]["speed"] = [row]
    path.write_text(json.dumps(good))
    with pytest.raises(DataError, match="row 2: expected ") as caught:
        read_any(path, "tempcompass", task="mixed")
    assert words in str(caught.value)
    assert len(read_any(path, "tempcompass", task="mixed", on_error="record")) == 1


def test_tempcompass_of_the_hub_has_a_folder_per_form(own: Any, tmp_path: Path) -> None:

    questions = own("tempcompass")
    hub = questions.parent / "captioning"
    hub.mkdir()
    row = {
        "video_id": "1034419625",
        "question": "Write.",
        "answer": "x",
        "dim": "speed",
        "mc_question": "Which?\nA. fast\nB. slow",
        "mc_answer": "B. slow",
    }
    pq.write_table(pa.Table.from_pylist([row]), hub / "test-00000-of-00001.parquet")
    assert detect_format(hub) == "tempcompass"
    assert [(s.id, s.answer) for s in read_any(hub, task="mixed")] == [("captioning-1", "slow")]


def test_vsibench_numbers_are_scored_by_mra(fixtures: dict[str, str], own: Any) -> None:
    readout = read_any(fixtures["vsibench"], task="mixed")
    assert [(s.task, s.answer) for s in readout] == [("choice", "B")] * 3 + [
        ("numeric", "2"),
        ("numeric", "64.0"),
    ]
    numeric, ctx = task_from_spec("numeric"), RewardContext(1, 1, _FRAME)
    score = numeric.score(readout.samples[4], "<answer>60</answer>", ctx)
    assert score.metrics["mra"] == pytest.approx(0.9) and score.parts["accuracy"] == pytest.approx(
        0.9
    )
    for change, words in (
        ({"ground_truth": None}, "'ground_truth'"),
        ({"question_type": "colour"}, "one of the problem types"),
        ({"options": []}, "'options' for a question of type"),
        ({"ground_truth": "C"}, "one of A. left; B. right"),
        ({"scene_name": "scene9"}, "the video 'scene9'"),
        ({"dataset": ""}, "text in 'dataset'"),
    ):
        path = change_first(own("vsibench"), change)
        with pytest.raises(DataError, match=r"test\.jsonl: row 1: expected ") as caught:
            read_any(path, "vsibench", task="mixed")
        assert words in str(caught.value)
        shutil.rmtree(path.parent)


def test_videommmu_keeps_the_picture_behind_the_video(fixtures: dict[str, str]) -> None:
    samples = by_id(read_any(fixtures["videommmu"], task="mixed"))
    with_picture, without = (
        samples["Adaptation-dev_Biology_3"],
        samples["Adaptation-dev_Chemistry_4"],
    )
    assert (
        with_picture.question == "What colour has the square?"
        and len(with_picture.images) == len(with_picture.videos) == 1
    )
    assert (
        without.question
        == "How many squares are in the image? (The image is at the end of the video.)"
        and not without.images
    )
    assert (
        without.answer == ["1", "one"]
        and without.task == "open_text"
        and without.params["category"] == "Adaptation"
    )
    inside = by_id(read_any(fixtures["videommmu"], task="mixed", picture_in_video=True))[
        "Adaptation-dev_Biology_3"
    ]
    assert (
        not inside.images
        and inside.question == "What colour has the square? (The image is at the end of the video.)"
    )
    messages = task_from_spec("choice").messages(with_picture, _template())
    assert [item["type"] for item in messages[0]["content"]] == ["video", "image", "text"]
    track = read_any(Path(fixtures["videommmu"]) / "Perception", task="mixed")
    assert [s.id for s in track] == ["Perception-dev_Biology_3"]


def _template() -> Any:

    return Template("plain", _FRAME)


def test_longvideobench_pads_subtitles_and_clocks(fixtures: dict[str, str], own: Any) -> None:
    samples = by_id(read_any(fixtures["longvideobench"]))
    first, padded = samples["86CxyhFV9MI_0"], samples["86CxyhFV9MI_1"]
    assert first.question.startswith(
        "This video's subtitles, in seconds from its beginning:\n[1-2] now it is blue\n\nWhat comes"
    )
    assert "before the part" not in first.question and first.answer == "B"
    assert (
        padded.params["options"] == ["the red one", "the blue one", "none"] and padded.answer == "A"
    )
    assert "[0.5-1] first words\n[2-3] last words" in padded.question
    bare = read_any(fixtures["longvideobench"], subtitles=False).samples[0]
    assert (
        bare.question == "What comes when 'now it is blue' is said?"
        and bare.params["duration_group"] == "15"
    )
    for change, words in (
        ({"correct_choice": 2}, "'correct_choice' from 0 to 1"),
        ({"correct_choice": None}, "test file has no answers"),
        ({"candidates": ["x", "N/A", "y"]}, "'N/A' only behind"),
        ({"subtitle_path": "none.json"}, "subtitles in"),
        ({"subtitle_path": "../lvb_val.json"}, "inside the folder of subtitles"),
        ({"duration": "3"}, "'duration'"),
        ({"starting_timestamp_for_subtitles": None}, "'starting_timestamp_for_subtitles'"),
        ({"candidates": ["x", ""]}, "as texts"),
    ):
        path = change_first(own("longvideobench"), change)
        with pytest.raises(DataError, match=r"lvb_val\.json: row 1: expected ") as caught:
            read_any(path, "longvideobench")
        assert words in str(caught.value)
        shutil.rmtree(path.parent)


def test_mlvu_dev_and_test(fixtures: dict[str, str], own: Any) -> None:
    dev, test = read_any(fixtures["mlvu"], split="dev"), read_any(fixtures["mlvu_test"])
    assert [(s.params["category"], s.answer) for s in dev] == [("plotQA", "B"), ("count", "B")], (
        "the answer '1' is option B"
    )
    assert dev.skipped == {"generation task summary": 1} and dev.samples[0].params["split"] == "dev"
    assert test.samples[0].answer == "E" and len(test.samples[0].params["options"]) == 6
    for change, words in (
        ({"answer": None}, "has no answers"),
        ({"answer": "9"}, "one of A. 6; B. 5"),
        ({"candidates": 3}, "'candidates'"),
        ({"question_type": None}, "text in 'question_type'"),
        ({"candidates": None}, "'candidates', or lines"),
    ):
        path = change_first(own("mlvu_test"), change)
        with pytest.raises(DataError, match=r"test_question\.json: row 1: expected ") as caught:
            read_any(path, "mlvu")
        assert words in str(caught.value)
        shutil.rmtree(path.parent)


def test_mlvu_dev_of_the_hub_has_options_in_the_question_and_letters(own: Any) -> None:
    path = own("mlvu_test")
    rows = [
        {
            "video_name": "test_1.mp4",
            "duration": 3.0,
            "answer": "B",
            "task_type": "count",
            "question": "How many?\n(A) 1\n(B) 2\nOnly give the best option.\nBest option: (",
        }
    ]
    (path.parent / "dev.json").write_text(json.dumps(rows))
    assert detect_format(path.parent / "dev.json") == "mlvu"
    sample = read_any(path.parent / "dev.json").samples[0]
    assert (sample.question, sample.params["options"], sample.answer) == (
        "How many?",
        ["1", "2"],
        "B",
    )


# shared parts


def test_spans_and_letters() -> None:
    assert spans_of([[-0.1, 1.5], (2, 9)], 3.0) == [[-0.1, 1.5], [2.0, 9.0]], "as they are"
    for value in (
        [],
        None,
        "x",
        [[1]],
        [["a", 2]],
        [[1, True]],
        [[float("nan"), 2]],
        [[2, 1]],
        [[5, 6]],
        [[-2, 0]],
        {"a": 1},
    ):
        with pytest.raises(RowError):
            spans_of(value, 3.0)
    for value in ([[2, 1]], [[1, 1]], [[5, 6]], [[-2, 0]]):
        with pytest.raises(SkipRow, match="query"):
            spans_of(value, 3.0, skip=True)
    assert letter_of("A", ["B", "A"]) == ("B", []) and letter_of(" x ", ["x"]) == ("A", [])
    with pytest.raises(RowError, match="an answer that is one of the options"):
        letter_of("y", ["x"])


def test_a_folder_of_frames_lasts_as_long_as_its_rate_says(fixtures: dict[str, str]) -> None:
    folder = next(Path(fixtures["mvbench"]).rglob("friends*"))
    assert clip_facts(str(folder), {})["duration"] == 3.0
    assert clip_facts(str(folder), {"video": {"folder_fps": 3}})["duration"] == 2.0
    assert (
        clip_facts(str(folder), {"video": {"folder_fps": 3, "start": 0.5, "end": 9}})["duration"]
        == 1.5
    )
    with pytest.raises(RowError, match=r"params\.video\.start inside the video of 2 s"):
        clip_facts(str(folder), {"video": {"folder_fps": 3, "start": 2.5}})
    with pytest.raises(DataError, match="folder_fps"):
        clip_facts(str(folder), {"video": {"folder_fps": 0}})


SRT = (
    "1\n00:00:01,500 --> 00:00:02,000\n<i>hello</i>\nworld\n\n2\n01:00:00.000 --> 01:00:01.000 X1:40\n10\n\n3\n"
    "00:01 --> 00:02\n\n"
)


def test_subtitles_are_read_rebased_and_cut() -> None:
    assert read_srt("\ufeff" + SRT.replace("\n", "\r\n")) == [
        Line(1.5, 2.0, "hello world"),
        Line(3600.0, 3601.0, "10"),
    ]
    assert read_srt("") == [] and read_srt("no times here") == []
    with pytest.raises(RowError, match="a time such as"):
        read_srt("1\nsoon --> later\nx\n")
    lines = [
        Line(9, 11, "a"),
        Line(11, 12, "b"),
        Line(11.5, 13, "b"),
        Line(12.5, None, "c"),
        Line(20, 21, "d"),
    ]
    assert shown_lines(lines, 5.0, 10.0) == [
        Line(0.0, 1, "a"),
        Line(1, 2, "b"),
        Line(2.5, 5.0, "c"),
    ]
    assert with_subtitles("Why?", []).endswith("No subtitles available.\n\nWhy?")
    for bad in (
        3,
        ["x"],
        [{"timestamp": [1], "text": "x"}],
        [{"timestamp": [None, 2], "text": "x"}],
        [{"start": 1, "end": 2, "line": "x"}],
        [{"start": "00:00:01", "end": "00:00:02", "line": None}],
    ):
        with pytest.raises(RowError, match=r"reader\.subtitles=false"):
            read_json_lines(bad)


def test_a_long_hostile_subtitle_file_is_read_in_linear_time() -> None:
    def read() -> None:
        assert read_srt("<" * 300_000) == []
        assert len(read_srt("00:00:01 --> 00:00:02\n" + "<a" * 200_000)[0].text) > 1000

    takes_less(3, read)


def test_a_letter_is_the_place_of_an_option_whatever_the_options_say(own: Any) -> None:
    folder = own("videommmu")
    row = {
        "id": "dev_Biology_3",
        "question": "The zone is the area in <image 1> labelled",
        "options": ["C", "B", "D", "A"],
        "answer": "C",
        "question_type": "multiple-choice",
        "link_selected": "",
    }
    (folder / "Adaptation.json").write_text(json.dumps([row]))
    sample = read_any(folder / "Adaptation.json", task="choice", video_root=str(folder)).samples[0]
    assert (
        sample.answer == "C"
        and sample.params["options"][2] == "D"
        and sample.params["category"] == "Adaptation"
    )
    assert (
        sample.question
        == "The zone is the area in the image labelled (The image is at the end of the video.)"
    )
