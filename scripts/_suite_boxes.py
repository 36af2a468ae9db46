"""Annotated pictures with answers in boxes, and the programs of COCO, LVIS and OVDEval upon them, for scripts.record_suites.

    python -c "from scripts._suite_boxes import coco_rows; print(coco_rows()[0])"

A row is an image of a COCO-like file with its annotations. The program gets the boxes of the reply as they stand, [x, y, width,
height] with score 1.0, in ascending image id and then as emitted; names that the file has not, or was not asked for in that
picture (LVIS: whose truth is not known there), are in no results file.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts._suite_programs import whole
from scripts._suite_rows import Case

__all__ = [
    "COCO_NAMES",
    "LVIS_NAMES",
    "OVDEVAL",
    "coco",
    "coco_edge_rows",
    "coco_file",
    "coco_rows",
    "lvis",
    "lvis_file",
    "lvis_rows",
    "ovdeval",
    "ovdeval_file",
    "ovdeval_rows",
]

COCO_NAMES = {"person": 1, "traffic light": 10, "dog": 18, "cup": 47, "hot dog": 58, "cat": 17}
LVIS_NAMES = {
    "baby_buggy": ("f", 3),
    "dog": ("f", 7),
    "cup": ("c", 8),
    "hot_sauce": ("c", 12),
    "kite": ("r", 15),
    "zebra": ("r", 21),
}
OVDEVAL = ("color", "material")
_SIZES = ((240, 180), (320, 240), (200, 200))
Box = list[float]


def _xywh(rng: random.Random, size: tuple[int, int]) -> Box:
    w, h = (
        round(rng.choice([rng.uniform(4, 28), rng.uniform(34, 90), rng.uniform(100, 160)]), 2)
        for _ in range(2)
    )
    return [round(rng.uniform(0, size[0] - w), 2), round(rng.uniform(0, size[1] - h), 2), w, h]


def _moved(rng: random.Random, box: Box) -> Box:
    """Corners on, near or far from a true box: exact, shifted, beyond the picture, corners swapped, a line."""
    x, y, w, h = box
    kind = rng.choice(
        ["same", "same", "near", "near", "near", "beyond", "swapped", "line", "whole"]
    )
    step = rng.uniform(0, 0.5) if kind == "near" else 0.0
    found = [round(x + step * w, 2), round(y, 2), round(x + w + step * w, 2), round(y + h, 2)]
    if kind == "beyond":
        found[2] = 5000.0
    if kind == "whole":
        found = [0, 0, 100, 100]
    if kind == "line":
        found[2] = found[0]
    return [*found[2:], *found[:2]] if kind == "swapped" else found


def _said(
    rng: random.Random, truth: Sequence[tuple[str, Box]], names: Sequence[str]
) -> list[tuple[str, Box]]:
    """(name, corners): true objects moved, some twice, some under another name, names that do not exist, boxes upon nothing."""
    said = []
    for name, box in truth:
        if rng.random() < 0.85:
            shown = rng.choice(
                [name] * 6 + [name.upper(), name.replace(" ", "_"), rng.choice(names), "unicorn"]
            )
            said += [(shown, _moved(rng, box))] * rng.choice([1, 1, 1, 2])
    for _ in range(rng.randrange(0, 3)):
        x, y = rng.randrange(0, 90), rng.randrange(0, 90)
        said.append((rng.choice(names), [x, y, x + 20, y + 30]))
    rng.shuffle(said)
    return said


def _reply(
    rng: random.Random, said: Sequence[tuple[str, Box]], kind: str
) -> tuple[str, list[tuple[str, Box]]]:
    """(text, the objects that it holds)."""
    if kind == "none":
        return rng.choice(["I do not see any of them.", "", "none"]), []
    text = json.dumps([{"bbox_2d": box, "label": name} for name, box in said])
    if kind == "cut":
        return f"<answer>{text[:-9]}", []
    if kind == "fence":
        return f"```json\n{text}\n```", list(said)
    thought = "<think>One, two ... [1, 2, 3, 4]?</think>" if kind == "think" else ""
    return f"{thought}<answer>{text}</answer>", list(said)


def _rows(seed: int, names: Sequence[str], count: int) -> list[dict[str, Any]]:
    """Rows without what a data set adds: id, size, objects (name, xywh, area, crowd), the reply and what it holds."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        size = rng.choice(_SIZES)
        truth = [
            (rng.choice(names), _xywh(rng, size)) for _ in range(rng.choice([0, 1, 2, 3, 5, 7]))
        ]
        kind = (
            rng.choice(["plain", "plain", "think", "fence", "plain", "none", "cut"])
            if number
            else "plain"
        )
        reply, said = _reply(rng, _said(rng, truth, names), kind)
        rows.append(
            {
                "id": 1000 - 7 * number,
                "width": size[0],
                "height": size[1],
                "reply": reply,
                "said": said,
                "objects": [
                    {
                        "name": name,
                        "bbox": box,
                        "area": round(0.8 * box[2] * box[3], 2),
                        "iscrowd": int(rng.random() < 0.08),
                    }
                    for name, box in truth
                ],
            }
        )
    return rows


