"""Tiny data sets in the public grounding formats, for tests and for looking at. Nothing is downloaded.

    python -m assets.make_grounding_fixtures runs/fixtures

Writes a REFER release (a Python 2 pickle as in the wild: protocol 2, byte strings, latin-1, names that end in _16.jpg),
VLM-R1 JSON and JSON Lines, EasyR1 parquet with embedded pictures, and mmrl's own JSON Lines. All describe the same
objects in the same two pictures, so that every reader must find the same boxes.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

__all__ = [
    "BOXES",
    "PHRASES",
    "SIZES",
    "make_all",
    "make_easyr1",
    "make_own",
    "make_refer",
    "make_vlm_r1",
    "python2_pickle",
]

SIZES = ((640, 480), (300, 500))
BOXES = ((100.5, 50.25, 300.0, 400.0), (10.0, 20.0, 110.0, 220.0))
PHRASES = (("the café on the left", "left shop"), ("tall lamp", "lamp"))


def _pictures(folder: Path) -> list[str]:
    from PIL import Image, ImageDraw

    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number, (size, box) in enumerate(zip(SIZES, BOXES, strict=True), 1):
        picture = Image.new("RGB", size, (90, 120, 150))
        ImageDraw.Draw(picture).rectangle(box, fill=(220, 60, 40))
        name = f"COCO_train2014_{number:012d}.jpg"
        picture.save(folder / name, quality=80)
        names.append(name)
    return names


def python2_pickle(value: Any) -> bytes:
    """`value` (lists, dicts, str, int, float) as Python 2 pickled it: protocol 2, text as SHORT_BINSTRING bytes."""

    def emit(item: Any) -> bytes:
        if isinstance(item, str):
            data = item.encode("latin-1")
            return b"U" + bytes([len(data)]) + data
        if isinstance(item, int):
            return b"J" + struct.pack("<i", item)
        if isinstance(item, float):
            return b"G" + struct.pack(">d", item)
        if isinstance(item, list):
            return b"](" + b"".join(map(emit, item)) + b"e"
        return b"}(" + b"".join(emit(k) + emit(v) for k, v in item.items()) + b"u"

    return b"\x80\x02" + emit(value) + b"."


def make_refer(folder: Path) -> str:
    """A release folder `refcoco` with refs(unc).p, instances.json and images/; returns it. One ref per split."""
    root = folder / "refcoco"
    names = _pictures(root / "images")
    refs, images, annotations = [], [], []
    for number, (name, size, box, phrases) in enumerate(
        zip(names, SIZES, BOXES, PHRASES, strict=True), 1
    ):
        refs.append(
            {
                "ref_id": 10 + number,
                "ann_id": 100 + number,
                "category_id": 1,
                "image_id": number,
                "file_name": name.replace(".jpg", "_16.jpg"),
                "split": "val" if number == 1 else "testA",
                "sent_ids": [2 * number, 2 * number + 1],
                "sentences": [
                    {"raw": p.upper(), "sent": p, "sent_id": 2 * number + i, "tokens": p.split()}
                    for i, p in enumerate(phrases)
                ],
            }
        )
        images.append({"id": number, "file_name": name, "width": size[0], "height": size[1]})
        xywh = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
        annotations.append({"id": 100 + number, "image_id": number, "category_id": 1, "bbox": xywh})
    (root / "refs(unc).p").write_bytes(python2_pickle(refs))
    (root / "instances.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    return str(root)


def _rel1000(box: tuple[float, ...], size: tuple[int, int]) -> list[int]:
    return [round(v / size[i % 2] * 1000) for i, v in enumerate(box)]


def make_vlm_r1(folder: Path) -> tuple[str, str]:
    """(rec.json, train.jsonl) with their pictures in coco/."""
    names = _pictures(folder / "coco")
    asking = "Please provide the bounding box coordinate of the region this sentence describes: "
    rec: list[dict[str, Any]] = []
    train: list[dict[str, Any]] = []
    for name, size, box, phrases in zip(names, SIZES, BOXES, PHRASES, strict=True):
        rec.append(
            {
                "image": f"coco/{name}",
                "problem": asking + phrases[0],
                "normal_caption": phrases[0],
                "solution": list(box),
                "normalized_solution": _rel1000(box, size),
            }
        )
        train.append(
            {
                "id": len(train) + 1,
                "image": [f"coco/{name}"],
                "conversations": [
                    {"from": "human", "value": "<image>" + asking + phrases[0]},
                    {"from": "gpt", "value": f"It is here: {list(box)}."},
                ],
            }
        )
    (folder / "rec.json").write_text(json.dumps(rec))
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, train)) + "\n")
    return str(folder / "rec.json"), str(folder / "train.jsonl")


def make_easyr1(folder: Path) -> str:
    """train.parquet with embedded pictures and answers as text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = _pictures(folder / "pictures")
    rows = [
        {
            "problem": f"<image>{phrases[0]}",
            "answer": json.dumps(list(box)),
            "images": [{"bytes": (folder / "pictures" / name).read_bytes(), "path": name}],
        }
        for name, box, phrases in zip(names, BOXES, PHRASES, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return str(folder / "train.parquet")


def make_own(folder: Path) -> str:
    """data.jsonl, one row in each of the frames abs_orig and rel1."""
    names = _pictures(folder / "images")
    rows: list[dict[str, Any]] = [
        {"id": f"own-{i}", "image": f"images/{name}", "question": phrases[0], "answer": list(box)}
        for i, (name, box, phrases) in enumerate(zip(names, BOXES, PHRASES, strict=True))
    ]
    rows[1] |= {
        "frame": "rel1",
        "answer": [v / SIZES[1][i % 2] for i, v in enumerate(BOXES[1])],
        "source": "mine",
        "params": {"note": 1},
    }
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(folder / "data.jsonl")


def make_all(folder: Path) -> dict[str, str]:
    """Every fixture below `folder`: format -> path."""
    rec, train = make_vlm_r1(folder / "vlm_r1")
    return {
        "refer": make_refer(folder),
        "vlm_r1_json": rec,
        "vlm_r1_jsonl": train,
        "easyr1": make_easyr1(folder / "easyr1"),
        "own": make_own(folder / "own"),
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    for kind, where in make_all(Path(sys.argv[1])).items():
        print(f"{kind:14} {where}")
