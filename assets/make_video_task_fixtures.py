"""Tiny hand-made data sets in the public formats of questions about videos, for tests and for looking at.

    python -m assets.make_video_task_fixtures assets/fixtures          # or a folder of yours; nothing is downloaded

Each is in the exact layout of its benchmark, a few rows over clips of 64 x 48 pixels, 4 frames per second, 3 seconds: a red
square moves from left to right and, from 1 s to 2 s, a blue square is there. Every truth is true of its clip.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.video.encode import write_video

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["FPS", "FRAMES", "MAKERS", "SIZE", "draw_frames", "make_all", "red_box"]

# T frames, H height, W width, C = 3 channels

SIZE, FPS, FRAMES = (64, 48), 4, 12
"""Width and height, frames per second, number of frames: 3 seconds."""
BLUE, BLUE_BOX = (1.0, 2.0), (40, 4, 56, 16)
"""When the blue square is there, in seconds, and its box in pixels."""


def red_box(frame: int) -> tuple[int, int, int, int]:
    """The red square in pixels, [x1, y1, x2, y2]."""
    x = 4 + 4 * frame
    return x, 24, x + 14, 38


def draw_frames(count: int = FRAMES) -> npt.NDArray[np.uint8]:
    """rgb_THWC of the clip."""
    width, height = SIZE
    rgb_THWC = np.full((count, height, width, 3), 235, np.uint8)
    for frame in range(count):
        x1, y1, x2, y2 = red_box(frame)
        rgb_THWC[frame, y1:y2, x1:x2] = (220, 40, 40)
        if BLUE[0] <= frame / FPS < BLUE[1]:
            x1, y1, x2, y2 = BLUE_BOX
            rgb_THWC[frame, y1:y2, x1:x2] = (40, 60, 200)
    return rgb_THWC


def _clip(path: Path) -> Path:
    return Path(write_video(path, draw_frames(), FPS, quality=40))


def _frames(folder: Path, pattern: str, count: int, first: int = 1) -> Path:
    """The clip as numbered pictures."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for number, rgb in enumerate(draw_frames(count), first):
        Image.fromarray(rgb).save(folder / pattern.format(number), quality=25, optimize=True)
    return folder


def _put(path: Path, content: str | list[Any] | dict[str, Any]) -> Path:
    """Write text, or JSON (one line per row for .jsonl)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, (list, dict)):
        lines = (
            [json.dumps(row, ensure_ascii=False) for row in content]
            if path.suffix == ".jsonl"
            else [json.dumps(content, ensure_ascii=False, indent=1)]
        )
        content = "\n".join(lines) + "\n"
    path.write_bytes(content.encode())
    return path


def _parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def make_charades_sta(folder: Path) -> Path:
    """The txt, its durations and one video; one end lies behind the video's end, one sentence holds ##."""
    _clip(folder / "Charades_v1_480/3MSZA.mp4")
    head = "id,subject,scene,quality,relevance,verified,script,objects,descriptions,actions,length"
    _put(
        folder / "Charades_v1_test.csv",
        f"{head}\n"
        '3MSZA,HR43,Bedroom,6,7,Yes,"A red square moves, a blue one comes.",square,a square moves,c092 0.00 3.00,3.00\n',
    )
    return _put(
        folder / "charades_sta_test.txt",
        "3MSZA 1.0 2.0##a blue square is there.\n"
        "3MSZA 0.0 3.4##a red square moves to the right.\n3MSZA 2.0 3.0##the blue square ## is gone.\n",
    )


def make_activitynet(folder: Path) -> Path:
    """ActivityNet Captions, which VTimeLLM and VideoChat-R1 use as well; sentences may start with a space."""
    _clip(folder / "videos/v_QOlSCBRmfWY.mp4")
    return _put(
        folder / "val_2.json",
        {
            "v_QOlSCBRmfWY": {
                "duration": 3.0,
                "timestamps": [[0.0, 3.0], [1.0, 2.0]],
                "sentences": ["A red square moves to the right.", " A blue square is there."],
            }
        },
    )


