"""The whole path, from an answer's text over parse, score and benchmark to the submission file, against what the official programs
gave for the same answers (assets.make_official_goldens tells how). Where a program's package is installed, it runs on the file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assets.make_official_goldens import load
from mmrl.coords import CoordFrame
from mmrl.rewards.text import docvqa_anls
from mmrl.tasks.chart import Chart
from mmrl.tasks.choice import Choice
from mmrl.tasks.detection import Detection
from mmrl.tasks.grounding import Grounding
from mmrl.tasks.gui_action import GuiAction
from mmrl.tasks.gui_grounding import GuiGrounding
from mmrl.tasks.metrics.tracking import rect_iou
from mmrl.tasks.ocr import OCR
from mmrl.tasks.open_text import OpenText
from mmrl.tasks.tracking import Tracking
from mmrl.types import ImageSize, RewardContext, Sample, Score

Pairs = list[tuple[Sample, Score]]
ALIASES = {"press_back": "navigate_back", "press_home": "navigate_home"}
REL1, REL1000, PIXELS = (
    RewardContext(1, 1, frame)
    for frame in (CoordFrame.REL1, CoordFrame.REL1000, CoordFrame.ABS_ORIG)
)


def told(text: str) -> str:
    """In the envelope; a text that holds no answer stays as it is."""
    return f"<answer>{text}</answer>"


def scored(task: Any, samples: Sequence[Sample], texts: Sequence[str], ctx: RewardContext) -> Pairs:
    return [
        (sample, task.score(sample, text, ctx)) for sample, text in zip(samples, texts, strict=True)
    ]


# screens


def test_screenspot_from_seeclicks_texts(tmp_path: Path) -> None:
    """SeeClick's own spelling, points and boxes of which the middle counts, edges, unreadable texts; the list it writes."""
    given, golden = load("screenspot")
    width, height = given["image_size"]
    ctx = RewardContext(1, 1, CoordFrame.REL1, (ImageSize((width, height), (width, height)),))
    samples, texts, points = [], [], []
    for platform, rows in given["files"].items():
        for number, row in enumerate(rows):
            x, y, w, h = row["bbox"]
            samples.append(
                Sample(
                    f"{platform}-{number}",
                    "gui_grounding",
                    "ScreenSpot",
                    row["instruction"],
                    [x, y, x + w, y + h],
                    ("blank.png",),
                    params={
                        "platform": platform,
                        "ui_type": row["data_type"],
                        "width": width,
                        "height": height,
                        "data_source": row["data_source"],
                    },
                )
            )
            texts.append(told(row["response"]))
            points.append(row["point"])
    pairs = scored(GuiGrounding(), samples, texts, ctx)
    numbers = GuiGrounding().benchmark(pairs, tmp_path)
    cells = [
        numbers[f"{platform}_{kind}"]
        for platform in ("mobile", "desktop", "web")
        for kind in ("text", "icon")
    ]
    assert cells == pytest.approx([cell for row in golden["text_icon"] for cell in row], abs=1e-12)
    assert numbers["wrong_format"] == pytest.approx(sum(golden["wrong_format"]) / len(samples))
    written = [row["pred"] for row in json.loads((tmp_path / "screenspot.json").read_text())]
    assert [p is None for p in written] == [p is None for p in points]
    assert [p for p in written if p] == [pytest.approx(p, abs=1e-12) for p in points if p]


