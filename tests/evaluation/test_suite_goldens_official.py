"""Whole suites on the inputs of assets/fixtures/official, whose numbers the official programs gave (assets.make_official_goldens).

The same rows as files of the release, the same predictions as replies, through suite_kit.py beside it; the tests in
tests/tasks/metrics compare the metrics alone.
"""

from __future__ import annotations

import csv
import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from assets.make_official_goldens import load
from assets.make_task_fixtures import encode_example, write_records
from mmrl.coords import CoordFrame
from mmrl.types import StopReason
from tests.evaluation.suite_kit import FIXTURES, evaluate_suite, put, put_parquet, put_picture
from tests.evaluation.test_suite_goldens import picture_bytes

pytestmark = pytest.mark.slow
CLIP = (FIXTURES / "qvhighlights" / "videos" / "NUsG9BgSes0_210.0_360.0.mp4").read_bytes()


def close(value: float) -> Any:
    return pytest.approx(value, abs=1e-6)


def test_screenspot(tmp_path: Path) -> None:
    """SeeClick's program, whole; its own extractor reads its own replies, shares of the picture."""
    given, golden = load("screenspot")
    root, replies = tmp_path / "ScreenSpot", {}
    put_picture(root / "screenspot_imgs" / "blank.png", tuple(given["image_size"]))
    for platform, rows in given["files"].items():
        put(
            root / f"screenspot_{platform}.json",
            [
                {key: value for key, value in row.items() if key not in ("response", "point")}
                for row in rows
            ],
        )
        replies |= {
            f"screenspot_{platform}-{number}": row["response"] for number, row in enumerate(rows, 1)
        }
    outcome = evaluate_suite(
        "screenspot",
        tmp_path,
        lambda sample: replies[sample.id],
        tmp_path / "out",
        answers="official",
        frame=CoordFrame.REL1,
    )
    [numbers] = outcome.results["benchmark"].values()
    cells = [
        numbers[f"{platform}_{kind}"] for platform in given["files"] for kind in ("text", "icon")
    ]
    assert cells == [close(cell) for row in golden["text_icon"] for cell in row]
    hits = sum(
        share * count for share, count in zip(golden["action_acc"], golden["total"], strict=True)
    )
    assert (
        outcome.line.value == close(hits / len(replies)) and outcome.line.extractor == "screenspot"
    )
    assert numbers["wrong_format"] == close(sum(golden["wrong_format"]) / len(replies))


def test_screenspot_pro(tmp_path: Path) -> None:
    """The official report, its details in the file that it would write."""
    given, golden = load("screenspot_pro")
    root, replies = tmp_path / "ScreenSpot-Pro", {}
    for size in {tuple(row["img_size"]) for row in given["rows"]}:
        put_picture(root / "images" / f"{size[0]}.png", size)
    rows = []
    for row in given["rows"]:
        width, height = row["img_size"]
        rows.append(
            {
                **{key: value for key, value in row.items() if key != "point"},
                "instruction": "x",
                "img_filename": f"{width}.png",
            }
        )
        point = row["point"] and [row["point"][0] * width, row["point"][1] * height]
        replies[row["id"]] = json.dumps(point) if point else "I cannot find it."
    put(root / "annotations" / "any_linux.json", rows)
    outcome = evaluate_suite(
        "screenspot_pro", tmp_path, lambda sample: replies[sample.id], tmp_path / "out"
    )
    assert (
        outcome.line.value == close(golden["overall"]["action_acc"])
        and outcome.line.n == golden["overall"]["num_total"]
    )
    [path] = (outcome.folder / "submissions").rglob("screenspot_pro.json")
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["metrics"] == {
        key: golden[key] for key in ("overall", "leaderboard_simple_style")
    }
    assert [row["correctness"] for row in written["details"]] == golden["correctness"]