def make_qvhighlights(folder: Path) -> Path:
    """A validation file with two windows in one row; clips of two seconds."""
    _clip(folder / "videos/NUsG9BgSes0_210.0_360.0.mp4")
    row = {
        "duration": 3,
        "vid": "NUsG9BgSes0_210.0_360.0",
        "relevant_clip_ids": [0, 1],
        "saliency_scores": [[4, 3, 4], [2, 1, 2]],
    }
    return _put(
        folder / "highlight_val_release.jsonl",
        [
            {"qid": 2579, "query": "a blue square is there", "relevant_windows": [[1, 2]], **row},
            {
                "qid": 2580,
                "query": "no blue square is there",
                "relevant_windows": [[0, 1], [2, 3]],
                **row,
            },
        ],
    )


def make_nextgqa(folder: Path) -> Path:
    """test.csv, gsub_test.json and the map; one question has two spans, one has none."""
    _clip(folder / "videos/1164/3238737531.mp4")
    head = "video_id,frame_count,width,height,question,answer,qid,type,a0,a1,a2,a3,a4\n"
    same = f"3238737531,{FRAMES},{SIZE[0]},{SIZE[1]}"
    _put(
        folder / "gsub_test.json",
        {
            "3238737531": {
                "duration": 3,
                "fps": float(FPS),
                "location": {"1": [[1.0, 2.0]], "4": [[0.0, 1.0], [2.0, 3.0]]},
            }
        },
    )
    _put(folder / "map_vid_vidorID.json", {"3238737531": "1164/3238737531"})
    _put(
        folder / "test.csv",
        head
        + f"{same},what comes while the red square moves,a blue square,1,TC,nothing,a blue square,"
        f'a disc,a cat,text\n{same},"what is there alone, near the start and the end",red square,4,TN,red square,blue square,'
        f"two discs,a dog,a line\n{same},what is the colour of the ground,grey,7,DL,black,grey,green,pink,brown\n",
    )
    return folder


def make_videomme(folder: Path) -> Path:
    """Parquet with options that carry letters, one video with subtitles and one without."""
    for name in ("fFjv93ACGo8", "N1cdUjctpG8"):
        _clip(folder / f"data/{name}.mp4")
    _put(
        folder / "subtitle/fFjv93ACGo8.srt",
        '1\n00:00:00,500 --> 00:00:01,000\n<font color="white" size=".72c">here it comes'
        "</font>\n\n2\n00:00:01,000 --> 00:00:02,000\nthe blue\nsquare\n\n3\n00:00:05,000 --> 00:00:06,000\nafter the end\n",
    )
    base = {
        "domain": "Knowledge",
        "sub_category": "Technology",
        "url": "https://www.youtube.com/watch?v=fFjv93ACGo8",
    }
    _parquet(
        folder / "videomme/test-00000-of-00001.parquet",
        [
            {
                "video_id": "001",
                "duration": "short",
                "videoID": "fFjv93ACGo8",
                "question_id": "001-1",
                "task_type": "Counting Problem",
                "question": "How many squares are there at most?",
                "options": ["A. 1.", "B. 2.", "C. 3.", "D. 4."],
                "answer": "B",
                **base,
            },
            {
                "video_id": "002",
                "duration": "long",
                "videoID": "N1cdUjctpG8",
                "question_id": "002-1",
                "task_type": "Action Recognition",
                "question": "Where does the red square go?",
                "options": ["A. Left.", "B. Up.", "C. Right.", "D. Nowhere."],
                "answer": "C",
                **base,
            },
        ],
    )
    return folder / "videomme"


def make_mvbench(folder: Path) -> Path:
    """Three of the twenty tasks: a part of a video, a folder of frames at 3 per second, and options that are letters."""
    _clip(folder / "video/star/Charades_v1_480/ZS9XR.mp4")
    _clip(folder / "video/perception/videos/video_10909.mp4")
    _frames(folder / "video/tvqa/frames_fps3_hq/friends_s03e09_seg02_clip_07", "{:05d}.jpg", 6)
    _put(
        folder / "json/action_sequence.json",
        [
            {
                "video": "ZS9XR.mp4",
                "question": "What comes after the red square?",
                "candidates": ["A disc.", "The blue square.", "A cat."],
                "answer": "The blue square.",
                "question_id": "T1_1",
                "start": 0.5,
                "end": 2.5,
            }
        ],
    )
    _put(
        folder / "json/character_order.json",
        [
            {
                "video": "video_10909.mp4",
                "question": "Which letter stands for blue?",
                "candidates": ["B", "A"],
                "answer": "A",
            }
        ],
    )
    _put(
        folder / "json/episodic_reasoning.json",
        [
            {
                "video": "friends_s03e09_seg02_clip_07",
                "question": "What is red?",
                "candidates": ["A square.", "A disc."],
                "answer": "A square.",
                "start": 1.0,
                "end": 2.0,
                "fps": 3,
            },
            {
                "video": "friends_s03e09_seg02_clip_07",
                "question": "What moves?",
                "candidates": ["A square.", "A disc."],
                "answer": "A square.",
                "start": 40.0,
                "end": 50.0,
                "fps": 3,
            },
        ],
    )
    return folder