def test_screenspot_pro_from_texts(tmp_path: Path) -> None:
    """Points in pixels as text; metrics and correctness of the file the official script would write."""
    given, golden = load("screenspot_pro")
    samples, texts = [], []
    for row in given["rows"]:
        (width, height), point = row["img_size"], row["point"]
        samples.append(
            Sample(
                row["id"],
                "gui_grounding",
                "ScreenSpot-Pro",
                "x",
                row["bbox"],
                ("a.png",),
                params={
                    "platform": row["platform"],
                    "ui_type": row["ui_type"],
                    "application": row["application"],
                    "group": row["group"],
                    "width": width,
                    "height": height,
                },
            )
        )
        texts.append(
            told(json.dumps([point[0] * width, point[1] * height])) if point else "nothing there"
        )
    numbers = GuiGrounding().benchmark(scored(GuiGrounding(), samples, texts, PIXELS), tmp_path)
    written = json.loads((tmp_path / "screenspot_pro.json").read_text())
    assert (
        written["metrics"]["overall"] == golden["overall"]
        and numbers["overall/action_acc"] == golden["overall"]["action_acc"]
    )
    assert written["metrics"]["leaderboard_simple_style"] == golden["leaderboard_simple_style"]
    assert [row["correctness"] for row in written["details"]] == golden["correctness"]


def action_pairs(rows: Sequence[Mapping[str, Any]], size: tuple[int, int]) -> Pairs:
    """Steps from the text of the predicted action, points in pixels; true actions as the reader's check leaves them."""
    task, (width, height) = GuiAction(space="mobile"), size
    samples = []
    for number, row in enumerate(rows):
        params = {
            "width": width,
            "height": height,
            **({"episode": row["episode"]} if "episode" in row else {}),
        }
        true = {**row["true"], **({"bbox": row["sam2_bbox"]} if row.get("sam2_bbox") else {})}
        true["action"] = ALIASES.get(true["action"], true["action"])
        samples.append(
            Sample(f"s{number}", "gui_action", "x", "do it", true, ("a.png",), params=params)
        )
    texts = [told(json.dumps(row["found"])) if row["found"] else "I do not know" for row in rows]
    return scored(task, samples, texts, PIXELS)


def test_os_atlas_from_texts(tmp_path: Path) -> None:
    given, golden = load("os_atlas")
    numbers = GuiAction(space="mobile").benchmark(
        action_pairs(given["steps"], (1000, 1000)), tmp_path
    )
    printed = golden["printed"]
    assert [
        f"{numbers[f'os_atlas/{name}']:f}"
        for name in ("step_success", "type_accuracy", "grounding")
    ] == [printed["Acc"], printed["type_match acc"], printed["grounding acc"]]
    rows = [json.loads(line) for line in (tmp_path / "gui_actions.jsonl").read_text().splitlines()]
    assert sum(row["matches"]["os_atlas"]["type"] for row in rows) == golden["hits"]["type_match"]


def test_gui_odyssey_from_texts(tmp_path: Path) -> None:
    given, golden = load("odyssey")
    numbers = GuiAction(space="mobile").benchmark(
        action_pairs(given["steps"], (1000, 1000)), tmp_path
    )
    assert {
        name: round(100 * numbers[f"odyssey/{key}"], 2)
        for name, key in (("AMS", "ams"), ("SR", "success_rate"))
    } == {"AMS": golden["info"]["AMS"], "SR": golden["info"]["SR"]}


# texts


def test_ocrbench_from_texts(tmp_path: Path) -> None:
    given, golden = load("ocrbench")
    samples = [
        Sample(
            str(row["id"]),
            "ocr",
            "OCRBench",
            row["question"],
            list(row["answers"]),
            ("a.png",),
            params={"ocrbench_type": row["type"], "dataset": row["dataset_name"]},
        )
        for row in given["rows"]
    ]
    task = OCR(answer_format="bare")
    pairs = scored(task, samples, [row["predict"] for row in given["rows"]], PIXELS)
    numbers = task.benchmark(pairs, tmp_path)
    # the last one is right only behind the first 1,024 characters
    hits = sum(golden["result"][:-1])
    assert numbers["ocrbench/final_score"] == hits and numbers["ocrbench/items"] == len(samples)
    written = json.loads((tmp_path / "ocrbench.json").read_text())
    assert [row["predict"] for row in written][:-1] == [
        row["predict"].strip() for row in given["rows"]
    ][:-1]


