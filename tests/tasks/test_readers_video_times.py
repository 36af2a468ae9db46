"""Video sets with times and tracks: spans in seconds as they are, frames and boxes that belong together."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from assets.make_video_task_fixtures import BLUE, red_box
from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.tasks.readers import read_any
from mmrl.tasks.readers.videos import adjusted
from tests.tasks.video_sets_kit import change_first

_FRAME = CoordFrame.ABS_ORIG


# sentences with times


def test_charades_ends_behind_the_video_stay(fixtures: dict[str, str], own: Any) -> None:
    readout = read_any(fixtures["charades_sta"])
    assert [s.answer for s in readout] == [[list(BLUE)], [[0.0, 3.4]], [[2.0, 3.0]]]
    assert readout.samples[2].question == "the blue square ## is gone."
    assert not adjusted(readout) and readout.notes == {"true time reaches out of its clip, kept": 1}
    path = own("charades_sta")
    (path.parent / "Charades_v1_test.csv").write_text("id,length\n3MSZA,2.50\n")
    assert [s.answer[0][1] for s in read_any(path)] == [2.0, 3.4, 3.0] and read_any(path).samples[
        0
    ].params["duration"] == 2.5
    assert read_any(path, probe=False).samples[0].params == {"vid": "3MSZA", "duration": 2.5}
    (path.parent / "Charades_v1_test.csv").unlink()
    assert [s.params["duration"] for s in read_any(path, probe=False)] == [3.0] * 3, (
        "the file tells where no csv does"
    )
    (path.parent / "lengths.csv").write_text("id,length\n3MSZA,long\n")
    with pytest.raises(
        DataError, match=r"lengths\.csv: row 2: expected seconds in 'length', found 'long'"
    ):
        read_any(path, durations=str(path.parent / "lengths.csv"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"3MSZA 1.0 2.0 a sentence", "VIDEO START END##SENTENCE"),
        (b"3MSZA 1.0##x", "VIDEO START END##SENTENCE"),
        (b"3MSZA one two##x", "START and END as numbers"),
        (b"3MSZA nan 2##x", "'START END' in seconds"),
        (b"3MSZA 1 2##  ", "text in 'sentence'"),
        (b"NOVID 1 2##x", "the video 'NOVID'"),
        (b"3MSZA 1 2##\xff\xfe", "UTF-8 text"),
    ],
)
def test_a_bad_charades_line_is_named_and_the_others_are_kept(
    own: Any, line: bytes, words: str
) -> None:
    path = own("charades_sta")
    path.write_bytes(b"\xef\xbb\xbf3MSZA 0 1##first\n\n" + line + b"\n3MSZA 0 2##last\n")
    with pytest.raises(DataError, match=r"charades_sta_test\.txt: row 3: expected ") as caught:
        read_any(path, "charades_sta")
    assert words in str(caught.value)
    readout = read_any(path, "charades_sta", on_error="record")
    assert [s.question for s in readout] == ["first", "last"] and readout.rows == [1, 4]
    assert [str(r) for r in readout.rejected] == [str(caught.value)]


def test_queries_without_a_time_in_their_video_are_left_out_and_counted(own: Any) -> None:
    """As the 7 of Charades-STA's training file (VideoX 2D-TAN's copy, read 2026-11-23) and the 4 of ActivityNet's."""
    path = own("charades_sta")
    path.write_text(
        "3MSZA 0 1##first\n3MSZA 2.0 1.0##x\n3MSZA 1.0 1.0##x\n3MSZA 3.2 4.0##x\n3MSZA -1 0##x\n3MSZA -0.1 9##last\n"
    )
    readout = read_any(path, "charades_sta")
    assert readout.skipped == {
        "query that ends before it starts, or at once": 2,
        "query outside its video": 2,
    }
    assert [s.answer for s in readout] == [[[0, 1]], [[-0.1, 9]]] and not readout.rejected
    assert readout.notes == {"true time reaches out of its clip, kept": 1}
    path = own("activitynet")
    rows = json.loads(path.read_text())
    rows["v_QOlSCBRmfWY"]["timestamps"][0] = [3.5, 4]
    path.write_text(json.dumps(rows))
    readout = read_any(path)
    assert [s.id for s in readout] == ["v_QOlSCBRmfWY-1"] and readout.skipped == {
        "query outside its video": 1
    }


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (
            {"timestamps": [[0, 1]], "sentences": []},
            "'timestamps' and 'sentences' of equal length for video 'v_2'",
        ),
        ([], "equal length"),
        ({"duration": None, "timestamps": [[0, 1]], "sentences": ["x"]}, "'duration' in seconds"),
        (
            {"duration": 3, "timestamps": [[0, 1, 2]], "sentences": ["x"]},
            "[start, end] in 'timestamps'",
        ),
        (
            {"duration": 3, "timestamps": [["0", "1"]], "sentences": ["x"]},
            "'timestamps' in seconds",
        ),
        ({"duration": 3, "timestamps": [[0, 1]], "sentences": [None]}, "text in 'sentence'"),
    ],
)
def test_bad_caption_entries(own: Any, entry: Any, words: str) -> None:
    path = own("activitynet")
    good = json.loads(path.read_text())
    shutil.copy(path.parent / "videos/v_QOlSCBRmfWY.mp4", path.parent / "videos/v_2.mp4")
    path.write_text(json.dumps({**good, "v_2": entry}))
    with pytest.raises(DataError, match="row 3: expected ") as caught:
        read_any(path, "activitynet")
    assert words in str(caught.value)
    assert len(read_any(path, "activitynet", on_error="record")) == 2
    path.write_text("[]")
    with pytest.raises(DataError, match=r"expected \{video: "):
        read_any(path, "activitynet")


