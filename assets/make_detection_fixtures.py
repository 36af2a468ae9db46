"""Tiny data sets in the public detection and counting formats, for tests and for looking at. Nothing is downloaded.

    python -m assets.make_detection_fixtures                  (re)writes assets/fixtures/{coco,lvis,ovdeval,orsta,pixmo}
    python -m assets.make_detection_fixtures runs/fixtures    the same somewhere else

COCO instances (80 categories with gaps in their ids, a crowd, a picture without objects), LVIS v1, two OVDEval subsets,
Orsta-47k parquet of every ability, PixMo-Count parquet with pictures named by their hash. All show the same objects in
the same pictures, so that every reader must find the same boxes. Generated shapes; no picture or label of the data sets.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

__all__ = [
    "CATEGORIES",
    "CROWD",
    "OBJECTS",
    "ORSTA_ROWS",
    "SIZES",
    "corners",
    "make_all",
    "make_coco",
    "make_lvis",
    "make_orsta",
    "make_ovdeval",
    "make_pixmo",
]

SIZES = ((320, 240), (160, 240), (96, 96))
"""(width, height) of the three pictures; the third shows nothing."""

OBJECTS: tuple[tuple[tuple[str, tuple[float, ...]], ...], ...] = (
    (
        ("person", (20.5, 30.25, 80.0, 160.0)),
        ("dog", (140.0, 150.0, 60.0, 50.0)),
        ("person", (230.0, 40.0, 70.0, 150.0)),
    ),
    (("traffic light", (60.0, 20.0, 25.0, 60.0)),),
    (),
)
"""Per picture: label and [x, y, width, height] in pixels."""

CROWD = ("person", (10.0, 150.0, 140.0, 80.0))
"""A crowd region in the second picture (COCO only)."""

_COLOURS = {"person": (220, 60, 40), "dog": (230, 190, 60), "traffic light": (40, 160, 70)}

_NAMES = (
    (
        "person bicycle car motorcycle airplane bus train truck boat traffic_light fire_hydrant stop_sign parking_meter bench bird "
        "cat dog horse sheep cow elephant bear zebra giraffe backpack umbrella handbag tie suitcase frisbee skis snowboard "
        "sports_ball kite baseball_bat baseball_glove skateboard surfboard tennis_racket bottle wine_glass cup fork knife spoon "
        "bowl banana apple sandwich orange broccoli carrot hot_dog pizza donut cake chair couch potted_plant bed dining_table "
        "toilet tv laptop mouse remote keyboard cell_phone microwave oven toaster sink refrigerator book clock vase scissors "
        "teddy_bear hair_drier toothbrush"
    )
    .replace("_", "\0")
    .split()
)
_GAPS = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
CATEGORIES: dict[str, int] = dict(
    zip(
        (name.replace("\0", " ") for name in _NAMES),
        (i for i in range(1, 91) if i not in _GAPS),
        strict=True,
    )
)
"""COCO's 80 categories: name -> id, which is not contiguous."""


def corners(xywh: tuple[float, ...]) -> list[float]:
    """[x, y, width, height] -> [x1, y1, x2, y2]."""
    x, y, w, h = xywh
    return [x, y, x + w, y + h]