def make_tempcompass(folder: Path) -> Path:
    """The four files of questions/ and one video."""
    _clip(folder / "videos/1034419625.mp4")

    def rows(question: str, answer: str, aspect: str = "direction") -> dict[str, Any]:
        return {"1034419625": {aspect: [{"question": question, "answer": answer}]}}

    _put(
        folder / "questions/multi-choice.json",
        rows("Where does the red square go?\nA. left\nB. right\nC. up", "B. right"),
    )
    _put(folder / "questions/yes_no.json", rows("Is the red square moving to the left?", "no"))
    _put(
        folder / "questions/caption_matching.json",
        rows(
            "Which description is a more suitable match for the video?\nOption 1: The blue square stays.\nOption 2: A blue square "
            "comes and goes.",
            "Option 2: A blue square comes and goes.",
            "order",
        ),
    )
    _put(
        folder / "questions/captioning.json",
        rows(
            "Write a caption that fits one of these.\nInformation A: {'subject': 'red square', 'direction': 'right'}\nInformation B: "  # noqa: E501
            "{'subject': 'red square', 'direction': 'left'}\nGenerated Caption:",
            "A. right",
        ),
    )
    return folder / "questions"


def make_vsibench(folder: Path) -> Path:
    """JSON Lines with one question of each kind, and the three difficulties of relative direction."""
    _clip(folder / "scannet/scene0011_00.mp4")
    base = {"dataset": "scannet", "scene_name": "scene0011_00"}
    direction = [
        {
            "id": n,
            "question_type": f"object_rel_direction_{level}",
            "question": "Where does the red square go?",
            "ground_truth": "B",
            "options": ["A. left", "B. right"],
            **base,
        }
        for n, level in enumerate(("easy", "medium", "hard"))
    ]
    return _put(
        folder / "test.jsonl",
        [
            *direction,
            {
                "id": 3,
                "question_type": "object_counting",
                "question": "How many squares are there?",
                "ground_truth": "2",
                "options": None,
                **base,
            },
            {
                "id": 4,
                "question_type": "room_size_estimation",
                "question": "How wide is the picture, in pixels?",
                "ground_truth": "64.0",
                "options": None,
                **base,
            },
        ],
    )


def make_videommmu(folder: Path) -> Path:
    """Two tracks as parquet: Perception, and Adaptation with a picture in the row and an open question."""
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(draw_frames(1)[0]).save(out, "PNG", optimize=True)
    for name in ("dev_Biology_3", "dev_Chemistry_4"):
        _clip(folder / f"Science/{name}.mp4")
    link = {"link_selected": "https://www.youtube.com/watch?v=U7YqCUd_ZfA"}
    _parquet(
        folder / "Perception/test-00000-of-00001.parquet",
        [
            {
                "id": "dev_Biology_3",
                "question": "Which square moves?",
                "options": ["the red one", "the blue one"],
                "answer": "A",
                "question_type": "perception",
                **link,
            }
        ],
    )
    _parquet(
        folder / "Adaptation/test-00000-of-00001.parquet",
        [
            {
                "id": "dev_Biology_3",
                "question": "<image 1> What colour has the square?",
                "options": ["blue", "red"],
                "answer": "B",
                "question_type": "multiple-choice",
                "image": {"bytes": out.getvalue(), "path": None},
                **link,
            },
            {
                "id": "dev_Chemistry_4",
                "question": "How many squares are in <image 1>?",
                "options": [],
                "answer": "['1', 'one']",
                "question_type": "open",
                "image": None,
                **link,
            },
        ],
    )
    return folder