def _cases(
    rows: Sequence[dict[str, Any]], ids: Mapping[str, int], extra: Mapping[int, Mapping[str, Any]]
) -> list[Case]:
    cases: list[Case] = []
    number = 0
    for row in rows:
        image = {
            "id": row["id"],
            "width": row["width"],
            "height": row["height"],
            "file_name": f"{row['id']:012}.jpg",
            **extra.get(row["id"], {}),
        }
        annotations = []
        for one in row["objects"]:
            number += 1
            annotations.append(
                {
                    "id": number,
                    "image_id": row["id"],
                    "category_id": ids[one["name"]],
                    "bbox": one["bbox"],
                    "area": one["area"],
                    "iscrowd": one["iscrowd"],
                }
            )
        cases.append(
            {
                "row": {"image": image, "annotations": annotations},
                "reply": row["reply"],
                "said": row["said"],
            }
        )
    return cases


def _results(
    cases: Sequence[Case], ids: Mapping[str, int], asked: Mapping[int, set[int]] | None = None
) -> list[dict[str, Any]]:
    """The results file: what the replies hold, by ascending image id."""
    known = {
        " ".join(name.replace("_", " ").lower().split()): number for name, number in ids.items()
    }
    found = []
    for case in sorted(cases, key=lambda case: case["row"]["image"]["id"]):
        image = case["row"]["image"]["id"]
        for name, (x1, y1, x2, y2) in case["said"]:
            category = known.get(" ".join(name.replace("_", " ").lower().split()))
            if category is not None and (asked is None or category in asked[image]):
                found.append(
                    {
                        "image_id": image,
                        "category_id": category,
                        "bbox": [x1, y1, x2 - x1, y2 - y1],
                        "score": 1.0,
                    }
                )
    return found