def _picture(number: int, kind: str = "JPEG") -> bytes:
    """The encoded picture `number` (from 0)."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", SIZES[number], (90, 120, 150))
    for label, xywh in OBJECTS[number]:
        ImageDraw.Draw(picture).rectangle(corners(xywh), fill=_COLOURS[label])
    stream = io.BytesIO()
    picture.save(stream, kind, **({"quality": 70} if kind == "JPEG" else {}))
    return stream.getvalue()


def _write(path: Path, data: bytes | Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data, indent=1).encode())
    return path


def _images(**extra: Any) -> list[dict[str, Any]]:
    return [
        {"id": 100 * (3 - i), "width": size[0], "height": size[1], **extra}
        for i, size in enumerate(SIZES)
    ]


def _annotations(
    ids: dict[str, int], images: list[dict[str, Any]], first: int = 1
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for image, objects in zip(images, OBJECTS, strict=True):
        for label, xywh in objects:
            found.append(
                {
                    "id": first + len(found),
                    "image_id": image["id"],
                    "category_id": ids[label],
                    "bbox": list(xywh),
                    "area": round(0.8 * xywh[2] * xywh[3], 2),
                    "segmentation": [],
                    "iscrowd": 0,
                }
            )
    return found


def make_coco(folder: Path) -> str:
    """coco/annotations/instances_val2017.json with coco/val2017/; image ids descend, as no file promises an order."""
    root = folder / "coco"
    images = _images()
    for number, image in enumerate(images):
        image["file_name"] = f"{image['id']:012d}.jpg"
        _write(root / "val2017" / image["file_name"], _picture(number))
    annotations = _annotations(CATEGORIES, images, first=7)
    annotations.append(
        {
            "id": 900,
            "image_id": images[1]["id"],
            "category_id": CATEGORIES[CROWD[0]],
            "bbox": list(CROWD[1]),
            "area": CROWD[1][2] * CROWD[1][3],
            "segmentation": {"counts": [], "size": [240, 160]},
            "iscrowd": 1,
        }
    )
    categories = [
        {"id": number, "name": name, "supercategory": "thing"}
        for name, number in CATEGORIES.items()
    ]
    return str(
        _write(
            root / "annotations" / "instances_val2017.json",
            {
                "info": {"year": 2017},
                "licenses": [],
                "images": images,
                "annotations": annotations,
                "categories": categories,
            },
        )
    )


def make_lvis(folder: Path) -> str:
    """lvis/lvis_v1_val.json with lvis/train2017/ and lvis/val2017/: pictures by coco_url, verified negatives, frequencies."""
    root = folder / "lvis"
    names = {
        "person": (1, "f"),
        "dog": (2, "c"),
        "traffic light": (3, "r"),
        "cat": (4, "f"),
        "bow_(weapon)": (5, "r"),
    }
    images = _images()
    for number, (image, split) in enumerate(
        zip(images, ("train2017", "val2017", "val2017"), strict=True)
    ):
        image |= {
            "coco_url": f"http://images.cocodataset.org/{split}/{image['id']:012d}.jpg",
            "flickr_url": "",
            "neg_category_ids": ([4, 5], [1, 2], [3])[number],
            "not_exhaustive_category_ids": ([1], [], [])[number],
        }
        _write(root / split / f"{image['id']:012d}.jpg", _picture(number))
    ids = {name: number for name, (number, _) in names.items()}
    categories = [
        {
            "id": number,
            "name": name.replace(" ", "_"),
            "frequency": often,
            "synset": f"{name}.n.01",
            "synonyms": [name],
            "def": name,
            "image_count": 1,
            "instance_count": 1,
        }
        for name, (number, often) in names.items()
    ]
    annotations = [
        {k: v for k, v in a.items() if k != "iscrowd"} for a in _annotations(ids, images)
    ]
    return str(
        _write(
            root / "lvis_v1_val.json",
            {
                "info": {},
                "licenses": [],
                "images": images,
                "annotations": annotations,
                "categories": categories,
            },
        )
    )


def make_ovdeval(folder: Path) -> str:
    """ovdeval/ with color.json, negation.json and their folders of pictures; ids count from 0 as in the release."""
    root = folder / "ovdeval"
    for subset in ("color", "negation"):
        positive = {
            "person": f"person in red ({subset})",
            "dog": "yellow dog",
            "traffic light": "green traffic light",
        }
        negative = ["person in blue", "black dog"]
        ids = {name: number for number, name in enumerate([*positive.values(), *negative])}
        images = [
            {
                **image,
                "id": number,
                "file_name": f"{subset}_{number}.jpg",
                "text": list(dict.fromkeys(positive[label] for label, _ in OBJECTS[number])),
                "neg_text": negative,
            }
            for number, image in enumerate(_images())
        ]
        for number, image in enumerate(images):
            _write(root / subset / image["file_name"], _picture(number))
        annotations = _annotations(
            {label: ids[name] for label, name in positive.items()}, images, first=0
        )
        _write(
            root / f"{subset}.json",
            {
                "categories": [
                    {"supercategory": "object", "id": number, "name": name}
                    for name, number in ids.items()
                ],
                "annotations": annotations,
                "images": images,
            },
        )
    return str(root)


def _thousandths(number: int, index: int) -> list[int]:
    (width, height), box = SIZES[number], corners(OBJECTS[number][index][1])
    return [round(v / (height if i % 2 else width) * 1000) for i, v in enumerate(box)]


def _boxes(number: int, *indices: int) -> str:
    """The truth as V-Triune writes it: a Python list with single quotes, in thousandths."""
    return str(
        [{"bbox_2d": _thousandths(number, i), "label": OBJECTS[number][i][0]} for i in indices]
    )


_DETECT = (
    "<image>\nIdentify all occurrences of the specified category in the image:\n- person\n- dog\n- cat\n\nAfterward, "
    "present your final detection results enclosed within <answer> and </answer> tags."
)
ORSTA_ROWS: dict[str, dict[str, Any]] = {
    "detection_v3det": {
        "picture": 0,
        "content": _DETECT,
        "answer": _boxes(0, 0, 1, 2),
        "verifier": "detection",
    },
    "grounding_d_cube": {
        "picture": 1,
        "content": "<image>\nFind: traffic light",
        "answer": _boxes(1, 0),
        "verifier": "detection",
    },
    "counting_clevr": {"picture": 0, "content": "<image>How many people are there?", "answer": "2"},
    "ocr_estvqa": {"picture": 1, "content": "<image>What does the sign say?", "answer": "EXIT 12"},
    "math_mm_math": {
        "picture": 2,
        "content": "<image>How long is AB?",
        "answer": "",
        "truth": "\\boxed{\\frac{3}{2}}",
    },
    "chart_chartqa": {
        "picture": 2,
        "content": "<image>Which year has the highest bar?",
        "answer": "2017",
    },
    "puzzle_puzzlevqa": {
        "picture": 1,
        "content": "<image>What comes next?\nA. red\nB. green",
        "answer": "B",
    },
    "science_virl": {"picture": 1, "content": "<image>What is the mass in kg?", "answer": "4.5"},
}
"""File name part {ability}_{source} -> the row's picture, prompt and truth."""