def make_longvideobench(folder: Path) -> Path:
    """lvb_val.json with candidates and with padded options; subtitles of both shapes, on the clock of the longer video."""
    _clip(folder / "videos/86CxyhFV9MI.mp4")
    _put(
        folder / "subtitles/86CxyhFV9MI_en.json",
        [
            {"start": "00:00:10.000", "end": "00:00:20.500", "line": "before the part"},
            {"start": "00:00:31.000", "end": "00:00:32.000", "line": "now it is blue"},
        ],
    )
    _put(
        folder / "subtitles/other.json",
        [
            {"timestamp": [30.5, 31.0], "text": "first words"},
            {"timestamp": [32.0, None], "text": "last words"},
        ],
    )
    base = {
        "video_id": "86CxyhFV9MI",
        "video_path": "86CxyhFV9MI.mp4",
        "duration": 3.0,
        "duration_group": 15,
        "question_category": "S2E",
        "topic_category": "KS-Knowledge-STEM",
        "starting_timestamp_for_subtitles": 30.0,
        "level": "L1-Perception",
    }
    return _put(
        folder / "lvb_val.json",
        [
            {
                "id": "86CxyhFV9MI_0",
                "question": "What comes when 'now it is blue' is said?",
                "candidates": ["a disc", "a blue square"],
                "correct_choice": 1,
                "subtitle_path": "86CxyhFV9MI_en.json",
                **base,
            },
            {
                "id": "86CxyhFV9MI_1",
                "question": "Which square moves?",
                "option0": "the red one",
                "option1": "the blue one",
                "option2": "none",
                "option3": "N/A",
                "option4": "N/A",
                "correct_choice": 0,
                "subtitle_path": "other.json",
                **base,
            },
        ],
    )


def make_mlvu(folder: Path) -> Path:
    """The development set: two tasks of choices and one of texts, which is left out."""
    _clip(folder / "video/1_plotQA/movie101_66.mp4")
    _clip(folder / "video/4_count/count_1.mp4")
    _put(
        folder / "json/1_plotQA.json",
        [
            {
                "video": "movie101_66.mp4",
                "duration": 3.0,
                "question": "What colour has the square that moves?",
                "candidates": ["Yellow", "Red", "White", "Blue"],
                "answer": "Red",
                "question_type": "plotQA",
            }
        ],
    )
    _put(
        folder / "json/4_count.json",
        [
            {
                "video": "count_1.mp4",
                "duration": 3.0,
                "question": "How often does the blue square come?",
                "candidates": ["0", "1", "2", "3"],
                "answer": "1",
                "question_type": "count",
            }
        ],
    )
    _put(
        folder / "json/9_summary.json",
        [
            {
                "video": "movie101_66.mp4",
                "duration": 3.0,
                "question": "Summarise the video.",
                "answer": "A red square moves.",
                "question_type": "summary",
            }
        ],
    )
    return folder


def make_mlvu_test(folder: Path) -> Path:
    """The test set with its answers: six options, the right one is the fifth."""
    _clip(folder / "video/test_1.mp4")
    return _put(
        folder / "test_question.json",
        [
            {
                "question_id": "AC_0",
                "video": "test_1.mp4",
                "duration": 3.0,
                "question": "How many squares are there at most?",
                "candidates": ["6", "5", "4", "3", "2", "1"],
                "answer": "2",
                "question_type": "AC",
            }
        ],
    )


def _got_sequence(folder: Path, count: int) -> None:
    _frames(folder, "{:08d}.jpg", count)
    boxes = [red_box(frame) for frame in range(count)]
    _put(
        folder / "groundtruth.txt",
        "".join(f"{x1:.4f},{y1:.4f},{x2 - x1:.4f},{y2 - y1:.4f}\n" for x1, y1, x2, y2 in boxes),
    )
    _put(
        folder / "meta_info.ini",
        "[METAINFO]\nurl: https://youtu.be/0\nbegin: 00:00:01\nend: 00:00:02\nanno_fps: 10Hz\n"
        "object_class: red square\nmotion_class: moving\nmajor_class: shape\nroot_class: thing\nmotion_adverb: slowly\n"
        f"resolution: {SIZE}\n",
    )
    _put(folder / "absence.label", "".join(f"{int(frame == 3)}\n" for frame in range(count)))
    _put(
        folder / "cover.label",
        "".join(f"{0 if frame in (3, 5) else 8}\n" for frame in range(count)),
    )
    _put(folder / "cut_by_image.label", "0\n" * count)