def test_one_bad_sentence_of_a_video_does_not_lose_the_others(own: Any) -> None:
    path = own("activitynet")
    rows = json.loads(path.read_text())
    rows["v_QOlSCBRmfWY"]["timestamps"][0] = [3.5, "4"]
    path.write_text(json.dumps(rows))
    readout = read_any(path, on_error="record")
    assert [s.id for s in readout] == ["v_QOlSCBRmfWY-1"] and [r.row for r in readout.rejected] == [
        1
    ]


def test_qvhighlights_keeps_what_submissions_need_and_refuses_rows_without_truth(
    own: Any, fixtures: dict[str, str]
) -> None:
    sample = read_any(fixtures["qvhighlights"]).samples[1]
    assert sample.answer == [[0.0, 1.0], [2.0, 3.0]] and sample.id == "2580"
    assert sample.params["qid"] == 2580 and sample.params["saliency_scores"] == [
        [4, 3, 4],
        [2, 1, 2],
    ]
    path = change_first(own("qvhighlights"), {"relevant_windows": None})
    with pytest.raises(
        DataError, match=r"row 1: expected 'relevant_windows'.*the released test file has no truth"
    ):
        read_any(path, "qvhighlights")
    change_first(path, {"relevant_windows": []})
    with pytest.raises(
        DataError, match=r"row 1: expected 'relevant_windows' as a list of \[start, end\]"
    ):
        read_any(path)


def test_nextgqa_joins_its_three_files(fixtures: dict[str, str], own: Any) -> None:
    readout = read_any(fixtures["nextgqa"])
    assert {s.id: s.answer for s in readout} == {
        "3238737531-1": {"choice": "B", "spans": [list(BLUE)]},
        "3238737531-4": {"choice": "A", "spans": [[0.0, 1.0], [2.0, 3.0]]},
    }
    assert (
        readout.skipped == {"question without spans": 1}
        and readout.samples[0].params["type"] == "TC"
    )
    path = own("nextgqa")
    for start in ("test.csv", "gsub_test.json"):
        assert read_any(path / start).samples[1].answer == readout.samples[1].answer
    (path / "map_vid_vidorID.json").unlink()
    with pytest.raises(DataError, match=r"row 2: expected the video '3238737531'"):
        read_any(path)
    (path / "videos/1164/3238737531.mp4").rename(path / "videos/3238737531.mp4")
    assert len(read_any(path)) == 2
    with pytest.raises(
        ConfigError, match=r"unknown split 'train' of NExT-GQA; expected test or val"
    ):
        read_any(path, split="train")
    with pytest.raises(
        DataError, match=r"expected val\.csv and gsub_val\.json in .*found no val\.csv"
    ):
        read_any(path, split="val")


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("answer", "a dog", "one of the options"),
        ("a3", "", "text in 'a3'"),
        ("width", "wide", "'width' in pixels"),
        ("question", " ", "text in 'question'"),
        ("video_id", "1", "with 'duration' and 'location'"),
    ],
)
def test_bad_nextgqa_rows(own: Any, column: str, value: str, words: str) -> None:
    path = own("nextgqa") / "test.csv"
    with path.open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    rows[0][column] = value
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(DataError, match=r"test\.csv: row 2: expected ") as caught:
        read_any(path)
    assert words in str(caught.value)
    assert len(read_any(path, on_error="record")) == 1
    path.write_text("video_id,question\n1,x\n")
    with pytest.raises(DataError, match="expected a column 'answer', found video_id, question"):
        read_any(path)


# tracking


def test_got10k_frames_times_and_labels(fixtures: dict[str, str]) -> None:
    sample = read_any(fixtures["got10k"], frames=9).samples[0]
    assert list(sample.answer["boxes"]) == ["0", "0.1", "0.2", "0.4", "0.6", "0.7", "0.8"], (
        "absent in frame 3, covered in frame 5"
    )
    for key, box in sample.answer["boxes"].items():
        assert tuple(box) == red_box(round(float(key) * 10))
    assert (
        sample.params["first_box"] == list(map(float, red_box(0)))
        and sample.params["object"] == "red square"
    )
    assert sample.params["video"] == {
        "kind": "timestamps",
        "timestamps": [i / 10 for i in range(9)],
        "folder_fps": 10.0,
    }
    assert sample.params["duration"] == pytest.approx(0.9) and sample.question == "the red square"
    fewer = read_any(fixtures["got10k"], frames=3).samples[0]
    assert fewer.params["video"]["timestamps"] == [0.0, 0.4, 0.8]
    assert (
        read_any(Path(fixtures["got10k"]).parent, split="val").samples[0].id
        == read_any(fixtures["got10k"]).samples[0].id
    )
    with pytest.raises(ConfigError, match="frames as a whole number from 2 to 768"):
        read_any(fixtures["got10k"], frames=1)
    with pytest.raises(DataError, match=r"expected train/list\.txt in"):
        read_any(Path(fixtures["got10k"]).parent, split="train")