def _orsta_schema() -> Any:
    import pyarrow as pa

    text, small = pa.string(), pa.float32()
    ratios = pa.struct(
        [
            (name, small)
            for name in (
                "iou_max_label_first",
                "iou_max_iou_first",
                "iou_completeness",
                "map",
                "map50",
                "map75",
            )
        ]
    )
    parameters = pa.struct([("det_verifier_normalized", pa.bool_()), ("det_reward_ratio", ratios)])
    return pa.schema(
        [
            ("data_source", text),
            ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", text)]))),
            ("prompt", pa.list_(pa.struct([("content", text), ("role", text)]))),
            ("ability", text),
            (
                "reward_model",
                pa.struct(
                    [
                        ("answer", text),
                        ("ground_truth", text),
                        ("accuracy_ratio", small),
                        ("format_ratio", small),
                        ("verifier", text),
                        ("verifier_parm", parameters),
                    ]
                ),
            ),
            ("extra_info", pa.struct([("id", text), ("image_path", text)])),
        ]
    )


def make_orsta(folder: Path) -> str:
    """orsta/train/ with one file per ability, named train_{ability}_{source}_{rows}.parquet; returns the folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = folder / "orsta" / "train"
    root.mkdir(parents=True, exist_ok=True)
    for name, entry in ORSTA_ROWS.items():
        ability, _, source = name.partition("_")
        boxes = entry.get("verifier") == "detection"
        ratios = (
            {
                "iou_max_label_first": 1.0,
                "iou_max_iou_first": 0.0,
                "iou_completeness": 0.3,
                "map": 0.0,
                "map50": 0.0,
                "map75": 0.0,
            }
            if boxes
            else dict.fromkeys(("iou_max_label_first", "map"))
        )
        truth = entry.get("truth") or (
            f"<answer> {entry['answer']} </answer>" if boxes else f"\\boxed{{{entry['answer']}}}"
        )
        row = {
            "data_source": source,
            "images": [{"bytes": _picture(entry["picture"], "PNG"), "path": None}],
            "prompt": [{"content": entry["content"], "role": "user"}],
            "ability": ability,
            "reward_model": {
                "answer": entry["answer"],
                "ground_truth": truth,
                "accuracy_ratio": 1.0,
                "format_ratio": 0.1 if boxes else 0.0,
                "verifier": entry.get("verifier", "mathverify"),
                "verifier_parm": {
                    "det_verifier_normalized": True if boxes else None,
                    "det_reward_ratio": ratios,
                },
            },
            "extra_info": {"id": None, "image_path": f"images/{name}.png"},
        }
        pq.write_table(
            pa.Table.from_pylist([row], schema=_orsta_schema()), root / f"train_{name}_1.parquet"
        )
    return str(root)


def make_pixmo(folder: Path) -> str:
    """pixmo/ with train and validation parquet and pictures/<sha256>.jpg (one row each for persons and traffic lights)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = folder / "pixmo"
    schema = pa.schema(
        [
            ("image_url", pa.string()),
            ("image_sha256", pa.string()),
            ("count", pa.int32()),
            ("points", pa.struct([("x", pa.list_(pa.float32())), ("y", pa.list_(pa.float32()))])),
            ("label", pa.string()),
        ]
    )
    rows = []
    for number, label in ((0, "person"), (1, "traffic light"), (2, "dog")):
        data = _picture(number)
        name = hashlib.sha256(data).hexdigest()
        _write(root / "pictures" / f"{name}.jpg", data)
        boxes = [corners(xywh) for found, xywh in OBJECTS[number] if found == label]
        points = {"x": [(b[0] + b[2]) / 2 for b in boxes], "y": [(b[1] + b[3]) / 2 for b in boxes]}
        rows.append(
            {
                "image_url": f"https://example.com/{number}.jpg",
                "image_sha256": name,
                "count": len(boxes),
                "points": points,
                "label": label,
            }
        )
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), root / "train-00000-of-00001.parquet")
    blind = [{**row, "points": None} for row in rows]
    pq.write_table(
        pa.Table.from_pylist(blind, schema=schema), root / "validation-00000-of-00001.parquet"
    )
    return str(root)


def make_all(folder: Path) -> dict[str, str]:
    """Every fixture below `folder`: format -> path."""
    return {
        "coco": make_coco(folder),
        "lvis": make_lvis(folder),
        "ovdeval": make_ovdeval(folder),
        "orsta": make_orsta(folder),
        "pixmo_count": make_pixmo(folder),
    }


if __name__ == "__main__":
    if len(sys.argv) > 2:
        raise SystemExit(__doc__)
    target = (
        Path(sys.argv[1]) if len(sys.argv) == 2 else Path(__file__).resolve().parent / "fixtures"
    )
    for kind, where in make_all(target).items():
        print(f"{kind:12} {where}")