def test_chartqa_from_texts() -> None:
    """Texts without white space at their ends, which is no part of an answer here."""
    given, golden = load("chartqa")
    task, right, official = Chart(answer_format="bare"), [], []
    for (said, truth), value in zip(given["pairs"], golden["right"], strict=True):
        if said and truth and said == said.strip() and truth == truth.strip():
            right.append(
                task.score(Sample("1", "chart", "x", "q", truth), said, PIXELS).metrics["chartqa"]
            )
            official.append(float(value))
    assert right == official and len(right) > 600 and 0 < sum(right) < len(right)


def test_docvqas_anls_from_texts() -> None:
    """docvqa.org's program: runs of white space, letters that grow in upper case, empty texts, the threshold. White space at the
    ends of an answer is no part of it here, and an empty answer is a failure, which is 0."""
    given, golden = load("docvqa")
    task, seen = OpenText(answer_format="bare"), set()
    for row, official in zip(given["rows"], golden["each"], strict=True):
        said, truths = row["answer"], row["answers"]
        assert max(docvqa_anls(said, truth) for truth in truths) == pytest.approx(
            official, abs=1e-12
        ), row
        if said and said == said.strip():
            score = task.score(Sample("1", "open_text", "DocVQA", "q", truths), said, PIXELS)
            assert score.metrics["anls"] == pytest.approx(official, abs=1e-12), row
            seen.add(round(official, 3))
    assert len(seen) > 10 and {0.0, 1.0} < seen
    reward = OpenText(answer_format="bare", mode="anls")
    padded = reward.score(
        Sample("1", "open_text", "DocVQA", "q", "hello"), "x" + " " * 40 + "y", PIXELS
    )
    assert padded.metrics["anls"] > 0.85 and padded.parts["accuracy"] == 0, (
        "white space buys the metric, never the reward"
    )


@pytest.mark.parametrize("name", ["mlvu_dev", "videomme", "mvbench"])
def test_choices_from_texts(name: str, tmp_path: Path) -> None:
    given, golden = load("choices")
    task = Choice()
    samples = [
        Sample(
            str(number),
            "choice",
            name,
            "q",
            row["answer"],
            params={
                "options": [f"option number {k}" for k in range(4)],
                "suite": name.split("_")[0],
                "category": row["category"],
            },
        )
        for number, row in enumerate(given[name])
    ]
    pairs = scored(task, samples, [told(row["said"]) for row in given[name]], PIXELS)
    numbers = task.benchmark(pairs, tmp_path)
    if name == "mlvu_dev":
        assert 100 * numbers["mlvu/M-Avg"] == pytest.approx(golden["mlvu_dev"])
    elif name == "videomme":
        assert 100 * numbers["videomme/accuracy"] == pytest.approx(golden["videomme"])
    else:
        assert 100 * numbers["mvbench/action_count"] == pytest.approx(
            golden["mvbench"]["action_count"]
        )
        assert 100 * numbers["mvbench/moving_direction"] == pytest.approx(
            golden["mvbench"]["moving_direction"]
        )


# boxes