def test_got10k_shows_the_frames_it_has_boxes_for(fixtures: dict[str, str]) -> None:
    from mmrl.video.decode import read_clip
    from mmrl.video.sampling import FrameSampling

    sample = read_any(fixtures["got10k"]).samples[0]
    clip = read_clip(sample.videos[0], FrameSampling(**sample.params["video"]))
    assert list(clip.timestamps_s) == pytest.approx(sample.params["video"]["timestamps"])
    for number, seconds in enumerate(sample.params["video"]["timestamps"]):
        box = sample.answer["boxes"].get(f"{seconds:g}")
        if box:
            x1, y1, x2, y2 = map(int, box)
            assert (
                clip.rgb_THWC[number, y1 + 3 : y2 - 3, x1 + 3 : x2 - 3, 0].mean()
                > 180
                > 120
                > clip.rgb_THWC[number, y1 + 3 : y2 - 3, x1 + 3 : x2 - 3, 1].mean()
            ), "the box is red"


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (
            "groundtruth.txt",
            "4,24,14,14\n",
            "one per frame, found the first one only; the test split's boxes are not published",
        ),
        ("groundtruth.txt", "4,24,14,14\n" * 8, "9 boxes in groundtruth.txt"),
        ("groundtruth.txt", "4,24,14\n" * 9, "x,y,width,height"),
        ("absence.label", "0\n" * 8, "9 numbers in"),
        ("cover.label", "x\n" * 9, "whole numbers in"),
        ("absence.label", "1\n" + "0\n" * 8, "a visible object in the first frame"),
        ("groundtruth.txt", "", "9 boxes"),
    ],
)
def test_bad_got10k_sequences(own: Any, file: str, content: str, words: str) -> None:
    path = own("got10k")
    (path / "GOT-10k_Val_000001" / file).write_text(content)
    (path / "list.txt").write_text("GOT-10k_Val_000001\nGOT-10k_Val_000002\n")
    with pytest.raises(DataError, match=r"list\.txt: row 1: expected ") as caught:
        read_any(path, "got10k")
    assert words in str(caught.value)
    readout = read_any(path, "got10k", on_error="record")
    assert [r.row for r in readout.rejected] == [
        1,
        2,
    ] and "the video 'GOT-10k_Val_000002'" in readout.rejected[1].reason


def test_got10k_boxes_are_cut_to_the_picture(own: Any) -> None:
    path = own("got10k")
    truth = path / "GOT-10k_Val_000001/groundtruth.txt"
    lines = truth.read_text().splitlines()
    truth.write_text("\n".join(["-5,-5,20,20", *lines[1:8], "60,40,30,30"]))
    sample = read_any(path).samples[0]
    assert sample.params["first_box"] == [0.0, 0.0, 15.0, 15.0] and sample.answer["boxes"][
        "0.8"
    ] == [60.0, 40.0, 64.0, 48.0]
    assert sample.params["rects"] == {"0": [-5, -5, 20, 20], "0.8": [60, 40, 30, 30]}, (
        "as the annotation has them"
    )
    assert adjusted([sample]) == {"box cut to the picture": 1}


def test_videochat_asks_for_eight_boxes_and_shows_seven_frames(
    fixtures: dict[str, str], own: Any
) -> None:
    sample = read_any(fixtures["videochat_got"]).samples[0]
    assert list(sample.answer["boxes"]) == list("01234567") and sample.params["keys"] == "frames"
    assert sample.answer["boxes"]["7"] == pytest.approx(red_box(7), abs=0.04)
    assert len(sample.params["video"]["timestamps"]) == 7 and sample.params[
        "first_box"
    ] == pytest.approx(red_box(0), abs=0.04)
    for change, words in (
        ({"gt": [[0, 0, 1, 1]]}, "'gt' as 8 boxes, found 1"),
        ({"gt": [[0, 0, 2, 2]] * 8}, "a box inside the picture"),
        ({"object": None}, "text in 'object'"),
        ({"path": "none"}, "the video 'none'"),
        ({"gt": 3}, "'gt' as 8 boxes"),
    ):
        path = change_first(own("videochat_got"), change)
        with pytest.raises(DataError, match=r"got_val\.json: row 1: expected ") as caught:
            read_any(path, "videochat_got")
        assert words in str(caught.value)
        shutil.rmtree(path.parent)