@pytest.mark.parametrize("stop", [StopReason.EOS, StopReason.LENGTH])
def test_ocrbench(stop: StopReason, tmp_path: Path) -> None:
    """Also of replies that the length limit cut.

    Every verdict of example.py but the last one's, which is right only behind the first 1,024 characters; scores by type."""
    given, golden = load("ocrbench")
    rows, right = given["rows"], golden["result"][:-1]
    put_parquet(
        tmp_path / "OCRBench" / "data" / "test-00000-of-00001.parquet",
        [
            {
                "dataset": row["dataset_name"],
                "question": row["question"],
                "question_type": row["type"],
                "answer": row["answers"],
                "image": picture_bytes(),
            }
            for row in rows
        ],
    )
    replies = {
        f"test-00000-of-00001-{number}": row["predict"] for number, row in enumerate(rows, 1)
    }
    outcome = evaluate_suite(
        "ocrbench", tmp_path, lambda sample: replies[sample.id], tmp_path / "out", stop=stop
    )
    [path] = (outcome.folder / "submissions").rglob("ocrbench.json")
    assert [row["result"] for row in json.loads(path.read_text(encoding="utf-8"))] == [
        *map(int, right),
        0,
    ]
    assert outcome.line.value == close(sum(right) / len(rows))
    [numbers] = outcome.results["benchmark"].values()
    types = {
        name: value / given["times"]
        for name, value in golden["thousand"].items()
        if name != "Final Score"
    }
    last = rows[-1]["type"]
    assert {name: numbers[f"ocrbench/{name}"] for name in types} == {
        name: value - (name == last and golden["result"][-1]) for name, value in types.items()
    }


@pytest.mark.parametrize("suite", ["charades_sta", "activitynet_captions"])
def test_moments(suite: str, tmp_path: Path) -> None:
    """lmms-eval's IoUs on its own texts, and R1 at three levels. It sorts the two times of an answer, which no other program does:
    an answer that ends before it starts has IoU 0 here."""
    given, golden = load("charades")
    rows, replies, root = given["rows"], {}, tmp_path
    names = [row["video"].removesuffix(".mp4") for row in rows]
    if suite == "charades_sta":
        lines = [
            f"{name} {row['true'][0]} {row['true'][1]}##query {name}.\n"
            for name, row in zip(names, rows, strict=True)
        ]
        put(root / "Charades-STA" / "charades_sta_test.txt", "".join(lines).encode())
        put(
            root / "Charades-STA" / "Charades_v1_test.csv",
            "".join(
                [
                    "id,length\n",
                    *(f"{name},{row['duration']}\n" for name, row in zip(names, rows, strict=True)),
                ]
            ).encode(),
        )
    else:
        put(
            root / "ActivityNet" / "val_2.json",
            {
                name: {
                    "duration": row["duration"],
                    "timestamps": [row["true"]],
                    "sentences": [f"query {name}."],
                }
                for name, row in zip(names, rows, strict=True)
            },
        )
    for name, row in zip(names, rows, strict=True):
        put(
            root
            / ("Charades-STA/Charades_v1_480" if suite == "charades_sta" else "ActivityNet/videos")
            / f"{name}.mp4",
            CLIP,
        )
        replies[f"query {name}."] = row["text"]
    outcome = evaluate_suite(suite, root, lambda sample: replies[sample.question], tmp_path / "out")
    back = [bool(row["span"]) and row["span"][0] > row["span"][1] for row in rows]
    ious = [0.0 if wrong else iou for iou, wrong in zip(golden["ious"], back, strict=True)]
    mine = {row["question"]: row["score"]["metrics"] for row in outcome.predictions}
    assert [mine[f"query {name}."].get("iou", 0.0) for name in names] == [
        close(iou) for iou in ious
    ] and sum(back) > 2
    [numbers] = outcome.results["benchmark"].values()
    official, count = golden["lmms_eval"], len(rows)
    for level, key in ((0.3, "IOU@3"), (0.5, "IOU@5"), (0.7, "IOU@7")):
        sorted_only = sum(
            iou >= level for iou, wrong in zip(golden["ious"], back, strict=True) if wrong
        )
        share = official[key] / 100 - sorted_only / count
        assert (
            outcome.results["greedy"][f"r1@{level}"]["mean"]
            == close(share)
            == numbers[f"R1@{level}"]
        )
    assert outcome.line.metric == "r1@0.5" and outcome.line.n == count