def test_got10k_from_texts_and_its_files(tmp_path: Path) -> None:
    """Boxes beyond the picture and wholly outside, frame by frame as text; AO is the toolkit's, the files hold what was said."""
    given, golden = load("got10k")
    task, pairs = Tracking(), []
    for row in given["sequences"]:
        keys = [str(number) for number in range(len(row["boxes"]))]
        corners = {
            side: {
                key: [x, y, x + w, y + h] for key, (x, y, w, h) in zip(keys, row[side], strict=True)
            }
            for side in ("boxes", "predictions")
        }
        width, height = row["size"]
        sample = Sample(
            row["name"],
            "tracking",
            "GOT-10k",
            "it",
            {"boxes": corners["boxes"]},
            videos=(row["name"],),
            params={
                "keys": "frames",
                "frame_count": len(keys),
                "width": width,
                "height": height,
                "duration": 9.0,
                "cover": row["cover"],
                "sequence": row["name"],
            },
        )
        pairs.append(
            (
                sample,
                task.score(sample, told(json.dumps({"boxes": corners["predictions"]})), PIXELS),
            )
        )
    numbers = task.benchmark(pairs, tmp_path)
    assert (numbers["AO"], numbers["SR0.50"], numbers["SR0.75"]) == pytest.approx(
        (golden["ao"], golden["sr_0.5"], golden["succ_curve"][75]), abs=1e-9
    )
    for row in given["sequences"]:
        written = np.loadtxt(
            tmp_path / "GOT-10k" / "mmrl" / row["name"] / f"{row['name']}_001.txt", delimiter=","
        )
        assert written == pytest.approx(np.array(row["predictions"]), abs=1e-3), (
            "as said, also beyond the picture"
        )


def test_got10k_compares_with_the_annotations_own_boxes_where_the_truth_was_cut(
    tmp_path: Path,
) -> None:
    """The toolkit keeps the width of a box that begins outside: the cut truth would give another AO than the raw one. `rect_iou` is
    the toolkit's rule, frame by frame (test_official_video)."""
    given, _ = load("got10k")
    task, pairs, cut_boxes = Tracking(), [], 0
    for row in given["sequences"]:
        width, height = row["size"]
        keys, truth, rects, said = [str(number) for number in range(len(row["boxes"]))], {}, {}, {}
        for key, (x, y, w, h), (px, py, pw, ph) in zip(
            keys, row["boxes"], row["predictions"], strict=True
        ):
            # some truths begin outside the picture
            x, y = (x - 60, y) if int(key) % 3 == 1 else (x, y)
            truth[key] = [
                max(0, x),
                max(0, y),
                max(1.0, min(width, x + w)),
                max(1.0, min(height, y + h)),
            ]
            said[key] = [px, py, px + pw, py + ph]
            if truth[key] != [x, y, x + w, y + h]:
                rects[key], cut_boxes = [x, y, w, h], cut_boxes + 1
        params = {
            "keys": "frames",
            "frame_count": len(keys),
            "width": width,
            "height": height,
            "duration": 9.0,
            "rects": rects,
            "sequence": row["name"],
        }
        sample = Sample(
            row["name"],
            "tracking",
            "GOT-10k",
            "it",
            {"boxes": truth},
            videos=(row["name"],),
            params=params,
        )
        pairs.append((sample, task.score(sample, told(json.dumps({"boxes": said})), PIXELS)))
    raw = [
        [
            [x - 60 if number % 3 == 1 else x, y, w, h]
            for number, (x, y, w, h) in enumerate(row["boxes"])
        ]
        for row in given["sequences"]
    ]
    official = np.concatenate(
        [
            rect_iou(row["predictions"], boxes, row["size"])[1:]
            for row, boxes in zip(given["sequences"], raw, strict=True)
        ]
    )
    assert (
        task.benchmark(pairs, tmp_path)["AO"] == pytest.approx(official.mean(), abs=1e-9)
        and cut_boxes > 10
    )
    for sample, _ in pairs:
        sample.params.pop("rects")  # type: ignore[attr-defined]
    assert task.benchmark(pairs, tmp_path)["AO"] != pytest.approx(official.mean(), abs=1e-3)