def make_got10k(folder: Path) -> Path:
    """One sequence of nine frames; its object is absent in the fourth and covered in the sixth."""
    _got_sequence(folder / "val/GOT-10k_Val_000001", 9)
    _put(folder / "val/list.txt", "GOT-10k_Val_000001\n")
    return folder / "val"


def make_videochat_got(folder: Path) -> Path:
    """VideoChat-R1's got_val.json: eight boxes as shares."""
    _frames(folder / "GOT-10k/val/GOT-10k_Val_000001", "{:08d}.jpg", 8)
    shares = [
        [round(v / SIZE[i % 2], 3) for i, v in enumerate(red_box(frame))]
        for frame in (0, 0, 1, 2, 3, 4, 5, 7)
    ]
    return _put(
        folder / "got_val.json",
        [{"path": "GOT-10k/val/GOT-10k_Val_000001", "object": "red square", "gt": shares}],
    )


def make_video_rows(folder: Path) -> Path:
    """Video-R1's and EasyVideoR1's rows about videos, one of each problem type, and a video with a picture beside it."""
    from PIL import Image

    _clip(folder / "videos/1.mp4")
    Image.fromarray(draw_frames(1)[0]).save(folder / "scene.png", optimize=True)

    def row(number: int, kind: str, problem: str, truth: Any, **more: Any) -> dict[str, Any]:
        words = truth if isinstance(truth, str) else json.dumps(truth)
        return {
            "problem_id": number,
            "problem": problem,
            "data_type": "video",
            "problem_type": kind,
            "options": [],
            "solution": f"<answer>{words}</answer>",
            "path": "./videos/1.mp4",
            "data_source": "hand-made",
            **more,
        }

    boxes = {str(second): list(red_box(FPS * second)) for second in range(3)}
    return _put(
        folder / "unified_video.json",
        [
            row(
                1,
                "multiple choice",
                "Which way does the red square go?",
                "B",
                options=["A. left", "B. right"],
            ),
            row(2, "numerical", "<video>How many squares are there at most?", "2"),
            row(3, "regression", "How wide is the red square, in pixels?", "14"),
            row(
                4,
                "free-form",
                "Describe the video.",
                "A red square moves to the right, a blue one comes and goes.",
            ),
            row(5, "OCR", "What does the video say?", "nothing"),
            row(6, "temporal grounding", "a blue square is there", {"time": list(BLUE)}),
            row(
                7,
                "spatial-temporal grounding",
                "What moves to the right?",
                {"time": [0.0, 3.0], "boxes": boxes},
            ),
            row(8, "tracking", "Track the red square.", {"boxes": boxes}),
            row(9, "boolean", "Does the blue square stay?", "no"),
            row(
                10,
                "multiple choice",
                "Is the picture a frame of the video?",
                "A",
                options=["A. yes", "B. no"],
                image_path="scene.png",
            ),
        ],
    )


MAKERS: Mapping[str, Callable[[Path], Path]] = {
    "charades_sta": make_charades_sta,
    "activitynet": make_activitynet,
    "qvhighlights": make_qvhighlights,
    "nextgqa": make_nextgqa,
    "videomme": make_videomme,
    "mvbench": make_mvbench,
    "tempcompass": make_tempcompass,
    "vsibench": make_vsibench,
    "videommmu": make_videommmu,
    "longvideobench": make_longvideobench,
    "mlvu": make_mlvu,
    "mlvu_test": make_mlvu_test,
    "got10k": make_got10k,
    "videochat_got": make_videochat_got,
    "video_rows": make_video_rows,
}
"""Name of the fixture -> its maker; a maker returns what a reader reads."""


def make_all(folder: Path) -> dict[str, str]:
    """Every fixture in a folder of its own below `folder`: name -> path to read."""
    return {name: str(make(folder / name)) for name, make in MAKERS.items()}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    for kind, where in make_all(Path(sys.argv[1])).items():
        print(f"{kind:16} {where}")