def _in_process(code: str, folder: Path, *inputs: Any) -> Any:
    """What `code` prints last, as JSON, in a process of its own; inputs lie there as 0.json, 1.json ... Raises RuntimeError."""
    for number, value in enumerate(inputs):
        (folder / f"{number}.json").write_text(json.dumps(value), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"the program ended with status {done.returncode}: {done.stderr[-2000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def _judged(cases: Sequence[Case], results: list[dict[str, Any]], numbers: Any) -> dict[str, Any]:
    """The value of a picture is the number of its boxes in the results file."""
    ids = [result["image_id"] for result in results]
    return {
        "values": [float(ids.count(case["row"]["image"]["id"])) for case in cases],
        "numbers": numbers,
        "results": results,
    }


def coco_rows() -> list[Case]:
    """Pictures in the form of COCO's val2017: descending ids, crowds, areas of masks, six of the categories."""
    return _cases(_rows(91, list(COCO_NAMES), 26), COCO_NAMES, {})


def coco_edge_rows() -> list[Case]:
    """The same with annotations that other sets have: boxes beyond the picture, without height, wholly outside."""
    cases, number = coco_rows(), 0
    for case in cases:
        for one in case["row"]["annotations"]:
            number += 1
            box = one["bbox"]
            if number % 9 == 0:
                box[2] = case["row"]["image"]["width"] - box[0] + 30
            elif number % 13 == 0:
                box[3] = 0
            elif number % 17 == 0:
                box[0] = case["row"]["image"]["width"] + 5
    return cases


def coco_file(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The annotations file of rows."""
    return {
        "info": {},
        "licenses": [],
        "images": [row["image"] for row in rows],
        "annotations": [one for row in rows for one in row["annotations"]],
        "categories": [
            {"id": number, "name": name, "supercategory": "thing"}
            for name, number in COCO_NAMES.items()
        ],
    }


_COCO = """
import json
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
truth = COCO("0.json")
program = COCOeval(truth, truth.loadRes("1.json"), "bbox")
program.evaluate(); program.accumulate(); program.summarize()
print(json.dumps(list(program.stats)))
"""
_STATS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")


def coco(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """COCOeval on the two files."""
    results = _results(cases, COCO_NAMES)
    with tempfile.TemporaryDirectory() as name:
        stats = _in_process(_COCO, Path(name), coco_file([case["row"] for case in cases]), results)
    return _judged(cases, results, dict(zip(_STATS, stats, strict=True)))


def lvis_rows() -> list[Case]:
    """Pictures in the form of LVIS: verified negatives, categories without exhaustive truth, frequencies; no crowds."""
    rows, rng, extra = _rows(92, list(LVIS_NAMES), 30), random.Random(93), {}
    for row in rows:
        there = {one["name"] for one in row["objects"]}
        absent = [
            LVIS_NAMES[name][1] for name in LVIS_NAMES if name not in there and rng.random() < 0.5
        ]
        partial = [
            LVIS_NAMES[name][1] for name in LVIS_NAMES if name in there and rng.random() < 0.3
        ]
        extra[row["id"]] = {
            "coco_url": f"http://images.cocodataset.org/val2017/{row['id']:012}.jpg",
            "neg_category_ids": absent,
            "not_exhaustive_category_ids": partial,
        }
    cases = _cases(rows, {name: number for name, (_, number) in LVIS_NAMES.items()}, extra)
    for case in cases:
        del case["row"]["image"]["file_name"]
        for one in case["row"]["annotations"]:
            del one["iscrowd"]
    return [
        case
        for case in cases
        if case["row"]["annotations"] or case["row"]["image"]["neg_category_ids"]
    ]


def lvis_file(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The annotations file of rows."""
    return {
        "info": {},
        "licenses": [],
        "images": [row["image"] for row in rows],
        "annotations": [one for row in rows for one in row["annotations"]],
        "categories": [
            {
                "id": number,
                "name": name,
                "frequency": often,
                "synset": f"{name}.n.01",
                "synonyms": [name],
                "def": name,
                "image_count": 1,
                "instance_count": 1,
            }
            for name, (often, number) in LVIS_NAMES.items()
        ],
    }


_LVIS = """
import json, sys
import numpy
numpy.float = float  # as numpy had it until 1.24
sys.path.insert(0, {path!r})
from lvis.eval import LVISEval
program = LVISEval("0.json", "1.json", "bbox")
program.run()
print(json.dumps({{name: float(value) for name, value in program.get_results().items()}}))
"""


def lvis(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """LVISEval on the two files. What it ignores (categories whose truth is not known) is in its results file too."""
    ids = {name: number for name, (_, number) in LVIS_NAMES.items()}
    known = {
        case["row"]["image"]["id"]: {one["category_id"] for one in case["row"]["annotations"]}
        | set(case["row"]["image"]["neg_category_ids"])
        for case in cases
    }
    with tempfile.TemporaryDirectory() as name:
        numbers = _in_process(
            _LVIS.format(path=str(code)),
            Path(name),
            lvis_file([case["row"] for case in cases]),
            _results(cases, ids),
        )
    return _judged(cases, _results(cases, ids, known), numbers)


def _ovdeval_names(subset: str) -> dict[str, int]:
    texts = {
        "color": ("person in red", "person in blue", "black dog", "white dog", "yellow cup"),
        "material": ("wooden chair", "metal chair", "glass cup", "paper cup"),
    }
    return {text: number for number, text in enumerate(texts[subset])}


def ovdeval_rows() -> list[Case]:
    """Pictures of two subsets of OVDEval: what is there as `text`, hard negatives as `neg_text`."""
    cases: list[Case] = []
    for seed, subset in enumerate(OVDEVAL, 94):
        ids = _ovdeval_names(subset)
        rows, rng = _rows(seed, list(ids), 16), random.Random(seed)
        extra = {}
        for row in rows:
            row["id"] = 16 - (1000 - row["id"]) // 7
            for one in row["objects"]:
                one["iscrowd"] = 0
            there = list(dict.fromkeys(one["name"] for one in row["objects"]))
            absent = [name for name in ids if name not in there]
            extra[row["id"]] = {
                "text": there,
                "neg_text": rng.sample(absent, rng.randrange(1, len(absent) + 1)) if absent else [],
            }
        cases += [
            {**case, "row": {"subset": subset, **case["row"]}} for case in _cases(rows, ids, extra)
        ]
    return cases


def ovdeval_file(rows: Sequence[Mapping[str, Any]], subset: str) -> dict[str, Any]:
    """The annotations file of a subset's rows."""
    mine = [row for row in rows if row["subset"] == subset]
    return {
        "images": [row["image"] for row in mine],
        "annotations": [one for row in mine for one in row["annotations"]],
        "categories": [
            {"id": number, "name": name} for name, number in _ovdeval_names(subset).items()
        ],
    }


_PRINTED = """
import json
from pycocotools.cocoeval import COCOeval
def _told(self, summarize=COCOeval.summarize):
    summarize(self)
    print("STATS " + json.dumps(list(self.stats)))
COCOeval.summarize = _told
"""


def ovdeval(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """eval.py, whole, subset by subset, with the unrounded numbers that it is about to print."""
    numbers, results = {}, []
    for subset in OVDEVAL:
        mine = [case for case in cases if case["row"]["subset"] == subset]
        ids = _ovdeval_names(subset)
        asked = {
            case["row"]["image"]["id"]: {
                ids[name] for key in ("text", "neg_text") for name in case["row"]["image"][key]
            }
            for case in mine
        }
        found = _results(mine, ids, asked)
        results.append(found)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            truth = ovdeval_file([case["row"] for case in mine], subset)
            (folder / f"{subset}.json").write_text(json.dumps(truth), encoding="utf-8")
            (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
            printed = whole(
                code / "eval.py",
                [
                    "--gt-path",
                    f"{folder}/{subset}.json",
                    "--result-path",
                    "found.json",
                    "--output-path",
                    "out",
                ],
                folder,
                _PRINTED,
            )
        stats = next(line for line in printed.splitlines() if line.startswith("STATS "))
        numbers[subset] = dict(zip(_STATS, json.loads(stats.removeprefix("STATS ")), strict=True))
    judged = _judged(cases, [], numbers)
    return {
        **judged,
        "values": [0.0] * len(cases),
        "results": dict(zip(OVDEVAL, results, strict=True)),
    }