def test_qvhighlights(tmp_path: Path) -> None:
    """R1 of moment_detr's program by the first window of each reply, and the file that it asks for. Its mAP needs scores, which
    replies do not have: windows count by their order."""
    given, golden = load("qvhighlights")
    root = tmp_path / "QVHighlights"
    put(root / "highlight_val_release.jsonl", given["truth"])
    for row in given["truth"]:
        put(root / "videos" / f"{row['vid']}.mp4", CLIP)
    said = {
        str(row["qid"]): [window[:2] for window in row["pred_relevant_windows"]]
        for row in given["submission"]
    }
    outcome = evaluate_suite(
        "qvhighlights_val", tmp_path, lambda sample: json.dumps(said[sample.id]), tmp_path / "out"
    )
    [numbers] = outcome.results["benchmark"].values()
    exact = golden["unrounded"]["full"]
    for level in (0.5, 0.7):
        share = sum(iou >= level for iou in exact["iou"]) / exact["queries"]
        assert outcome.results["greedy"][f"r1@{level}"]["mean"] == close(share)
        name = f"MR-full-R1@{level}"
        assert numbers[name] == numbers[f"official/{name}"] == golden["printed"]["brief"][name]
    assert outcome.line.metric == "r1@0.5" and outcome.line.n == len(given["truth"])
    [path] = (outcome.folder / "submissions").rglob("hl_submission.jsonl")
    written = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {
        str(row["qid"]): [window[:2] for window in row["pred_relevant_windows"]] for row in written
    } == said
    assert all(
        first[2] > second[2]
        for row in written
        for first, second in pairwise(row["pred_relevant_windows"])
    )


OPTIONS = {"a0": "a cat", "a1": "a dog", "a2": "a bird", "a3": "a ball", "a4": "a cup"}


def test_nextgqa(tmp_path: Path) -> None:
    """eval_ground.py, whole: its numbers under official/, from letters and spans in replies; questions without a span have none."""
    given, golden = load("nextgqa")
    root, replies, out = tmp_path / "NExT-GQA", {}, io.StringIO()
    options = list(OPTIONS.values())
    table = csv.writer(out)
    table.writerow(
        [
            "video_id",
            "frame_count",
            "width",
            "height",
            "question",
            "answer",
            "qid",
            "type",
            *OPTIONS,
        ]
    )
    for key, row in given["answers"].items():
        video, qid = key.rsplit("_", 1)
        table.writerow(
            [video, 900, 320, 240, "what is it", options[row["answer"]], qid, "CW", *options]
        )
        letter, span = "ABCDE"[row["prediction"]], given["spans"].get(key)
        replies[f"{video}-{qid}"] = (
            json.dumps({"answer": letter, "time": span}) if span else f"It is ({letter})."
        )
        put(root / "videos" / f"{video}.mp4", CLIP)
    put(root / "test.csv", out.getvalue().encode())
    put(root / "gsub_test.json", given["truth"])
    outcome = evaluate_suite(
        "nextgqa", tmp_path, lambda sample: replies[sample.id], tmp_path / "out"
    )
    [numbers] = outcome.results["benchmark"].values()
    official = golden["all"]
    names = ("Acc@GQA", "mIoP", "IoP@0.3", "IoP@0.5", "mIoU", "IoU@0.3", "IoU@0.5")
    assert [round(numbers[f"official/{name}"], 1) for name in names] == official["printed"]
    assert numbers["official/mIoU"] == close(official["mIoU"]) and numbers[
        "official/mIoP"
    ] == close(official["mIoP"])
    [path] = (outcome.folder / "submissions").rglob("nextgqa_ground.json")
    assert json.loads(path.read_text(encoding="utf-8")) == given["spans"]
    assert outcome.line.value == close(numbers["Acc@GQA"] / 100) and outcome.line.n == len(
        given["answers"]
    )


FINGERS = {
    "up": [[500, 800], [500, 200]],
    "down": [[500, 200], [500, 800]],
    "left": [[800, 500], [200, 500]],
    "right": [[200, 500], [800, 500]],
}
"""Where the finger goes from and to."""
KEYS = {"press_back": "KEY_BACK", "press_home": "KEY_HOME"}
HOMES = {"press_back": "navigate_back", "press_home": "navigate_home"}
SWIPES = {"scroll": "swipe", **HOMES}


def odyssey_step(row: dict[str, Any]) -> dict[str, Any]:
    """A step as GUI-Odyssey's annotations have it."""
    true = row["true"]
    name, info = (
        {
            "click": "CLICK",
            "long_press": "LONG_PRESS",
            "type": "TEXT",
            "scroll": "SCROLL",
            "complete": "COMPLETE",
        }.get(true["action"], "CLICK"),
        true.get("text", ""),
    )
    if "point" in true:
        info = [true["point"]]
    elif true["action"] in KEYS:
        info = KEYS[true["action"]]
    elif true["action"] == "scroll":
        info = FINGERS[true["direction"]]
    return {
        "step": row["step"],
        "screenshot": "s.png",
        "action": name,
        "info": info,
        "sam2_bbox": row["sam2_bbox"] or [],
    }