def test_detection_from_texts_and_pycocotools_on_the_file(tmp_path: Path) -> None:
    """Overshoot, swapped corners, duplicates, a wrong label, an unreadable answer; the file is read by pycocotools."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth = {
        1: [("cat", [10, 10, 60, 60]), ("dog", [100, 20, 180, 90])],
        2: [("cat", [0, 0, 50, 40])],
        3: [("dog", [5, 5, 90, 90])],
        4: [("cat", [20, 20, 80, 70])],
        5: [],
    }
    said = {
        1: [("cat", [10, 10, 60, 60]), ("cat", [10, 10, 60, 60]), ("dog", [100, 20, 999, 90])],
        2: [("cat", [50, 40, 0, 0]), ("cat", [-20, -10, 50, 40])],
        3: [("cat", [5, 5, 90, 90]), ("dog", [5, 5, 90, 95])],
        4: [],
        5: [("dog", [1, 2, 30, 40]), ("dog", [30, 2, 1, 40])],
    }
    names, task, pairs = ["cat", "dog"], Detection(), []
    for number, objects in truth.items():
        params = {
            "categories": names,
            "category_ids": [3, 7],
            "image_id": number,
            "width": 200,
            "height": 100,
        }
        sample = Sample(
            str(number),
            "detection",
            "x",
            "cat, dog",
            [{"label": n, "bbox": b} for n, b in objects],
            (f"{number}.png",),
            params=params,
        )
        text = (
            told(json.dumps([{"bbox_2d": b, "label": n} for n, b in said[number]]))
            if number != 4
            else "nothing"
        )
        pairs.append((sample, task.score(sample, text, PIXELS)))
    numbers = task.benchmark(pairs, tmp_path)
    coco, annotations = COCO(), []
    for number, objects in truth.items():
        for name, (x1, y1, x2, y2) in objects:
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": {"cat": 3, "dog": 7}[name],
                    "iscrowd": 0,
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": (x2 - x1) * (y2 - y1),
                }
            )
    coco.dataset = {
        "info": {},
        "images": [{"id": number} for number in truth],
        "annotations": annotations,
        "categories": [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}],
    }
    coco.createIndex()
    written = json.loads((tmp_path / "coco_results.json").read_text())
    assert [row["bbox"] for row in written if row["image_id"] == 2] == [
        [50, 40, -50, -40],
        [-20, -10, 70, 50],
    ], "as said"
    program = COCOeval(coco, coco.loadRes(str(tmp_path / "coco_results.json")), "bbox")
    program.evaluate()
    program.accumulate()
    program.summarize()
    assert (numbers["AP"], numbers["AP50"], numbers["AR100"]) == pytest.approx(
        (program.stats[0], program.stats[1], program.stats[8]), abs=1e-9
    ) and 0 < numbers["AP"] < 1


def test_grounding_from_texts_is_pycocotools_iou() -> None:
    """Acc@0.5 and mIoU of referring expressions: overshoot, swapped corners, an exact half, two boxes, none; IoU by its C code."""
    from pycocotools import mask

    truth, ctx, task = [20.0, 20.0, 60.0, 60.0], REL1000, Grounding()
    size = {"width": 1000, "height": 1000}
    boxes = [
        [20, 20, 60, 60],
        [20, 20, 60, 40],
        [20, 20, 999, 60],
        [60, 60, 20, 20],
        [0, 0, 1000, 1000],
        [20, 20, 20, 60],
        [61, 61, 70, 70],
    ]
    texts = [told(json.dumps(box)) for box in boxes] + [
        told("[[20, 20, 60, 60], [1, 1, 2, 2]]"),
        "none",
    ]
    scores = [
        task.score(Sample("1", "grounding", "x", "it", truth, ("a.png",), params=size), text, ctx)
        for text in texts
    ]
    sides = [[x, y, x2 - x, y2 - y] for x, y, x2, y2 in boxes]
    official = [max(0.0, float(v)) for v in mask.iou(sides, [[20, 20, 40, 40]], [0])[:, 0]]
    assert [score.metrics["iou"] for score in scores[: len(boxes)]] == pytest.approx(
        official, abs=1e-12
    )
    assert [score.metrics["acc@0.5"] for score in scores] == [
        float(iou >= 0.5) for iou in official
    ] + [0, 0]
    assert official[1] == 0.5