def test_gui_odyssey(tmp_path: Path) -> None:
    """Each step of the official program, and its AMS, over the steps whose elements lie inside the picture."""
    given, golden = load("odyssey")
    root, replies = tmp_path / "GUI-Odyssey", {}
    episodes: dict[str, list[dict[str, Any]]] = {}
    judged = [
        (row, right)
        for row, right in zip(given["steps"], golden["correct"], strict=True)
        if all(0 <= side <= 1000 for side in row["sam2_bbox"] or [])
    ]
    for row, _ in judged:
        episodes.setdefault(row["episode"], []).append(odyssey_step(row))
        found = row["found"] and {
            **row["found"],
            "action": SWIPES.get(row["found"]["action"], row["found"]["action"]),
        }
        replies[f"{row['episode']}-{row['step']}"] = (
            json.dumps(found) if found else "I do not know."
        )
    put_picture(root / "screenshots" / "s.png", (500, 1000))
    for name, steps in episodes.items():
        put(
            root / "annotations" / f"{name}.json",
            {
                "episode_id": name,
                "steps": steps,
                "step_length": len(steps),
                "task_info": {"category": "General_Tool", "instruction": "Do it."},
            },
        )
    put(
        root / "splits" / "random_split.json",
        {"train": [], "test": [f"{name}.json" for name in episodes]},
    )
    outcome = evaluate_suite(
        "gui_odyssey",
        tmp_path,
        lambda sample: replies[sample.id],
        tmp_path / "out",
        frame=CoordFrame.REL1000,
    )
    mine = outcome.values("correct")
    assert [bool(mine[f"{row['episode']}-{row['step']}"]) for row, _ in judged] == [
        right for _, right in judged
    ]
    [numbers] = outcome.results["benchmark"].values()
    assert (
        outcome.line.value
        == close(sum(right for _, right in judged) / len(judged))
        == close(numbers["odyssey/ams"])
    )
    assert len(judged) > 40 and outcome.line.n == len(judged)


def control_action(true: dict[str, Any]) -> bytes:
    """A step as AndroidControl's records have it."""
    name = {"type": "input_text", "press_back": "navigate_back", "press_home": "navigate_home"}.get(
        true["action"], true["action"]
    )
    point = dict(zip("xy", true.get("point", ()), strict=False))
    words = {
        key: true[old]
        for key, old in (("text", "text"), ("app_name", "app"), ("direction", "direction"))
        if old in true
    }
    return json.dumps({"action_type": name, **point, **words}).encode()


@pytest.mark.parametrize("level", ["low", "high"])
def test_android_control(level: str, tmp_path: Path) -> None:
    """OS-Atlas' program, whole, on a record of twelve episodes: step success, types and grounding."""
    given, golden = load("os_atlas")
    screen, root, replies, records = (
        picture_bytes((1000, 1000))["bytes"],
        tmp_path / "android_control",
        {},
        [],
    )
    for number in range(0, len(given["steps"]), 10):
        steps = given["steps"][number : number + 10]
        count = len(steps) + 1
        records.append(
            encode_example(
                {
                    "episode_id": [number],
                    "goal": [b"Do it"],
                    "screenshots": [screen] * count,
                    "accessibility_trees": [b""] * count,
                    "screenshot_widths": [1000] * count,
                    "screenshot_heights": [1000] * count,
                    "actions": [control_action(row["true"]) for row in steps],
                    "step_instructions": [b"Do this"] * len(steps),
                }
            )
        )
        for place, row in enumerate(steps):
            found = row["found"] and {
                **row["found"],
                "action": HOMES.get(row["found"]["action"], row["found"]["action"]),
            }
            replies[f"episode_{number}_screenshot_{place}"] = (
                json.dumps(found) if found else "I do not know."
            )
    root.mkdir()
    write_records(root / "android_control-00000-of-00020", records)
    put(
        root / "splits.json",
        {"train": [], "validation": [], "test": list(range(0, len(given["steps"]), 10))},
    )
    outcome = evaluate_suite(
        f"android_control_{level}", tmp_path, lambda sample: replies[sample.id], tmp_path / "out"
    )
    [numbers] = outcome.results["benchmark"].values()
    printed = golden["printed"]
    assert [
        f"{numbers[f'os_atlas/{name}']:f}"
        for name in ("step_success", "type_accuracy", "grounding")
    ] == [printed["Acc"], printed["type_match acc"], printed["grounding acc"]]
    assert outcome.line.value == close(
        golden["hits"]["full"] / golden["counts"]["full"]
    ) and outcome.line.n == len(replies)
